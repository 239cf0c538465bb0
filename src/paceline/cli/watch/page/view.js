/** What the page shows, in the address after "#": a link or a reload restores it. */

const DEFAULTS = new Map([
  ["run", ""],
  ["x", "step"],
  ["smooth", "0"],
  ["log", ""],
  ["from", ""],
  ["to", ""],
  ["rank", ""],
  ["q", ""],
  ["state", ""],
  ["sort", "-started"],
  ["pick", ""],
  ["show", ""],
]);
/** What belongs to one picture and is dropped when another run is opened. */
const OF_ONE_PAGE = ["from", "to", "rank"];

export class View extends EventTarget {
  #values = new Map(DEFAULTS);

  constructor() {
    super();
    this.#read();
    // Not for our own changes: replaceState and pushState do not fire it.
    addEventListener("hashchange", () => {
      this.#read();
      this.#announce(true);
    });
  }

  get(name) {
    return this.#values.get(name);
  }
  number(name) {
    return this.get(name) === "" ? null : Number(this.get(name));
  }

  /** A list of names, which may contain anything. */
  list(name) {
    try {
      return JSON.parse(this.get(name) || "[]").map(String);
    } catch {
      return [];
    }
  }

  /** changes: an object with names from DEFAULTS, whose values are made text. */
  set(changes) {
    let isChanged = false;
    for (const [name, value] of Object.entries(changes)) {
      const text = Array.isArray(value)
        ? value.length
          ? JSON.stringify(value)
          : ""
        : value === null
          ? ""
          : String(value);
      isChanged ||= this.#values.get(name) !== text;
      this.#values.set(name, text);
    }
    if (!isChanged) return;
    history.replaceState(null, "", this.addressOf());
    this.#announce(false);
  }

  /** Show a run, or the list for "". */
  open(run) {
    for (const name of OF_ONE_PAGE) this.#values.set(name, "");
    this.#values.set("run", run);
    history.pushState(null, "", this.addressOf());
    this.#announce(true);
  }

  /** The address of a run's page, or of this one. */
  addressOf(run = null) {
    const query = new URLSearchParams();
    for (const [name, value] of this.#values)
      if (value !== DEFAULTS.get(name) && (run === null || !OF_ONE_PAGE.includes(name))) query.set(name, value);
    if (run !== null) query.set("run", run);
    return `${location.pathname}#${query}`;
  }

  #read() {
    const query = new URLSearchParams(location.hash.slice(1));
    for (const [name, usual] of DEFAULTS) this.#values.set(name, query.get(name) ?? usual);
  }

  #announce(isNewPage) {
    this.dispatchEvent(new CustomEvent("change", {detail: {isNewPage}}));
  }
}
