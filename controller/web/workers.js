// The table of workers: what each is, how it does, and the orders one can give.

import { html, nothing, svg } from "./vendor/lit-html/lit-html.js";
import { live } from "./vendor/lit-html/directives/live.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { look } from "./charts.js";
import { MODES, SOURCES, left, number, span } from "./format.js";

const MANY = 8;
const STALE_SECONDS = 5;

/** A sample of a worker's line in the charts. */
export function swatch(place) {
  const { colour, dash } = look(place);
  return html`<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true">${svg`<path d="M1 4h20" stroke=${colour} stroke-dasharray=${dash.join(" ")}></path>`}</svg>`;
}

/** The whole section. `page` has the state and `act` what its buttons do. */
export function workersSection(page, act) {
  const { live: now, find } = page;
  const word = find.toLowerCase();
  const fits = ({ id, model }) => !word || id.toLowerCase().includes(word) || (model ?? "").toLowerCase().includes(word);
  const listed = now.workers.map((worker, place) => ({ worker, place })).filter(({ worker }) => fits(worker));
  return html`
    <section aria-labelledby="workers-title">
      <header class="bar">
        <h2 id="workers-title">Workers</h2>
        ${now.workers.length > MANY || find ? html`
          <input type="search" class="find" aria-label="Find a worker by id or model" placeholder="Find a worker …"
            .value=${live(find)} @input=${(event) => act.find(event.target.value)}>
          <span class="muted">${listed.length} of ${now.workers.length}</span>` : nothing}
      </header>
      ${now.workers.length === 0 ? nobody() : listed.length === 0 ? html`<p class="muted">No worker has “${find}” in its id or model.</p>` : html`
        <div class="scroll"><table class="workers">
          <thead>
            <tr><th>Worker</th><th>Health</th><th>Depth</th><th class="figure">Requests</th><th class="figure">Tokens per round</th>
              <th>Accepted by position</th><th class="figure">Tokens/s</th><th>Mode</th><th><span class="unseen">Orders</span></th></tr>
          </thead>
          <tbody>${repeat(listed, ({ worker }) => worker.id, ({ worker, place }) => row(worker, place, page, act))}</tbody>
        </table></div>`}
    </section>`;
}

function nobody() {
  return html`
    <article class="empty">
      <p><strong>No worker is configured, so there is nothing to steer.</strong></p>
      <p>Name each worker's control address in the controller's configuration and start it again:</p>
      <pre><code>[[workers]]
id = "local"
url = "http://127.0.0.1:8101"</code></pre>
    </article>`;
}

function row(worker, place, page, act) {
  const isShown = page.shown.has(worker.id);
  const isDown = !worker.reachable;
  return html`
    <tr class=${isDown ? "down" : ""}>
      <th scope="row">
        <label class="name">
          <input type="checkbox" .checked=${live(isShown)} @change=${() => act.show(worker.id)} aria-label=${`Show ${worker.id} in the charts`}>
          <span>${isShown ? swatch(place) : nothing}<span class="id">${worker.id}</span>
            <small class="muted" title=${worker.url}>${worker.model === null ? worker.url : `${worker.model} · ${worker.drafter} drafter · ${worker.device}`}</small></span>
        </label>
      </th>
      <td data-label="Health">${health(worker)}</td>
      <td data-label="Depth">${depth(worker, page.live.time)}</td>
      <td data-label="Requests" class="figure">${isDown ? "–" : load(worker.queue)}</td>
      <td data-label="Tokens per round" class="figure">${isDown ? "–" : number(worker.accept_length)}</td>
      <td data-label="Accepted by position">${isDown ? "–" : positions(worker.position_acceptance)}</td>
      <td data-label="Tokens/s" class="figure">${isDown ? "–" : number(worker.tokens_per_second, 1)}</td>
      <td data-label="Mode">
        <button class="quiet" @click=${() => act.open("mode", worker.id)} title=${MODES[worker.mode].does}
          aria-label=${`Mode of ${worker.id}: ${worker.mode}. Change it`}>${worker.mode}${worker.own_mode ? "*" : ""}</button>
      </td>
      <td class="orders">${orders(worker, act)}</td>
    </tr>`;
}

