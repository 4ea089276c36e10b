// The journal as it grows: what was decided or happened, and why; each record opens to its numbers.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { live } from "./vendor/lit-html/directives/live.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { digits, moment } from "./format.js";

export const KINDS = {
  all: { title: "everything", fits: () => true },
  changes: { title: "changes of depth", fits: (d) => (d.kind === "depth" && d.outcome !== "held") || isOrder(d) },
  orders: { title: "operators' orders", fits: (d) => isOrder(d) },
  held: { title: "held back by guards", fits: (d) => d.outcome === "held" || d.kind === "guard" },
  workers: { title: "comings and goings", fits: (d) => d.kind === "worker" || d.kind === "plan" },
};

const OUTCOMES = {
  applied: ["done", "good"],
  unconfirmed: ["not confirmed", "warn"],
  advisory: ["advice only", ""],
  held: ["held back", "warn"],
};

/** Whether an operator gave this order. */
export function isOrder({ kind }) {
  return kind === "pin" || kind === "rollback" || kind === "mode";
}

/** The whole section. */
export function decisionsSection(page, act) {
  const { decisions, filter, live: now, limit, opened } = page;
  const fitting = decisions.filter((d) => KINDS[filter.kind].fits(d) && (!filter.worker || d.worker === filter.worker));
  return html`
    <section aria-labelledby="decisions-title">
      <header class="bar">
        <h2 id="decisions-title">Decisions</h2>
        <select aria-label="Which decisions" .value=${live(filter.kind)} @change=${(event) => act.filter({ kind: event.target.value })}>
          ${Object.entries(KINDS).map(([key, { title }]) => html`<option value=${key}>${title}</option>`)}
        </select>
        ${now.workers.length > 1 ? html`
          <select aria-label="Of which worker" .value=${live(filter.worker)} @change=${(event) => act.filter({ worker: event.target.value })}>
            <option value="">of all workers</option>
            ${now.workers.map(({ id }) => html`<option value=${id}>${id}</option>`)}
          </select>` : nothing}
      </header>
      ${fitting.length === 0 ? html`<p class="muted">${decisions.length ? "None of this sort among the newest." : "Nothing was decided yet. Decisions appear here as they happen."}</p>` : html`
        <table class="decisions">
          <thead><tr><th>Time</th><th>Worker</th><th>What</th><th>Why</th></tr></thead>
          <tbody>${repeat(fitting.slice(0, limit), (d) => d.cursor, (d) => entry(d, opened.has(d.cursor), act))}</tbody>
        </table>
        ${fitting.length > limit ? html`<button class="quiet" @click=${act.more}>Show older ones</button>` : nothing}`}
    </section>`;
}

function entry(decision, isOpen, act) {
  const hasMore = decision.scores.length > 0 || Object.keys(decision.inputs).length > 0 || (decision.observed.cells ?? []).length > 0;
  return html`
    <tr>
      <td data-label="Time"><time datetime=${decision.time}>${moment(decision.time)}</time></td>
      <td data-label="Worker" class="id">${decision.worker}</td>
      <td data-label="What">${what(decision)}</td>
      <td data-label="Why">
        <code>${decision.reason}</code> <span class="why">${decision.message}</span>
        ${hasMore ? html`<button class="link" aria-expanded=${isOpen} @click=${() => act.toggle(decision.cursor)}
          aria-label=${`${isOpen ? "Hide" : "Show"} the numbers behind ${decision.reason} at ${moment(decision.time)}`}>${isOpen ? "hide the numbers" : "the numbers"}</button>` : nothing}
        ${isOpen ? numbers(decision) : nothing}
      </td>
    </tr>`;
}

/** What happened, in few words: `2 → 3, batch ≤ 4` and what became of it. */
export function what(decision) {
  const [word, look] = OUTCOMES[decision.outcome] ?? [null, ""];
  const { num_steps: to, num_steps_before: from, max_batch_size: slot } = decision;
  const change = to === null ? nothing : from === null ? html`<strong>${to}</strong>` : from === to ? html`stays at <strong>${to}</strong>` : html`<strong>${from} → ${to}</strong>`;
  return html`
    <span class="tag ${isOrder(decision) ? "pin" : ""}">${decision.kind}</span> ${change}
    ${slot === null ? nothing : html`<small class="muted">batch ≤ ${slot}</small>`}
    ${word === null ? nothing : html`<small class="state ${look}">${word}${decision.guard ? ` (${decision.guard})` : ""}</small>`}`;
}

/** The numbers that a decision rests on: scores of every tier, inputs, what was counted. */
export function numbers(decision) {
  const inputs = Object.entries(decision.inputs);
  const cells = decision.observed.cells ?? [];
  return html`
    <div class="numbers">
      ${decision.scores.length ? html`
        <table>
          <caption>Score of every depth (${decision.policy})</caption>
          <tbody>
            <tr><th scope="row">depth</th>${decision.scores.map((s) => html`<th scope="col" class=${s.num_steps === decision.num_steps ? "chosen" : ""}>${s.num_steps}</th>`)}</tr>
            <tr><th scope="row">score</th>${decision.scores.map((s) => html`<td class=${s.num_steps === decision.num_steps ? "chosen" : ""}>${digits(s.score)}</td>`)}</tr>
            ${decision.scores.some((s) => s.sd !== null) ? html`<tr><th scope="row">±</th>${decision.scores.map((s) => html`<td>${digits(s.sd)}</td>`)}</tr>` : nothing}
          </tbody>
        </table>` : nothing}
      ${inputs.length ? html`<dl>${inputs.map(([name, value]) => html`<div><dt>${name}</dt><dd>${digits(value)}</dd></div>`)}</dl>` : nothing}
      ${cells.map((cell) => html`<p class="muted">In ${digits(decision.observed.seconds)} s before: ${cell.rounds} rounds at depth ${cell.num_steps}, batch ≤ ${cell.max_batch_size}${pace(cell)}${accepted(cell)}.</p>`)}
    </div>`;
}

function pace({ timed_rounds: timed, round_seconds: seconds }) {
  return timed ? `, ${digits((1000 * seconds) / timed)} ms each` : "";
}

function accepted({ correct = [], reached = [] }) {
  const rates = correct.map((count, i) => (reached[i] ? (count / reached[i]).toFixed(2) : "–"));
  return rates.length ? `, accepted by position ${rates.join(" ")}` : "";
}
