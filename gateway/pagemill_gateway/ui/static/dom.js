// Makes elements. Text only ever becomes text nodes and attributes, never HTML: it comes from models, keys and errors.

/** Return an element; `attributes` may have `on` with listeners by event, and falsy attributes are left out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(asNode));
  return element;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** Set an element's text if it differs, so that screen readers do not read the same again. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Return a table; a column is [title, cell(row), isNumber]. */
export function table(caption, columns, rows) {
  const kind = (column) => (column[2] ? { class: "number" } : {});
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    make("table", {},
      make("caption", { class: "muted" }, caption),
      make("thead", {}, make("tr", {}, columns.map((each) => make("th", { scope: "col", ...kind(each) }, each[0])))),
      make("tbody", {}, rows.map((row) => make("tr", {}, columns.map((each) => make("td", kind(each), each[1](row))))))));
}

export function number(value, digits = 0) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`;
}

export function clock(unixS) {
  return new Date(unixS * 1000).toLocaleTimeString("en-GB");
}
