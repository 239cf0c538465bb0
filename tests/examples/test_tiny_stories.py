"""The sample project: every config trains, and those that should end with the same weights do.

Configs run in small: fewer stories, a narrower model, few steps, all of them said on the command line's terms.
"""

from __future__ import annotations

import importlib
import io
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import preloaded_python
import pyarrow as pa
import pyarrow.parquet
import pytest
from models import digest
from safetensors.torch import load_file
from worker_pool import WorkerPool

from paceline.checkpoint.folders import complete_steps
from paceline.cli.config import load_project, schema
from paceline.cli.train.worker import RunRequest, train
from paceline.observe.metrics import read_curves
from paceline.observe.run_files import RunFiles, prepare_run_folder
from paceline.run.monitor import Monitor

Load: TypeAlias = Callable[[str], ModuleType]

PROJECT = Path(__file__).parents[2] / "examples" / "tiny_stories"
CONFIGS = sorted(path.stem for path in PROJECT.glob("*.yaml"))
# Those that need what another has saved.
RESUMING = [name for name in CONFIGS if name.endswith("resume")]

SMALL = (
    *("variables.stories=140", "variables.held_out=20", "variables.width=16"),
    *("trainer.warmup_steps=1", "trainer.schedule_steps=10"),
)
BRIEF = (*SMALL, "trainer.epochs=1")
EXACT = (*SMALL, "trainer.epochs=2", "trainer.exact=true")
WORKERS = {"single_process": 1, "project": 1, "4workers": 4, "4cpu": 4}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the project writes its Arrow files, here and in the workers."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("PACELINE_CACHE", str(folder))
        yield folder


@contextmanager
def own_modules() -> Iterator[None]:
    """Modules of the project are importable, and forgotten after: other projects have modules of the same names."""
    path = list(sys.path)
    sys.path.insert(0, str(PROJECT))
    try:
        yield
    finally:
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(PROJECT)):
                del sys.modules[name]


@pytest.fixture
def load() -> Iterator[Load]:
    """Imports a module of the project."""
    with own_modules():
        yield importlib.import_module


def work(name: str, overrides: tuple[str, ...], root: Path, workers: int, cache: Path) -> str:
    """One worker's part of `paceline train`; what it would print."""
    with own_modules(), redirect_stdout(io.StringIO()) as output, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(cache))
        patch.setattr(Monitor, "_draw", lambda _: None)  # a third of a second for a picture that nobody looks at
        project = load_project(PROJECT / f"{name}.yaml", overrides).resolve(workers)
        train(RunRequest(project, RunFiles(root)))
    return output.getvalue()


class Trained:
    """A run that has ended: what it printed, and what is in its folder."""

    def __init__(self, output: str, files: RunFiles, checkpoints: Path) -> None:
        self.output = output
        self.metrics = read_curves(files.metrics)
        self.saved_steps = complete_steps(checkpoints)
        self._newest = checkpoints / f"step-{self.saved_steps[-1]:08d}"

    @property
    def weights(self) -> str:
        return digest(load_file(self._newest / "model.safetensors"))

    @property
    def losses(self) -> dict[int, float]:
        return dict(zip(*(column.tolist() for column in self.metrics.series("loss")), strict=True))


class Runs:
    def __init__(self, pool: WorkerPool, folder: Path, cache: Path) -> None:
        self._pool, self._folder, self._cache = pool, folder, cache
        self._count = 0

    def __call__(
        self, name: str, *overrides: str, workers: int | None = None, checkpoints: Path | None = None
    ) -> Trained:
        self._count += 1
        files = prepare_run_folder(self._folder / f"{name}-{self._count}")
        folder = files.checkpoints if checkpoints is None else checkpoints
        given = (*overrides, f"checkpoints.folder={folder}")
        workers = workers or WORKERS.get(name, 2)
        output, *_ = self._pool.run(work, workers, name, given, files.root, workers, self._cache)
        return Trained(output, files, folder)


@pytest.fixture
def runs(pool: WorkerPool, tmp_path: Path, cache: Path) -> Runs:
    return Runs(pool, tmp_path, cache)


