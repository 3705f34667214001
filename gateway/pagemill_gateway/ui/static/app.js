// The page: the views by the address's fragment, and the one event stream that feeds them.
import { clock, make, setText } from "./dom.js";
import { FleetView } from "./fleet.js";
import { ask, events, hasKey, Refused, setKey } from "./gateway.js";
import { KeysView } from "./keys.js";
import { LoadView } from "./load.js";
import { PlaygroundView } from "./playground.js";
import { RequestsView } from "./requests.js";
import { ScalingView } from "./scaling.js";
import { WhatIfView } from "./what_if.js";

const VIEWS = {
  fleet: ["Fleet", FleetView], load: ["Load", LoadView], scaling: ["Scaling", ScalingView], "what-if": ["What if", WhatIfView],
  requests: ["Requests", RequestsView], keys: ["Keys", KeysView], playground: ["Playground", PlaygroundView],
};
const KEPT_SAMPLES = 180;
const SILENT_MS = 8000;
const RETRY_MS = [300, 1000, 2000, 5000];

const state = { fleet: null, samples: [] };
const [views, main, connection, notice] = ["views", "view", "connection", "notice"].map((id) => document.getElementById(id));
const made = new Map();
let shown = null;

function showView(moveFocus) {
  const name = location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "fleet";
  const [title, View] = VIEWS[name];
  for (const link of views.children) link.toggleAttribute("aria-current", false);
  views.querySelector(`[href="#${name}"]`).setAttribute("aria-current", "page");
  document.title = `${title} – Pagemill`;
  // The playground keeps its conversation while other views are looked at.
  if (shown && !(shown instanceof PlaygroundView)) shown.close?.();
  if (name !== "playground") made.delete(name);
  if (!made.has(name)) made.set(name, new View(state));
  shown = made.get(name);
  main.replaceChildren(shown.element);
  shown.update();
  if (moveFocus) main.focus();
}

function tell(text) {
  setText(notice, text);
  notice.hidden = !text;
}

function askForKey(message) {
  const input = make("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const form = make("form", { on: { submit: (event) => {
    event.preventDefault();
    setKey(input.value);
    main.replaceChildren(make("p", {}, "Connecting"));
    follow();
  } } }, make("h2", {}, "A key is needed"), make("p", { class: hasKey() ? "error" : "" }, message),
    make("label", { for: "key" }, "API key with role=admin (kept in this tab's memory only)"), input,
    make("p", { class: "buttons" }, make("button", { class: "main" }, "Look")));
  main.replaceChildren(form);
  input.focus();
}

/** Show what the stream says until it may not be read any more; connect again after faults. */
async function follow() {
  let numFaults = 0, lostAt = 0;
  for (;;) {
    const stop = new AbortController();
    let timer = setTimeout(() => stop.abort(), SILENT_MS);
    try {
      const response = await ask("/ui/events", { signal: stop.signal });
      let isFirst = true;
      for await (const event of events(response, () => {
        clearTimeout(timer);
        timer = setTimeout(() => stop.abort(), SILENT_MS);
      })) {
        if (isFirst) connected(lostAt);
        [isFirst, numFaults, lostAt] = [false, 0, 0];
        receive(event);
      }
    } catch (error) {
      if (error instanceof Refused && [401, 403].includes(error.status)) {
        setText(connection, "Not allowed");
        tell("");
        return askForKey(error.message);
      }
    } finally {
      clearTimeout(timer);
    }
    lostAt ||= Date.now() / 1000;
    setText(connection, "Disconnected");
    tell(`The connection to the gateway was lost at ${clock(lostAt)}. What is shown is from before; connecting again.`);
    await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(numFaults, RETRY_MS.length - 1)]));
    numFaults += 1;
  }
}

function connected(lostAt) {
  state.samples = [];
  tell(lostAt ? `Connected again. The connection was lost at ${clock(lostAt)}.` : "");
  if (!shown || !main.contains(shown.element)) showView(false);
}

function receive(event) {
  const data = JSON.parse(event.data);
  if (event.name === "sample") {
    state.samples.push(data);
    state.samples.splice(0, state.samples.length - KEPT_SAMPLES);
  } else if (event.name === "fleet") {
    const before = state.fleet?.started_unix_s;
    if (before && before !== data.started_unix_s) tell(`Connected again. The gateway was restarted at ${clock(data.started_unix_s)}.`);
    state.fleet = data;
    setText(connection, data.ready ? "Live" : `Not ready: ${data.detail || "starting"}`);
  }
  shown?.update();
}

views.append(...Object.entries(VIEWS).map(([name, [title]]) => make("a", { href: `#${name}` }, title)));
addEventListener("hashchange", () => shown && showView(true));
addEventListener("resize", () => shown?.update());
follow();
