"""Models of transformers weigh a micro-batch by the tokens that their loss is a mean over, without being told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grouping import grouped
from worker_pool import WorkerPool

import paceline as pl
from paceline.api.heads import weight_fn_of

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 40, "dropout_rate": 0.0}
BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 40, "dropout": 0.0, "max_position_embeddings": 16,
    "forced_eos_token_id": None,
}  # fmt: skip
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 40, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def build(name: str) -> Any:
    """A tiny model in training mode without dropout."""
    t = transformers
    torch.manual_seed(3)
    bert = {**SIZES, **WITHOUT_DROPOUT, "max_position_embeddings": 16}
    makers = {
        "GPT2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2, **SPECIAL)),
        "Llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, **SPECIAL)),
        "Bert masked": lambda: t.BertForMaskedLM(t.BertConfig(**bert)),
        "Bert tokens": lambda: t.BertForTokenClassification(
            t.BertConfig(**bert, num_labels=40, classifier_dropout=0.0)
        ),
        "Llama tokens": lambda: t.LlamaForTokenClassification(
            t.LlamaConfig(**SIZES, **SPECIAL, num_labels=40, classifier_dropout=0.0)
        ),
        "Bert sequences": lambda: t.BertForSequenceClassification(t.BertConfig(**bert, num_labels=3)),
        "T5": lambda: t.T5ForConditionalGeneration(t.T5Config(**T5, decoder_start_token_id=0)),
        "Bart": lambda: t.BartForConditionalGeneration(t.BartConfig(**BART, **SPECIAL)),
        "Bart decoder": lambda: t.BartForCausalLM(t.BartConfig(**BART, **SPECIAL)),
    }
    return makers[name]().train()


def ragged(count: int = 24) -> list[dict[str, torch.Tensor]]:
    """Sequences with 1 to 9 labels, of which the first may be one."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(count):
        ids = torch.randint(3, 40, (9,), generator=generator)
        labels = ids.clone()
        labels[1 + i % 9 :] = -100
        if i % 3 == 0:
            labels[0] = -100
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return samples


def gradients(name: str, **settings: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The mean gradient of a step over all samples, and what the step weighed."""
    found: dict[str, torch.Tensor] = {}
    weights: list[float] = []
    with pl.Trainer.setup_head(
        lambda: build(name), lambda p: torch.optim.SGD(p, lr=0.0), data=ragged(), global_batch=24, micro_batch=4,
        **grouped(quiet=True, **settings),
    ) as trainer:  # fmt: skip
        trainer.on_gradients(lambda ps: found.update({k: p.grad.clone() for k, p in ps.items() if p.grad is not None}))
        trainer.every(1, lambda record: weights.append(record.weight))
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(trainer.loss(batch))
                trainer.step()
    return found, weights


def expected_gradients(name: str) -> dict[str, torch.Tensor]:
    with pl.Trainer.setup(lambda: build(name), lambda p: torch.optim.SGD(p), data=ragged(), global_batch=24) as trainer:
        model = trainer.model
    batch = torch.utils.data.default_collate(ragged())
    model(**batch).loss.backward()
    return {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


NUM_SHIFTED = sum(int((s["labels"][1:] != -100).sum()) for s in ragged())
NUM_LABELS = sum(int((s["labels"] != -100).sum()) for s in ragged())
MODELS = {
    "GPT2": NUM_SHIFTED, "Llama": NUM_SHIFTED, "Bert masked": NUM_LABELS, "Bert tokens": NUM_LABELS,
    "Llama tokens": NUM_LABELS, "T5": NUM_LABELS, "Bart": NUM_LABELS, "Bart decoder": NUM_LABELS,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_one_batch(name: str, pool: WorkerPool) -> None:
    expected = expected_gradients(name)
    outcomes = [gradients(name)]
    for size in (2, 3) if name in ("Llama", "T5") else ():
        outcomes += pool.run(gradients, size, name)
    for found, weights in outcomes:
        assert weights == [MODELS[name]]
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


def test_evaluation_weighs_as_training_does(pool: WorkerPool) -> None:
    def evaluated() -> float:
        with pl.Trainer.setup_head(
            lambda: build("Llama"),
            lambda p: torch.optim.SGD(p, lr=0.0),
            data=ragged(),
            global_batch=24,
            runtime=pl.Runtime(quiet=True),
        ) as trainer:
            return trainer.evaluate(ragged(), lambda model, batch: model(**batch).loss, micro_batch=5)

    with torch.no_grad(), pl.Trainer.setup(
        lambda: build("Llama"), lambda p: torch.optim.SGD(p), data=ragged(), global_batch=24,
        runtime=pl.Runtime(quiet=True),
    ) as trainer:  # fmt: skip
        expected = trainer.model(**torch.utils.data.default_collate(ragged())).loss.item()
    assert evaluated() == pytest.approx(expected, rel=1e-5)
    assert pool.run(evaluated, 2) == pytest.approx([expected] * 2, rel=1e-5)


def test_what_is_given_or_cannot_be_told_stays() -> None:
    assert weight_fn_of(build("Bert sequences")) is None  # a mean over samples
    assert weight_fn_of(torch.nn.Linear(2, 2)) is None
    assert gradients("Llama", weight_fn=lambda batch: len(batch["labels"]))[1] == [24]

    class WithItsOwnLoss(transformers.LlamaForCausalLM):
        def compute_loss(self, batch: Any) -> torch.Tensor:
            return self(**batch).loss

    class WithItsOwnForward(transformers.LlamaForCausalLM):
        def forward(self, **batch: Any) -> Any:
            return super().forward(**batch)

    config = transformers.LlamaConfig(**SIZES, **SPECIAL)
    assert weight_fn_of(WithItsOwnLoss(config)) is None
    assert weight_fn_of(WithItsOwnForward(config)) is None
    own = transformers.LlamaForCausalLM(config)
    own.loss_function = lambda logits, **_: logits.mean()
    assert weight_fn_of(own) is None


def test_batches_without_labels_are_refused() -> None:
    weigh = weight_fn_of(build("Llama"))
    assert weigh is not None
    assert weigh({"labels": torch.tensor([[5, 5, -100, 5]])}) == 2
    assert weigh({"labels": torch.zeros(1, 3), "shift_labels": torch.tensor([[5, 5, 5]])}) == 3
    with pytest.raises(ValueError, match=r"a batch for LlamaForCausalLM has no labels.* pass a weight_fn"):
        weigh({"input_ids": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="has no labels"):
        weigh(torch.zeros(2, 3))
