"""Epochs and records: leaving an epoch, ending it early, and the record of the newest step on every worker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch.nn import functional
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl

X, Y = vectors(40)  # five steps of two micro-batches
LEFT = r"left the loop of an epoch before its end, by `break` or `return`.*call trainer.end_epoch\(\) in a hook"


def setup(**settings: Any) -> pl.Trainer:
    settings = {"data": (X, Y), "global_batch": 8, "micro_batch": 4, "timeout_s": 60, **settings}
    return pl.Trainer.setup(mlp, lambda p: torch.optim.SGD(p, lr=0.1), **grouped(**settings))


def take(trainer: pl.Trainer, batch: Any) -> pl.StepRecord | None:
    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
    return trainer.step()


def train(trainer: pl.Trainer, *epochs: int, **limits: int) -> list[int]:
    visited = []
    for epoch in trainer.epochs(*epochs, **limits):
        visited.append(epoch.number)
        for batch in epoch:
            take(trainer, batch)
    return visited


# Records.


@pytest.mark.parametrize("shares", [[1], [1, 0], [0, 1], [1, 1, 0], [0, 0, 1]], ids=str)
def test_every_worker_has_the_newest_record(pool: WorkerPool, shares: list[int]) -> None:
    def run() -> list[Any]:
        with setup(shares=shares) as trainer:
            seen: list[Any] = [trainer.last_record]
            trainer.every(1, lambda record: seen.append(trainer.last_record is record))
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    record = take(trainer, batch)
                    assert record is None or record is trainer.last_record
                record = trainer.last_record
                assert record is not None
                seen.append((record.step, record.epoch, record.loss, record.weight))
            return seen

    first, *others = pool.run(run, len(shares)) if len(shares) > 1 else [run()]
    assert all(other == first for other in others)
    assert first[0] is None
    assert [value for value in first if value is True] == [True] * 10
    assert [value[:2] for value in first if isinstance(value, tuple)] == [(5, 0), (10, 1)]


def test_the_loop_of_the_readme_prints_the_last_step_where_a_share_is_empty(pool: WorkerPool) -> None:
    text = Path(__file__).parents[2].joinpath("README.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "trainer.close()" in block)
    # Rank 0, which prints, has no share in the last step of each epoch, nor in any other.
    code = code.replace("micro_batch=8,", "micro_batch=8, balancing=pl.Balancing(shares=[0, 1]),")

    def run() -> str:
        import contextlib
        import io

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, {})
        return printed.getvalue()

    lines = pool.run(run, 2)[0].splitlines()
    assert [line.split()[-2:] for line in lines] == [["16", "steps"], ["32", "steps"], ["48", "steps"]]


# Leaving an epoch.


def test_break_after_a_step_begins_the_next_epoch() -> None:
    ended: list[int] = []
    with setup() as trainer:
        trainer.every_epoch(1, ended.append)
        for epoch in trainer.epochs(3):
            for batch in epoch:
                if take(trainer, batch):
                    break
        assert trainer.position == (3, 0, 3)
    assert ended == [0, 1, 2]


def test_break_inside_a_step_abandons_it_and_begins_the_next_epoch() -> None:
    with setup() as trainer:
        for epoch in trainer.epochs(3):
            for batch in epoch:
                take(trainer, batch)
                break
            assert torch.isfinite(torch.tensor(trainer.evaluate((X, Y), eval_loss)))
        assert trainer.position == (3, 0, 0)
        assert trainer.last_record is None
        assert all(p.grad is None for p in trainer.model.parameters())


def eval_loss(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def test_an_epoch_left_in_one_loop_is_over_in_the_next() -> None:
    with setup() as trainer:
        for batch in next(trainer.epochs(2)):
            take(trainer, batch)
            if trainer.position.step == 2:
                break
        assert trainer.position == (0, 4, 2)  # nobody has asked for the next epoch
        assert train(trainer, 2) == [1]
        assert trainer.position == (2, 0, 7)


def test_a_run_closed_after_break_is_saved_where_it_stood(tmp_path: Path) -> None:
    with setup(checkpoints=pl.Checkpoints(tmp_path)) as trainer:
        for batch in next(trainer.epochs(2)):
            if take(trainer, batch):
                break
    with setup(checkpoints=pl.Checkpoints(tmp_path)) as trainer:
        assert trainer.position == (0, 2, 1)
        assert train(trainer, 1) == [0]


def test_break_equals_an_epoch_that_a_hook_ends() -> None:
    def run(by_hook: bool) -> str:
        with setup(exact=True) as trainer:
            if by_hook:
                trainer.every(2, lambda _: trainer.end_epoch())
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    if (record := take(trainer, batch)) and record.step % 2 == 0 and not by_hook:
                        break
            return digest(trainer.model.state_dict(), [*trainer.position])

    assert run(True) == run(False)


def test_leaving_every_epoch_without_a_step_is_no_way_to_max_steps() -> None:
    with (
        setup() as trainer,
        pytest.raises(
            pl.errors.MisuseError, match=r"epoch 0 was left without a step, so max_steps=7 will never be reached"
        ),
    ):
        for epoch in trainer.epochs(max_steps=7):
            for _ in epoch:
                break


def leave(when: str, by: str) -> tuple[str, str]:
    """What the worker that leaves sees, and the others: an error's type and text."""
    try:
        with setup(shares=[1, 1, 0][: pl_world_size()], strategy=strategies()[by]) as trainer:
            for epoch in trainer.epochs(3):
                for batch in epoch:
                    is_first = trainer.world.rank == 0
                    if when == "open" and is_first and trainer.position.step == 1:
                        trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                        break
                    record = take(trainer, batch)
                    if record and record.step == 2 and (when == "all" or (when == "boundary" and is_first)):
                        break
    except pl.errors.MisuseError as error:
        return type(error).__name__, str(error)
    return "none", ""


