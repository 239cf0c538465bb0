"""GPUs that cannot run a kernel are left out; on machines without GPUs, tried with probes that pretend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.core import usable_devices
from paceline.core.usable_devices import LEFT_OUT_VARIABLE, left_out, try_gpus
from paceline.core.world import World, choose_device, device_count, devices
from paceline.run.launching.launch import workers_to_start

# A driver with four GPUs: the second gives no context, the third keeps nothing.
FAKE_DRIVER = """
import ctypes
class Driver:
    def cuInit(self, flags): return 0
    def cuDeviceGetCount(self, count): count._obj.value = 4; return 0
    def cuDeviceGet(self, device, index): device._obj.value = self.index = index; return 0
    def cuDeviceGetName(self, text, size, index): text.value = b"NVIDIA H200"; return 0
    def cuCtxCreate_v2(self, context, flags, device): return 214 if device.value == 1 else 0
    def cuGetErrorString(self, code, text): text._obj.value = b"uncorrectable ECC error encountered"; return 0
    def cuMemAlloc_v2(self, memory, size): memory._obj.value = 4096; return 0
    def cuMemsetD32_v2(self, memory, number, count): self.number = number; return 0
    def cuMemcpyDtoH_v2(self, number, memory, size): number._obj.value = 0 if self.index == 2 else self.number; return 0
ctypes.CDLL = lambda name: Driver()
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the driver lists the GPUs."""
    for name in (LEFT_OUT_VARIABLE, "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(usable_devices, "_GPUS", tmp_path)
    monkeypatch.setattr(usable_devices, "_found", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(list(tmp_path.iterdir())))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    return tmp_path


def add_gpus(machine: Path, *models: str) -> None:
    for model in models:
        folder = machine / str(len(list(machine.iterdir())))
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ: 1\n")


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, found: dict[int, str]) -> None:
    monkeypatch.setattr(usable_devices, name, f"print({json.dumps(json.dumps(found))})")


def test_a_broken_gpu_of_one_model_is_left_out_of_a_launch(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpus(machine, *["NVIDIA H200"] * 3)
    pretend(monkeypatch, "_DRIVER_PROBE", {1: "NVIDIA H200: CUDA error: ECC"})
    assert left_out() == {}  # not tried yet
    assert workers_to_start(None) == 2
    assert left_out() == {1: "NVIDIA H200: CUDA error: ECC"}
    assert [str(choose_device(rank)) for rank in range(3)] == ["cuda:0", "cuda:2", "cuda:0"]


def test_the_driver_names_what_is_broken(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpus(machine, *["NVIDIA H200"] * 4)
    monkeypatch.setattr(usable_devices, "_DRIVER_PROBE", FAKE_DRIVER + usable_devices._DRIVER_PROBE)
    assert try_gpus() == {
        1: "NVIDIA H200: CUDA error: uncorrectable ECC error encountered",
        2: "NVIDIA H200: its memory does not keep what is written to it",
    }


def test_unlike_gpus_are_tried_with_torch(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "_TORCH_PROBE", {1: "GTX 1060: no kernel image"})
    pretend(monkeypatch, "_DRIVER_PROBE", {0: "not asked"})
    add_gpus(machine, "NVIDIA H200")
    assert try_gpus() == left_out() == {}  # there is nothing to choose
    add_gpus(machine, "GTX 1060")
    assert left_out() == {1: "GTX 1060: no kernel image"}
    assert [str(device) for device in devices()] == ["cuda:0"]


@pytest.mark.parametrize(
    "variables", [{"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": ""}, {"RANK": "0", "WORLD_SIZE": "2"}]
)
def test_gpus_are_not_tried_where_nothing_can_be_chosen(
    variables: dict[str, str], machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gpus(machine, *["NVIDIA H200"] * 2)
    pretend(monkeypatch, "_DRIVER_PROBE", {1: "broken"})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert try_gpus() == {}


def test_the_only_visible_of_unlike_gpus_is_not_tried(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpus(machine, "NVIDIA H200", "GTX 1060")
    pretend(monkeypatch, "_TORCH_PROBE", {0: "not asked"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert left_out() == try_gpus() == {}


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "print()", "print('no JSON')", ""])
def test_a_probe_that_fails_leaves_nothing_out(program: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpus(machine, *["NVIDIA H200"] * 2)
    monkeypatch.setattr(usable_devices, "_DRIVER_PROBE", program)
    assert device_count() == 2


def test_workers_are_told_by_their_launcher(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpus(machine, *["NVIDIA H200"] * 3)
    monkeypatch.setenv(LEFT_OUT_VARIABLE, json.dumps({1: "NVIDIA H200: broken"}))
    assert try_gpus() == left_out() == {1: "NVIDIA H200: broken"}
    assert [str(device) for device in devices()] == ["cuda:0", "cuda:2"]
    assert str(choose_device(0, "cuda:1")) == "cuda:1"  # chosen by the user: the set-up reports the error


def test_a_process_alone_takes_the_first_gpu_that_works(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpus(machine, *["NVIDIA H200"] * 3)
    real = torch.ones

    def ones(*size: int, device: torch.device) -> torch.Tensor:
        if device.index == 0:
            raise RuntimeError("CUDA error: ECC\nmore about it")
        return real(*size)

    monkeypatch.setattr(torch, "ones", ones)
    assert str(World.from_environment().device) == "cuda:1"
    assert left_out() == {0: "NVIDIA H200: CUDA error: ECC"}
