"""Workers far apart: what they learn, and the ways in which they may train together."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from bench.models import LanguageModel
from bench.namespaces import ADDRESSES

if TYPE_CHECKING:
    from paceline import StepRecord, Trainer

VOCABULARY, LENGTH = 1000, 64
SUCCESSOR_ODDS = (0.5, 0.25, 0.125, 0.125)  # of the tokens that may follow a token
NUM_HELD_OUT = 512
LEARNING_RATE = 1e-3
OVERHEAD_TARGET = 0.1
# The timed runs go several times over the samples in one epoch: at its end replicas would meet out of turn.
SPEED_REPEATS = 16
ENDLESS = 1_000_000
LIGHTHOUSE_PORT = 29510

NO_TALK, NO_TALK_OURS = "no talk", "no talk, paceline"
DDP, FP16, POWER_SGD = "torch DDP", "DDP, fp16 hook", "DDP, PowerSGD"
POST_LOCAL, DILOCO = "torch post-local SGD", "torchft DiLoCo"
GRADIENTS, CADENCE = "gradients", "cadence"
AVERAGING, OVERLAPPED_BF16 = "averaging", "overlapped averaging, bf16"
INT8, INT4, SPARSE = "averaging, int8", "averaging, int4", "averaging, sparse"
SLOW_LINK = "slow link"
PEERS = (DDP, FP16, POWER_SGD, POST_LOCAL, DILOCO)
SYNCHRONOUS = (DDP, FP16, POWER_SGD, GRADIENTS)
WAYS = (NO_TALK, NO_TALK_OURS, *PEERS, GRADIENTS, CADENCE, AVERAGING, OVERLAPPED_BF16, INT8, INT4, SPARSE, SLOW_LINK)


@dataclass(frozen=True)
class Task:
    """Every step has one micro-batch per worker; with averaging replicas meet after `every` steps."""

    mbit: float
    width: int
    num_layers: int
    micro_batch: int
    every: int
    num_samples: int
    num_turns: int
    num_hosts: int = 2
    seed: int = 0  # of weights and order

    def __post_init__(self) -> None:
        if not self.mbit > 0:
            raise ValueError(f"mbit={self.mbit} lets nothing pass: choose mbit > 0")
        if self.num_hosts < 2:
            raise ValueError(f"hosts={self.num_hosts} have no link: choose hosts >= 2")
        if self.num_turns < 2:  # a step of the cadence tells what the exchange before it took
            raise ValueError(f"turns={self.num_turns} cannot tell what a cadence costs: choose turns >= 2")
        if self.num_samples < self.global_batch or self.num_samples % self.global_batch:
            raise ValueError(
                f"samples={self.num_samples} are no whole steps of {self.global_batch}: "
                f"choose a multiple of {self.global_batch}"
            )
        num_needed = (self.num_turns + 2) * self.every * self.global_batch
        if self.num_samples * SPEED_REPEATS < num_needed:
            raise ValueError(
                f"samples={self.num_samples} are too few for turns={self.num_turns} of {self.every} steps: choose at "
                f"least {math.ceil(num_needed / SPEED_REPEATS)}, or fewer turns"
            )

    @property
    def global_batch(self) -> int:
        return self.num_hosts * self.micro_batch

    def make_model(self) -> nn.Module:
        """The same weights every time."""
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed)
            return LanguageModel(vocabulary=VOCABULARY, length=LENGTH, width=self.width, num_layers=self.num_layers)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.make_model().parameters())

    def settings(self) -> dict[str, Any]:
        """What a result says about how it came about."""
        return {
            **asdict(self),
            "global_batch": self.global_batch,
            "parameters": self.num_parameters,
            "vocabulary": VOCABULARY,
            "length": LENGTH,
            "optimizer": f"AdamW, lr {LEARNING_RATE}",
            "overhead_target": OVERHEAD_TARGET,
            "backend": "gloo",
            "threads_per_worker": 1,
        }


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def outer_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def markov_tokens(num_samples: int, seed: int) -> Tensor:
    """Samples of one source, in which four tokens may follow a token, each with its own odds."""
    successors = torch.randint(
        VOCABULARY, (VOCABULARY, len(SUCCESSOR_ODDS)), generator=torch.Generator().manual_seed(0)
    )
    generator = torch.Generator().manual_seed(seed)
    picks = torch.multinomial(torch.tensor(SUCCESSOR_ODDS), num_samples * LENGTH, replacement=True, generator=generator)
    tokens = [torch.randint(VOCABULARY, (num_samples,), generator=generator)]
    for pick in picks.view(LENGTH, num_samples)[1:]:
        tokens.append(successors[tokens[-1], pick])
    return torch.stack(tokens, dim=1)


def training_tokens(task: Task) -> Tensor:
    return markov_tokens(task.num_samples, seed=1)


def held_out_tokens() -> Tensor:
    return markov_tokens(NUM_HELD_OUT, seed=2)


def least_loss() -> float:
    """Of whoever knows the source."""
    return -sum(odds * math.log(odds) for odds in SUCCESSOR_ODDS)


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    return statistics.fmean(model(batch).item() for batch in held_out_tokens().split(64))


# Ways of torch's own and of torchft


def bare(task: Task, name: str, model: nn.Module, tokens: Tensor) -> Iterator[None]:
    """Once over this worker's part of the samples; yields after each step."""
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(task.seed + 1))
    with ExitStack() as stack:
        trained, optimizer = _peer(task, name, model, stack)
        for mine in order[distributed.get_rank() :: task.num_hosts].split(task.micro_batch):
            optimizer.zero_grad(set_to_none=True)
            trained(tokens[mine]).backward()
            optimizer.step()
            yield


