"""What a worker does when another one was lost: connect with those who are left, agree on the last step, go on."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import Any

import torch

from paceline.comm.messages import gather
from paceline.core.errors import CommunicationError, GenerationEnded
from paceline.core.events import Events
from paceline.core.message import decode, encode
from paceline.run.membership.communicator import ElasticCommunicator
from paceline.run.saving.checkpointer import Checkpointer
from paceline.run.saving.state import load_replica, replica_states
from paceline.run.step.ema import WeightAverage
from paceline.run.step.loop import Loop

logger = logging.getLogger("paceline")


class Rejoining:
    """Brings this worker into the newest generation, as often as needed.

    After an exchange that only some workers completed, those are one step ahead. The others take over their state.
    """

    def __init__(
        self,
        communicator: ElasticCommunicator,
        loop: Loop,
        checkpointer: Checkpointer,
        average: WeightAverage | None,
        events: Events,
    ) -> None:
        self._communicator = communicator
        self._loop = loop
        self._checkpointer = checkpointer
        self._average = average
        self._events = events
        self._entered = communicator.generation

    def arm(self) -> None:
        self._communicator.is_interruptible = True

    def disarm(self) -> None:
        self._communicator.is_interruptible = False

    def rejoin(self, error: BaseException) -> None:
        began_s, before = monotonic(), self._entered
        if isinstance(error, CommunicationError):  # of a connection beside the communicator
            with suppress(GenerationEnded):
                self._communicator.interrupt(error)
        while True:
            try:
                self._rejoin()
                break
            except GenerationEnded:
                continue  # another one was lost meanwhile
        generation = self._entered
        left = {member: before.rank_of(member) for member in before.members if member not in generation.members}
        reasons = [generation.left.get(member, f"member {member} left") for member in left]
        self._events.emit(
            "world",
            generation=generation.number,
            size=len(generation.members),
            left=[rank for rank in left.values() if rank is not None],
            reason="; ".join(reasons),
            seconds=round(monotonic() - began_s, 3),
        )

    def _rejoin(self) -> None:
        generation = self._communicator.rejoin()
        self._close_gap()
        self._loop.regroup(generation.previous_ranks(self._entered))
        self._entered = generation
        self._loop.reconnect()
        self._checkpointer.reconnect()

    def _close_gap(self) -> None:
        """Bring all workers to the step that the most advanced one has completed."""
        communicator, loop = self._communicator, self._loop
        own = {"step": loop.position.step, "hooks": loop.num_done}
        by_rank: list[dict[str, int]] = [json.loads(text) for text in gather(json.dumps(own), communicator)]
        newest = max(each["step"] for each in by_rank)
        ahead = [rank for rank, each in enumerate(by_rank) if each["step"] == newest]
        if len(ahead) < len(by_rank):
            content = _broadcast(self._state() if communicator.world.rank == ahead[0] else None, ahead[0], communicator)
            if own["step"] < newest:
                self._load(decode(content))
            loop.check_replicas()
        if own["step"] == newest:
            # A hook that communicates was interrupted for all: it runs again from its beginning.
            loop.repeat_hooks(min(by_rank[rank]["hooks"] for rank in ahead))

    def _state(self) -> dict[str, Any]:
        registered = {name: thing.state_dict() for name, thing in self._checkpointer.registered.items()}
        average = None if self._average is None else self._average.state_dict()
        return {
            "replica": replica_states(self._loop.replica),
            "loop": self._loop.handover(),
            "average": average,
            "registered": registered,
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        load_replica(self._loop.replica, state["replica"])
        self._loop.take_over(state["loop"])
        if self._average is not None:
            self._average.load_state_dict(state["average"])
        for name, thing in self._checkpointer.registered.items():
            thing.load_state_dict(state["registered"][name])


def _broadcast(value: Any, source: int, communicator: ElasticCommunicator) -> torch.Tensor:
    """The bytes of one worker's value, on every worker."""
    device = communicator.world.device
    own = encode(value, "state") if value is not None else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(own)], dtype=torch.int64, device=device)
    communicator.broadcast(length, source).wait()
    content = own.to(device) if value is not None else torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    communicator.broadcast(content, source).wait()
    return content.cpu()
