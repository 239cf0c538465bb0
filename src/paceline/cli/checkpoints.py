"""`paceline checkpoints list`, `inspect`, `components`, `verify` and `export`. Nothing in a checkpoint is ever run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.files import DTYPE_NAMES, check_file, write_tensors
from paceline.checkpoint.folders import complete_steps, latest, new_token, step_folder, unusable
from paceline.checkpoint.manifest import MANIFEST_NAME, Manifest
from paceline.checkpoint.reader import Checkpoint, inspect, verify
from paceline.cli.commands import (
    CommandError,
    add_command,
    add_json_option,
    add_runs_option,
    columns,
    reporting,
    shortened,
    size,
)
from paceline.cli.logs.runs import LogsError, choose_run
from paceline.observe.json_lines import to_json
from paceline.observe.run_files import RunFiles

WIDTH = 80
PROGRESS_S = 0.2
SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}

_NAMING = """\
CKPT is a checkpoint's folder, or stands for the newest one of a run: a run's
folder, its name, the beginning of a name that no other run has, or any folder
with checkpoints in it.
"""
_CHECKPOINTS_EXAMPLE = """\
example:
  paceline checkpoints list 2workers
  paceline checkpoints verify 2workers --all
  paceline checkpoints export 2workers -o weights.safetensors
"""
_LIST_EXAMPLE = """\
RUN is a run's folder, its name, or the beginning of a name that no other run
has; or any folder with checkpoints in it.

example:
  paceline checkpoints list
  paceline checkpoints list 2workers
  paceline checkpoints list /data/checkpoints --json
"""
_INSPECT_EXAMPLE = f"""\
{_NAMING}
example:
  paceline checkpoints inspect 2workers
  paceline checkpoints inspect runs/a/checkpoints/step-00000100 --json
"""
_COMPONENTS_EXAMPLE = f"""\
"replicated" is the same on every worker and stored once, "global" is rank 0's,
"per rank" and "per node" have a part for each.

{_NAMING}
example:
  paceline checkpoints components 2workers
"""
_VERIFY_EXAMPLE = f"""\
Every byte is read and compared with the checksums in the manifest.

{_NAMING}
exit codes:
  0    intact
  1    damaged: the files and what is wrong with them are named; or not there
  2    the command is wrong

example:
  paceline checkpoints verify 2workers
  paceline checkpoints verify 2workers --all
  paceline checkpoints verify runs/a/checkpoints/step-00000100
"""
_EXPORT_EXAMPLE = f"""\
Names are those of the model's state_dict. A torch file is that dict, and is
loaded by torch.load(FILE, weights_only=True).

{_NAMING}
example:
  paceline checkpoints export 2workers -o weights.safetensors
  paceline checkpoints export 2workers -o weights.pt --component ema
"""


def add_parser(commands: Any) -> None:
    """Add `checkpoints` to the parser's commands; each of its commands sets `run`, from options to exit code."""
    checkpoints = add_command(
        commands,
        "checkpoints",
        "look into checkpoints: list, inspect, components, verify, export",
        _CHECKPOINTS_EXAMPLE,
    )
    kinds = checkpoints.add_subparsers(metavar="COMMAND", required=True)

    listing = add_command(kinds, "list", "list a run's checkpoints, the oldest first", _LIST_EXAMPLE)
    listing.add_argument("named", nargs="?", metavar="RUN", help="the run (default: the newest)")
    _finish(listing, "list", _list)

    inspect_parser = add_command(kinds, "inspect", "tell what a checkpoint says about itself", _INSPECT_EXAMPLE)
    _add_checkpoint(inspect_parser)
    _finish(inspect_parser, "inspect", _inspect)

    components = add_command(kinds, "components", "list what a checkpoint holds, by component", _COMPONENTS_EXAMPLE)
    _add_checkpoint(components)
    _finish(components, "components", _components)

    verify_parser = add_command(kinds, "verify", "check that a checkpoint is intact", _VERIFY_EXAMPLE)
    _add_checkpoint(verify_parser)
    verify_parser.add_argument("--all", action="store_true", help="all checkpoints of the run, not only the newest")
    _finish(verify_parser, "verify", _verify)

    export = add_command(
        kinds, "export", "write a checkpoint's weights to one file, for use elsewhere", _EXPORT_EXAMPLE
    )
    _add_checkpoint(export)
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
    export.add_argument(
        "--format",
        choices=("safetensors", "torch"),
        metavar="FORMAT",
        help="safetensors or torch (default: as FILE ends: .safetensors; .pt, .pth, .bin)",
    )
    export.add_argument(
        "--component",
        choices=("model", "ema"),
        default="model",
        metavar="NAME",
        help="model, or ema: the model with its averaged weights (default: %(default)s)",
    )
    export.add_argument("--force", action="store_true", help="write over a file that is there")
    _finish(export, "export", _export)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("named", nargs="?", metavar="CKPT", help="the checkpoint (default: the newest run's newest)")


