"""The world is a value, read once from the environment."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.core.world import World, choose_device, choose_devices, device_count, devices

CPU = torch.device("cpu")


def gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpus(monkeypatch, 0)


def set_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_world_of_one_is_the_default() -> None:
    world = pl.World()
    assert (world.rank, world.size, world.local_rank, world.local_size, world.device) == (0, 1, 0, 1, CPU)
    assert world.is_main
    assert not pl.World(1, 2).is_main
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.rank = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rank": 2, "size": 2}, r"rank=2 is not in a world of 2: choose 0 <= rank < 2"),
        ({"rank": -1, "size": 2}, r"rank=-1 is not in a world of 2: choose 0 <= rank < 2"),
        ({"size": 0}, r"size=0, local_size=1: a world has at least 1 worker"),
        ({"local_size": 0}, r"size=1, local_size=0: a world has at least 1 worker"),
        (
            {"size": 4, "local_rank": 3, "local_size": 2},
            r"local_rank=3 is not among 2 local workers: choose 0 <= ",
        ),
        ({"local_rank": -1}, r"local_rank=-1 is not among 1 local workers"),
    ],
)
def test_a_place_outside_the_world_is_an_error(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        World(**fields)


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, (5, 8, 1, 4)),
        ({}, (0, 1, 0, 1)),
        # A world needs both of these; one alone is somebody else's variable.
        ({"RANK": "5"}, (0, 1, 0, 1)),
        ({"WORLD_SIZE": "8"}, (0, 1, 0, 1)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (0, 1, 0, 1)),
        # Without the local ones, all workers are taken to be on this host.
        ({"RANK": "5", "WORLD_SIZE": "8"}, (5, 8, 5, 8)),
        ({"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, (1, 8, 0, 8)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1)),
    ],
)
def test_the_world_in_the_environment(environment: dict[str, str], expected: tuple[int, ...]) -> None:
    world = World.from_environment(environment=environment)
    assert (world.rank, world.size, world.local_rank, world.local_size) == expected
    assert world.host == socket.gethostname()
    assert world.device == CPU


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert World.from_environment("cpu") == World.from_environment("cpu", TORCHRUN)
    for name in TORCHRUN:
        monkeypatch.delenv(name)
    assert World.from_environment("cpu") == World.from_environment("cpu", {})


@pytest.mark.parametrize("name", TORCHRUN)
def test_a_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^the environment variable {name}='two' is not an integer"):
        World.from_environment("cpu", {**TORCHRUN, name: "two"})


def test_variables_that_contradict_each_other_are_an_error() -> None:
    with pytest.raises(ValueError, match="rank=8 is not in a world of 8"):
        World.from_environment("cpu", {**TORCHRUN, "RANK": "8"})


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "requested", "expected"),
    [
        (0, 0, None, CPU),
        (0, 3, None, CPU),
        (2, 0, None, gpu(0)),
        (2, 1, None, gpu(1)),
        (2, 2, None, gpu(0)),  # more workers than GPUs share them
        (2, 3, "cpu", CPU),
        (2, 3, CPU, CPU),
        (2, 3, "cuda", gpu(1)),
        (2, 0, "cuda:1", gpu(1)),
        (2, 1, gpu(0), gpu(0)),
        (0, 0, "meta", torch.device("meta")),
    ],
)
def test_the_device_of_a_worker(
    num_gpus: int, local_rank: int, requested: Any, expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_gpus(monkeypatch, num_gpus)
    assert choose_device(local_rank, requested) == expected


@pytest.mark.parametrize(
    ("num_gpus", "requested", "text"),
    [
        (0, "cuda", r"device='cuda' is not available: torch sees cpu\. Choose one of these, or check CUDA_VISIBLE_DEV"),
        (0, "cuda:0", r"device='cuda:0' is not available: torch sees cpu\."),
        (2, gpu(2), r"device='cuda:2' is not available: torch sees cuda:0, cuda:1\."),
    ],
)
def test_a_device_that_is_not_there_is_an_error(
    num_gpus: int, requested: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_gpus(monkeypatch, num_gpus)
    with pytest.raises(ValueError, match=text):
        choose_device(0, requested)


@pytest.mark.parametrize(("num_gpus", "expected"), [(0, [CPU]), (1, [gpu(0)]), (3, [gpu(0), gpu(1), gpu(2)])])
def test_the_devices_of_this_machine(
    num_gpus: int, expected: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_gpus(monkeypatch, num_gpus)
    assert devices() == pl.compat.ggmlr.devices() == expected
    assert device_count() == pl.compat.ggmlr.device_count() == len(expected)


@pytest.mark.parametrize(
    ("device", "local_size", "num_gpus", "expected"),
    [(CPU, 4, 0, False), (CPU, 4, 2, False), (gpu(0), 2, 2, False), (gpu(0), 3, 2, True)],
)
def test_workers_that_share_a_gpu_know_it(
    device: torch.device, local_size: int, num_gpus: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_gpus(monkeypatch, num_gpus)
    assert World(0, local_size, 0, local_size, device=device).shares_device is expected


@pytest.mark.parametrize("device", ["gpu", "cpu:x", 3.5])
def test_a_device_that_does_not_exist_is_named(device: Any) -> None:
    with pytest.raises(ValueError, match=rf"^device={device!r} is unknown: choose one of cpu"):
        choose_device(0, device)


def test_one_device_is_not_a_list() -> None:
    for device in ("cpu", torch.device("cpu")):
        with pytest.raises(TypeError, match=r"is one device: give a list, such as \['cpu'\]"):
            choose_devices(device)  # type: ignore[arg-type]
