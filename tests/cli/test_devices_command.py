"""`paceline devices`: the devices of this machine. GPUs are measured where there are any."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from in_process import Ended, invoke

from paceline.cli import devices as devices_command

HOST = {
    "name": "node-1",
    "system": "Linux-6.8",
    "processor": "EPYC",
    "cores": 16,
    "threads": 8,
    "memory_bytes": 128 * 10**9,
    "no_shared_memory": None,
}


def devices(*arguments: object) -> Ended:
    return invoke("devices", *arguments)


def device(name: str, fp32: float, bf16: float, memory: float, host: float) -> dict[str, Any]:
    names = ("fp32_gflop_per_s", "bf16_gflop_per_s", "memory_gb_per_s", "host_gb_per_s")
    speed = dict(zip(names, (fp32, bf16, memory, host), strict=True))
    model = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
    return {"device": name, "name": model, "memory_bytes": 150 * 10**9, "speed": speed, "is_full": False}


def test_cpu_is_listed_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_command, "MEASURED_S", 0.01)
    monkeypatch.setitem(devices_command.MATRIX_SIZE, "cpu", 64)
    monkeypatch.setitem(devices_command.COPY_BYTES, "cpu", 1 << 20)
    num_threads = torch.get_num_threads()
    found = json.loads(devices("--json").out)
    (cpu,) = found["devices"]
    assert cpu["device"] == "cpu"
    assert min(cpu["speed"][name] for name in ("fp32_gflop_per_s", "bf16_gflop_per_s", "memory_gb_per_s")) > 0
    assert cpu["speed"]["host_gb_per_s"] is None
    assert cpu["is_full"] is False
    assert found["links"] == []
    assert found["host"].keys() == HOST.keys()
    assert found["host"]["cores"] >= 1
    assert found["host"]["threads"] == torch.get_num_threads() == num_threads


@pytest.mark.parametrize("option", ["--no-speed", "--quick"])
def test_no_speed_skips_the_measurements(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_command, "_measure", lambda _: pytest.fail("measured"))
    ended = devices(option)
    assert ended.code == 0
    assert ended.out.endswith("\na run uses 1 worker by default; --workers and -d change that\n")
    assert json.loads(devices(option, "--json").out)["devices"][0]["speed"] is None


def test_device_with_full_memory_is_listed_without_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device) -> None:
        raise torch.OutOfMemoryError("2 GiB")

    monkeypatch.setattr(devices_command, "_measure", fail)
    assert "\nnot measured because their memory is in use: cpu\n" in devices().out


def test_tables_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    found = [device("cuda:0", 52_100, 790_300, 4100.5, 55.2), device("cuda:1", 812, 1000, 99.9, 0.5)]
    links = [
        {"source": "cuda:0", "target": "cuda:1", "is_direct": True, "gb_per_s": 412.5},
        {"source": "cuda:1", "target": "cuda:0", "is_direct": False, "gb_per_s": 22.25},
    ]
    devices_command._print({"host": HOST, "devices": found, "links": links})
    assert capsys.readouterr().out.splitlines() == [
        "host         node-1",
        "processor    EPYC, 16 cores",
        "threads      8 in a single process; workers divide the cores",
        "memory       128 GB",
        "CPU workers  exchange through shared memory",
        "",
        "                                                  fp32    bf16   copy  from host",
        "device  name                            memory  FLOP/s  FLOP/s   GB/s       GB/s",
        "cuda:0  NVIDIA RTX PRO 6000 Blackwe...  150 GB   52.1T    790T  4.10k       55.2",
        "cuda:1  NVIDIA RTX PRO 6000 Blackwe...  150 GB    812G   1.00T   99.9       0.50",
        "",
        "from    to      path              GB/s",
        "cuda:0  cuda:1  direct             412",
        "cuda:1  cuda:0  through the host  22.2",
        "",
        "a run uses 2 workers by default; --workers and -d change that",
    ]


def test_reason_for_missing_shared_memory_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    host = HOST | {"memory_bytes": None, "no_shared_memory": "it takes Linux, and this is darwin"}
    devices_command._print({"host": host, "devices": [], "links": []})
    text = capsys.readouterr().out
    assert "CPU workers  exchange through Gloo: it takes Linux, and this is darwin" in text
    assert "memory       -\n" in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_is_measured() -> None:
    found = json.loads(devices("--json").out)
    gpu = found["devices"][0]
    assert gpu["device"] == "cuda:0"
    assert gpu["speed"]["bf16_gflop_per_s"] > gpu["speed"]["fp32_gflop_per_s"] > 1000
    assert gpu["speed"]["memory_gb_per_s"] > gpu["speed"]["host_gb_per_s"] > 1
    count = torch.cuda.device_count()
    assert len(found["links"]) == count * (count - 1)
    assert all(link["gb_per_s"] > 0.1 for link in found["links"])
