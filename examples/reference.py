"""Paceline in plain PyTorch: what a run computes, without anything that makes it fast.

    python examples/reference.py

One process plays any number of workers with any shares, one after another. The weights that come out are, bit for bit,
those of `pl.Trainer.setup(..., exact=True)` on any number of real workers (tests/examples/test_reference.py compares
them). Read it first: it is the specification. The rest of Paceline reads, exchanges, saves and schedules so that this
holds at full speed.

A run is a function of its settings and its seed:

- an epoch's order is a permutation made from (seed, epoch);
- a step takes the next `global_batch` samples, cut into micro-batches of `micro_batch`;
- each micro-batch is one forward and backward, with random numbers seeded by (seed, step, micro-batch);
- the gradient is the mean over the step's samples. It is summed so that the order of the additions does not matter;
- clipping, optimizer and BatchNorm statistics then see one global batch, whoever computed which part of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

# Random numbers: every seed is a hash of what it is for, never of a rank or of what ran before.

GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
MODEL_INIT, MICRO_BATCH = 1, 2  # purposes, which keep seeds apart


def mix(value: int) -> int:
    """splitmix64: spreads every bit of a 64-bit integer over all bits."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def derive_seed(seed: int, purpose: int, *numbers: int) -> int:
    stream = mix(mix(seed & MASK) ^ purpose)
    for number in numbers:
        stream = mix(stream ^ number)
    return stream >> 1


def epoch_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch's samples: sorted by hash. (Above 65,536 samples Paceline uses a Feistel network.)"""
    assert num_samples <= 1 << 16

    def output(key: int, number: int) -> int:  # output `number` of a splitmix64 generator
        return mix((key + number * GOLDEN) & MASK)

    key = output(output(seed & MASK, 0), epoch)
    return sorted(range(num_samples), key=lambda place: output(key, place))


# Steps and shares.


def micro_batches_of(order: Sequence[int], global_batch: int, micro_batch: int) -> Iterator[list[list[int]]]:
    """The steps of an epoch, each a list of micro-batches. The last step and its last micro-batch may be smaller."""
    for first in range(0, len(order), global_batch):
        samples = order[first : first + global_batch]
        yield [list(samples[start : start + micro_batch]) for start in range(0, len(samples), micro_batch)]


def plan_of(num_micro_batches: int, speeds: Sequence[float]) -> list[range]:
    """Consecutive micro-batches for each worker, in proportion to its speed. No plan changes the result."""
    borders = [round(num_micro_batches * sum(speeds[:rank]) / sum(speeds)) for rank in range(len(speeds) + 1)]
    return [range(start, stop) for start, stop in pairwise(borders)]


# Exact sums. A float64 has 53 bits. If all terms are multiples of one power of two, and no sum needs more bits, every
# addition is exact: the total depends neither on the order of the terms nor on who added which.

CALIBRATION_HEADROOM_BITS, HEADROOM_BITS = 11, 6
COMFORT_BITS, COARSEST_BITS = (2, 12), 27


@dataclass
class Grid:
    """The grid of one tensor: sums of its terms may reach 2**top. It is fixed during a step and saved with the run."""

    top: int | None = None  # None: not calibrated

    def round(self, term: torch.Tensor) -> torch.Tensor:
        """To a multiple of 2**(top-51): adding the anchor pushes the lower bits out."""
        assert self.top is not None
        anchor = math.ldexp(3.0, self.top)
        return (term + anchor) - anchor

    def calibrate(self, peak: float, num_terms: int) -> None:
        if self.top is None:
            reach = peak * num_terms
            is_known = 0 < reach < math.inf
            self.top = math.frexp(reach)[1] + CALIBRATION_HEADROOM_BITS if is_known else 14

    def fits(self, peak: float, num_terms: int) -> bool:
        """Whether the terms could be summed: judged by the largest term, since partial sums depend on the plan."""
        assert self.top is not None
        reach = peak * num_terms
        if not 0 < reach < math.inf:
            return True
        return reach <= math.ldexp(1.0, self.top) and not self._is_coarse(peak)

    def follow(self, peak: float, num_terms: int) -> None:
        """Move the grid for the next step, or for the repetition of this one, if the terms are not comfortable."""
        assert self.top is not None
        reach = peak * num_terms
        if not 0 < reach < math.inf:
            return
        if self._is_coarse(peak) or reach > math.ldexp(1.0, self.top - COMFORT_BITS[0]):
            self.top = math.frexp(reach)[1] + HEADROOM_BITS
        elif reach < math.ldexp(1.0, self.top - COMFORT_BITS[1]):
            self.top -= 1

    def _is_coarse(self, peak: float) -> bool:
        assert self.top is not None
        return peak < math.ldexp(1.0, self.top - COARSEST_BITS)


