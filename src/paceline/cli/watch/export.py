"""`--export`: runs as one HTML file that opens from disk, with the page and the answers of the API inside.

    <script type="application/json" id="paceline-data">
        {"version": 1, "now": 1763296800.0, "responses": [["/api/runs", {...}], ["/api/runs/ID", {...}], ...]}
    </script>

`responses` has paths without their query, and the answers to them: the page takes them from there instead of asking a
server. Modules become entries of an import map, so they may import each other only statically, by a literal "./X.js".
"""

from __future__ import annotations

import base64
import html
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
_SCRIPT = re.compile(r'<script\b[^>]*\bsrc="page/([\w.-]+\.js)"[^>]*>\s*</script>')
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
    page = _text("index.html").replace("<head>", f"<head>\n{_POLICY}", 1)
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    modules: dict[str, str] = {}
    entries: list[str] = []

    def style(match: re.Match[str]) -> str:
        return f"<style>\n{_text(match[1])}\n</style>"

    def script(match: re.Match[str]) -> str:
        entries.append(match[1])
        _collect(match[1], modules)
        return "" if len(entries) > 1 else _MARK

    page = _SCRIPT.sub(script, _STYLE.sub(style, page))
    imports = {f"page/{name}": f"data:text/javascript;base64,{code}" for name, code in modules.items()}
    scripts = [
        f'<script type="application/json" id="paceline-data">{safe}</script>',
        f'<script type="importmap">{to_json({"imports": imports})}</script>',
        *(f'<script type="module">import "page/{html.escape(name)}";</script>' for name in entries),
    ]
    return page.replace(_MARK, "\n".join(scripts))


_MARK = "<!-- paceline: scripts -->"


def _collect(name: str, modules: dict[str, str]) -> None:
    """Add a module and those that it imports. Their relative addresses become names of the import map."""
    if name in modules:
        return
    modules[name] = ""
    text = _text(name)
    for match in _IMPORT.finditer(text):
        _collect(match[3], modules)
    modules[name] = base64.b64encode(_IMPORT.sub(r"\1\2page/\3\2", text).encode()).decode()


def _text(name: str) -> str:
    return PAGE.joinpath(name).read_text(encoding="utf-8")