# Workers, devices, global batch, micro-batch, who reads.
TABLE = {
    "single_process": (1, None, 32, 8, None),
    "2workers": (2, None, 64, 8, "dispatched"),
    "4workers": (4, None, 128, 8, "sharded"),
    "4cpu": (4, "cpu", 64, 16, "dispatched"),
    "sharded_dataset": (2, None, 64, 8, "sharded"),
    "iterable_dataset": (2, None, 64, 8, "dispatched"),
    "sharded_iterable_dataset": (2, None, 64, 8, "sharded"),
    "sharded_fast_dataset": (2, None, 64, 8, "sharded"),
    "grad_accum": (2, None, 32, 4, None),
    "checkpoint_train": (2, None, 64, 8, "dispatched"),
    "checkpoint_resume": (2, None, 64, 8, "dispatched"),
    "post_local_sgd": (2, None, 64, 8, "dispatched"),
    "post_local_sgd_checkpoint_train": (2, None, 64, 8, "dispatched"),
    "post_local_sgd_checkpoint_resume": (2, None, 64, 8, "dispatched"),
}


def test_each_config_is_what_its_name_says() -> None:
    assert {*TABLE, "project"} == set(CONFIGS)
    for name, expected in TABLE.items():
        settings = load_project(PROJECT / f"{name}.yaml").resolve(expected[0]).settings
        batches = settings.trainer.global_batch, settings.trainer.micro_batch
        assert (settings.workers, settings.devices, *batches, settings.trainer.feed) == expected, name


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in RESUMING])
def test_every_config_trains_evaluates_and_tells_a_story(name: str, runs: Runs) -> None:
    trained = runs(name, *BRIEF, *(["checkpoints.final=true"] if name.endswith("checkpoint_train") else []))
    settings = load_project(PROJECT / f"{name}.yaml", BRIEF).resolve(WORKERS.get(name, 2)).settings
    num_steps = math.ceil(140 / settings.trainer.global_batch)
    assert trained.saved_steps == [num_steps]
    assert trained.metrics.last_step == num_steps
    assert all(math.isfinite(loss) for loss in trained.losses.values())
    (evaluation,) = trained.metrics.series("eval/loss")[1]
    assert "A story by the trained model:" in trained.output
    said = re.search(r"^evaluation loss +(\S+) nats per word", trained.output, re.MULTILINE)
    assert said is not None
    assert float(said[1]) == pytest.approx(evaluation, abs=1e-3)


def test_who_reads_and_from_where_is_no_part_of_the_result(runs: Runs) -> None:
    """Dispatched from memory; each worker its own, from memory, from an HF data set, from Arrow; one worker alone."""
    expected = runs("2workers", *EXACT).weights
    assert runs("2workers", *EXACT, "trainer.feed=sharded").weights == expected
    assert runs("sharded_dataset", *EXACT).weights == expected
    assert runs("sharded_fast_dataset", *EXACT).weights == expected
    assert runs("single_process", *EXACT, "trainer.global_batch=64").weights == expected
    assert runs("2workers", *EXACT, "trainer.seed=1").weights != expected


def test_a_stream_gives_the_same_weights_dispatched_and_sharded(runs: Runs) -> None:
    assert runs("iterable_dataset", *EXACT).weights == runs("sharded_iterable_dataset", *EXACT).weights


PAIR = (*SMALL, "trainer.schedule_steps=20", "checkpoints.every_steps=4")


def first_part(runs: Runs, folder: Path, prefix: str, *overrides: str) -> Trained:
    """The first of a pair of configs at a fiftieth of its length: 10 steps, saved at 4 and 8."""
    return runs(f"{prefix}checkpoint_train", *PAIR, *overrides, "trainer.max_steps=10", checkpoints=folder)


def second_part(runs: Runs, folder: Path, prefix: str, *overrides: str, workers: int) -> Trained:
    """The second, from step 8 on to 20."""
    from_step_8 = f"checkpoints.resume={folder / 'step-00000008'}"
    return runs(
        *(f"{prefix}checkpoint_resume", *PAIR, *overrides, "trainer.max_steps=20", from_step_8),
        workers=workers,
        checkpoints=folder,
    )


def uninterrupted(runs: Runs, prefix: str, *overrides: str) -> Trained:
    return runs(f"{prefix}checkpoint_resume", *PAIR, *overrides, "trainer.max_steps=20", "checkpoints.resume=auto")


