/** The head of a run's page: state, progress, remaining time, what holds the run back, and the buttons. */

import {askFor} from "./dialog.js";
import {button, el, setClass, setStyle, setText, showList} from "./dom.js";
import {ago, count, counted, duration, MISSING, moment, num, percent, rate} from "./format.js";

/** State of a run: the class of its chip. */
const STATE_CLASSES = new Map([
  ["live", "live"],
  ["finished", "good"],
  ["stopped", "calm"],
  ["failed", "bad"],
  ["crashed", "bad"],
  ["unknown", "calm"],
]);

const SHOWN_VERSIONS = new Set(["paceline", "torch"]);

export function stateChip() {
  return el("span", {class: "chip"});
}

export function showState(chip, state) {
  setText(chip, state);
  setClass(chip, `chip ${STATE_CLASSES.get(state) ?? "calm"}`);
}

const ACTIONS = [
  ["save", "Save", "Save a checkpoint?", "All workers save after one of the next steps. The run goes on."],
  [
    "stop",
    "Stop",
    "Save and stop this run?",
    "All workers save after one of the next steps, then the run ends. It can be resumed.",
  ],
  ["abort", "Abort", "Abort this run?", "The run ends immediately. Everything after the newest checkpoint is lost."],
];

export class RunSummary {
  constructor(source, pace) {
    Object.assign(this, {source, pace});
    this.chip = stateChip();
    this.name = el("h1");
    this.facts = el("p", {class: "facts"});
    this.message = el("p", {class: "message", role: "status", hidden: true});
    this.bar = el("div", {class: "fill"});
    this.progress = el(
      "div",
      {class: "progress", role: "progressbar", "aria-label": "progress", "aria-valuemin": "0", "aria-valuemax": "100"},
      this.bar
    );
    this.buttons = el(
      "div",
      {class: "buttons", hidden: true},
      ...ACTIONS.map(([action, label, question, effect]) =>
        button(label, () => this.ask(action, label, question, effect), {
          "data-action": action,
          class: action === "abort" ? "danger" : "",
        })
      )
    );
    this.tiles = new Map();
    this.tileRow = el(
      "dl",
      {class: "tiles"},
      ...[
        ["step", "step"],
        ["left", "time left"],
        ["last", "last step"],
        ["loss", "loss"],
        ["throughput", "throughput"],
        ["efficiency", "of what the workers could do"],
      ].map(([id, label]) => this.#tile(id, label))
    );
    this.verdicts = el("div", {class: "verdicts", role: "status", "aria-label": "what holds the run back"});
    this.node = el(
      "header",
      {class: "summary"},
      el("div", {class: "title-row"}, el("div", {class: "title"}, this.name, this.chip), this.buttons),
      this.facts,
      this.message,
      this.progress,
      this.tileRow,
      this.verdicts
    );
  }

  show(run) {
    this.run = run;
    setText(this.name, run.name);
    showState(this.chip, run.state);
    this.buttons.hidden = !(run.state === "live" && this.source.isLive);
    const facts = [
      run.reason,
      run.started && `started ${moment(run.started)}`,
      run.num_starts > 1 && `${run.num_starts} starts`,
      run.num_workers && counted(run.num_workers, "worker"),
      run.host && `host ${run.host}`,
      run.time_s !== null && `trained ${duration(run.time_s)}`,
      run.git?.commit && `commit ${run.git.commit.slice(0, 8)}${run.git.has_changes ? " with changes" : ""}`,
      ...(run.versions ?? []).filter(([name]) => SHOWN_VERSIONS.has(name)).map(pair => pair.join(" ")),
    ];
    setText(this.facts, facts.filter(Boolean).join(" · "));
    const part = run.total_steps ? Math.min(1, run.step / run.total_steps) : run.state === "finished" ? 1 : 0;
    setStyle(this.bar, "transform", `scaleX(${part})`);
    this.progress.setAttribute("aria-valuenow", String(Math.round(100 * part)));
    this.#set("step", count(run.step), run.total_steps ? `of ${count(run.total_steps)} · ${percent(part)}` : "");
    this.#set("left", ...timeLeft(run));
    const evaluation = run.evaluation.find(([name]) => name === "eval/loss");
    this.#set("loss", num(run.loss), evaluation ? `evaluation ${num(evaluation[1])}` : "");
    const samples = rate(run.samples_per_s).split(" ");
    this.#set(
      "throughput",
      samples[0],
      [samples[1], run.tokens_per_s !== null && rate(run.tokens_per_s, "tokens")].filter(Boolean).join(" · ")
    );
    this.#set("efficiency", percent(run.efficiency), "");
    const at = run.last_step_at;
    this.#set(
      "last",
      at === null ? "none yet" : ago(at, run.now, this.pace.interval_s),
      run.epoch === null ? "" : `epoch ${count(run.epoch)}`
    );
    this.tiles.get("last").node.classList.toggle("late", run.state === "live" && at !== null && run.now - at > 30);
    this.#showVerdicts(run);
  }

  async ask(action, label, question, effect) {
    const {id} = this.run;
    if (!(await askFor(question, effect, label, action === "abort"))) return;
    this.#say(`${label}: asking the run…`, "");
    try {
      const answer = await this.source.post(`/api/runs/${id}/${action}`);
      this.#say(
        answer.step === undefined ? `${label}: done.` : `${label}: the run was asked after step ${count(answer.step)}.`,
        ""
      );
    } catch (error) {
      this.#say(`${label}: ${error.message}`, "bad");
    }
  }

  #say(text, className) {
    this.message.hidden = false;
    setText(this.message, text);
    setClass(this.message, `message ${className}`);
  }

  #tile(id, label) {
    const value = el("b"),
      note = el("small");
    const node = el("div", {class: "tile", "data-tile": id}, el("dt", {}, label), el("dd", {}, value, note));
    this.tiles.set(id, {node, value, note});
    return node;
  }

  #set(id, value, note) {
    const tile = this.tiles.get(id);
    setText(tile.value, value);
    setText(tile.note, note);
  }

  #showVerdicts(run) {
    const nothing = {kind: "", severity: "good", text: "Nothing holds this run back.", remedy: null};
    const isJudged = run.state === "live" && run.workers.some(worker => worker.lanes?.computing != null);
    const shown = run.verdicts.length ? run.verdicts : isJudged ? [nothing] : [];
    showList(
      this.verdicts,
      shown,
      verdict => verdict.kind + verdict.severity + (verdict.ranks ?? []).join(),
      () =>
        el(
          "div",
          {class: "verdict"},
          el("p", {class: "sentence"}),
          el("p", {class: "remedy"}),
          el("p", {class: "figures"})
        ),
      (node, verdict) => {
        setClass(node, `verdict ${verdict.severity === "ok" ? "good" : verdict.severity}`);
        setText(node.children[0], sentence(verdict.text));
        setText(node.children[1], verdict.remedy ? sentence(verdict.remedy) : "");
        setText(node.children[2], verdict.severity === "ok" ? "" : (verdict.figures ?? []).map(figure).join(" · "));
      }
    );
  }
}

