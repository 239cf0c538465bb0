"""The benchmark of one GPU: what it trains, and a short run of it on whatever there is."""

from __future__ import annotations

import argparse
import dataclasses
import math

import pytest
import torch

import paceline as pl
from bench import gpu
from bench.gpu_models import Classifier, gpt2, resnet18
from bench.harness import Result, Unavailable

CPU = torch.device("cpu")


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_models_have_the_sizes_they_are_named_for() -> None:
    with torch.device("meta"):
        assert num_parameters(resnet18()) == 11_173_962
        assert num_parameters(gpt2(50257, 1024, quick=False)) == 124_439_808


def test_peers_get_every_sample_once_per_epoch() -> None:
    work = gpu.mlp_work(CPU, quick=True)
    rows = torch.cat([x for x, _ in work.loader()])
    assert sorted(rows.tolist()) == sorted(work.inputs[0].tolist())


def test_everybody_trains_on_the_same_samples_in_the_same_order() -> None:
    # Channels last as on a GPU, but no convolution: on some CPUs oneDNN crashes on it.
    images = torch.randn(gpu.NUM_BATCHES * 2, 3, 8, 8).to(memory_format=torch.channels_last)
    work = dataclasses.replace(
        gpu.cnn_work(CPU, quick=True),
        make_model=lambda: Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10))),
        inputs=(images, torch.randint(10, (len(images),))),
    )
    loader = work.loader()
    theirs = [images for _ in range(2) for images, _ in loader]
    with pl.Trainer.setup(
        work.make_model, work.make_optimizer, data=work.inputs, global_batch=work.batch, runtime=pl.Runtime(quiet=True)
    ) as trainer:
        ours = []
        for epoch in trainer.epochs(2):
            for batch in epoch:
                ours.append(batch.x)
                trainer.backward(trainer.model(*batch))
                trainer.step()
    assert all(map(torch.equal, theirs, ours))
    assert len(theirs) == len(ours)
    assert all(batch.is_contiguous(memory_format=torch.channels_last) for batch in theirs)


def test_on_a_cpu_no_convolution_is_in_channels_last() -> None:
    work = gpu.cnn_work(CPU, quick=True)
    weights = [layer.weight for layer in work.make_model().modules() if isinstance(layer, torch.nn.Conv2d)]
    assert len(weights) == 20
    assert all(tensor.is_contiguous() for tensor in (work.inputs[0], *weights))


def test_a_fit_that_ends_early_has_no_figure() -> None:
    clock = gpu.FitClock(gpu.mlp_work(CPU, quick=True))
    for step in range(1, clock.last_step + 1):
        clock.step_ended(step)
    assert clock.units_per_s > 0
    clock.step_ended(gpu.WARMUP_STEPS_OF_A_FIT)
    assert math.isnan(clock.units_per_s)


def test_the_cnns_goal_is_the_fastest_other() -> None:
    measured = {gpu.OURS: [8.0], gpu.BARE: [10.0], "Fabric": [16.0], "Accelerate": [4.0]}
    result = Result.of("cnn", "images/s", measured, ours=gpu.OURS, limit=gpu.BARE, better="higher", settings={})
    assert gpu.over_best_peer(result) == 0.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_a_quick_run_is_possible() -> None:
    with pytest.raises(Unavailable, match="torch sees no CUDA device"):
        gpu.run(argparse.Namespace(part=["mlp"], turns=1, peers=[], quick=False))


@pytest.mark.parametrize("part", ["gpt2-eager", "mlp"])
def test_a_short_run_without_peers(part: str) -> None:
    check_short_run(gpu.measure(part, 1, [], quick=True))


def test_a_short_run_of_convolutions() -> None:
    """In a process of its own, as `gpu.run` does it: a kernel that crashes fails this test, not the session."""
    check_short_run(gpu.run(argparse.Namespace(part=["cnn"], turns=1, peers=[], quick=True)).results["cnn"])


def check_short_run(result: Result) -> None:
    assert (result.detail["ours"], result.detail["limit"]) == (gpu.OURS, gpu.BARE)
    assert result.ratio > 0


def test_exact_mode_is_measured_against_plain_mode_and_its_settings_stay_its_own() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.are_deterministic_algorithms_enabled()
    result = gpu.measure("exact", 1, ["Accelerate"], quick=True)
    assert list(result.detail["spread"]) == [gpu.EXACT, gpu.OURS]
    assert (torch.backends.cuda.cudnn_sdp_enabled(), torch.are_deterministic_algorithms_enabled()) == before


@pytest.mark.slow
def test_a_short_run_with_every_peer() -> None:
    """Needs the `bench` extra: shows that the peers' interfaces are still as we call them."""
    options = argparse.Namespace(part=["cnn"], turns=1, peers=list(gpu.PEERS), quick=True)
    result = gpu.run(options).results["cnn"]
    assert result.detail["skipped"] == {}
    assert set(result.peers) == set(gpu.PEERS)
