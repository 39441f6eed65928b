// Usage and cost, the events of the registry, and why a request would go where it would go.

import { html, useState } from "/console/vendor/preact-htm.js";
import { get, rows } from "/console/api.js";
import { Badge, milliseconds, money, Problem, short, Table, useAction, usePolled, when } from "/console/parts.js";

const AXES = ["tenant", "adapter", "version", "replica", "hour"];
const COUNTS = ["requests", "prompt_tokens", "cached_tokens", "completion_tokens", "spend"];
const sum = (rows, name) => rows.reduce((all, row) => all + row[name], 0);
const shown = (name, value) => name === "spend" ? money(value) : short(value);

export function Usage() {
  const [by, setBy] = useState(["tenant", "adapter"]);
  const [hours, setHours] = useState(24);
  const { data, error } = usePolled(() => {
    const from = new Date(Date.now() - hours * 3.6e6).toISOString();
    return get(`usage?by=${by.join(",")}&from=${encodeURIComponent(from)}`);
  }, 5000, [by.join(), hours]);
  const flip = (axis) => setBy(by.includes(axis) ? by.filter((one) => one !== axis) : AXES.filter((one) => one === axis || by.includes(one)));
  return html`<${Problem} error=${error} /><fieldset class="row"><legend>By</legend>
      ${AXES.map((axis) => html`<label><input type="checkbox" checked=${by.includes(axis)} disabled=${by.length === 1 && by[0] === axis} onchange=${() => flip(axis)} /> ${axis}</label>`)}
      <label>over <select onchange=${(e) => setHours(Number(e.target.value))}>${[1, 24, 168, 744].map((n) => html`<option value=${n} selected=${n === hours}>${n === 1 ? "the last hour" : n === 24 ? "a day" : n === 168 ? "a week" : "31 days"}</option>`)}</select></label>
    </fieldset>
    ${data && html`<${Table} label="Usage" empty="Nothing was used in that time." rows=${data.data} columns=${[
      ...by.map((axis) => [axis, (row) => row[axis] === "" ? "–" : row[axis]]),
      ...COUNTS.map((name) => [name.replace("_", " "), (row) => shown(name, row[name]), "number"]),
    ]} />
    ${data.data.length > 0 && html`<p>In all: ${COUNTS.map((name) => `${shown(name, sum(data.data, name))} ${name.replace("_", " ")}`).join(", ")}.</p>`}
    <p class="quiet">Spend is in the price table's own unit of money; \`loraplex price list\` shows the table, and an adapter without a price costs nothing.</p>`}`;
}

export function Events() {
  const { data, error } = usePolled(() => rows("events?limit=200"), 2000);
  return html`<${Problem} error=${error} />${data && html`<${Table} label="Events" empty="Nothing was changed yet." rows=${data} columns=${[
    ["when (UTC)", (one) => when(one.at)], ["who", (one) => one.actor], ["what", (one) => one.action], ["which", (one) => one.subject],
    ["detail", (one) => html`<code>${Object.keys(one.detail ?? {}).length ? JSON.stringify(one.detail) : ""}</code>`],
  ]} />`}`;
}

export function Explain() {
  const { busy, error, run } = useAction();
  const [told, setTold] = useState(null);
  const ask = (event) => {
    event.preventDefault();
    const { tenant, model } = Object.fromEntries(new FormData(event.target));
    run(async () => setTold(await get(`explain?tenant=${encodeURIComponent(tenant)}&model=${encodeURIComponent(model)}`)));
  };
  return html`<form class="row" onsubmit=${ask} aria-label="Explain">
      <label>Tenant <input name="tenant" required autocomplete="off" /></label><label>model <input name="model" required autocomplete="off" /></label>
      <button disabled=${busy}>Explain</button></form>
    <p class="quiet">Nothing is sent: this is where a request would go now, and what each replica was weighed at.</p>
    <${Problem} error=${error} />
    ${told && html`<p>Chosen: <strong>${told.chosen ?? "none: it would wait"}</strong></p>
      <${Table} label="Candidates" empty="No replica serves it." rows=${told.candidates} columns=${[
        ["replica", (one) => html`${one.replica} ${one.replica === told.chosen && html`<${Badge} kind="good">chosen<//>`}`],
        ["from home", (one) => one.step < 0 ? "–" : one.step, "number"], ["adapter in", (one) => one.tier ?? "–"],
        ["load", (one) => `${one.load} of ${one.bound}`, "number"], ["queue", (one) => milliseconds(one.queue_s), "number"],
        ["load time", (one) => milliseconds(one.load_s), "number"], ["slot wait", (one) => milliseconds(one.slot_s), "number"],
        ["expected", (one) => one.refused ? one.refused : milliseconds(one.expected_s), "number"],
      ]} />`}`;
}
