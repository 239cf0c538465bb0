"""One GPU: what a tool adds to the step itself, in time and in memory. One part per question.

gpt2-eager, gpt2-compiled: tokens/s of GPT-2 (124M) under bf16 autocast, fused AdamW, 16 x 1024 tokens a step.
exact: the same, eager, in exact mode, against plain mode; exact-of-4: in four micro-batches a step.
cnn: images/s of a CNN of ResNet-18's size on 32 x 32 images, bf16, channels last (not with --quick on a CPU).
mlp: steps/s of a tiny MLP, where launching kernels takes all the time.
In these two ours replays CUDA graphs, since the host is slower than the device; beside it ours without them.

The data lie on the GPU, so that nobody waits for input. All contestants train on the same samples in the same shuffled
order and gather each batch there; the others find the order ready. The limit is a bare loop. Contestants take turns;
every part has a process of its own. Beside the speed: the most memory that a contestant's tensors took at a time in
its turns.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bench.gpu_models import gpt2, resnet18, tiny_mlp
from bench.harness import Contestant, Result, Unavailable, alternate, circumstances, isolated, missing_package
from bench.hugging_face import tell_steps, training_alone
from bench.parts import Goal, Parts, to_limit
from paceline.plan.epoch import EpochOrder

BARE, OURS, EXACT = "bare loop", "paceline", "paceline exact"
ENDLESS = 10**9
NUM_BATCHES = 32
NUM_ORDERS = 8
WARMUP_STEPS, WARMUP_STEPS_OF_A_FIT = 8, 3

Loop = Iterator[Any]  # yields after each optimizer step


@dataclass(frozen=True)
class Work:
    """What everybody trains: `make_model()(*batch)` is the loss, on `device`. A batch is `batch` rows of `inputs`."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    inputs: tuple[Tensor, ...]
    batch: int
    is_bf16: bool
    units_per_step: int
    num_steps: int

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.is_bf16 else nullcontext()

    def loader(self, collate: Callable[[Any], Any] | None = None) -> DataLoader[Any]:
        return DataLoader(ShuffledBatches(self), batch_size=None, collate_fn=collate or tuple)

    @cached_property
    def orders(self) -> list[Tensor]:
        """Our order of the samples in the first epochs, on the device."""
        length = len(self.inputs[0])
        orders = (EpochOrder(length, seed=0, epoch=epoch).indices(0, length) for epoch in range(NUM_ORDERS))
        return [torch.from_numpy(order).to(self.device) for order in orders]


