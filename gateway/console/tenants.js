// Tenants: what each may do, changed while traffic runs.

import { html, useEffect, useRef, useState } from "/console/vendor/preact-htm.js";
import { call, get, rows } from "/console/api.js";
import { Badge, Problem, short, Table, useAction, usePolled, when } from "/console/parts.js";

const LIMITS = [
  ["requests_per_min", "Requests a minute"],
  ["tokens_per_min", "Tokens a minute"],
  ["concurrency", "At once"],
];

export function Tenants() {
  const [turn, setTurn] = useState(0);
  const [open, setOpen] = useState(null);
  const { data, error } = usePolled(() => rows("tenants"), 3000, [turn]);
  const again = () => setTurn((n) => n + 1);
  if (!data) return html`<${Problem} error=${error} />`;
  const chosen = data.find((one) => one.id === open);
  return html`<${Problem} error=${error} />
    <${Create} done=${(id) => { setOpen(id); again(); }} />
    <${Table} label="Tenants" empty="No tenant yet." rows=${data} columns=${[
      ["tenant", (one) => html`<button class="link" aria-expanded=${one.id === open} onclick=${() => setOpen(one.id === open ? null : one.id)}>${one.id}</button>`],
      ["weight", (one) => short(one.weight), "number"],
      ...LIMITS.map(([name, text]) => [text.toLowerCase(), (one) => one.limits[name] === null ? "no limit" : short(one.limits[name]), "number"]),
      ["models", (one) => one.models.join(", ")],
      ["keys", (one) => one.keys.length, "number"],
    ]} />
    ${chosen && html`<${Tenant} key=${chosen.id} one=${chosen} again=${again} />`}`;
}

function Create({ done }) {
  const [id, setId] = useState("");
  const { busy, error, run } = useAction();
  const create = (event) => {
    event.preventDefault();
    run(async () => { await call("POST", "tenants", { body: { id } }); done(id); setId(""); });
  };
  return html`<form class="row" onsubmit=${create}>
    <label>New tenant <input name="tenant" required value=${id} oninput=${(e) => setId(e.target.value)} autocomplete="off" /></label>
    <button disabled=${busy}>Create</button><${Problem} error=${error} /></form>`;
}

function Tenant({ one, again }) {
  const { busy, error, run } = useAction();
  const left = usePolled(() => get(`tenants/${encodeURIComponent(one.id)}/quota`), 1000, [one.id]);
  const [secret, setSecret] = useState("");
  const path = `tenants/${encodeURIComponent(one.id)}`;
  const change = (body) => run(async () => { await call("PATCH", path, { body, etag: one.version }); again(); });
  return html`<section class="card wide" aria-label="Tenant ${one.id}">
    <h3>${one.id} ${left.data?.degraded && html`<${Badge} kind="warn">store away: limits are local<//>`}</h3>
    <div class="sliders">
      <${Slider} name="Weight" value=${one.weight} least=${0.1} most=${100} unset=${false} refused=${error} change=${(weight) => change({ weight })} />
      ${LIMITS.map(([name, text]) => html`<${Slider} key=${name} name=${text} value=${one.limits[name]} least=${1} most=${name === "tokens_per_min" ? 1e7 : 1e5}
        unset=${true} refused=${error} left=${left.data?.limits.find((line) => line.name === name.replace("_per_min", "") && !line.model)?.remaining} change=${(to) => change({ limits: { [name]: to } })} />`)}
    </div>
    <${Problem} error=${error} />
    <h4>Keys</h4>
    <${Table} label="Keys" empty="None: create one, the tenant cannot call yet." rows=${one.keys} columns=${[
      ["key", (key) => `${key.prefix}…`], ["made", (key) => when(key.created)],
      ["", (key) => html`<button class="danger" disabled=${busy} onclick=${() => confirm(`Revoke ${key.prefix}…? Calls with it fail at once.`)
        && run(async () => { await call("DELETE", `${path}/keys/${encodeURIComponent(key.id)}`); again(); })}>Revoke</button>`],
    ]} />
    <button disabled=${busy} onclick=${() => run(async () => { setSecret((await call("POST", `${path}/keys`, { body: {} })).secret); again(); })}>New key</button>
    ${secret && html`<p class="secret">Shown once: <code>${secret}</code></p>`}
  </section>`;
}

/** Logarithmic: a quota of ten and one of a million are both a hand's breadth away. */
function Slider({ name, value, least, most, unset, left, refused, change }) {
  const steps = 200, span = Math.log(most / least);
  const place = (v) => v === null || v === undefined ? steps : Math.round(steps * 0.98 * Math.log(Math.max(v, least) / least) / span);
  const round = (v) => v < 10 && least < 1 ? Math.round(v * 10) / 10 : Number(Math.round(v).toPrecision(2));
  const read = (at) => unset && at >= steps ? null : round(least * Math.exp(Math.min(at / (steps * 0.98), 1) * span));
  const [at, setAt] = useState(null);
  const timer = useRef(0);
  // Applied once it rests, so that an arrow key held down is one change and keeps its focus.
  const move = (to) => {
    setAt(to);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => read(to) === value ? setAt(null) : change(read(to)), 400);
  };
  useEffect(() => setAt(null), [value, refused]);
  const shown = at === null ? value : read(at);
  return html`<label class="slider"><span>${name} <b>${shown === null ? "no limit" : short(shown)}</b>
    ${left !== undefined && left !== null && html`<small>${short(left)} left</small>`}</span>
    <input type="range" min="0" max=${unset ? steps : steps * 0.98} value=${at ?? place(value)} aria-valuetext=${shown === null ? "no limit" : String(shown)}
      oninput=${(e) => move(Number(e.target.value))} /></label>`;
}
