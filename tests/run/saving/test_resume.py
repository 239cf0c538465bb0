"""A run that was saved and resumed is the run that never stopped, bit for bit, on any number of workers."""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from resumable import NUM_STEPS, Average, build, run, setup, step
from safetensors.torch import load_file
from worker_pool import WorkerPool

import paceline as pl
from paceline.checkpoint.folders import complete_steps


@cache
def undisturbed() -> str:
    return run(None)


def test_the_undisturbed_run_depends_on_everything_it_is_compared_by() -> None:
    assert run(None) == undisturbed()
    assert run(None, seed=6) != undisturbed()


# In the middle of an epoch, right before its end, at its end, in the next one.
@pytest.mark.parametrize("stopped_after", [3, 10, 11, 15])
def test_one_worker_goes_on_where_it_was(tmp_path: Path, stopped_after: int) -> None:
    run(tmp_path, stopped_after)
    assert complete_steps(tmp_path) == [stopped_after]
    assert run(tmp_path) == undisturbed()


def test_saved_on_two_workers_and_resumed_on_one_and_three(tmp_path: Path, pool: WorkerPool) -> None:
    pool.run(run, 2, tmp_path / "a", 4)
    assert run(tmp_path / "a", 9) != undisturbed()
    # Saved by one, in the middle of an epoch; then by three, in the next epoch; the end by two.
    pool.run(run, 3, tmp_path / "a", 14)
    assert pool.run(run, 2, tmp_path / "a") == [undisturbed()] * 2
    assert complete_steps(tmp_path / "a") == [9, 14, NUM_STEPS]


def test_every_worker_of_a_resumed_world_has_the_run(tmp_path: Path, pool: WorkerPool) -> None:
    pool.run(run, 2, tmp_path, 7)
    assert pool.run(run, 3, tmp_path) == [undisturbed()] * 3


def test_a_run_saved_often_and_asynchronously_is_not_disturbed_by_it(tmp_path: Path) -> None:
    assert run(tmp_path, every_steps=1, keep_last=None) == undisturbed()
    assert complete_steps(tmp_path) == [*range(1, NUM_STEPS + 1)]
    # Each of them is a place to go on from.
    for folder in (tmp_path / "step-00000001", tmp_path / "step-00000017"):
        assert run(tmp_path / f"from-{folder.name}", resume=folder) == undisturbed()


def test_a_finished_run_is_not_run_again_and_one_with_more_epochs_goes_on(tmp_path: Path) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> object:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    longer = run(None, epochs=3, scheduler=schedule)
    first = run(tmp_path, scheduler=schedule)
    assert run(tmp_path, scheduler=schedule) == first
    assert run(tmp_path, epochs=3, scheduler=schedule) == longer


def test_exact_modes_grids_go_on_where_they_were(tmp_path: Path) -> None:
    def grids(trainer: pl.Trainer) -> dict[str, int]:
        return trainer.run.loop.exchange.state_dict()["grids"]

    with setup(tmp_path) as trainer:
        for batch in next(trainer.epochs(1)):
            step(trainer, batch)
        name, top = next(iter(grids(trainer).items()))
        trainer.run.loop.exchange._grids.load({name: top + 3})  # as after a burst of larger gradients
        saved = grids(trainer)
        assert saved[name] == top + 3
    with setup(tmp_path) as trainer:
        assert grids(trainer) == saved
    with setup(None) as trainer:
        assert grids(trainer) != saved


def test_weights_are_a_file_that_anyone_can_load(tmp_path: Path) -> None:
    run(tmp_path, 3)
    state = load_file(tmp_path / "step-00000003" / "model.safetensors")
    build().load_state_dict(state)


# What differs


def test_all_differences_are_listed_in_one_error(tmp_path: Path) -> None:
    run(tmp_path, 3)
    other = {"global_batch": 8, "seed": 6, "exact": False, "data": (torch.zeros(9, 3, 8, 8), torch.zeros(9).long())}
    with pytest.raises(pl.errors.CheckpointError) as caught:
        setup(tmp_path, **other, scheduler=None, model=lambda: build().append(torch.nn.Linear(5, 5)))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{tmp_path}/step-00000003 is of another run than this one:"
    [content] = [line for line in lines if line.startswith("  data (content): ")]
    lines.remove(content)
    assert lines[1:-1] == [
        "  global_batch: 16 in the checkpoint, 8 now",
        "  num_samples: 167 in the checkpoint, 9 now",
        "  data (columns): '0: float32 (167, 3, 8, 8), 1: int64 (167,)' in the checkpoint, "
        "'0: float32 (9, 3, 8, 8), 1: int64 (9,)' now",
        "  seed: 5 in the checkpoint, 6 now",
        "  exact: True in the checkpoint, False now",
        "  scheduler: 'CosineAnnealingLR' in the checkpoint, 'none' now",
        "  model: tensor '9.weight' is not in the checkpoint",
        "  model: tensor '9.bias' is not in the checkpoint",
        "  optimizer: its groups had [8] parameters in the checkpoint, [10] now",
    ]
    assert "allow=[...]" in lines[-1]


