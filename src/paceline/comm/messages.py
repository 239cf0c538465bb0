"""Bytes, texts and decisions between workers, for what is exchanged rarely: where to resume, which worker failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.core.errors import PacelineError


def from_rank_0(own: bytes, communicator: Communicator) -> bytes:
    """Rank 0's bytes, on every worker."""
    world = communicator.world
    if world.size == 1:
        return own
    length = torch.tensor([len(own)], dtype=torch.int64, device=world.device)
    communicator.broadcast(length, 0).wait()
    if not (size := int(length.item())):
        return b""
    content = torch.frombuffer(bytearray(own if world.is_main else size), dtype=torch.uint8).to(world.device)
    communicator.broadcast(content, 0).wait()
    return content.cpu().numpy().tobytes()


def gather(text: str, communicator: Communicator) -> list[str]:
    """Every worker's text, on every worker."""
    world = communicator.world
    own = text.encode(errors="surrogateescape")  # paths may not be UTF-8
    lengths = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    lengths[world.rank] = len(own)
    communicator.all_reduce(lengths).wait()
    if not (longest := int(lengths.max().item())):
        return [""] * world.size
    rows = torch.zeros(world.size, longest, dtype=torch.uint8)
    rows[world.rank, : len(own)] = torch.tensor(list(own), dtype=torch.uint8)
    rows = rows.to(world.device)
    communicator.all_reduce(rows).wait()
    contents = (bytes(row[:length].tolist()) for row, length in zip(rows, lengths.tolist(), strict=True))
    return [content.decode(errors="surrogateescape") for content in contents]


def decided_by_rank_0(decide: Callable[[], Any], communicator: Communicator) -> Any:
    """The JSON value that `decide` returns on rank 0. If it raises there, every worker raises."""
    answer: dict[str, Any] = {}
    failure: Exception | None = None
    if communicator.world.rank == 0:
        try:
            answer["value"] = decide()
        except Exception as error:
            failure = error
            answer["error"] = f"{type(error).__name__}: {error}"
    answer = json.loads(from_rank_0(json.dumps(answer).encode(), communicator))
    if failure is not None:
        raise failure
    if "error" in answer:
        raise PacelineError(f"on rank 0: {answer['error']}")
    return answer["value"]


def wait_for_all(communicator: Communicator) -> None:
    """A barrier: return when every worker has called it."""
    gather("", communicator)
