"""gather, reduce, broadcast and main_first: the same on any number of workers, and refused where they would hang."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch.nn import functional
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.run.evaluation import collect

X, Y = vectors(16)


def setup(**settings: Any) -> pl.Trainer:
    settings = {"data": (X, Y), "global_batch": 8, "micro_batch": 4, "quiet": True, **settings}
    return pl.Trainer.setup(mlp, lambda params: torch.optim.SGD(params, lr=0.1), **grouped(**settings))


def with_trainer(act: Callable[[pl.Trainer], Any]) -> Any:
    with setup() as trainer:
        return act(trainer)


def value_of(rank: int) -> dict[str, Any]:
    """Other shapes, lengths and types on every worker."""
    return {
        "tensor": torch.full((rank + 1, 2), float(rank)),
        "nested": [1, (2.5, None, True), {"text": "ä" * rank, 3: torch.tensor(rank)}],
        "kinds": (torch.tensor([True, False]), torch.ones(3, dtype=torch.bfloat16), torch.ones(2) * (1 + 2j)),
        "small": torch.ones(5).to(torch.float8_e4m3fn),
        "nothing": torch.empty(0, 4),
        "array": np.arange(rank + 1),
        "limits": (math.inf, -math.inf, 2**70),
    }


def gather_values() -> list[str]:
    with setup() as trainer:
        gathered = trainer.gather(value_of(trainer.world.rank))
    assert all(type(value["array"]) is np.ndarray for value in gathered)
    return [digest(value) for value in gathered]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gather_brings_every_workers_value_to_all(size: int, pool: WorkerPool) -> None:
    expected = [digest(value_of(rank)) for rank in range(size)]
    assert (pool.run(gather_values, size) if size > 1 else [gather_values()]) == [expected] * size


def test_long_messages_go_in_pieces(pool: WorkerPool) -> None:
    def in_pieces() -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collect, "PIECE_BYTES", 100)
            return gather_values()

    assert pool.run(in_pieces, 2) == [[digest(value_of(0)), digest(value_of(1))]] * 2


def test_what_is_gathered_is_nobodys_own() -> None:
    own = torch.zeros(3, requires_grad=True)
    with setup() as trainer:
        (gathered,) = trainer.gather({"own": own})
    assert not gathered["own"].requires_grad
    gathered["own"][0] = 1.0
    assert own.tolist() == [0.0, 0.0, 0.0]


def test_a_value_that_cannot_travel_is_an_error_on_all_workers(pool: WorkerPool) -> None:
    def gather_object() -> None:
        with_trainer(lambda trainer: trainer.gather({"model": trainer.model if trainer.world.rank == 1 else None}))

    with pytest.raises(WorkersFailed) as failed:
        pool.run(gather_object, 2)
    assert sorted(failed.value.errors) == [0, 1]
    for error in failed.value.errors.values():
        assert isinstance(error, TypeError)
        text = "the value of rank 1 cannot be sent to other workers: value['model'] is a torch.nn.modules.container.Seq"
        assert str(error).startswith(text)
    with pytest.raises(TypeError, match="the value of rank 0 cannot be sent"):
        with_trainer(lambda trainer: trainer.gather(trainer.model))


@pytest.mark.parametrize(
    ("how", "of_tensors", "of_numbers", "of_ints"),
    [
        ("mean", [1.5, 5.0], 1.25, 2.0),
        ("sum", [3.0, 10.0], 2.5, 4),
        ("max", [2.0, 10.0], 2.0, 3),
        ("min", [1.0, 0.0], 0.5, 1),
    ],
)
def test_reductions(how: Any, of_tensors: list[float], of_numbers: float, of_ints: float, pool: WorkerPool) -> None:
    def reduced() -> tuple[list[float], Any, Any]:
        def reduce(trainer: pl.Trainer) -> tuple[list[float], Any, Any]:
            first = trainer.is_main
            tensor = torch.tensor([1.0, 10.0] if first else [2.0, 0.0], requires_grad=True)
            return (
                trainer.reduce(tensor, how).tolist(),
                trainer.reduce(0.5 if first else np.float32(2.0), how),
                trainer.reduce(1 if first else 3, how),
            )

        return with_trainer(reduce)

    assert pool.run(reduced, 2) == [(of_tensors, of_numbers, of_ints)] * 2


def test_a_reduction_over_one_worker_is_the_value_itself() -> None:
    with setup() as trainer:
        for how in ("mean", "sum", "max", "min"):
            assert trainer.reduce(torch.tensor([[1.0, 2.0]]), how).tolist() == [[1.0, 2.0]]
            assert trainer.reduce(3.5, how) == 3.5
        assert trainer.reduce(torch.tensor([1, 2])).tolist() == [1.0, 2.0]
        assert math.isnan(trainer.reduce(math.nan, "max"))
        large = np.int64(2**60 + 1)
        assert trainer.reduce(large, "sum") == 2**60 + 1
        assert trainer.reduce(torch.tensor([1 + 2j])).tolist() == [1 + 2j]


def test_tensors_of_unequal_shape_are_not_reduced(pool: WorkerPool) -> None:
    def reduce() -> None:
        with_trainer(lambda trainer: trainer.reduce(torch.zeros(2 + trainer.world.rank), "sum"))

    with pytest.raises(WorkersFailed) as failed:
        pool.run(reduce, 2)
    text = "needs tensors of one shape and dtype, or numbers, on all workers, and got rank 0: (2,) of float32, rank 1: "
    assert all(text in str(error) for error in failed.value.errors.values())
    assert len(failed.value.errors) == 2


def test_bad_arguments_are_named() -> None:
    with setup() as trainer:
        with pytest.raises(ValueError, match="how='median' is unknown: choose 'mean', 'sum', 'max' or 'min'"):
            trainer.reduce(1.0, "median")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"reduce\(\) got a list: give a tensor or a number"):
            trainer.reduce([1.0])
        with pytest.raises(ValueError, match="source=1 must be >= 0 and <= 0"):
            trainer.broadcast(1, source=1)


@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_brings_one_workers_value_to_all(source: int, pool: WorkerPool) -> None:
    def broadcast() -> str:
        with setup() as trainer:
            # What the others give is not looked at: it may be something that could not travel.
            own = value_of(5) if trainer.world.rank == source else trainer.model
            return digest(trainer.broadcast(own, source=source))

    assert pool.run(broadcast, 2) == [digest(value_of(5))] * 2


def test_main_first_lets_rank_0_finish_before_the_others_begin(tmp_path: Path, pool: WorkerPool) -> None:
    cache = tmp_path / "cache"

    def fill_once() -> str:
        def fill(trainer: pl.Trainer) -> str:
            with trainer.main_first():
                if not cache.exists():
                    cache.mkdir()
                    (cache / "by").write_text(str(trainer.world.rank))
                return (cache / "by").read_text()

        return with_trainer(fill)

    assert pool.run(fill_once, 3) == ["0", "0", "0"]
    assert fill_once() == "0"


def test_an_error_of_rank_0_in_main_first_reaches_the_others(pool: WorkerPool) -> None:
    def fail() -> None:
        def failing(trainer: pl.Trainer) -> None:
            with trainer.main_first():
                assert trainer.is_main, "nobody else begins"
                raise FileNotFoundError("no such cache")

        with_trainer(failing)

    with pytest.raises(WorkersFailed) as failed:
        pool.run(fail, 2)
    errors = failed.value.errors
    assert isinstance(errors[0], FileNotFoundError)
    assert isinstance(errors[1], pl.PacelineError)
    assert str(errors[1]) == "on rank 0: FileNotFoundError: no such cache"
    with pytest.raises(FileNotFoundError):
        fail()


CALLS: dict[str, Callable[[pl.Trainer], Any]] = {
    "gather": lambda trainer: trainer.gather(1),
    "reduce": lambda trainer: trainer.reduce(1.0),
    "broadcast": lambda trainer: trainer.broadcast(1),
    "main_first": lambda trainer: trainer.main_first().__enter__(),
    "predict": lambda trainer: trainer.predict(X),
    "export": lambda trainer: trainer.export("weights.safetensors"),
    "save_pretrained": lambda trainer: trainer.save_pretrained("folder"),
    "save": lambda trainer: trainer.save(),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_all_workers_do_together_is_refused_inside_the_loop(name: str) -> None:
    with setup() as trainer:
        for _ in next(iter(trainer.epochs(1))):
            with pytest.raises(
                pl.errors.MisuseError, match=rf"{name}\(\) was called inside an epoch's loop, which workers"
            ):
                CALLS[name](trainer)
            break


def test_hooks_may_gather(pool: WorkerPool) -> None:
    def gather_in_hooks() -> list[Any]:
        gathered: list[Any] = []
        with setup() as trainer:
            trainer.every(1, lambda record: gathered.append(trainer.gather((record.step, trainer.world.rank))))
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    trainer.step()
            gathered.append(trainer.reduce(trainer.world.rank, "sum"))
        return gathered

    assert pool.run(gather_in_hooks, 2) == [[[(1, 0), (1, 1)], [(2, 0), (2, 1)], 1]] * 2
