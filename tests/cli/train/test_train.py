"""`paceline train`: from a project file to a run folder, and on from there."""

from __future__ import annotations

import io
import json
from contextlib import chdir, redirect_stdout
from pathlib import Path

import pytest
from models import digest
from safetensors.torch import load_file
from train_project import run_here, write_project
from worker_pool import WorkerPool

from paceline.checkpoint.folders import complete_steps
from paceline.cli.config import load_project
from paceline.cli.main import main
from paceline.cli.train.user_errors import ProjectError, UserFacingError
from paceline.cli.train.worker import RunRequest, train
from paceline.observe.json_lines import LineReader
from paceline.observe.metrics import read_curves
from paceline.observe.run_files import RunFiles, prepare_run_folder
from paceline.observe.timeline.timeline import Timeline


def weights(files: RunFiles) -> str:
    newest = files.checkpoints / f"step-{complete_steps(files.checkpoints)[-1]:08d}"
    return digest(load_file(newest / "model.safetensors"))


@pytest.mark.timeout(200)
def test_a_run_from_its_beginning_to_its_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_project(tmp_path / "project", "whole_life_parts")
    assert main(["train", str(config), "--workers", "2", "trainer.max_steps=12"]) == 0
    output = capfd.readouterr().out
    (files,) = (RunFiles(path) for path in Path("runs").iterdir())
    assert f"run {files.root}\n" in output
    assert "step 10  evaluation  loss" in output
    assert "276 parameters were trained" in output
    assert "state          finished" in output
    assert "steps          12 of 12" in output
    for path in (files.config, files.environment, files.metrics, files.events, files.report):
        assert path.is_file(), path
    assert (files.plots / "training.png").stat().st_size > 10_000
    assert "plotting" in {span.kind for span in Timeline.load(files.root).lanes[0].noted}
    assert sorted(path.name for path in files.ranks.iterdir()) == [
        f"rank-{rank}.{kind}" for rank in (0, 1) for kind in ("err", "json", "out")
    ]
    assert [json.loads((files.ranks / f"rank-{rank}.json").read_text())["step"] for rank in (0, 1)] == [12, 12]
    rows = [row for row in LineReader(files.metrics).read() if "loss" in row]
    assert [row["step"] for row in rows] == [1, 5, 10, 12]
    assert sum(rows[1]["shares"]) == 8  # four steps of two micro-batches
    for rank in (0, 1):
        parts = [rows[1]["waiting"][rank], *(lane[rank] for lane in rows[1]["lanes"].values())]
        assert sum(parts) == pytest.approx(1.0, abs=1e-3)
        assert (rows[1]["lanes"]["computing"][rank] > 0) == (rows[1]["shares"][rank] > 0)
    assert rows[1]["efficiency"] > 0 < min(rows[1]["speeds"])
    # On one worker, to the end of the epochs: what a run on one worker that never stopped has.
    assert (
        main(["-t", str(config), "train", "--resume", files.root.name, "--workers", "1", "trainer.max_steps=null"]) == 0
    )
    output = capfd.readouterr()
    assert "resumed after step 12, from step-00000012" in output.out
    assert "changed for this run: trainer.max_steps 12 -> null" in output.err
    assert weights(files) == weights(run_here(config, tmp_path / "alone"))
    assert "all 20 steps are done" not in output.out
    run_here(config, files.root, is_resumed=True)
    assert "all 20 steps are done: to train longer, raise trainer.epochs or trainer.max_steps" in capfd.readouterr().out
    assert json.loads(files.status.read_text())["num_starts"] == 2


def test_values_of_the_command_line_may_stand_anywhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = write_project(tmp_path, "anywhere_parts")
    shown = ""
    for words in (["FILE", "SEED", "--workers", "2", "EPOCHS"], ["SEED", "--workers", "2", "EPOCHS", "FILE"]):
        before, places = shown, {"FILE": str(config), "SEED": "trainer.seed=3", "EPOCHS": "trainer.epochs=5"}
        assert main(["config", "show", *(places.get(word, word) for word in words)]) == 0
        shown = capsys.readouterr().out
        assert before in ("", shown)
    assert "  seed: 3 " in shown
    assert "  epochs: 5 " in shown
    assert "# command line" in shown
    assert "# small.yaml:8" in shown


