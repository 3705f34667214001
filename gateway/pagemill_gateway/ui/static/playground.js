// The chat playground: a conversation with a model, with the parameters, tools and structured output of the API. What a
// tool returns is written by hand.
import { make, number, percent, setText } from "./dom.js";
import { ask, events, hasKey } from "./gateway.js";
import { asCurl, asPython } from "./request_code.js";

const NUMBERS = [["temperature", "Temperature", "0.7", "0.1"], ["top_p", "Top p", "", "0.05"], ["max_tokens", "Most tokens of the answer", "256", "1"], ["seed", "Seed", "", "1"]];
const FORMATS = { text: "Text", json_object: "Any JSON object", json_schema: "JSON by a schema" };
const SCHEMA = '{\n  "type": "object",\n  "properties": {"answer": {"type": "string"}},\n  "required": ["answer"],\n  "additionalProperties": false\n}';
const TOOL_CHOICES = { auto: "When the model wants to", required: "Always", none: "Never" };
const SURE = 0.5;

export class PlaygroundView {
  constructor(state) {
    this.state = state;
    this.messages = [];
    this.calls = [];
    this.fields = {};
    this.results = make("div", { role: "group", "aria-label": "Results of the tools", hidden: true });
    this.log = make("div", { role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.status = make("p", { role: "status", class: "muted" });
    this.send = make("button", { class: "main", type: "submit" }, "Send");
    this.code = { curl: make("pre", { tabindex: "0", "aria-label": "The request as curl" }), python: make("pre", { tabindex: "0", "aria-label": "The request in Python" }) };
    const button = (text, press) => make("button", { type: "button", on: { click: press } }, text);
    const form = make("form", { on: { submit: (event) => this.submit(event), input: () => this.showCode() } },
      make("div", { class: "chat" },
        make("section", { "aria-label": "Parameters" }, make("h2", {}, "Parameters"), this.parameters()),
        make("section", { "aria-label": "Chat" }, make("h2", {}, "Chat"), this.log, this.results,
          this.field("prompt", "Message", make("textarea", { rows: "3", required: true })),
          make("p", { class: "buttons" }, this.send, button("Stop", () => this.stopping?.abort()), button("Start again", () => this.clear())),
          this.status,
          make("details", {}, make("summary", {}, "The same request as curl"), this.code.curl),
          make("details", {}, make("summary", {}, "The same request in Python"), this.code.python))));
    this.element = make("div", {}, form);
    this.showCode();
  }

  parameters() {
    const check = (name, text, on) => {
      this.fields[name] = make("input", { type: "checkbox", checked: on });
      return make("label", {}, this.fields[name], text);
    };
    return [
      this.field("model", "Model", make("select", {})),
      this.field("system", "System message", make("textarea", { rows: "2" })),
      NUMBERS.map(([name, title, value, step]) => this.field(name, title, make("input", { type: "number", value, step }))),
      check("stream", "Stream the answer", true),
      check("logprobs", "Show log probabilities", false),
      this.field("format", "Form of the answer", make("select", {}, options(FORMATS))),
      this.field("schema", "JSON Schema", make("textarea", { rows: "4" }, SCHEMA)),
      this.field("tools", "Tools (JSON list, as the API takes them)", make("textarea", { rows: "4" })),
      this.field("tool_choice", "Call tools", make("select", {}, options(TOOL_CHOICES))),
    ];
  }

  field(name, title, input) {
    input.id = `field-${name}`;
    this.fields[name] = input;
    return [make("label", { for: input.id }, title), input];
  }

  update() {
    const names = [...new Set((this.state.fleet?.models ?? []).flatMap((each) => [each.name, ...each.aliases, ...each.adapters]))];
    if (names.join("\n") === this.names) return;
    this.names = names.join("\n");
    const chosen = this.fields.model.value;
    this.fields.model.replaceChildren(...names.map((each) => make("option", { value: each, selected: each === chosen }, each)));
    this.showCode();
  }

  /** Return the request's body. Throws `Error` with the field's name for text that is no JSON. */
  body() {
    const { fields } = this;
    const system = fields.system.value ? [{ role: "system", content: fields.system.value }] : [];
    const body = { model: fields.model.value, messages: [...system, ...this.messages, ...this.newMessages()] };
    for (const [name] of NUMBERS) if (fields[name].value !== "") body[name] = Number(fields[name].value);
    if (fields.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    if (fields.format.value === "json_object") body.response_format = { type: "json_object" };
    if (fields.format.value === "json_schema") body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: parsed("JSON Schema", fields.schema.value) } };
    if (fields.tools.value.trim()) Object.assign(body, { tools: parsed("Tools", fields.tools.value), tool_choice: fields.tool_choice.value });
    if (fields.stream.checked) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
    return body;
  }

  /** Return the results of the tools that the last answer called, and the message, which is then not needed. */
  newMessages() {
    const results = this.calls.map(({ call, input }) => ({ role: "tool", tool_call_id: call.id, content: input.value }));
    const text = this.fields.prompt.value;
    return text || !results.length ? [...results, { role: "user", content: text }] : results;
  }

  /** Ask for the result of each of these calls of tools. */
  askForResults(calls) {
    this.calls = calls.map((call, index) => ({ call, input: make("textarea", { rows: "2", id: `result-${index}` }) }));
    this.results.replaceChildren(...this.calls.flatMap(({ call, input }) =>
      [make("label", { for: input.id }, `Result of ${call.function.name}(${call.function.arguments})`), input]));
    this.results.hidden = !calls.length;
    this.fields.prompt.required = !calls.length;
  }

  showCode() {
    try {
      const body = this.body();
      setText(this.code.curl, asCurl(location.origin, body, hasKey()));
      setText(this.code.python, asPython(location.origin, body, hasKey()));
    } catch (error) {
      for (const each of Object.values(this.code)) setText(each, error.message);
    }
  }

  clear() {
    this.stopping?.abort();
    this.messages = [];
    this.askForResults([]);
    this.log.replaceChildren();
    setText(this.status, "");
    this.fields.prompt.focus();
  }

  async submit(event) {
    event.preventDefault();
    if (this.stopping) return;
    const answer = new Answer();
    try {
      const body = this.body();
      const asked = this.newMessages();
      const names = [...this.calls.map(({ call }) => `Result of ${call.function.name}`), "You"];
      this.log.append(...asked.map((each, index) => make("div", { class: "message" }, make("h3", {}, names[index]), each.content)), answer.element);
      this.stopping = new AbortController();
      this.send.setAttribute("aria-disabled", "true");
      setText(this.status, "Generating");
      await answer.read(body, this.stopping.signal);
      this.messages.push(...asked, answer.message());
      this.fields.prompt.value = "";
      this.askForResults(answer.message().tool_calls ?? []);
      setText(this.status, answer.summary());
    } catch (error) {
      const text = error.name === "AbortError" ? "Stopped." : `Error: ${error.message}`;
      setText(this.status, text);
      answer.fail(text);
    } finally {
      this.stopping = undefined;
      this.send.removeAttribute("aria-disabled");
      this.showCode();
      (this.calls[0]?.input ?? this.fields.prompt).focus();
    }
  }
}

/** One answer: its text as it arrives, its reasoning, tool calls and log probabilities. */
class Answer {
  constructor() {
    this.content = this.reasoning = "";
    this.calls = [];
    this.logprobs = [];
    this.parts = { reasoning: make("p", { class: "muted" }), content: make("div", {}), calls: make("div", {}), tokens: make("div", {}), error: make("p", { class: "error" }) };
    this.element = make("div", { class: "message" }, make("h3", {}, "Model"), Object.values(this.parts));
  }

