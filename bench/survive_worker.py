"""What the contestants of `bench survive` run: `python -m bench.survive_worker NAME FOLDER MODEL DEVICE`.

Everyone trains the same model on the same data with AdamW, several micro-batches per worker and step, and notes each
step in FOLDER. They go on until they are ended. Only Paceline runs on devices other than the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models import LanguageModel, mlp
from bench.survive_log import StepLog

NUM_WORKERS = 3
NUM_SAMPLES = 4096
ENDLESS = 1_000_000
CHECKPOINT_STEPS = 10


@dataclass(frozen=True)
class Task:
    """A model, its data, and the micro-batches that one worker takes in a step of all."""

    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    micro_batch: int
    num_micro_batches: int
    model: str

    @property
    def samples_per_worker(self) -> int:
        return self.num_micro_batches * self.micro_batch

    @property
    def global_batch(self) -> int:
        return NUM_WORKERS * self.samples_per_worker


def _tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1000, (NUM_SAMPLES, 64), generator=torch.Generator().manual_seed(0))
    return tokens, torch.zeros(NUM_SAMPLES)


def _vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM_SAMPLES, 32, generator=generator), torch.randint(10, (NUM_SAMPLES,), generator=generator)


TASKS = {
    "transformer": Task(LanguageModel, _tokens, lambda model, x, _: model(x), 2, 2, "transformer, 4 layers, width 256"),
    "mlp": Task(
        partial(mlp, 32, 64, 10), _vectors, lambda model, x, y: functional.cross_entropy(model(x), y), 4, 4, "32-64-10"
    ),
}


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


MicroBatches = Sequence[tuple[Tensor, Tensor]]


def batches(task: Task, rank: int, first_step: int = 0) -> Iterator[MicroBatches]:
    """A worker's micro-batches of each step, the workers' parts of an epoch's order disjoint."""
    x, y = task.data()
    steps_per_epoch = NUM_SAMPLES // task.global_batch
    for step in range(first_step, ENDLESS):
        epoch, within = divmod(step, steps_per_epoch)
        if within == 0 or step == first_step:
            order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
        first = within * task.global_batch + rank * task.samples_per_worker
        mine = order[first : first + task.samples_per_worker]
        yield [(x[part], y[part]) for part in mine.split(task.micro_batch)]


def accumulate(task: Task, model: Any, micro_batches: MicroBatches) -> None:
    """The gradients of a worker's part of a step, exchanged in the last backward of torch's or torchft's DDP."""
    for number, (x, y) in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else model.no_sync():
            (task.loss(model, x, y) / len(micro_batches)).backward()


def paceline(task: Task, folder: Path, device: str, *, checkpoints: bool = False) -> None:
    """On one worker of `launch` or `paceline run`."""
    import paceline as pl

    log = StepLog(folder)
    saving = pl.Checkpoints(folder / "run", every_steps=CHECKPOINT_STEPS, keep_last=2) if checkpoints else None
    with pl.Trainer.setup(
        task.build,
        make_optimizer,
        data=task.data(),
        global_batch=task.global_batch,
        micro_batch=task.micro_batch,
        device=device,
        batching=pl.Batching(drop_last=True),
        runtime=pl.Runtime(threads=1, quiet=True),
        checkpoints=saving,
    ) as trainer:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

        def note(record: pl.StepRecord) -> None:
            generation = getattr(trainer.run.communicator, "generation", None)
            world = restarts if generation is None else generation.number
            log.note(record.step, world, len(record.shares), record.num_samples)

        trainer.every(1, note)
        for epoch in trainer.epochs(ENDLESS):
            for batch in epoch:
                trainer.backward(task.loss(trainer.model, batch.x, batch.y))
                trainer.step()


def launch_survivors(name: str, folder: Path, device: str) -> None:
    import paceline as pl

    pl.launch(partial(paceline, TASKS[name], folder, device), NUM_WORKERS, min_workers=1, max_restarts=ENDLESS)


def launch_restarts(name: str, folder: Path, device: str) -> None:
    import paceline as pl

    pl.launch(partial(paceline, TASKS[name], folder, device, checkpoints=True), NUM_WORKERS, max_restarts=ENDLESS)


def torchrun(name: str, folder: Path, device: str) -> None:  # noqa: ARG001
    """On one worker of torchrun: DDP over Gloo, going on from the newest checkpoint."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    task, log, saved = TASKS[name], StepLog(folder), folder / "checkpoint.pt"
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    module, step = task.build(), 0
    model = DistributedDataParallel(module)
    optimizer = make_optimizer(model.parameters())
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    for micro_batches in batches(task, rank, step):
        optimizer.zero_grad(set_to_none=True)
        accumulate(task, model, micro_batches)
        optimizer.step()
        step += 1
        log.note(step, world, NUM_WORKERS, task.global_batch)
        if rank == 0 and step % CHECKPOINT_STEPS == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)


def torchft(name: str, folder: Path, device: str) -> None:  # noqa: ARG001
    """On the one worker of a replica group, as torchft's train_ddp.py has it."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    class Surviving(DistributedDataParallel):
        """torchft 0.2 asserts in its hook that there is a result; after the loss of a peer that ends the others too.

        With the gradients as they are the step is dropped, as torchft's documentation says.
        """

        @staticmethod
        def _comm_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP would take annotations as text amiss
            try:
                return DistributedDataParallel._comm_hook(state, bucket)
            except AssertionError:
                unchanged: torch.futures.Future[Tensor] = torch.futures.Future()
                unchanged.set_result(bucket.buffer())
                return unchanged

    task, log, group = TASKS[name], StepLog(folder), int(os.environ["REPLICA_GROUP_ID"])
    module = task.build()

    def load_state_dict(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"bench_{group}",
    )
    model = Surviving(manager, module)
    optimizer = Optimizer(manager, make_optimizer(module.parameters()))
    for micro_batches in batches(task, group):
        optimizer.zero_grad()  # begins the quorum
        accumulate(task, model, micro_batches)
        optimizer.step()
        size = manager.num_participants()
        is_completed = manager._commit_failures == 0
        log.note(
            manager.current_step(), manager._quorum_id, size, size * task.samples_per_worker, completed=is_completed
        )


PROGRAMS = {
    "paceline": launch_survivors,
    "restart": launch_restarts,
    "torchrun": torchrun,
    "torchft": torchft,
    "paceline-worker": lambda name, folder, device: paceline(TASKS[name], folder, device),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    program, folder, model, device = sys.argv[1:]
    PROGRAMS[program](model, Path(folder), device)
