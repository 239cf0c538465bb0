"""Records device work as CUDA graphs, and reports why work cannot be captured."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple, TypeVar
from weakref import WeakSet

import numpy as np
import torch

from paceline.core.errors import MisuseError
from paceline.core.events import Events
from paceline.core.generators import host_randomness
from paceline.core.world import World
from paceline.run.capture.outbox import Outbox
from paceline.run.config import RunConfig
from paceline.sync.averaging.strategy import Averaging
from paceline.sync.compression.settings import Gradients

Made = TypeVar("Made")


class CaptureFailed(Exception):
    """The work cannot be captured; the text says why. The device is unchanged."""


class Seconds(NamedTuple):
    """Seconds that the host needed to launch some work, and the device to run it."""

    host: float
    device: float


class CudaGraphs:
    """The CUDA graphs of one device. They share a memory pool, since they never run concurrently."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._alive: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def record(self, work: Callable[[], Made]) -> tuple[torch.cuda.CUDAGraph, Made]:
        """Record the kernels that `work` launches, without running them. The memory of its result is kept."""
        graph = torch.cuda.CUDAGraph()
        if not self._alive:  # torch frees a pool with its last graph, and cannot use it again
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # Other threads may use the device meanwhile, for checkpoints or the exchange.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                made = work()
        except Exception as error:
            reason = _first_cause(error)
        else:
            self._alive.add(graph)
            return graph, made
        # Outside of `except`: there the error would keep the tensors of the failed capture alive.
        del graph
        self._leave_capture()
        raise CaptureFailed(reason)

    def timed(self, work: Callable[[], Made]) -> tuple[Made, Seconds]:
        """Run the work and time it; waits for the device before and after."""
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


def graphs_for(config: RunConfig, world: World) -> CudaGraphs | str:
    """The device's graphs, or the reason why nothing can be captured."""
    if config.runtime.capture == "off":
        return 'capture="off"'
    if world.device.type != "cuda":
        obstacle = f"{world.device} is not a CUDA device"
    elif config.precision == "fp16":
        obstacle = "with fp16 the host decides after backward whether a step is taken"
    elif isinstance(config.strategy, Averaging) and world.size > 1:
        obstacle = "Averaging exchanges weights, not gradients"
    elif isinstance(config.strategy, Gradients) and world.size > 1:
        obstacle = "compressed gradients are encoded with new random numbers in every step"
    else:
        return CudaGraphs(world.device)
    if config.runtime.capture == "on":
        raise ValueError(f'capture="on", but nothing can be captured: {obstacle}; choose capture="auto" or "off"')
    return obstacle


class GraphRecorder:
    """Records the graphs of a run. Reports each graph as an event, or the reason why there is none."""

    def __init__(self, graphs: CudaGraphs, device: torch.device, events: Events, *, is_forced: bool) -> None:
        self.device = device
        self.is_forced = is_forced
        self.timed = graphs.timed
        self._graphs = graphs
        self._events = events
        self._numbers: Counter[str] = Counter()
        self._outbox: Outbox | None = None

    def record(
        self, what: str, work: Callable[[], Made], side_effect: Callable[[Made], str | None]
    ) -> tuple[torch.cuda.CUDAGraph, Made]:
        """Record `work` and restore all random generators. CaptureFailed if a replay would not do the same.

        side_effect: from the result of `work`, names what its Python code did besides launching kernels; else None.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with host_randomness(), torch.random.fork_rng(devices):
            before = _host_generators()
            graph, made = self._graphs.record(work)
            reason = side_effect(made)
            if reason is None and _host_generators() != before:
                reason = "the function draws random numbers on the host"
        if reason is not None:
            raise CaptureFailed(reason)
        self._numbers[what] += 1
        self._events.emit("capture", what=what, number=self._numbers[what])
        return graph, made

    def before_replay(self, outbox: Outbox | None) -> None:
        """Save numbers of another graph in memory that this one may overwrite. outbox: of the graph to be replayed."""
        if self._outbox is not None and self._outbox is not outbox:
            self._outbox.copy_pending()
        self._outbox = outbox

    def report(self, what: str, reason: str) -> None:
        self._events.emit("capture", what=what, reason=reason)

    def give_up(self, what: str, reason: str) -> None:
        """Report that `what` is no longer captured; an error if the user requested it."""
        if self.is_forced:
            subject = "the optimizer" if what == "optimizer" else f"a {what}"
            raise MisuseError(
                f'capture="on", but {subject} cannot be captured: {reason}. Change that, or choose capture="auto"'
            )
        self.report(what, reason)


def _host_generators() -> tuple[object, ...]:
    """The states of the host's generators, comparable by ==."""
    numpy_state = [np.asarray(value).tobytes() for value in np.random.get_state(legacy=False)["state"].values()]
    return random.getstate(), numpy_state, torch.default_generator.get_state().numpy().tobytes()
