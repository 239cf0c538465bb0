"""`paceline checkpoints list`, `inspect`, `components`, `verify` and `export`. No code in a checkpoint is executed."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.files import replacing, write_tensors
from paceline.checkpoint.folders import complete_steps, latest, step_folder, step_of, unusable
from paceline.checkpoint.manifest import MANIFEST_NAME, Manifest
from paceline.checkpoint.reader import Checkpoint, inspect, read_weights, verify
from paceline.cli import commands as cli
from paceline.cli.commands import CommandError, choose_run, count, print_json
from paceline.observe.formats import size
from paceline.observe.json_lines import to_json
from paceline.observe.run_files import RunFiles

MAX_VALUE_LENGTH = 60
SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}

_NOTE = """\
CKPT is a checkpoint's folder. A run's folder, its name, an unambiguous prefix
of its name, or any folder with checkpoints selects its newest one.
"""
_COMPONENTS_NOTE = f"""\
"replicated" state is the same on every worker and stored once, "global" state
is rank 0's, "per rank" and "per node" state has one part for each.

{_NOTE}"""
_VERIFY_NOTE = f"""\
Reads every byte and compares it with the checksums in the manifest.

{_NOTE}
exit codes:
  0    intact
  1    damaged (every damaged file is listed), or not found
  2    invalid command line
"""
_EXPORT_NOTE = f"""\
Tensors have the names of the model's state_dict. A torch file holds that dict:
read it with torch.load(FILE, weights_only=True).

