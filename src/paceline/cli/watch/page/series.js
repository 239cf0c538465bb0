/**
 * A growing curve that can be drawn at any zoom in time that depends on the pixels, not on the points: the extremes of
 * every block of points are kept.
 */

const BLOCK = 64;

export class Series {
  constructor(capacity = 256) {
    this.length = 0;
    this.x = new Float64Array(capacity);
    this.y = new Float64Array(capacity);
    this.low = new Int32Array(Math.ceil(capacity / BLOCK));
    this.high = new Int32Array(Math.ceil(capacity / BLOCK));
  }

  get end() {
    return this.length ? this.x[this.length - 1] : undefined;
  }

  /** Add a point. The newest value of an x counts. Values that are not finite are gaps. */
  push(x, y) {
    const n = this.length;
    if (n && x <= this.x[n - 1]) {
      this.#insert(x, y);
      return;
    }
    if (n === this.x.length) this.#grow();
    this.x[n] = x;
    this.y[n] = y;
    this.length = n + 1;
    this.#note(n);
  }

  /** Drop the points after x: a run was resumed from there. */
  truncate(x) {
    const length = this.after(x);
    if (length === this.length) return;
    this.length = length;
    if (length % BLOCK) this.#rebuild(length - (length % BLOCK));
  }

  /** The index of the first point whose x is greater. from: not before this index. */
  after(x, from = 0) {
    return firstGreater(this.x, x, from, this.length);
  }

  /** The index of the point nearest to x, -1 if there is none. */
  nearest(x) {
    const i = this.after(x);
    if (i === 0) return this.length ? 0 : -1;
    return i < this.length && this.x[i] - x < x - this.x[i - 1] ? i : i - 1;
  }

  /** y at x, between two points on the line through them. */
  interpolate(x) {
    const i = this.after(x);
    if (i === 0) return this.length ? this.y[0] : NaN;
    if (i === this.length) return this.y[i - 1];
    const part = (x - this.x[i - 1]) / (this.x[i] - this.x[i - 1]);
    return this.y[i - 1] + part * (this.y[i] - this.y[i - 1]);
  }

  /** The indices of the lowest and the highest of the points i to j - 1, written to `out`; -1 if none is finite. */
  extremes(i, j, out) {
    let low = -1,
      high = -1;
    const {y} = this;
    const consider = k => {
      const value = y[k];
      if (value - value !== 0) return; // NaN, infinite
      if (low < 0 || value < y[low]) low = k;
      if (high < 0 || value >= y[high]) high = k;
    };
    while (i < j && i % BLOCK) consider(i++);
    for (; i + BLOCK <= j; i += BLOCK) {
      const block = i / BLOCK;
      if (this.low[block] >= 0) {
        consider(this.low[block]);
        consider(this.high[block]);
      }
    }
    while (i < j) consider(i++);
    out[0] = low;
    out[1] = high;
  }

  #insert(x, y) {
    const i = this.after(x);
    if (i && this.x[i - 1] === x) {
      this.y[i - 1] = y;
      this.#rebuild(i - 1);
      return;
    }
    if (this.length === this.x.length) this.#grow();
    this.x.copyWithin(i + 1, i, this.length);
    this.y.copyWithin(i + 1, i, this.length);
    this.x[i] = x;
    this.y[i] = y;
    this.length++;
    this.#rebuild(i);
  }

  #rebuild(from) {
    for (let i = from - (from % BLOCK); i < this.length; i++) this.#note(i);
  }

  #note(i) {
    const block = (i - (i % BLOCK)) / BLOCK,
      value = this.y[i];
    if (i % BLOCK === 0) this.low[block] = this.high[block] = -1;
    if (value - value !== 0) return;
    if (this.low[block] < 0 || value < this.y[this.low[block]]) this.low[block] = i;
    if (this.high[block] < 0 || value >= this.y[this.high[block]]) this.high[block] = i;
  }

  #grow() {
    const capacity = 2 * this.x.length;
    for (const name of ["x", "y", "low", "high"]) {
      const before = this[name],
        grown = new before.constructor(name.length === 1 ? capacity : Math.ceil(capacity / BLOCK));
      grown.set(before);
      this[name] = grown;
    }
  }
}

/**
 * The points to draw between `from` and `to` on so many pixels: all, or the lowest and the highest of every pixel, and
 * one beyond each end. Returns the indices of the points, in order, in a reused array: [indices, how many].
 */
export function thin(series, from, to, pixels) {
  const first = Math.max(0, series.after(from) - 1);
  const last = Math.min(series.length, series.after(to) + 1);
  const total = last - first;
  const room = 2 * pixels + 4;
  if (picked.length < Math.max(room, total <= room ? total : 0)) picked = new Int32Array(2 * room);
  let n = 0;
  if (total <= room) {
    for (let i = first; i < last; i++) picked[n++] = i;
    return [picked, n];
  }
  // Pixels are counted from x = 0, so that the same points are picked while the view moves.
  const width = (to - from) / pixels;
  let i = first;
  for (let pixel = Math.floor(series.x[first] / width); i < last;) {
    const edge = (pixel + 1) * width;
    let j = Math.min(last, series.after(edge, i));
    if (j > i && series.x[j - 1] >= edge) j--; // a point at the edge belongs to the next pixel
    if (j > i) {
      series.extremes(i, j, pair);
      const [a, b] = pair[0] < pair[1] ? pair : [pair[1], pair[0]];
      if (a >= 0 && n < picked.length - 1) {
        picked[n++] = a;
        if (b !== a) picked[n++] = b;
      }
      i = j;
    }
    pixel = i < last ? Math.max(pixel + 1, Math.floor(series.x[i] / width)) : pixel;
  }
  return [picked, n];
}

let picked = new Int32Array(8192);
const pair = [0, 0];

/** The first index from `low` to `high` whose value is greater, in a sorted array; `high` if there is none. */
export function firstGreater(sorted, value, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}
