/** Starts the page: which part is shown, the theme, the keys. */

import {showKeys} from "./dialog.js";
import {button, el, isTyping, link, setText} from "./dom.js";
import {Tip} from "./marks.js";
import {onTheme, recallTheme, toggleTheme} from "./palette.js";
import {RunPage} from "./run_page.js";
import {RunsPage} from "./runs_page.js";
import {openSource} from "./source.js";
import {changeSmoothing, nextAxis, SMOOTHING_STEP, toggleLog} from "./tools.js";
import {View} from "./view.js";

class App {
  #page = null;
  #runs = null;

  constructor() {
    recallTheme();
    this.source = openSource();
    this.view = new View();
    this.tip = new Tip();
    this.notice = el("p", {class: "notice", role: "status", hidden: true});
    const openRuns = () => this.view.open("");
    this.link = button("copy link", () => this.#copyLink());
    this.bar = el(
      "nav",
      {class: "bar", "aria-label": "page"},
      link("paceline", openRuns, {class: "brand"}),
      link("runs", openRuns),
      el("span", {class: "spring"}),
      this.source.isLive ? this.link : el("span", {class: "muted"}, "exported"),
      button("light / dark", toggleTheme, {"data-tool": "theme"}),
      button("?", showKeys, {"data-tool": "keys", "aria-label": "keyboard"})
    );
    document.body.replaceChildren(this.bar, this.notice, this.tip.node);
    this.view.addEventListener("change", event => (event.detail.isNewPage ? this.#open() : this.#page?.refresh()));
    onTheme(() => this.#page?.refresh());
    addEventListener("keydown", event => this.#key(event));
    document.addEventListener("visibilitychange", () => this.#page?.follow());
    for (const name of ["pointerdown", "pointermove", "wheel", "keydown"])
      addEventListener(name, () => this.#page?.board.pace.touch(), {capture: true, passive: true});
  }

  async start() {
    // The cookie is enough from now on: the token need not stay in the address, or in links.
    if (this.source.isLive && location.search) history.replaceState(null, "", location.pathname + location.hash);
    await this.#loadRuns();
    if (!this.view.get("run") && this.#runs?.length === 1 && !this.source.isLive)
      this.view.set({run: this.#runs[0].id});
    this.#open();
  }

  async #loadRuns() {
    try {
      this.#runs = (await this.source.get("/api/runs")).runs;
    } catch (error) {
      this.#say(error.message);
    }
  }

  #open() {
    this.#page?.close();
    this.#page?.node.remove();
    this.tip.hide();
    this.#say("");
    const id = this.view.get("run"),
      say = text => this.#say(text);
    this.#page = id
      ? new RunPage(this.source, this.view, this.tip, id, say)
      : new RunsPage(this.source, this.view, this.tip, say);
    const page = this.#page;
    this.notice.after(page.node);
    scrollTo(0, 0);
    page.load().catch(error => {
      if (page === this.#page) say(error.message);
    });
  }

  #say(text) {
    this.notice.hidden = !text;
    setText(this.notice, text);
  }

  async #copyLink() {
    try {
      await navigator.clipboard.writeText(location.href);
    } catch {
      prompt("Link to this view", location.href);
      return;
    }
    setText(this.link, "copied");
    setTimeout(() => setText(this.link, "copy link"), 1200);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (isTyping(event) && event.target.type !== "checkbox" && event.target.type !== "range") {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const page = this.#page;
    const actions = new Map([
      ["?", showKeys],
      ["g", () => this.view.open("")],
      ["t", toggleTheme],
      ["x", () => nextAxis(this.view)],
      ["l", () => toggleLog(this.view)],
      ["s", () => changeSmoothing(this.view, SMOOTHING_STEP)],
      ["S", () => changeSmoothing(this.view, -SMOOTHING_STEP)],
      ["c", () => this.#copyLink()],
      ["/", () => this.#search()],
      ["j", () => page.table?.moveFocus(1)],
      ["k", () => page.table?.moveFocus(-1)],
    ]);
    if (!actions.has(event.key)) return;
    event.preventDefault();
    actions.get(event.key)();
  }

  #search() {
    if (!this.#page.table) this.view.open("");
    this.#page.table.focusSearch();
  }
}

new App().start();