/** The remaining time, and a note: a value and its note. A run of unknown state may go on. */
function timeLeft({state, now, eta_s, ended}) {
  if (state === "live") return [duration(eta_s), eta_s === null ? "" : `until ${moment(now + eta_s).slice(11, 16)}`];
  if (state === "unknown") return [MISSING, ended ? `last write ${moment(ended)}` : ""];
  return ended ? ["ended", moment(ended)] : [MISSING, ""];
}

/** The figures that a verdict rests on, in words. Those that are not here are shown by name, with the unit in it. */
const FIGURES = new Map([
  ["slower", value => `${Number(value.toPrecision(2))} times slower`],
  ["share", value => `${percent(value)} of the work`],
  ["waiting_of_others", value => `others wait ${percent(value)} of the time`],
  ["micro_batch_s", value => `${duration(value)} per micro-batch`],
  ["micro_batches_per_worker", value => `${num(value)} micro-batches per worker and step`],
  ["waiting", value => `waiting for others ${percent(value)} of the time`],
  ["data", value => `waiting for data ${percent(value)} of the time`],
  ["exchange", value => `exchange ${percent(value)} of the time`],
  ["used", value => `${percent(value)} in use`],
  ["gpu_percent", value => `GPU ${Math.round(value)}% busy`],
  ["cpu_percent", value => `CPU ${Math.round(value)}%`],
  ["no_step_s", value => `no step for ${duration(value)}`],
  ["usual_s", value => `before, at most ${duration(value)} between two lines`],
  ["worker_silent_s", value => `silent for ${duration(value)}`],
  ["left", value => `${count(value)} left`],
  ["workers", value => `${counted(value, "worker")} remain${value === 1 ? "s" : ""}`],
  ["loss", value => `loss ${num(value)}`],
  ["lowest", value => `lowest ${num(value)}`],
]);

function figure([name, value]) {
  const show = FIGURES.get(name);
  return show && Number.isFinite(value) ? show(value) : `${name.replaceAll("_", " ")} ${num(value)}`;
}

const sentence = text => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
