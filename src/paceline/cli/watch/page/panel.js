/** One plot: curves drawn on uPlot's axes, thinned to its pixels, with the marks of events and a legend. */

import {isSamePixel} from "./board.js";
import {el, setStyle, setText, showList} from "./dom.js";
import {axisValue, duration, logTicks, tick} from "./format.js";
import {drawLine, drawPoints, project} from "./lines.js";
import {drawMarks} from "./marks.js";
import {colors} from "./palette.js";
import {thin} from "./series.js";
import uPlot from "./uplot.js";

const AXIS_WIDTH = 56,
  MAX_LEGEND = 12;

export class Panel {
  #plot = null;
  #key = "";
  #drawn = [];
  #picture = null;
  #isEmpty = true;

  /**
   * title: a name. lines(): what to draw, as of lines.js, each with a key and a label. options:
   * format(value) of a y value; unit after the title; bounds [low, high] that the y axis always has; canLog; height; isCompact: a
   * legend without names;
   * marks(): events, as of marks.js; onpoint(event or null, area): the pointer moved, or left.
   */
  constructor(board, title, lines, options = {}) {
    this.board = board;
    this.title = title;
    this.lines = lines;
    this.options = {format: tick, unit: "", bounds: null, canLog: false, height: 220, marks: () => [], ...options};
    this.legend = el("div", {class: "legend"});
    this.area = el("div", {class: "plot"});
    this.cursor = el("div", {class: "cursor", hidden: true});
    this.label = el("span", {class: "at", hidden: true});
    const unit = this.options.unit ? el("span", {class: "unit"}, this.options.unit) : null;
    this.node = el(
      "figure",
      {
        class: `panel ${this.options.className ?? ""}`,
        tabindex: "0",
        "data-name": title,
        "aria-label": `Plot of ${title}. Arrow keys move, plus and minus zoom, 0 shows everything.`,
      },
      el("figcaption", {}, el("h3", {}, title), unit, this.legend),
      this.area
    );
    board.attachKeys(this.node);
    board.add(this);
  }

  close() {
    this.board.remove(this);
    this.#plot?.destroy();
    this.#plot = null;
  }

  extent() {
    let low = Infinity,
      high = -Infinity;
    for (const {series} of this.lines()) {
      if (!series?.length) continue;
      low = Math.min(low, series.x[0]);
      high = Math.max(high, series.end);
    }
    return low <= high ? [low, high] : null;
  }

