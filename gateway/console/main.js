// The operators' page: log in with the admin key, then one tab a noun. No build step, no outside request.

import { html, render, useEffect, useState } from "/console/vendor/preact-htm.js";
import { get, key } from "/console/api.js";
import { Adapters } from "/console/adapters.js";
import { Fleet } from "/console/fleet.js";
import { Events, Explain, Usage } from "/console/money.js";
import { Problem, useAction } from "/console/parts.js";
import { Tenants } from "/console/tenants.js";

const TABS = { fleet: Fleet, adapters: Adapters, tenants: Tenants, usage: Usage, events: Events, explain: Explain };
const here = () => (location.hash.slice(1) in TABS ? location.hash.slice(1) : "fleet");

function Login({ done }) {
  const { busy, error, run } = useAction();
  const enter = (event) => {
    event.preventDefault();
    key.write(new FormData(event.target).get("key").trim());
    run(async () => {
      try {
        await get("replicas");
      } catch (refused) {
        key.forget();
        throw refused;
      }
      done();
    });
  };
  return html`<main class="login"><h1>Loraplex</h1><form onsubmit=${enter}>
    <label>Admin key <input name="key" type="password" required autofocus autocomplete="current-password" /></label>
    <button disabled=${busy}>Log in</button><${Problem} error=${error} />
    <p class="quiet">It stays in this tab and is forgotten when you close it.</p></form></main>`;
}

function Console() {
  const [known, setKnown] = useState(key.read() !== "");
  const [tab, setTab] = useState(here);
  useEffect(() => {
    const moved = () => setTab(here());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  if (!known) return html`<${Login} done=${() => setKnown(true)} />`;
  const Page = TABS[tab];
  return html`<header class="top"><h1>Loraplex</h1>
      <nav aria-label="Pages">${Object.keys(TABS).map((name) => html`<a href="#${name}" aria-current=${name === tab ? "page" : false}>${name}</a>`)}</nav>
      <button onclick=${() => { key.forget(); setKnown(false); }}>Log out</button></header>
    <main id="main"><h2>${tab}</h2><${Page} key=${tab} /></main>`;
}

render(html`<${Console} />`, document.body);
