"""What capturing needs of a device: work that is recorded instead of run, and the time that work takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple, Protocol, TypeVar

import torch

Made = TypeVar("Made")


class CaptureFailed(Exception):
    """The work cannot be recorded; the text says why. The device is as it was."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> object:
        """Queue all of it, with what its tensors hold by then."""


class Seconds(NamedTuple):
    """How long the host took to launch some work, and how long the device took from its first part to its last."""

    host: float
    device: float


class Graphs(Protocol):
    """Records and measures work on one device."""

    def record(self, work: Callable[[], Made]) -> tuple[Graph, Made]:
        """Record what `work` launches: nothing of it runs before `replay`. What it returns keeps its memory."""

    def timed(self, work: Callable[[], Made]) -> tuple[Made, Seconds]:
        """Run the work by itself; waits for the device before and after it."""


class CudaGraphs:
    """One device's CUDA graphs. They share their memory, since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Made]) -> tuple[Graph, Made]:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, which write checkpoints or exchange tensors, may go on with what they do meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                made = work()
        except Exception as error:
            reason = _first_cause(error)
        else:
            return graph, made
        # Outside of `except`, where the error would keep the failed attempt's tensors alive.
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
        """A broken-off capture leaves torch's generators in capture mode, until one has ended as it should."""
        self._pool = torch.cuda.graph_pool_handle()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
                torch.zeros((), device=self._device)


def _first_cause(error: BaseException) -> str:
    """The error that came first: a broken capture fails once more when it is ended."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
