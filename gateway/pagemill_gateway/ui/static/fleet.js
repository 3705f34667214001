// The view of all engines as tiles. Tiles are updated in place, so that focus and scrolling stay.
import { make, number, percent, setText } from "./dom.js";

const BAD = new Set(["unreachable", "stale", "ejected", "crashed", "failed"]);

export class FleetView {
  constructor(state) {
    this.state = state;
    this.sections = new Map();
    this.element = make("div", {}, this.empty = make("p", {}, "The gateway knows no model yet."));
  }

  update() {
    const models = this.state.fleet?.models ?? [];
    this.empty.hidden = models.length > 0;
    keep(this.sections, models, (each) => each.key, (each) => new ModelSection(each), this.element);
  }
}

class ModelSection {
  constructor(model) {
    this.tiles = new Map();
    this.facts = make("ul", { class: "facts" });
    this.list = make("ul", { class: "tiles" });
    this.element = make("section", { "aria-label": model.key }, make("h2", {}, model.name), this.facts, this.list);
  }

  update(model) {
    const ready = model.engines.filter((each) => each.phase === "ready").length;
    const facts = [
      `Deployment: ${model.key}`,
      ...(model.aliases.length ? [`Also called: ${model.aliases.join(", ")}`] : []),
      ...(model.adapters.length ? [`Adapters: ${model.adapters.join(", ")}`] : []),
      `Engines ready: ${ready} of ${model.engines.length}`,
      `Waiting at the gateway: ${number(model.queue.requests)}${model.queue.requests ? ` (oldest ${model.queue.oldest_s} s)` : ""}`,
      `Tokens/s: ${number(model.engines.reduce((sum, each) => sum + (each.tokens_per_s ?? 0), 0))}`,
    ];
    if (facts.join("\n") !== this.shown) {
      this.shown = facts.join("\n");
      this.facts.replaceChildren(...facts.map((each) => make("li", {}, each)));
    }
    keep(this.tiles, model.engines, (each) => each.id, () => new EngineTile(), this.list);
  }
}

class EngineTile {
  constructor() {
    this.name = make("h3", {});
    this.phase = make("span", { class: "phase" });
    this.active = make("span", { class: "active" });
    this.cached = make("span", { class: "cached" });
    this.bar = make("div", { class: "bar", role: "img" }, this.active, this.cached);
    this.values = Object.fromEntries(["KV active", "KV cached", "KV free", "Running", "Waiting", "Tokens/s, about"].map((each) => [each, make("dd", {})]));
    this.detail = make("p", { class: "muted" });
    this.element = make("li", { class: "tile" }, this.phase, this.name, this.bar,
      make("dl", { class: "numbers" }, Object.entries(this.values).map(([name, value]) => [make("dt", {}, name), value])), this.detail);
  }

  update(engine) {
    const key = JSON.stringify(engine);
    if (key === this.shown) return;
    this.shown = key;
    setText(this.name, engine.id);
    setText(this.phase, engine.phase);
    setText(this.detail, engine.phase === "ready" ? "" : engine.detail);
    this.element.dataset.phase = engine.phase;
    this.element.toggleAttribute("data-bad", BAD.has(engine.phase));
    const { active = 0, cached = 0, free = 0, unit = "blocks" } = engine.kv ?? {};
    const total = active + cached + free;
    const share = (part) => (total ? part / total : null);
    this.active.style.width = `${100 * (share(active) ?? 0)}%`;
    this.cached.style.width = `${100 * (share(cached) ?? 0)}%`;
    this.bar.setAttribute("aria-label", `KV cache: ${percent(share(active))} active, ${percent(share(cached))} cached, ${percent(share(free))} free`);
    const amount = (part) => (!total ? "–" : unit === "bytes" ? `${number(part / 2 ** 20, 1)} MiB` : `${number(part)} blocks`);
    const shown = { "KV active": amount(active), "KV cached": amount(cached), "KV free": amount(free),
      Running: number(engine.running), Waiting: number(engine.waiting), "Tokens/s, about": number(engine.tokens_per_s, 1) };
    for (const [name, text] of Object.entries(shown)) setText(this.values[name], text);
  }
}

/** Make, update and remove the parts in `known` so that `parent` has one for each item, in their order. */
function keep(known, items, keyOf, makePart, parent) {
  const wanted = new Set(items.map(keyOf));
  for (const [key, part] of known) {
    if (wanted.has(key)) continue;
    part.element.remove();
    known.delete(key);
  }
  for (const item of items) {
    let part = known.get(keyOf(item));
    if (!part) {
      known.set(keyOf(item), (part = makePart(item)));
      parent.append(part.element);
    }
    part.update(item);
  }
}
