// The plots of the last quarter of an hour, by deployment. Each has its latest values as text, since a canvas has none.
import { clock, make, number, percent, setText } from "./dom.js";

const WINDOW_S = 15 * 60;
const PLOTS = [
  ["Requests", [["arriving each second", "requests_per_s", (value) => number(value, 2)]]],
  ["Queues", [["at the gateway", "queued", number], ["at engines", "waiting", number], ["running", "running", number]]],
  ["Headroom", [["free share of slots and KV", "headroom", percent], ["KV in use", "kv", percent]], true],
  ["Engines", [["ready", "ready", number]]],
];

export class LoadView {
  constructor(state) {
    this.state = state;
    this.plots = new Map();
    this.element = make("div", {}, this.empty = make("p", {}, "No load was measured yet."));
  }

  update() {
    const keys = (this.state.fleet?.models ?? []).map((each) => each.key);
    this.empty.hidden = keys.length > 0;
    const shown = [...this.plots.keys()];
    if (keys.join("\n") !== shown.join("\n")) this.rebuild(keys);
    for (const [key, plots] of this.plots) for (const plot of plots) plot.update(this.state.samples, key);
  }

  rebuild(keys) {
    this.close();
    this.plots = new Map(keys.map((key) => [key, PLOTS.map((each) => new Plot(...each))]));
    this.element.replaceChildren(this.empty, ...[...this.plots].map(([key, plots]) =>
      make("section", { "aria-label": key }, make("h2", {}, key), make("div", { class: "plots" }, plots.map((each) => each.element)))));
  }

  close() {
    for (const plots of this.plots.values()) for (const plot of plots) plot.close();
    this.plots.clear();
  }
}

class Plot {
  constructor(title, series, isShare = false) {
    this.title = title;
    this.series = series;
    this.isShare = isShare;
    this.canvas = make("div", { role: "img" });
    this.latest = make("p", { class: "muted" });
    this.element = make("figure", { class: "plot" }, make("figcaption", {}, title), this.canvas, this.latest);
    this.shown = -1;
  }

  update(samples, key) {
    const last = samples.at(-1);
    const width = this.canvas.clientWidth;
    if (!last || !width || (last.unix_s === this.shown && width === this.width)) return;
    [this.shown, this.width] = [last.unix_s, width];
    const values = this.series.map(([, field]) => samples.map((each) => each.loads[key]?.[field] ?? null));
    const text = this.series.map(([name, , form], index) => `${name}: ${form(values[index].at(-1))}`).join("; ");
    setText(this.latest, text);
    this.canvas.setAttribute("aria-label", `${this.title} until ${clock(last.unix_s)}. ${text}`);
    this.plot ??= this.makePlot(width);
    if (this.plot.width !== width) this.plot.setSize({ width, height: 170 });
    this.plot.setData([samples.map((each) => each.unix_s), ...values]);
    this.plot.setScale("x", { min: last.unix_s - WINDOW_S, max: last.unix_s });
  }

  makePlot(width) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--text"), grid: { stroke: colour("--soft"), width: 1 }, ticks: { show: false } };
    const dashes = [[], [6, 4], [2, 3]];
    return new window.uPlot({
      width,
      height: 170,
      cursor: { show: false },
      legend: { show: false },
      scales: { y: this.isShare ? { range: [0, 1] } : { range: (_, min, max) => [0, Math.max(1, max * 1.1)] } },
      axes: [axis, { ...axis, size: 56, values: (_, ticks) => ticks.map((each) => (this.isShare ? percent(each) : number(each, 2))) }],
      series: [{}, ...this.series.map(([name], index) => ({ label: name, stroke: colour(["--active", "--bad", "--good"][index]), width: 2, dash: dashes[index], points: { show: false } }))],
    }, [[], ...this.series.map(() => [])], this.canvas);
  }

  close() {
    this.plot?.destroy();
    this.plot = undefined;
  }
}