def test_threads_count_in_exact_mode_only(tmp_path: Path) -> None:
    run(tmp_path / "exact", 3)
    with pytest.raises(pl.errors.CheckpointError, match="threads: 1 in the checkpoint, 2 now"):
        setup(tmp_path / "exact", threads=2)
    run(tmp_path / "plain", 3, exact=False)
    setup(tmp_path / "plain", exact=False, threads=2).close()


def test_only_named_differences_pass_and_some_only_between_epochs(tmp_path: Path) -> None:
    run(tmp_path, 3)
    with setup(tmp_path, global_batch=8, allow=["global_batch"]) as trainer:
        assert trainer.position == pl.reports.Position(0, 12, 3)
    with pytest.raises(
        pl.errors.CheckpointError, match=r"seed: 5 in the checkpoint, 6 now \(may change between epochs only"
    ):
        setup(tmp_path, seed=6, allow=["seed"])
    with pytest.raises(ValueError, match=r"allow=\['gobal_batch'\]: unknown setting; choose from gl"):
        setup(tmp_path, allow=["gobal_batch"])


def test_a_model_of_other_shapes_is_named_tensor_by_tensor(tmp_path: Path) -> None:
    run(tmp_path, 3)
    wider = build()
    wider[-1] = torch.nn.Linear(128, 6)
    with pytest.raises(
        pl.errors.CheckpointError, match=re.escape("tensor '8.weight' is (5, 128) float32 in the checkpoint, ")
    ):
        setup(tmp_path, model=wider)


# The user's own state


def test_state_that_nobody_registered_is_an_error_unless_skipped(tmp_path: Path) -> None:
    run(tmp_path, 3)
    with (
        setup(tmp_path) as trainer,
        pytest.raises(pl.errors.CheckpointError, match="holds state of average, which was not reg"),
    ):
        next(iter(next(trainer.epochs(2))))
    with setup(tmp_path, skip=["average", "optimizer"]) as trainer:
        assert not trainer.optimizer.state
        next(iter(next(trainer.epochs(2))))


def test_state_that_was_not_saved_is_an_error_unless_skipped(tmp_path: Path) -> None:
    run(tmp_path, 3)
    with setup(tmp_path) as trainer, pytest.raises(pl.errors.CheckpointError, match="has no component 'new'"):
        trainer.register("new", Average(trainer.model))
    with setup(tmp_path, skip=["new", "average"]) as trainer:
        trainer.register("new", Average(trainer.model))
        assert trainer.state_components() == {
            **dict.fromkeys(["model", "optimizer", "scheduler", "engine"], "replicated"),
            **{"random": "per_rank", "new": "replicated"},
        }


def test_registering_is_checked(tmp_path: Path) -> None:
    with setup(tmp_path) as trainer:
        average = Average(trainer.model)
        with pytest.raises(ValueError, match="'model' is taken: choose another name than model, optimizer"):
            trainer.register("model", average)
        with pytest.raises(TypeError, match="'x' is a int: it needs state_dict"):
            trainer.register("x", 3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"component name 'a/b' cannot be a file name"):
            trainer.register("a/b", average)
        with pytest.raises(ValueError, match="pattern='mine': choose one of replicated, global, per_rank, per_node"):
            trainer.register("x", average, "mine")
        for batch in next(trainer.epochs(1)):
            with pytest.raises(pl.errors.MisuseError, match=r"register\('x'\) was called after the first step"):
                trainer.register("x", average)
            step(trainer, batch)
            break


def test_a_value_that_needs_pickle_is_named_when_it_is_saved(tmp_path: Path) -> None:
    class Bad:
        def state_dict(self) -> object:
            return {"best": {"when": object()}}

        def load_state_dict(self, state: object) -> None: ...

    trainer = setup(tmp_path)
    trainer.register("bad", Bad())
    with pytest.raises(TypeError, match=r"bad\['best'\]\['when'\] is a object, which cannot be stored without pickle"):
        trainer.save()
    trainer.run.cleanup.close()


