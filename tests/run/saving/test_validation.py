"""Checkpoints whose files are intact and whose states are not what a run saves: one clear error, and nothing loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from resumable import run, setup
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.checkpoint.folders import step_folder
from paceline.checkpoint.manifest import WHOLE, Manifest
from paceline.checkpoint.reader import Checkpoint, verify
from paceline.checkpoint.writer import AsyncWriter, Component

Change = Callable[[Any], Any]
STEP = 4


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    root = tmp_path_factory.mktemp("intact") / "run"
    run(root, STEP, ema=0.9)
    return Checkpoint(step_folder(root, STEP))


def changed(intact: Checkpoint, root: Path, name: str, change: Change) -> Path:
    """A checkpoint in `root` that is like `intact`, but for what `change` does to a component's state."""
    manifest = intact.manifest
    components = []
    for each, files in manifest.contents.components.items():
        state = intact.load(each, WHOLE if WHOLE in files.parts else "rank-0")
        components.append(Component(each, change(state) if each == name else state, files.pattern))
    root.mkdir()
    with closing(AsyncWriter(root)) as writer:
        writer.save(Manifest(STEP, configuration=manifest.configuration, position=manifest.position), components)
    folder = step_folder(root, STEP)
    assert verify(folder) == []
    return folder


def without(key: Any, *path: Any) -> Change:
    def change(state: Any) -> Any:
        at(state, *path).pop(key)
        return state

    return change


def put(value: Any, *path: Any) -> Change:
    """In the place that `path` leads to."""

    def change(state: Any) -> Any:
        at(state, *path[:-1])[path[-1]] = value
        return state

    return change


def at(state: Any, *path: Any) -> Any:
    for key in path:
        state = state[key]
    return state


def short(state: Any) -> Any:
    """Of a random state: words are missing."""
    version, words, gauss = state["python"]
    return state | {"python": (version, words[:-1], gauss)}


CASES: list[tuple[str, Change, str]] = [
    ("engine", lambda _: [1, 2], r"engine: it is \[1, 2\], expected a dict"),
    ("engine", without("position"), "engine: it has no 'position'"),
    ("engine", without("planner"), "engine: it has no 'planner'"),
    ("engine", put({"epoch": 0, "step": STEP}, "position"), "engine: position lacks micro_batch: it needs epoch"),
    ("engine", put(-1, "position", "micro_batch"), r"engine: position's micro_batch=-1 is not a count"),
    ("engine", put(40, "position", "step"), f"engine: its position is at step 40, the manifest says {STEP}"),
    ("engine", put(None, "exchange"), "engine: 'exchange' is None, expected a dict"),
    ("engine", put("two", "num_workers"), "engine: 'num_workers' is 'two', expected a number"),
    ("engine", put(5, "planner"), "engine: 'planner' is 5, expected a dict"),
    ("engine", without("loss_scale"), "engine: it has no 'loss_scale'"),
    ("optimizer", lambda _: None, "optimizer: it is None, expected a dict"),
    (
        "optimizer",
        without("param_groups"),
        "optimizer: it has no 'param_groups'",
    ),
    ("optimizer", without("state"), "optimizer: it has no 'state'"),
    ("optimizer", put([], "state"), r"optimizer: 'state' is \[\], expected a dict"),
    ("optimizer", put([3], "param_groups"), "optimizer: group 0 is 3, expected a dict with 'params'"),
    (
        "optimizer",
        without("params", "param_groups", 0),
        "optimizer: group 0 is a dict .* expected a dict with 'params'",
    ),
    ("optimizer", without("lr", "param_groups", 0), "optimizer: group 0 has no 'lr', expected a value"),
    ("optimizer", put("high", "param_groups", 0, "lr"), "optimizer: 'lr' of group 0 is 'high', expected a number"),
    (
        "optimizer",
        put((0.9,), "param_groups", 0, "betas"),
        r"optimizer: 'betas' of group 0 is \(0.9,\), expected 2 num",
    ),
    ("optimizer", put({}, "state", 99), "optimizer: it has the state of parameter 99, expected 0 to 7"),
    ("optimizer", put([], "state", 0), r"optimizer: the state of parameter 0 is \[\], expected a dict"),
    ("optimizer", without("exp_avg", "state", 2), "optimizer: the state of parameter 2 has no 'exp_avg'"),
    (
        "optimizer",
        put(torch.zeros(3), "state", 0, "exp_avg"),
        r"'exp_avg' of the state of parameter 0 is a tensor of shape \(3,\), expected a tensor of shape \(6, 3, 3, 3\)",
    ),
    (
        "optimizer",
        put(1.0, "state", 0, "exp_avg"),
        r"optimizer: 'exp_avg' of the state of parameter 0 is 1.0, expected a tensor of shape \(6, 3, 3, 3\)",
    ),
    ("random", lambda _: "dice", "random: it is 'dice', expected a dict"),
    ("random", without("numpy"), "random: it has no 'numpy'"),
    ("random", short, "random: 'python' is not a generator's state: "),
    ("random", put((1, 2), "numpy"), "random: 'numpy' is not a generator's state: "),
    (
        "random",
        put(torch.zeros(5, dtype=torch.uint8), "torch"),
        "random: 'torch' is not a generator's state: ",
    ),
    ("random", put(7, "torch"), "random: 'torch' is not a generator's state: "),
    ("scheduler", lambda _: "cosine", "scheduler: it is 'cosine', expected a dict"),
    ("scheduler", lambda _: {}, "scheduler: it has no 'T_max', 'base_lrs', 'eta_min', 'last_epoch'"),
    ("scheduler", without("last_epoch"), "scheduler: it has no 'last_epoch'"),
    ("scheduler", put("x", "last_epoch"), "scheduler: 'last_epoch' is 'x', expected a number"),
    ("scheduler", put([0.1, 0.2], "base_lrs"), r"scheduler: 'base_lrs' is \[0.1, 0.2\], expected 1 number"),
    ("ema", lambda _: 5, "'ema' of .* cannot be loaded: .*: it is 5, expected a dict of tensors by name"),
    ("ema", without("0.weight"), "'ema' of .* cannot be loaded: .*tensor '0.weight' is not in the checkpoint"),
    ("ema", put("x", "0.weight"), "'ema' of .* cannot be loaded: .*tensor '0.weight' is 'x' in the checkpoint"),
    (
        "ema",
        put(torch.zeros(2), "0.weight"),
        r"'ema' of .* cannot be loaded: .*'0.weight' is \(2,\) float32 in the checkpoint",
    ),
    ("model", lambda _: [1], r"model: it is \[1\], expected a dict"),
    ("model", put(3.0, "0.weight"), "model: tensor '0.weight' is 3.0 in the checkpoint"),
]


