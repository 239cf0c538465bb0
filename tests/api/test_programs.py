"""What ordinary programs do is right or refused, on one, two and three workers. Nothing in between."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from models import digest
from programs import PROGRAMS, TABLES
from programs.program import SHARES, Expected, run, run_plain
from worker_pool import WorkerPool, WorkersFailed

# Plain programs run alone and on two or three workers, by turns; `make soak` has the other number.
SIZES = {"plain": ((1, 2), (1, 3)), "exact": ((1, 3),)}
LEFT_OUT = {(1, 2): (3,), (1, 3): (2,)}
TIMEOUT_S = 20.0  # for those who wait while another worker is refused


# Exactness is a matter of models and loops: what else programs differ in is tried in exact mode by `make soak`.
EXACT_IN_SOAK = ("data", "optimizers")


def cases() -> Iterator[Any]:
    turns = {mode: itertools.cycle(sizes) for mode, sizes in SIZES.items()}
    for table, programs in TABLES.items():
        for name, program in programs.items():
            for mode in program.modes:
                case, sizes = f"{table}-{name.replace(' ', '_')}-{mode}", next(turns[mode])
                is_soak = mode == "exact" and table in EXACT_IN_SOAK
                yield pytest.param(name, mode, sizes, id=case, marks=pytest.mark.soak if is_soak else ())
                if mode == "plain":
                    yield pytest.param(name, mode, LEFT_OUT[sizes], id=f"{case}-more", marks=pytest.mark.soak)


@cache
def in_plain_pytorch(name: str) -> Mapping[str, Any]:
    return run_plain(PROGRAMS[name])


def in_paceline(name: str, mode: str, size: int) -> Mapping[str, Any]:
    given = {"shares": SHARES[size], "exact": mode == "exact", "quiet": True, "timeout_s": TIMEOUT_S}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(PROGRAMS[name], given)


@pytest.mark.parametrize(("name", "mode", "sizes"), list(cases()))
def test_right_or_refused(name: str, mode: str, sizes: tuple[int, ...], pool: WorkerPool) -> None:
    outcomes: dict[int, Mapping[str, Any]] = {}
    for size in sizes:
        expected = PROGRAMS[name].expected(size)
        try:
            results = pool.run(in_paceline, size, name, mode, size)
        except WorkersFailed as failed:
            assert_refused(failed, expected, f"{size} workers")
            continue
        assert expected.is_equal, f"{size} workers: not refused; expected {expected.text!r}"
        for rank, result in enumerate(results):
            assert_equal(result, in_plain_pytorch(name), expected.tolerance, f"rank {rank} of {size}")
        outcomes[size] = results[0]
        assert len({digest(dict(result)) for result in results}) == 1, f"{size} workers ended with different weights"
    if mode == "exact":
        assert len({digest(dict(outcome)) for outcome in outcomes.values()}) <= 1, "exact mode depends on the workers"


def assert_refused(failed: WorkersFailed, expected: Expected, where: str) -> None:
    """By an error of the worker that did it; others may only have found it gone."""
    texts = [f"{type(error).__name__}: {error}" for error in failed.errors.values()]
    assert expected.text is not None, f"{where}: expected to be equal to plain PyTorch, and refused: {texts}"
    assert any(re.search(expected.text, text, re.IGNORECASE) for text in texts), (
        f"{where}: {expected.text!r} not in {texts}"
    )


def assert_equal(result: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float, where: str) -> None:
    assert result.keys() == expected.keys(), where
    for key, value in expected.items():
        torch.testing.assert_close(
            torch.as_tensor(result[key]), torch.as_tensor(value), rtol=tolerance, atol=tolerance, equal_nan=True,
            check_dtype=isinstance(value, torch.Tensor), msg=lambda text, key=key: f"{where}: {key}: {text}",
        )  # fmt: skip
