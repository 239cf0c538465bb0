/**
 * When the page is drawn: at once if the user did something or the run's state changed, otherwise so seldom that the
 * page takes little of a computer that may have work to do. What a frame costs depends on the computer, so it is
 * measured: where software draws it on cores that train, some 20 ms of CPU time.
 */

/** The part of the main thread's time for drawing what merely grows; other threads take about as much again. */
const MAX_PART = 0.0015;
const MAX_WAIT_MS = 5000;

export class Pace {
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

  close() {
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
    // The lower of two: a frame may be slow once, as the first one is.
    this.#restsUntil_ms = now_ms + Math.min(MAX_WAIT_MS, Math.min(cost_ms, this.#lastCost_ms) / MAX_PART);
    this.#lastCost_ms = cost_ms;
  }
}
