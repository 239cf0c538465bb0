"""Groups of settings check their values, and a misplaced keyword names its group."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from grouping import grouped
from torch import nn

import paceline as pl
from paceline.run.config import RunConfig
from paceline.run.settings import GROUPS, check_unused


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: pl.Runtime(timeout_s=math.inf), "timeout_s=inf must be a finite number > 0"),
        (lambda: pl.Runtime(timeout_s=math.nan), "timeout_s=nan must be a finite number > 0"),
        (lambda: pl.Runtime(timeout_s=0), "timeout_s=0 must be > 0"),
        (lambda: pl.Runtime(capture="always"), "capture='always' is unknown: choose 'auto', 'on' or 'off'"),  # type: ignore[arg-type]
        (lambda: pl.Runtime(threads=True), "threads=True must be an int"),
        (lambda: pl.Loading(readers="2"), "readers='2' must be an int"),  # type: ignore[arg-type]
        (lambda: pl.Loading(readers=1.5), "readers=1.5 must be an int"),  # type: ignore[arg-type]
        (lambda: pl.Loading(prefetch=0), "prefetch=0 must be >= 1"),
        (lambda: pl.Loading(feed="all"), "feed='all' is unknown: choose 'sharded' or 'dispatched'"),  # type: ignore[arg-type]
        (lambda: pl.Balancing(shares=(1, -1)), "shares=(1.0, -1.0) must be >= 0"),
        (
            lambda: pl.Balancing(shares="fair"),  # type: ignore[arg-type]
            "shares='fair' is unknown: choose 'measured', 'equal' or one number per worker",
        ),
        (lambda: pl.Balancing(speed_hints=(1, 0)), "speed_hints=(1.0, 0.0) must be > 0"),
        (lambda: pl.Batching(drop_last="no"), "drop_last='no' must be True or False"),  # type: ignore[arg-type]
        (lambda: pl.Balancing(shares=2), "shares=2 must be a list of numbers"),  # type: ignore[arg-type]
        (lambda: pl.Optimization(shard_by=0.5), "shard_by=0.5 must be a list of numbers"),  # type: ignore[arg-type]
        (lambda: pl.Batching(physical_batch=(8, 0)), "physical_batch=(8, 0) must be >= 1"),
        (lambda: pl.Optimization(ema=1.0), "ema=1.0 must be > 0 and < 1"),
    ],
)
def test_a_bad_value_is_refused_with_its_limits(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the text is compared below
        make()
    assert str(raised.value) == text


def test_groups_are_frozen_and_lists_become_tuples() -> None:
    assert pl.Batching(physical_batch=[8, 16]).physical_batch == (8, 16)  # type: ignore[arg-type]
    assert pl.Balancing(shares=[3, 1]).shares == (3.0, 1.0)  # type: ignore[arg-type]
    assert pl.Balancing(shares=np.array([3, 1])).shares == (3.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        pl.Loading().readers = 2  # type: ignore[misc]


def test_every_group_is_a_field_of_the_configuration_and_no_setting_is_declared_twice() -> None:
    names = [field.name for kind in GROUPS.values() if is_dataclass(kind) for field in fields(kind)]
    assert len(names) == len(set(names))
    assert {field.name for field in fields(RunConfig)} >= set(GROUPS)
    assert not {field.name for field in fields(RunConfig)} & set(names)


@pytest.mark.parametrize(
    ("keyword", "text"),
    [
        ({"readers": 2}, "readers is a setting of Loading: pass loading=pl.Loading(readers=2)"),
        ({"collate_fn": list}, "collate_fn is a setting of Loading: pass loading=pl.Loading(collate_fn=...)"),
        (
            {"resume": True},
            "resume is a setting of Checkpoints: pass checkpoints=pl.Checkpoints(folder, resume=True)",
        ),
        ({"reader": 2}, "unknown setting 'reader': did you mean readers of pl.Loading?"),
        ({"global_batches": 2}, "unknown setting 'global_batches': did you mean global_batch?"),
        ({"zzz": 2}, "unknown setting 'zzz'"),
    ],
)
def test_a_misplaced_keyword_names_its_group(keyword: dict[str, Any], text: str) -> None:
    for setup in (pl.Trainer.setup, pl.Trainer.setup_head):
        with pytest.raises(TypeError) as raised:
            setup(nn.Linear(2, 1), torch.optim.SGD, data=torch.zeros(4, 2), global_batch=2, **keyword)
        assert str(raised.value) == text
    builder = pl.Trainer.builder(lambda: nn.Linear(2, 1), torch.optim.SGD, lambda model, batch: model(batch))
    with pytest.raises(ValueError, match="settings") as refused:
        builder.settings(**keyword)
    assert str(refused.value).startswith(f"settings({next(iter(keyword))}=...): ")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"checkpoints": "runs/a"}, "checkpoints='runs/a' is a str: pass checkpoints=pl.Checkpoints(...)"),
        ({"loading": {"readers": 2}}, "loading={'readers': 2} is a dict: pass loading=pl.Loading(...)"),
        ({"runtime": None}, "runtime=None is a NoneType: pass runtime=pl.Runtime(...)"),
    ],
)
def test_what_is_no_group_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        pl.Trainer.setup(nn.Linear(1, 1), torch.optim.SGD, data=torch.zeros(4, 1), global_batch=4, **settings)
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        pl.Trainer.builder(lambda: nn.Linear(1, 1), torch.optim.SGD, lambda *_: None).settings(**settings)


def test_settings_that_an_entry_point_ignores_are_refused() -> None:
    check_unused(pl.Loading(readers=2), ("readers",), "prepare_training")
    with pytest.raises(
        ValueError, match="feed='dispatched' has no effect in prepare_training: leave it out of Loading"
    ):
        check_unused(pl.Loading(feed="dispatched"), ("readers",), "prepare_training")
    with pytest.raises(ValueError, match=r"ema=0\.9 has no effect in dp_train"):
        pl.dp_train(lambda: nn.Linear(2, 1), [torch.zeros(2)], optimization=pl.Optimization(ema=0.9))


def test_flat_keywords_of_tests_are_sorted_into_groups() -> None:
    checkpoints = pl.Checkpoints("runs/a")
    assert grouped(
        seed=1, readers=2, quiet=True, runtime=pl.Runtime(threads=1), checkpoints=checkpoints, skip=["x"]
    ) == {
        "seed": 1,
        "loading": pl.Loading(readers=2),
        "runtime": pl.Runtime(threads=1, quiet=True),
        "checkpoints": pl.Checkpoints("runs/a", skip=["x"]),
    }
