/** The plots of one run: a panel per metric, the most important ones first. */

import {el, retain, showList} from "./dom.js";
import {num, percent, tick} from "./format.js";
import {marksNear} from "./marks.js";
import {curveColor, curveDash} from "./palette.js";
import {Panel} from "./panel.js";

/** Metrics that are not plots of their own: axes, counters, and what the lanes show. */
export const NO_PLOT = /^(step|time|epoch|samples|(lanes|waiting)\/.*)$/;
const PER_WORKER = /^(shares|speeds)\/\d+$/;
const UNITS = new Map([
  ["samples_per_s", "samples/s"],
  ["tokens_per_s", "tokens/s"],
  ["shares", "micro-batches between two lines"],
  ["speeds", "micro-batches/s"],
]);
const TITLES = new Map([
  ["samples_per_s", "throughput"],
  ["tokens_per_s", "throughput in tokens"],
  ["lr", "learning rate"],
  ["grad_norm", "gradient norm"],
  ["efficiency", "share of what the workers could do"],
  ["shares", "work per worker"],
  ["speeds", "speed per worker"],
]);
/** The words for a metric, also of an evaluation. */
export const titleOf = name => TITLES.get(name) ?? (name.startsWith("eval/") ? `evaluation ${name.slice(5)}` : name);

/** How a metric is drawn: options of a panel. */
export const looksOfPlot = name => ({
  unit: UNITS.get(name) ?? "",
  format: name === "efficiency" ? percent : name.endsWith("_per_s") ? tick : num,
  bounds: name === "efficiency" ? [0, 1] : null,
  canLog: name !== "efficiency" && name !== "shares",
  className: name === "loss" ? "wide" : "",
});

/** Above the lanes: the loss, and the first of these that there is. */
const LEAD = ["efficiency", "samples_per_s"];
/** First these, then the others by name. */
const ORDER = ["loss", "efficiency", "samples_per_s", "lr", "grad_norm", "speeds", "shares", "tokens_per_s"];
const NEVER_SMOOTHED = new Set(["lr", "shares"]);
/** The weight of the past in the curve of a metric. */
export const smoothingOf = (name, board) => (NEVER_SMOOTHED.has(name) ? 0 : board.smoothing);

/** lead: the node with the plots above the lanes; others: the node with all others. */
export class RunPlots {
  #panels = new Map();

  /** marks(): events, as of marks.js. */
  constructor(board, curves, tip, marks) {
    Object.assign(this, {board, curves, tip, marks});
    this.lead = el("div", {class: "plots"});
    this.others = el("div", {class: "plots"});
  }

  close() {
    for (const panel of this.#panels.values()) panel.close();
  }

  /** A plot for every metric, in place. */
  show() {
    const groups = new Map();
    for (const name of this.curves.names()) {
      if (NO_PLOT.test(name)) continue;
      const group = PER_WORKER.test(name) ? name.split("/")[0] : name.replace(/^eval\//, "");
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(name);
    }
    const rank = group => {
      const i = ORDER.indexOf(group);
      return i < 0 ? ORDER.length : i;
    };
    const names = [...groups.keys()]
      .filter(group => !PER_WORKER.test(`${group}/0`) || groups.get(group).length > 1)
      .sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
    retain(this.#panels, groups, panel => panel.close());
    const lead = new Set(["loss", LEAD.find(group => groups.has(group))]),
      fill = (node, shown) =>
        showList(
          node,
          shown,
          group => group,
          group => (this.#panels.get(group) ?? this.#makePanel(group)).node
        );
    fill(this.lead, names.filter(group => lead.has(group)));
    fill(this.others, names.filter(group => !lead.has(group)));
  }

  #makePanel(group) {
    const panel = new Panel(this.board, titleOf(group), () => this.#lines(group), {
      ...looksOfPlot(group),
      height: 230,
      marks: () => this.marks(),
      onpoint: (event, area) =>
        event ? this.tip.show(event, marksNear(this.marks(), this.board, event.clientX, area)) : this.tip.hide(),
    });
    this.#panels.set(group, panel);
    return panel;
  }

  #lines(group) {
    const {axis} = this.board,
      smoothing = smoothingOf(group, this.board);
    const range = this.board.isWhole ? null : this.board.range().map(x => this.curves.stepAt(x, axis));
    const line = (name, label, index, more = {}) => ({
      key: name,
      label,
      color: curveColor(index),
      dash: curveDash(index),
      series: this.curves.series(name, axis, more.isMarked ? 0 : smoothing, range),
      ...more,
    });
    if (PER_WORKER.test(`${group}/0`)) {
      return this.curves
        .names()
        .filter(name => name.startsWith(`${group}/`))
        .map((name, i) => line(name, `worker ${name.split("/")[1]}`, i));
    }
    const lines = [];
    if (this.curves.has(group)) {
      if (smoothing)
        lines.push({
          ...line(group, group, 0),
          key: "raw",
          isFaint: true,
          series: this.curves.series(group, axis, 0, range),
        });
      lines.push(line(group, this.curves.has(`eval/${group}`) ? "training" : titleOf(group), 0));
    }
    if (this.curves.has(`eval/${group}`)) lines.push(line(`eval/${group}`, "evaluation", 1, {isMarked: true}));
    return lines;
  }
}