class ShuffledBatches(Dataset[Any]):
    """The work's batches, gathered on its device. To ask for the first one is to begin an epoch, with another order."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._orders = itertools.cycle([order.split(work.batch) for order in work.orders])
        self._rows: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == 0:
            self._rows = next(self._orders)
        # Not index_select: that would turn channels last into channels first.
        return tuple(tensor[self._rows[index]] for tensor in self._work.inputs)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# The contestants


def bare(work: Work) -> Contestant:
    model = work.make_model()
    optimizer = work.make_optimizer(model.parameters())
    batches = ShuffledBatches(work)

    def loop() -> Loop:
        while True:
            for index in range(len(batches)):
                with work.autocast():
                    loss = model(*batches[index])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                yield

    return timed(work, loop())


def paceline(work: Work, num_micro_batches: int = 1, **settings: Any) -> Contestant:
    import paceline as pl

    data = work.inputs if len(work.inputs) > 1 else work.inputs[0]

    def loop() -> Loop:
        with pl.Trainer.setup(
            work.make_model,
            work.make_optimizer,
            data=data,
            global_batch=work.batch,
            micro_batch=max(1, work.batch // num_micro_batches),
            precision="bf16" if work.is_bf16 else "fp32",
            runtime=pl.Runtime(quiet=True),
            **settings,
        ) as trainer:
            for epoch in trainer.epochs(ENDLESS):
                for batch in epoch:
                    with trainer.autocast():
                        loss = trainer.model(*([batch] if isinstance(batch, Tensor) else batch))
                    trainer.backward(loss)
                    if trainer.step() is not None:
                        yield

    return timed(work, loop())


def paceline_step(work: Work, capture: Any = "auto", **settings: Any) -> Contestant:
    """With `step_with`, which may replay a CUDA graph."""
    import paceline as pl

    def loop() -> Loop:
        with pl.Trainer.setup(
            work.make_model,
            work.make_optimizer,
            data=work.inputs,
            global_batch=work.batch,
            precision="bf16" if work.is_bf16 else "fp32",
            runtime=pl.Runtime(quiet=True, capture=capture),
            **settings,
        ) as trainer:
            step = trainer.step_with(lambda batch: trainer.model(*batch))
            for epoch in trainer.epochs(ENDLESS):
                for batch in epoch:
                    step(batch)
                    yield

    return timed(work, loop())


def accelerate(work: Work) -> Contestant:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator = Accelerator(cpu=work.device.type == "cpu", mixed_precision="bf16" if work.is_bf16 else "no")
    model = work.make_model()
    model, optimizer, loader = accelerator.prepare(model, work.make_optimizer(model.parameters()), work.loader())

    def loop() -> Loop:
        while True:
            for batch in loader:
                accelerator.backward(model(*batch))
                optimizer.step()
                optimizer.zero_grad()
                yield

    return timed(work, loop())


def fabric(work: Work) -> Contestant:
    from lightning_fabric import Fabric

    precision: Any = "bf16-mixed" if work.is_bf16 else "32-true"
    runtime = Fabric(accelerator=work.device.type, devices=1, precision=precision)
    runtime.launch()
    plain = work.make_model()
    model, optimizer = runtime.setup(plain, work.make_optimizer(plain.parameters()))
    loader = runtime.setup_dataloaders(work.loader())

    def loop() -> Loop:
        while True:
            for batch in loader:
                runtime.backward(model(*batch))
                optimizer.step()
                optimizer.zero_grad()
                yield

    return timed(work, loop())


def lightning(work: Work) -> Contestant:
    from pytorch_lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.make_model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.model(*batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.make_optimizer(self.parameters())

        def on_train_batch_end(self, *_: Any) -> None:
            clock.step_ended(self.global_step)

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    module, clock = Module(), FitClock(work)
    precision: Any = "bf16-mixed" if work.is_bf16 else "32-true"

    def turn() -> float:
        # barebones is Lightning's own switch for measuring its overhead: everything optional is off.
        trainer = Trainer(
            barebones=True, accelerator=work.device.type, devices=1, precision=precision, max_steps=clock.last_step
        )
        trainer.fit(module, work.loader())
        return clock.units_per_s

    return turn


def hugging_face(work: Work) -> Contestant:
    from transformers import Trainer

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.make_model()

        def forward(self, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
            return {"loss": self.model(*batch)}

    class OwnBatches(Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return work.loader(lambda batch: {"batch": batch})

    clock, model = FitClock(work), WithLoss()
    is_cpu = work.device.type == "cpu"
    arguments = training_alone(tempfile.gettempdir(), clock.last_step, work.batch, use_cpu=is_cpu, bf16=work.is_bf16)
    trainer = OwnBatches(
        model,
        arguments,
        train_dataset=ShuffledBatches(work),
        optimizers=(work.make_optimizer(model.parameters()), None),
    )
    tell_steps(trainer, clock.step_ended)

    def turn() -> float:
        trainer.train()
        return clock.units_per_s

    return turn


class Peer(NamedTuple):
    build: Callable[[Work], Contestant]
    packages: tuple[str, ...]


PEERS = {
    "Accelerate": Peer(accelerate, ("accelerate",)),
    "Fabric": Peer(fabric, ("pytorch-lightning",)),
    "Lightning": Peer(lightning, ("pytorch-lightning",)),
    "HF Trainer": Peer(hugging_face, ("transformers", "accelerate")),
}


# Their time and memory


def timed(work: Work, loop: Loop) -> Contestant:
    """Units per second of an endless loop over a turn, warmed up."""

    def measure(num_steps: int) -> float:
        wait_for(work.device)
        start_s = time.perf_counter()
        for _ in itertools.islice(loop, num_steps):
            pass
        wait_for(work.device)
        return num_steps * work.units_per_step / (time.perf_counter() - start_s)

    measure(WARMUP_STEPS)
    return partial(measure, work.num_steps)


class FitClock:
    """The same for a `fit` that we do not own: from the end of its last untimed step to that of its last."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._start_s = self._end_s = math.nan
        self.last_step = WARMUP_STEPS_OF_A_FIT + work.num_steps

    def step_ended(self, step: int) -> None:
        if step == WARMUP_STEPS_OF_A_FIT:
            wait_for(self._work.device)
            self._start_s, self._end_s = time.perf_counter(), math.nan  # a fit that ends early has no result
        elif step == self.last_step:
            wait_for(self._work.device)
            self._end_s = time.perf_counter()

    @property
    def units_per_s(self) -> float:
        return self._work.num_steps * self._work.units_per_step / (self._end_s - self._start_s)


