/** The marks of events on plots, and their text under the pointer. */

import {el, setStyle, setText, showList} from "./dom.js";
import {axisValue, count} from "./format.js";
import {colors} from "./palette.js";

/** Name of an event, as it is shown, its colour, and whether a line crosses the plots. */
const LOOKS = new Map([
  ["plan", {label: "plan", color: "muted", isLine: false}],
  ["save", {label: "saved", color: "good", isLine: false}],
  ["world", {label: "workers", color: "bad", isLine: true}],
  ["drift", {label: "drift", color: "warn", isLine: true}],
  ["capture", {label: "capture", color: "accent", isLine: false}],
]);
const OTHER = {label: "", color: "accent", isLine: false};
const NEAR_PX = 6;

export const looksOf = event => LOOKS.get(event.event) ?? OTHER;
export const labelOf = event => looksOf(event).label || event.event;

/** marks: [{x, event}], sorted by x. A triangle at the top edge for each; several on one pixel are drawn once. */
export function drawMarks(context, bbox, marks, scale) {
  const ratio = devicePixelRatio,
    perX = bbox.width / (scale.max - scale.min),
    theme = colors();
  const drawn = new Map();
  for (const {x, event} of marks) {
    if (x < scale.min || x > scale.max) continue;
    const left = Math.round(bbox.left + (x - scale.min) * perX),
      {color, isLine} = looksOf(event);
    const key = `${color} ${Math.round(left / (2 * ratio))}`;
    if (drawn.has(key)) continue;
    drawn.set(key, true);
    context.fillStyle = context.strokeStyle = theme.get(color);
    context.beginPath();
    context.moveTo(left - 4 * ratio, bbox.top);
    context.lineTo(left + 4 * ratio, bbox.top);
    context.lineTo(left, bbox.top + 6 * ratio);
    context.fill();
    context.globalAlpha = isLine ? 0.8 : 0.22;
    context.lineWidth = ratio;
    context.setLineDash(isLine ? [4 * ratio, 3 * ratio] : [1 * ratio, 3 * ratio]);
    context.beginPath();
    context.moveTo(left + 0.5, bbox.top);
    context.lineTo(left + 0.5, bbox.top + bbox.height);
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }
}

/** The box with the text of what is under the pointer. One for the page. */
export class Tip {
  constructor() {
    this.node = el("div", {class: "tip", role: "status", hidden: true});
    document.body.append(this.node);
  }

  hide() {
    this.node.hidden = true;
  }

  /** lines: [text, colour or null] pairs. */
  show(event, lines) {
    if (!lines.length) {
      this.hide();
      return;
    }
    showList(
      this.node,
      lines.map((line, i) => [i, ...line]),
      ([i]) => i,
      () => el("div", {}, el("i"), el("span")),
      (row, [, text, color]) => {
        row.firstChild.hidden = !color;
        if (color) setStyle(row.firstChild, "background", color);
        setText(row.lastChild, text);
      }
    );
    this.node.hidden = false;
    const {offsetWidth: width, offsetHeight: height} = this.node;
    const left = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
    setStyle(this.node, "left", `${Math.max(4, left)}px`);
    setStyle(this.node, "top", `${Math.max(4, Math.min(event.clientY + 16, innerHeight - height - 8))}px`);
  }
}

/** The texts of the events near a place of a plot. */
export function marksNear(marks, board, clientX, area) {
  const box = area.getBoundingClientRect(),
    [from, to] = board.range();
  const place = x => box.left + ((x - from) / (to - from)) * box.width;
  return marks
    .filter(({x}) => Math.abs(place(x) - clientX) < NEAR_PX)
    .slice(-8)
    .map(({event, x}) => [
      `${axisValue(board.axis, x)}${board.axis === "step" ? "" : `, step ${count(event.step)}`}: ${labelOf(event)}: ${event.text}`,
      colors().get(looksOf(event).color),
    ]);
}
