"""Server-sent events: what is new in a run's files, or in the list of runs.

Each client has offsets of its own into the files, so there is nothing to share, and nothing to fall behind with: a
client that does not read is disconnected, and continues at its offsets when it comes back.

A client says how often it shows what merely grows: so often that is built and sent. News do not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, time
from typing import Any
from urllib.parse import parse_qs

from paceline.cli.watch import view
from paceline.cli.watch.access import Receive, Scope, Send, answer
from paceline.cli.watch.runs import RunEntry, Runs
from paceline.cli.watch.safe_files import file_stat, folder_stamp
from paceline.observe.json_lines import parse_lines, to_json

POLL_S = 1.0
# For clients that show growth less often, while there is some: a look takes 3 ms on cores that train. A run that stands
# still is looked at every second, since its fault is to be named within 5 s.
SLOW_POLL_S = 2.0
MAX_INTERVAL_S = 60.0
# Plans of noisy machines change every second. The other events are news.
FREQUENT_EVENT = "plan"
COMMENT_INTERVAL_S = 20.0
MAX_STREAMS = 64
# File systems may have other clocks.
CLOCK_S = 5.0
# A client that is further behind fetches everything again.
MAX_BEHIND_BYTES = 4 << 20
LOG_LINES = 200

Event = tuple[str, Any]


class Streams:
    """An ASGI app."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._num_open = 0
        self._reader = ThreadPoolExecutor(1, "paceline-stream")  # one thread's memory stays in the cores' caches

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._num_open >= MAX_STREAMS:
            await answer(send, 503, f"there are {MAX_STREAMS} open pages already: close some")
            return
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        headers = dict(scope["headers"])
        again = parse_qs(headers.get(b"last-event-id", b"").decode("latin-1"))
        query |= {name: values[-1] for name, values in again.items() if name in ("metrics", "events")}
        source: RunSource | ListSource = ListSource(self._runs, _time(query.get("since")))
        if "run" in query:
            run = await asyncio.to_thread(self._runs.find, query["run"])
            if run is None:
                await answer(send, 404, "there is no such run")
                return
            source = RunSource(self._runs, run, query)
        self._num_open += 1
        sender = asyncio.create_task(self._send(source, min(_count(query.get("every")) or 0, MAX_INTERVAL_S), send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((sender, gone), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            self._num_open -= 1
            sender.cancel()
            gone.cancel()

    async def _send(self, source: RunSource | ListSource, interval_s: float, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"retry: 1000\n\n", "more_body": True})
        due, sent_at = 0.0, monotonic()

        def found() -> list[Event]:
            nonlocal due
            if monotonic() < due and not source.has_news():
                return []
            due = monotonic() + interval_s
            return list(source.new())

        while True:
            try:
                events = await asyncio.get_running_loop().run_in_executor(self._reader, found)
            except OSError:  # a file was deleted meanwhile: the client comes back and continues at its offsets
                break
            if events:
                texts = [f"event: {name}\ndata: {to_json(data)}\n\n" for name, data in events]
                if source.id:  # with the last one: those before it are delivered by then
                    texts.insert(-1, f"id: {source.id}\n")
                await send({"type": "http.response.body", "body": "".join(texts).encode(), "more_body": True})
                sent_at = monotonic()
            elif monotonic() - sent_at > COMMENT_INTERVAL_S:
                await send({"type": "http.response.body", "body": b": \n\n", "more_body": True})
                sent_at = monotonic()
            if any(name == "gone" for name, _ in events):
                break
            await asyncio.sleep(SLOW_POLL_S if source.is_growing and interval_s >= SLOW_POLL_S else POLL_S)
        await send({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ListSource:
    """Rows that changed."""

    id = ""
    is_growing = True

    def __init__(self, runs: Runs, since: float) -> None:
        """since: when the client fetched the list, as Unix time."""
        self._runs = runs
        self._since: float | None = since
        self._sent: dict[str, dict[str, Any]] = {}

    def has_news(self) -> bool:
        """Whether runs came, went, or ended."""
        return {run.id: run.state for run in self._runs.all()} != {
            run_id: row["state"] for run_id, row in self._sent.items()
        }

    def new(self) -> Iterator[Event]:
        rows = {run.id: run.row() for run in self._runs.all()}
        changed = [row for run_id, row in rows.items() if self._sent.get(run_id) != row]
        removed = [run_id for run_id in self._sent if run_id not in rows]
        self._sent = rows
        is_first, since, self._since = self._since is not None, self._since or 0.0, None
        if is_first:
            changed = [row for row in changed if row["changed"] >= since]
        if is_first or changed or removed:
            yield "runs", {"now": time(), "rows": changed, "removed": removed}


@dataclass
class _Followed:
    """A file that is read from its end."""

    path: Path
    offset: int
    inode: int | None = None

    def lines(self) -> list[bytes] | None:
        """New ones; None if the file is another one, or too much was added."""
        found = file_stat(self.path)
        if found is None:
            return []
        is_same = self.inode in (None, found.st_ino) and found.st_size >= self.offset
        self.inode = found.st_ino
        if not is_same or found.st_size - self.offset > MAX_BEHIND_BYTES:
            self.offset = view.end_of(self.path)
            return None
        if found.st_size == self.offset:
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            lines = file.read(found.st_size - self.offset).split(b"\n")[:-1]
        self.offset += sum(map(len, lines)) + len(lines)
        return lines


class RunSource:
    """What is new in one run."""

    def __init__(self, runs: Runs, run: RunEntry, query: Mapping[str, str]) -> None:
        self._runs, self._run = runs, run
        files = run.files
        self._metrics, self._events = (
            _Followed(path, view.end_of(path) if (offset := _count(query.get(name))) is None else offset)
            for name, path in (("metrics", files.metrics), ("events", files.events))
        )
        self._logs = _Logs(run) if query.get("log") == "1" else None
        self._is_other = False  # a file was replaced, or too much was added
        self._happened: list[dict[str, Any]] = []  # events that were read and not sent
        self._view: dict[str, Any] = {}
        self._news: Any = None
        self._metrics_bytes = 0
        self.is_growing = True  # since the look before
        self._checkpoints: int | None = None  # when the folder changed

    @property
    def id(self) -> str:
        return f"metrics={self._metrics.offset}&events={self._events.offset}"

    def has_news(self) -> bool:
        """Whether something happened that a page shows at once."""
        self._read_events()
        if self._is_other or any(event["event"] != FREQUENT_EVENT for event in self._happened):
            return True
        run = self._find()
        return run is None or view.news_of(run) != self._news

    def _find(self) -> RunEntry | None:
        run = self._runs.find(self._run.id)
        if run is not None:
            self.is_growing, self._metrics_bytes = run.metrics_bytes != self._metrics_bytes, run.metrics_bytes
        return run

    def _read_events(self) -> None:
        lines = self._events.lines()
        self._is_other |= lines is None
        self._happened += filter(None, map(view.shown_event, parse_lines(lines or ())))

    def new(self) -> Iterator[Event]:
        lines = self._metrics.lines()
        self._read_events()
        if lines is None or self._is_other:
            self._is_other = False
            yield "restart", {}
        if lines:  # the page parses them: it has more time than this machine
            shown = [line.decode(errors="replace") for line in lines]
            yield "metrics", {"lines": shown, "offset": self._metrics.offset}
        if self._happened:
            yield "events", {"events": self._happened, "offset": self._events.offset}
            self._happened = []
        run = self._find()
        yield from [("gone", {})] if run is None else self._changes(run)

    def _changes(self, run: RunEntry) -> Iterator[Event]:
        if self._logs is not None:
            yield from self._logs.new()
        found = view.view(run)
        if found | {"now": 0} != self._view:
            self._view, news = found | {"now": 0}, view.news_of(run)
            yield "run", found | {"is_news": news != self._news}
            self._news = news
        stamp = folder_stamp(run.files.checkpoints)
        if stamp != self._checkpoints:
            self._checkpoints = stamp
            yield "checkpoints", view.checkpoints_of(run)


@dataclass
class _Logs:
    """The workers' output: its last lines, then new ones."""

    run: RunEntry
    offsets: dict[Path, int] = field(default_factory=dict)

    def new(self) -> Iterator[Event]:
        for rank, kind, path in view.rank_files(self.run):
            found = file_stat(path)
            if kind == "json" or found is None:
                continue
            before = self.offsets.get(path, -1)  # the last lines of a file that was not sent are cut
            if found.st_size < before:
                before = 0  # written anew
            if found.st_size in (0, before):
                continue
            start = max(before, 0, found.st_size - view.LOG_BYTES)
            with path.open("rb") as file:
                file.seek(start)
                content, newline, _ = file.read(found.st_size - start).rpartition(b"\n")
            if newline:
                self.offsets[path] = start + len(content) + 1
                lines, is_cut = view.log_lines(content, LOG_LINES)
                yield "log", {"rank": rank, "stream": kind, "lines": lines, "is_cut": is_cut or start > before}


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 19 else None


def _time(text: str | None) -> float:
    try:
        return float(text) - CLOCK_S if text is not None else time()
    except ValueError:
        return time()
