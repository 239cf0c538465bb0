"""Milliseconds that training waits for a save, of ours, torch.save, Accelerate and torch.distributed.checkpoint.

Everyone trains the same model with AdamW on one worker and saves model and optimizer; every save meets an idle writer
and its own files from the turn before are gone. Timed is the call alone: what goes on behind it is waited for, untimed,
before the next turn. The note below the table has how long the save as a whole takes, and the time to build model and
optimizer and resume; ours checks every byte's SHA-256 on the way, the others check nothing.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import paceline as pl
from bench.harness import Result, Spread, alternate, isolated, missing_package
from bench.models import mlp

OURS, TORCH, ACCELERATE, DCP = "paceline", "torch.save", "accelerate save_state", "dcp async_save"
WIDTHS = (768, 3072, 2048, 256)
BATCH = 8
STEPS_PER_TURN = 3


class Contestant(NamedTuple):
    """`step` trains a little; `save` writes into a folder; `settle` waits for what goes on behind; `resume` reads it
    back into a new model and optimizer, and returns the seconds that took."""

    step: Callable[[], None]
    save: Callable[[Path], None]
    settle: Callable[[], None]
    resume: Callable[[Path], float]


def make_model() -> nn.Module:
    return mlp(*WIDTHS)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * STEPS_PER_TURN, WIDTHS[0], generator=generator)
    return x, torch.randint(WIDTHS[-1], (len(x),), generator=generator)


class Plain:
    """Model and optimizer, trained by a bare loop."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self) -> None:
        for x, y in zip(*(part.split(BATCH) for part in batches()), strict=True):
            self.optimizer.zero_grad()
            functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def ours(folder: Path, stack: ExitStack) -> Contestant:
    def setup(folder: Path) -> pl.Trainer:
        checkpoints = pl.Checkpoints(folder, keep_last=1, handle_signals=False, final=False)
        return pl.Trainer.setup(make_model, make_optimizer, data=batches(), global_batch=BATCH, checkpoints=checkpoints)

    trainer = stack.enter_context(setup(folder / "ours"))
    epochs = trainer.epochs(10**9)

    def step() -> None:
        for batch in next(epochs):
            trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
            trainer.step()

    def settle() -> None:
        trainer.run.checkpointer._writers[0].wait()

    def resume(path: Path) -> float:
        shutil.copytree(folder / "ours", path, ignore=shutil.ignore_patterns(".*"))
        resumed: list[pl.Trainer] = []
        seconds = seconds_for(lambda: resumed.append(setup(path)))
        resumed[0].close()
        return seconds

    return Contestant(step, lambda _: trainer.save(), settle, resume)


def torch_save(_folder: Path, _stack: ExitStack) -> Contestant:
    plain = Plain()

    def save(path: Path) -> None:
        path.mkdir()
        torch.save(plain.state(), path / "state.pt")

    def resume(path: Path) -> float:
        return seconds_for(lambda: Plain().load(torch.load(path / "state.pt", weights_only=True)))

    return Contestant(plain.step, save, lambda: None, resume)


def accelerate_save_state(_folder: Path, _stack: ExitStack) -> Contestant:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = Plain()
    plain.model, plain.optimizer = accelerator.prepare(plain.model, plain.optimizer)

    def load(path: Path) -> None:
        fresh, reader = Plain(), Accelerator(cpu=True)
        reader.prepare(fresh.model, fresh.optimizer)
        reader.load_state(str(path))

    def save(path: Path) -> None:
        accelerator.save_state(str(path))

    return Contestant(plain.step, save, lambda: None, lambda path: seconds_for(partial(load, path)))


def dcp_async_save(folder: Path, stack: ExitStack) -> Contestant:
    import torch.distributed as dist
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
    plain = Plain()
    under_way: list[Any] = []

    def state_of(trained: Plain) -> dict[str, Any]:
        model, optimizer = get_state_dict(trained.model, trained.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(path: Path) -> None:
        under_way.append(dcp.async_save(state_of(plain), checkpoint_id=str(path)))

    def settle() -> None:
        while under_way:
            under_way.pop().result()

    def load(path: Path) -> None:
        fresh = Plain()
        state = state_of(fresh)
        dcp.load(state, checkpoint_id=str(path))
        set_state_dict(
            fresh.model, fresh.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    return Contestant(plain.step, save, settle, lambda path: seconds_for(partial(load, path)))


def seconds_for(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


MAKERS = {OURS: ours, TORCH: torch_save, ACCELERATE: accelerate_save_state, DCP: dcp_async_save}
PACKAGES = {ACCELERATE: "accelerate"}


class Turns:
    """A contestant's turns, and what they tell beside the pause."""

    def __init__(self, contestant: Contestant, folder: Path) -> None:
        self._contestant = contestant
        self._folder = folder
        self.whole_ms: list[float] = []
        self.resume_ms: list[float] = []

    def __call__(self) -> float:
        contestant, path = self._contestant, self._folder / "saved"
        contestant.step()
        pause_ms = 1e3 * seconds_for(partial(contestant.save, path))
        self.whole_ms.append(pause_ms + 1e3 * seconds_for(contestant.settle))
        self.resume_ms.append(1e3 * contestant.resume(path))
        shutil.rmtree(path)
        return pause_ms


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=9, help="alternations (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to save; default: the system's folder for temporary files")


def run(options: argparse.Namespace) -> Result:
    skipped = {name: reason for name in PACKAGES if (reason := missing_package(PACKAGES[name]))}
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder)))
        turns = {}
        for number, name in enumerate(MAKERS):
            if name not in skipped:
                folder = top / str(number)
                folder.mkdir()
                turns[name] = Turns(MAKERS[name](folder, stack), folder)
        for untimed in turns.values():
            untimed()  # the first save gets memory, which later ones use again
            untimed.whole_ms.clear()
            untimed.resume_ms.clear()
        result = Result.of(
            "checkpoint",
            "ms",
            alternate({name: isolated(lambda turn=turn: turn) for name, turn in turns.items()}, options.turns),
            ours=OURS,
            limit=TORCH,
            better="lower",
            settings={"state_mb": round(state_bytes() / 1e6), "threads": torch.get_num_threads()},
            packages=("accelerate",),
            skipped=skipped,
        )
    for label, field in (("save as a whole", "whole_ms"), ("resume", "resume_ms")):
        medians = {name: Spread.of(getattr(turn, field)).median for name, turn in turns.items()}
        result.detail[field] = medians
        result.detail["notes"].append(f"{label}: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in medians.items()))
    return result


def state_bytes() -> int:
    """Of weights and both of AdamW's moments."""
    return 3 * sum(parameter.nbytes for parameter in make_model().parameters())
