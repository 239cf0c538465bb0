"""A script written for transformers' Trainer; what it called is in the comments.

paceline run examples/ported/from_hf_trainer.py
"""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification

import paceline as pl

CONFIG = BertConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=2
)


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Twelve tokens; the label says whether the first one is in the upper half of the vocabulary."""
    ids = torch.randint(64, (count, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": (row[0] >= 32).long()} for row in ids]


def main(folder: str) -> int:
    # args = TrainingArguments(per_device_train_batch_size=16, gradient_accumulation_steps=2, num_train_epochs=3,
    #     learning_rate=3e-3, max_grad_norm=1.0, eval_strategy="epoch", save_steps=50)
    # trainer = Trainer(model, args, train_dataset=train, eval_dataset=held_out)
    trainer = pl.Trainer.setup_head(
        lambda: BertForSequenceClassification(CONFIG),
        lambda params: torch.optim.AdamW(params, lr=3e-3),
        data=sentences(384, 0),
        global_batch=32,
        micro_batch=16,
        max_grad_norm=1.0,
        checkpoints=pl.Checkpoints(f"{folder}/checkpoints", every_steps=50),
    )
    held_out = sentences(128, 1)
    losses = []
    trainer.every_epoch(1, lambda _: losses.append(trainer.evaluate(held_out, lambda m, b: m(**b).loss)))
    with trainer:
        for epoch in trainer.epochs(3):  # trainer.train()
            for batch in epoch:
                trainer.backward(trainer.loss(batch))
                trainer.step()
        logits = trainer.predict(held_out).logits  # trainer.predict(held_out).predictions
        trainer.save_pretrained(f"{folder}/model")  # trainer.save_model(folder)
    labels = torch.stack([sentence["labels"] for sentence in held_out])
    reached = (logits.argmax(1) == labels).float().mean().item()
    print(losses, reached)
    return 0 if losses[-1] < losses[0] and reached > 0.7 else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        code = main(folder)
    sys.exit(code)
