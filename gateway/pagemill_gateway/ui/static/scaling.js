// The operator's latest decisions on the number of replicas, with its reasons.
import { askJson } from "./gateway.js";
import { make, number, table } from "./dom.js";

const EVERY_MS = 2000;
const SHOWN = 100;

export class ScalingView {
  constructor() {
    this.list = make("div", {}, make("p", {}, "Loading"));
    this.element = make("div", {}, make("h2", {}, "Scaling decisions, and why"), this.list);
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
      const { decisions } = await askJson(`/ui/scaling?limit=${SHOWN}`);
      const text = JSON.stringify(decisions);
      if (text === this.shown) return;
      this.shown = text;
      this.list.replaceChildren(...(decisions.length ? decisions.map(describe) : [make("p", {},
        "The operator has reported no decision yet. It decides on deployments with spec.autoscaling, and reports to every gateway.")]));
    } catch (error) {
      this.shown = undefined;
      this.list.replaceChildren(make("p", { class: "error" }, `The decisions cannot be read: ${error.message}`));
    }
  }
}

function describe(decision) {
  const change = decision.replicas === decision.replicas_before ? `stays at ${number(decision.replicas)}`
    : `${number(decision.replicas_before)} → ${number(decision.replicas)} replicas`;
  const isCarriedOut = !decision.mode || decision.mode === "Active";
  return make("details", { class: "message" },
    make("summary", {}, make("time", { datetime: decision.time }, localTime(decision.time)),
      ` ${decision.key}: ${change}, ${decision.reason}${isCarriedOut ? "" : ` (${decision.mode}: not carried out)`}. ${decision.message}`),
    make("p", {}, `Policy ${decision.policy || "of the default"}.`),
    decision.goals.length ? table("What each target asked for", [
      ["Target", (row) => row.name],
      ["Replicas", (row) => number(row.needed), true],
      ["Why", (row) => row.reason || "–"],
    ], decision.goals) : null);
}

/** Return a time as this machine shows it, or the text itself where it is no time. */
function localTime(text) {
  const time = new Date(text);
  return Number.isNaN(time.getTime()) ? text : time.toLocaleString("en-GB");
}
