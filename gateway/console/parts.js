// Pieces that several pages use: polling, tables, plots, numbers for people.

import { html, useEffect, useRef, useState } from "/console/vendor/preact-htm.js";
import uPlot from "/console/vendor/uplot.js";

/** What `read` gives, again every `ms`; it rests while the tab is hidden. */
export function usePolled(read, ms, again = []) {
  const [state, setState] = useState({ data: null, error: null });
  useEffect(() => {
    let live = true, timer = 0;
    const turn = async () => {
      try {
        if (!document.hidden) {
          const data = await read();
          if (live) setState({ data, error: null });
        }
      } catch (error) {
        if (live) setState((was) => ({ data: was.data, error }));
      }
      if (live) timer = setTimeout(turn, ms);
    };
    turn();
    return () => { live = false; clearTimeout(timer); };
  }, again);
  return state;
}

export const Problem = ({ error }) => error && html`<p class="problem" role="alert">${error.message}</p>`;

export const Badge = ({ kind, children }) => html`<span class="badge ${kind}">${children}</span>`;

/** `columns`: [heading, row => cell, "number" to align right]. */
export function Table({ columns, rows, empty, label }) {
  if (!rows.length) return html`<p class="quiet">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${columns.map(([name, , kind]) => html`<th scope="col" class=${kind}>${name}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${columns.map(([, cell, kind]) => html`<td class=${kind}>${cell(row)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

const COLOURS = ["#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#64748b"];
const WHOLE = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6, 7, 8].map((e) => n * 10 ** e)).sort((a, b) => a - b);
const clock = (seconds) => new Date(seconds * 1e3).toLocaleTimeString("en-GB");

/** Lines over time: `series` = {name: [values]}, beside `times` in seconds. Without a unit they count. */
export function Plot({ title, unit, times, series }) {
  const place = useRef(null), plot = useRef(null), names = Object.keys(series);
  const width = () => place.current.clientWidth;
  const data = [times, ...names.map((name) => series[name])];
  useEffect(() => {
    // Asked at each drawing: the colours of the page change with the reader's scheme.
    const style = () => getComputedStyle(place.current.parentElement);
    const ink = { stroke: () => style().color, grid: { stroke: () => style().borderTopColor, width: 1 } };
    plot.current = new uPlot({
      title: unit ? `${title}, ${unit}` : title, width: width(), height: 190, legend: { live: false },
      axes: [{ ...ink, space: 90, values: (_, ticks) => ticks.map(clock) }, { ...ink, size: 56, incrs: unit ? undefined : WHOLE, values: (_, ticks) => ticks.map(short) }],
      scales: { y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1)] } },
      series: [{}, ...names.map((name, i) => (
        { label: name, stroke: COLOURS[i % COLOURS.length], width: 1.6 }))],
    }, data, place.current);
    const fit = () => plot.current.setSize({ width: width(), height: 190 });
    addEventListener("resize", fit);
    return () => { removeEventListener("resize", fit); plot.current.destroy(); };
  }, [names.join("\n")]);
  useEffect(() => { plot.current?.setData(data); });
  return html`<figure class="plot" aria-label=${title}><div ref=${place}></div></figure>`;
}

/** The last `most` readings, one more each time `at` moves. */
export function useHistory(at, reading, most = 180) {
  const kept = useRef({ times: [], readings: [] });
  const { times, readings } = kept.current;
  if (at !== null && at !== times.at(-1)) {
    times.push(at);
    readings.push(reading);
    if (times.length > most) { times.shift(); readings.shift(); }
  }
  return kept.current;
}

export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return size >= 100 || Number.isInteger(value) ? value.toLocaleString("en") : value.toPrecision(3);
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = value, at = 0;
  while (size >= 1000 && at < units.length - 1) { size /= 1000; at += 1; }
  return `${at && size < 100 ? size.toFixed(1) : Math.round(size)} ${units[at]}`;
}
export const money = (value) => value.toLocaleString("en", { maximumSignificantDigits: 6, maximumFractionDigits: 9 });
export const milliseconds = (seconds) => `${short(seconds * 1e3)} ms`;
export const when = (seconds) => new Date(seconds * 1e3).toISOString().replace("T", " ").slice(0, 19);
export const digest = (text) => text ? text.slice(0, 12) : "–";

/** Runs `work`, shows what it refused; the button that calls it is off meanwhile. */
export function useAction() {
  const [state, setState] = useState({ busy: false, error: null });
  const run = async (work) => {
    setState({ busy: true, error: null });
    try {
      await work();
      setState({ busy: false, error: null });
    } catch (error) {
      setState({ busy: false, error });
    }
  };
  return { ...state, run };
}