{_NOTE}"""


def add_parser(commands: Any) -> None:
    examples = ("list 2workers", "verify 2workers --all", "export 2workers -o weights.safetensors")
    summary = "inspect checkpoints: list, inspect, components, verify, export"
    group = cli.add_group(commands, "checkpoints", summary, examples)

    def add(run: cli.Command, name: str, summary: str, notes: str, *examples: str) -> argparse.ArgumentParser:
        parser = cli.add_command(group, name, summary, notes, examples=examples, run=run)
        if name == "list":
            cli.add_run_argument(parser, "the run, or a folder that holds checkpoints (default: the newest run)")
        else:
            cli.add_run_argument(parser, "the checkpoint (default: the newest of the newest run)", "CKPT")
        parser.add_argument("--json", action="store_true", help="print JSON")
        return parser

    folder = "runs/a/checkpoints/step-00000100"
    summary = "list a run's checkpoints, the oldest first"
    add(_list, "list", summary, cli.RUN_NOTE, "", "2workers", "/data/checkpoints --json")
    add(_inspect, "inspect", "print a checkpoint's manifest", _NOTE, "2workers", f"{folder} --json")
    add(_components, "components", "list the components of a checkpoint", _COMPONENTS_NOTE, "2workers")
    summary = "check that a checkpoint is intact"
    parser = add(_verify, "verify", summary, _VERIFY_NOTE, "2workers", "2workers --all", folder)
    parser.add_argument("--all", action="store_true", help="check all checkpoints of the run")
    exports = ("2workers -o weights.safetensors", "2workers -o weights.pt --component ema")
    parser = add(_export, "export", "write a checkpoint's weights to a single file", _EXPORT_NOTE, *exports)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
    what = "safetensors or torch (default: from the suffix of FILE: .safetensors; .pt, .pth, .bin)"
    parser.add_argument("--format", choices=("safetensors", "torch"), metavar="FORMAT", help=what)
    what = "model, or ema: the model with its averaged weights (default: %(default)s)"
    parser.add_argument("--component", choices=("model", "ema"), default="model", metavar="NAME", help=what)
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")


def _root(named: str | None, runs: Path) -> Path:
    """The folder that holds the checkpoints."""
    if named is None or not Path(named).is_dir():
        return choose_run(named, runs).checkpoints
    inner = RunFiles(Path(named)).checkpoints
    return inner if inner.is_dir() and not complete_steps(Path(named)) else Path(named)


def _folder(options: argparse.Namespace) -> Path:
    """The folder of the chosen checkpoint, which may be damaged."""
    named = options.named
    if named is not None and ((Path(named) / MANIFEST_NAME).exists() or step_of(Path(named)) is not None):
        return Path(named)
    root = _root(named, options.runs)
    newest = latest(root)
    if newest is None:
        raise CommandError("; ".join([f"there is no checkpoint in {root}", *unusable(root).values()]))
    return newest


def _list(options: argparse.Namespace) -> None:
    root = _root(options.named, options.runs)
    for flaw in unusable(root).values():
        print(f"ignored: {flaw}", file=sys.stderr)
    found, rows = [], [("step", "epoch", "saved", "size", "workers", "metrics")]
    for step in complete_steps(root):
        folder = step_folder(root, step)
        try:
            manifest = inspect(folder)
        except CheckpointError as error:
            found.append({"checkpoint": str(folder), "problem": str(error)})
            rows.append((f"{step}", "-", "-", "-", "-", "damaged; see `paceline checkpoints verify`"))
            continue
        found.append(each := _described(folder, manifest))
        epoch, num_workers = str(manifest.position.get("epoch", "-")), f"{manifest.world_size}"
        rows.append((f"{step}", epoch, _saved(manifest), size(each["bytes"]), num_workers, _metrics(manifest) or "-"))
    if options.json:
        print_json(found)
    elif found:
        cli.print_table(rows, right=(0, 1, 3, 4))
    else:
        print(f"no checkpoints in {root}")


def _inspect(options: argparse.Namespace) -> None:
    folder = _folder(options)
    manifest = inspect(folder)
    found = _described(folder, manifest) | {"configuration": manifest.configuration, "versions": manifest.versions}
    if options.json:
        print_json(found)
        return
    epoch, micro_batch = (manifest.position.get(name, "-") for name in ("epoch", "micro_batch"))
    settings = {name: v if isinstance(v, str) else to_json(v) for name, v in manifest.configuration.items()}
    cli.print_fields(
        {
            "checkpoint": str(folder),
            "step": f"{manifest.step}",
            "epoch": f"{epoch}, after {micro_batch} of its micro-batches",
            "saved": f"{_saved(manifest)} by {count(manifest.world_size, 'worker')}",
            "metrics": _metrics(manifest) or "none",
            "size": f"{size(found['bytes'])} in {count(len(manifest.contents.files), 'file')}",
            "components": ", ".join(manifest.contents.components),
            "written by": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
            "settings": "",
            **{f"  {name}": cli.shortened(text, MAX_VALUE_LENGTH) for name, text in settings.items()},
        }
    )


def _components(options: argparse.Namespace) -> None:
    contents = inspect(_folder(options)).contents
    found: list[dict[str, Any]] = []
    for name, component in contents.components.items():
        shared = component.pattern.value.lower().replace("_", " ")
        files = [file for part in component.parts.values() for file in part]
        num_bytes = sum(contents.files[file].size for file in files)
        parts = list(component.parts)
        found.append({"component": name, "shared": shared, "parts": parts, "files": files, "bytes": num_bytes})
    if options.json:
        print_json(found)
        return
    rows = [(c["component"], c["shared"], f"{len(c['parts'])}", f"{len(c['files'])}", size(c["bytes"])) for c in found]
    cli.print_table([("component", "shared", "parts", "files", "size"), *rows], right=(2, 3, 4))


def _verify(options: argparse.Namespace) -> int:
    from rich.console import Console

    folders, flaws = [_folder(options)], {}
    if options.all:
        root = folders[0].parent
        flaws = unusable(root)
        folders = [*flaws, *(step_folder(root, step) for step in complete_steps(root))]
    results = []
    for folder in folders:
        with Console(file=cli.raw(sys.stderr)).status(f"reading {folder.name}"):  # shown on a terminal only
            problems = [flaws[folder]] if folder in flaws else verify(folder)
        results.append({"checkpoint": str(folder), "problems": problems})
        if not options.json:
            print("\n".join(f"damaged  {problem}" for problem in problems) or f"intact   {folder}", flush=True)
    if options.json:
        print_json(results)
    return 1 if any(result["problems"] for result in results) else 0


def _export(options: argparse.Namespace) -> None:
    import torch

    path, form = options.output, options.format or SUFFIXES.get(options.output.suffix)
    if form is None:
        raise CommandError(f"{path}: unknown suffix: choose .safetensors or .pt, or give --format", 2)
    if path.is_dir():
        raise CommandError(f"{path} is a folder: choose a file", 2)
    if path.exists() and not options.force:
        raise CommandError(f"{path} exists: choose another file, or overwrite it with --force", 2)
    checkpoint = Checkpoint(_folder(options))
    weights = _weights(checkpoint, options.component)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path, flush=False) as unfinished:
            torch.save(weights, unfinished) if form == "torch" else write_tensors(unfinished, weights)
    except TypeError as error:
        raise CommandError(f"{error}: use --format torch") from error
    if options.json:
        print_json({"file": str(path), "checkpoint": str(checkpoint.folder), "step": checkpoint.step})
    else:
        print(f"{path}: {count(len(weights), 'tensor')}, {size(path.stat().st_size)}, from step {checkpoint.step}")


def _weights(checkpoint: Checkpoint, component: str) -> dict[str, Any]:
    """The model's state_dict. For "ema", averaged weights replace the model's."""
    weights = dict(read_weights(checkpoint.folder))
    # The average holds each parameter once. Tied parameters have several names in the model.
    averages = checkpoint.load("ema") if component == "ema" else {}
    by_tensor = {id(weights[name]): average for name, average in averages.items()}
    return {
        name: by_tensor[id(value)].to(value.dtype) if id(value) in by_tensor else value
        for name, value in weights.items()
    }


def _described(folder: Path, manifest: Manifest) -> dict[str, Any]:
    fields = ("step", "position", "created", "world_size", "metrics")
    num_bytes = sum(record.size for record in manifest.contents.files.values())
    return {"checkpoint": str(folder), **{name: getattr(manifest, name) for name in fields}, "bytes": num_bytes}


def _saved(manifest: Manifest) -> str:
    return f"{datetime.fromisoformat(manifest.created).astimezone():%Y-%m-%d %H:%M:%S}"


def _metrics(manifest: Manifest) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())
