"""A script written for Accelerate; what it called is in the comments.

paceline run examples/ported/from_accelerate.py
"""

import sys

import torch
from data import accuracy, make_model, make_points
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl


def main() -> int:
    # accelerator = Accelerator(gradient_accumulation_steps=4)
    loader = DataLoader(TensorDataset(*make_points()), batch_size=8, shuffle=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 48)
    # model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    trainer = pl.Trainer.setup(model, optimizer, data=loader, global_batch=32, scheduler=schedule, max_grad_norm=1.0)
    with trainer:
        for epoch in trainer.epochs(6):
            for batch in epoch:  # with accelerator.accumulate(model):
                loss = F.cross_entropy(trainer.model(batch.x), batch.y)
                trainer.backward(loss)  # accelerator.backward(loss); accelerator.clip_grad_norm_(...)
                trainer.step()  # optimizer.step(); schedule.step(); optimizer.zero_grad()
            if trainer.is_main:  # accelerator.is_main_process
                print(epoch.number, trainer.last_record.loss)
        reached = accuracy(trainer.unwrapped_model)  # accelerator.unwrap_model(model)
    return 0 if reached > 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
