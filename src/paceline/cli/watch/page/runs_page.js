/** Many runs: the table, their curves over one another, and what differs in their configurations. */

import {Board} from "./board.js";
import {Curves} from "./curves.js";
import {Differences} from "./differences.js";
import {button, el, retain, section, setText, showList} from "./dom.js";
import {curveColor, curveDash} from "./palette.js";
import {Panel} from "./panel.js";
import {FIRST_REFINEMENT_MS, MAX_REFINEMENT_MS} from "./run_page.js";
import {looksOfPlot, smoothingOf, titleOf} from "./run_plots.js";
import {RunsTable} from "./runs_table.js";
import {Tools} from "./tools.js";

const NUM_PICKED = 5,
  MAX_PICKED = 24;
const USUAL = ["loss", "eval/loss", "samples_per_s", "efficiency", "grad_norm"];
const NO_PLOT = /^(step|time|epoch|samples|(lanes|waiting|shares|speeds)\/.*)$/;
const MIN_POLL_MS = 1500;

export class RunsPage {
  #rows = new Map();
  #curves = new Map();
  #known = new Map();
  #waits_ms = new Map();
  #panels = new Map();
  #names = new Set(USUAL);
  #searched = "";
  #loading = new Set();
  #closeStream = () => {};
  #isClosed = false;
  #loadedAt = 0;
  #timer = 0;
  // A task of the board's pace.
  #showChanges = () => {
    this.#showRows();
    this.board.grow();
    this.#loadPicked();
  };

  constructor(source, view, tip, onstate) {
    Object.assign(this, {source, view, tip, onstate});
    this.board = new Board(view);
    this.board.pace.onchange = () => this.follow();
    this.table = new RunsTable(view, id => this.#toggle(id));
    this.tools = new Tools(view, this.board);
    this.metrics = el("div", {class: "chips", role: "group", "aria-label": "metrics to plot"});
    this.plots = el("div", {class: "plots"});
    this.differences = new Differences(source);
    this.folder = el("p", {class: "facts"});
    this.node = el(
      "main",
      {class: "runs-page"},
      el("header", {class: "title"}, el("h1", {}, "Runs"), this.folder),
      this.table.node,
      this.tools.node,
      this.metrics,
      this.plots,
      section("Differences of configurations", "differences", this.differences.node)
    );
  }

  async load() {
    document.title = "Runs · paceline";
    const answer = await this.source.get("/api/runs");
    if (this.#isClosed) return;
    this.#rows = new Map(answer.runs.map(run => [run.id, run]));
    setText(this.folder, `${answer.folder} · paceline ${answer.version}`);
    this.refresh();
    this.#closeStream();
    if (document.hidden) return;
    this.#closeStream = this.source.stream(
      [
        ["since", answer.now],
        ["every", this.board.pace.interval_s],
      ],
      {runs: changes => this.#change(changes)},
      this.onstate
    );
  }

  close() {
    this.#isClosed = true;
    clearTimeout(this.#timer);
    this.#closeStream();
    this.board.close();
    for (const panel of this.#panels.values()) panel.close();
  }

  /** From the list as it is, and as often as the page is drawn; not at all while nobody can see it. */
  follow() {
    this.#closeStream();
    if (!document.hidden && this.source.isLive) this.load().catch(error => this.onstate(error.message));
  }

  refresh() {
    this.board.readRange();
    this.tools.show();
    this.#search();
    this.#show();
    this.#loadPicked();
  }

  #change({rows, removed}) {
    for (const row of rows) this.#rows.set(row.id, row);
    for (const id of removed) this.#rows.delete(id);
    this.board.pace.soon(this.#showChanges);
  }

  /** The runs whose curves are drawn: the chosen ones, or else the first of the table. */
  #picked() {
    const chosen = this.view.list("pick").filter(id => this.#rows.has(id));
    return chosen.length || this.view.get("pick") === "none"
      ? chosen
      : this.table
          .visible()
          .slice(0, NUM_PICKED)
          .map(run => run.id);
  }

  #toggle(id) {
    const now = this.#picked();
    const next = now.includes(id) ? now.filter(other => other !== id) : [...now, id].slice(-MAX_PICKED);
    this.view.set({pick: next.length ? next : "none"});
  }

  #show() {
    this.#showRows();
    this.board.draw();
  }

  #showRows() {
    this.table.runs = [...this.#rows.values()];
    const picked = this.#picked();
    this.table.show(new Map(picked.map((id, i) => [id, i])));
    this.#showMetrics();
    this.differences.show(picked.map(id => this.#rows.get(id)));
  }

  async #search() {
    const text = this.view.get("q").trim();
    if (text === this.#searched) return;
    this.#searched = text;
    const found = await (
      !text
        ? Promise.resolve(null)
        : this.source.isLive
          ? this.source.get("/api/runs", [["search", text]]).then(answer => answer.runs.map(run => run.id))
          : this.#searchExported(text)
    ).catch(error => {
      this.onstate(error.message);
      return [];
    });
    if (text !== this.#searched || this.#isClosed) return;
    this.table.found = found && new Set(found);
    this.#show();
    this.#loadPicked();
  }

  async #searchExported(text) {
    const words = text.toLowerCase().split(/\s+/),
      found = [];
    for (const [id, run] of this.#rows) {
      const config = await this.source.get(`/api/runs/${id}/config`).catch(() => ({text: ""}));
      const all = `${run.name} ${config.text ?? ""}`.toLowerCase();
      if (words.every(word => all.includes(word))) found.push(id);
    }
    return found;
  }

  #shownNames() {
    const chosen = this.view.list("show");
    return chosen.length ? chosen : USUAL;
  }

  #showMetrics() {
    const shown = this.#shownNames();
    const names = [...new Set([...USUAL, ...[...this.#names].sort(), ...shown])].filter(name => !NO_PLOT.test(name));
    showList(
      this.metrics,
      names,
      name => name,
      name => button(titleOf(name), () => this.#toggleMetric(name), {"data-metric": name}),
      (node, name) => node.setAttribute("aria-pressed", String(shown.includes(name)))
    );
    retain(this.#panels, new Set(shown), panel => panel.close());
    showList(
      this.plots,
      shown,
      name => name,
      name => this.#makePanel(name).node
    );
  }

  #toggleMetric(name) {
    const now = this.#shownNames();
    this.view.set({show: now.includes(name) ? now.filter(other => other !== name) : [...now, name]});
  }

  #makePanel(name) {
    const panel = new Panel(this.board, titleOf(name), () => this.#lines(name), {
      ...looksOfPlot(name),
      height: 260,
      isCompact: name !== "loss",
    });
    this.#panels.set(name, panel);
    return panel;
  }

  #lines(name) {
    const {axis} = this.board,
      isMarked = name.startsWith("eval/"),
      smoothing = isMarked ? 0 : smoothingOf(name, this.board),
      lines = [];
    this.#picked().forEach((id, i) => {
      const curves = this.#curves.get(id);
      if (!curves?.has(name)) return;
      const line = {key: id, label: this.#rows.get(id).name, color: curveColor(i), dash: curveDash(i), isMarked};
      if (smoothing) lines.push({...line, key: `${id} raw`, isFaint: true, series: curves.series(name, axis)});
      lines.push({...line, series: curves.series(name, axis, smoothing)});
    });
    return lines;
  }

  /** Fetch what the picked runs have that is not here yet; live runs not more often than their pictures change. */
  #loadPicked() {
    const wait_ms = this.#loadedAt + MIN_POLL_MS - performance.now();
    clearTimeout(this.#timer);
    if (wait_ms > 0) {
      this.#timer = setTimeout(() => this.#loadPicked(), wait_ms);
    }
    const names = [...new Set([...this.#shownNames(), "time", "epoch"])],
      wanted = names.join("\n");
    for (const id of this.#picked()) {
      const row = this.#rows.get(id),
        known = this.#known.get(id);
      const isNew = !known || known.names !== wanted || row.step < known.step;
      if (this.#loading.has(id) || (!isNew && (wait_ms > 0 || known.num_bytes === row.metrics_bytes))) continue;
      this.#loadedAt = performance.now();
      this.#loadRun(id, names, isNew ? 0 : known.step + 1, {
        names: wanted,
        num_bytes: row.metrics_bytes,
        step: row.step,
      });
    }
  }

  /** A sample may miss extremes: ask again, ever less often, until the server has read the whole file. */
  #refine(id) {
    const wait_ms = this.#waits_ms.get(id) ?? FIRST_REFINEMENT_MS;
    if (wait_ms > MAX_REFINEMENT_MS) return;
    this.#waits_ms.set(id, 2 * wait_ms);
    setTimeout(() => {
      this.#known.delete(id);
      if (!this.#isClosed) this.#loadPicked();
    }, wait_ms);
  }

  async #loadRun(id, names, from, state) {
    this.#loading.add(id);
    const query = [...names.map(name => ["name", name]), ["points", "2000"], ...(from ? [["from", String(from)]] : [])];
    try {
      const answer = await this.source.get(`/api/runs/${id}/metrics`, query);
      if (!from || !this.#curves.has(id)) this.#curves.set(id, new Curves());
      this.#curves.get(id).add(answer);
      this.#known.set(id, {...state, step: answer.last_step ?? 0});
      for (const name of answer.names) this.#names.add(name);
      if (answer.is_sampled) this.#refine(id);
    } catch (error) {
      this.onstate(error.message);
      this.#known.set(id, state);
    } finally {
      this.#loading.delete(id);
    }
    if (!this.#isClosed) {
      this.#showMetrics();
      if (from) this.board.grow();
      else this.board.draw();
    }
  }
}
