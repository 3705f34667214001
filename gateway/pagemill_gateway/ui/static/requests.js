// The latest routing decisions: where each request went, by which policy, and what the other engines would have cost.
import { askJson } from "./gateway.js";
import { clock, make, number, table } from "./dom.js";

const EVERY_MS = 2000;

/** A list of decisions, read again and again unless one of them is open. `none`: what to show where there are none. */
export class DecisionsView {
  constructor(path, heading, describe, none) {
    [this.path, this.describe, this.none] = [path, describe, none];
    this.list = make("div", {}, make("p", {}, "Loading"));
    this.element = make("div", {}, make("h2", {}, heading), this.list);
    this.timer = setInterval(() => this.read(), EVERY_MS);
    this.read();
  }

  update() {}

  close() {
    clearInterval(this.timer);
  }

  async read() {
    // Reading or operating with the keyboard within the list must not be interrupted by newer decisions.
    if (this.list.contains(document.activeElement) || this.list.querySelector("details[open]")) return;
    try {
      const { decisions } = await askJson(this.path);
      const text = JSON.stringify(decisions);
      if (text === this.shown) return;
      this.shown = text;
      this.list.replaceChildren(...(decisions.length ? decisions.map(this.describe) : [make("p", {}, this.none)]));
    } catch (error) {
      this.shown = undefined;
      this.list.replaceChildren(make("p", { class: "error" }, `The decisions cannot be read: ${error.message}`));
    }
  }
}

export class RequestsView extends DecisionsView {
  constructor() {
    super("/ui/decisions?limit=30", "Where requests went, and why", describe, "No request was sent to an engine yet.");
  }
}

function describe(decision) {
  const ms = (value) => (value === null ? "–" : `${number(value)} ms`);
  return make("details", { class: "message" },
    make("summary", {}, `${clock(decision.unix_s)} ${decision.deployment} → ${decision.choice}: ${decision.why || "the only engine"}; `
      + `first token predicted ${ms(decision.predicted_ttft_ms)}, measured ${ms(decision.measured_ttft_ms)}`),
    make("p", {}, `Policy ${decision.policy}; ${number(decision.prompt_tokens)} tokens of prompt; ${decision.num_candidates} engines were compared (request ${decision.decision}).`),
    table("Compared engines", [
      ["Engine", (row) => row.endpoint + (row.chosen ? " (chosen)" : "")],
      ["State", (row) => (row.state === "reported" ? "reported" : "own counts")],
      ["In flight", (row) => number(row.in_flight), true],
      ["Cached tokens", (row) => number(row.cached_tokens), true],
      ["Terms", (row) => Object.entries(row.terms).map(([name, value]) => `${name} ${number(value, 2)}`).join(", ")],
    ], decision.candidates));
}
