"""`paceline checkpoints`: list, inspect, components, verify and export, with intact and damaged checkpoints."""

from __future__ import annotations

import io
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Ended, invoke
from made_runs import make_run
from safetensors.torch import load_file

from paceline.checkpoint.folders import step_folder
from paceline.checkpoint.manifest import Manifest, Pattern
from paceline.checkpoint.writer import AsyncWriter, Component
from paceline.cli.main import main
from paceline.observe.run_files import RunFiles

WEIGHT = torch.arange(6.0).reshape(2, 3)


def checkpoints(*arguments: object) -> Ended:
    return invoke("checkpoints", *arguments)


def model_state() -> dict[str, Any]:
    return {"embed.weight": WEIGHT, "head.weight": WEIGHT, "count": torch.tensor(3), "half": WEIGHT.bfloat16()}


def save_step(root: Path, step: int, state: dict[str, Any] | None = None, **job: Any) -> Path:
    components = [
        Component("model", model_state() if state is None else state),
        Component("ema", {"embed.weight": WEIGHT + 1, "half": WEIGHT + 0.5}),
        Component("random", {"seed": 5}, Pattern.PER_RANK),
    ]
    usual = {"configuration": {"global_batch": 16, "optimizer": "AdamW"}, "position": {"epoch": 2, "micro_batch": 7}}
    with closing(AsyncWriter(root)) as writer:
        writer.save(Manifest(step, **(usual | job)), components)
    return step_folder(root, step)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    """A run with two checkpoints, in the folder `runs` of the current folder."""
    monkeypatch.chdir(tmp_path)
    files = make_run(Path("runs"))
    save_step(files.checkpoints, 8, metrics={"loss": 0.5, "accuracy": 0.25})
    save_step(files.checkpoints, 16)
    return files


@pytest.mark.usefixtures("run")
def test_a_run_may_be_named_like_a_checkpoint() -> None:
    files = make_run(Path("runs"), "step-decay", minutes=1)
    newest = save_step(files.checkpoints, 4)
    assert checkpoints("verify", "step-decay") == (0, f"intact   {newest}\n", "")
    assert checkpoints("verify", f"runs/{files.root.name}").code == 0


def test_list_prints_one_line_per_checkpoint(run: RunFiles) -> None:
    ended = checkpoints("list")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0].split() == ["step", "epoch", "saved", "size", "workers", "metrics"]
    assert lines[1].startswith("   8      2  20")
    assert lines[1].endswith(" 1  loss 0.5, accuracy 0.25")
    assert lines[2].endswith(" 1  -")
    for named in (run.root, run.checkpoints, run.root.name, "2work"):
        assert checkpoints("list", named).out == ended.out
    listed = json.loads(checkpoints("list", "--json").out)
    assert [each["step"] for each in listed] == [8, 16]
    assert listed[0]["metrics"] == {"loss": 0.5, "accuracy": 0.25}


def test_list_shows_damaged_checkpoints_and_does_not_truncate_in_a_pipe(run: RunFiles) -> None:
    save_step(run.checkpoints, 24, metrics={f"metric number {i}": i / 3 for i in range(20)})
    (step_folder(run.checkpoints, 8) / "model.json").unlink()
    lines = checkpoints("list").out.splitlines()
    assert lines[1].endswith("       -        -  damaged; see `paceline checkpoints verify`")
    assert lines[3].endswith("metric number 19 6.333")


def test_incomplete_checkpoint_folders_are_reported(run: RunFiles) -> None:
    (step_folder(run.checkpoints, 16) / "manifest.json").unlink()
    flaw = f"{run.checkpoints}/step-00000016 has no manifest.json, so it is not complete: "
    listed = checkpoints("list")
    assert listed.err.startswith(f"ignored: {flaw}")
    assert len(listed.out.splitlines()) == 2
    everything = checkpoints("verify", "--all")
    assert everything.code == 1
    assert everything.out.startswith(f"damaged  {flaw}")
    assert everything.out.endswith(f"intact   {run.checkpoints}/step-00000008\n")
    (step_folder(run.checkpoints, 8) / "manifest.json").unlink()
    assert f"there is no checkpoint in {run.checkpoints}; " in checkpoints("inspect").err


