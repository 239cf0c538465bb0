/** The table of runs: sorted, filtered, with boxes that choose runs to compare. */

import {button, choice, el, link, setClass, setStyle, setText, showList, table} from "./dom.js";
import {count, duration, MISSING, moment, num, percent, rate} from "./format.js";
import {curveColor} from "./palette.js";
import {number} from "./source.js";
import {showState, stateChip} from "./summary.js";

const PAGE_ROWS = 200;
const evalLoss = run => run.evaluation.find(([name]) => name === "eval/loss")?.[1] ?? null;

/** id, title, value to sort by, text. */
const COLUMNS = [
  ["name", "run", run => run.name.toLowerCase()],
  ["state", "state", run => run.state],
  ["step", "step", run => run.step],
  ["loss", "loss", run => number(run.loss), run => num(run.loss)],
  ["eval", "eval/loss", run => number(evalLoss(run)), run => num(evalLoss(run))],
  ["rate", "throughput", run => run.samples_per_s, run => rate(run.samples_per_s)],
  ["workers", "workers", run => run.num_workers, run => (run.num_workers ? count(run.num_workers) : MISSING)],
  ["time", "trained", run => run.time_s, run => duration(run.time_s)],
  ["started", "started", run => run.started, run => moment(run.started).slice(0, 16)],
];
const STATES = ["live", "finished", "stopped", "failed", "crashed", "unknown"].map(state => [state, state]);

export class RunsTable {
  #limit = PAGE_ROWS;
  /** All rows, and the ids that the search found, or null. */
  runs = [];
  found = null;

  /** onpick(id): the box of a run was clicked. */
  constructor(view, onpick) {
    Object.assign(this, {view, onpick});
    this.search = el("input", {
      type: "search",
      id: "search",
      placeholder: "search names and configurations",
      "aria-label": "search names and configurations",
      oninput: () => view.set({q: this.search.value}),
    });
    this.states = choice("state", [["", "all"], ...STATES], state => view.set({state}));
    this.count = el("span", {class: "muted", role: "status"});
    this.heads = COLUMNS.map(([id, title]) => {
      const sort = button(title, () => this.#sortBy(id));
      sort.append(el("i", {class: "arrow", "aria-hidden": "true"}));
      return el("th", {scope: "col", "data-column": id}, sort);
    });
    const {node, body} = table([el("th", {class: "pick"}), ...this.heads], {class: "runs"});
    const showAll = () => {
      this.#limit = Infinity;
      this.show(this.colors);
    };
    this.body = body;
    this.more = button("", showAll, {hidden: true});
    this.node = el(
      "section",
      {class: "block", id: "runs"},
      el("div", {class: "tools"}, this.search, this.states, this.count),
      node,
      this.more
    );
  }

  /** colors: run id to index of its colour, for those that are drawn. */
  show(colors) {
    this.colors = colors;
    if (this.search.value !== this.view.get("q") && document.activeElement !== this.search)
      this.search.value = this.view.get("q");
    this.states.choose(this.view.get("state"));
    const sort = this.view.get("sort");
    for (const head of this.heads)
      head.setAttribute(
        "aria-sort",
        sort.slice(1) !== head.dataset.column ? "none" : sort[0] === "-" ? "descending" : "ascending"
      );
    const shown = this.visible();
    const total = `${count(this.runs.length)} runs`;
    setText(this.count, shown.length === this.runs.length ? total : `${count(shown.length)} of ${total}`);
    showList(
      this.body,
      shown.slice(0, this.#limit),
      run => run.id,
      run => this.#makeRow(run.id),
      (row, run) => this.#fill(row, run)
    );
    this.more.hidden = shown.length <= this.#limit;
    setText(this.more, `show all ${count(shown.length)} runs`);
  }

  /** The rows that pass the filters, in order. */
  visible() {
    const state = this.view.get("state"),
      sort = this.view.get("sort");
    const column = COLUMNS.find(([id]) => id === sort.slice(1)) ?? COLUMNS.at(-1),
      sign = sort[0] === "-" ? -1 : 1;
    const compare = (a, b) => {
      const x = column[2](a),
        y = column[2](b),
        isMissing = value => value === null || Number.isNaN(value);
      if (isMissing(x) || isMissing(y)) return isMissing(x) - isMissing(y); // always last
      return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
    };
    return this.runs
      .filter(run => (!state || run.state === state) && (!this.found || this.found.has(run.id)))
      .sort(compare);
  }

  focusSearch() {
    this.search.focus();
  }

  moveFocus(by) {
    const rows = [...this.body.children],
      at = rows.indexOf(document.activeElement?.closest("tr"));
    rows[Math.min(rows.length - 1, Math.max(0, at + by))]?.querySelector("a").focus();
  }

  #sortBy(id) {
    const now = this.view.get("sort");
    const first = id === "name" || id === "state" || id === "loss" || id === "eval" ? "+" : "-";
    this.view.set({sort: now.slice(1) === id ? (now[0] === "-" ? "+" : "-") + id : first + id});
  }

  #makeRow(id) {
    const box = el("input", {type: "checkbox", "aria-label": "compare this run", onchange: () => this.onpick(id)});
    const onkeydown = event => {
      if (event.key === " ") {
        event.preventDefault();
        this.onpick(id);
      }
    };
    const step = el("td", {class: "step"}, el("span"), el("div", {class: "progress"}, el("div", {class: "fill"})));
    return el(
      "tr",
      {"data-run": id},
      el("td", {class: "pick"}, el("label", {}, box, el("i", {class: "swatch"}))),
      el("td", {}, link("", () => this.view.open(id), {onkeydown})),
      el("td", {}, stateChip()),
      step,
      ...COLUMNS.slice(3).map(() => el("td", {class: "number"}))
    );
  }

  #fill(row, run) {
    const [pick, name, state, step, ...others] = row.children,
      index = this.colors.get(run.id);
    const box = pick.querySelector("input");
    box.checked = index !== undefined;
    setStyle(pick.querySelector("i"), "background", index === undefined ? "transparent" : curveColor(index));
    setText(name.firstChild, run.name);
    name.firstChild.setAttribute("href", this.view.addressOf(run.id));
    showState(state.firstChild, run.state);
    state.title = run.reason ?? "";
    setText(step.firstChild, run.total_steps ? `${count(run.step)} / ${count(run.total_steps)}` : count(run.step));
    const part = run.total_steps ? Math.min(1, run.step / run.total_steps) : 0;
    step.title = run.total_steps ? percent(part) : "";
    setStyle(step.lastChild.firstChild, "transform", `scaleX(${part})`);
    setClass(step.lastChild, `progress ${run.state === "live" ? "" : "ended"}`);
    others.forEach((cell, i) => setText(cell, COLUMNS[i + 3][3](run)));
  }
}