def test_a_dry_run_tries_everything_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_project(tmp_path / "project", "dry_parts")
    place = tmp_path / "elsewhere"
    place.mkdir()
    monkeypatch.chdir(place)
    assert main(["train", str(config), "--dry-run", "--workers", "3"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["model"] == "Sequential, 276 parameters"
    assert lines["data"] == "80 samples; evaluation 20 samples"
    assert lines["step"] == "8 samples in 2 micro-batches of 4; 10 steps per epoch; 20 steps in total"
    assert lines["workers"] == "3 on CPU; initial micro-batches per step: 1:1:0"
    assert lines["loss"].endswith("on the first micro-batch")
    assert lines["eval/accuracy"].endswith("on the first micro-batch")
    assert "ms per micro-batch; about" in lines["time"]
    assert not list(place.iterdir())


def test_a_dry_run_tries_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_project(tmp_path / "project", "dry_metrics_parts")
    for key in ("checkpoints.keep_best.metric", "trainer.early_stopping.metric"):
        assert main(["train", str(config), "--dry-run", f"{key}=f1"]) == 1
        assert f"{key}=f1 is not a metric of the evaluation: choose from loss, accuracy" in capsys.readouterr().err
    with pytest.raises(ValueError, match="in the loss"):
        main(["train", str(config), "--dry-run", "metrics=dry_metrics_parts:broken"])


def described(config: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert main(["train", str(config), "--dry-run", *arguments]) == 0
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


FORMS = """
def columns(): return dict(zip("xy", data()))
def sampled():
    data_set = torch.utils.data.TensorDataset(*data())
    return torch.utils.data.DataLoader(data_set, 4, sampler=torch.utils.data.SubsetRandomSampler(range(40)))
def batches():
    data_set = torch.utils.data.TensorDataset(*data())
    return torch.utils.data.DataLoader(data_set, batch_sampler=[[0, 1, 2], [3, 4], [5, 6]])
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(())
def column_loss(model, batch): return functional.cross_entropy(model(batch["x"]), batch["y"])
"""


WHOLE_BATCHES = ("trainer.batches_per_step=2", "trainer.global_batch=null", "trainer.micro_batch=null")


@pytest.mark.parametrize(
    ("overrides", "num_samples", "num_steps"),
    [
        (["loss=PARTS:column_loss", "data.train.factory=PARTS:columns"], "80 samples", 10),
        (["data.train.factory=PARTS:sampled"], "40 samples", 5),
        (
            ["data.train.factory=PARTS:batches", *WHOLE_BATCHES],
            "3 batches",
            2,
        ),
    ],
)
def test_samples_and_steps_are_counted_in_every_form_of_data(
    overrides: list[str],
    num_samples: str,
    num_steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = f"counted_parts_{num_steps}"
    config = write_project(tmp_path, parts)
    (tmp_path / f"{parts}.py").write_text((tmp_path / f"{parts}.py").read_text() + FORMS)
    monkeypatch.chdir(tmp_path)
    overrides = [each.replace("PARTS", parts) for each in overrides]
    lines = described(config, capsys, "data.evaluation=null", *overrides)
    assert lines["data"] == num_samples
    unit = "2 micro-batches, each a batch of the data" if "batches" in num_samples else "8 samples in 2 micro-batches"
    assert lines["step"].startswith(unit)
    assert lines["step"].endswith(f"; {num_steps} steps per epoch; {2 * num_steps} steps in total")
    # The schedule ends with the last step.
    schedule = ["trainer.schedule=linear", "trainer.log_every=1", "data.evaluation=null"]
    rates = [row["lr"] for row in LineReader(run_here(config, tmp_path / "run", *schedule, *overrides).metrics).read()]
    assert rates == pytest.approx([0.01 * (1 - step / (2 * num_steps)) for step in range(1, 2 * num_steps + 1)])


def test_data_that_cannot_be_evaluated_is_an_error_before_training(tmp_path: Path) -> None:
    config = write_project(tmp_path, "streamed_parts")
    (tmp_path / "streamed_parts.py").write_text((tmp_path / "streamed_parts.py").read_text() + FORMS)
    with pytest.raises(ProjectError, match=r"command line: data.evaluation: every sample .* a Stream is a stream"):
        run_here(config, tmp_path / "run", "data.evaluation={factory: 'streamed_parts:Stream'}")


def test_a_dry_run_looks_at_the_disk_of_the_checkpoints_and_needs_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_project(tmp_path / "project", "disk_parts")
    monkeypatch.chdir(tmp_path)
    sharded = ["--workers", "2", "trainer.shard=optimizer", "trainer.shard_by=[2, 1]"]
    lines = described(config, capsys, "checkpoints.folder=saved", *sharded)
    assert lines["disk"].endswith(f"free in {tmp_path / 'project'}")
    assert described(config, capsys, *sharded, "trainer.shard_by=auto", "trainer.redundancy=2")
    assert described(config, capsys)["disk"].endswith(f"free in {tmp_path}")


def test_evaluation_stops_a_run_that_gets_no_better(tmp_path: Path) -> None:
    config = write_project(tmp_path, "early_parts")
    files = run_here(
        config, tmp_path / "run", "metrics=early_parts:worse_and_worse", "trainer.eval_every=2", "trainer.epochs=50",
        "trainer.early_stopping={patience: 3}",
    )  # fmt: skip
    evaluations = [row["step"] for row in LineReader(files.metrics).read() if "eval" in row]
    assert evaluations == [2, 4, 6, 8]
    assert complete_steps(files.checkpoints) == [8]


def test_a_run_that_ends_between_two_evaluations_is_evaluated_at_its_end(tmp_path: Path) -> None:
    config = write_project(tmp_path, "final_parts")
    files = run_here(config, tmp_path / "run", "trainer.max_steps=13")
    assert [row["step"] for row in LineReader(files.metrics).read() if "eval" in row] == [10, 13]


def test_a_run_that_diverges_ends_with_what_to_do(tmp_path: Path) -> None:
    config = write_project(tmp_path, "diverging_parts")
    with pytest.raises(
        UserFacingError, match=r"diverges: .*trainer.max_loss_ratio=100 times its minimum, .*; lower the"
    ):
        run_here(config, tmp_path / "run", "loss=diverging_parts:exploding", "trainer.max_loss_ratio=100")


def test_the_best_checkpoints_stay(tmp_path: Path) -> None:
    config = write_project(tmp_path, "best_parts")
    files = run_here(
        config, tmp_path / "run", "trainer.eval_every=4", "checkpoints.keep_last=1",
        "checkpoints.keep_best={metric: accuracy, count: 1, mode: max}",
    )  # fmt: skip
    scores = {row["step"]: row["eval"]["accuracy"] for row in LineReader(files.metrics).read() if "eval" in row}
    steps = complete_steps(files.checkpoints)
    assert steps[-1] == 20
    assert max(scores.values()) in {scores[step] for step in steps}
    with pytest.raises(UserFacingError, match=r"checkpoints.keep_best.metric=speed is not a metric of the evaluation"):
        run_here(config, tmp_path / "other", "checkpoints.keep_best={metric: speed}")


def test_numbers_also_go_to_loggers(tmp_path: Path) -> None:
    config = write_project(tmp_path, "logged_parts")
    files = run_here(config, tmp_path / "run", "loggers=[csv]")
    header, *lines = (files.root / "metrics.csv").read_text().splitlines()
    assert header.startswith("step,epoch,loss,lr,samples_per_s")
    assert [line.partition(",")[0] for line in lines] == ["1", "5", "10", "10", "15", "20", "20"]


def test_a_quiet_run_shows_nothing_but_is_written_down(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_project(tmp_path, "quiet_parts")
    files = run_here(config, tmp_path / "run", quiet=True)
    assert capfd.readouterr() == ("", "")
    assert read_curves(files.metrics).last_step == 20


def test_loggers_keep_what_they_must_remember(tmp_path: Path) -> None:
    config = write_project(tmp_path, "remembering_parts")
    name = "remembering_parts:Remembering"
    one_logger = f"loggers=[{{factory: '{name}', arguments: {{path: {tmp_path}/log}}}}]"
    run_here(config, tmp_path / "run", one_logger, "trainer.max_steps=10")
    run_here(config, tmp_path / "run", one_logger, is_resumed=True)
    assert (tmp_path / "log").read_text().split() == ["begun", "gone-on-after-10"]


def test_a_resumed_run_says_only_once_what_happened_at_a_step(tmp_path: Path) -> None:
    config = write_project(tmp_path, "superseded_parts")
    whole = run_here(config, tmp_path / "whole")
    run_here(config, tmp_path / "cut", "checkpoints.every_steps=6", "trainer.max_steps=12", "checkpoints.final=false")
    files = run_here(config, tmp_path / "cut", "checkpoints.every_steps=6", is_resumed=True)
    assert weights(files) == weights(whole)
    of_both = [dict(zip(*read_curves(f.metrics).series("loss"), strict=True)) for f in (whole, files)]
    assert of_both[0][20] == of_both[1][20]
    assert sorted(of_both[1]) == [1, 5, 10, 15, 20]  # what was done after step 6 and lost is not there


def test_a_finished_run_that_is_started_again_keeps_its_report(tmp_path: Path) -> None:
    config = write_project(tmp_path, "reported_parts")
    before = run_here(config, tmp_path / "run").report.read_text()
    files = run_here(config, tmp_path / "run", is_resumed=True)
    assert files.report.read_text() == before


def work(config: Path, root: Path, overrides: tuple[str, ...]) -> str:
    """One worker's part of a run on two workers; its output."""
    with redirect_stdout(io.StringIO()) as output:
        train(RunRequest(load_project(config, overrides).resolve(2), RunFiles(root)))
    return output.getvalue()


def run_command(folder: Path) -> tuple[int, str]:
    """The command in one of torchrun's processes."""
    with chdir(folder), redirect_stdout(io.StringIO()) as output:
        return main(
            ["train", "small.yaml", "trainer.micro_batches_per_worker=1", "trainer.global_batch=null"]
        ), output.getvalue()


def test_processes_of_torchrun_train_one_run(tmp_path: Path, pool: WorkerPool) -> None:
    write_project(tmp_path, "torchrun_parts")
    (code, output), quiet = pool.run(run_command, 2, tmp_path)
    assert (code, quiet) == (0, (0, ""))
    assert "steps          20 of 20" in output
    (files,) = (RunFiles(path) for path in (tmp_path / "runs").iterdir())
    assert json.loads(files.status.read_text())["num_starts"] == 1
    assert load_project(files.config, folder=tmp_path).settings.trainer.global_batch == 8  # 2 x 4


def test_with_averaging_no_loss_is_logged_before_the_first_average(tmp_path: Path, pool: WorkerPool) -> None:
    config = write_project(tmp_path / "project", "averaged_parts")
    strategy = "trainer.strategy={kind: averaging, every: 4}"
    files = prepare_run_folder(tmp_path / "run")
    overrides = ("trainer.exact=false", "trainer.epochs=1", "loggers=[csv]", strategy)
    output, _ = pool.run(work, 2, config, files.root, overrides)
    assert "nan" not in output
    rows = [row for row in LineReader(files.metrics).read() if "lr" in row]
    assert ["loss" in row for row in rows] == [False, True, True]
    header, first, second, *_ = (line.split(",") for line in (files.root / "metrics.csv").read_text().splitlines())
    assert first[header.index("loss")] == ""
    assert float(second[header.index("loss")]) == pytest.approx(rows[1]["loss"], rel=1e-3)