def test_the_checkpoint_pair_ends_where_the_uninterrupted_run_does(runs: Runs, tmp_path: Path) -> None:
    exact, folder = "trainer.exact=true", tmp_path / "pair"
    first = first_part(runs, folder, "", exact)
    assert first.saved_steps == [4, 8]
    expected = uninterrupted(runs, "", exact).weights
    assert first.weights != expected
    for workers in (2, 1):
        place = shutil.copytree(folder, tmp_path / f"on-{workers}")
        second = second_part(runs, place, "", exact, workers=workers)
        assert "resumed after step 8" in second.output
        assert second.saved_steps == [4, 8, 12, 16, 20]
        assert second.weights == expected


def test_the_pair_of_post_local_sgd_ends_where_the_uninterrupted_run_does(runs: Runs, tmp_path: Path) -> None:
    # Averages after 4, 7, 10 and so on, and at every save: the one at step 8, from which it goes on, is such a one.
    settings = ("trainer.strategy.first_step=1", "trainer.strategy.every=3", "trainer.shares=equal")
    first_part(runs, tmp_path / "pair", "post_local_sgd_", *settings)
    second = second_part(runs, tmp_path / "pair", "post_local_sgd_", *settings, workers=2)
    assert second.weights == uninterrupted(runs, "post_local_sgd_", *settings).weights


@pytest.mark.parametrize("prefix", ["", "post_local_sgd_"])
def test_the_second_of_a_pair_begins_with_what_the_first_has_saved(prefix: str) -> None:
    first, second = (load_project(PROJECT / f"{prefix}checkpoint_{part}.yaml").settings for part in ("train", "resume"))
    assert (first.trainer.max_steps, second.trainer.max_steps) == (500, 1000)
    assert first.trainer.epochs is second.trainer.epochs is None
    assert first.trainer.schedule_steps == second.trainer.schedule_steps == 1000
    assert (first.checkpoints.every_steps, first.checkpoints.final) == (200, False)
    assert first.checkpoints.folder == second.checkpoints.folder == f"runs/{prefix or 'checkpoint_'}pair"
    assert second.checkpoints.resume == f"{first.checkpoints.folder}/step-00000400"
    assert first.trainer.strategy == second.trainer.strategy
    assert isinstance(first.trainer.strategy, schema.Averaging if prefix else schema.Gradients)


def test_a_streams_schedule_is_as_long_as_its_epochs() -> None:
    settings = load_project(PROJECT / "iterable_dataset.yaml").settings
    stories = settings.data.train.arguments["corpus"].arguments["stories"]
    assert settings.trainer.schedule_steps == settings.trainer.epochs * math.ceil(stories / 64)


