"""Models that compute their own loss: any object with compute_loss, and a real model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

X, Y = vectors(24)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def train(trainer: pl.Trainer, epochs: int = 1) -> list[float]:
    losses: list[float] = []
    trainer.every(1, lambda record: losses.append(record.loss))
    for epoch in trainer.epochs(epochs):
        for batch in epoch:
            trainer.backward(trainer.loss(batch))
            trainer.step()
    return losses


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def compute_loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self(batch.x), batch.y)

    def predict(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"class": self(batch.x).argmax(1)}


class Wrapper:
    """No module: an object around one."""

    def __init__(self) -> None:
        self.model = mlp()

    def parameters(self) -> Any:
        return dict(self.model.named_parameters())

    def compute_loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self.model(batch.x), batch.y)


SETTINGS: dict[str, Any] = {"data": (X, Y), "global_batch": 8, "micro_batch": 4, "exact": True, "quiet": True}


def by_hand() -> str:
    """The same run with the loss computed in the loop."""
    with pl.Trainer.setup(mlp, sgd, **grouped(**SETTINGS)) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return digest([p.detach() for p in trainer.model.parameters()])


@pytest.mark.parametrize("head", [Classifier, Wrapper, lambda: torch.compile(Classifier(), backend="eager")])
def test_a_head_is_trained_as_its_loss_in_the_loop_would(head: Any) -> None:
    with pl.Trainer.setup_head(head, sgd, **grouped(**SETTINGS)) as trainer:
        train(trainer)
        inside = trainer.unwrapped_model
        parameters = (inside.body if isinstance(inside, Classifier) else inside.model).parameters()
        assert digest([p.detach() for p in parameters]) == by_hand()


def test_predictions_are_the_heads_own() -> None:
    with pl.Trainer.setup_head(Classifier, sgd, **grouped(**SETTINGS)) as trainer:
        classes = trainer.predict((X, Y))["class"]
        with torch.no_grad():
            assert torch.equal(classes, trainer.model(X).argmax(1))
        assert trainer.predict((X, Y), lambda model, batch: model(batch.x)).shape == (24, 4)


def test_the_loss_is_computed_in_the_runs_precision() -> None:
    seen: list[torch.dtype] = []

    class Seeing(Classifier):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(x)
            seen.append(outputs.dtype)
            return outputs

    with pl.Trainer.setup_head(Seeing, sgd, **grouped(**{**SETTINGS, "precision": "bf16"})) as trainer:
        train(trainer)
        trainer.predict((X, Y))
    assert set(seen) == {torch.bfloat16}


def test_el_che_takes_heads_too() -> None:
    settings = {"data": (X, Y), "micro_batch": 4, "quiet": True}
    with pl.Trainer.setup_head_with(
        pl.compat.flodl.DdpConfig(max_anchor=2), Classifier, sgd, **grouped(**settings)
    ) as trainer:
        train(trainer)
        assert trainer.position.step == 3  # six micro-batches, two in each step
        assert "class" in trainer.predict((X, Y))


class NoLoss(nn.Linear):
    """Takes labels and gives no loss."""

    def __init__(self) -> None:
        super().__init__(12, 2)

    def forward(self, x: torch.Tensor, labels: Any = None) -> torch.Tensor:
        return super().forward(x)


def test_a_loss_that_is_not_there_is_named() -> None:
    with (
        pl.Trainer.setup(mlp, sgd, **grouped(**SETTINGS)) as trainer,
        pytest.raises(
            pl.errors.MisuseError, match=r"loss\(\) needs a model that computes its own loss: make the trainer with"
        ),
    ):
        trainer.loss((X, Y))
    with (
        pl.Trainer.setup_head(NoLoss, sgd, **grouped(**SETTINGS)) as trainer,
        pytest.raises(
            pl.errors.MisuseError, match=r"the head, a NoLoss, returned no loss: it needs compute_loss\(batch\), or"
        ),
    ):
        trainer.loss(X)


# A model of transformers

NUM_CLASSES = 3


def build_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
        num_labels=NUM_CLASSES,
    )
    return BertForSequenceClassification(config)


def sentences(count: int = 20) -> dict[str, torch.Tensor]:
    """Padded sequences of tokens, and a class that depends on the first."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 40, (count, 10), generator=generator)
    lengths = torch.randint(4, 11, (count,), generator=generator)
    mask = (torch.arange(10) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids[:, 0] % NUM_CLASSES}


def build_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=12, n_embd=8, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config)


def test_the_predictions_of_a_causal_model_have_no_cache() -> None:
    data = {"input_ids": sentences()["input_ids"]}
    with pl.Trainer.setup_head(build_gpt2, sgd, data=data, global_batch=8, runtime=pl.Runtime(quiet=True)) as trainer:
        outputs = trainer.predict(data)
    assert outputs.logits.shape == (20, 10, 40)
    assert outputs.past_key_values is None


def train_bert(head: Any = build_bert, **settings: Any) -> tuple[str, list[float], torch.Tensor]:
    settings = {"data": sentences(), "global_batch": 8, "micro_batch": 2, "exact": True, "quiet": True, **settings}
    with pl.Trainer.setup_head(
        head, lambda params: torch.optim.AdamW(params, lr=0.01), **grouped(**settings)
    ) as trainer:
        losses = train(trainer, 2)
        outputs = trainer.predict(sentences())
        assert outputs.loss is None
        return digest(trainer.model.state_dict()), losses, outputs.logits


