from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from worker_pool import WorkerPool

import paceline as pl
from paceline.plan.predict import Workload, predict
from paceline.plan.profile import Profile
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


def test_a_run_that_trains_can_be_profiled_again() -> None:
    """A single worker times one of 16 steps by itself, which a profile of a few steps would miss."""
    with trainer() as trained:
        trained.profile(lambda batch: trained.model(batch).square().mean(), steps=40)
        before = trained.position.step
        profile = trained.profile(lambda batch: trained.model(batch).square().mean(), steps=5)
        assert trained.position.step == before + 1 + probe.MAX_STEPS
    assert profile.devices[0].spread > 0


def profile_on_hosts(num_hosts: int) -> Profile:
    """On one of two workers. num_hosts=2: each counts as a host, so that they exchange through Gloo."""
    if num_hosts == 2:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with trainer() as trained:
        return trained.profile(lambda batch: trained.model(batch).square().mean(), steps=2)


def test_workers_of_one_host_measure_their_exchange(pool: WorkerPool) -> None:
    for profile in pool.run(profile_on_hosts, 2, 1):
        assert profile.link is None
        assert 0 < profile.exchange.seconds(2, profile.subject.gradient_bytes) < 10


def test_hosts_measure_their_link(pool: WorkerPool) -> None:
    first, second = pool.run(profile_on_hosts, 2, 2)
    assert first.link is not None
    assert first.link == second.link  # all of them fit the same readings
    assert 0 < first.link.latency_s < 10
    assert Profile.from_json(first.to_json()) == first


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
        ("0::/user.slice/b\n", {"user.slice/b/cpu.max": "max 100000", "cpu.max": "150000 100000"}, 1.5),
        ("4:cpu:/docker/x\n", {"cpu/cpu.cfs_quota_us": "40000", "cpu/cpu.cfs_period_us": "100000"}, 0.4),
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
