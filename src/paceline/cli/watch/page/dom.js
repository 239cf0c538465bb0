/** Elements and text. Nothing here parses HTML: names that come from a run's files are only ever text. */

/** attributes: `class` and other names as in HTML; `onclick` and the like are functions; null and false leave it out. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

/** Only writes what changed, so that selections stay and nothing is laid out again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A style of an element. Goes through the object model: the page's policy forbids style attributes. */
export function setStyle(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

export function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

/**
 * Makes the children of `parent` show `items`, in their order. Elements of known keys are kept and updated.
 * create(item) returns an element; update(element, item) fills it.
 */
export function showList(parent, items, keyOf, create, update = () => {}) {
  const known = parent.shownByKey ?? new Map();
  const next = new Map();
  let at = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (next.has(key)) continue;
    const node = known.get(key) ?? create(item);
    next.set(key, node);
    update(node, item);
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
  }
  for (const [key, node] of known) if (!next.has(key)) node.remove();
  parent.shownByKey = next;
}

/** Forgets the entries of `map` whose keys are not in `keys` (a Set or Map), after `close(value)`. */
export function retain(map, keys, close) {
  for (const [key, value] of map)
    if (!keys.has(key)) {
      close(value);
      map.delete(key);
    }
}

/** A part of the page with its title. */
export function section(title, id, ...children) {
  return el(
    "section",
    {class: "block", id, "aria-labelledby": `${id}-title`},
    el("h2", {id: `${id}-title`}, title),
    ...children
  );
}

/** attributes: of the element, as for `el`. */
export const button = (label, onclick, attributes = {}) =>
  el("button", {type: "button", ...attributes, onclick}, label);

/** A link within the page; with Ctrl, Shift and the like the browser opens it. */
export function link(label, onopen, attributes = {}) {
  const onclick = event => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    onopen();
  };
  return el("a", {href: "#", ...attributes, onclick}, label);
}

/** A table that scrolls to the side. heads: titles, or cells. Returns its node and its empty body. */
export function table(heads, attributes = {}) {
  const body = el("tbody"),
    cells = heads.map(head => (typeof head === "string" ? el("th", {scope: "col"}, head) : head));
  const node = el("div", {class: "scroll"}, el("table", attributes, el("thead", {}, el("tr", {}, ...cells)), body));
  return {node, body};
}

/** Buttons of which one is pressed. choices: [value, label] pairs. */
export function choice(label, choices, onchoose) {
  const buttons = choices.map(([value, text]) =>
    button(text, () => onchoose(value), {"data-value": value, "aria-pressed": "false"})
  );
  const node = el("div", {class: "choice", role: "group", "aria-label": label}, ...buttons);
  node.choose = value => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === value));
  };
  return node;
}

export const isTyping = event => /^(input|textarea|select)$/i.test(event.target.tagName ?? "");