def _peer(task: Task, name: str, model: nn.Module, stack: ExitStack) -> tuple[nn.Module, Any]:
    """What is trained in place of the model, and the optimizer."""
    if name == NO_TALK:
        return model, make_optimizer(model.parameters())
    if name == DILOCO:
        return model, _diloco(task, model, stack)
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(model, gradient_as_bucket_view=name != POWER_SGD, static_graph=name == DDP)
    optimizer = make_optimizer(ddp.parameters())
    if name == FP16:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == POWER_SGD:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name == POST_LOCAL:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        local = post_localSGD_hook.PostLocalSGDState(None, distributed.new_subgroups(1)[0], start_localSGD_iter=0)
        ddp.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        return ddp, PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=task.every, warmup_steps=0))
    return ddp, optimizer


def _diloco(task: Task, model: nn.Module, stack: ExitStack) -> torch.optim.Optimizer:
    """torchft's streaming DiLoCo in fp32, which is what it has for Gloo; two fragments, as it cuts between modules."""
    from datetime import timedelta

    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank = distributed.get_rank()
    host = ADDRESSES[rank]
    if rank == 0:
        lighthouse = LighthouseServer(bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=task.num_hosts)
        stack.callback(lighthouse.shutdown)
    distributed.barrier()
    store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    optimizer = make_optimizer(model.parameters())
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        min_replica_size=task.num_hosts,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        use_async_quorum=False,
        init_sync=False,  # its transport of states uses the machine's name, which hosts in namespaces cannot reach
        replica_id=f"bench_{rank}",
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{ADDRESSES[0]}:{LIGHTHOUSE_PORT}",
        timeout=timedelta(seconds=120),
        hostname=host,
    )
    stack.callback(lambda: store)  # which must live as long as the manager
    stack.callback(manager.shutdown)
    stack.callback(distributed.barrier)
    parts = [nn.ModuleList(part) for part in _halves(model)]
    outer = [outer_optimizer(part.parameters()) for part in parts]
    stack.enter_context(
        DiLoCo(
            manager, parts, optimizer, outer, sync_every=task.every, pin_memory=False,
            fragment_sync_delay=task.every // 2 - 1,
        )
    )  # fmt: skip
    return optimizer


