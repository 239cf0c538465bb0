"""State that is not the same on every worker is found, and every worker is told the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from thread_workers import thread_workers
from worker_pool import WorkerPool

from paceline.checkpoint.compare import Level, check_replication
from paceline.checkpoint.errors import ReplicationError
from paceline.comm import connect
from paceline.comm.base import Communicator
from paceline.comm.single import SingleCommunicator
from paceline.core.world import World


def optimizer_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        i: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(40, 50, generator=generator),
            "mask": torch.ones(3).bool(),
        }
        for i in range(3)
    }
    return {"state": tensors, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "half": torch.ones(4).bfloat16()}


def outcome(communicator: Communicator, state: Any, level: Level) -> str:
    try:
        check_replication("optimizer", state, level, communicator)
    except ReplicationError as error:
        return f"{error.ranks} {error}"
    return "same"


def outcomes(states: list[Any], level: Level) -> str:
    """What every worker is told; it must be the same."""
    members = thread_workers(len(states))
    with ThreadPoolExecutor(len(states)) as threads:
        told = set(threads.map(outcome, members, states, [level] * len(states)))
    (only,) = told
    return only


@pytest.mark.parametrize("level", ["none", "quick", "tensor", "full"])
def test_equal_states_pass(level: Level) -> None:
    assert outcomes([optimizer_state() for _ in range(3)], level) == "same"
    assert outcomes([{"nan": torch.tensor([float("nan")]), "x": float("nan")} for _ in range(2)], level) == "same"
    assert outcomes([{}, {}], level) == outcomes([torch.empty(0)] * 2, level) == "same"


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    state = optimizer_state()
    change(state)
    return state


def one_value(state: dict[str, Any]) -> None:
    state["state"][1]["exp_avg"][3, 7] += 0.5


def last_bit(state: dict[str, Any]) -> None:
    state["state"][2]["exp_avg"].view(torch.int32)[39, 49] ^= 1


def many_values(state: dict[str, Any]) -> None:
    for i in range(3):
        state["state"][i]["exp_avg"] += i + 1
    state["half"] *= 2


PREFIX = "optimizer must be the same on every worker, but differs from rank 0's: on rank 1 "
# the change on rank 1; what the levels tell, quick, tensor and full
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str, str]] = {
    "one value": (
        one_value,
        "same",
        "in tensor 'state.1.exp_avg'",
        "in tensor 'state.1.exp_avg' (by up to 0.5)",
    ),
    "the last bit": (
        last_bit,
        "in tensor 'state.2.exp_avg'",
        "in tensor 'state.2.exp_avg'",
        "in tensor 'state.2.exp_avg' (by up to ",
    ),
    "many": (
        many_values,
        "in tensor 'state.0.exp_avg', 'state.1.exp_avg', 'state.2.exp_avg' and 1 more",
        "in tensor 'state.0.exp_avg', 'state.1.exp_avg', 'state.2.exp_avg' and 1 more",
        "in tensor 'state.2.exp_avg' (by up to 3), 'state.1.exp_avg' (by up to 2), 'state.0.exp_avg' (by up to 1) and",
    ),
    "a counter": (
        lambda s: s["state"][0]["step"].add_(1),
        *["in tensor 'state.0.step'"] * 3,
    ),
    "a plain value": (
        lambda s: s["param_groups"][0].update(lr=0.2),
        *["optimizer['param_groups'][0]['lr'] is 0.2, on rank 0 optimizer['param_groups'][0]['lr'] is 0.1"] * 3,
    ),
    "a type": (
        lambda s: s["param_groups"][0].update(lr=1),
        *["optimizer['param_groups'][0]['lr'] is 1, on rank 0 optimizer['param_groups'][0]['lr'] is 0.1"] * 3,
    ),
    "a shape": (
        lambda s: s.update(half=torch.ones(5).bfloat16()),
        *["tensor half is (5,) of torch.bfloat16, on rank 0 tensor half is (4,) of torch.bfloat16"] * 3,
    ),
    "a dtype": (
        lambda s: s.update(half=torch.ones(4).half()),
        *["tensor half is (4,) of torch.float16, on rank 0 tensor half is (4,) of torch.bfloat16"] * 3,
    ),
    "one tensor less": (
        lambda s: s.pop("half"),
        *["optimizer is a dict of 2, on rank 0 tensor half is (4,) of torch.bfloat16"] * 3,
    ),
    "one value more": (
        lambda s: s.update(more=1),
        *["optimizer is a dict of 4, on rank 0 optimizer is a dict of 3"] * 3,
    ),
    "a mask": (lambda s: s["state"][1]["mask"].zero_(), *["in tensor 'state.1.mask'"] * 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_is_named_on_every_worker(name: str) -> None:
    change, *expected = CHANGES[name]
    states = [optimizer_state(), changed(change), optimizer_state()]
    for level, text in zip(("quick", "tensor", "full"), expected, strict=True):
        told = outcomes(states, level)  # type: ignore[arg-type]
        assert told == text if text == "same" else told.startswith(f"(1,) {PREFIX}{text}"), level


def test_all_ranks_that_differ_are_named() -> None:
    told = outcomes([optimizer_state(), changed(one_value), optimizer_state(), changed(last_bit)], "tensor")
    assert told.startswith(f"(1, 3) {PREFIX}in tensor 'state.1.exp_avg'; on rank 3 in tensor 'state.2.exp_avg'")


def test_a_world_of_one_and_level_none_compare_nothing() -> None:
    check_replication("model", {"x": object()}, "full", SingleCommunicator(World()))
    assert outcomes([optimizer_state(), changed(one_value)], "none") == "same"


def compare_over_gloo() -> list[str]:
    communicator = connect(World.from_environment(), timeout_s=20)
    state = optimizer_state()
    told = [outcome(communicator, state, level) for level in ("quick", "tensor", "full")]
    if communicator.world.rank == 1:
        one_value(state)
    told += [outcome(communicator, state, level) for level in ("tensor", "full")]
    communicator.close()
    return told


def test_workers_in_processes_are_told_the_same(pool: WorkerPool) -> None:
    first, second = pool.run(compare_over_gloo, 2)
    assert first == second
    assert first[:3] == ["same"] * 3
    assert all(text.startswith(f"(1,) {PREFIX}in tensor 'state.1.exp_avg'") for text in first[3:])
