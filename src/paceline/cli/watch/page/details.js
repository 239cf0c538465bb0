/** The lower part of a run's page: events, checkpoints, plan, configuration, and the ends of the logs. */

import {choice, el, link, setStyle, setText, showList, table} from "./dom.js";
import {ago, bytes, count, counted, duration, MISSING, moment, num, percent, rate, setting} from "./format.js";
import {labelOf, looksOf} from "./marks.js";

const MAX_EVENTS = 300,
  MAX_LOG_LINES = 500;

const cells = n => () => el("tr", {}, ...Array.from({length: n}, () => el("td")));
const fill = (row, texts) => texts.forEach((text, i) => setText(row.children[i], text));

export class EventList {
  constructor() {
    this.body = el("ol", {class: "events"});
    this.note = el("p", {class: "muted"}, "No events yet.");
    this.node = el("div", {class: "scroll tall"}, this.body, this.note);
  }

  show(events) {
    this.note.hidden = events.length > 0;
    showList(
      this.body,
      events.slice(-MAX_EVENTS).reverse(),
      event => event.key,
      () => el("li", {}, el("i", {class: "dot"}), el("b"), el("span", {class: "text"}), el("small")),
      (node, event) => {
        setStyle(node.firstChild, "background", `var(--${looksOf(event).color})`);
        fill(node, ["", labelOf(event), event.text, `step ${count(event.step)} · ${moment(event.time).slice(11)}`]);
      }
    );
  }
}

export class CheckpointList {
  constructor(source, pace) {
    Object.assign(this, {source, pace});
    this.table = table(["step", "saved", "size", "metrics"]);
    this.note = el("p", {class: "muted"}, "No checkpoint yet.");
    this.node = el("div", {class: "tall"}, this.table.node, this.note);
    this.checkpoints = [];
  }

  show(checkpoints) {
    this.checkpoints = checkpoints;
    this.note.hidden = checkpoints.length > 0;
    this.table.node.hidden = !checkpoints.length;
    this.tick();
  }

  tick() {
    showList(
      this.table.body,
      this.checkpoints,
      found => found.name,
      cells(4),
      (row, found) =>
        fill(row, [
          count(found.step),
          ago(found.saved, this.source.now(), this.pace.interval_s),
          bytes(found.num_bytes),
          found.metrics.map(([name, value]) => `${name} ${num(value)}`).join(", ") || MISSING,
        ])
    );
  }
}

/** What `paceline plan --run` predicted, beside what the run does. */
export class PlanView {
  constructor() {
    this.advice = el("p");
    this.table = table(["workers", "strategy", "samples/s", "of sum", "epoch", "cost", "limit"]);
    this.node = el("div", {}, this.advice, this.table.node);
  }

  show({plan, samples_per_s}) {
    const now = typeof samples_per_s === "number" ? ` The run does ${rate(samples_per_s)} now.` : "";
    setText(this.advice, `${plan.advice}${now}`);
    showList(
      this.table.body,
      plan.alternatives,
      found => `${found.workers} ${found.strategy}`,
      cells(7),
      (row, found) =>
        fill(row, [
          found.workers,
          found.strategy,
          num(found.samples_per_s),
          percent(found.efficiency),
          duration(found.epoch_s),
          num(found.epoch_cost),
          found.limit,
        ])
    );
  }
}

export class ConfigView {
  constructor(view) {
    this.view = view;
    this.parent = el("p", {class: "muted"});
    this.changes = table(["setting", "parent", "this run"]);
    this.search = el("input", {
      type: "search",
      placeholder: "filter settings",
      "aria-label": "filter settings",
      oninput: () => this.#filter(),
    });
    this.all = table(["setting", "value"]);
    this.count = el("small", {class: "muted"});
    this.node = el(
      "div",
      {},
      this.parent,
      this.changes.node,
      el("details", {}, el("summary", {}, "All settings ", this.count), this.search, this.all.node)
    );
    this.entries = [];
  }

  show(config) {
    const {parent, difference, entries} = config;
    this.entries = entries;
    this.parent.replaceChildren();
    if (parent)
      this.parent.append(
        "Compared with ",
        link(parent.name, () => this.view.open(parent.id), {href: this.view.addressOf(parent.id)}),
        ` (${parent.why}): ${difference.length ? counted(difference.length, "different setting") : "the same settings"}`
      );
    else this.parent.append(entries.length ? "No earlier run to compare with." : "This run has no configuration.");
    this.changes.node.hidden = !parent || !difference.length;
    showList(
      this.changes.body,
      difference,
      change => change.key,
      cells(3),
      (row, change) => fill(row, [change.key, setting(change.parent), setting(change.own)])
    );
    setText(this.count, `(${count(entries.length)})`);
    this.#filter();
  }

  #filter() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = this.entries.filter(([key, value]) =>
      words.every(word => `${key} ${setting(value)}`.toLowerCase().includes(word))
    );
    showList(
      this.all.body,
      matches,
      ([key]) => key,
      cells(2),
      (row, [key, value]) => fill(row, [key, setting(value)])
    );
  }
}

export class LogView {
  #files = new Map();
  #shown = "";

  constructor(view) {
    this.view = view;
    this.tabs = el("div");
    this.text = el("pre", {class: "log", tabindex: "0", "aria-label": "last lines of the log"});
    this.note = el("p", {class: "muted"}, "The workers have written nothing.");
    this.node = el("div", {}, this.tabs, this.note, this.text);
  }

  /** files: as of /log. */
  set(files) {
    this.#files = new Map(files.map(file => [`${file.rank} ${file.stream}`, file.lines]));
    this.show();
  }

  add({rank, stream, lines, is_cut}) {
    const key = `${rank} ${stream}`,
      known = is_cut ? [] : (this.#files.get(key) ?? []);
    this.#files.set(key, [...known, ...lines].slice(-MAX_LOG_LINES));
  }

  show() {
    const keys = [...this.#files.keys()]
      .filter(key => this.#files.get(key).length)
      .sort((a, b) => parseInt(a) - parseInt(b) || b.localeCompare(a));
    const chosen = keys.includes(this.view.get("rank")) ? this.view.get("rank") : (keys[0] ?? "");
    if (this.#shown !== keys.join()) {
      this.#shown = keys.join();
      this.choice = choice(
        "worker and stream",
        keys.map(key => [key, `worker ${key}`]),
        key => {
          this.view.set({rank: key});
          this.show();
        }
      );
      this.tabs.replaceChildren(this.choice);
    }
    this.choice?.choose(chosen);
    this.note.hidden = keys.length > 0;
    this.text.hidden = !keys.length;
    const isAtEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 30;
    setText(this.text, (this.#files.get(chosen) ?? []).join("\n"));
    if (isAtEnd) this.text.scrollTop = this.text.scrollHeight;
  }
}
