// The dialogs: pin, mode, rollback, explain, token. Each is a template over `page.dialog`; `app.js` opens and closes them.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { numbers, what } from "./decisions.js";
import { MODES, moment } from "./format.js";

const TIMES = [[300, "5 minutes"], [900, "15 minutes"], [3600, "1 hour"], [28800, "8 hours"], [86400, "1 day"], [604800, "1 week"]];
const LONGEST_REASON = 200;

/** The open dialog's content; nothing while none is open. */
export function dialogContent(page, act) {
  const dialog = page.dialog;
  if (dialog === null) return nothing;
  return { pin, mode, fleet, rollback, explain, token }[dialog.kind](page, act, dialog);
}

function frame(title, body, act, { submit = null, label = "", wide = false, dialog }) {
  const buttons = html`
    <footer>
      <button type="button" class="secondary" @click=${act.close}>${submit ? "Cancel" : "Close"}</button>
      ${submit ? html`<button type="submit" aria-busy=${dialog.isBusy} ?disabled=${dialog.isBusy}>${label}</button>` : nothing}
    </footer>`;
  return html`
    <article class=${wide ? "wide" : ""}>
      <header><button type="button" class="close" aria-label="Close" @click=${act.close}></button><h3 id="dialog-title">${title}</h3></header>
      <form @submit=${(event) => { event.preventDefault(); submit?.(new FormData(event.target)); }}>
        ${body}
        <p class="problem" role="alert">${dialog.problem ?? ""}</p>
        ${buttons}
      </form>
    </article>`;
}

function radio(name, value, isChecked, text, hint) {
  return html`<label class="choice"><input type="radio" name=${name} value=${value} ?checked=${isChecked} required><span>${text}${hint ? html` <small class="muted">${hint}</small>` : nothing}</span></label>`;
}

function times(label, chosen) {
  return html`<label>${label}<select name="ttl_seconds">${TIMES.map(([value, text]) => html`<option value=${value} ?selected=${value === chosen}>${text}</option>`)}</select></label>`;
}

function why() {
  return html`<label>Reason, for the record<input name="reason" maxlength=${LONGEST_REASON} placeholder="e.g. incident 42" autocomplete="off"></label>`;
}

function pin(page, act, dialog) {
  const worker = page.worker(dialog.worker);
  const { tiers } = worker.depth;
  const body = tiers.length === 0 ? html`<p>The worker has not answered yet, so its depths are not known.</p>` : html`
    <fieldset class="tiers"><legend>Depth: drafts per round</legend>
      ${tiers.map((tier) => radio("num_steps", tier, tier === dialog.tier, String(tier), tier === 0 ? "plain" : ""))}
    </fieldset>
    ${times("For how long", 900)} ${why()}
    <p class="muted">The pin wins over the policy and holds even if the controller dies. Then the policy goes on.</p>`;
  const submit = tiers.length === 0 ? null : (form) => act.pin(worker.id, {
    num_steps: Number(form.get("num_steps")), ttl_seconds: Number(form.get("ttl_seconds")), reason: form.get("reason"),
  });
  return frame(html`Pin <span class="id">${worker.id}</span>`, body, act, { submit, label: "Pin", dialog });
}

function rollback(page, act, dialog) {
  const worker = page.worker(dialog.worker);
  const body = html`
    <p>Takes the newest change of this worker's depth back, the policy's or an operator's. Then the policy may change nothing for:</p>
    ${times("Hold the policy for", 300)} ${why()}`;
  const submit = (form) => act.rollBack(worker.id, { ttl_seconds: Number(form.get("ttl_seconds")), reason: form.get("reason") });
  return frame(html`Roll back <span class="id">${worker.id}</span>`, body, act, { submit, label: "Roll back", dialog });
}

function mode(page, act, dialog) {
  const worker = page.worker(dialog.worker);
  const body = html`
    <fieldset><legend class="unseen">Mode</legend>
      ${radio("mode", "", !worker.own_mode, "as for all workers", `now ${page.live.mode}`)}
      ${Object.entries(MODES).map(([name, { does }]) => radio("mode", name, worker.own_mode && worker.mode === name, name, does))}
    </fieldset>`;
  return frame(html`Mode of <span class="id">${worker.id}</span>`, body, act, { submit: (form) => act.setWorkerMode(worker.id, form.get("mode")), label: "Set the mode", dialog });
}

function fleet(page, act, dialog) {
  const count = page.live.workers.length;
  const own = page.live.workers.filter((worker) => worker.own_mode).length;
  const body = html`
    <p><strong>${dialog.mode}</strong>: the controller ${MODES[dialog.mode].does}.</p>
    <p>Holds for ${count === 1 ? "the one worker" : `all ${count} workers`}${own ? `; ${own} with a mode of its own loses that` : ""}.</p>`;
  return frame(`${MODES[dialog.mode].verb}?`, body, act, { submit: () => act.setMode(dialog.mode), label: MODES[dialog.mode].verb, dialog });
}

function token(page, act, dialog) {
  const body = html`
    <p>${dialog.why ?? "This controller wants a bearer token: the one for reading to look, the other one to change something."}</p>
    <label>Token<input name="token" type="password" autocomplete="off" spellcheck="false" required autofocus></label>
    <p class="muted">Kept in this tab until it is closed, and sent to this controller only.${page.hasToken ? html` <button type="button" class="link" @click=${act.forget}>Forget the token</button>` : nothing}</p>`;
  return frame("Token", body, act, { submit: (form) => act.setToken(form.get("token").trim()), label: "Use it", dialog });
}

function explain(page, act, dialog) {
  const { answer } = dialog;
  const body = html`
    <div class="ask">
      <label>At what time (now, if empty)<input type="datetime-local" step="1" name="at"></label>
      <button type="button" class="secondary" @click=${(event) => act.explain(dialog.worker, event.target.closest("form").elements.at.value)}>Ask</button>
    </div>
    ${answer ? told(answer) : html`<p aria-busy="true">Asking …</p>`}`;
  return frame(html`Why <span class="id">${dialog.worker}</span> runs at this depth`, body, act, { wide: true, dialog });
}

function told(answer) {
  const depths = answer.decisions.filter((d) => d.max_batch_size !== null && d.kind === "depth").sort((a, b) => a.max_batch_size - b.max_batch_size);
  const known = answer.lines.slice(1, answer.lines.findIndex((line) => line.startsWith("batch <=") || line.startsWith("No ")));
  return html`
    ${known.length ? html`<ul class="known">${known.map((line) => html`<li>${line}</li>`)}</ul>` : nothing}
    ${depths.length === 0 ? html`<p class="muted">${answer.lines.at(-1)}</p>` : depths.map((d) => html`
      <details class="slot" ?open=${depths.length === 1}>
        <summary>${what(d)} <time datetime=${d.time} class="muted">${moment(d.time)}</time><br><code>${d.reason}</code> ${d.message}</summary>
        ${numbers(d)}
      </details>`)}
    <details ?open=${depths.length === 0}><summary>Everything on record, in words</summary><pre>${answer.lines.join("\n")}</pre></details>`;
}