@pytest.mark.usefixtures("run")
def test_folder_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert checkpoints("list", tmp_path / "empty").out == f"no checkpoints in {tmp_path}/empty\n"
    assert checkpoints("inspect", tmp_path / "empty").err == (
        f"paceline checkpoints inspect: there is no checkpoint in {tmp_path}/empty\n"
    )
    missing = checkpoints("inspect", "nothing")
    assert (missing.code, missing.out) == (1, "")
    assert "there is no run 'nothing' in runs" in missing.err


def test_inspect_prints_the_manifest(run: RunFiles) -> None:
    ended = checkpoints("inspect", step_folder(run.checkpoints, 8))
    assert ended.code == 0
    told = {line[:14].strip(): line[16:] for line in ended.out.splitlines()}
    assert told["checkpoint"] == f"{run.checkpoints}/step-00000008"
    assert told["step"] == "8"
    assert told["epoch"] == "2, after 7 of its micro-batches"
    assert told["metrics"] == "loss 0.5, accuracy 0.25"
    assert told["components"] == "model, ema, random"
    assert told["global_batch"] == "16"
    assert told["optimizer"] == "AdamW"
    assert told["written by"].startswith("paceline ")
    newest = json.loads(checkpoints("inspect", "2workers", "--json").out)
    assert newest["step"] == 16
    assert newest["configuration"] == {"global_batch": 16, "optimizer": "AdamW"}


@pytest.mark.usefixtures("run")
def test_components_lists_sizes() -> None:
    lines = checkpoints("components").out.splitlines()
    assert lines[0].split() == ["component", "shared", "parts", "files", "size"]
    assert lines[1].split()[:4] == ["model", "replicated", "1", "2"]
    assert lines[3].split()[:5] == ["random", "per", "rank", "1", "1"]
    found = json.loads(checkpoints("components", "--json").out)
    assert found[2]["parts"] == ["rank-0"]
    assert found[2]["files"] == ["random.rank-0.json"]


def test_verify_passes_intact_checkpoints(run: RunFiles) -> None:
    ended = checkpoints("verify")
    assert (ended.code, ended.out) == (0, f"intact   {run.checkpoints}/step-00000016\n")
    everything = checkpoints("verify", "--all")
    assert everything.code == 0
    assert everything.out == "".join(f"intact   {run.checkpoints}/step-{step:08d}\n" for step in (8, 16))


def test_verify_names_the_damaged_file_and_the_cause(run: RunFiles) -> None:
    folder = step_folder(run.checkpoints, 8)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    ended = checkpoints("verify", folder)
    assert ended.code == 1
    assert ended.out.startswith(f"damaged  {weights} is damaged: its SHA-256 is ")
    assert checkpoints("verify", run.root).code == 0  # the newest
    everything = checkpoints("verify", run.root, "--all", "--json")
    assert everything.code == 1
    assert [len(each["problems"]) for each in json.loads(everything.out)] == [1, 0]


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("model.json", None, "is missing"),
        ("model.json", b"{}", "has 2 bytes, the manifest says "),
        ("more.json", b"{}", "is not in the manifest"),
        ("manifest.json", None, "is not a complete checkpoint"),
        ("manifest.json", b"{}", "is damaged"),
    ],
)
def test_verify_finds_missing_additional_and_changed_files(
    run: RunFiles, name: str, content: bytes | None, cause: str
) -> None:
    path = step_folder(run.checkpoints, 16) / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    ended = checkpoints("verify", path.parent)
    assert ended.code == 1
    assert ended.out.startswith(f"damaged  {path} ")
    assert cause in ended.out


