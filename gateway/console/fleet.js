// The fleet, live: each replica with its slots, its memory behind them, its queue; plots of the gateway.

import { html, useState } from "/console/vendor/preact-htm.js";
import { call, counters, readiness, rows } from "/console/api.js";
import { Badge, Plot, Problem, useAction, useHistory, usePolled } from "/console/parts.js";

async function look() {
  const [replicas, residency, ready, metrics] = await Promise.all(
    [rows("replicas"), rows("residency"), readiness(), counters()]);
  const held = Object.fromEntries(residency.map((row) => [row.replica, row.adapters]));
  return { at: Date.now() / 1e3, replicas, held, ready, metrics };
}

const value = (metrics, name) => metrics.find((one) => one.name === `loraplex_gateway_${name}`)?.value ?? 0;

function byTenant(metrics) {
  const found = {};
  for (const { name, labels, value: count } of metrics) {
    if (name !== "loraplex_gateway_tokens_total" || labels.kind === "cached") continue;
    found[labels.tenant] = (found[labels.tenant] ?? 0) + count * (labels.kind === "completion" ? 2 : 1);
  }
  return found;
}

export function Fleet() {
  const { data, error } = usePolled(look, 1000);
  const past = useHistory(data?.at ?? null, data && {
    queued: value(data.metrics, "queued"), flight: value(data.metrics, "in_flight"), served: byTenant(data.metrics),
  });
  if (!data) return html`<${Problem} error=${error} /><p class="quiet">Looking at the fleet …</p>`;
  const degraded = data.ready.degraded ?? [];
  return html`
    <${Problem} error=${error} />
    ${degraded.length > 0 && html`<p class="problem" role="alert">Degraded: ${degraded.map((name) => name.replaceAll("_", " ")).join(", ")}</p>`}
    <div class="cards">${data.replicas.map((one) => html`<${Replica} key=${one.replica} one=${one} held=${data.held[one.replica] ?? []} />`)}</div>
    <div class="plots">
      <${Plot} title="Requests" unit="" times=${past.times} series=${{
        queued: past.readings.map((one) => one.queued), "at replicas": past.readings.map((one) => one.flight) }} />
      <${Served} past=${past} />
    </div>`;
}

/** Weighted tokens a second for the busiest tenants: equal lines are a fair fleet. */
function Served({ past }) {
  const last = past.readings.at(-1).served, first = past.readings[0].served;
  const names = Object.keys(last).sort((a, b) => (last[b] - (first[b] ?? 0)) - (last[a] - (first[a] ?? 0))).slice(0, 6);
  const series = {};
  for (const name of names) {
    series[name] = past.readings.map((one, i) => i === 0 ? null
      : ((one.served[name] ?? 0) - (past.readings[i - 1].served[name] ?? 0)) / (past.times[i] - past.times[i - 1]));
  }
  return html`<${Plot} title="Served, by tenant" unit="weighted tokens/s" times=${past.times} series=${series} />`;
}

function Replica({ one, held }) {
  const { busy, error, run } = useAction();
  const [all, setAll] = useState(false);
  const tiers = { gpu: [], host: [], disk: [] };
  for (const state of held) (state.status === "failed" ? [] : tiers[state.tier]).push(state);
  const failed = held.filter((state) => state.status === "failed");
  const up = one.state === "up", draining = one.state === "draining";
  const slots = [...tiers.gpu, ...held.filter((s) => s.status === "loading" && s.tier !== "gpu")];
  const empty = Math.max(one.slots - slots.length, 0);
  const pages = one.pages_total ? 1 - one.pages_free / one.pages_total : 0;
  const turn = (verb) => run(() => call("POST", `replicas/${encodeURIComponent(one.replica)}/${verb}`));
  return html`<section class="card" aria-label="Replica ${one.replica}">
    <header><h3>${one.replica}</h3><${Badge} kind=${up ? "good" : draining ? "warn" : "bad"}>${one.state.replace("_", " ")}<//></header>
    <dl class="facts">
      <div><dt>base</dt><dd>${one.base || "–"}</dd></div>
      <div><dt>in flight</dt><dd>${one.in_flight} of ${one.limit}</dd></div>
      <div><dt>running</dt><dd>${one.running}</dd></div>
      <div><dt>waiting</dt><dd>${one.waiting}</dd></div>
      <div><dt>pages used</dt><dd>${(pages * 100).toFixed(1)} %</dd></div>
    </dl>
    <ul class="slots" aria-label="Slots">
      ${slots.map((state) => html`<li class="slot ${state.status} ${state.running ? "busy" : ""}"
        title="${state.adapter}, rank ${state.rank}, ${state.running} running${state.pinned ? ", pinned" : ""}">
        ${state.pinned ? "📌 " : ""}<span class="adapter">${state.adapter}</span>${state.running > 0 && html` <b>${state.running}</b>`}</li>`)}
      ${Array.from({ length: Math.min(empty, all ? empty : 12) }, () => html`<li class="slot free" aria-label="free slot"></li>`)}
      ${empty > 12 && !all && html`<li class="more">and ${empty - 12} free</li>`}
    </ul>
    <p class="tiers">${tiers.host.length} in host memory, ${tiers.disk.length} on disk only${failed.length > 0 && html`, <strong>${failed.length} failed</strong>`}</p>
    ${(tiers.host.length > 0 || failed.length > 0) && html`<details ontoggle=${(event) => setAll(event.target.open)}><summary>names</summary>
      <p class="names">host: ${tiers.host.map((s) => s.adapter).join(", ") || "none"}</p>
      ${failed.map((s) => html`<p class="names bad">${s.adapter}: ${s.reason}</p>`)}
    </details>`}
    <footer>
      ${up && html`<button disabled=${busy} onclick=${() => turn("drain")}>Drain</button>`}
      ${draining && html`<button disabled=${busy} onclick=${() => turn("resume")}>Resume</button>`}
      <${Problem} error=${error} />
    </footer>
  </section>`;
}
