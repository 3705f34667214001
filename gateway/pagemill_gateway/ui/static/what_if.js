// The what-if: latencies of other numbers of replicas, rates and lengths, as the autoscaler predicts them.
import { askJson } from "./gateway.js";
import { make, number, setText, table } from "./dom.js";

const FIELDS = [
  ["replicas", "Replicas", { min: "1", step: "1" }],
  ["requests_per_s", "Requests per second, in all", { min: "0", step: "any" }],
  ["prompt_tokens", "Tokens of a prompt", { min: "1", step: "1" }],
  ["cached_tokens", "of which are cached", { min: "0", step: "1" }],
  ["output_tokens", "Tokens of an answer", { min: "1", step: "1" }],
  ["percentile", "Percentile of the latencies", { min: "1", max: "99.9", step: "any" }],
];
const PAUSE_MS = 250;
const LIMITS = { steps: "steps would grow without end", tokens: "the tokens of a step", maxNumSeqs: "maxNumSeqs", blocks: "KV memory", replicas: "replicas" };

export class WhatIfView {
  constructor(state) {
    this.state = state;
    this.number = 0;
    this.fields = Object.fromEntries(FIELDS.map(([name, , attributes]) => [name, make("input", { type: "number", id: `what-if-${name}`, ...attributes })]));
    this.deployment = make("select", { id: "what-if-deployment" });
    this.result = make("div", {}, make("p", {}, "Loading"));
    this.status = make("p", { role: "status", class: "muted" });
    this.form = make("form", { on: { submit: (event) => event.preventDefault(), input: (event) => this.changed(event) } },
      make("label", { for: "what-if-deployment" }, "Deployment"), this.deployment,
      FIELDS.map(([name, title]) => [make("label", { for: `what-if-${name}` }, title), this.fields[name]]),
      make("p", { class: "buttons" }, make("button", { type: "button", on: { click: () => this.start() } }, "As it is now")));
    this.element = make("div", { class: "chat" },
      make("section", { "aria-label": "Load" }, make("h2", {}, "What if"), this.form),
      make("section", { "aria-label": "Prediction" }, make("h2", {}, "Prediction"), this.status, this.result));
  }

  update() {
    const keys = (this.state.fleet?.models ?? []).map((each) => each.key);
    if (keys.join("\n") === this.keys) return;
    const chosen = this.deployment.value;
    this.keys = keys.join("\n");
    this.deployment.replaceChildren(...keys.map((each) => make("option", { value: each, selected: each === chosen }, each)));
    if (this.deployment.value !== chosen || !chosen) this.start();
  }

  close() {
    clearTimeout(this.timer);
  }

  /** Ask for the deployment as it is now, and show that in the fields. */
  start() {
    for (const [name, field] of Object.entries(this.fields)) field.value = name === "percentile" ? "95" : "";
    this.ask();
  }

  changed(event) {
    clearTimeout(this.timer);
    if (event.target === this.deployment) this.start();
    else this.timer = setTimeout(() => this.ask(), PAUSE_MS);
  }

  async ask() {
    if (!this.deployment.value) return this.result.replaceChildren(make("p", {}, "The gateway knows no model yet."));
    const number = (this.number += 1);
    const query = new URLSearchParams({ deployment: this.deployment.value });
    for (const [name, field] of Object.entries(this.fields)) if (field.value !== "") query.set(name, field.value);
    try {
      const answer = await askJson(`/ui/what-if?${query}`);
      if (number === this.number) this.show(answer);
    } catch (error) {
      if (number !== this.number) return;
      setText(this.status, "");
      this.result.replaceChildren(make("p", { class: "error" }, error.message));
    }
  }

  show({ asked, now, unknown, rows }) {
    for (const [name, field] of Object.entries(this.fields)) if (field.value === "" && field !== document.activeElement) field.value = asked[name];
    const ms = (value, digits) => (value === null ? "without bound" : `${number(value, digits)} ms`);
    const row = rows.find((each) => each.replicas === asked.replicas);
    setText(this.status, row ? `${number(asked.replicas)} replicas at ${number(asked.requests_per_s, 2)} requests/s: first token within ${ms(row.ttft_ms)}, `
      + `then ${ms(row.tpot_ms, 1)} a token, for ${number(asked.percentile, 1)} % of the requests.` : "");
    this.result.replaceChildren(
      unknown ? make("p", {}, unknown) : table("Predicted latencies", [
        ["Replicas", (each) => number(each.replicas) + (each === row ? " (asked)" : ""), true],
        ["First token", (each) => ms(each.ttft_ms), true],
        ["Each further token", (each) => ms(each.tpot_ms, 1), true],
        ["Most requests/s", (each) => number(each.most_requests_per_s, 2), true],
        ["What runs out", (each) => LIMITS[each.limit] ?? (each.limit || "–")],
      ], rows),
      make("p", { class: "muted" }, `Now: ${number(now.replicas)} ready, ${number(now.requests_per_s, 2)} requests/s of ${number(now.prompt_tokens)} tokens, `
        + `${number(now.cached_tokens)} of them cached, and ${number(now.output_tokens)} tokens of answer. The prediction is the autoscaler's, from the step times that the engines measure.`));
  }
}
