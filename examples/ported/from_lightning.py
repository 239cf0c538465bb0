"""A script written for Lightning's Trainer; what it called is in the comments.

paceline run examples/ported/from_lightning.py
"""

import sys
import tempfile

import torch
from data import accuracy, make_model, make_points
from torch import nn
from torch.nn import functional as F

import paceline as pl


class Classifier(nn.Module):  # LightningModule
    def __init__(self) -> None:
        super().__init__()
        self.network = make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)

    def compute_loss(self, batch: pl.data.Pair) -> torch.Tensor:  # training_step(batch, batch_idx)
        return F.cross_entropy(self(batch.x), batch.y)


def configure_optimizers(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def main(folder: str) -> int:
    # L.Trainer(max_epochs=6, accumulate_grad_batches=4, gradient_clip_val=1.0, callbacks=[ModelCheckpoint(...)])
    trainer = pl.Trainer.setup_head(
        Classifier,
        configure_optimizers,
        data=make_points(),
        global_batch=32,
        micro_batch=8,
        max_grad_norm=1.0,
        checkpoints=pl.Checkpoints(f"{folder}/checkpoints", every_epochs=2, keep_best=("val_loss", 1)),
        run=pl.Recording(f"{folder}/runs", quiet=True),
    )
    stopping = pl.EarlyStopping(patience=3)  # EarlyStopping("val_loss", patience=3)

    def validate(_: int) -> None:  # validation_step, self.log("val_loss", loss)
        loss = trainer.evaluate(make_points(seed=3), lambda model, batch: F.cross_entropy(model(batch.x), batch.y))
        trainer.save({"val_loss": loss})
        if stopping.is_over(loss):
            trainer.end()

    trainer.every_epoch(1, validate)
    with trainer:
        for epoch in trainer.epochs(6):  # trainer.fit(model, loader)
            for batch in epoch:
                trainer.backward(trainer.loss(batch))
                trainer.step()
        reached = accuracy(trainer.model)
    return 0 if reached > 0.8 else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        code = main(folder)
    sys.exit(code)