def test_what_is_left_out_is_neither_saved_nor_expected(tmp_path: Path) -> None:
    run(tmp_path, 3, leave_out=["optimizer", "random"])
    names = {path.name for path in (tmp_path / "step-00000003").iterdir()}
    assert not any(name.startswith(("optimizer", "random")) for name in names)
    with setup(tmp_path, leave_out=["optimizer", "random"]) as trainer:
        assert trainer.position.step == 3
    with pytest.raises(
        pl.errors.CheckpointError, match=r"does not hold optimizer, random: set skip=\['optimizer', 'ra"
    ):
        setup(tmp_path)


# Where to begin


def test_a_folder_with_checkpoints_is_not_begun_anew(tmp_path: Path) -> None:
    run(tmp_path, 3)
    with pytest.raises(pl.errors.CheckpointError, match="has checkpoints up to step-00000003: set resume='auto'"):
        setup(tmp_path, resume=None)


def test_resume_true_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(pl.errors.CheckpointError, match="has no checkpoint to resume from: start with resume='auto'"):
        setup(tmp_path, resume=True)
    run(tmp_path, 3)
    setup(tmp_path, resume=True).close()


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 8, every_steps=3)
    file = tmp_path / "step-00000008" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert run(tmp_path) == undisturbed()
    assert "step-00000008 cannot be resumed from" in caplog.text
    assert (tmp_path / "set-aside-1" / "step-00000008").is_dir()
    with pytest.raises(pl.errors.CheckpointError, match="is damaged"):
        setup(tmp_path / "other", resume=tmp_path / "set-aside-1" / "step-00000008")


