"""The workers of one host: finding them, waiting for them, and detecting lost ones."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

from paceline.comm.rendezvous import Rendezvous
from paceline.comm.shared_memory.segment import (
    NUM_RECORDS,
    OwnSegment,
    Segment,
    State,
    decode_record,
    encode_record,
    unsupported_reason,
)
from paceline.core.errors import CommunicationError, CommunicationTimeout, MisuseError
from paceline.core.timing import ActiveTimer
from paceline.core.world import World

# How long to spin before sleeping: several times the cost of a sleep and a wake-up, which in a virtual machine can
# exceed 100 us.
SPIN_S = 500e-6
# How often a sleeping worker checks whether its peers are alive.
NAP_S = 0.03
# A leader times out before the workers that wait for it, because its error says more.
LEADER_GRACE_S = 2.0


T = TypeVar("T")
IsReady: TypeAlias = Callable[[Segment], bool]


class SharedMemoryUnavailable(CommunicationError):
    """Some workers cannot share memory. Raised on all workers of the world, which then use another communicator."""


def missing_shared_memory(world: World) -> str | None:
    """Why this worker cannot share memory with others; None if it can."""
    if world.device.type != "cpu":
        return f"its tensors are on {world.device}, not on the CPU"
    return unsupported_reason()


def placement(world: World) -> dict[str, Any]:
    """What a worker offers in the rendezvous: see `find_hosts`."""
    reason = missing_shared_memory(world)
    return {"place": [world.local_rank, world.local_size, world.host], "reason": reason}


def find_hosts(placements: Sequence[Mapping[str, Any]]) -> list[range]:
    """The ranks of each host, from the placements of all workers by rank."""
    if reasons := [f"rank {rank}: {p['reason']}" for rank, p in enumerate(placements) if p["reason"] is not None]:
        raise SharedMemoryUnavailable("; ".join(reasons))
    places = [p["place"] for p in placements]
    hosts: list[range] = []
    while (first := hosts[-1].stop if hosts else 0) < len(places):
        _, local_size, host = places[first]
        ranks = range(first, min(first + local_size, len(places)))
        found = [places[rank] for rank in ranks]
        if found != [[local_rank, local_size, host] for local_rank in range(local_size)]:
            raise SharedMemoryUnavailable(
                f"ranks {list(ranks)} are not the workers of one host: their local ranks are "
                f"{[place[0] for place in found]} of {[place[1] for place in found]}, on {len({p[2] for p in found})} "
                "hosts"
            )
        hosts.append(ranks)
    if len(hosts) == len(places):
        raise SharedMemoryUnavailable(f"each of the {len(hosts)} hosts has one worker")
    return hosts


class LocalPeers:
    """The segments and processes of a host's workers. All workers of the world construct it together.

    `ranks`: the workers of this host; the first one is its leader. `segments` are listed in that order. Raises
    SharedMemoryUnavailable on all workers if one of them cannot share memory.
    """

    def __init__(self, world: World, timeout_s: float, ranks: range, rendezvous: Rendezvous) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.ranks = ranks
        self._pidfds: dict[int, int] = {}
        self._peers: dict[int, Segment] = {}
        self.segments: list[Segment] = []
        self._is_aborted = False
        # Spinning would take the cores from the network's threads, or from peers where workers outnumber the cores.
        can_spin = len(ranks) == world.size and len(os.sched_getaffinity(0)) >= len(ranks)
        self._spin_s = self._max_spin_s = SPIN_S if can_spin else 0.0
        own, reason = _attempt(OwnSegment)
        try:
            offers = _agree(rendezvous, own and [os.getpid(), own.fd, own.token], reason)
            assert own is not None, "else all workers have raised"
            self.own = own
            _, reason = _attempt(lambda: self._open(offers))
            _agree(rendezvous, None, reason)
        except BaseException:
            if own is not None:
                own.close()
            self._close_pidfds()
            raise

    def _open(self, offers: Sequence[Any]) -> None:
        for rank in self.ranks:
            if rank != self.world.rank:
                self._pidfds[rank] = os.pidfd_open(offers[rank][0])
                self._peers[rank] = Segment.open_peer(*offers[rank])
        self.segments = [self._peers.get(rank, self.own) for rank in self.ranks]

    @property
    def is_leader(self) -> bool:
        return self.world.rank == self.ranks[0]

    def check_usable(self) -> None:
        if not self.segments:
            raise MisuseError("the communicator is closed and accepts no exchange")
        if self.own.state != State.OPEN:
            raise CommunicationError(f"no exchange is possible after this error: {self.own.reason}")

    def wait_for_all(self, is_ready: IsReady, call: str, omission: str) -> None:
        """Return when `is_ready` is true of every peer. `omission`: what a peer has not done otherwise."""
        self._wait(self._peers, is_ready, call, omission, self.timeout_s)

    def wait_for_calls(
        self, number: int, call: str, has_called: IsReady | None = None, *, of: int | None = None
    ) -> None:
        """Return when `has_called` is true of every peer (default: it has made call `number`) and the calls agree.

        of: the only rank to wait for.
        """
        has_called = has_called or (lambda peer: peer.num_calls > number)
        peers = self._peers if of is None else {of: self._peers[of]}
        self._wait(peers, has_called, call, "did not call it", self.timeout_s)
        own = encode_record(call)
        for rank, peer in peers.items():
            theirs = peer.record(number)
            # A peer that is many calls ahead has overwritten the record.
            if theirs != own and peer.num_calls < number + NUM_RECORDS:
                raise CommunicationError(
                    f"exchange {number}: rank {self.world.rank} calls {call}, rank {rank} calls "
                    f"{decode_record(theirs)}: all workers must make the same calls in the same order"
                )

    def wait_for_leader(self, number: int, call: str) -> None:
        """Return when the host's leader has completed exchange `number` with the other hosts."""
        leader = {self.ranks[0]: self.segments[0]}
        omission = "did not complete it with the other hosts"
        self._wait(leader, lambda it: it.num_completed > number, call, omission, self.timeout_s + LEADER_GRACE_S)

    def _wait(
        self, segments: Mapping[int, Segment], is_ready: IsReady, call: str, omission: str, timeout_s: float
    ) -> None:
        waited: ActiveTimer | None = None
        for segment in segments.values():
            if is_ready(segment):
                continue
            started = perf_counter()
            while not is_ready(segment):
                if perf_counter() - started > self._spin_s:
                    # Read before `is_ready`: what a peer did before it was lost counts, and a later signal prevents
                    # the sleep.
                    signal, lost = segment.signal.value, self.lost()
                    if is_ready(segment):
                        break
                    if self._is_aborted:
                        raise CommunicationError(f"{call} was aborted on rank {self.world.rank}")
                    waited = waited or ActiveTimer()
                    is_late = waited.update() > timeout_s
                    if lost or is_late:
                        missing = [rank for rank, each in segments.items() if not is_ready(each)]
                        self._raise_if_lost(missing, lost, call)
                        if missing and is_late:
                            what = f"waited timeout_s={self.timeout_s:g} s in {call}"
                            raise CommunicationTimeout(f"rank {self.world.rank} {what}: ranks {missing} {omission}")
                    segment.signal.sleep(signal, NAP_S)
            # Spinning pays only if waits are short: not with other programs on the cores, nor under a CPU quota.
            was_short = perf_counter() - started < self._max_spin_s
            self._spin_s = min(2 * self._spin_s + 1e-6, self._max_spin_s) if was_short else self._spin_s / 2

    def _raise_if_lost(self, missing: Sequence[int], lost: Mapping[int, str], call: str) -> None:
        for rank in missing:
            if rank in lost:
                segment = self.segments[self.ranks.index(rank)]
                if segment.state == State.TIMED_OUT:
                    raise CommunicationTimeout(segment.reason)
                reason = f": {segment.reason}" if segment.reason else ""
                what = f"rank {rank} {lost[rank]} before {call}, which rank {self.world.rank} waits for"
                raise CommunicationError(what + reason)

    def lost(self) -> dict[int, str]:
        """The ranks that take part in no further exchange, and why."""
        poll = select.poll()
        for fd in self._pidfds.values():
            poll.register(fd, select.POLLIN)
        ended = dict(poll.poll(0))
        found = {rank: "died" for rank, fd in self._pidfds.items() if fd in ended}
        for rank, segment in zip(self.ranks, self.segments, strict=True):
            if segment.state != State.OPEN:
                found[rank] = "closed its communicator" if segment.state == State.CLOSED else "stopped after an error"
        return found

    def lost_before(self, number: int) -> str | None:
        """Which worker of this host will never make call `number`, and why."""
        lost = ((self.segments[self.ranks.index(rank)], f"rank {rank} {loss}") for rank, loss in self.lost().items())
        return next((text for segment, text in lost if segment.num_calls <= number), None)

    def fail(self, error: BaseException) -> None:
        """Tell the peers: after a failed exchange the content of the buffers is unknown."""
        state = State.TIMED_OUT if isinstance(error, CommunicationTimeout) else State.FAILED
        self.own.end(state, str(error) or type(error).__name__)

    def abort(self) -> None:
        """Fail the waits of this worker and of its peers. Called from any thread."""
        self._is_aborted = True
        self.fail(CommunicationError("the exchange was aborted"))

    def close(self) -> None:
        if self.segments:
            self.own.end(State.CLOSED)
            self.own.close()
            self._close_pidfds()
            # Segments are unmapped with the last tensor over them.
            self.segments, self._peers = [], {}
            del self.own

    def _close_pidfds(self) -> None:
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])


def _attempt(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result of a call, or the reason why it failed."""
    try:
        return call(), None
    except OSError as error:
        return None, str(error)


def _agree(rendezvous: Rendezvous, value: Any, reason: str | None) -> list[Any]:
    """All workers' values, if none of them has a reason against sharing memory."""
    answers = rendezvous.all_gather([value, reason])
    if reasons := [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(answers) if reason is not None]:
        raise SharedMemoryUnavailable("; ".join(reasons))
    return [value for value, _ in answers]
