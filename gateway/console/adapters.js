// Adapters: where each is on every replica, its versions, a new one deployed, the last one taken back.

import { html, useState } from "/console/vendor/preact-htm.js";
import { call, rows } from "/console/api.js";
import { Badge, bytes, digest, Problem, Table, useAction, usePolled, when } from "/console/parts.js";

const MARK = { gpu: "●", host: "◐", disk: "○" };
const hex = (text) => text.split(":").at(-1);
const SAID = { gpu: "in a slot", host: "in host memory", disk: "on disk" };

export function Adapters() {
  const [turn, setTurn] = useState(0);
  const [open, setOpen] = useState(null);
  const [wanted, setWanted] = useState("");
  const [awaited, setAwaited] = useState(null);
  const { data, error } = usePolled(() => rows("adapters"), 2000, [turn]);
  const again = () => setTurn((n) => n + 1);
  if (!data) return html`<${Problem} error=${error} />`;
  const replicas = [...new Set(data.flatMap((one) => one.replicas))].sort();
  const found = data.filter((one) => one.adapter.includes(wanted));
  const chosen = data.find((one) => one.adapter === open);
  return html`<${Problem} error=${error} />
    <${Deploy} done=${(name, version) => { setAwaited({ name, version }); setOpen(name); again(); }} />
    ${awaited && html`<${Coming} ...${awaited} one=${data.find((one) => one.adapter === awaited.name)} />`}
    <label class="row">Find <input type="search" value=${wanted} oninput=${(e) => setWanted(e.target.value)} /> <span class="quiet">${found.length} of ${data.length}</span></label>
    ${chosen && html`<${Adapter} key=${chosen.adapter} one=${chosen} done=${(version) => { setAwaited(version && { name: chosen.adapter, version }); again(); }} />`}
    <p class="quiet">${Object.entries(MARK).map(([tier, mark]) => `${mark} ${SAID[tier]}`).join("   ")}</p>
    <${Table} label="Adapters" empty="No adapter here." rows=${found.slice(0, 500)} columns=${[
      ["adapter", (one) => html`<button class="link" aria-expanded=${one.adapter === open} onclick=${() => setOpen(one.adapter === open ? null : one.adapter)}>${one.adapter}</button>`],
      ["state", (one) => html`<${Badge} kind=${one.status === "ready" ? "good" : one.status === "failed" ? "bad" : "warn"}>${one.status ?? "not served"}<//>`],
      ["version", (one) => html`<code>${digest(one.record?.current || one.digest)}</code>`],
      ["rank", (one) => one.rank, "number"], ["size", (one) => bytes(one.size_bytes), "number"],
      ["owner", (one) => one.record?.owner || "–"],
      ...replicas.map((name) => [name, (one) => one.places.filter((place) => place.replica === name).map((place) =>
        html`<span title=${`${place.status}, ${SAID[place.tier]}${place.inferred ? " (inferred)" : ""}${place.pinned ? ", pinned" : ""}${place.reason ? `: ${place.reason}` : ""}`}>${place.status === "failed" ? "✕" : MARK[place.tier]}${place.running ? html`<b> ${place.running}</b>` : ""}</span> `)]),
    ]} />`;
}

/** Where a version of an adapter is, and the words of those that refused it. What failed without a digest may be any. */
function placesOf(one, version) {
  const places = (one?.places ?? []).filter((place) => hex(place.digest).startsWith(version) || (place.status === "failed" && !place.digest));
  return {
    there: places.filter((place) => place.status !== "failed").map((place) => place.replica).join(", "),
    refused: places.filter((place) => place.status === "failed" && place.reason).map((place) => `${place.replica}: ${place.reason}`).join("; "),
  };
}

/** How far a version has come that was asked for: routable is what its replicas say, not what was wished. */
function Coming({ name, version, one }) {
  const { there, refused } = placesOf(one, version);
  const others = (one?.others ?? []).map((other) => `${name}@${digest(hex(other))}`).join(", ");
  return html`<p role="status" class=${there ? "done" : refused ? "problem" : "quiet"}>${there
    ? `${name} is version ${digest(version)} on ${there}: requests go there.`
    : refused ? `${name} was not taken. ${refused}`
    : `${name}: waiting for a replica to have version ${digest(version)} …`}${!there && others && html`<br />
    ${others} still serves; ${name} alone does not until a replica takes the new version, or it is rolled back.`}</p>`;
}

/** Of one version, in its row: where it serves, and whether it was refused. */
function Serves({ one, version }) {
  const { there, refused } = placesOf(one, version);
  return html`${there || (refused ? "" : "–")} ${refused && html`<${Badge} kind="bad">failed<//>`}`;
}

function Deploy({ done }) {
  const [name, setName] = useState(""), [path, setPath] = useState(""), [version, setVersion] = useState("");
  const { busy, error, run } = useAction();
  const deploy = (event) => {
    event.preventDefault();
    run(async () => {
      const { record } = await call("POST", `adapters/${encodeURIComponent(name)}/versions`, { body: { path, digest: version } });
      setName(""); setPath(""); setVersion(""); done(name, record.current);
    });
  };
  return html`<form class="row" onsubmit=${deploy} aria-label="Deploy an adapter">
    <label>Deploy <input name="adapter" required placeholder="name" value=${name} oninput=${(e) => setName(e.target.value)} autocomplete="off" /></label>
    <label>from <input name="path" required class="long" placeholder="folder or address, as replicas see it" value=${path} oninput=${(e) => setPath(e.target.value)} autocomplete="off" /></label>
    <label>version <input name="version" required pattern="[0-9a-f]{12,64}" placeholder="content digest" title="the content's digest, as loraplex adapter check prints it" value=${version} oninput=${(e) => setVersion(e.target.value)} autocomplete="off" /></label>
    <button disabled=${busy}>${busy ? "Deploying …" : "Deploy"}</button><${Problem} error=${error} /></form>`;
}

function Adapter({ one, done }) {
  const { busy, error, run } = useAction();
  const record = one.record, path = `adapters/${encodeURIComponent(one.adapter)}`;
  const { refused } = placesOf(one, record?.current ?? "");
  const back = (to) => confirm(`Serve ${one.adapter} as ${to ? digest(to) : "its version before"}? Running answers finish on theirs.`)
    && run(async () => {
      const now = await call("POST", `${path}/rollback`, { body: to ? { digest: to } : {}, etag: record.version });
      done(now.record.current);
    });
  const remove = () => confirm(`Remove ${one.adapter} from the registry, and from the replicas it was loaded on?`)
    && run(async () => { await call("DELETE", path, { etag: record.version }); done(null); });
  return html`<section class="card wide" aria-label="Adapter ${one.adapter}"><h3>${one.adapter}</h3>
    <${Problem} error=${error} />
    ${record ? html`
      <${Table} label="Versions" empty="No version on record." rows=${record.versions} columns=${[
        ["version", (v) => html`<code>${digest(v.digest)}</code> ${v.digest === record.current && html`<${Badge} kind="good">current<//>`}`],
        ["serves on", (v) => html`<${Serves} one=${one} version=${v.digest} />`],
        ["added", (v) => when(v.created)], ["from", (v) => v.path || "–"], ["note", (v) => v.note || "–"],
        ["", (v) => v.digest !== record.current && html`<button disabled=${busy} onclick=${() => back(v.digest)}>Serve this</button>`],
      ]} />
      ${refused && html`<p class="names bad">${refused}</p>`}
      <p class="row">${record.previous && html`<button disabled=${busy} onclick=${() => back("")}>Roll back to ${digest(record.previous)}</button>`}
        <button class="danger" disabled=${busy} onclick=${remove}>Remove</button></p>`
    : html`<p class="quiet">The replicas serve it; it has no record, so it has no versions to go back to.</p>`}
  </section>`;
}
