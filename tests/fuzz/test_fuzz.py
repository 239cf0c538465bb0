"""Training programs drawn at random, with Paceline on one to three workers, and in plain PyTorch.

Fifty of them in every test run, a thousand in `make soak`. A program that fails is printed; its number brings it back:
`PACELINE_FUZZ=17,23 pytest tests/fuzz`.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import fuzz_parts as parts
import fuzz_reference as reference
import pytest
import torch
from fuzz_programs import Program, Segment, draw
from grouping import grouped
from models import digest
from worker_pool import WorkerPool

import paceline as pl

NUMBERS = [int(n) for n in os.environ.get("PACELINE_FUZZ", "").split(",") if n] or list(range(50))
SOAK, BLOCK = 1000, 20


def clones(state: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items()}


def run(text: str, shares: Any, until: int | None, folder: str) -> dict[str, Any]:
    """A program's text, on a worker."""
    names: dict[str, Any] = {
        **vars(parts), "pl": pl, "grouped": grouped, "clones": clones, "losses": [], "evaluations": [], "average": None,
        "shares": shares, "until": until, "folder": folder,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, "<program>", "exec"), names)
    outcome = {name: names[name] for name in ("weights", "losses", "evaluations", "average")}
    return {name: value for name, value in outcome.items() if value is not None}


def trained(program: Program, segments: tuple[Segment, ...], pool: WorkerPool, folder: Path) -> dict[str, Any]:
    """What the workers of the last segment end with, all alike, and the losses of all segments."""
    text, losses, evaluations = program.text(), [], []
    for segment in segments:
        outcomes = pool.run(run, segment.num_workers, text, segment.shares, segment.until, str(folder))
        if program.backward == "bare":  # the loss is not known
            for outcome in outcomes:
                outcome["losses"] = [0.0] * len(outcome["losses"])
        assert len({digest(outcome) for outcome in outcomes}) == 1, "workers ended with different weights"
        losses += outcomes[0]["losses"]
        evaluations += outcomes[0]["evaluations"]
    return {**outcomes[0], "losses": losses, "evaluations": evaluations}


def check(number: int, pool: WorkerPool, tmp_path: Path) -> None:
    program = draw(number)
    try:
        outcome = trained(program, program.segments, pool, tmp_path / f"{number}")
        expected = reference.train(program)
        if program.backward == "bare":
            expected["losses"] = [0.0] * len(expected["losses"])
        compare(outcome, expected, 1e-4 if program.has_batch_norm else 1e-5)
        if program.exact:
            alone = trained(program, (Segment(1, ((1,),), None),), pool, tmp_path / f"{number} alone")
            assert digest(outcome) == digest(alone), "exact mode depends on the workers"
    except Exception as error:
        error.add_note(f"{program.text()}\n\nPACELINE_FUZZ={number} python -m pytest tests/fuzz -k chosen")
        raise


def compare(outcome: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    own, plain = reference.flat(outcome), reference.flat(expected)
    assert own.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(
            own[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("number", NUMBERS)
def test_chosen(number: int, pool: WorkerPool, tmp_path: Path) -> None:
    check(number, pool, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1200)  # of a block, on a machine that does something else as well
@pytest.mark.parametrize("first", range(0, SOAK, BLOCK))
def test_soak(first: int, pool: WorkerPool, tmp_path: Path) -> None:
    failures = []
    for number in range(first, first + BLOCK):
        try:
            check(number, pool, tmp_path)
        except Exception as error:
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {BLOCK} programs", failures)


def test_a_number_is_a_program() -> None:
    assert [draw(n) for n in range(20)] == [draw(n) for n in range(20)]
    assert len({draw(n).text() for n in range(200)}) == 200
