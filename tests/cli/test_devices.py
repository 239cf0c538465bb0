"""`paceline devices`: what a run would use here. What a GPU can do is measured where there is one."""

from __future__ import annotations

import json

import pytest
import torch
from in_process import Ended, check_help, invoke

from paceline.cli import devices as devices_command
from paceline.cli.devices import Device, Host, Link, Speed


def devices(*arguments: object) -> Ended:
    return invoke(devices_command.add_parser, "devices", *arguments)


HOST = Host("node-1", "EPYC", 16, 8, 128 * 10**9, None)


def test_the_cpu_is_listed_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_command, "MEASURED_S", 0.01)
    monkeypatch.setitem(devices_command.MATRIX_SIZE, "cpu", 64)
    monkeypatch.setitem(devices_command.COPY_BYTES, "cpu", 1 << 20)
    found = json.loads(devices("--json").out)
    (cpu,) = found["devices"]
    assert cpu["device"] == "cpu"
    assert min(cpu["speed"][name] for name in ("fp32_gflop_per_s", "bf16_gflop_per_s", "memory_gb_per_s")) > 0
    assert cpu["speed"]["host_gb_per_s"] is None
    assert found["links"] == []
    assert found["host"]["cores"] >= 1
    assert found["host"]["threads"] == torch.get_num_threads()


@pytest.mark.parametrize("option", ["--no-speed", "--quick"])
def test_nothing_is_measured_on_request(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_command, "_measure", lambda _: pytest.fail("measured"))
    ended = devices(option)
    assert ended.code == 0
    assert ended.out.endswith("\na run uses 1 worker, unless told otherwise by --workers or -d\n")
    assert json.loads(devices(option, "--json").out)["devices"][0]["speed"] is None


def test_a_full_device_is_listed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device) -> Speed:
        raise torch.OutOfMemoryError("2 GiB")

    monkeypatch.setattr(devices_command, "_measure", fail)
    assert "\nnot measured, since their memory is in use: cpu\n" in devices().out


def test_the_tables_fit_80_columns() -> None:
    found = [
        Device(f"cuda:{i}", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 150 * 10**9, speed)
        for i, speed in enumerate([Speed(52_100, 790_300, 4100.5, 55.2), Speed(812, 1000, 99.9, 0.5)])
    ]
    links = [Link("cuda:0", "cuda:1", True, 412.5), Link("cuda:1", "cuda:0", False, 22.25)]
    text = devices_command._text(HOST, found, links)
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines() == [
        "host         node-1",
        "processor    EPYC, 16 cores",
        "threads      8 in a process of its own; workers divide the cores",
        "memory       128 GB",
        "CPU workers  exchange through shared memory",
        "",
        "device  name                            memory    fp32    bf16   copy  from host",
        "                                                FLOP/s  FLOP/s   GB/s       GB/s",
        "cuda:0  NVIDIA RTX PRO 6000 Blackwe...  150 GB   52.1T    790T  4.10k       55.2",
        "cuda:1  NVIDIA RTX PRO 6000 Blackwe...  150 GB    812G   1.00T   99.9       0.50",
        "",
        "from    to      way               GB/s",
        "cuda:0  cuda:1  direct             412",
        "cuda:1  cuda:0  through the host  22.2",
        "",
        "a run uses 2 workers, unless told otherwise by --workers or -d",
    ]


def test_why_memory_is_not_shared_is_said() -> None:
    host = Host("mac", "M4", 8, 8, None, "it takes Linux, and this is darwin")
    text = devices_command._text(host, [], [])
    assert "CPU workers  exchange through Gloo: it takes Linux, and this is darwin" in text
    assert "memory       unknown" in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_is_measured() -> None:
    found = json.loads(devices("--json").out)
    gpu = found["devices"][0]
    assert gpu["device"] == "cuda:0"
    assert gpu["speed"]["bf16_gflop_per_s"] > gpu["speed"]["fp32_gflop_per_s"] > 1000
    assert gpu["speed"]["memory_gb_per_s"] > gpu["speed"]["host_gb_per_s"] > 1
    count = torch.cuda.device_count()
    assert len(found["links"]) == count * (count - 1)
    assert all(link["gb_per_s"] > 0.1 for link in found["links"])


def test_the_help_is_complete() -> None:
    check_help(devices_command.add_parser)
