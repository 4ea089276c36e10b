// Start here: the page's state, what changes it, and the template that shows it. Everything comes from the public API.

import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { ApiError, call, token, workerPath } from "./api.js";
import { CHARTS, Charts, Series } from "./charts.js";
import { KINDS, decisionsSection, isOrder } from "./decisions.js";
import { dialogContent } from "./dialogs.js";
import { MODES, moment, number } from "./format.js";
import { listen } from "./stream.js";
import { swatch, workersSection } from "./workers.js";

const RECENT = 200;
const KEPT = 1000;
const PAGE = 30;
const MOST_LINES = 6;
const SAID_MS = 8000;

const page = {
  connection: { name: "connecting", detail: "" },
  about: null,
  live: null,
  decisions: [], // newest first
  series: new Series(),
  shown: new Set(),
  cursor: null,
  find: "",
  filter: { kind: "all", worker: "" },
  limit: PAGE,
  opened: new Set(),
  dialog: null,
  get hasToken() { return token.get() !== ""; },
  worker(id) { return this.live.workers.find((worker) => worker.id === id); },
};
const root = document.getElementById("page");
const dialogElement = document.getElementById("dialog");
const said = document.getElementById("said");
const charts = new Charts(page.series, (place) => { page.cursor = place; draw(); });

// ---- what changes the state ----

function begin(about) {
  const newestHere = page.decisions[0]?.cursor ?? 0;
  if (about.newest < newestHere) page.decisions = []; // another journal: its cursors begin anew
  page.about = about;
  page.series.begin(about.history);
}

function workers(now) {
  if (page.live === null) now.workers.slice(0, MOST_LINES).forEach((worker) => page.shown.add(worker.id));
  page.live = now;
  page.series.add(now);
}

function decision(record) {
  if (page.decisions.some((known) => known.cursor === record.cursor)) return;
  page.decisions.unshift(record);
  page.decisions.length = Math.min(page.decisions.length, KEPT);
}

function connection(name, detail = "") {
  page.connection = { name, detail };
  const problem = page.hasToken ? "This token is not known to the controller." : null;
  if (name === "denied" && page.dialog === null) act.open("token", null, { problem });
}

const act = {
  open(kind, worker, more = {}) {
    page.dialog = { kind, worker, isBusy: false, problem: null, ...more };
    draw();
  },
  close() {
    page.dialog = null;
    draw();
  },
  show(id) {
    if (!page.shown.delete(id)) page.shown.add(id);
    draw();
  },
  find(word) {
    page.find = word;
    draw();
  },
  filter(change) {
    page.filter = { ...page.filter, ...change };
    page.limit = PAGE;
    draw();
  },
  more() {
    page.limit += 4 * PAGE;
    draw();
  },
  toggle(cursor) {
    if (!page.opened.delete(cursor)) page.opened.add(cursor);
    draw();
  },
  setToken(value) {
    if (!token.isFit(value)) return refused("A token is one word of plain ASCII characters.");
    token.set(value);
    act.close();
    again();
  },
  forget() {
    token.set("");
    act.close();
    again();
  },
  pin: (id, body) => order(`Pinned ${id} at ${body.num_steps}`, "PUT", workerPath(id, "depth"), body),
  release: (id) => order(`Released ${id}`, "DELETE", workerPath(id, "depth")),
  rollBack: (id, body) => order(`Rolled ${id} back`, "POST", workerPath(id, "depth", "rollback"), body),
  setMode: (mode) => order(`All workers are ${mode}`, "PUT", "v1/mode", { mode }),
  setWorkerMode: (id, mode) => mode
    ? order(`${id} is ${mode}`, "PUT", workerPath(id, "mode"), { mode })
    : order(`${id} has the mode of all workers`, "DELETE", workerPath(id, "mode")),
  async explain(id, at = "") {
    act.open("explain", id);
    const opened = page.dialog;
    const query = at ? `?at=${encodeURIComponent(new Date(at).toISOString())}` : "";
    try {
      opened.answer = (await call("GET", workerPath(id, "explain") + query)).body;
    } catch (error) {
      opened.answer = { decisions: [], lines: [error.message] };
    }
    draw();
  },
};

/** Give an order; say what became of it, in the dialog if it was refused there. */
async function order(what, method, path, body) {
  if (page.dialog !== null) page.dialog = { ...page.dialog, isBusy: true, problem: null };
  draw();
  try {
    const { status } = await call(method, path, body);
    page.dialog = null;
    say(status === 202 ? `${what}. The worker was not yet seen to follow.` : `${what}.`, status === 202 ? "warn" : "good");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401 || error.status === 403) act.open("token", null, { why: `To change something: ${error.message}.` });
    else if (page.dialog === null) say(error.message, "bad");
    else refused(error.message);
  }
  draw();
}

function refused(problem) {
  if (page.dialog !== null) page.dialog = { ...page.dialog, isBusy: false, problem };
  draw();
}

let saidTimer = 0;
function say(text, look) {
  clearTimeout(saidTimer);
  said.textContent = text;
  said.className = `shown ${look}`;
  saidTimer = setTimeout(() => { said.className = ""; }, SAID_MS);
}

// ---- how it is shown ----

