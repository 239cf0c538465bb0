"""What exact mode costs in the general case: step time of exact mode over plain mode, and of plain over a bare loop.

mlp: an MLP of 26 small tensors on one and two CPU workers, with 1, 2 and 8 micro-batches per worker and step.
transformer: 3.7 million parameters on two CPU workers, with 1, 4 and 16 micro-batches per worker and step.
gpt2, gpt2-compiled: GPT-2 124M under bf16 autocast on one GPU, with 1, 2 and 8 micro-batches of 16 and of 8.

The bare loop accumulates as many micro-batches with the same fused optimizer and exchanges nothing; on two workers each
has its own. Contestants take turns inside the same processes, behind a barrier; the time of a turn is the slowest
worker's. On a GPU a fourth contestant is plain mode under PyTorch's deterministic kernels, which exact mode needs.

`ratio` is the worst of the CPU cases, exact over plain.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from bench import gpu
from bench.harness import Contestant, Result, Unavailable, alternate, isolated
from bench.models import LanguageModel, mlp
from bench.parts import Goal, Parts, to_limit
from bench.workers import gloo_group, run_workers
from paceline.core.world import World
from paceline.run.determinism import process_settings

BARE, PLAIN, EXACT, DETERMINISTIC = "bare loop", "plain", "exact", "plain, deterministic kernels"
WARMUP_STEPS = 4
ENDLESS = 10**9
CPU_BOUND, GPU_BOUND, GPU_BOUND_OF_DETERMINISTIC = 1.15, 1.10, 1.03

MLP_WIDTHS = (32, *[64] * 12, 10)
VOCABULARY, LENGTH = 1000, 64


@dataclass(frozen=True)
class Case:
    """One question. `num_micro_batches` per worker and step."""

    model: str
    num_workers: int
    micro_batch: int
    num_micro_batches: int
    seconds: float = 0.3

    @property
    def name(self) -> str:
        where = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
        return f"{self.model}, {where}, {self.num_micro_batches} x {self.micro_batch}"


CPU_CASES = [
    *(Case("mlp", workers, 32, count) for workers in (1, 2) for count in (1, 2, 8)),
    *(Case("transformer", 2, 8, count, seconds=1.0) for count in (1, 4, 16)),
]
GPU_CASES = [
    Case(model, 1, size, count) for model in ("gpt2", "gpt2-compiled") for size in (16, 8) for count in (1, 2, 8)
]
PARTS = {"mlp": CPU_CASES, "transformer": CPU_CASES, "gpt2": GPU_CASES, "gpt2-compiled": GPU_CASES}


@dataclass(frozen=True)
class Work:
    """What every contestant of a case trains."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    data: tuple[Tensor, ...]
    loss_of: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    case: Case
    precision: str = "fp32"

    @property
    def device(self) -> torch.device:
        return self.data[0].device

    @property
    def samples_per_worker(self) -> int:
        return self.case.micro_batch * self.case.num_micro_batches


def work_of(case: Case) -> Work:
    generator = torch.Generator().manual_seed(0)
    if case.model == "mlp":
        x = torch.randn(8192, MLP_WIDTHS[0], generator=generator)
        y = torch.randint(MLP_WIDTHS[-1], (8192,), generator=generator)
        sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True)
        return Work(lambda: mlp(*MLP_WIDTHS), sgd, (x, y), lambda m, b: functional.cross_entropy(m(b[0]), b[1]), case)
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    if case.model == "transformer":
        tokens = torch.randint(VOCABULARY, (4096, LENGTH), generator=generator)
        return Work(lambda: LanguageModel(vocabulary=VOCABULARY), adamw, (tokens,), lambda m, b: m(b[0]), case)
    device = torch.device("cuda", torch.cuda.current_device())
    source = gpu.gpt2_work(device, quick=False, is_compiled=case.model == "gpt2-compiled")
    return Work(source.make_model, source.make_optimizer, source.inputs, lambda m, b: m(b[0]), case, "bf16")


