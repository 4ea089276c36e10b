// Numbers, times and words as people read them. Pure; knows nothing about the page.

export const MODES = {
  active: { verb: "Activate", does: "decides every depth and applies it" },
  advisory: { verb: "Only advise", does: "decides and records, applies nothing: workers run at their own depth, pins still hold" },
  frozen: { verb: "Freeze", does: "keeps every depth as it is now" },
  released: { verb: "Let go", does: "sends nothing at all: plans run out and workers run at their own depth" },
};

export const SOURCES = {
  policy: "chosen by the policy",
  pin: "pinned by an operator",
  fallback: "the worker's own depth",
  frozen: "kept as it was: frozen",
};

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const short = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });

/** Format a number to so many places; a dash for what is not known. */
export function number(value, places = 2) {
  return value === null || value === undefined || !Number.isFinite(value) ? "–" : value.toFixed(places);
}

/** Format a score or an input: three digits that matter. */
export function digits(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 100000) ? value.toExponential(2) : String(+value.toPrecision(3));
}

/** Format a moment: the time, with the date where it is not today. */
export function moment(iso) {
  const date = new Date(iso);
  const today = date.toDateString() === new Date().toDateString();
  return today ? clock.format(date) : `${day.format(date)} ${short.format(date)}`;
}

/** Format the time of an x axis. */
export function axisTime(seconds, withSeconds) {
  return (withSeconds ? clock : short).format(new Date(seconds * 1000));
}

/** Format a length of time in its largest unit. */
export function span(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** Say how far a moment is ahead of the server's `now` (both ISO 8601). */
export function left(iso, now) {
  return span((new Date(iso) - new Date(now)) / 1000);
}