def resume_logged(root: Path) -> list[str]:
    """What this worker logs while it resumes."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("paceline")
    logger.addHandler(handler)
    try:
        setup(root).close()
    finally:
        logger.removeHandler(handler)
    return texts


def test_names_of_components_that_do_not_exist_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 3, leave_out=["optimiser"], skip=["old"])
    assert "leave_out=['optimiser'] has no effect: there is no such component; there are model, opt" in caplog.text
    assert "skip=" not in caplog.text  # nothing is resumed
    caplog.clear()
    run(tmp_path, 6, skip=["optimiser"])
    assert "skip=['optimiser'] has no effect: there is no such component; there are model, optimizer" in caplog.text
    caplog.clear()
    run(tmp_path, skip=["random"])
    assert "no effect" not in caplog.text


def test_several_workers_warn_once_of_a_damaged_checkpoint(tmp_path: Path, pool: WorkerPool) -> None:
    run(tmp_path, 8, every_steps=3)
    (tmp_path / "step-00000008" / "engine.json").write_bytes(b"{}")
    of_rank_0, of_rank_1 = pool.run(resume_logged, 2, tmp_path)
    assert sum("step-00000008 cannot be resumed from" in text for text in of_rank_0) == 1
    assert of_rank_1 == []


def test_going_back_moves_later_steps_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 9, every_steps=3, keep_last=None)
    assert complete_steps(tmp_path) == [3, 6, 9]
    run(tmp_path, 5, resume=tmp_path / "step-00000003", keep_last=None)
    assert complete_steps(tmp_path) == [3, 5]
    assert complete_steps(tmp_path / "set-aside-1") == [6, 9]
    assert f"were moved to {tmp_path}/set-aside-1" in caplog.text
    assert run(tmp_path) == undisturbed()


def test_going_on_from_another_folder_begins_a_course_of_its_own(tmp_path: Path) -> None:
    run(tmp_path / "a", 6, every_steps=3)
    run(tmp_path / "b", 9, seed=8)
    assert run(tmp_path / "b", resume=tmp_path / "a") == undisturbed()
    assert complete_steps(tmp_path / "b") == [NUM_STEPS]
    assert complete_steps(tmp_path / "b" / "set-aside-1") == [9]
    assert complete_steps(tmp_path / "a") == [3, 6]


def test_two_runs_cannot_have_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.run_folder.LOCK_TIMEOUT_S", 0.1)
    with setup(tmp_path), pytest.raises(pl.errors.CheckpointError, match="is in use by process"):
        setup(tmp_path)
    setup(tmp_path).close()


# Saving by hand


def test_save_in_a_hook_happens_after_the_users_own_work_of_that_step(tmp_path: Path) -> None:
    with setup(tmp_path, final=False) as trainer:
        average = Average(trainer.model)
        trainer.register("average", average)
        trainer.every(3, lambda record: trainer.save({"loss": record.loss}) if record.step == 3 else None)
        for epoch in trainer.epochs(1):
            for batch in epoch:
                if step(trainer, batch):
                    average.update()
    assert complete_steps(tmp_path) == [3]
    with setup(tmp_path) as trainer:
        average = Average(trainer.model)
        trainer.register("average", average)
        assert len(average.draws) == 2 * 3


def test_save_inside_the_loop_is_refused_and_between_epochs_is_done_at_once(tmp_path: Path) -> None:
    with setup(tmp_path) as trainer:
        for epoch in trainer.epochs(2):
            for batch in epoch:
                with pytest.raises(pl.errors.MisuseError, match=r"save\(\) was called inside an epoch's loop"):
                    trainer.save()
                step(trainer, batch)
            trainer.save({"score": 0.5 + epoch.number})
            assert trainer.position.step == 11 * (epoch.number + 1)
    assert complete_steps(tmp_path) == [11, 22]


def test_the_best_are_kept_by_the_users_metric(tmp_path: Path) -> None:
    metrics = iter([3, 2, 2.5, 2.2, 2.1])
    with setup(tmp_path, keep_last=1, keep_best=("loss", 2)) as trainer:
        trainer.every(2, lambda _: trainer.save({"loss": value}) if (value := next(metrics, None)) else None)
        for batch in next(trainer.epochs(1)):
            step(trainer, batch)
    assert complete_steps(tmp_path) == [4, 10, 11]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_steps": 0}, "every_steps=0 must be >= 1"),
        ({"every_epochs": 0.5}, "every_epochs=0.5 must be an int"),
        ({"every_minutes": 0}, "every_minutes=0 must be > 0"),
        ({"every_minutes": float("nan")}, "every_minutes=nan must be a finite number > 0"),
        ({"keep_last": 0}, "keep_last=0 must be >= 1"),
        ({"keep_every": 1.5}, "keep_every=1.5 must be an int"),
        ({"keep_best": ("loss", 0)}, r'keep_best=\(\'loss\', 0\): give \("metric", n\) or .*, n >= 1'),
        ({"keep_best": ("loss", True)}, "keep_best="),
        ({"keep_best": (None, 1)}, "keep_best="),
        ({"keep_best": ("loss",)}, "keep_best="),
        ({"keep_best": "loss"}, r'keep_best=\'loss\': give \("metric", n\)'),
        ({"keep_best": ("loss", 2, "least")}, 'keep_best=.*"max"'),
        ({"snapshot_every": 0}, "snapshot_every=0 must be >= 1"),
        ({"on_error": "ignore"}, "on_error='ignore' is unknown: choose 'stop' or 'continue'"),
        ({"on_error": None}, "on_error=None: give a value"),
        ({"num_writers": 0}, "num_writers=0 must be >= 1"),
        ({"num_writers": None}, "num_writers=None: give a value"),
        ({"check_replicas": "all"}, "check_replicas='all' is unknown: choose 'none', 'quick', 'tensor' or 'full'"),
        ({"check_replicas": {"model": "all"}}, r"check_replicas\['model'\]='all' is unknown: choose 'none', 'quick'"),
        ({"leave_out": ["model"]}, r"leave_out=\('model',\): choose other names, every checkpoint needs"),
        ({"leave_out": "optimizer"}, "leave_out='optimizer': give a list of names"),
        ({"skip": "optimizer"}, "skip='optimizer': give a list of names"),
        ({"disk": "local"}, "disk='local' is unknown: choose 'shared' or 'per node'"),
    ],
)
def test_bad_settings_are_named_before_anything_starts(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pl.Checkpoints("nowhere", **settings)  # type: ignore[arg-type]
    assert not Path("nowhere").exists()


def test_a_run_that_is_not_saved_says_what_saving_needs() -> None:
    with setup(None) as trainer:
        for call in (trainer.save, trainer.request_save):
            with pytest.raises(pl.errors.MisuseError, match=r"give checkpoints=Checkpoints\(folder\)"):
                call()


def test_an_error_leaves_no_last_checkpoint(tmp_path: Path) -> None:
    trainer = setup(tmp_path)
    with pytest.raises(ZeroDivisionError), trainer:
        for batch in next(trainer.epochs(1)):
            step(trainer, batch)
            if trainer.position.step == 2:
                _ = 1 / 0
    assert complete_steps(tmp_path) == []
