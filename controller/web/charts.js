// Live charts: one line per shown worker over the last minutes, three charts with one cursor.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { axisTime } from "./format.js";

const KEPT_SECONDS = 300;
const LEAST_SECONDS = 60;
const HEIGHT = 150;
const MOST_MARKS = 40;

export const COLOURS = ["#3b82f6", "#e8710a", "#1a9c5b", "#a855f7", "#e5484d", "#0e9aa7", "#b07d48", "#d6409f"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];

export const CHARTS = [
  { key: "num_steps", title: "Depth", unit: "drafts a round", places: 0, least: [0, 3], stepped: true, marked: true },
  { key: "accept_length", title: "Tokens per round", unit: "per request, 1 is plain decoding", places: 2, least: [1, 2] },
  { key: "tokens_per_second", title: "Tokens per second", unit: "handed out", places: 1, least: [0, 1] },
];

/** The samples of all workers, filled by the stream. */
export class Series {
  times = [];
  columns = new Map();

  /** Take the past that the server kept. */
  begin(history) {
    this.times = [...history.times];
    this.columns = new Map(Object.entries(history.workers).map(([id, column]) => [id, structuredClone(column)]));
  }

  /** Add the workers' state of one moment. */
  add(live) {
    const time = Date.parse(live.time) / 1000;
    if (time <= (this.times.at(-1) ?? 0)) return;
    for (const worker of live.workers) {
      if (!this.columns.has(worker.id)) {
        const empty = () => this.times.map(() => null);
        this.columns.set(worker.id, { num_steps: empty(), accept_length: empty(), tokens_per_second: empty() });
      }
    }
    this.times.push(time);
    const states = new Map(live.workers.map((worker) => [worker.id, worker]));
    for (const [id, column] of this.columns) {
      const worker = states.get(id);
      const isThere = worker?.reachable;
      column.num_steps.push(isThere ? worker.depth.effective : null);
      column.accept_length.push(isThere ? worker.accept_length : null);
      column.tokens_per_second.push(isThere ? worker.tokens_per_second : null);
    }
    while (this.times.length > 2 && time - this.times[0] > KEPT_SECONDS) {
      this.times.shift();
      for (const column of this.columns.values()) for (const values of Object.values(column)) values.shift();
    }
  }

  /** The value of a worker at a place; without a place the newest. */
  at(id, key, place) {
    const values = this.columns.get(id)?.[key];
    return values?.[place ?? values.length - 1] ?? null;
  }
}

/** How a worker's line looks, by its place in the list of workers. */
export function look(place) {
  return { colour: COLOURS[place % COLOURS.length], dash: DASHES[Math.floor(place / COLOURS.length) % DASHES.length] };
}

/** The three charts. `onCursor(place | null)` tells where the mouse points. */
export class Charts {
  #made = [];
  #shown = "";
  #marks = [];

  constructor(series, onCursor) {
    this.series = series;
    this.onCursor = onCursor;
    this.resizing = new ResizeObserver((entries) => {
      for (const { target, contentRect } of entries) {
        const chart = this.#made.find((made) => made.root.parentElement === target);
        if (chart && contentRect.width > 0) chart.setSize({ width: contentRect.width, height: HEIGHT });
      }
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.clear());
  }

  /** Take all charts down; the next `draw` makes them anew. */
  clear() {
    this.resizing.disconnect();
    for (const chart of this.#made) chart.destroy();
    this.#made = [];
  }

  /**
   * Bring the charts up to date.
   *
   * `places`: the elements that hold them; `shown`: `[{id, place}]`, by their place in the list of workers; `marks`: times at which somebody or
   * something changed a depth, `[{seconds, isOrder}]`.
   */
  draw(places, shown, marks) {
    this.#marks = marks;
    const signature = JSON.stringify(shown);
    if (signature !== this.#shown || this.#made.some((chart, i) => chart.root.parentElement !== places[i])) this.clear();
    this.#shown = signature;
    if (this.#made.length === 0) {
      this.#made = CHARTS.map((chart, i) => new uPlot(this.#options(chart, shown, places[i]), this.#data(chart, shown), places[i]));
      for (const place of places) this.resizing.observe(place);
    } else {
      CHARTS.forEach((chart, i) => this.#made[i].setData(this.#data(chart, shown)));
    }
  }

  #data(chart, shown) {
    return [this.series.times, ...shown.map(({ id }) => this.series.columns.get(id)?.[chart.key] ?? [])];
  }

  #options(chart, shown, place) {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--pico-muted-color").trim();
    const grid = style.getPropertyValue("--line").trim();
    const axis = { stroke: ink, font: "11px system-ui, sans-serif", grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    return {
      width: Math.max(place.clientWidth, 100),
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: "slipstream" }, y: false, drag: { x: false, y: false }, points: { size: 6 } },
      padding: [8, 26, 0, 0],
      scales: { x: { time: true, range: (_, low, high) => [Math.min(low, high - LEAST_SECONDS), high] }, y: { range: (_, low, high) => limits(chart, low, high) } },
      axes: [
        { ...axis, size: 22, space: 70, values: (_, ticks, __, ___, step) => ticks.map((tick) => axisTime(tick, step < 60)) },
        { ...axis, size: 36, space: 28, values: (_, ticks) => ticks.map((tick) => (tick >= 1000 ? `${tick / 1000}k` : String(tick))), incrs: chart.places === 0 ? [1, 2, 5, 10, 20] : undefined },
      ],
      series: [{}, ...shown.map(({ place }) => ({
        stroke: look(place).colour, dash: look(place).dash, width: 2, points: { show: false },
        paths: chart.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      }))],
      hooks: {
        setCursor: [(plot) => { if (plot === this.#made[0]) this.onCursor(plot.cursor.left >= 0 ? plot.cursor.idx : null); }],
        drawClear: chart.marked ? [(plot) => this.#mark(plot, ink, style.getPropertyValue("--pico-primary").trim())] : [],
      },
    };
  }

  /** Draw a thin line at each change; an operator's in colour. */
  #mark(plot, ink, accent) {
    const { ctx, bbox } = plot;
    const inside = this.#marks.filter(({ seconds }) => seconds >= plot.scales.x.min && seconds <= plot.scales.x.max);
    const drawn = inside.length > MOST_MARKS ? inside.filter(({ isOrder }) => isOrder) : inside;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const { seconds, isOrder } of drawn) {
      const x = Math.round(plot.valToPos(seconds, "x", true));
      ctx.globalAlpha = isOrder ? 0.9 : 0.35;
      ctx.strokeStyle = isOrder ? accent : ink;
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
}

function limits(chart, low, high) {
  const [least, most] = chart.least;
  return [Math.min(low ?? least, least), Math.max((high ?? most) * (chart.stepped ? 1 : 1.1), most) + (chart.stepped ? 0.5 : 0)];
}
