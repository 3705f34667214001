// The latest routing decisions: where each request went, by which policy, and what the other engines would have cost.
import { askJson } from "./gateway.js";
import { clock, make, number, table } from "./dom.js";

const EVERY_MS = 2000;

export class RequestsView {
  constructor() {
    this.list = make("div", {}, make("p", {}, "Loading"));
    this.element = make("div", {}, make("h2", {}, "Where requests went, and why"), this.list);
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
      this.show((await askJson("/ui/decisions?limit=30")).decisions);
    } catch (error) {
      this.list.replaceChildren(make("p", { class: "error" }, `The decisions cannot be read: ${error.message}`));
    }
  }

  show(decisions) {
    const newest = decisions[0]?.decision;
    const measured = decisions.map((each) => each.measured_ttft_ms).join();
    if (newest !== undefined && newest === this.newest && measured === this.measured) return;
    [this.newest, this.measured] = [newest, measured];
    this.list.replaceChildren(...(decisions.length ? decisions.map(describe) : [make("p", {}, "No request was sent to an engine yet.")]));
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
