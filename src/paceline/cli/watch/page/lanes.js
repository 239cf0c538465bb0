/** A lane per worker: what it did with its time, over the same axis as the plots, and what it is. */

import {isSamePixel} from "./board.js";
import {el, retain, setClass, setStyle, setText, showList} from "./dom.js";
import {axisValue, bytes, count, duration, MISSING, percent, tick} from "./format.js";
import {drawMarks, marksNear} from "./marks.js";
import {colors, KINDS} from "./palette.js";

const LANE_HEIGHT = 34;
/** A worker that has not written its status for so long gets a note. It writes every second. */
const SILENT_S = 3;
const MAX_DEPARTED = 16;

const metricOf = (kind, rank) => (kind === "waiting" ? `waiting/${rank}` : `lanes/${kind}/${rank}`);

export class Lanes {
  #lanes = new Map();

  /** marks(): events, as of marks.js. */
  constructor(board, curves, tip, marks) {
    Object.assign(this, {board, curves, tip, marks});
    this.rows = el("div", {class: "lane-rows"});
    this.legend = el(
      "div",
      {class: "legend"},
      ...KINDS.map(kind =>
        el(
          "span",
          {class: "entry"},
          el("i", {class: `swatch kind-${kind.name}`}),
          el("span", {class: "name"}, kind.label)
        )
      )
    );
    this.ends = [el("span"), el("span"), el("span")];
    this.node = el("div", {class: "lanes"}, this.legend, this.rows, el("div", {class: "lane-axis"}, ...this.ends));
  }

  /** run: an answer of /api/runs/ID. events: the run's events; workers that left have a lane until then. */
  show(run, events = []) {
    const verdicts = new Map();
    for (const verdict of run.verdicts)
      for (const rank of verdict.ranks)
        if (verdict.severity !== "ok" && !verdicts.has(rank)) verdicts.set(rank, verdict);
    const shown = [...run.workers, ...departed(run, events)],
      keyOf = worker => `${worker.rank} ${worker.left?.step ?? ""}`;
    showList(
      this.rows,
      shown,
      keyOf,
      worker => this.#make(keyOf(worker), worker).node,
      (_, worker) =>
        this.#lanes.get(keyOf(worker)).show(worker, run, worker.left ? undefined : verdicts.get(worker.rank))
    );
    retain(this.#lanes, new Set(shown.map(keyOf)), lane => this.board.remove(lane));
    this.node.hidden = run.workers.length === 0;
  }

  #make(key, worker) {
    const lane = new Lane(this, worker.rank, worker.left);
    this.#lanes.set(key, lane);
    this.board.add(lane);
    return lane;
  }

  showRange(from, to) {
    [from, (from + to) / 2, to].forEach((x, i) => setText(this.ends[i], axisValue(this.board.axis, x)));
  }
}

/**
 * Workers that left and were not replaced, where the others have moved up: their ranks are those of others now.
 * As workers of /api/runs/ID, with `left`: the event.
 */
export function departed(run, events) {
  const found = [],
    known = new Set(run.workers.filter(worker => worker.is_alive === false).map(worker => worker.rank));
  for (const event of run.state === "live" ? events.toReversed() : []) {
    if (event.event !== "world") continue;
    const {left, joined, size} = event.details;
    // With more workers than remained, the run was resumed.
    if (!Array.isArray(left) || joined?.length || run.num_workers > size || found.length > MAX_DEPARTED) break;
    for (const rank of left) if (rank < size || !known.has(rank)) found.push({rank, left: event});
  }
  return found;
}

class Lane {
  #picture = [];
  #numMarks = 0;

