"""Logs gradients: the norm of each parameter's gradient in every step, and histograms now and then.

`trainer.on_gradients` calls a function in every step, on all workers, when `parameter.grad` is the mean over the global
batch, whoever computed which part of it, and before it is clipped. In the loop's body `parameter.grad` is a worker's
own part of that mean. The program checks the first gradient against plain PyTorch, and with --tensorboard it writes
histograms that `tensorboard --logdir DIR` shows.

    python examples/gradient_logging.py
    paceline run --workers 2 examples/gradient_logging.py --tensorboard gradients
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl

GLOBAL_BATCH = 64
HISTOGRAM_EVERY = 10
NUM_BINS = 24
BARS = " .:-=+*#%@"


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))


def bars(gradient: torch.Tensor) -> str:
    """A histogram in one line: from the smallest to the largest value, one character per bin."""
    counts = torch.histc(gradient, NUM_BINS)
    levels = (counts / counts.max() * (len(BARS) - 1)).ceil().int().tolist()
    return f"{gradient.min():+.3f} [{''.join(BARS[level] for level in levels)}] {gradient.max():+.3f}"


class GradientLog:
    """norms: by parameter's name, one per step. writer: TensorBoard's, if given."""

    def __init__(self, trainer: pl.Trainer, writer: Any = None) -> None:
        self._trainer, self._writer = trainer, writer
        self.norms: dict[str, list[float]] = {}

    def __call__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        if not self._trainer.is_main:  # all workers have the same gradient
            return
        step = self._trainer.position.step + 1
        for name, parameter in parameters.items():
            gradient = parameter.grad
            if gradient is None:  # no micro-batch of this step used it
                continue
            self.norms.setdefault(name, []).append(gradient.norm().item())
            if step % HISTOGRAM_EVERY == 0:
                print(f"step {step:>3}  {name:<9} norm {self.norms[name][-1]:.4f}  {bars(gradient)}")
                if self._writer is not None:
                    self._writer.add_histogram(f"gradients/{name}", gradient, step)


def plain_norms(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """What PyTorch alone gives for these samples."""
    F.mse_loss(model(x), y).backward()
    return {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensorboard", metavar="DIR", help="write histograms for TensorBoard")
    folder = parser.parse_args().tensorboard
    x = torch.randn(640, 8, generator=torch.Generator().manual_seed(0))
    y = x.sum(dim=1, keepdim=True)
    with pl.Trainer.setup(
        make_model,
        lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=(x, y),
        global_batch=GLOBAL_BATCH,
        micro_batch=8,
        shuffle=False,
    ) as trainer:
        initial = make_model()
        initial.load_state_dict({name: value.cpu() for name, value in trainer.unwrapped_model.state_dict().items()})
        expected = plain_norms(initial, x[:GLOBAL_BATCH], y[:GLOBAL_BATCH])
        writer = None
        if folder is not None and trainer.is_main:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(folder)
        log = GradientLog(trainer, writer)
        trainer.on_gradients(log)
        for epoch in trainer.epochs(3):
            for batch in epoch:
                trainer.backward(F.mse_loss(trainer.model(batch.x), batch.y))
                trainer.step()
        if writer is not None:
            writer.close()
    if not trainer.is_main:
        return 0
    is_equal = all(abs(log.norms[name][0] - norm) < 1e-4 * norm for name, norm in expected.items())
    print(f"{len(log.norms)} parameters, {len(log.norms['0.weight'])} steps; the first equals PyTorch's: {is_equal}")
    return 0 if is_equal and log.norms["0.weight"][-1] < log.norms["0.weight"][0] else 1


if __name__ == "__main__":
    sys.exit(main())
