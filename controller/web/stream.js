// The event stream, read with fetch (EventSource cannot carry a token); comes back by itself behind the last decision.

import { createParser } from "./vendor/eventsource-parser/index.js";
import { authorization } from "./api.js";

const SILENCE_MS = 8000;
const FIRST_PAUSE_MS = 1000;
const LONGEST_PAUSE_MS = 15000;

/**
 * Listen for as long as the page lives.
 *
 * `on.event(name, data)` gets each event; `on.state(name, detail)` one of `connecting`, `live`, `waiting` (with the
 * reason) and `denied` (a token is needed). Returns `again()`: try at once, e.g. with another token.
 */
export function listen(on, recent) {
  let lastId = null;
  let wake = () => {};
  let hurries = false;
  let current = new AbortController();
  const again = () => {
    hurries = true;
    current.abort();
    wake();
  };
  const sleep = (ms) => new Promise((resolve) => { wake = resolve; if (ms) setTimeout(resolve, ms); });

  async function once() {
    current = new AbortController();
    const headers = { Accept: "text/event-stream", ...authorization() };
    if (lastId !== null) headers["Last-Event-ID"] = lastId;
    const response = await fetch(`v1/events?recent=${recent}`, { headers, signal: current.signal, cache: "no-store", credentials: "omit" });
    if (!response.ok) {
      const answer = await response.json().catch(() => null);
      return { status: response.status, detail: answer?.detail ?? `status ${response.status}` };
    }
    const parser = createParser({
      onEvent({ event, data, id }) {
        const body = JSON.parse(data);
        if (event === "begin" && lastId !== null && body.newest < Number(lastId)) lastId = null;
        if (id !== undefined) lastId = id;
        on.event(event, body);
      },
    });
    on.state("live");
    await read(response.body.pipeThrough(new TextDecoderStream()).getReader(), parser, current);
    return { status: 200, detail: "the controller ended the stream" };
  }

  (async () => {
    let pause = FIRST_PAUSE_MS;
    for (;;) {
      on.state("connecting");
      hurries = false;
      const began = performance.now();
      const ended = await once().catch(() => ({ status: 0, detail: "the controller does not answer" }));
      if (hurries) continue;
      if (ended.status === 401 || ended.status === 403) {
        on.state("denied", ended.detail);
        await sleep(0);
        continue;
      }
      if (performance.now() - began > LONGEST_PAUSE_MS) pause = FIRST_PAUSE_MS;
      on.state("waiting", ended.detail);
      await sleep(pause);
      pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
    }
  })();
  return again;
}

/** Feed the parser until the stream ends; a stream that has gone silent is ended (the server speaks every second). */
async function read(reader, parser, controller) {
  for (;;) {
    const alarm = setTimeout(() => controller.abort(), SILENCE_MS);
    const { done, value } = await reader.read().finally(() => clearTimeout(alarm));
    if (done) return;
    parser.feed(value);
  }
}