def test_a_transformers_model_trains_the_same_on_one_worker_and_two(pool: WorkerPool) -> None:
    weights, losses, logits = train_bert()
    assert len(losses) == 6
    assert logits.shape == (20, NUM_CLASSES)
    for other_weights, other_losses, other_logits in pool.run(train_bert, 2):
        assert other_weights == weights
        assert other_losses == losses
        assert torch.equal(other_logits, logits)


def test_its_loss_is_the_one_it_computes_itself() -> None:
    with pl.Trainer.setup_head(
        build_bert, sgd, data=sentences(), global_batch=20, shuffle=False, exact=True, runtime=pl.Runtime(quiet=True)
    ) as trainer:
        trainer.model.eval()  # no dropout
        with torch.no_grad():
            expected = trainer.model(**sentences()).loss.item()
        assert train(trainer)[0] == pytest.approx(expected, rel=1e-5)


class Words:
    """A tokenizer, as far as saving goes."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "words.txt").write_text("one two three")


def test_it_is_saved_with_its_tokenizer_and_loaded_from_the_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    def with_tokenizer() -> nn.Module:
        model = build_bert()
        model.tokenizer = Words()
        return model

    folder = tmp_path / "bert"
    with pl.Trainer.setup_head(
        with_tokenizer,
        sgd,
        data=sentences(),
        global_batch=10,
        optimization=pl.Optimization(ema=0.9),
        runtime=pl.Runtime(quiet=True),
    ) as trainer:
        train(trainer)
        trainer.save_pretrained(folder)
        trainer.save_pretrained(tmp_path / "averaged", ema=True)
        trained = digest(trainer.model.state_dict())
        with trainer.ema_weights():
            averaged = digest(trainer.model.state_dict())
    assert (folder / "words.txt").read_text() == "one two three"
    assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    for place, expected in ((folder, trained), (tmp_path / "averaged", averaged)):
        assert digest(AutoModelForSequenceClassification.from_pretrained(place).state_dict()) == expected
    weights, _, _ = train_bert(lambda: AutoModelForSequenceClassification.from_pretrained(folder))
    assert weights != trained


def test_batches_without_labels_have_no_loss() -> None:
    unlabelled = {name: column for name, column in sentences().items() if name != "labels"}
    with pl.Trainer.setup_head(
        build_bert, sgd, data=unlabelled, global_batch=10, runtime=pl.Runtime(quiet=True)
    ) as trainer:
        with pytest.raises(
            pl.errors.MisuseError, match=r"BertForSequenceClassification, returned no loss: .* must have labels"
        ):
            train(trainer)
        assert trainer.predict(unlabelled).logits.shape == (20, NUM_CLASSES)


class Pipeline:
    """Neither a module nor an object with parameters(): it has its network as an attribute."""

    def __init__(self) -> None:
        self.model = mlp()
        self.tokenizer = "some tokenizer"

    def compute_loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self.model(batch.x), batch.y)

    def predict(self, batch: Any) -> torch.Tensor:
        return self.model(batch.x).argmax(1)


class CallablePipeline:
    """Not taken for a function that builds a model."""

    def __init__(self) -> None:
        self.network = mlp()
        self.tokenizer = "some tokenizer"

    def compute_loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self.network(batch.x), batch.y)

    def predict(self, batch: Any) -> torch.Tensor:
        return self(batch).argmax(1)

    def __call__(self, batch: Any) -> torch.Tensor:
        return self.network(batch.x)


@pytest.mark.parametrize("make", [Pipeline, CallablePipeline])
@pytest.mark.parametrize("is_built", [False, True])
def test_a_wrapper_is_trained_through_the_module_that_it_has(make: Any, is_built: bool) -> None:
    torch.manual_seed(0)
    with pl.Trainer.setup_head(make() if is_built else make, sgd, **grouped(**SETTINGS)) as trainer:
        losses = train(trainer, epochs=3)
        assert losses[-1] < losses[0]
        assert isinstance(trainer.unwrapped_model, make)
        assert trainer.model.tokenizer == "some tokenizer"
        assert trainer.predict((X, Y)).shape == (24,)
        if not is_built:
            assert digest([p.detach() for p in trainer.model.parameters()]) != digest(list(mlp().parameters()))


def test_a_wrapper_trains_as_its_module_would() -> None:
    with pl.Trainer.setup_head(Pipeline, sgd, **grouped(**SETTINGS)) as trainer:
        train(trainer)
        assert digest([p.detach() for p in trainer.model.parameters()]) == by_hand()


@pytest.mark.parametrize("head", [mlp, lambda: torch.compile(mlp(), backend="eager")])
@pytest.mark.parametrize("settings", [{}, {"weight_fn": len}])
def test_a_head_without_a_loss_is_an_error_at_set_up(head: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"the head is a Sequential, which has neither compute_loss\(batch\) nor"):
        pl.Trainer.setup_head(head, sgd, **grouped(**SETTINGS, **settings))
