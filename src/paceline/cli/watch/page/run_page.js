/** One run, top to bottom. */

import {Board} from "./board.js";
import {Curves} from "./curves.js";
import {CheckpointList, ConfigView, EventList, LogView, PlanView} from "./details.js";
import {el, section} from "./dom.js";
import {percent} from "./format.js";
import {Lanes} from "./lanes.js";
import {looksOf} from "./marks.js";
import {NO_PLOT, RunPlots} from "./run_plots.js";
import {RunSummary} from "./summary.js";
import {Tools} from "./tools.js";

const LANE_GROUPS = ["lanes", "waiting", "shares", "speeds"];
const MAX_NAMES_IN_ADDRESS = 60;
/** The server reads about a million lines in this time. */
export const FIRST_REFINEMENT_MS = 4000;
export const MAX_REFINEMENT_MS = 300_000;

export class RunPage {
  #events = [];
  #offsets = null;
  #ticking = 0;
  #marks = {key: "", list: []};
  #closeStream = () => {};
  #refreshing = 0;
  #isClosed = false;
  // Tasks of the board's pace: each is done at most once per frame.
  #showRun = () => this.#show(this.run);
  #showEvents = () => this.events.show(this.#events);
  #showLog = () => this.log.show();
  #showPlots = () => {
    this.plots.show();
    this.tools.show();
  };

  constructor(source, view, tip, id, onstate) {
    Object.assign(this, {source, view, tip, id, onstate});
    this.curves = new Curves();
    this.board = new Board(view, (from, to) => this.#loadDetail(from, to));
    this.board.pace.onchange = () => this.follow();
    this.summary = new RunSummary(source, this.board.pace);
    this.lanes = new Lanes(this.board, this.curves, tip, () => this.#eventMarks());
    this.events = new EventList();
    this.checkpoints = new CheckpointList(source, this.board.pace);
    this.plan = new PlanView();
    this.planSection = section("Plan", "plan", this.plan.node);
    this.config = new ConfigView(view);
    this.log = new LogView(view);
    this.tools = new Tools(view, this.board);
    this.plots = new RunPlots(this.board, this.curves, tip, () => this.#eventMarks());
    this.node = el(
      "main",
      {class: "run-page"},
      this.summary.node,
      this.tools.node,
      this.plots.lead,
      section("Workers", "workers", this.lanes.node),
      this.plots.others,
      el(
        "div",
        {class: "columns"},
        section("Events", "events", this.events.node),
        section("Checkpoints", "checkpoints", this.checkpoints.node)
      ),
      this.planSection,
      section("Configuration", "configuration", this.config.node),
      section("Log", "log", this.log.node)
    );
  }

  async load() {
    const base = `/api/runs/${this.id}`;
    const run = await this.source.get(base);
    if (this.#isClosed) return;
    this.#show(run);
    const points = ["points", String(Math.min(4000, 2 * Math.ceil(innerWidth)))];
    const isLane = name => LANE_GROUPS.some(group => name.startsWith(`${group}/`));
    const names = new Set(run.names.filter(name => !isLane(name)));
    const getMetrics = async () => {
      const wanted = names.size <= MAX_NAMES_IN_ADDRESS ? [...names].map(name => ["name", name]) : [];
      const answer = await this.source.get(`${base}/metrics`, [...wanted, points]);
      // Of a long run: those that are neither in its first lines nor in its last ones.
      const others = wanted.length ? answer.names.filter(name => !isLane(name) && !names.has(name)) : [];
      others.forEach(name => names.add(name));
      return others.length ? getMetrics() : answer;
    };
    const [metrics, lanes, events, checkpoints, config, log] = await Promise.all([
      getMetrics(),
      this.source.isLive
        ? this.source.get(`${base}/metrics`, [...LANE_GROUPS.map(name => ["name", name]), ["points", "1600"]])
        : null,
      this.source.get(`${base}/events`, [["limit", "1000"]]),
      this.source.get(`${base}/checkpoints`),
      this.source.get(`${base}/config`),
      this.source.isLive ? null : this.source.get(`${base}/log`), // otherwise the stream begins with it
    ]);
    if (this.#isClosed) return;
    this.curves.add(metrics);
    if (lanes) this.curves.add(lanes);
    this.#addEvents(events.events);
    this.checkpoints.show(checkpoints.checkpoints);
    this.config.show(config);
    this.log.set(log?.files ?? []);
    this.#showPlots();
    this.board.draw();
    // The smaller offset: a record that comes twice is the same point.
    this.#offsets = {
      metrics: Math.min(metrics.offset, lanes?.offset ?? metrics.offset),
      events: events.offset,
    };
    this.follow();
    if (!this.board.isWhole) this.#loadDetail(...this.board.range());
    if (metrics.is_sampled && this.source.isLive) this.#refine(getMetrics, FIRST_REFINEMENT_MS);
  }

  /** A sample may miss extremes: ask again, ever less often, until the server has read the whole file. */
  #refine(getMetrics, wait_ms) {
    setTimeout(async () => {
      const answer = this.#isClosed ? null : await getMetrics().catch(() => null);
      if (!answer || this.#isClosed) return;
      this.curves.add(answer);
      this.#showPlots();
      this.board.draw();
      if (answer.is_sampled && wait_ms < MAX_REFINEMENT_MS) this.#refine(getMetrics, 2 * wait_ms);
    }, wait_ms);
  }

  close() {
    this.#isClosed = true;
    this.follow();
    this.board.close();
    this.plots.close();
  }

  /** When the run has not been shown for longer than it should: what was last known is still so, and older. */
  #tickLater() {
    clearTimeout(this.#ticking);
    this.#ticking = setTimeout(() => {
      this.run.now = this.source.now();
      this.board.pace.soon(this.#showRun);
      this.#tickLater();
    }, 1250 * this.board.pace.interval_s);
  }

  /** The view changed (axis, smoothing, range), or the colours. */
  refresh() {
    this.board.readRange();
    this.tools.show();
    this.board.draw();
  }

  /** From where it was, and as often as the page is drawn; not at all while nobody can see it. */
  follow() {
    const {pace} = this.board;
    this.#closeStream();
    clearTimeout(this.#ticking);
    if (!this.source.isLive || !this.#offsets || this.#isClosed || document.hidden) return;
    const query = [["run", this.id], ...Object.entries(this.#offsets), ["log", "1"], ["every", pace.interval_s]];
    this.#tickLater();
    this.#closeStream = this.source.stream(
      query,
      {
        run: run => {
          this.run = run;
          if (run.is_news) pace.now(this.#showRun);
          else pace.soon(this.#showRun);
          this.#tickLater();
        },
        metrics: ({lines, offset}) => {
          this.#offsets.metrics = offset;
          this.curves.addLines(lines);
          pace.soon(this.#showPlots);
          this.board.grow();
        },
        events: ({events: added, offset}) => {
          this.#offsets.events = offset;
          this.#addEvents(added);
        },
        log: added => {
          this.log.add(added);
          pace.soon(this.#showLog);
        },
        checkpoints: ({checkpoints}) => this.checkpoints.show(checkpoints),
        restart: () => this.#restart(),
        gone: () => {
          this.#offsets = null; // nothing to follow
          this.follow();
          this.onstate("the run's folder is gone");
        },
      },
      this.onstate
    );
  }

  async #restart() {
    this.#offsets = null;
    this.follow();
    this.curves.clear();
    this.#events = [];
    await this.load().catch(error => this.onstate(error.message));
  }

  #show(run) {
    this.run = run;
    const title = `${run.total_steps ? `${percent(run.step / run.total_steps)} ` : ""}${run.name} · paceline`;
    if (document.title !== title) document.title = title;
    this.summary.show(run);
    this.checkpoints.tick();
    this.lanes.show(run, this.#events);
    this.planSection.hidden = !run.plan;
    if (run.plan) this.plan.show(run);
  }

  #addEvents(added) {
    for (const event of added) this.#events.push({...event, key: `${this.#events.length} ${event.time}`});
    this.#marks.key = "";
    this.board.grow();
    if (added.some(event => looksOf(event).isLine)) this.board.pace.now(this.#showRun);
    this.board.pace.soon(this.#showEvents);
  }

  /** Events by their place on the axis, for the plots. */
  #eventMarks() {
    const {axis} = this.board,
      key = `${axis} ${this.#events.length} ${axis === "step" ? 0 : this.curves.version}`;
    if (this.#marks.key !== key) {
      const list = this.#events.map(event => ({event, x: this.curves.position(event.step, axis)}));
      this.#marks = {key, list: list.filter(mark => mark.x === mark.x)};
    }
    return this.#marks.list;
  }

  /** More points for the part that is shown, if the whole run was thinned. */
  async #loadDetail(from, to) {
    if (this.board.isWhole || !this.source.isLive) return;
    const thinned = [...this.curves.byName]
      .filter(([name, curve]) => curve.isThinned && !NO_PLOT.test(name))
      .map(([name]) => name);
    if (!thinned.length) return;
    const request = ++this.#refreshing,
      margin = (to - from) / 2,
      {axis} = this.board;
    const step = x => Math.max(0, Math.round(this.curves.stepAt(x, axis)));
    const answer = await this.source
      .get(`/api/runs/${this.id}/metrics`, [
        ...thinned.slice(0, MAX_NAMES_IN_ADDRESS).map(name => ["name", name]),
        ["from", String(step(from - margin))],
        ["to", String(step(to + margin))],
        ["points", "8000"],
      ])
      .catch(error => this.onstate(error.message));
    if (!answer || request !== this.#refreshing || this.#isClosed) return;
    this.curves.addDetail(answer);
    this.board.draw();
  }
}