@pytest.mark.parametrize(("name", "change", "message"), CASES, ids=[f"{n}-{m[:40]}" for n, _, m in CASES])
def test_a_state_of_another_shape_is_named(
    intact: Checkpoint, tmp_path: Path, name: str, change: Change, message: str
) -> None:
    folder = changed(intact, tmp_path / "run", name, change)
    with pytest.raises(pl.errors.CheckpointError, match=f"(?s){message}") as caught:
        setup(tmp_path / "run", ema=0.9, skip=["average"]).close()
    assert str(folder) in str(caught.value)
    assert ("allow=" if name == "model" and "tensor" in message else "skip=") in str(caught.value)


def test_the_changes_above_are_what_is_refused(intact: Checkpoint, tmp_path: Path) -> None:
    changed(intact, tmp_path / "run", "", lambda state: state)
    with setup(tmp_path / "run", ema=0.9, skip=["average"]) as trainer:
        assert trainer.position.step == STEP


@pytest.mark.parametrize(("name", "change"), [("random", short), ("optimizer", without("lr", "param_groups", 0))])
@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_all_workers_refuse_it(
    intact: Checkpoint, tmp_path: Path, pool: WorkerPool, num_workers: int, name: str, change: Change
) -> None:
    changed(intact, tmp_path / "run", name, change)

    def main() -> None:
        setup(tmp_path / "run", ema=0.9, skip=["average"])

    with pytest.raises(WorkersFailed) as caught:
        pool.run(main, num_workers)
    assert set(caught.value.errors) == set(range(num_workers))
    assert all(f"{name}: " in str(error) for error in caught.value.errors.values())


def test_a_state_that_the_users_own_object_refuses_is_named(tmp_path: Path) -> None:
    class Best:
        def state_dict(self) -> dict[str, float]:
            return {"loss": 1.0}

        def load_state_dict(self, state: dict[str, float]) -> None:
            raise KeyError("accuracy")

    with setup(tmp_path) as trainer:
        trainer.register("best", Best())
        trainer.save()
    with setup(tmp_path) as trainer:
        message = r"component 'best' of .*step-00000000 cannot be loaded: KeyError: 'accuracy'.*skip=\['best'\]"
        with pytest.raises(pl.errors.CheckpointError, match=f"(?s){message}"):
            trainer.register("best", Best())
