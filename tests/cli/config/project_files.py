"""Project files for tests: one that is right, and how to write and load others."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from paceline.cli.config import ConfigError, Project, load_project

# The generator of docs/project-files.md.
PAGE = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "make_project_files.py"))

# The least that a project file must have.
LEAST = """\
model: {factory: "parts:build_model"}
data: {train: {factory: "parts:samples"}}
trainer: {epochs: 1, global_batch: 8, learning_rate: 0.1}
"""

# Something of everything.
FULL = """\
variables:
  width: 16
  steps: 100
model:
  factory: parts:build_model
  arguments: {width: "${width}", activation: {reference: "torch.nn:Tanh"}}
loss: parts:loss
optimizer:
  factory: torch.optim:SGD
  arguments:
    lr: 1e-2
scheduler:
  factory: torch.optim.lr_scheduler:StepLR
  arguments: {step_size: 10}
data:
  train:
    factory: parts:samples
    arguments: {count: 32, note: "costs $${5}", nested: {factory: "parts:samples"}, many: [1, 2.5, null, "no"]}
  evaluation: {kind: tokens, paths: [a.bin, b.bin], length: 8}
  collate: parts:collate
trainer:
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 2
  max_steps: ${steps}
  strategy: {kind: averaging, every: {kind: cadence, anchor: 5}, outer: {factory: "torch.optim:SGD"}}
  max_grad_norm: .inf
  shares: [1, 2.5]
  eval_every: 10
  early_stopping: {patience: 2}
checkpoints:
  every_steps: 50
  keep_best: {metric: loss, count: 2}
  save_rng_state: false
  disk: per node
workers: 2
devices: [0, 1]
output: "${env:RUNS:runs}/tiny"
loggers: [csv, {factory: "parts:logger"}, {name: wandb, arguments: {project: tiny}}]
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    """Writes the files; the path of the first."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / next(iter(files))


def load(folder: Path, text: str, *overrides: str, **files: str) -> Project:
    """Loads p.yaml with this text, beside files that it may extend: `base=...` is base.yaml."""
    path = write(folder, {"p.yaml": text, **{f"{name}.yaml": content for name, content in files.items()}})
    return load_project(path, overrides, {"HOME": "/home/me", "COUNT": "3"})


def error_of(folder: Path, text: str, *overrides: str, **files: str) -> str:
    """What loading says, without the folder's name."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides, **files)
    return str(caught.value).replace(f"{folder}/", "")