def pl_world_size() -> int:
    import os

    return int(os.environ["WORLD_SIZE"])


def strategies() -> dict[str, Any]:
    return {"gradients": "gradients", "averaging": pl.Averaging(every=2)}


@pytest.mark.parametrize("by", ["gradients", "averaging"])
@pytest.mark.parametrize("when", ["open", "boundary", "all"])
@pytest.mark.parametrize("size", [2, 3])
def test_break_on_several_workers_is_refused_on_all(pool: WorkerPool, size: int, when: str, by: str) -> None:
    outcomes = pool.run(leave, size, when, by)
    assert {kind for kind, _ in outcomes} == {"MisuseError"}
    assert all(re.search(LEFT, text) for _, text in outcomes)
    who = "ranks 0, 1 left" if when == "all" else "rank 0 left"
    assert all(text.startswith(who) for _, text in outcomes)


@pytest.mark.parametrize("settings", [{"exact": True}, {"backend": "gloo"}, {"feed": "dispatched"}], ids=str)
def test_break_is_refused_however_workers_exchange(pool: WorkerPool, settings: dict[str, Any]) -> None:
    def run() -> None:
        with setup(shares=[1, 1, 0], **settings) as trainer:
            for batch in next(trainer.epochs(3)):
                if take(trainer, batch):
                    break

    with pytest.raises(WorkersFailed) as failed:
        pool.run(run, 3)
    assert {type(error) for error in failed.value.errors.values()} == {pl.errors.MisuseError}
    assert len(failed.value.errors) == 3


def test_a_save_that_is_due_does_not_keep_the_error_from_the_others(pool: WorkerPool, tmp_path: Path) -> None:
    def run() -> None:
        with setup(shares=[1, 0], checkpoints=pl.Checkpoints(tmp_path / "run", every_steps=1)) as trainer:
            checkpointer: Any = trainer.run.checkpointer
            save = checkpointer.save_due

            def save_due(loop: Any) -> None:
                tmp_path.joinpath("begun").touch()  # it may not be completed, since the run fails
                save(loop)

            checkpointer.save_due = save_due
            for batch in next(trainer.epochs(3)):
                if take(trainer, batch):
                    break

    with pytest.raises(WorkersFailed) as failed:
        pool.run(run, 2)
    assert {type(error) for error in failed.value.errors.values()} == {pl.errors.MisuseError}
    assert tmp_path.joinpath("begun").exists()


def test_several_workers_may_leave_an_epoch_after_its_last_step(pool: WorkerPool) -> None:
    def run() -> tuple[int, ...]:
        with setup(shares=[1, 0]) as trainer:
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    if (record := take(trainer, batch)) and record.step % 5 == 0:
                        break
            return trainer.position

    assert pool.run(run, 2) == [(2, 0, 10)] * 2


def test_an_error_in_the_loops_body_stays_itself(pool: WorkerPool) -> None:
    def run() -> None:
        with setup(shares=[1, 1]) as trainer:
            for batch in next(trainer.epochs(3)):
                take(trainer, batch)
                if trainer.world.rank == 1:
                    raise KeyError("mine")

    with pytest.raises(WorkersFailed) as failed:
        pool.run(run, 2)
    assert isinstance(failed.value.errors[1], KeyError)
    assert isinstance(failed.value.errors[0], pl.errors.CommunicationError)


# Ending an epoch early, on all workers.


