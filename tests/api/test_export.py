"""Weights for use elsewhere: a safetensors file, or what the model's own save_pretrained writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from grouping import grouped
from models import SmallTransformer, digest, mlp, tokens, vectors
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.run.saving import export

X, Y = vectors(16)


def setup(model: Any = mlp, **settings: Any) -> pl.Trainer:
    settings = {"data": (X, Y), "global_batch": 8, "micro_batch": 4, "quiet": True, **settings}
    return pl.Trainer.setup(model, lambda params: torch.optim.SGD(params, lr=0.1), **grouped(**settings))


def train(trainer: pl.Trainer) -> None:
    for epoch in trainer.epochs(1):
        for batch in epoch:
            trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
            trainer.step()


def digest_by_name(state: Mapping[str, torch.Tensor]) -> str:
    return digest(dict(sorted(state.items())))


def test_the_file_holds_the_models_state_and_can_be_started_from(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "model.safetensors"
    with setup(lambda: nn.Sequential(mlp(), nn.BatchNorm1d(4))) as trainer:
        train(trainer)
        assert trainer.export(path) is None
        expected = dict(trainer.model.state_dict())
    assert digest_by_name(load_file(path)) == digest_by_name(expected)
    assert list(path.parent.iterdir()) == [path], "nothing else is left there"
    with setup(lambda: nn.Sequential(mlp(), nn.BatchNorm1d(4)), init_from=path) as trainer:
        assert digest(dict(trainer.model.state_dict())) == digest(expected)


def test_tied_tensors_appear_under_each_of_their_names(tmp_path: Path) -> None:
    path = tmp_path / "tied.safetensors"
    with setup(SmallTransformer, data=tokens(8), micro_batch=8) as trainer:
        trainer.export(str(path))
        expected = dict(trainer.model.state_dict())
    loaded = load_file(path)
    assert loaded.keys() == expected.keys()
    assert torch.equal(loaded["head.weight"], loaded["embed.weight"])
    fresh = SmallTransformer()
    fresh.load_state_dict(loaded)
    assert digest(dict(fresh.state_dict())) == digest(expected)


def test_a_compiled_model_is_exported_under_its_own_names(tmp_path: Path) -> None:
    with setup(lambda: torch.compile(mlp(), backend="eager")) as trainer:
        assert type(trainer.unwrapped_model) is nn.Sequential
        assert trainer.unwrapped_model[0].weight is next(trainer.model.parameters())
        trainer.export(tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == mlp().state_dict().keys()
    with setup() as trainer:
        assert trainer.unwrapped_model is trainer.model


def test_it_is_there_when_any_worker_returns_and_an_old_one_is_replaced(tmp_path: Path, pool: WorkerPool) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("old")

    def run() -> tuple[str, str]:
        with setup() as trainer:
            train(trainer)
            trainer.export(path)
            return digest(dict(sorted(load_file(path).items()))), digest(
                dict(sorted(trainer.model.state_dict().items()))
            )

    results = pool.run(run, 2)
    assert len({text for pair in results for text in pair}) == 1


def test_averaged_weights_on_request(tmp_path: Path) -> None:
    with setup(ema=0.9) as trainer:
        train(trainer)
        with trainer.ema_weights():
            expected = digest(trainer.model.state_dict()["0.weight"])
        trainer.export(tmp_path / "own.safetensors")
        trainer.export(tmp_path / "averaged.safetensors", ema=True)
        own = digest(trainer.model.state_dict()["0.weight"])
    assert digest(load_file(tmp_path / "averaged.safetensors")["0.weight"]) == expected
    assert digest(load_file(tmp_path / "own.safetensors")["0.weight"]) == own != expected
    with setup() as trainer, pytest.raises(pl.errors.MisuseError, match="the run has no average of its weights"):
        trainer.export(tmp_path / "none.safetensors", ema=True)


def test_an_old_file_is_whole_until_the_new_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    with setup() as trainer:
        trainer.export(path)
        old = path.read_bytes()
        train(trainer)

        def fail_half_way(path: Path, _: Any) -> None:
            path.write_text("half")
            raise OSError("the disk is full")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="the disk is full"):
            patch.setattr(export, "write_tensors", fail_half_way)
            trainer.export(path)
        assert path.read_bytes() == old
        with path.open("rb") as reader:
            trainer.export(path)
            assert reader.read() == old, "who began to read goes on with the old one"
    assert path.read_bytes() != old
    assert list(tmp_path.iterdir()) == [path]


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        return


def test_what_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with setup() as trainer:
        with pytest.raises(
            ValueError, match=r"model.bin cannot be written: give the path of a file that ends in .safetensors"
        ):
            trainer.export(tmp_path / "model.bin")
        (tmp_path / "folder.safetensors").mkdir()
        with pytest.raises(ValueError, match=r"folder.safetensors cannot be written"):
            trainer.export(tmp_path / "folder.safetensors")
    with (
        setup(lambda: WithExtraState(12, 4)) as trainer,
        pytest.raises(TypeError, match=r"'_extra_state' is a dict, which a safetensors file cannot store"),
    ):
        trainer.export(tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.safetensors"]


def test_an_error_of_the_writer_reaches_all_workers(tmp_path: Path, pool: WorkerPool) -> None:
    (tmp_path / "file").write_text("in the way")

    def run() -> None:
        with setup() as trainer:
            trainer.export(tmp_path / "file" / "model.safetensors")

    with pytest.raises(WorkersFailed) as failed:
        pool.run(run, 2)
    assert isinstance(failed.value.errors[0], OSError)
    assert "on rank 0: " in str(failed.value.errors[1])


class Part:
    """What writes itself, as models and tokenizers of transformers do."""

    def __init__(self, name: str) -> None:
        self.name = name

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        Path(folder, f"{self.name}.json").write_text(json.dumps({"name": self.name}))
        if self.name == "broken":
            raise OSError("the disk is full")


class Pretrained(nn.Linear):
    def __init__(self, tokenizer: Part | None = None) -> None:
        super().__init__(12, 4)
        self.tokenizer = tokenizer

    def save_pretrained(self, folder: str) -> None:
        Part("model").save_pretrained(folder)
        Path(folder, "first.txt").write_text(str(self.weight[0, 0].item()))


def test_save_pretrained_is_the_models_own_and_its_tokenizers(tmp_path: Path, pool: WorkerPool) -> None:
    def run() -> list[str]:
        with setup(lambda: Pretrained(Part("tokenizer"))) as trainer:
            trainer.save_pretrained(tmp_path / "new" / "folder")
            return sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())

    assert pool.run(run, 2) == [["first.txt", "model.json", "tokenizer.json"]] * 2
    (tmp_path / "new" / "folder" / "notes.txt").write_text("mine")
    assert run() == ["first.txt", "model.json", "notes.txt", "tokenizer.json"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["folder"]


def test_save_pretrained_takes_averaged_weights_and_compiled_models(tmp_path: Path) -> None:
    with setup(lambda: torch.compile(Pretrained(), backend="eager"), ema=0.9) as trainer:
        train(trainer)
        trainer.save_pretrained(tmp_path / "own")
        trainer.save_pretrained(tmp_path / "averaged", ema=True)
        with trainer.ema_weights():
            expected = trainer.unwrapped_model.weight[0, 0].item()
    assert float((tmp_path / "averaged" / "first.txt").read_text()) == expected
    assert float((tmp_path / "own" / "first.txt").read_text()) != expected


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    with setup(lambda: Pretrained(Part("broken"))) as trainer, pytest.raises(OSError, match="the disk is full"):
        trainer.save_pretrained(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_save_pretrained_is_told_what_to_use(tmp_path: Path) -> None:
    with setup() as trainer, pytest.raises(pl.errors.MisuseError) as caught:
        trainer.save_pretrained(tmp_path / "folder")
    assert str(caught.value) == (
        "the model is a Sequential without save_pretrained: use trainer.export(path), which writes a safetensors file"
    )
