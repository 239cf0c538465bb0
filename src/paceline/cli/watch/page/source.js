/** Where the data comes from: the server, or the file itself if this page was exported. */

const exported = document.getElementById("paceline-data");

const LOST = "no connection to the server; trying again",
  REFUSED = "the server refused the connection: open the address that paceline watch printed";

export function openSource() {
  return exported ? new ExportedSource(JSON.parse(exported.textContent)) : new LiveSource();
}

export class LiveSource {
  isLive = true;
  #clockOffset_s = 0;

  /** The server's clock: ages are right on another computer too. */
  now() {
    return Date.now() / 1e3 + this.#clockOffset_s;
  }

  async get(path, query = []) {
    return this.#read(await fetch(address(path, query), {cache: "no-store"}));
  }

  async post(path) {
    return this.#read(
      await fetch(address(path, []), {
        method: "POST",
        headers: {"Content-Type": "application/json"},
        body: "{}",
      })
    );
  }

  /** handlers: by the name of the event. onstate(what is wrong, "" if nothing is). Returns a function that closes the stream. */
  stream(query, handlers, onstate) {
    const events = new EventSource(address("/api/stream", query));
    for (const [name, handle] of Object.entries(handlers)) {
      events.addEventListener(name, event => {
        const data = JSON.parse(event.data);
        this.#setClock(data);
        handle(data);
      });
    }
    events.onopen = () => onstate("");
    events.onerror = () => onstate(events.readyState === EventSource.CLOSED ? REFUSED : LOST);
    return () => events.close();
  }

  async #read(response) {
    const answer = await response.json().catch(() => ({error: `${response.status} ${response.statusText}`}));
    if (!response.ok) throw new Error(answer.error ?? `the server answered ${response.status}`);
    this.#setClock(answer);
    return answer;
  }

  #setClock(answer) {
    if (typeof answer.now === "number") this.#clockOffset_s = answer.now - Date.now() / 1e3;
  }
}

class ExportedSource {
  isLive = false;

  #now;
  #responses;

  constructor(data) {
    this.#now = data.now;
    this.#responses = new Map(data.responses);
  }

  now() {
    return this.#now;
  }

  async get(path) {
    if (!this.#responses.has(path)) throw new Error(`this file does not contain ${path}`);
    return this.#responses.get(path);
  }

  async post() {
    throw new Error("this page was exported: it cannot control a run");
  }

  stream() {
    return () => {};
  }
}

/** query: [name, value] pairs; a name may come several times. Relative, so that a proxy may add a prefix. */
function address(path, query) {
  const text = new URLSearchParams(query).toString();
  return `.${path}${text ? `?${text}` : ""}`;
}

/** JSON has no NaN: the server sends names. */
export const number = value => (typeof value === "number" ? value : value === null ? NaN : Number(value));