function orders(worker, act) {
  const isBound = worker.depth.source === "pin" || worker.depth.held_until !== null;
  return html`
    <div role="group" aria-label=${`Orders for ${worker.id}`}>
      <button @click=${() => act.open("pin", worker.id, { tier: worker.depth.effective })}>Pin …</button>
      <button @click=${() => act.release(worker.id)} ?disabled=${!isBound} title="End the pin, and the hold after a rollback">Release</button>
      <button @click=${() => act.open("rollback", worker.id)}>Roll back …</button>
      <button @click=${() => act.explain(worker.id)}>Explain</button>
    </div>`;
}

function health(worker) {
  const age = worker.observation_age_seconds;
  if (!worker.reachable) {
    const since = age === null ? "never seen" : `no answer for ${span(age)}`;
    return html`<span class="state bad">${since}</span>${worker.last_error ? cause(worker.last_error) : nothing}`;
  }
  if (age !== null && age > STALE_SECONDS) return html`<span class="state warn">data ${span(age)} old</span>`;
  if (worker.adaptation === false) {
    return html`<span class="state warn">cannot adapt</span>${cause(worker.adaptation_off_reason)}`;
  }
  return html`<span class="state good">up</span>`;
}

function cause(text) {
  return html`<small class="cause" title=${text}>${text}</small>`;
}

function depth(worker, now) {
  const { effective, desired, source, expires_at, held_until, reason, slots } = worker.depth;
  const isComing = effective !== null && desired !== null && desired !== effective && !worker.probing && source !== "fallback";
  return html`
    <span class="depth">${effective ?? "–"}</span>${isComing ? html` <span title="wished, not yet followed">→ ${desired}</span>` : nothing}
    ${source === null ? desired === null ? nothing : html`<span class="tag">${desired} wished</span>`
      : html`<span class="tag ${source}" title=${SOURCES[source]}>${source}${source === "pin" && expires_at ? `, ${left(expires_at, now)} left` : ""}</span>`}
    ${held_until ? html`<span class="tag pin">policy held, ${left(held_until, now)} left</span>` : nothing}
    ${worker.probing ? html`<span class="tag" title="a few rounds at another depth, to measure it">probing</span>` : nothing}
    ${reason ? cause(`“${reason}”`) : nothing}
    ${slots.length > 1 && source !== "pin" ? html`<small class="muted slots" title="depth for batches of up to so many requests">${table(slots)}</small>` : nothing}`;
}

/** The table batch size → depth, neighbours of one depth together. */
function table(slots) {
  const parts = [];
  slots.forEach((slot, i) => {
    const isLast = i === slots.length - 1;
    if (!isLast && slots[i + 1].num_steps === slot.num_steps) return;
    parts.push(isLast ? (parts.length ? `more: ${slot.num_steps}` : `any batch: ${slot.num_steps}`) : `batch ≤ ${slot.max_batch_size}: ${slot.num_steps}`);
  });
  return parts.join(" · ");
}

function load(queue) {
  if (queue === null) return "–";
  return html`${queue.running}${queue.waiting ? html` <small class="muted">+ ${queue.waiting} waiting</small>` : nothing}`;
}

function positions(rates) {
  if (rates.length === 0) return html`<span class="muted">–</span>`;
  const said = rates.map((rate) => (rate === null ? "–" : rate.toFixed(2))).join(" ");
  const bars = rates.map((rate, i) => {
    const height = Math.max(1, 22 * (rate ?? 0));
    return svg`<rect class="floor" x=${i * 8} y="1" width="6" height="22"></rect><rect x=${i * 8} y=${23 - height} width="6" height=${height}></rect>`;
  });
  return html`
    <svg class="bars" viewBox=${`0 0 ${rates.length * 8} 24`} width=${rates.length * 8} height="24" role="img"
      aria-label=${`accepted by position: ${said}`}><title>${said}</title>${bars}</svg>
    <small class="muted">${number(rates[0])}</small>`;
}
