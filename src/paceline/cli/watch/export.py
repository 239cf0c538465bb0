"""`--export`: runs as one HTML file that opens from disk, with the page and the answers of the API inside.

    <script type="application/json" id="paceline-data">
        {"version": 1, "now": 1763296800.0, "responses": [["/api/runs", {...}], ["/api/runs/ID", {...}], ...]}
    </script>

`responses` has paths without their query, and the answers to them: the page takes them from there instead of asking a
server. Modules become entries of an import map, so they may import each other only statically, by a literal "./X.js".
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from time import time
from typing import Any

from paceline import __version__
from paceline.cli.commands import CommandError
from paceline.cli.watch import configs, curves, view
from paceline.cli.watch.runs import RunEntry, Runs
from paceline.observe.json_lines import to_json

MAX_POINTS = 4000
LOG_LINES = 200
MAX_EVENTS = 5000
PAGE = files("paceline.cli.watch").joinpath("page")

# The file may show what is in it, and nothing else.
_POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline' data:; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'\">"
)
_STYLE = re.compile(r'<link\b[^>]*\bhref="page/([\w.-]+\.css)"[^>]*>')
_SCRIPT = '<script type="module" src="page/main.js"></script>'
_IMPORT = re.compile(r"""(\bfrom\s*|\bimport\s*)(["'])\./([\w.-]+\.js)\2""")


def export_html(folder: Path, chosen: Sequence[Path] | None = None) -> str:
    """The page with the runs in a folder, or with the chosen ones."""
    runs = Runs(folder, chosen).all()
    if not runs:
        raise CommandError(f"there is no run in {folder}: choose a run, or the folder that holds your runs")
    return inline_page(to_json({"version": 1, "now": time(), "responses": responses(runs, Runs(folder))}))


def responses(chosen: Sequence[RunEntry], runs: Runs) -> list[list[Any]]:
    """Paths of the API, and their answers."""
    rows = [run.row() for run in chosen]
    facts = {"now": time(), "version": __version__, "folder": str(runs.folder.absolute()), "can_control": False}
    found: list[list[Any]] = [["/api/runs", {**facts, "runs": rows}]]
    for run in chosen:
        path = f"/api/runs/{run.id}"
        found += [
            [path, view.view(run)],
            [f"{path}/metrics", curves.curves_of(run, points=MAX_POINTS, exact=True)],
            [f"{path}/events", view.events_of(run, MAX_EVENTS)],
            [f"{path}/log", view.log_of(run, None, None, LOG_LINES)],
            [f"{path}/checkpoints", view.checkpoints_of(run)],
            [f"{path}/config", configs.config_of(run, runs)],
        ]
    if len(chosen) > 1:
        found.append(["/api/compare", configs.compare(chosen)])
    return found


def inline_page(data: str) -> str:
    """index.html with its styles, its modules and the data inside. data: JSON."""
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    imports = {}
    for name in sorted(path.name for path in PAGE.iterdir() if path.name.endswith(".js")):
        module = _IMPORT.sub(r"\1\2page/\3\2", _text(name))  # in a data: address, relative names mean nothing
        imports[f"page/{name}"] = f"data:text/javascript;base64,{base64.b64encode(module.encode()).decode()}"
    scripts = [
        f'<script type="application/json" id="paceline-data">{safe}</script>',
        f'<script type="importmap">{to_json({"imports": imports})}</script>',
        '<script type="module">import "page/main.js";</script>',
    ]
    page = _text("index.html").replace("<head>", f"<head>\n{_POLICY}", 1)
    page = _STYLE.sub(lambda style: f"<style>\n{_text(style[1])}\n</style>", page)
    return page.replace(_SCRIPT, "\n".join(scripts))


def _text(name: str) -> str:
    return PAGE.joinpath(name).read_text(encoding="utf-8")