def _finish(parser: argparse.ArgumentParser, name: str, command: Callable[[argparse.Namespace], int]) -> None:
    add_json_option(parser)
    add_runs_option(parser)
    parser.set_defaults(run=reporting(f"checkpoints {name}", command, LogsError))


# Which checkpoint


def _root(named: str | None, runs: Path) -> Path:
    """The folder with the checkpoints of what is meant."""
    path = Path(named) if named is not None else None
    if path is None or not path.is_dir():
        return choose_run(named, runs).checkpoints
    has_own = bool(complete_steps(path)) or not RunFiles(path).checkpoints.is_dir()
    return path if has_own else RunFiles(path).checkpoints


def _folder(named: str | None, runs: Path) -> Path:
    """The checkpoint that is meant, whole or not."""
    if named is not None and ((Path(named) / MANIFEST_NAME).exists() or Path(named).name.startswith("step-")):
        return Path(named)
    root = _root(named, runs)
    newest = latest(root)
    if newest is None:
        raise CommandError("; ".join([f"there is no checkpoint in {root}", *unusable(root).values()]))
    return newest


# Commands


def _list(options: argparse.Namespace) -> int:
    root = _root(options.named, options.runs)
    found: dict[int, Manifest | CheckpointError] = {}
    for step in complete_steps(root):
        try:
            found[step] = inspect(step_folder(root, step))
        except CheckpointError as error:
            found[step] = error
    for flaw in unusable(root).values():
        print(f"not used: {flaw}", file=sys.stderr)
    if options.json:
        _print_json([_listed(step_folder(root, step), manifest) for step, manifest in found.items()])
        return 0
    if not found:
        print(f"no checkpoints in {root}")
        return 0
    rows = [("step", "epoch", "saved", "size", "workers", "metrics")]
    for step, manifest in found.items():
        if isinstance(manifest, CheckpointError):
            rows.append((f"{step}", "-", "-", "-", "-", "damaged: `verify` tells more"))
        else:
            rows.append((f"{step}", *_cells(manifest)))
    print("\n".join(shortened(line, WIDTH) for line in columns(rows, numbers=(0, 1, 3, 4)).splitlines()))
    return 0


