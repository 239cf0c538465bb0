"""Whatever the samples come from, a run resumed on another number of workers is the run that never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import images
from resumable import run
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from worker_pool import WorkerPool

X, Y = images(90)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


def weighted() -> Any:
    sampler = WeightedRandomSampler(torch.arange(1.0, 91.0), 85, generator=torch.Generator())
    return DataLoader(TensorDataset(X, Y), batch_size=4, sampler=sampler)


FORMS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "a sampler": (weighted, {"micro_batch": None}),
    "a sampler, dispatched": (weighted, {"micro_batch": None, "feed": "dispatched"}),
    "a stream": (Stream, {"num_shards": 4, "shuffle_buffer": 16}),
    "a stream, dispatched": (Stream, {"num_shards": 4, "shuffle_buffer": 16, "feed": "dispatched"}),
    "readers": (lambda: TensorDataset(X, Y), {"readers": 1}),
}


@pytest.mark.parametrize("form", FORMS)
def test_resumed_on_other_workers(tmp_path: Path, pool: WorkerPool, form: str) -> None:
    def part(until: int | None, folder: Path | None = tmp_path / "run") -> str:
        make_data, settings = FORMS[form]
        return run(folder, until, data=make_data(), **settings)

    undisturbed = part(None, None)
    pool.run(part, 2, 2)  # in the middle of the first epoch
    assert part(8) != undisturbed  # of the second
    assert pool.run(part, 3, None) == [undisturbed] * 3
