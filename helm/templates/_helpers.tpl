{{- define "loraplex.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select pods: never change them on a living release. Call with (list $ "gateway"). */}}
{{- define "loraplex.selector" -}}
app.kubernetes.io/name: loraplex
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "loraplex.labels" -}}
{{ include "loraplex.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end -}}

{{/* Call with (list $ .Values.gateway.image). */}}
{{- define "loraplex.image" -}}
{{- $image := index . 1 -}}
{{- printf "%s:%s" $image.repository ($image.tag | default (index . 0).Chart.AppVersion) | quote -}}
{{- end -}}

{{/* What every pod has in common. */}}
{{- define "loraplex.podHabits" -}}
automountServiceAccountToken: false
# Links would add LORAPLEX_… variables of Kubernetes' own to an environment that overrides the files.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "loraplex.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Secret with admin-key, fleet-token and, when the store is not ours, store-url. */}}
{{- define "loraplex.keysSecret" -}}
{{- .Values.secrets.existing | default (printf "%s-keys" (include "loraplex.fullname" .)) -}}
{{- end -}}

{{/*
A secret value: the one given, else the one the cluster already holds, else a new one.
Call with (list $ GIVEN SECRET-NAME KEY). The answer is remembered for this rendering, so that two
templates that ask get the same.
*/}}
{{- define "loraplex.secretValue" -}}
{{- $root := index . 0 -}}
{{- $name := index . 2 -}}
{{- $key := index . 3 -}}
{{- if index . 1 -}}
{{- index . 1 -}}
{{- else -}}
{{- $known := $root.Values.secrets._made | default dict -}}
{{- $id := printf "%s/%s" $name $key -}}
{{- if not (hasKey $known $id) -}}
{{- $held := (lookup "v1" "Secret" $root.Release.Namespace $name).data | default dict -}}
{{- $_ := set $known $id (ternary (get $held $key | b64dec) (randAlphaNum 40) (hasKey $held $key)) -}}
{{- $_ := set $root.Values.secrets "_made" $known -}}
{{- end -}}
{{- get $known $id -}}
{{- end -}}
{{- end -}}

{{- define "loraplex.adminKey" -}}
{{- include "loraplex.secretValue" (list . .Values.secrets.adminKey (include "loraplex.keysSecret" .) "admin-key") -}}
{{- end -}}

{{- define "loraplex.fleetToken" -}}
{{- include "loraplex.secretValue" (list . .Values.secrets.fleetToken (include "loraplex.keysSecret" .) "fleet-token") -}}
{{- end -}}

{{- define "loraplex.valkeyPassword" -}}
{{- include "loraplex.secretValue" (list . .Values.valkey.password (printf "%s-valkey" (include "loraplex.fullname" .)) "password") -}}
{{- end -}}

{{/* One environment variable out of a Secret. Call with (list NAME SECRET KEY). */}}
{{- define "loraplex.secretEnv" -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef: {name: {{ index . 1 }}, key: {{ index . 2 }}}
{{- end -}}

{{/*
Every pool of replicas, as {NAME: values}: `replica` itself, and each of `pools` laid over it. One pool
is one StatefulSet with one base. Call with `fromYaml`.
*/}}
{{- define "loraplex.pools" -}}
{{- $pools := dict "replica" .Values.replica -}}
{{- range $name, $over := .Values.pools -}}
{{- $merged := mergeOverwrite (deepCopy $.Values.replica) $over -}}
{{- /* A volume has one source: another one replaces it. */ -}}
{{- range $part := list "base" "adapters" -}}
{{- with dig $part "volume" nil $over -}}
{{- $_ := set (get $merged $part) "volume" . -}}
{{- end -}}
{{- end -}}
{{- $_ := set $pools (printf "replica-%s" $name) $merged -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}

{{/* Labels that select one pool's pods. Call with (list $ "replica"). */}}
{{- define "loraplex.poolSelector" -}}
{{ include "loraplex.selector" (list (index . 0) "replica") }}
loraplex.io/pool: {{ index . 1 }}
{{- end -}}

{{/* Spread over nodes and zones where the cluster can. Call with (list $ "gateway"). */}}
{{- define "loraplex.spread" -}}
topologySpreadConstraints:
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "loraplex.selector" $ | nindent 8 }}
{{- end }}
{{- end -}}

{{/*
The gateway's file. No secret here: admin.key, fleet.token and store.url come from the environment.
No replica is listed: the headless service names the pods of every pool, as they come and go.
*/}}
{{- define "loraplex.gatewayConfig" -}}
{{- $name := include "loraplex.fullname" . -}}
{{- $chart := dict
  "listen" (dict "host" "0.0.0.0" "port" 8080)
  "admin" (dict "host" "0.0.0.0" "port" 8081)
  "store" (dict "prefix" .Values.store.prefix "timeout_s" .Values.store.timeoutSeconds "spool" "/var/lib/loraplex/ledger.spool")
  "discovery" (dict "services" (list (dict "srv" (printf "_http._tcp.%s-replica.%s.svc" $name .Release.Namespace)))) }}
{{- if .Values.tracing.endpoint }}
{{- $_ := set $chart "tracing" (pick .Values.tracing "endpoint" "ratio") }}
{{- end }}
{{- toYaml (merge $chart .Values.gateway.config) -}}
{{- end -}}

{{/*
The replica's file. No secret here: fleet_token comes from the environment; name from the pod.
Call with (list $ POOL-VALUES).
*/}}
{{- define "loraplex.replicaConfig" -}}
{{- $tracing := (index . 0).Values.tracing -}}
{{- $pool := index . 1 -}}
{{- $adapters := "/adapters" -}}
{{- if $pool.config.adapter_store -}}
{{- if not $pool.cache -}}
{{- fail "replica.cache: adapter_store needs a volume for what it fetches, e.g. {volume: {emptyDir: {}}}" -}}
{{- end -}}
{{- $adapters = "/var/cache/loraplex" -}}
{{- end -}}
{{- $chart := dict "base" "/models" "adapters" $adapters "host" "0.0.0.0" "port" 8000 -}}
{{- if $tracing.endpoint -}}
{{- $_ := set $chart "tracing" (pick $tracing "endpoint" "ratio") -}}
{{- end -}}
{{- toYaml (merge $chart $pool.config) -}}
{{- end -}}

{{/* What the collector asks for, out of a Secret: of the exporter's own environment. */}}
{{- define "loraplex.tracingEnv" -}}
{{- with .Values.tracing.headersSecret -}}
{{- include "loraplex.secretEnv" (list "OTEL_EXPORTER_OTLP_HEADERS" . "headers") -}}
{{- end -}}
{{- end -}}