  async read(body, signal) {
    const startedAt = performance.now();
    const response = await ask("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal });
    this.route = response.headers.get("x-pagemill-route");
    if (!body.stream) {
      this.add(await response.json(), "message");
    } else {
      for await (const event of events(response)) {
        if (event.data === "[DONE]") break;
        this.add(JSON.parse(event.data), "delta", startedAt);
      }
    }
    this.totalMs = performance.now() - startedAt;
    this.showTokens();
  }

  add(data, field, startedAt) {
    if (data.error) throw new Error(data.error.message);
    this.usage = data.usage ?? this.usage;
    const choice = data.choices?.[0];
    if (!choice) return;
    const part = choice[field] ?? {};
    if (startedAt && part.content) this.firstMs ??= performance.now() - startedAt;
    this.content += part.content ?? "";
    this.reasoning += part.reasoning_content ?? part.reasoning ?? "";
    this.finish = choice.finish_reason ?? this.finish;
    this.logprobs.push(...(choice.logprobs?.content ?? []));
    for (const [position, call] of (part.tool_calls ?? []).entries()) {
      const known = (this.calls[call.index ?? position] ??= { id: call.id, type: "function", function: { name: "", arguments: "" } });
      known.function.name += call.function?.name ?? "";
      known.function.arguments += call.function?.arguments ?? "";
    }
    setText(this.parts.content, this.content);
    setText(this.parts.reasoning, this.reasoning);
    setText(this.parts.calls, this.calls.map((each) => `Calls ${each.function.name}(${each.function.arguments})`).join("\n"));
  }

  showTokens() {
    if (!this.logprobs.length) return;
    const shown = make("p", { role: "status" });
    const tell = (token) => setText(shown, `${JSON.stringify(token.token)}: ${percent(Math.exp(token.logprob))}. Candidates: `
      + token.top_logprobs.map((each) => `${JSON.stringify(each.token)} ${percent(Math.exp(each.logprob))}`).join(", "));
    this.parts.tokens.replaceChildren(make("h3", {}, "Tokens and how likely they were"),
      make("ul", { class: "tokens" }, this.logprobs.map((token) => make("li", {}, make("button", { type: "button",
        class: Math.exp(token.logprob) >= SURE ? "sure" : "unsure", "aria-label": `${token.token}, ${percent(Math.exp(token.logprob))}`,
        on: { click: () => tell(token), focus: () => tell(token) } }, token.token || " ")))), shown);
  }

  message() {
    const calls = this.calls.filter(Boolean);
    return { role: "assistant", content: this.content, ...(calls.length ? { tool_calls: calls } : {}) };
  }

  summary() {
    const tokens = this.usage ? `${this.usage.completion_tokens} tokens` : "";
    return [tokens, this.firstMs && `first after ${number(this.firstMs)} ms`, `${number(this.totalMs)} ms in all`, this.finish && `ended by ${this.finish}`, this.route]
      .filter(Boolean).join("; ");
  }

  fail(text) {
    setText(this.parts.error, text);
  }
}

function options(texts) {
  return Object.entries(texts).map(([value, text]) => make("option", { value }, text));
}

function parsed(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}. Write JSON, or empty the field.`);
  }
}
