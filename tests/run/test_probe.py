from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.plan.predict import Workload, predict
from paceline.run import probe


def trainer(global_batch: int = 8) -> pl.Trainer:
    return pl.Trainer.setup(
        lambda: nn.Linear(4, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=torch.randn(64, 4),
        global_batch=global_batch,
        micro_batch=2,
        runtime=pl.Runtime(threads=1, quiet=True),
    )


def test_a_profile_describes_the_worker_and_predicts() -> None:
    with trainer() as trained:
        profile = trained.profile(lambda batch: trained.model(batch).square().mean(), steps=5)
        assert trained.position.step == probe.WARMUP_STEPS + 1 + probe.MAX_STEPS  # they are short
    (device,) = profile.devices
    subject = profile.subject
    assert (subject.model, subject.num_parameters, subject.gradient_bytes, subject.micro_batch) == ("Linear", 5, 20, 2)
    assert (profile.num_samples, profile.global_batch) == (64, 8)
    assert device.micro_batch_s > 0
    assert device.cores <= 1
    assert predict(Workload(4, 2, 20), profile.devices).samples_per_s > 0


def test_steps_must_be_measured() -> None:
    with trainer() as trained, pytest.raises(ValueError, match="steps=0: choose the number of steps to measure"):
        trained.profile(lambda batch: trained.model(batch).sum(), steps=0)


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "40000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.4),
        ("4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, math.inf),
        ("0::/b\n", {"b/cpu.max": "150000 100000"}, 1.5),
        ("0::/b\n", {"b/cpu.max": "max 100000"}, math.inf),
        ("0::/b\n", {}, math.inf),
    ],
)
def test_the_quota_of_a_cgroup(
    groups: str, files: dict[str, str], cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "groups").write_text(groups)
    monkeypatch.setattr(probe, "_CGROUPS", tmp_path)
    monkeypatch.setattr(probe, "_OWN_GROUPS", tmp_path / "groups")
    assert probe.cpu_quota() == cores