def _inspect(options: argparse.Namespace) -> int:
    folder = _folder(options.named, options.runs)
    manifest = inspect(folder)
    if options.json:
        _print_json(
            _listed(folder, manifest) | {"configuration": manifest.configuration, "versions": manifest.versions}
        )
        return 0
    position = manifest.position
    rows = [
        ("checkpoint", str(folder)),
        ("step", f"{manifest.step}"),
        ("epoch", f"{position.get('epoch', '-')}, {position.get('micro_batch', '-')} micro-batches of it done"),
        ("saved", f"{_when(manifest)} by {_count(manifest.world_size, 'worker')}"),
        ("metrics", _metrics(manifest) or "none"),
        ("size", f"{size(_num_bytes(manifest))} in {_count(len(manifest.contents.files), 'file')}"),
        ("components", ", ".join(manifest.contents.components)),
        ("written by", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("settings", ""),
        *((f"  {name}", _value(value)) for name, value in manifest.configuration.items()),
    ]
    print(columns(rows))
    return 0


def _components(options: argparse.Namespace) -> int:
    folder = _folder(options.named, options.runs)
    contents = inspect(folder).contents
    found = [
        {
            "component": name,
            "shared": component.pattern.value.lower().replace("_", " "),
            "parts": list(component.parts),
            "files": [file for files in component.parts.values() for file in files],
            "bytes": sum(contents.files[file].size for files in component.parts.values() for file in files),
        }
        for name, component in contents.components.items()
    ]
    if options.json:
        _print_json(found)
        return 0
    rows = [("component", "shared", "parts", "files", "size")]
    for each in found:
        sizes = (f"{len(each['parts'])}", f"{len(each['files'])}", size(each["bytes"]))  # type: ignore[arg-type]
        rows.append((str(each["component"]), str(each["shared"]), *sizes))
    print(columns(rows, numbers=(2, 3, 4)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    folders = [_folder(options.named, options.runs)]
    flaws: dict[Path, str] = {}
    if options.all:
        root = folders[0].parent
        flaws = unusable(root)
        folders = [*flaws, *(step_folder(root, step) for step in complete_steps(root))]
    results = []
    for folder in folders:
        problems = [flaws[folder]] if folder in flaws else _problems(folder)
        results.append({"checkpoint": str(folder), "problems": problems})
        if not options.json:
            print("\n".join(f"damaged  {problem}" for problem in problems) or f"intact   {folder}", flush=True)
    if options.json:
        _print_json(results)
    return 1 if any(result["problems"] for result in results) else 0


def _export(options: argparse.Namespace) -> int:
    path, form = options.output, options.format or SUFFIXES.get(options.output.suffix)
    if form is None:
        raise CommandError(f"{path} does not tell its format: end it in .safetensors or .pt, or give --format", 2)
    if path.is_dir():
        raise CommandError(f"{path} is a folder: name a file", 2)
    if path.exists() and not options.force:
        raise CommandError(f"{path} is there already: choose another name, or write over it with --force", 2)
    checkpoint = Checkpoint(_folder(options.named, options.runs))
    weights = _weights(checkpoint, options.component)
    _write(path, weights, form)
    if options.json:
        _print_json({"file": str(path), "checkpoint": str(checkpoint.folder), "step": checkpoint.step})
    else:
        print(f"{path}: {_count(len(weights), 'tensor')}, {size(path.stat().st_size)}, of step {checkpoint.step}")
    return 0


# Reading


def _problems(folder: Path) -> list[str]:
    """All that is wrong with a checkpoint. What takes its time is shown on a terminal."""
    try:
        manifest = inspect(folder)
    except CheckpointError:
        return verify(folder)  # file by file
    progress = _Progress(folder.name, _num_bytes(manifest))
    problems = []
    for name, record in manifest.contents.files.items():
        try:
            check_file(folder / name, record, progress.add)
        except CheckpointError as error:
            problems.append(str(error))
    progress.close()
    return problems


class _Progress:
    """How much has been read, in a line on stderr that is gone at the end; nothing where nobody looks."""

    def __init__(self, name: str, total_bytes: int) -> None:
        self._name = name
        self._total_bytes = total_bytes
        self._num_bytes = 0
        self._shown_at = monotonic()
        self._is_shown = False

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if sys.stderr.isatty() and monotonic() - self._shown_at > PROGRESS_S:
            self._shown_at, self._is_shown = monotonic(), True
            part = self._num_bytes / self._total_bytes
            self._put(f"{self._name}  {part:4.0%} of {size(self._total_bytes)}")

    def close(self) -> None:
        if self._is_shown:
            self._put("")

    def _put(self, line: str) -> None:
        sys.stderr.write(f"\r{line}\x1b[K")
        sys.stderr.flush()


def _weights(checkpoint: Checkpoint, component: str) -> dict[str, Any]:
    """The model's state, for "ema" with the averaged weights in the place of its own."""
    state = checkpoint.load("model")
    if not isinstance(state, Mapping):
        raise CommandError(f"the model's state in {checkpoint.folder} is a {type(state).__name__}, no state_dict")
    weights = dict(state)
    if component == "ema":
        averages = checkpoint.load("ema")
        # The average has each parameter once; tied ones have several names in the model.
        by_tensor = {id(weights[name]): average for name, average in averages.items()}
        weights = {
            name: by_tensor[id(value)].to(value.dtype) if id(value) in by_tensor else value
            for name, value in weights.items()
        }
    return weights


def _write(path: Path, weights: Mapping[str, Any], form: str) -> None:
    """The file is there in one moment, complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.partial-{new_token()}")
    try:
        if form == "safetensors":
            write_tensors(unfinished, _storable(weights))
        else:
            torch.save(dict(weights), unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _storable(weights: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) or value.dtype not in DTYPE_NAMES:
            what = f"of {value.dtype}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise CommandError(f"{name!r} is {what}, which no safetensors file can hold: give --format torch")
    return weights


# In words


def _listed(folder: Path, manifest: Manifest | CheckpointError) -> dict[str, Any]:
    if isinstance(manifest, CheckpointError):
        return {"checkpoint": str(folder), "problem": str(manifest)}
    return {
        "checkpoint": str(folder),
        "step": manifest.step,
        "position": manifest.position,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "metrics": manifest.metrics,
        "bytes": _num_bytes(manifest),
    }


def _cells(manifest: Manifest) -> tuple[str, str, str, str, str]:
    epoch = str(manifest.position.get("epoch", "-"))
    return epoch, _when(manifest), size(_num_bytes(manifest)), f"{manifest.world_size}", _metrics(manifest) or "-"


def _num_bytes(manifest: Manifest) -> int:
    return sum(record.size for record in manifest.contents.files.values())


def _when(manifest: Manifest) -> str:
    return f"{datetime.fromisoformat(manifest.created).astimezone():%Y-%m-%d %H:%M:%S}"


def _metrics(manifest: Manifest) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _value(value: Any) -> str:
    return shortened(value if isinstance(value, str) else to_json(value), WIDTH - 20)


def _print_json(value: Any) -> None:
    print(json.dumps(json.loads(to_json(value)), indent=2, ensure_ascii=False))
