"""Recording and timing work on a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple, Protocol, TypeVar

import torch

Made = TypeVar("Made")


class CaptureFailed(Exception):
    """The work cannot be recorded; the text says why. The device is unchanged."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> object:
        """Queue the recorded work; it reads the current values of its tensors."""


class Seconds(NamedTuple):
    """Seconds that the host needed to launch some work, and the device to run it."""

    host: float
    device: float


class Graphs(Protocol):
    """Records and measures work on one device."""

    def record(self, work: Callable[[], Made]) -> tuple[Graph, Made]:
        """Record the kernels that `work` launches, without running them. The memory of its result is kept."""

    def timed(self, work: Callable[[], Made]) -> tuple[Made, Seconds]:
        """Run the work and time it; waits for the device before and after."""


class CudaGraphs:
    """The CUDA graphs of one device. They share a memory pool, since they never run concurrently."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Made]) -> tuple[Graph, Made]:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile, for checkpoints or the exchange.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                made = work()
        except Exception as error:
            reason = _first_cause(error)
        else:
            return graph, made
        # Outside of `except`: there the error would keep the tensors of the failed capture alive.
        del graph
        self._leave_capture()
        raise CaptureFailed(reason)

    def timed(self, work: Callable[[], Made]) -> tuple[Made, Seconds]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.current_stream(self._device).synchronize()
        begin.record()
        begun_s = perf_counter()
        made = work()
        host_s = perf_counter() - begun_s
        end.record()
        end.synchronize()
        return made, Seconds(host_s, begin.elapsed_time(end) / 1e3)

    def _leave_capture(self) -> None:
        """A failed capture leaves torch's generators in capture mode until another capture succeeds."""
        self._pool = torch.cuda.graph_pool_handle()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
                torch.zeros((), device=self._device)


def _first_cause(error: BaseException) -> str:
    """The original error: a failed capture raises again when it ends."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
