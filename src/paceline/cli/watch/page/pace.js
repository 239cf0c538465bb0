/**
 * When the page is drawn: at once if the user did something or the run's state changed, otherwise so seldom that the
 * page takes little of a computer that may have work to do. What a frame costs depends on the computer, so it is
 * measured: where software draws it on cores that train, some 20 ms of CPU time.
 */

/**
 * The part of the main thread's time for drawing what merely grows, where other threads take 1.5 times as much, and the
 * longest wait between two frames: while somebody uses the page, and after nobody has touched it for a minute.
 */
const IN_USE = {maxPart: 0.0015, maxWait_s: 4},
  UNTOUCHED = {maxPart: 0.0005, maxWait_s: 16},
  UNTOUCHED_AFTER_MS = 60_000;

export class Pace {
  /** Seconds between two frames that show what has grown: a power of two, so that it seldom changes. */
  interval_s = 1;
  /** Called when the interval has changed. */
  onchange = () => {};
  #touched_ms = performance.now();
  #due = new Set();
  #frame = 0;
  #timer = 0;
  #restsUntil_ms = 0;
  #isGrowth = false;
  #began_ms = 0;
  #lastCost_ms = 0;
  #afterFrame = new MessageChannel();

  constructor() {
    this.#afterFrame.port1.onmessage = () => this.#rest();
  }

  /** Call `task` in the next frame, once, and with it all tasks that wait. */
  now(task) {
    this.#due.add(task);
    this.#isGrowth = false;
    this.#request();
  }

  /** Call `task` in a frame of the next seconds, once: in the next one if drawing is quick. */
  soon(task) {
    this.#due.add(task);
    if (this.#frame || this.#timer) return;
    this.#isGrowth = true;
    const wait_ms = this.#restsUntil_ms - performance.now();
    if (wait_ms > 0) this.#timer = setTimeout(() => this.#request(), wait_ms);
    else this.#request();
  }

  /** The user did something: what has grown is shown sooner for a while. */
  touch() {
    this.#touched_ms = performance.now();
    if (this.interval_s <= IN_USE.maxWait_s) return;
    this.#restsUntil_ms = 0;
    if (this.#timer) this.#request();
    this.#setInterval(IN_USE.maxWait_s);
  }

  close() {
    this.onchange = () => {};
    this.#due.clear();
    clearTimeout(this.#timer);
    cancelAnimationFrame(this.#frame);
    this.#afterFrame.port1.close();
  }

  #request() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#began_ms = performance.now();
    try {
      for (const task of this.#due) task(); // also those that a task adds
    } finally {
      this.#due.clear();
      this.#frame = 0;
    }
    // The message comes after style, layout and painting. What the user did is drawn at any cost.
    if (this.#isGrowth) this.#afterFrame.port2.postMessage(null);
  }

  #rest() {
    const now_ms = performance.now(),
      cost_ms = now_ms - this.#began_ms;
    const {maxPart, maxWait_s} = now_ms - this.#touched_ms < UNTOUCHED_AFTER_MS ? IN_USE : UNTOUCHED;
    // The lower of two: a frame may be slow once, as the first one is.
    const rest_s = Math.min(maxWait_s, Math.min(cost_ms, this.#lastCost_ms) / maxPart / 1e3);
    this.#restsUntil_ms = now_ms + 1e3 * rest_s;
    this.#lastCost_ms = cost_ms;
    if (rest_s > this.interval_s || rest_s < this.interval_s / 4)
      this.#setInterval(2 ** Math.max(0, Math.ceil(Math.log2(rest_s))));
  }

  #setInterval(interval_s) {
    if (interval_s === this.interval_s) return;
    this.interval_s = interval_s;
    this.onchange();
  }
}