@dataclass
class Worker:
    """What one worker adds up in a step: by tensor a float64 sum and its largest term, by micro-batch the loss."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def add(self, name: str, term: torch.Tensor, grid: Grid | None) -> None:
        """grid: None where steps have one micro-batch, whose sum needs no rounding."""
        rounded = term + 0.0 if grid is None else grid.round(term)
        self.sums[name] = self.sums[name] + rounded if name in self.sums else rounded
        self.peaks[name] = max(self.peaks.get(name, 0.0), float(term.abs().max()))


# BatchNorm. Every micro-batch starts from the step's statistics; its change counts as much as it would have if the
# micro-batches had run one after another.


def statistics_of(model: nn.Module) -> dict[str, tuple[torch.Tensor, float]]:
    """By name: the tensor, and how much of a change the next batch leaves."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            kept = 1.0 - (module.momentum or 0.0)
            for key, factor in (("running_mean", kept), ("running_var", kept), ("num_batches_tracked", 1.0)):
                found[f"{path}.{key}".lstrip(".")] = (getattr(module, key), factor)
    return found


class Reference:
    """One run. `speeds_of(step)` gives the speeds of the workers that take part in a step, any number of them."""

    def __init__(
        self,
        build_model: Callable[[], nn.Module],
        build_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        loss_of: Callable[[nn.Module, Any], torch.Tensor],
        data: tuple[torch.Tensor, ...],
        *,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        max_grad_norm: float | None = None,
        speeds_of: Callable[[int], Sequence[float]] = lambda _: [1.0],
    ) -> None:
        torch.manual_seed(derive_seed(seed, MODEL_INIT))
        self.model = build_model()
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = build_optimizer(list(self.parameters.values()))
        self.loss_of, self.data, self.seed, self.max_grad_norm = loss_of, data, seed, max_grad_norm
        self.global_batch, self.micro_batch, self.speeds_of = global_batch, micro_batch, speeds_of
        self.names = [*self.parameters, *statistics_of(self.model)]
        self.grids = {name: Grid() for name in self.names} if micro_batch < global_batch else {}
        self.losses: list[float] = []

    def train(self, num_epochs: int) -> None:
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
        for epoch in range(num_epochs):
            order = epoch_order(len(self.data[0]), self.seed, epoch)
            for micro_batches in micro_batches_of(order, self.global_batch, self.micro_batch):
                while not self.step(micro_batches):
                    pass  # some sum did not fit its grid, which is wider now: the same step again

    def step(self, micro_batches: list[list[int]]) -> bool:
        """One optimizer step. False: nothing was changed but the grids, repeat it."""
        num_terms, num_samples = len(micro_batches), sum(map(len, micro_batches))
        before = {name: tensor.clone() for name, (tensor, _) in statistics_of(self.model).items()}
        if any(grid.top is None for grid in self.grids.values()):
            self.calibrate(self.terms_of(0, micro_batches, num_samples)[0], num_terms, before)
        plan = plan_of(num_terms, self.speeds_of(len(self.losses)))
        workers = [Worker() for _ in plan]
        for worker, numbers in zip(workers, plan, strict=True):  # in parallel, on real workers
            for number in numbers:
                terms, worker.losses[number] = self.terms_of(number, micro_batches, num_samples)
                self.restore(before)
                for name, term in terms.items():
                    worker.add(name, term, self.grids.get(name))
        return self.finish(workers, micro_batches, num_samples, before)

    def terms_of(
        self, number: int, micro_batches: list[list[int]], num_samples: int
    ) -> tuple[dict[str, torch.Tensor], float]:
        """What micro-batch `number` adds to the step's sums, in float64, and its loss."""
        indices = torch.tensor(micro_batches[number])
        torch.manual_seed(derive_seed(self.seed, MICRO_BATCH, len(self.losses), number))
        before = {name: tensor.double() for name, (tensor, _) in statistics_of(self.model).items()}
        loss = self.loss_of(self.model, tuple(column[indices] for column in self.data))
        loss.backward()
        weight = len(indices) / num_samples
        terms = {name: p.grad.double() * weight for name, p in self.parameters.items() if p.grad is not None}
        self.model.zero_grad()
        for name, (tensor, kept) in statistics_of(self.model).items():
            terms[name] = (tensor.double() - before[name]) * kept ** (len(micro_batches) - 1 - number)
        return terms, loss.item()

    def calibrate(self, terms: dict[str, torch.Tensor], num_terms: int, before: dict[str, torch.Tensor]) -> None:
        """Grids that are not known yet are chosen by the step's first micro-batch."""
        self.restore(before)
        for name, grid in self.grids.items():
            grid.calibrate(float(terms[name].abs().max()) if name in terms else 0.0, num_terms)

    def finish(
        self, workers: list[Worker], micro_batches: list[list[int]], num_samples: int, before: dict[str, torch.Tensor]
    ) -> bool:
        """The exchange: sums over workers, and what follows it, the same on every worker."""
        num_terms = len(micro_batches)
        peaks = {name: max(worker.peaks.get(name, 0.0) for worker in workers) for name in self.names}
        fits = all(grid.fits(peaks[name], num_terms) for name, grid in self.grids.items())
        for name, grid in self.grids.items():
            grid.follow(peaks[name], num_terms)
        if not fits:
            return False
        for name in self.names:
            parts = [worker.sums[name] for worker in workers if name in worker.sums]
            total = sum(parts[1:], parts[0]) if parts else None
            if name in before:
                statistics_of(self.model)[name][0].copy_(before[name].double() + total)
            elif total is not None:  # a parameter that no micro-batch used keeps no gradient
                self.parameters[name].grad = total.to(self.parameters[name].dtype)
        if self.max_grad_norm is not None:
            used = [p for p in self.parameters.values() if p.grad is not None]
            nn.utils.clip_grad_norm_(used, self.max_grad_norm)
        self.optimizer.step()
        self.model.zero_grad()
        by_number = {number: loss for worker in workers for number, loss in worker.losses.items()}
        self.losses.append(sum(len(m) * by_number[k] for k, m in enumerate(micro_batches)) / num_samples)
        return True

    def restore(self, statistics: dict[str, torch.Tensor]) -> None:
        for name, (tensor, _) in statistics_of(self.model).items():
            tensor.copy_(statistics[name])

    def digest(self) -> str:
        """SHA-256 of all weights, statistics and optimizer states."""
        total = hashlib.sha256()
        states = [self.optimizer.state[p] for p in self.parameters.values()]
        for tensor in (*self.model.state_dict().values(), *(t for state in states for t in state.values())):
            total.update(np.ascontiguousarray(tensor.detach().numpy()).tobytes())
        return total.hexdigest()


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(150, 8, generator=generator)
    data = x, (x.sum(1) > 0).long() + (x[:, 0] > 0).long()
    teams = {
        "one worker": lambda _: [1.0],
        "two equal workers": lambda _: [1.0, 1.0],
        "five unequal workers": lambda _: [1.0, 5.0, 2.0, 0.0, 3.0],
        "another team in every step": lambda step: [1.0 + (step * 7 + rank) % 5 for rank in range(1 + step % 4)],
    }
    for name, speeds_of in teams.items():
        run = Reference(
            lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)),
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
            lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
            data,
            global_batch=32,
            micro_batch=4,
            max_grad_norm=1.0,
            speeds_of=speeds_of,
        )
        run.train(4)
        print(f"{run.digest()[:16]}  loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}  {name}")


if __name__ == "__main__":
    main()