@pytest.mark.parametrize(
    "settings", [{}, {"readers": 1}, {"feed": "dispatched"}, {"strategy": "averaging"}, {"data": "stream"}], ids=str
)
@pytest.mark.parametrize("shares", [[1], [1, 0], [1, 0, 2]], ids=str)
def test_a_hook_ends_an_epoch_on_all_workers(pool: WorkerPool, shares: list[int], settings: dict[str, Any]) -> None:
    def run() -> tuple[Any, ...]:
        own = dict(settings)
        if own.get("strategy") == "averaging":
            own["strategy"] = pl.Averaging(every=2)
        if own.get("data") == "stream":
            own["data"] = Stream()
        with setup(shares=shares, **own) as trainer:
            ended: list[int] = []
            trainer.every_epoch(1, ended.append)
            trainer.every(1, lambda record: trainer.end_epoch() if record.step == 2 or record.step >= 7 else None)
            assert train(trainer, 4) == [0, 1, 2, 3]
            return trainer.position, ended, digest(trainer.model.state_dict())

    outcomes = pool.run(run, len(shares)) if len(shares) > 1 else [run()]
    assert outcomes == [outcomes[0]] * len(shares)
    # Of five steps each: after two, after five (that step ends the epoch anyway), after one, after one.
    assert outcomes[0][:2] == ((4, 0, 9), [0, 1, 2, 3])


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(list(zip(X, Y, strict=True)))


def test_ending_an_epoch_early_gives_the_same_bits_on_any_number_of_workers(pool: WorkerPool) -> None:
    def run(shares: list[int]) -> str:
        with setup(exact=True, shares=shares) as trainer:
            trainer.every(3, lambda _: trainer.end_epoch())
            train(trainer, 3)
            return digest(trainer.model.state_dict(), [*trainer.position])

    assert {*pool.run(run, 2, [1, 0]), *pool.run(run, 3, [0, 2, 1])} == {run([1])}


def test_an_epoch_ends_early_in_hooks_of_steps_only() -> None:
    message = r"end_epoch\(\) ends an epoch on all workers after the same step: call it in a hook of trainer.every"
    with setup() as trainer:
        with pytest.raises(pl.errors.MisuseError, match=message):
            trainer.end_epoch()
        trainer.every_epoch(1, lambda _: trainer.end_epoch())
        with pytest.raises(pl.errors.MisuseError, match=message):
            train(trainer, 1)
    with setup() as trainer:
        for batch in next(trainer.epochs(1)):
            take(trainer, batch)
            with pytest.raises(pl.errors.MisuseError, match=message):
                trainer.end_epoch()


# Iterating.


def test_an_epoch_can_be_iterated_once() -> None:
    with setup() as trainer:
        epochs = trainer.epochs(2)
        epoch = next(epochs)
        for batch in epoch:
            take(trainer, batch)
        with pytest.raises(
            pl.errors.MisuseError, match="epoch 0 was iterated before, and an epoch can be iterated once"
        ):
            iter(epoch)
        late = next(epochs)
        trainer.every_epoch(1, lambda _: None)
        train(trainer, 2)
        with pytest.raises(pl.errors.MisuseError, match="epoch 1 cannot be iterated: the run is in epoch 2"):
            iter(late)


def test_an_epoch_that_was_not_iterated_is_told() -> None:
    with (
        setup() as trainer,
        pytest.raises(pl.errors.MisuseError, match="epoch 0 was not iterated, so the next one cannot"),
    ):
        list(trainer.epochs(2))


def test_the_length_of_an_epoch() -> None:
    with setup(global_batch=16, data=(X[:37], Y[:37])) as trainer:
        epoch = next(trainer.epochs(1))
        assert len(epoch) == 10 == sum(1 for batch in epoch if take(trainer, batch) or True)
    with setup(data=Stream(), shuffle=False) as trainer, pytest.raises(TypeError, match=r"len\(epoch\) is not known"):
        len(next(trainer.epochs(1)))


# Steps that exact mode begins again.


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_loop_can_tell_that_a_step_comes_again(pool: WorkerPool, size: int) -> None:
    """The gradients of step 3 are 1e12 times those before: they leave the grid, and the step is taken twice."""

    def run() -> tuple[Any, ...]:
        seen: list[tuple[int, bool]] = []
        records: list[float] = []
        with setup(exact=True, shares=[1.0] * size, max_grad_norm=1.0) as trainer:
            trainer.every(1, lambda record: records.append(record.weight))
            for batch in next(trainer.epochs(1)):
                seen.append((trainer.position.step, trainer.is_repeating))
                factor = 1e12 if trainer.position.step == 3 else 1.0
                loss = functional.cross_entropy(trainer.model(batch.x), batch.y)
                trainer.backward(loss * factor)
                trainer.step()
            return seen, records

    seen, records = (pool.run(run, size) if size > 1 else [run()])[0]
    own_count = 2 if size == 1 else 1
    assert [is_repeating for step, is_repeating in seen if step == 3] == [False] * own_count + [True] * own_count
    assert [step for step, is_repeating in seen if not is_repeating] == sorted(own_count * [*range(5)])
    assert records == [8.0] * 5