  /** left: the event with which the worker left, if it did and another one has its rank now. */
  constructor(lanes, rank, left) {
    Object.assign(this, {lanes, board: lanes.board, rank, left});
    this.name = el("b", {}, `worker ${rank}`);
    this.device = el("small", {class: "device"});
    this.badge = el("span", {class: "badge", hidden: true});
    this.share = el("b");
    this.facts = el("small");
    this.memory = el("small");
    this.canvas = el("canvas", {role: "img"});
    this.cursor = el("div", {class: "cursor", hidden: true});
    this.area = el("div", {class: "lane-area", tabindex: "0"}, this.canvas, this.cursor);
    this.node = el(
      "div",
      {class: "lane", "data-rank": rank},
      el("div", {class: "lane-name"}, el("span", {}, this.name, this.badge), this.device),
      this.area,
      el("div", {class: "lane-facts"}, this.share, this.facts, this.memory)
    );
    this.board.attach(this.area);
    this.board.attachKeys(this.area);
    this.area.addEventListener("pointermove", event => this.#showTip(event));
    this.area.addEventListener("pointerleave", () => lanes.tip.hide());
  }

  extent() {
    return null;
  } // the plots have it

  show(worker, run, verdict) {
    this.worker = worker;
    if (this.left) {
      setClass(this.node, "lane culprit error gone");
      setText(this.device, this.left.details.reason ?? "");
      this.badge.hidden = false;
      setText(this.badge, `left after step ${count(this.left.step)}`);
      this.canvas.setAttribute("aria-label", `worker ${this.rank} left after step ${count(this.left.step)}`);
      return;
    }
    const silent_s = worker.seen === null ? 0 : run.now - worker.seen;
    const isSilent = run.state === "live" && worker.is_alive && silent_s > SILENT_S;
    const isGone = run.state === "live" && worker.is_alive === false;
    setClass(this.node, `lane${verdict ? ` culprit ${verdict.severity}` : ""}${isGone ? " gone" : ""}`);
    setText(this.device, [worker.device_name ?? worker.device, worker.host].filter(Boolean).join(" · ") || MISSING);
    this.badge.hidden = !(verdict || isSilent || isGone);
    setText(
      this.badge,
      isGone ? "left the run" : isSilent ? `silent for ${duration(Math.floor(silent_s))}` : (verdict?.kind ?? "")
    );
    setText(this.share, `${percent(worker.share)} of the work`);
    setText(this.facts, useOf(worker));
    setText(this.memory, memoryOf(worker));
    const parts = worker.lanes
      ? KINDS.filter(kind => worker.lanes[kind.name] !== null).map(
          kind => `${kind.label} ${percent(worker.lanes[kind.name])}`
        )
      : [];
    this.canvas.setAttribute("aria-label", `worker ${this.rank}: ${parts.join(", ") || "no times recorded"}`);
  }

  draw(from, to, areaWidth, canKeep) {
    const width = Math.round(areaWidth * devicePixelRatio),
      height = Math.round(LANE_HEIGHT * devicePixelRatio),
      series = KINDS.map(kind => this.lanes.curves.series(metricOf(kind.name, this.rank), this.board.axis)),
      marks = this.lanes.marks(),
      picture = [from, to, Math.min(to, series[0]?.end ?? to)];
    this.lanes.showRange(from, to);
    const isSame = isSamePixel(this.#picture, picture, (to - from) / width) && marks.length === this.#numMarks;
    if (canKeep && isSame && this.canvas.width === width) return;
    this.#picture = picture;
    this.#numMarks = marks.length;
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, {width, height});
    const context = this.canvas.getContext("2d");
    context.putImageData(this.#pixels(series, from, to, width, height), 0, 0);
    drawMarks(context, {left: 0, top: 0, width, height}, marks, {min: from, max: to});
  }

  /** A column of colours per pixel. Painted pixel by pixel: thousands of rectangles take twenty times as long. */
  #pixels(series, from, to, width, height) {
    const image = new ImageData(width, height),
      pixels = new Uint32Array(image.data.buffer),
      parts = new Float64Array(KINDS.length),
      perPixel = (to - from) / width,
      end = this.left ? this.lanes.curves.position(this.left.step, this.board.axis) : Infinity,
      paints = KINDS.map(kind => asPixel(colors().get(`kind-${kind.name}`)));
    pixels.fill(asPixel(colors().get("lane")));
    for (let px = 0; px < width && from + px * perPixel <= end; px++) {
      if (!partsAt(series, from + px * perPixel, from + (px + 1) * perPixel, parts)) continue;
      let filled = 0,
        row = height;
      for (let k = 0; k < KINDS.length; k++) {
        filled += Math.max(0, parts[k]);
        const top = Math.max(0, Math.round((1 - filled) * height));
        while (row > top) pixels[--row * width + px] = paints[k];
      }
    }
    return image;
  }

  showHover(x) {
    const [from, to] = this.board.range();
    this.cursor.hidden = x === null;
    if (x !== null) setStyle(this.cursor, "left", `${(100 * (x - from)) / (to - from)}%`);
  }

  #showTip(event) {
    const x = this.board.hover,
      parts = new Float64Array(KINDS.length),
      {axis} = this.board;
    const series = KINDS.map(kind => this.lanes.curves.series(metricOf(kind.name, this.rank), axis));
    if (x === null || !partsAt(series, x, x, parts)) {
      this.lanes.tip.hide();
      return;
    }
    const rows = KINDS.map((kind, k) => [`${kind.label} ${percent(parts[k])}`, colors().get(`kind-${kind.name}`)]);
    const at = name => this.lanes.curves.series(`${name}/${this.rank}`, axis);
    const shares = at("shares"),
      speeds = at("speeds");
    const value = found => (found?.length ? found.y[Math.min(found.after(x), found.length - 1)] : NaN);
    if (shares?.length) rows.push([`${count(value(shares))} micro-batches since the line before`, null]);
    if (speeds?.length) rows.push([`${tick(value(speeds))} micro-batches/s`, null]);
    this.lanes.tip.show(event, [
      [`worker ${this.rank}, ${axisValue(axis, axis === "step" ? Math.round(x) : x)}`, null],
      ...rows,
      ...marksNear(this.lanes.marks(), this.board, event.clientX, this.area),
    ]);
  }
}

