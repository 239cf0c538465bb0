"""The web application: the page, the API and the buttons. docs/watch-api.md documents it.

The page is `page/index.html` at `/`; its modules and styles are at `/page/NAME`. Its policy (see `access`) allows no
inline scripts and styles, and nothing from other hosts.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from time import time
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline import __version__
from paceline.cli.watch import configs, curves, view
from paceline.cli.watch.indexes import Indexes
from paceline.cli.watch.prometheus import prometheus_text
from paceline.cli.watch.runs import RunEntry, Runs
from paceline.cli.watch.stream import Streams
from paceline.observe.json_lines import to_json
from paceline.observe.run_files import read_status, state_of
from paceline.run.control import ControlError, NotListening, ask, socket_path

# Long files are read by so many requests at a time.
MAX_READERS = 2
MAX_COMPARED = 100
COMMANDS = ("save", "stop", "abort")
TYPES = {".html": "html", ".js": "javascript", ".css": "css", ".txt": "plain"}
PAGE = files("paceline.cli.watch").joinpath("page")

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(runs: Runs) -> Starlette:
    """Without access control: see `Access`."""
    reading, indexes = asyncio.Semaphore(MAX_READERS), Indexes()

    def of_all(get: Callable[[Request], Any]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return json_response(await asyncio.to_thread(get, request))

        return endpoint

    def of_run(get: Callable[[RunEntry, QueryParams], Any]) -> Endpoint:
        return of_all(lambda request: get(_find(runs, request), request.query_params))

    async def curves_page(request: Request) -> Response:
        async with reading:
            return await of_run(partial(_curves, indexes))(request)

    async def metrics_page(_: Request) -> Response:
        text = await asyncio.to_thread(lambda: prometheus_text(runs.all()))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def control(command: str) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            await _check_body(request)
            status, reply = await asyncio.to_thread(lambda: request_of(_find(runs, request), command))
            return json_response(reply, status)

        return endpoint

    one = "/api/runs/{run_id}"
    app = Starlette(
        routes=[
            Route("/", _page_file, methods=["GET"]),
            Route("/page/{name}", _page_file, methods=["GET"]),
            Route("/metrics", metrics_page, methods=["GET"]),
            Route("/api/runs", of_all(lambda request: list_of(runs, request.query_params)), methods=["GET"]),
            Route("/api/compare", of_all(lambda request: _compare(runs, request.query_params)), methods=["GET"]),
            Route("/api/stream", Streams(runs), methods=["GET"]),
            Route(one, of_run(lambda run, _: view.view(run)), methods=["GET"]),
            Route(f"{one}/metrics", curves_page, methods=["GET"]),
            Route(f"{one}/events", of_run(_events), methods=["GET"]),
            Route(f"{one}/log", of_run(_log), methods=["GET"]),
            Route(f"{one}/checkpoints", of_run(lambda run, _: view.checkpoints_of(run)), methods=["GET"]),
            Route(f"{one}/config", of_run(lambda run, _: configs.config_of(run, runs)), methods=["GET"]),
            *(Route(f"{one}/{command}", control(command), methods=["POST"]) for command in COMMANDS),
        ],
        exception_handlers={HTTPException: _error, FileNotFoundError: _unreadable, PermissionError: _unreadable},
    )
    app.router.redirect_slashes = False
    return app


def list_of(runs: Runs, query: Mapping[str, str]) -> dict[str, Any]:
    words = query.get("search", "").lower().split()
    rows = [run.row() for run in runs.all() if not words or run.contains(words)]
    facts = {"now": time(), "version": __version__, "folder": str(runs.folder.absolute()), "can_control": True}
    return {**facts, "runs": rows}


def request_of(run: RunEntry, command: str) -> tuple[int, dict[str, Any]]:
    """Send a request to the run itself; the status of the answer, and the answer."""
    status = read_status(run.files)
    state = state_of(run.files, status)
    if state != "live" or status is None:
        return 409, {"error": f"{run.name} is not running: {state}"}
    if status.host != socket.gethostname():
        return 409, {"error": f"{run.name} runs on {status.host}: use `paceline runs {command}` there"}
    try:
        return 200, {"ok": True, **ask(socket_path(run.files.root.absolute()), {"command": command})}
    except NotListening as error:
        if command == "abort" and error.__cause__ is None:  # it was asked, and ended before it answered
            return 200, {"ok": True}
        return 502, {"error": f"{error}. Runs take requests once their workers have started; try again"}
    except ControlError as error:
        return 502, {"error": str(error)}


def json_response(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json; charset=utf-8")


def _find(runs: Runs, request: Request) -> RunEntry:
    run = runs.find(request.path_params["run_id"])
    if run is None:
        raise HTTPException(404, "there is no such run")
    return run


def _compare(runs: Runs, query: QueryParams) -> dict[str, Any]:
    found = [runs.find(run_id) for run_id in query.getlist("run")[:MAX_COMPARED]]
    if None in found:
        raise HTTPException(404, "there is no such run")
    return configs.compare([run for run in found if run is not None])


def _curves(indexes: Indexes, run: RunEntry, query: QueryParams) -> dict[str, Any]:
    axis = query.get("x", "step")
    if axis not in curves.AXES:
        raise HTTPException(400, f"x={axis[:100]!r}: choose from {', '.join(curves.AXES)}")
    points = max(_integer(query, "points", curves.DEFAULT_POINTS, curves.MAX_POINTS), curves.MIN_POINTS)
    last = _integer(query, "to", -1)
    names, first = query.getlist("name"), _integer(query, "from", 0)
    is_exact = query.get("exact", "0") == "1"
    until = math.inf if last < 0 else last
    return curves.curves_of(run, names, first, until, points, axis, exact=is_exact, indexes=indexes)


def _events(run: RunEntry, query: QueryParams) -> dict[str, Any]:
    return view.events_of(run, _integer(query, "limit", 500, 5000))


def _log(run: RunEntry, query: QueryParams) -> dict[str, Any]:
    rank = _integer(query, "rank", -1)
    return view.log_of(run, None if rank < 0 else rank, query.get("stream"), _integer(query, "lines", 100, 2000))


def _integer(query: Mapping[str, str], name: str, default: int, maximum: int = (1 << 63) - 1) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not text.isdecimal() or len(text) > 19:
        raise HTTPException(400, f"{name}={text[:100]!r}: choose an integer >= 0")
    return min(int(text), maximum)


async def _check_body(request: Request) -> None:
    """A form of another site cannot send JSON without asking first."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "send Content-Type: application/json and the body {}")
    try:
        is_object = json.loads(await request.body()) == {}
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise HTTPException(400, "send the body {}")


async def _page_file(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    kind = TYPES.get(Path(name).suffix)
    known = {path.name: path for path in PAGE.iterdir() if path.is_file()}
    if kind is None or name not in known:
        raise HTTPException(404, "there is no such file")
    return Response(known[name].read_bytes(), media_type=f"text/{kind}; charset=utf-8")


async def _unreadable(_: Request, error: Exception) -> Response:
    """A file was deleted meanwhile, or belongs to another user."""
    assert isinstance(error, OSError)
    return json_response({"error": f"{error.filename}: {error.strerror}"}, 503)


async def _error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response({"error": error.detail}, error.status_code)
