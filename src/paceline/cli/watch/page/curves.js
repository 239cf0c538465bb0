/** The metrics of one run: a curve per name, by step, and the same curves over epochs or time, smoothed or not. */

import {number} from "./source.js";
import {firstGreater, Series} from "./series.js";

const NOT_FINITE = ["NaN", "Infinity", "-Infinity"];

const isCount = value => Number.isSafeInteger(value) && value >= 0;

/** The object in a line; empty if the line is damaged. */
function parsed(line) {
  try {
    return JSON.parse(line) ?? {};
  } catch {
    return {};
  }
}

/** All numbers by flat name: "loss", "eval/loss", "shares/0". */
function* flat(values, prefix = "") {
  for (const [name, value] of Object.entries(values)) {
    if (typeof value === "number" || NOT_FINITE.includes(value)) yield [prefix + name, Number(value)];
    else if (value !== null && typeof value === "object") yield* flat(value, `${prefix}${name}/`);
  }
}

export class Curves {
  constructor() {
    this.clear();
  }

  clear() {
    this.byName = new Map();
    this.version = 0;
    this.epochStarts = {version: -1, series: null};
  }

  names() {
    return [...this.byName.keys()];
  }
  has(name) {
    return this.byName.has(name);
  }

  /** An answer of /metrics. What was known of its steps is replaced: a sample may have lines that were superseded. */
  add(answer) {
    for (const {name, steps, values, is_thinned} of answer.series) {
      const curve = this.#curve(name),
        {x, y, length} = curve.raw,
        later = curve.raw.after(answer.to),
        [laterX, laterY] = [x.slice(later, length), y.slice(later, length)];
      curve.isThinned ||= is_thinned || answer.is_sampled;
      curve.raw.truncate(answer.from - 1);
      for (let i = 0; i < steps.length; i++) curve.raw.push(steps[i], number(values[i]));
      laterX.forEach((step, i) => curve.raw.push(step, laterY[i]));
      this.#changed(curve);
    }
  }

  /** An answer of /metrics for a part of the steps, with more points than the picture of the whole run. */
  addDetail(answer) {
    for (const {name, steps, values} of answer.series) {
      const curve = this.#curve(name),
        series = new Series(Math.max(steps.length, 2));
      for (let i = 0; i < steps.length; i++) series.push(steps[i], number(values[i]));
      curve.detail = {from: answer.from, to: answer.to, series};
      this.#changed(curve);
    }
  }

  /** Lines of metrics.jsonl, as text. */
  addLines(lines) {
    for (const line of lines) {
      const {step, ...values} = parsed(line);
      if (step === undefined && isCount(values.resumed_from)) this.#truncate(values.resumed_from);
      if (!isCount(step)) continue;
      for (const [name, value] of flat(values)) {
        const curve = this.#curve(name);
        curve.raw.push(step, value);
        this.#changed(curve);
      }
    }
  }

  /** A series over an axis ("step", "epoch", "time"), smoothed with this weight of the past (0: not at all). */
  series(name, axis, smoothing = 0, range = null) {
    const curve = this.byName.get(name);
    if (!curve) return null;
    const {detail} = curve;
    const isDetail = detail !== null && range !== null && range[0] >= detail.from && range[1] <= detail.to;
    const base = isDetail ? detail.series : curve.raw;
    if (axis === "step" && !smoothing) return base;
    const key = `${axis} ${smoothing} ${isDetail}`,
      mapped = axis === "step" ? 0 : this.version;
    let view = curve.views.get(key);
    if (!view || view.version !== curve.version || view.mapped !== mapped) {
      view = {version: curve.version, mapped, series: this.#derive(base, axis, smoothing)};
      if (curve.views.size > 8) curve.views.clear();
      curve.views.set(key, view);
    }
    return view.series;
  }

  /** Where a step is on an axis. */
  position(step, axis) {
    return axis === "step" ? step : (this.#map(axis)?.interpolate(step) ?? NaN);
  }

  /** The step at a place of an axis. */
  stepAt(place, axis) {
    if (axis === "step") return place;
    const map = this.#map(axis);
    if (!map?.length) return NaN;
    const i = firstGreater(map.y, place, 0, map.length - 1);
    if (i === 0) return map.x[0];
    const span = map.y[i] - map.y[i - 1];
    const part = span > 0 ? Math.min(1, (place - map.y[i - 1]) / span) : 1;
    return map.x[i - 1] + part * (map.x[i] - map.x[i - 1]);
  }

  #curve(name) {
    if (!this.byName.has(name))
      this.byName.set(name, {raw: new Series(), version: 0, isThinned: false, detail: null, views: new Map()});
    return this.byName.get(name);
  }

  #changed(curve) {
    curve.version++;
    this.version++;
  }

  #truncate(step) {
    for (const curve of this.byName.values()) {
      curve.raw.truncate(step);
      curve.detail = null;
      this.#changed(curve);
    }
  }

  #map(axis) {
    const curve = this.byName.get(axis);
    if (axis !== "epoch" || !curve) return curve?.raw;
    if (this.epochStarts.version !== curve.version)
      this.epochStarts = {version: curve.version, series: epochStarts(curve.raw)};
    return this.epochStarts.series;
  }

  #derive(base, axis, smoothing) {
    const derived = new Series(Math.max(base.length, 2));
    let mean = 0,
      weight = 0;
    for (let i = 0; i < base.length; i++) {
      let value = base.y[i];
      if (smoothing && value - value === 0) {
        mean = smoothing * mean + (1 - smoothing) * value;
        weight = smoothing * weight + (1 - smoothing);
        value = mean / weight;
      }
      const x = this.position(base.x[i], axis);
      if (x === x) derived.push(x, value);
    }
    return derived;
  }
}

/** Whole epochs become fractions of one: the steps at which epochs begin, and the expected end of the last one. */
function epochStarts(epochs) {
  const starts = new Series(),
    {x, y, length} = epochs;
  if (!length || y.subarray(0, length).some(value => value !== Math.floor(value))) return epochs;
  let begin = y[0] === 0 ? 0 : x[0],
    longest = 0;
  starts.push(begin, y[0]);
  for (let i = 1; i < length; i++) {
    if (y[i] === y[i - 1]) continue;
    longest = Math.max(longest, (x[i - 1] - begin) / (y[i] - y[i - 1]));
    begin = x[i - 1];
    starts.push(begin, y[i]);
  }
  starts.push(Math.max(begin + longest, x[length - 1], begin + 1), y[length - 1] + 1);
  return starts;
}
