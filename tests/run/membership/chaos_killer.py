"""Disturbs the workers of a run at random moments, from a thread of the process that launched them."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from chaos_program import ERROR_SIGNAL, EVALUATING, EXIT_SIGNAL, HURRY_FILE, SAVE_EVERY, Board, Program

POLL_S = 0.001
HANG_S = 60.0  # without any progress
STACK_SIGNAL = signal.SIGUSR1  # see run/launching/worker.py

# How workers are lost, and how often among all; by the signal they get.
KINDS = {"SIGKILL": 8, "exit": 2, "CUDA error": 2, "SIGSTOP": 1}
SIGNALS = {"SIGKILL": signal.SIGKILL, "exit": EXIT_SIGNAL, "CUDA error": ERROR_SIGNAL, "SIGSTOP": signal.SIGSTOP}
MOMENTS = {"step": 6, "evaluation": 2, "save": 2, "join": 2, "at once": 1}


@dataclass(frozen=True)
class Order:
    """One disturbance: everything about it that is decided beforehand."""

    kind: str
    moment: str
    num_victims: int
    num_there: int  # workers to wait for
    num_steps: int  # to wait for
    delay_s: float
    draw: int  # of the victims

    @classmethod
    def draw_from(cls, source: random.Random, kinds: Iterable[str]) -> Order:
        known = list(kinds)
        return cls(
            source.choices(known, [KINDS[kind] for kind in known])[0],
            source.choices([*MOMENTS], [*MOMENTS.values()])[0],
            2 if source.random() < 0.15 else 1,
            source.randrange(2, 5),
            source.randrange(1, 6),
            source.uniform(0.0, 0.03),
            source.randrange(10**6),
        )


@dataclass
class Worker:
    """A process that has said it is there."""

    pid: int
    descriptor: int
    board: Board
    is_stopped: bool = False  # by us: it will never go on by itself

    def send(self, number: int) -> bool:
        """Whether it still ran."""
        try:
            signal.pidfd_send_signal(self.descriptor, number)
        except ProcessLookupError:
            return False
        return True

    @property
    def is_alive(self) -> bool:
        try:
            return self.send(0) and Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:  # it has just gone
            return False


@dataclass
class Killer:
    """Carries out orders one after the other until they are used up or the run ends.

    `num_workers`: of a whole world.
    """

    program: Program
    orders: list[Order]
    num_workers: int
    log: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    hang: str | None = None

    def __post_init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer")
        self._seen, self._seen_s = (0, 0), time.monotonic()

    def __enter__(self) -> Killer:
        self._seen_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for worker in self._workers.values():
            os.close(worker.descriptor)

    @property
    def num_kills(self) -> int:
        return sum(self.kills.values())

    def _run(self) -> None:
        while self.orders and not self._is_over.is_set():
            if self._carry_out(self.orders[0]):
                self.orders.pop(0)
        (Path(self.program.folder) / HURRY_FILE).touch()
        while not self._is_over.is_set():
            self._wait(lambda: False)

    def _carry_out(self, order: Order) -> bool:
        """Whether somebody was lost by it."""
        if not self._wait_for_moment(order):
            return False
        victims = self._choose(order)
        hit = [(worker, worker.board.read()) for worker in victims if worker.send(SIGNALS[order.kind])]
        for worker, (step, _, rank) in hit:
            worker.is_stopped = True
            self.kills[order.kind] += 1
            self.log.append(f"{order.kind} of pid {worker.pid}, rank {rank}, after step {step}, moment {order.moment}")
        # The signals for errors are carried out when the worker gets to it.
        return bool(hit) and self._wait(lambda: all(not w.is_alive for w, _ in hit) or order.kind == "SIGSTOP")

    def _wait_for_moment(self, order: Order) -> bool:
        if order.moment != "at once" and not self._wait(lambda: self._is_whole(order)):
            return False
        if order.moment == "step":
            first = self._step()
            if not self._wait(lambda: self._step() >= first + order.num_steps):
                return False
        elif order.moment == "save":
            if not self._wait(lambda: self._step() % SAVE_EVERY == 0):
                return False
        elif order.moment == "evaluation" and not self._wait(self._is_evaluating):
            return False
        return not self._is_over.wait(order.delay_s)

    def _is_whole(self, order: Order) -> bool:
        """Whether the workers are there that the moment asks for: all have done a step, or one has just come."""
        joined, alive = self._joined(), self._alive()
        if order.moment == "join" and self.kills:
            return bool(joined) and len(alive) > len(joined)
        return len(joined) >= order.num_there or len(joined) == self.num_workers

    def _choose(self, order: Order) -> list[Worker]:
        """Whom to lose; one that has completed a step is left, or there would be nobody to take over from."""
        chosen = random.Random(order.draw).sample(alive := self._alive(), min(order.num_victims, len(alive)))
        while chosen and not [worker for worker in self._joined() if worker not in chosen]:
            chosen.pop()
        return chosen

    def _alive(self) -> list[Worker]:
        for path in Path(self.program.folder).glob("board-*"):
            pid = int(path.name.partition("-")[2]) if path.suffix == "" else 0
            if pid and pid not in self._workers:
                with suppress(ProcessLookupError):
                    self._workers[pid] = Worker(pid, os.pidfd_open(pid), Board(path))
        return [worker for _, worker in sorted(self._workers.items()) if not worker.is_stopped and worker.is_alive]

    def _joined(self) -> list[Worker]:
        return [worker for worker in self._alive() if worker.board.read()[0] > 0]

    def _step(self) -> int:
        return max((worker.board.read()[0] for worker in self._workers.values()), default=0)

    def _is_evaluating(self) -> bool:
        return any(worker.board.read()[1] == EVALUATING for worker in self._alive())

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Whether the condition came true before the run ended."""
        while not condition():
            if self._is_over.wait(POLL_S):
                return False
            self._watch_progress()
        return True

    def _watch_progress(self) -> None:
        seen = (self._step(), len(self._workers))
        if seen != self._seen:
            self._seen, self._seen_s = seen, time.monotonic()
        elif time.monotonic() > self._seen_s + HANG_S and self.hang is None:
            self.hang = f"no progress in {HANG_S:.0f} s after step {seen[0]}\n{self._stacks()}"
            for worker in self._workers.values():
                worker.send(signal.SIGKILL)

    def _stacks(self) -> str:
        for worker in self._alive():
            worker.send(STACK_SIGNAL)
        time.sleep(1.0)
        texts = [
            f"{path.name}: {path.read_text(errors='replace')}"
            for path in Path(tempfile.gettempdir()).glob("paceline-launch-*/start-*/stack-*")
        ]
        return "\n".join(texts)
