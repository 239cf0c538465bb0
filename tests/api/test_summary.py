"""The line on stderr that says where a run takes place."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from grouping import grouped
from models import mlp, vectors
from worker_pool import WorkerPool

import paceline as pl
from paceline.api.summary import _cost_without_direct_path, summary
from paceline.comm import connect
from paceline.core.world import World, unconnected_gpus

H200, OLD = "NVIDIA H200 (140 GB)", "NVIDIA GeForce GTX 1060 (6 GB)"
CPU = "CPU (2 cores, 1 thread each)"


@pytest.mark.parametrize(
    ("seats", "text"),
    [
        ([("a", "cpu", "CPU (2 cores, 1 thread)")], "1 worker | CPU (2 cores, 1 thread)"),
        ([("a", "cuda:0", H200)], f"1 worker | {H200}"),
        ([("a", "cuda:0", H200), ("a", "cuda:1", H200)], f"2 workers | {H200} x 2 (1 host)"),
        ([("a", "cuda:0", H200), ("b", "cuda:0", H200)], f"2 workers | {H200} x 2 (2 hosts)"),
        (
            [("a", "cuda:0", OLD), ("a", "cuda:1", H200), ("a", "cuda:2", H200)],
            f"3 workers | {OLD}, {H200} x 2 (1 host) | unlike devices",
        ),
        # Workers that share a device.
        ([("a", "cuda:0", H200), ("a", "cuda:0", H200)], f"2 workers | {H200}"),
        ([("a", "cpu", CPU), ("a", "cpu", CPU)], f"2 workers | {CPU}"),
        ([("a", "cpu", CPU), ("b", "cpu", CPU)], f"2 workers | {CPU} x 2 (2 hosts)"),
    ],
)
def test_workers_and_their_devices(seats: list[tuple[str, str, str]], text: str) -> None:
    assert summary(seats) == text


def test_pairs_of_gpus_without_a_direct_path_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one_way = {("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:0", "cuda:2")}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (str(a), str(b)) in one_way)
    assert unconnected_gpus(["cuda:0", "cuda:1", "cuda:2", "cuda:0"]) == ["cuda:0 and cuda:2", "cuda:1 and cuda:2"]
    assert unconnected_gpus(["cuda:3"]) == []


def test_a_missing_direct_path_is_said_with_its_cost(pool: WorkerPool) -> None:
    def line() -> str:
        connected = connect(World.from_environment("cpu"), None, 60.0)
        workers = [(connected.world.host, f"cuda:{rank}", H200) for rank in range(2)]
        try:
            with mock.patch.object(torch.cuda, "can_device_access_peer", return_value=False):
                return _cost_without_direct_path(workers, connected)
        finally:
            connected.close()

    for text in pool.run(line, 2):
        assert re.fullmatch(r"no direct path between cuda:0 and cuda:1: they .* memory, [\d.e+-]+ ms per MB .*", text)


def setup(**settings: Any) -> pl.Trainer:
    settings = {"data": vectors(8), "global_batch": 8, **settings}
    return pl.Trainer.setup(mlp, lambda params: torch.optim.SGD(params, lr=0.1), **grouped(**settings))


def printed(**settings: Any) -> str:
    """What this worker prints when it sets up a run."""
    import io
    from contextlib import redirect_stderr

    with redirect_stderr(io.StringIO()) as stream, setup(**settings):
        return stream.getvalue()


@pytest.fixture(autouse=True)
def not_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_QUIET", raising=False)


def test_one_line_when_a_run_is_set_up() -> None:
    line = printed(threads=1)
    assert line.startswith("paceline: 1 worker | CPU (")
    assert line.endswith(", 1 thread)\n")
    assert line.count("\n") == 1


def test_rank_0_prints_it_for_all(pool: WorkerPool) -> None:
    first, second = pool.run(lambda: printed(threads=1), 2)
    assert first.startswith("paceline: 2 workers | CPU (")
    assert first.endswith(", 1 thread each)\n")
    assert second == ""


@pytest.mark.parametrize(("value", "is_silent"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_silences_it(value: str, is_silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_QUIET", value)
    assert (printed() == "") == is_silent


def test_an_argument_silences_it_and_the_hint_at_idle_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.api.summary.devices", lambda: [torch.device("cpu")] * 4)
    assert "training on 1 of 4 devices; start the script with `paceline run SCRIPT`" in printed()
    assert "training on" not in printed(device="cpu")
    assert printed(quiet=True) == ""


def test_workers_need_not_be_equally_quiet(pool: WorkerPool) -> None:
    def run() -> str:
        import os

        return printed(quiet=os.environ["RANK"] == "1", threads=1)

    assert [bool(text) for text in pool.run(run, 2)] == [True, False]


def test_a_device_that_cannot_run_a_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore about it")

    monkeypatch.setattr(torch, "ones", fail)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GeForce GTX 680")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("paceline.core.world.devices", lambda: [torch.device("cuda", index) for index in range(2)])
    with pytest.raises(ValueError, match="cuda:1 cannot run a kernel: GeForce GTX 680: CUDA error: no kernel"):
        setup(device="cuda:1")


def test_what_a_slow_link_chooses_is_said_by_rank_0(pool: WorkerPool) -> None:
    def said(quiet: bool) -> str:
        import io
        from contextlib import redirect_stderr

        with (
            redirect_stderr(io.StringIO()) as stream,
            setup(data=vectors(96), micro_batch=4, strategy="slow link", quiet=quiet) as trainer,
        ):
            for batch in next(trainer.epochs(1)):
                trainer.backward(trainer.model(batch.x).square().mean())
                trainer.step()
        return stream.getvalue()

    first, second = pool.run(said, 2, False)
    assert re.search(
        r"\npaceline: averaging every \d+ steps in int4, in \d+ parts: a step takes .* of the time\n$", first
    )
    assert second == ""
    assert pool.run(said, 2, True) == ["", ""]


def test_a_broken_stderr_does_not_end_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stderr", stream := open(writing, "w", buffering=1))  # noqa: PTH123, SIM115
    try:
        setup().close()
    finally:
        monkeypatch.undo()
        with suppress(OSError):
            stream.close()