def _halves(model: nn.Module) -> list[list[nn.Module]]:
    children = [each for child in model.children() for each in (child if isinstance(child, nn.Sequential) else [child])]
    return [children[: len(children) // 2], children[len(children) // 2 :]]


# Ours


def trainer_of(task: Task, name: str, tokens: Tensor) -> Trainer:
    import paceline as pl

    averaging = partial(pl.Averaging, every=task.every)
    streaming = partial(averaging, overlap=True, fragments=max(1, task.every // 8), outer=outer_optimizer)
    strategies: dict[str, Callable[[], Any]] = {
        GRADIENTS: lambda: "gradients",
        CADENCE: lambda: pl.Cadence(overhead_target=OVERHEAD_TARGET),
        NO_TALK_OURS: lambda: pl.Averaging(every=ENDLESS, divergence_threshold=None),
        AVERAGING: averaging,
        OVERLAPPED_BF16: partial(averaging, overlap=True, compress="bf16"),
        INT8: partial(streaming, compress="int8"),
        INT4: partial(streaming, compress="int4"),
        SPARSE: partial(streaming, compress="sparse"),
        SLOW_LINK: lambda: "slow link",
    }
    equal = pl.Balancing(shares="equal")
    division: dict[str, Any] = {} if name == CADENCE else {"global_batch": task.global_batch, "balancing": equal}
    return pl.Trainer.setup(
        task.make_model,
        make_optimizer,
        data=tokens,
        micro_batch=task.micro_batch,
        strategy=strategies[name](),
        seed=task.seed,
        runtime=pl.Runtime(threads=1, quiet=True),
        **division,
    )


def steps_of(trainer: Trainer, num_epochs: int) -> Iterator[StepRecord]:
    for epoch in trainer.epochs(num_epochs):
        for batch in epoch:
            trainer.backward(trainer.model(batch))
            if record := trainer.step():
                yield record


def timed_loop(task: Task, name: str, see: Callable[[Any], object]) -> Iterator[int]:
    """Trains on and on. Yields after each step the samples it took: of all workers, unless they never talk.

    `see` is called with the record of every step and with the events, where there are any.
    """
    tokens = training_tokens(task).repeat(SPEED_REPEATS, 1)
    if name in (NO_TALK, *PEERS):
        for _ in bare(task, name, task.make_model(), tokens):
            yield task.micro_batch if name == NO_TALK else task.global_batch
        return
    with trainer_of(task, name, tokens) as trainer:
        trainer.listen(see)
        for record in steps_of(trainer, ENDLESS):
            see(record)
            yield sum(record.shares) * task.micro_batch


def final_loss(task: Task, name: str, see: Callable[[Any], object] = lambda _: None) -> tuple[float, float]:
    """The loss on samples held out after one pass over the training samples, and bytes that this host sent for each."""
    tokens = training_tokens(task)
    distributed.barrier()
    before = sent_bytes()
    if name in (NO_TALK, *PEERS):
        model = task.make_model()
        for _ in bare(task, name, model, tokens):
            pass
        loss, sent = loss_of(model), sent_bytes() - before
    else:
        with trainer_of(task, name, tokens) as trainer:
            trainer.listen(see)
            for _ in steps_of(trainer, num_epochs=1):
                pass
            sent = sent_bytes() - before
            loss = trainer.evaluate(held_out_tokens(), lambda model, batch: model(batch))
            assert isinstance(loss, float)
    return loss, sent / task.num_samples


def sent_bytes() -> int:
    """By the interfaces of this host so far, headers included, except to itself."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line]
    return sum(int(counts.split()[8]) for name, counts in lines if name.strip() != "lo")


def missing_torchft() -> str | None:
    from importlib.util import find_spec

    return None if find_spec("torchft") else "torchft is not installed"


def rank_of_environment() -> int:
    return int(os.environ["RANK"])
