// The operator's latest decisions on the number of replicas, with its reasons.
import { make, number, table } from "./dom.js";
import { DecisionsView } from "./requests.js";

const SHOWN = 100;

export class ScalingView extends DecisionsView {
  constructor() {
    super(`/ui/scaling?limit=${SHOWN}`, "Scaling decisions, and why", describe,
      "The operator has reported no decision yet. It decides on deployments with spec.autoscaling, and reports to every gateway.");
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
