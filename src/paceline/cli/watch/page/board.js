/** Plots that share one x axis: its range, what moves it, and one drawing per frame for all of them. */

import {el, isTyping, setStyle} from "./dom.js";
import {Pace} from "./pace.js";

const MIN_PART = 1e-7;

export class Board {
  #items = new Set();
  #range;
  #saving = 0;
  #watcher = new IntersectionObserver(entries => {
    for (const {target, isIntersecting} of entries) {
      const {boardItem: item} = target;
      if (target === item.node) item.isSeen = isIntersecting;
      else item.isAreaSeen = isIntersecting;
    }
    this.draw();
  });
  #resizer = new ResizeObserver(() => this.draw());
  #drawAll = () => this.#drawSeen(false);
  #drawGrown = () => this.#drawSeen(true);

  /** onrange(from, to): called when the range has been at rest for a moment. */
  constructor(view, onrange = () => {}) {
    this.view = view;
    this.onrange = onrange;
    this.hover = null;
    this.pace = new Pace();
    this.readRange();
  }

  get axis() {
    return this.view.get("x");
  }
  get smoothing() {
    return Math.min(0.999, this.view.number("smooth") ?? 0);
  }
  get isLog() {
    return this.view.get("log") === "1";
  }
  get isWhole() {
    return this.#range === null;
  }

  /**
   * item: {node, area (its picture), extent(): [low, high] or null, showHover(x or null),
   * draw(from, to, width of the area, canKeep: whether a picture may stay in which nothing would move by a pixel)}.
   */
  add(item) {
    this.#items.add(item);
    item.isSeen = item.isAreaSeen = true;
    for (const node of [item.node, item.area]) {
      node.boardItem = item;
      this.#watcher.observe(node);
    }
    this.#resizer.observe(item.node);
    this.draw();
  }

  remove(item) {
    this.#items.delete(item);
    this.#watcher.unobserve(item.node);
    this.#watcher.unobserve(item.area);
    this.#resizer.unobserve(item.node);
  }

  close() {
    this.#watcher.disconnect();
    this.#resizer.disconnect();
    this.#items.clear();
    this.pace.close();
    clearTimeout(this.#saving);
  }

  extent() {
    let low = Infinity,
      high = -Infinity;
    for (const item of this.#items) {
      const found = item.extent();
      if (found) {
        low = Math.min(low, found[0]);
        high = Math.max(high, found[1]);
      }
    }
    if (low > high) return [0, 1];
    return low === high ? [low, low + 1] : [low, high];
  }

  range() {
    return this.#range ?? this.extent();
  }

  readRange() {
    const from = this.view.number("from"),
      to = this.view.number("to");
    this.#range = from !== null && to > from ? [from, to] : null;
  }

  setRange(from, to) {
    const [low, high] = this.extent(),
      whole = high - low;
    const span = Math.min(Math.max(to - from, whole * MIN_PART), whole);
    const start = Math.min(Math.max(from, low), high - span);
    this.#range = span >= whole * 0.999 ? null : [start, start + span];
    this.draw();
    // A browser allows only so many changes of the address per second.
    clearTimeout(this.#saving);
    this.#saving = setTimeout(() => {
      const digits = value => Number(value.toPrecision(10));
      this.view.set(this.#range ? {from: digits(start), to: digits(start + span)} : {from: "", to: ""});
      this.onrange(...this.range());
    }, 200);
  }

  showAll() {
    this.setRange(-Infinity, Infinity);
  }

  zoom(factor, at = null) {
    const [from, to] = this.range(),
      center = at ?? (from + to) / 2;
    this.setRange(center - (center - from) * factor, center + (to - center) * factor);
  }

  move(part) {
    const [from, to] = this.range();
    this.setRange(from + part * (to - from), to + part * (to - from));
  }

  setHover(x) {
    if (x === this.hover) return;
    this.hover = x;
    for (const item of this.#items) if (item.isSeen) item.showHover(x);
  }

  /** Draw once in the next frame. */
  draw() {
    this.pace.now(this.#drawAll);
  }

  /** The curves have grown. */
  grow() {
    this.pace.soon(this.#drawGrown);
  }

  #drawSeen(canKeep) {
    const [from, to] = this.range(),
      seen = [...this.#items].filter(item => item.isSeen);
    // All widths before anything is changed: the page is laid out once.
    const widths = seen.map(item => Math.floor(item.area.clientWidth));
    seen.forEach((item, i) => widths[i] && item.draw(from, to, widths[i], canKeep));
  }

  /**
   * Lets the pointer move the range: drag selects a range, with Shift or a finger it moves, Ctrl and the
   * wheel zoom, a double click shows everything. area: an element as wide as the range.
   */
  attach(area) {
    const band = el("div", {class: "band", hidden: true});
    area.append(band);
    let drag = null;
    const place = event => {
      const box = area.getBoundingClientRect(),
        [from, to] = drag?.range ?? this.range();
      const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      return {part, x: from + part * (to - from), width: box.width};
    };
    area.addEventListener("pointerdown", event => {
      if (event.button !== 0) return;
      const isMove = event.shiftKey || event.pointerType === "touch";
      drag = {isMove, range: this.range(), clientX: event.clientX, start: place(event)};
      area.setPointerCapture(event.pointerId);
      area.classList.toggle("moving", isMove);
    });
    area.addEventListener("pointermove", event => {
      if (!drag) {
        this.setHover(place(event).x);
        return;
      }
      const here = place(event);
      if (drag.isMove) {
        const [from, to] = drag.range,
          shift = ((drag.clientX - event.clientX) / here.width) * (to - from);
        this.setRange(from + shift, to + shift);
        return;
      }
      band.hidden = false;
      setStyle(band, "left", `${100 * Math.min(here.part, drag.start.part)}%`);
      setStyle(band, "width", `${100 * Math.abs(here.part - drag.start.part)}%`);
    });
    const finish = event => {
      const done = drag;
      band.hidden = true;
      area.classList.remove("moving");
      if (done && !done.isMove && event.type === "pointerup" && Math.abs(event.clientX - done.clientX) > 4) {
        const {x} = place(event);
        this.setRange(Math.min(x, done.start.x), Math.max(x, done.start.x));
      }
      drag = null;
    };
    area.addEventListener("pointerup", finish);
    area.addEventListener("pointercancel", finish);
    area.addEventListener("pointerleave", () => {
      if (!drag) this.setHover(null);
    });
    area.addEventListener("dblclick", () => this.showAll());
    area.addEventListener(
      "wheel",
      event => {
        if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
        event.preventDefault();
        this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), place(event).x);
      },
      {passive: false}
    );
  }

  /** Arrows, plus, minus and 0 move the range while this element has the focus. */
  attachKeys(focus) {
    focus.addEventListener("keydown", event => this.#key(event));
  }

  #key(event) {
    if (isTyping(event) || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = new Map([
      ["ArrowLeft", () => this.move(-0.2)],
      ["ArrowRight", () => this.move(0.2)],
      ["+", () => this.zoom(0.6)],
      ["=", () => this.zoom(0.6)],
      ["-", () => this.zoom(1 / 0.6)],
      ["0", () => this.showAll()],
    ]);
    if (!actions.has(event.key)) return;
    actions.get(event.key)();
    event.preventDefault();
    event.stopPropagation();
  }
}

/** Whether places that were `before`, in units of the axis, are at most a pixel away now. */
export const isSamePixel = (before, now, perPixel) =>
  before.length === now.length && now.every((place, i) => Math.abs(place - before[i]) < perPixel);