@pytest.mark.timeout(200)
def test_the_command_trains_on_two_workers_and_the_model_learns(tmp_path: Path) -> None:
    sizes = ["variables.stories=640", "variables.held_out=64", "variables.width=64", "trainer.epochs=6"]
    done = preloaded_python.run(
        [sys.executable, "-m", "paceline", "train", str(PROJECT / "2workers.yaml"), *sizes, "trainer.warmup_steps=5"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    (root,) = (tmp_path / "runs").iterdir()
    assert re.search(r"^step +\d+/60  loss \d", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^ratio +0\.[1-5]\d, at most 0\.6", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^state +finished$", done.stdout, re.MULTILINE)
    plot = re.search(r"^plot +(\S+)$", done.stdout, re.MULTILINE)
    assert plot is not None
    assert (tmp_path / plot[1]).read_bytes().startswith(b"\x89PNG")
    assert plot[1].startswith(f"runs/{root.name}/")


STORIES = ["Once there was a “red” cat\n\nwho didn't sleep.", "A dog ran.", "The cat met a dog!"]


def test_stories_can_come_from_a_copy_of_tiny_stories(load: Load, tmp_path: Path) -> None:
    corpus = load("corpus")
    text = tmp_path / "stories.txt"
    text.write_text("\n<|endoftext|>\n".join(STORIES))
    tables = tmp_path / "tables"
    tables.mkdir()
    pa.parquet.write_table(pa.table({"text": STORIES[:2], "n": [1, 2]}), tables / "a.parquet")
    pa.parquet.write_table(pa.table({"text": STORIES[2:], "n": [3]}), tables / "b.parquet")
    for source in (text, tables):
        found = corpus.read_corpus(str(source), stories=2, held_out=1)
        decode = found.vocabulary.decode
        assert [decode(story) for story in found.training] == ["A dog ran.", "The cat met a dog!"]
        # Held-out words that were never trained on are unknown, and left out in what people read.
        assert [decode(story) for story in found.held_out] == ["A cat."]
        assert found.max_length == 14


def test_a_source_that_cannot_serve_is_named(load: Load, tmp_path: Path) -> None:
    corpus = load("corpus")
    with pytest.raises(FileNotFoundError, match=r"there is no /nowhere: name a text file of stories, or a folder of"):
        corpus.read_corpus("/nowhere")
    short = tmp_path / "short.txt"
    short.write_text("<|endoftext|>".join(STORIES))
    with pytest.raises(ValueError, match=r"short.txt has 3 stories, fewer than stories=3 and held_out=1"):
        corpus.read_corpus(str(short), stories=3, held_out=1)


def test_rare_words_and_long_stories_are_cut(load: Load, tmp_path: Path) -> None:
    corpus, words = load("corpus"), load("words")
    text = tmp_path / "stories.txt"
    text.write_text("a b c<|endoftext|>a a b d<|endoftext|>a b b a")
    found = corpus.read_corpus(str(text), stories=2, held_out=1, max_words=2, max_length=5)
    assert found.vocabulary.words[4:] == ["a", "b"]
    assert found.training == [[words.START, 4, 4, 5, words.END], [words.START, 4, 5, 5, words.END]]
    assert found.held_out == [[words.START, 4, 5, words.UNKNOWN, words.END]]


def test_every_word_counts_the_same_however_long_its_story(load: Load) -> None:
    batches, model, corpus = load("batches"), load("model"), load("corpus")
    small = corpus.read_corpus(stories=20, held_out=2)
    stories = sorted(small.training, key=len)
    short, long = stories[0], stories[-1]
    assert batches.num_words(batches.collate([short, long])) == len(short) + len(long) - 2
    story_model = model.build_model(small, width=16).eval()
    losses = [model.word_loss(story_model, batches.collate([story])).item() for story in (short, long)]
    words = [len(short) - 1, len(long) - 1]
    together = model.word_loss(story_model, batches.collate([short, {"tokens": long}])).item()
    assert together == pytest.approx(np.average(losses, weights=words), rel=1e-5)
    assert together != pytest.approx(np.mean(losses), rel=1e-5)


def test_arrow_files_are_written_once_and_whole(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    corpus, on_disk = load("corpus"), load("on_disk")
    small = corpus.read_corpus(stories=20, held_out=2)
    write = on_disk._write
    inside: list[Any] = []

    def overtaken(stories: list[list[int]], folder: Path) -> None:
        """As if another worker had begun later and finished first."""
        write(stories, folder)
        inside.append(sorted(folder.iterdir()))
        write(stories, folder)

    monkeypatch.setattr(on_disk, "_write", overtaken)
    files = on_disk.arrow_files(small, "training")
    assert inside == [files]
    assert [path.parent for path in (tmp_path / "tiny_stories").rglob("*.arrow")] == [files[0].parent] * 8
    monkeypatch.setattr(on_disk, "_write", None)  # a second time nothing is written
    assert on_disk.arrow_files(small, "training") == files
    rows = on_disk.hf_dataset(small, "training")
    assert [row["tokens"] for row in rows] == small.training
    batch = on_disk.arrow_source(small, "training").read(np.array([3, 19]), 0, 0)
    assert [[t for t in row if t] for row in batch.y.tolist()] == [small.training[i][1:] for i in (3, 19)]


def test_a_disk_that_cannot_be_written_is_an_error(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    corpus, on_disk = load("corpus"), load("on_disk")

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(on_disk, "_write_file", full)
    with pytest.raises(OSError, match="No space left"):
        on_disk.arrow_files(corpus.read_corpus(stories=20, held_out=2), "training")
    assert not list((tmp_path / "tiny_stories").iterdir())
