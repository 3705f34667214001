// What each API key may do.
import { askJson } from "./gateway.js";
import { make, number, table } from "./dom.js";

export class KeysView {
  constructor() {
    this.content = make("div", {}, make("p", {}, "Loading"));
    this.element = make("div", {}, make("h2", {}, "API keys and their limits"), this.content);
    this.read();
  }

  update() {}

  close() {}

  async read() {
    try {
      const { open, keys } = await askJson("/ui/keys");
      this.content.replaceChildren(open
        ? make("p", {}, "The gateway needs no keys: every client that reaches it may use all models without limits.")
        : table("Keys", [
          ["Tenant or key", (row) => row.account],
          ["Models", (row) => row.models?.join(", ") ?? "all"],
          ["Limits", (row) => row.limits.map((each) => `${each.name}${each.model && ` of ${each.model}`} ${number(each.value)}`).join(", ") || "none"],
          ["Priority", (row) => row.priority],
          ["Objective", (row) => (row.objective ? `${row.objective} %` : "–")],
          ["Role", (row) => (row.is_admin ? "admin" : "–")],
        ], keys));
    } catch (error) {
      this.content.replaceChildren(make("p", { class: "error" }, `The keys cannot be read: ${error.message}`));
    }
  }
}