def bare(work: Work, rank: int) -> Iterator[None]:
    model = work.make_model()
    model.to(work.device)
    optimizer = work.make_optimizer(model.parameters())
    autocast = torch.autocast(work.device.type, dtype=torch.bfloat16, enabled=work.precision == "bf16")
    while True:
        order = torch.randperm(len(work.data[0]), device=work.device)[rank :: work.case.num_workers]
        batches = iter(order.split(work.case.micro_batch))
        while len(step := list(itertools.islice(batches, work.case.num_micro_batches))) == work.case.num_micro_batches:
            for indices in step:
                with autocast:
                    loss = work.loss_of(model, tuple(column[indices] for column in work.data))
                (loss / work.case.num_micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield


def paceline(work: Work, rank: int, **settings: Any) -> Iterator[None]:  # noqa: ARG001 - it knows its rank
    import paceline as pl

    with pl.Trainer.setup(
        work.make_model,
        work.make_optimizer,
        data=work.data,
        global_batch=work.samples_per_worker * work.case.num_workers,
        micro_batch=work.case.micro_batch,
        precision=work.precision,  # type: ignore[arg-type]
        batching=pl.Batching(drop_last=True),
        balancing=pl.Balancing(shares="equal"),  # so that every worker has micro-batches in every step
        runtime=pl.Runtime(threads=1, quiet=True),
        **settings,
    ) as trainer:
        for epoch in trainer.epochs(ENDLESS):
            for batch in epoch:
                with trainer.autocast():
                    loss = work.loss_of(trainer.model, batch if isinstance(batch, tuple) else (batch,))
                trainer.backward(loss)
                if trainer.step() is not None:
                    yield


def deterministic(work: Work, rank: int) -> Iterator[None]:
    """Plain mode under the kernels that exact mode asks for."""
    settings = process_settings(World(), exact=True, threads=1)
    try:
        yield from paceline(work, rank)
    finally:
        settings.close()


def contestant(work: Work, rank: int, make_loop: Callable[[Work, int], Iterator[None]]) -> Contestant:
    """Seconds per step of this worker over a turn that all workers begin together."""
    loop = make_loop(work, rank)

    def measure(num_steps: int) -> float:
        gpu.wait_for(work.device)
        distributed.barrier()
        start = time.perf_counter()
        for _ in itertools.islice(loop, num_steps):
            pass
        gpu.wait_for(work.device)
        return (time.perf_counter() - start) / num_steps

    measure(WARMUP_STEPS)
    step_s = torch.tensor(measure(WARMUP_STEPS))
    distributed.all_reduce(step_s, distributed.ReduceOp.MAX)  # all workers agree on the number of steps
    return partial(measure, max(2, round(work.case.seconds / step_s.item())))


def measure(case: Case, num_turns: int) -> dict[str, list[float]]:
    """One worker's measurements of a case, in seconds per step."""
    torch.set_num_threads(1)
    loops: dict[str, Callable[[Work, int], Iterator[None]]] = {
        BARE: bare,
        PLAIN: paceline,
        EXACT: partial(paceline, exact=True),
    }
    if case.model.startswith("gpt2"):
        loops[DETERMINISTIC] = deterministic
    with gloo_group():
        work, rank = work_of(case), distributed.get_rank()
        contestants = {name: isolated(partial(contestant, work, rank, loop)) for name, loop in loops.items()}
        measured = alternate(contestants, num_turns)
        contestants.clear()  # their loops end while the group is still there
        return measured


def result_of(case: Case, num_turns: int) -> Result:
    by_rank = run_workers(measure, case.num_workers, case, num_turns)
    slowest = {name: [1e6 * max(own) for own in zip(*(m[name] for m in by_rank), strict=True)] for name in by_rank[0]}
    result = Result.of(
        case.name, "us per step", slowest, ours=EXACT, limit=PLAIN, better="lower", settings=asdict(case)
    )
    result.detail["plain_over_bare"] = (
        result.detail["ratio_by_turn"][PLAIN]["median"] / (result.detail["ratio_by_turn"][BARE]["median"])
    )
    if DETERMINISTIC in slowest:
        over = result.detail["ours_over_by_turn"][DETERMINISTIC]["median"]
        result.detail["exact_over_deterministic"] = over
        result.detail["notes"].append(f"exact over deterministic kernels: {over:.3f}, at most 1.03")
    return result


class Exactness(Parts):
    """All cases. `ratio`: the worst of the CPU cases, exact over plain, by the median of the ratios within a turn."""

    @property
    def ratio(self) -> float:
        values = [self.goals[name].value(result) for name, result in self.results.items() if "gpt2" not in name]
        return max(values, default=float("nan"))

    def table(self) -> str:
        lines = [f"{'':<36} {'exact/plain':>12} {'plain/bare':>11} {'exact/deterministic':>20}"]
        for name, judged in self.judged().items():
            detail = self.results[name].detail
            over = detail.get("exact_over_deterministic")
            lines.append(
                f"{name:<36} {judged['value']:>12.3f} {detail['plain_over_bare']:>11.3f} "
                f"{'' if over is None else f'{over:.3f}':>20} {'' if judged['reached'] else 'MISSED'}"
            )
        return "\n".join([super().table(), "", *lines, f"worst of the CPU cases: {self.ratio:.3f}"])

    def to_json(self) -> str:
        return json.dumps({"ratio": self.ratio, **json.loads(super().to_json())})


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=21, help="alternations (default: %(default)s)")
    parser.add_argument("--part", nargs="+", choices=list(PARTS), help="default: all that this machine can run")
    parser.add_argument("--micro-batches", type=int, nargs="+", help="only cases with these numbers of micro-batches")


def run(options: argparse.Namespace) -> Exactness:
    has_gpu = torch.cuda.is_available()
    parts = options.part or [name for name in PARTS if has_gpu or not name.startswith("gpt2")]
    if not has_gpu and any(part.startswith("gpt2") for part in parts):
        raise Unavailable("GPT-2 needs a GPU")
    cases = [case for part in parts for case in PARTS[part] if case.model == part]
    if options.micro_batches:
        cases = [case for case in cases if case.num_micro_batches in options.micro_batches]
    results, goals = {}, {}
    for case in cases:
        results[case.name] = result = result_of(case, options.turns)
        bound = GPU_BOUND if case.model.startswith("gpt2") else CPU_BOUND
        goals[case.name] = Goal("exact over plain, at most", to_limit(EXACT), bound, is_upper=True)
        over = result.detail.get("exact_over_deterministic")
        beside = "" if over is None else f", over deterministic kernels {over:.3f}"
        print(f"{case.name}: exact over plain {goals[case.name].value(result):.3f}{beside}", flush=True)
    return Exactness("exact", results, goals)