@dataclass
class Metered:
    """A contestant, with the most bytes that tensors took in any of its turns, other contestants' left out."""

    build: Callable[[], Contestant]
    peak_bytes: int = 0
    _own_bytes: int = 0
    _turn: Contestant = field(init=False)

    def __post_init__(self) -> None:
        outside = _allocated()
        self._turn = isolated(self.build)
        self._turn()
        gc.collect()
        self._own_bytes = _allocated() - outside

    def __call__(self) -> float:
        others = _allocated() - self._own_bytes
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        value = self._turn()
        if torch.cuda.is_available():
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() - others)
        return value


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


# The parts


@dataclass(frozen=True)
class Size:
    """How large a part's model and batch are. `quick` ones only show that it runs."""

    batch: int
    num_steps: int
    quick: bool

    @classmethod
    def of(cls, batch: int, num_steps: int, *, quick: bool) -> Size:
        return cls(2, 2, quick) if quick else cls(batch, num_steps, quick)


def gpt2_work(device: torch.device, *, quick: bool, is_compiled: bool = False) -> Work:
    size = Size.of(16, 20 if is_compiled else 12, quick=quick)
    length, vocabulary = (16, 64) if quick else (1024, 50257)

    def make_model() -> Any:
        model = gpt2(vocabulary, length, quick=quick).to(device)
        return torch.compile(model) if is_compiled else model

    tokens = torch.randint(vocabulary, (NUM_BATCHES * size.batch, length), device=device)
    optimizer = partial(torch.optim.AdamW, lr=3e-4, fused=True)
    return Work(make_model, optimizer, (tokens,), size.batch, True, size.batch * length, size.num_steps)


def cnn_work(device: torch.device, *, quick: bool) -> Work:
    size = Size.of(256, 60, quick=quick)
    # On a CPU without AVX-512 oneDNN of torch 2.13 crashes on narrow channels_last convolutions.
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    images = torch.randn(NUM_BATCHES * size.batch, 3, 32, 32, device=device).to(memory_format=layout)
    labels = torch.randint(10, (len(images),), device=device)
    width = 4 if quick else 64

    def make_model() -> nn.Module:
        return resnet18(width).to(device, memory_format=layout)  # type: ignore[call-overload,no-any-return]

    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True)
    return Work(make_model, optimizer, (images, labels), size.batch, True, size.batch, size.num_steps)


def mlp_work(device: torch.device, *, quick: bool) -> Work:
    size = Size.of(32, 500, quick=quick)
    x = torch.randn(NUM_BATCHES * size.batch, 32, device=device)
    labels = torch.randint(10, (len(x),), device=device)
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    return Work(lambda: tiny_mlp().to(device), optimizer, (x, labels), size.batch, False, 1, size.num_steps)


class Part(NamedTuple):
    """`goal` is of `ours` against `limit`; `has_peers`: the tools beside them take part."""

    unit: str
    make_work: Callable[..., Work]
    goal: Goal
    ours: Mapping[str, Mapping[str, Any]] = {OURS: {}}
    limit: str = BARE
    has_peers: bool = True
    build: Callable[..., Contestant] = paceline


