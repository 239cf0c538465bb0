"""The programs in plain PyTorch: one process, whole global batches, none of Paceline's arithmetic.

What it takes from Paceline is what plain PyTorch has no notion of: the order of an epoch, and the seed of a
micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import fuzz_parts as parts
import torch
from fuzz_parts import Batch, build, columns, halve, loss_of, set_frozen, weight
from fuzz_programs import Program
from torch import nn

from paceline.core.seeding import Purpose, derive_seed
from paceline.plan.epoch import EpochOrder


def train(program: Program) -> dict[str, Any]:
    return _Run(program).train()


class _Run:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.data = columns(program.num_samples, program.number, weighted=program.weighted)
        self.model = build(program.model, program.number)
        made = getattr(parts, program.optimizer)(list(self.model.parameters()))
        self.optimizers = made if isinstance(made, list) else [made]
        self.schedulers = getattr(parts, program.scheduler)(made) if program.scheduler else []
        self.average = copy.deepcopy(self.model)
        self.losses: list[float] = []
        self.evaluations: list[float] = []

    def train(self) -> dict[str, Any]:
        program = self.program
        for epoch in range(program.epochs):
            if self._is_over():
                break
            for batch in self._global_batches(epoch):
                self._step(batch)
                step = len(self.losses)
                if self._is_over() or any(
                    every and step % every == 0 for every in (program.end_epoch_every, program.break_every)
                ):
                    break
            # An epoch that trainer.end() left in the middle has not ended.
            if program.scheduler_every == "epoch" and (not self._is_over() or self._is_last_of_epoch):
                self._step_schedulers()
        weights = dict(self.model.state_dict())
        outcome: dict[str, Any] = {"weights": weights, "losses": self.losses, "evaluations": self.evaluations}
        if program.ema:
            outcome["average"] = dict(self.average.state_dict())
        return outcome

    def _is_over(self) -> bool:
        return self.program.end_at is not None and len(self.losses) >= self.program.end_at

    def _global_batches(self, epoch: int) -> Iterator[Batch]:
        program = self.program
        order = EpochOrder(program.num_samples, seed=program.number, epoch=epoch, shuffle=program.shuffle)
        indices = torch.as_tensor(order.indices(0, program.num_samples).copy())
        parts_of_it = list(indices.split(program.global_batch))
        if program.drop_last:
            parts_of_it = [part for part in parts_of_it if len(part) == program.global_batch]
        for number, part in enumerate(parts_of_it):
            self._is_last_of_epoch = number == len(parts_of_it) - 1
            yield {name: column[part] for name, column in self.data.items()}

    def _step(self, batch: Batch) -> None:
        program, step = self.program, len(self.losses)
        set_frozen(self.model, step, program.frozen)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self._backward(batch, step)
        if program.halves_gradients:
            halve(dict(self.model.named_parameters()))
        if program.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), program.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for kept, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                kept.lerp_(now, 1 - (program.ema or 0.0))
            for kept, now in zip(self.average.buffers(), self.model.buffers(), strict=True):
                kept.copy_(now)
        self.losses.append(loss)
        if program.scheduler_every == "step":
            self._step_schedulers(loss)
        if program.evaluate_every and (step + 1) % program.evaluate_every == 0:
            self.evaluations.append(self._evaluate())

    def _backward(self, batch: Batch, step: int) -> float:
        """The gradient of the weighted mean; where the model looks at its whole batch, micro-batch by micro-batch."""
        if not self.program.by_micro_batch:
            loss = loss_of(self.model, batch)
            loss.backward()
            return loss.item()
        total, sum_of_losses = weight(batch), 0.0
        size = self.program.micro_batch
        for number, start in enumerate(range(0, len(batch["x"]), size)):
            part = {name: column[start : start + size] for name, column in batch.items()}
            torch.manual_seed(derive_seed(self.program.number, Purpose.MICRO_BATCH, step, number))
            loss = loss_of(self.model, part) * weight(part) / total
            loss.backward()
            sum_of_losses += loss.item()
        return sum_of_losses

    def _step_schedulers(self, loss: float | None = None) -> None:
        for scheduler in self.schedulers:
            is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(loss) if is_plateau else scheduler.step()

    @torch.no_grad()
    def _evaluate(self) -> float:
        self.model.eval()
        loss = loss_of(self.model, self.data).item()
        self.model.train()
        return loss


def flat(outcome: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Everything as tensors, by name."""
    named: dict[str, torch.Tensor] = {}
    for name, value in outcome.items():
        if isinstance(value, Mapping):
            named.update({f"{name} {key}": tensor for key, tensor in value.items()})
        else:
            named[name] = torch.tensor(value, dtype=torch.float64)
    return named
