/** The row above the plots: x axis, smoothing, logarithmic axis, range. */

import {button, choice, el, setText} from "./dom.js";
import {axisValue} from "./format.js";

const AXES = ["step", "epoch", "time"];
export const SMOOTHING_STEP = 0.1,
  MAX_SMOOTHING = 0.99;

export class Tools {
  constructor(view, board) {
    Object.assign(this, {view, board});
    const axes = AXES.map(name => [name, name]);
    this.axis = choice("x axis", axes, axis => chooseAxis(view, axis));
    this.smooth = el("input", {
      type: "range",
      min: "0",
      max: String(MAX_SMOOTHING),
      step: "0.01",
      "aria-label": "smoothing",
      oninput: () => view.set({smooth: this.smooth.value}),
    });
    this.smoothText = el("output");
    const title = "logarithmic y axis (l)";
    this.log = button("log y", () => toggleLog(view), {"aria-pressed": "false", "data-tool": "log", title});
    this.range = el("span", {class: "muted range"});
    this.all = button("all", () => board.showAll(), {"data-tool": "all", title: "show everything (0)"});
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
        button("−", () => board.zoom(2), {"aria-label": "zoom out", title: "zoom out (−)"}),
        button("+", () => board.zoom(0.5), {"aria-label": "zoom in", title: "zoom in (+)"}),
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

const chooseAxis = (view, axis) => view.set({x: axis, from: "", to: ""});
export const toggleLog = view => view.set({log: view.get("log") === "1" ? "" : "1"});

export function nextAxis(view) {
  chooseAxis(view, AXES[(AXES.indexOf(view.get("x")) + 1) % AXES.length]);
}

export function changeSmoothing(view, by) {
  const value = Math.min(MAX_SMOOTHING, Math.max(0, (view.number("smooth") ?? 0) + by));
  view.set({smooth: Number(value.toFixed(2))});
}
