// Talks to the gateway: the key, requests with it, and streams of server-sent events. The key is kept in memory only.

let key = "";

export function setKey(value) {
  key = value.trim();
}

export function hasKey() {
  return key !== "";
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request. Throws `Refused` with the gateway's message, or what `fetch` throws. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error?.message ?? message;
  } catch {
    // The answer is no JSON; its status says enough.
  }
  throw new Refused(response.status, message);
}

export async function askJson(path, options) {
  return (await ask(path, options)).json();
}

/** Yield the events of a response as {name, data}. `onRead` is called whenever something arrives. */
export async function* events(response, onRead = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    onRead();
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const found = { name: "message", data: "" };
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) found.name = line.slice(7);
        else if (line.startsWith("data: ")) found.data += line.slice(6);
      }
      if (found.data) yield found;
    }
  }
}
