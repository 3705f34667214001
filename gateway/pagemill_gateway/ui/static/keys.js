// What each API key may do, and what it has used of its limits. Use is updated in place, so that focus and scrolling stay.
import { askJson } from "./gateway.js";
import { make, number, percent, setText, table } from "./dom.js";

// One answer has the use of hundreds of limits, which may lie in a Redis.
const EVERY_MS = 5000;
const NAMES = {
  requests_per_minute: "requests per minute", tokens_per_minute: "tokens per minute", concurrency: "sequences at once",
  tokens_per_day: "tokens per day (UTC)", tokens_per_month: "tokens per month (UTC)",
};

export class KeysView {
  constructor() {
    this.content = make("div", {}, make("p", {}, "Loading"));
    this.element = make("div", {}, make("h2", {}, "API keys, their limits, and what they have used"), this.content);
    this.timer = setInterval(() => document.hidden || this.read(), EVERY_MS);
    this.read();
  }

  update() {}

  close() {
    clearInterval(this.timer);
  }

  async read() {
    try {
      const { open, is_shared: isShared, keys } = await askJson("/ui/keys");
      const parts = JSON.stringify([open, keys], (name, value) => (name === "used" ? undefined : value));
      if (parts !== this.parts) this.build(open, keys);
      this.parts = parts;
      this.uses?.forEach((use, index) => use.show(keys.flatMap((each) => each.limits)[index]));
      if (this.note) this.note.hidden = isShared;
    } catch (error) {
      this.parts = undefined;
      this.content.replaceChildren(make("p", { class: "error" }, `The keys cannot be read: ${error.message}`));
    }
  }

  build(open, keys) {
    this.uses = this.note = undefined;
    if (open) return this.content.replaceChildren(make("p", {}, "The gateway needs no keys: every client that reaches it may use all models without limits."));
    const uses = new Map(keys.flatMap((each) => each.limits).map((each) => [each, new Use(each)]));
    this.uses = [...uses.values()];
    this.note = make("p", {}, "Redis cannot be used now: what is shown was used at this gateway alone.");
    this.content.replaceChildren(this.note, table("Keys", [
      ["Tenant or key", (row) => row.account],
      ["Models", (row) => row.models?.join(", ") ?? "all"],
      ["Limits and their use", (row) => (row.limits.length ? make("ul", { class: "uses" }, row.limits.map((each) => uses.get(each).element)) : "none")],
      ["Priority", (row) => row.priority],
      ["Objective", (row) => (row.objective ? `${row.objective} %` : "–")],
      ["Role", (row) => (row.is_admin ? "admin" : "–")],
    ], keys), make("p", { class: "muted" }, "Keys of one tenant share its limits. Tokens of requests that run count as reserved. A minute is the last 60 seconds."));
  }
}

/** One limit and its use, as a bar and in words. */
class Use {
  constructor(limit) {
    this.name = `${NAMES[limit.name] ?? limit.name}${limit.model && ` of ${limit.model}`}`;
    this.text = make("span", {});
    this.meter = make("meter", { min: "0", max: String(Math.max(1, limit.value)), "aria-label": this.name });
    this.element = make("li", {}, this.meter, this.text);
  }

  show({ value, used }) {
    const isKnown = used !== null && used !== undefined;
    this.meter.hidden = !isKnown;
    if (isKnown) this.meter.value = used;
    const share = isKnown && value ? ` (${percent(used / value)})` : "";
    setText(this.text, isKnown ? `${this.name}: ${number(used)} of ${number(value)}${share}` : `${this.name}: ${number(value)}`);
  }
}
