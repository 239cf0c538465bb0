"""The reference computes what the library computes, to the last bit, on any number of workers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from models import digest
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

PATH = Path(__file__).parents[2] / "examples" / "reference.py"


def reference_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module
    spec.loader.exec_module(module)
    return module


def dropout_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 3))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


class PartlyUsed(nn.Module):
    """One parameter is used by some micro-batches only, another by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.sometimes = nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        return out + self.sometimes(x) if x[0, 0] > 0 else out


def adamw(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def momentum(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)


CASES: dict[str, dict[str, Any]] = {
    "dropout and clipping": {"model": dropout_mlp, "optimizer": adamw, "max_grad_norm": 0.5},
    "BatchNorm": {"model": batch_norm, "optimizer": momentum},
    "unused parameters": {"model": PartlyUsed, "optimizer": adamw},
    "bursts that repeat steps": {"model": dropout_mlp, "optimizer": momentum, "burst": 1e7},
    "one micro-batch per step": {"model": dropout_mlp, "optimizer": adamw, "micro_batch": 16},
}
GLOBAL_BATCH, SEED, EPOCHS = 16, 5, 3


def data_of(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(90, 6, generator=generator)
    y = torch.randint(3, (90,), generator=generator)
    if "burst" in case:
        x[40:44] *= case["burst"]
    return x, y


def reference(case: dict[str, Any]) -> tuple[str, list[float]]:
    threads = torch.get_num_threads()
    try:
        run = reference_module().Reference(
            case["model"],
            case["optimizer"],
            lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
            data_of(case),
            global_batch=GLOBAL_BATCH,
            micro_batch=case.get("micro_batch", 4),
            seed=SEED,
            max_grad_norm=case.get("max_grad_norm"),
            speeds_of=lambda step: [1.0, 2.5, 0.0, 1.5][: 1 + step % 4],
        )
        run.train(EPOCHS)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    return digest(run.model.state_dict(), run.optimizer.state_dict()["state"]), run.losses


def library(case: dict[str, Any]) -> tuple[str, list[float]]:
    losses = []
    with pl.Trainer.setup(
        case["model"],
        case["optimizer"],
        data=data_of(case),
        global_batch=GLOBAL_BATCH,
        micro_batch=case.get("micro_batch", 4),
        seed=SEED,
        max_grad_norm=case.get("max_grad_norm"),
        exact=True,
        runtime=pl.Runtime(quiet=True),
    ) as trainer:
        trainer.every(1, lambda record: losses.append(record.loss))
        for epoch in trainer.epochs(EPOCHS):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return digest(trainer.model.state_dict(), trainer.optimizer.state_dict()["state"]), losses


@pytest.mark.parametrize("name", CASES)
def test_the_library_computes_the_same_bits(name: str, pool: WorkerPool) -> None:
    expected = reference(CASES[name])
    assert library(CASES[name]) == expected
    assert pool.run(library, 2, CASES[name]) == [expected] * 2
    if name == "dropout and clipping":
        assert pool.run(library, 3, CASES[name]) == [expected] * 3


def test_it_runs_on_its_own_and_imports_no_paceline() -> None:
    assert "paceline" not in PATH.read_text().partition('"""')[2].partition('"""')[2].replace("Paceline", "")
    assert len(PATH.read_text().splitlines()) <= 300
    done = subprocess.run([sys.executable, str(PATH)], capture_output=True, text=True, check=True)
    digests = {line.split()[0] for line in done.stdout.splitlines()}
    assert len(digests) == 1
    assert len(done.stdout.splitlines()) == 4
