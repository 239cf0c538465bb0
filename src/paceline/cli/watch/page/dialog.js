/** Questions, and the list of keys. */

import {button, el} from "./dom.js";

const KEYS = [
  ["?", "this list"],
  ["/", "search the runs"],
  ["g", "all runs"],
  ["j, k", "next, previous run of the list"],
  ["Enter", "open the run in focus"],
  ["Space", "select the run in focus for comparison"],
  ["x", "x axis: step, epoch, time"],
  ["l", "logarithmic y axis"],
  ["s", "more smoothing, Shift: less"],
  ["t", "light or dark"],
  ["c", "copy a link to this view"],
  ["← → + − 0", "in a plot: move, zoom, show everything"],
];

/** Resolves to whether the answer is yes. */
export function askFor(question, effect, yes, isDangerous) {
  return new Promise(resolve => {
    const dialog = el(
      "dialog",
      {class: "question", "aria-label": question},
      el("h2", {}, question),
      el("p", {}, effect),
      el(
        "div",
        {class: "buttons"},
        button("Cancel", () => dialog.close("no"), {"data-answer": "no", autofocus: true}),
        button(yes, () => dialog.close("yes"), {"data-answer": "yes", class: isDangerous ? "danger" : "primary"})
      )
    );
    open(dialog, () => resolve(dialog.returnValue === "yes"));
  });
}

export function showKeys() {
  if (document.querySelector("dialog[open]")) return;
  const rows = KEYS.map(([keys, effect]) =>
    el(
      "tr",
      {},
      el("td", {}, ...keys.split(/(, | )/).map(part => (/^(, | )$/.test(part) ? part : el("kbd", {}, part)))),
      el("td", {}, effect)
    )
  );
  const dialog = el(
    "dialog",
    {class: "keys", "aria-label": "Keyboard"},
    el("h2", {}, "Keyboard and mouse"),
    el("table", {}, el("tbody", {}, ...rows)),
    el(
      "p",
      {class: "muted"},
      "In a plot, drag to zoom, Shift and drag (or a finger) to move, Ctrl and the wheel to zoom, double-click to show everything."
    ),
    el("div", {class: "buttons"}, button("Close", () => dialog.close(), {autofocus: true}))
  );
  open(dialog, () => {});
}

function open(dialog, onclose) {
  dialog.addEventListener("close", () => {
    dialog.remove();
    onclose();
  });
  dialog.addEventListener("click", event => {
    if (event.target === dialog) dialog.close("no");
  });
  document.body.append(dialog);
  dialog.showModal();
}
