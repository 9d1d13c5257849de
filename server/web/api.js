// What the server is asked, with the key where it wants one.

const KEY = "radixkv-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export async function fetchJson(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { authorization: `Bearer ${key}` };
  const response = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(20000) });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, body.error?.message ?? `status ${response.status}`);
  return body;
}