def over_best_peer(result: Result) -> float:
    return min(float(result.detail["ours_over_by_turn"][name]["median"]) for name in (*result.peers, BARE))


PARTS = {
    "gpt2-eager": Part("tokens/s", gpt2_work, Goal("of the bare loop, at least", to_limit(OURS), 0.99)),
    "gpt2-compiled": Part(
        "tokens/s",
        partial(gpt2_work, is_compiled=True),
        Goal("of the bare loop, at least", to_limit(OURS), 0.99),
    ),
    "exact": Part(
        "tokens/s",
        gpt2_work,
        Goal("of plain mode, at least", to_limit(EXACT), 0.95),
        ours={EXACT: {"exact": True}, OURS: {}},
        limit=OURS,
        has_peers=False,
    ),
    "exact-of-4": Part(
        "tokens/s",
        gpt2_work,
        Goal("of plain mode, at least", to_limit(EXACT), 0.95),
        ours={EXACT: {"exact": True, "num_micro_batches": 4}, OURS: {"num_micro_batches": 4}},
        limit=OURS,
        has_peers=False,
    ),
    "cnn": Part(
        "images/s",
        cnn_work,
        Goal("of the fastest other, at least", over_best_peer, 1.0),
        ours={OURS: {}, "paceline without capture": {"capture": "off"}},
        build=paceline_step,
    ),
    "mlp": Part(
        "steps/s",
        mlp_work,
        Goal("of the bare loop, at least", to_limit(OURS), 15.0),
        ours={OURS: {}, "paceline without capture": {"capture": "off"}},
        build=paceline_step,
    ),
}


def measure(name: str, num_turns: int, peers: Sequence[str], *, quick: bool) -> Result:
    part = PARTS[name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    work = part.make_work(device, quick=quick)
    asked = peers if part.has_peers else ()
    skipped = {peer: reason for peer in asked if (reason := missing_package(*PEERS[peer].packages))}
    builders: dict[str, Callable[[], Contestant]] = {BARE: partial(bare, work)} if part.limit == BARE else {}
    builders |= {ours: partial(part.build, work, **settings) for ours, settings in part.ours.items()}
    builders |= {peer: partial(PEERS[peer].build, work) for peer in asked if peer not in skipped}
    contestants = {contestant: Metered(build) for contestant, build in builders.items()}
    measured = alternate(contestants, num_turns)
    result = Result.of(
        name,
        part.unit,
        measured,
        ours=next(iter(part.ours)),
        limit=part.limit,
        better="higher",
        settings={
            "batch": work.batch,
            "steps_per_turn": work.num_steps,
            "parameters": sum(parameter.numel() for parameter in work.make_model().parameters()),
            "precision": "bf16 autocast" if work.is_bf16 else "fp32",
            "quick": quick,
        },
        packages=("accelerate", "pytorch-lightning", "transformers"),
        skipped=skipped,
    )
    peaks = {contestant: metered.peak_bytes for contestant, metered in contestants.items()}
    result.detail["peak_bytes"] = peaks
    result.detail["notes"] += [
        f"peak memory of {contestant}: {peak / 2**30:.2f} GiB" for contestant, peak in peaks.items() if peak
    ]
    return result


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--turns", type=int, default=7, help="alternations (default: %(default)s)")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="only show that it runs, also on a CPU: tiny models")


def run(options: argparse.Namespace) -> Parts:
    if not options.quick and not torch.cuda.is_available():
        raise Unavailable("torch sees no CUDA device")
    # A process each: tools keep global state, and what they leave on the GPU would count.
    spawn = multiprocessing.get_context("spawn")
    results = {}
    for name in options.part:
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            results[name] = pool.submit(measure, name, options.turns, options.peers, quick=options.quick).result()
    goals = {name: part.goal for name, part in PARTS.items()}
    return Parts("gpu", results, goals, circumstances({"parts": options.part, "turns": options.turns}))