  draw(from, to, width, canKeep) {
    const key = `${width} ${this.#isLog()}`;
    if (key !== this.#key) this.#build(width);
    this.#key = key;
    const pixels = Math.max(1, width - AXIS_WIDTH - 14) * devicePixelRatio;
    this.#drawn = this.lines()
      .filter(line => line.series?.length)
      .map(line => {
        const [indices, n] = thin(line.series, from, to, pixels);
        return {...line, indices: indices.slice(0, n)};
      });
    const bounds = this.#bounds(from, to);
    if (this.isAreaSeen && !(canKeep && this.#isShown(from, to, bounds, pixels))) this.#redraw(from, to, bounds);
    this.#showLegend(this.board.hover);
    // For tests and other programs that look at the page: where the curves end.
    this.node.dataset.end = String(Math.max(0, ...this.#drawn.map(line => line.series.end)));
  }

  /** Whether nothing would be a pixel away from where it is in the picture. */
  #isShown(from, to, bounds, pixels) {
    const {names, x, y} = this.#picture ?? {},
      now = this.#placesOf(from, to, bounds);
    return (
      names === now.names &&
      isSamePixel(x, now.x, (to - from) / pixels) &&
      isSamePixel(y, now.y, (now.y[1] - now.y[0]) / (this.options.height * devicePixelRatio))
    );
  }

  /** What decides how the picture looks: which curves and events there are, and the ends of axes and curves. */
  #placesOf(from, to, bounds) {
    return {
      names: [this.options.marks().length, ...this.#drawn.map(line => line.key)].join("\n"),
      x: [from, to, ...this.#drawn.map(({series}) => Math.min(to, series.end))],
      y: this.#isLog() ? bounds.map(Math.log) : bounds,
    };
  }

  #redraw(from, to, bounds) {
    const [low, high] = bounds;
    this.#picture = this.#placesOf(from, to, bounds);
    this.#plot.batch(() => {
      this.#plot.setScale("x", {min: from, max: to});
      this.#plot.setScale("y", {min: low, max: high});
      this.#plot.redraw(false, true);
    });
  }

  /** The vertical line and the values at x, in every plot of the board. */
  showHover(x) {
    const [from, to] = this.board.range();
    this.cursor.hidden = x === null || !this.#plot;
    this.label.hidden = this.cursor.hidden;
    if (!this.cursor.hidden) {
      const part = (x - from) / (to - from);
      setStyle(this.cursor, "left", `${100 * part}%`);
      setStyle(this.label, part > 0.5 ? "right" : "left", "4px");
      setStyle(this.label, part > 0.5 ? "left" : "right", "auto");
      setText(this.label, axisValue(this.board.axis, this.board.axis === "step" ? Math.round(x) : x));
    }
    this.#showLegend(x);
  }

  #isLog() {
    return this.options.canLog && this.board.isLog;
  }

  #build(width) {
    this.#plot?.destroy();
    this.#picture = null;
    const color = name => () => colors().get(name),
      font = "11px system-ui, sans-serif";
    const axis = {
      stroke: color("muted"),
      font,
      grid: {stroke: color("grid"), width: 1},
      ticks: {stroke: color("grid"), width: 1, size: 4},
      gap: 4,
    };
    const label = value => (this.board.axis === "time" ? duration(value) : tick(value));
    const settings = {
      width,
      height: this.options.height,
      padding: [10, 14, 0, 0],
      legend: {show: false},
      cursor: {show: false},
      scales: {x: {time: false, auto: false}, y: {auto: false, distr: this.#isLog() ? 3 : 1}},
      series: [{}, {show: false}],
      axes: [
        {...axis, size: 26, space: 78, values: (_, splits) => splits.map(value => label(value))},
        {
          ...axis,
          size: AXIS_WIDTH,
          space: 34,
          ...(this.#isLog() ? {splits: (_, __, low, high) => logTicks(low, high), filter: (_, splits) => splits} : {}),
          values: (_, splits) => splits.map(value => (value === null ? null : this.options.format(value))),
        },
      ],
      hooks: {draw: [plot => this.#drawCurves(plot)]},
    };
    this.#plot = new uPlot(
      settings,
      [
        [0, 1],
        [0, 1],
      ],
      this.area
    );
    const {over} = this.#plot;
    over.append(this.cursor, this.label);
    this.board.attach(over);
    over.addEventListener("pointermove", event => this.options.onpoint?.(event, over));
    over.addEventListener("pointerleave", () => this.options.onpoint?.(null, over));
  }

  #bounds(from, to) {
    let [low, high] = this.options.bounds ?? [Infinity, -Infinity];
    for (const {series, indices} of this.#drawn) {
      for (const i of indices) {
        const value = series.y[i];
        if (series.x[i] < from || series.x[i] > to || value - value !== 0 || (this.#isLog() && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    this.#isEmpty = low > high;
    if (this.#isEmpty) return this.#isLog() ? [0.1, 1] : [0, 1];
    if (this.#isLog()) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
    if (this.options.bounds && high <= this.options.bounds[1]) return this.options.bounds;
    const room = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.06;
    // Nothing below zero is drawn for what is never negative.
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  #drawCurves(plot) {
    const {ctx: context, bbox} = plot;
    context.save();
    context.beginPath();
    context.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    context.clip();
    drawMarks(context, bbox, this.options.marks(), plot.scales.x);
    const projection = project(plot, this.#isLog());
    for (const line of this.#drawn) drawLine(context, projection, line);
    if (this.#isEmpty) {
      context.fillStyle = colors().get("muted");
      context.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.fillText("no values here", bbox.left + bbox.width / 2, bbox.top + bbox.height / 2);
    }
    context.restore();
    // Not clipped: a point at the edge is whole.
    for (const line of this.#drawn) drawPoints(context, projection, line);
  }

  #showLegend(x) {
    const lines = this.#drawn.filter(line => !line.isFaint);
    const value = ({series}) => series.y[x === null ? series.length - 1 : series.nearest(x)];
    this.legend.classList.toggle("is-compact", this.options.isCompact === true);
    showList(
      this.legend,
      lines.slice(0, MAX_LEGEND),
      line => line.key,
      () => el("span", {class: "entry"}, el("i", {class: "swatch"}), el("span", {class: "name"}), el("b")),
      (node, line) => {
        setStyle(node.firstChild, "background", line.color);
        setText(node.children[1], line.label);
        if (node.title !== line.label) node.title = line.label;
        setText(node.lastChild, this.options.format(value(line)));
      }
    );
    this.legend.classList.toggle("is-single", lines.length === 1 && lines[0].label === this.title);
  }
}
