/** The row above the plots: x axis, smoothing, logarithmic axis, range. */

import {choice, el, setText} from "./dom.js";
import {axisValue} from "./format.js";

export const AXES = [
  ["step", "step"],
  ["epoch", "epoch"],
  ["time", "time"],
];
export const SMOOTHING_STEP = 0.1,
  MAX_SMOOTHING = 0.99;

export class Tools {
  constructor(view, board) {
    Object.assign(this, {view, board});
    this.axis = choice("x axis", AXES, axis => chooseAxis(view, axis));
    this.smooth = el("input", {
      type: "range",
      min: "0",
      max: String(MAX_SMOOTHING),
      step: "0.01",
      "aria-label": "smoothing",
      oninput: () => view.set({smooth: this.smooth.value}),
    });
    this.smoothText = el("output");
    this.log = el(
      "button",
      {
        type: "button",
        "aria-pressed": "false",
        "data-tool": "log",
        title: "logarithmic y axis (l)",
        onclick: () => toggleLog(view),
      },
      "log y"
    );
    this.range = el("span", {class: "muted range"});
    this.all = el(
      "button",
      {type: "button", "data-tool": "all", title: "show everything (0)", onclick: () => board.showAll()},
      "all"
    );
    this.node = el(
      "div",
      {class: "tools", role: "toolbar", "aria-label": "plots"},
      el("span", {class: "muted"}, "x"),
      this.axis,
      el("label", {}, el("span", {class: "muted"}, "smooth"), this.smooth, this.smoothText),
      this.log,
      el(
        "span",
        {class: "zoom"},
        this.range,
        el(
          "button",
          {type: "button", "aria-label": "zoom out", title: "zoom out (−)", onclick: () => board.zoom(2)},
          "−"
        ),
        el(
          "button",
          {type: "button", "aria-label": "zoom in", title: "zoom in (+)", onclick: () => board.zoom(0.5)},
          "+"
        ),
        this.all
      )
    );
    this.show();
  }

  show() {
    this.axis.choose(this.view.get("x"));
    const smooth = this.view.get("smooth") || "0";
    if (this.smooth.value !== smooth) this.smooth.value = smooth;
    setText(this.smoothText, Number(smooth) ? Number(smooth).toFixed(2) : "off");
    this.log.setAttribute("aria-pressed", String(this.view.get("log") === "1"));
    const [from, to] = this.board.range();
    setText(
      this.range,
      this.board.isWhole
        ? ""
        : `${axisValue(this.board.axis, from)} to ${axisValue(this.board.axis, to).replace(/^\D+ /, "")}`
    );
    this.all.disabled = this.board.isWhole;
  }
}

export const chooseAxis = (view, axis) => view.set({x: axis, from: "", to: ""});
export const toggleLog = view => view.set({log: view.get("log") === "1" ? "" : "1"});

export function nextAxis(view) {
  const names = AXES.map(([name]) => name);
  chooseAxis(view, names[(names.indexOf(view.get("x")) + 1) % names.length]);
}

export function changeSmoothing(view, by) {
  const value = Math.min(MAX_SMOOTHING, Math.max(0, (view.number("smooth") ?? 0) + by));
  view.set({smooth: Number(value.toFixed(2))});
}