/** A computed colour, "rgb(r, g, b)", as the bytes of one pixel. */
function asPixel(color) {
  const [red, green, blue] = color.match(/\d+/g).map(Number);
  return new Uint32Array(new Uint8Array([red, green, blue, 255]).buffer)[0];
}

/**
 * The fractions of the kinds between two places, into `parts`. A value is about the time since the point before it.
 * Returns whether there are any.
 */
function partsAt(series, from, to, parts) {
  let sum = 0;
  for (let k = 0; k < series.length; k++) {
    parts[k] = 0;
    const found = series[k];
    const firstLength = found?.length > 1 ? found.x[1] - found.x[0] : 0; // as long as the second one
    if (!found?.length || from > found.end || to < found.x[0] - firstLength) continue;
    const i = found.after(from),
      j = Math.max(found.after(to), Math.min(i + 1, found.length));
    if (i >= found.length) {
      parts[k] = found.y[found.length - 1];
      sum += parts[k];
      continue;
    }
    let total = 0;
    for (let p = i; p < j; p++) total += found.y[p];
    parts[k] = total / (j - i) || 0;
    sum += parts[k];
  }
  // Times that were not recorded stay empty; rounding does not.
  if (sum > 0.9) for (let k = 0; k < parts.length; k++) parts[k] /= sum;
  return sum > 0;
}

function useOf({speed, gpu, cpu}) {
  const use = gpu != null ? `GPU ${Math.round(gpu)}%` : cpu != null ? `CPU ${Math.round(cpu)}%` : "";
  return [speed == null ? "" : `${speed < 100 ? Number(speed.toPrecision(3)) : count(speed)} micro-batches/s`, use].filter(Boolean).join(" · ");
}

/** The device's memory where it has its own, otherwise the process's. */
function memoryOf(worker) {
  const [used, limit] =
    worker.device_memory_bytes != null
      ? [worker.device_memory_bytes, worker.device_memory_limit_bytes]
      : [worker.memory_bytes, worker.memory_limit_bytes];
  return used == null ? "" : `memory ${bytes(used)}${limit == null ? "" : ` of ${bytes(limit)}`}`;
}
