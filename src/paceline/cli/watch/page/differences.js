/** The settings that differ between runs. */

import {el, setText, table} from "./dom.js";
import {count, MISSING, setting} from "./format.js";
import {curveColor} from "./palette.js";

export class Differences {
  #compared = "";

  constructor(source) {
    this.source = source;
    this.note = el("p", {class: "muted"});
    this.table = el("div");
    this.node = el("div", {}, this.note, this.table);
  }

  /** runs: rows of /api/runs, in the order of their colours. */
  async show(runs) {
    const key = runs.map(run => run.id).join(" ");
    if (key === this.#compared) return;
    this.#compared = key;
    if (runs.length < 2) {
      this.#fill("Select two or more runs.");
      return;
    }
    let answer;
    try {
      answer = await this.source.get(
        "/api/compare",
        runs.map(run => ["run", run.id])
      );
    } catch (error) {
      if (key === this.#compared) this.#fill(error.message);
      return;
    }
    if (key !== this.#compared) return;
    const columns = runs.map(run => answer.runs.indexOf(run.id));
    const different = answer.differences.filter(
      ({values}) => new Set(columns.map(i => JSON.stringify(values[i] ?? null))).size > 1
    );
    const note = different.length
      ? `${count(different.length)} settings differ between these ${runs.length} runs.`
      : "The configurations are the same.";
    this.#fill(note, ...(different.length ? [this.#makeTable(runs, columns, different)] : []));
  }

  #fill(note, ...shown) {
    setText(this.note, note);
    this.table.replaceChildren(...shown);
  }

  #makeTable(runs, columns, different) {
    const heads = runs.map((run, i) => {
      const swatch = el("i", {class: "swatch"});
      swatch.style.background = curveColor(i);
      return el("th", {scope: "col"}, swatch, run.name);
    });
    const {node, body} = table(["setting", ...heads]);
    const rows = different.map(({key, values}) =>
      el(
        "tr",
        {},
        el("th", {scope: "row"}, key),
        ...columns.map(i => el("td", {}, values[i] === null || values[i] === undefined ? MISSING : setting(values[i])))
      )
    );
    body.append(...rows);
    return node;
  }
}