def test_progress_is_shown_on_a_terminal_and_removed_at_the_end(run: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = step_folder(run.checkpoints, 16)
    assert checkpoints("verify", folder).err == ""
    terminal = _Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["checkpoints", "verify", str(folder)]) == 0
    assert "step-00000016" in terminal.getvalue()
    assert "\x1b[2K" in terminal.getvalue()


def test_table_header_is_bold_on_a_terminal_and_cells_are_not_truncated(
    run: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(run.checkpoints, 24, metrics={f"metric [bold]{i} :smile:": i / 3 for i in range(20)})
    plain = checkpoints("list").out.splitlines()
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["checkpoints", "list"]) == 0
    header, *rows = terminal.getvalue().splitlines()
    assert header.startswith("\x1b[1mstep\x1b[0m")
    assert rows == plain[1:]
    assert rows[-1].endswith("metric [bold]19 :smile: 6.333")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_exported_weights_equal_the_model(tmp_path: Path, form: str) -> None:
    path = tmp_path / "new" / ("weights.safetensors" if form == "safetensors" else "weights.pt")
    ended = checkpoints("export", "2workers", "-o", path)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"{path}: 4 tensors, ")
    weights = load_file(path) if form == "safetensors" else torch.load(path, weights_only=True)
    assert weights.keys() == model_state().keys()
    assert all(torch.equal(weights[name], value) for name, value in model_state().items())
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.usefixtures("run")
def test_export_of_ema_replaces_weights_including_tied_ones(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    assert checkpoints("export", "-o", path, "--component", "ema").code == 0
    weights = load_file(path)
    assert torch.equal(weights["embed.weight"], WEIGHT + 1)
    assert torch.equal(weights["head.weight"], WEIGHT + 1)
    assert torch.equal(weights["half"], (WEIGHT + 0.5).bfloat16())
    assert torch.equal(weights["count"], torch.tensor(3))


@pytest.mark.usefixtures("run")
def test_existing_file_is_not_overwritten_without_force(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_text("precious")
    refused = checkpoints("export", "-o", path)
    assert refused.code == 2
    assert f"{path} exists: choose another file, or overwrite it with --force" in refused.err
    assert path.read_text() == "precious"
    assert checkpoints("export", "-o", path, "--force").code == 0
    assert "head.weight" in torch.load(path, weights_only=True)


@pytest.mark.usefixtures("run")
def test_unknown_suffix_is_an_error() -> None:
    ended = checkpoints("export", "-o", "weights.xyz")
    assert ended.code == 2
    assert "weights.xyz: unknown suffix: choose .safetensors or .pt, or give --format" in ended.err
    assert checkpoints("export", "-o", "runs").code == 2


def test_values_that_safetensors_cannot_store_are_named(run: RunFiles, tmp_path: Path) -> None:
    folder = save_step(run.checkpoints, 24, {"weight": WEIGHT, "_extra_state": {"scale": 2.0}})
    refused = checkpoints("export", folder, "-o", tmp_path / "weights.safetensors")
    assert refused.code == 1
    assert "'_extra_state' is a dict, which a safetensors file cannot store: use --format torch" in refused.err
    assert not (tmp_path / "weights.safetensors").exists()
    assert checkpoints("export", folder, "-o", tmp_path / "weights.pt").code == 0
    assert torch.load(tmp_path / "weights.pt", weights_only=True)["_extra_state"] == {"scale": 2.0}


def test_damaged_weights_are_not_exported(run: RunFiles, tmp_path: Path) -> None:
    weights = step_folder(run.checkpoints, 16) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    ended = checkpoints("export", "-o", tmp_path / "weights.pt")
    assert ended.code == 1
    assert "is damaged: its SHA-256 is" in ended.err
    assert f"The newest intact older checkpoint is {run.checkpoints}/step-00000008" in ended.err
    assert not (tmp_path / "weights.pt").exists()