function template() {
  if (page.live === null) {
    const { name, detail } = page.connection;
    return html`${topBar()}${name === "denied" ? html`<p>A token is needed to look in. <button @click=${() => act.open("token", null)}>Give the token</button></p>`
      : name === "waiting" ? html`<p>Not connected: ${detail}. Trying again …</p>` : html`<p aria-busy="true">Connecting …</p>`}`;
  }
  return html`
    ${topBar()}
    ${notices()}
    <main class=${page.connection.name === "live" ? "" : "stale"}>
      ${fleet()}
      ${page.live.workers.length ? chartsSection() : nothing}
      ${workersSection(page, act)}
      ${decisionsSection(page, act)}
    </main>
    <footer class="muted">
      <small>Also at <a href="v1">v1</a>, <a href="openapi.json">openapi.json</a>, <a href="metrics">metrics</a>${page.hasToken ? " (with the token)" : ""}, and as <code>spec-controller status</code>.
      * a mode of the worker's own.</small>
    </footer>`;
}

const CONNECTIONS = { live: ["live", "good"], connecting: ["connecting …", "warn"], waiting: ["not connected", "bad"], denied: ["token needed", "bad"] };

function topBar() {
  const [word, look] = CONNECTIONS[page.connection.name];
  return html`
    <header class="top">
      <h1><img src="web/icon.svg" alt="" width="26" height="26"> Slipstream <small class="muted">controller ${page.about?.version ?? ""}</small></h1>
      <span class="state ${look}" id="connection">${word}</span>
      ${page.hasToken || page.connection.name === "denied" ? html`<button class="quiet" @click=${() => act.open("token", null)}>Token …</button>` : nothing}
    </header>`;
}

function notices() {
  const { connection, live: now } = page;
  return html`
    ${connection.name === "waiting" || connection.name === "connecting" ? html`<p class="notice bad">Not connected: ${connection.detail || "trying again"}. This is how it was at ${moment(now.time)}.</p>` : nothing}
    ${now.journal === "ok" ? nothing : html`<p class="notice warn">The journal cannot be written (${now.journal}). Control goes on; records wait in memory.</p>`}`;
}

function fleet() {
  const { workers: all, mode } = page.live;
  const up = all.filter((worker) => worker.reachable);
  const sum = (of) => up.reduce((total, worker) => total + (of(worker) ?? 0), 0);
  const waiting = sum((worker) => worker.queue?.waiting);
  return html`
    <section class="fleet" aria-label="All workers">
      <div class="tile ${up.length < all.length ? "bad" : ""}"><span>Workers up</span><strong>${up.length} of ${all.length}</strong></div>
      <div class="tile"><span>Requests running</span><strong>${sum((worker) => worker.queue?.running)}</strong>${waiting ? html`<small>${waiting} waiting</small>` : nothing}</div>
      <div class="tile"><span>Tokens per second</span><strong>${number(sum((worker) => worker.tokens_per_second), 1)}</strong></div>
      <div class="tile modes">
        <span id="mode-title">Mode for all workers</span>
        <div role="group" aria-labelledby="mode-title">
          ${Object.keys(MODES).map((name) => html`<button aria-pressed=${name === mode} class=${name === mode ? "" : "outline"}
            @click=${() => name !== mode && act.open("fleet", null, { mode: name })} title=${MODES[name].does}>${name}</button>`)}
        </div>
        <small>${MODES[mode].does}</small>
      </div>
    </section>`;
}

function shownLines() {
  return page.live.workers.map((worker, place) => ({ id: worker.id, place })).filter(({ id }) => page.shown.has(id));
}

function chartsSection() {
  const lines = shownLines();
  return html`
    <section class="charts" aria-label="The last five minutes">
      ${CHARTS.map(({ key, title, unit, places }) => html`
        <figure>
          <figcaption><strong>${title}</strong> <small class="muted">${unit}</small>
            <ul>${lines.map(({ id, place }) => html`<li>${swatch(place)}<span class="id">${id}</span> <b>${number(page.series.at(id, key, page.cursor), places)}</b></li>`)}</ul>
          </figcaption>
          <div class="plot" role="img" aria-label=${`${title} over the last five minutes`}></div>
        </figure>`)}
    </section>`;
}

function marks() {
  const isMark = (record) => page.shown.has(record.worker) && KINDS.changes.fits(record) && record.outcome !== "advisory";
  return page.decisions.filter(isMark).map((record) => ({ seconds: Date.parse(record.time) / 1000, isOrder: isOrder(record) }));
}

let isDue = false;
function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    render(template(), root);
    const places = [...root.querySelectorAll(".plot")];
    if (places.length) charts.draw(places, shownLines().map(({ id, place }) => ({ id, place })), marks());
    else charts.clear();
    showDialog();
  });
}

let closedHere = 0;
function showDialog() {
  render(dialogContent(page, act), dialogElement);
  if (page.dialog !== null && !dialogElement.open) {
    dialogElement.showModal();
    dialogElement.querySelector("[autofocus], input:checked, form select")?.focus();
  }
  if (page.dialog === null && dialogElement.open) {
    closedHere += 1;
    dialogElement.close();
  }
}

// Escape. "close" comes later than the closing, and by then another dialog may be wanted; "cancel" comes before it.
dialogElement.addEventListener("cancel", (event) => {
  event.preventDefault();
  act.close();
});
// A browser may close without "cancel" (Escape twice, with nothing done between).
dialogElement.addEventListener("close", () => {
  if (closedHere > 0) closedHere -= 1;
  else act.close();
});
dialogElement.addEventListener("click", (event) => { if (event.target === dialogElement) act.close(); });
document.title = "Slipstream controller";
root.replaceChildren();
const again = listen({
  event(name, body) {
    ({ begin, workers, decision })[name]?.(body);
    draw();
  },
  state(name, detail) {
    connection(name, detail);
    draw();
  },
}, RECENT);
