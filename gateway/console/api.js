// The admin API, as the console calls it. The key lives in this tab's session and nowhere else.

const KEY = "loraplex-admin-key";

export const key = {
  read: () => sessionStorage.getItem(KEY) ?? "",
  write: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** JSON in, JSON out with its ETag. Throws Refused with the API's own words. */
export async function call(method, path, { body, etag } = {}) {
  const headers = { Authorization: `Bearer ${key.read()}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (etag) headers["If-Match"] = `"${etag}"`;
  let response;
  try {
    response = await fetch(`/admin/v1/${path}`, {
      method, headers, body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Refused(0, "The gateway does not answer.");
  }
  const text = await response.text();
  const data = text ? JSON.parse(text) : {};
  if (!response.ok) throw new Refused(response.status, data.error?.message ?? response.statusText);
  return data;
}

export const get = (path) => call("GET", path);
export const rows = async (path) => (await get(path)).data;

/** Readiness and the counters of this gateway; neither needs a key. */
export async function readiness() {
  const response = await fetch("/readyz");
  return response.json();
}

/** Prometheus text as [{name, labels, value}]. */
export async function counters() {
  const text = await (await fetch("/metrics")).text();
  const found = [];
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    found.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return found;
}
