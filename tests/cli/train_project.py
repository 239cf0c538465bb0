"""A small project for the tests of `paceline train`: written into a folder, its module named after the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.config import load_project
from paceline.cli.train.worker import RunRequest, train
from paceline.observe.run_files import RunFiles, prepare_run_folder
from paceline.run.monitor import Monitor

PARTS = """
import torch
from torch import nn
from torch.nn import functional


def model(width=16):
    return nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 4))


def data(count=80, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=generator)
    return x, (x @ torch.randn(12, 4, generator=torch.Generator().manual_seed(1))).argmax(1)


def loss(model, batch):
    return functional.cross_entropy(model(batch.x), batch.y)


def metrics(model, batch):
    scores = model(batch.x)
    return {"loss": functional.cross_entropy(scores, batch.y), "accuracy": (scores.argmax(1) == batch.y).float().mean()}


def worse_and_worse(model, batch):
    worse_and_worse.calls = getattr(worse_and_worse, "calls", 0) + 1
    return {"loss": float(worse_and_worse.calls)}


def exploding(model, batch):
    exploding.calls = getattr(exploding, "calls", 0) + 1
    return loss(model, batch) * (1e6 if exploding.calls > 14 else 1.0)


class Remembering:
    def __init__(self, path):
        self._path, self._last, self._is_open = path, 0, False

    def log(self, step, values):
        if not self._is_open:
            with open(self._path, "a") as file:
                print(f"gone-on-after-{self._last}" if self._last else "begun", file=file)
        self._is_open, self._last = True, step

    def close(self):
        pass

    def state_dict(self):
        return {"last": self._last}

    def load_state_dict(self, state):
        self._last = state["last"]


def broken(model, batch):
    raise ValueError("in the loss")


def broken_optimizer(params):
    raise ValueError("in the optimizer")


def broken_model():
    return [][0]


def after(model):
    return f"{sum(p.numel() for p in model.parameters())} parameters were trained"
"""


def write_project(folder: Path, module: str) -> Path:
    """The project file; its module must have a name that no other test's has, since Python imports a name once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(PARTS)
    config = folder / "small.yaml"
    config.write_text(f"""\
model: {{factory: "{module}:model"}}
data:
  train: {{factory: "{module}:data"}}
  evaluation: {{factory: "{module}:data", arguments: {{count: 20, seed: 4}}}}
loss: {module}:loss
metrics: {module}:metrics
after: {module}:after
trainer: {{global_batch: 8, micro_batch: 4, epochs: 2, learning_rate: 0.01, log_every: 5, exact: true}}
""")
    return config


def run_here(config: Path, root: Path, *overrides: str, draws: bool = False, **request: Any) -> RunFiles:
    """One worker's part, in this process. draws: also the plot, which takes a third of a second."""
    files = prepare_run_folder(root)
    project = load_project(config, overrides).resolve(1)
    with pytest.MonkeyPatch.context() as patch:
        if not draws:
            patch.setattr(Monitor, "_draw", lambda _: None)
        train(RunRequest(project, files, **request))
    return files
