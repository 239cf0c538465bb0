"""Train a small transformer to tell stories, on every GPU there is, or on two CPU workers.

    python examples/tiny_stories/train.py              # about two minutes on two cores
    python examples/tiny_stories/train.py --exact --workers 1 --quick
    python examples/tiny_stories/train.py --exact --workers 2 --quick    # the same weights, bit for bit

The stories differ in length, so a micro-batch counts by its words (`weight_fn`): the loss is the mean over the words
of the whole global batch, whichever worker they were on.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from generate import write_story
from model import StoryModel
from progress import progress
from report import Report, plot_loss
from stories import PAD, Vocabulary, tell_stories, unigram_entropy

import paceline as pl

GLOBAL_BATCH = 32
MICRO_BATCH = 8


class Batch(NamedTuple):
    """Stories padded to one length: `tokens` without each story's last word, `targets` without its first."""

    tokens: torch.Tensor
    targets: torch.Tensor


def collate(stories: list[list[int]]) -> Batch:
    length = max(len(story) for story in stories)
    padded = torch.tensor([story + [PAD] * (length - len(story)) for story in stories])
    return Batch(padded[:, :-1].contiguous(), padded[:, 1:].contiguous())


def num_words(batch: Batch) -> int:
    return int((batch.targets != PAD).sum())


def word_loss(model: StoryModel, batch: Batch) -> torch.Tensor:
    """The mean over the batch's words, in nats."""
    return F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten(), ignore_index=PAD)


def train(options: argparse.Namespace) -> Report:
    """One worker's part. Every worker runs this; rank 0's report is the caller's."""
    texts = tell_stories(options.stories + options.held_out, options.seed)
    vocabulary = Vocabulary(texts)
    stories = [vocabulary.encode(text) for text in texts]
    held_out, training = stories[: options.held_out], stories[options.held_out :]
    max_length = max(len(story) for story in stories)
    num_steps = options.epochs * -(-len(training) // GLOBAL_BATCH)

    trainer = pl.Trainer.setup(
        lambda: StoryModel(len(vocabulary), max_length=max_length, width=options.width),
        lambda params: torch.optim.AdamW(params, lr=4e-3, betas=(0.9, 0.99)),
        data=training,
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=4e-3, total_steps=num_steps + 1, pct_start=0.1
        ),
        weight_fn=num_words,
        max_grad_norm=1.0,
        seed=options.seed,
        collate_fn=collate,
        exact=options.exact,
    )
    with trainer:
        losses: list[float] = []
        words = 0.0
        start_s = time.perf_counter()
        with progress(num_steps, enabled=trainer.is_main) as report_step:
            for epoch in trainer.epochs(options.epochs):
                for batch in epoch:
                    trainer.backward(word_loss(trainer.model, batch))
                    record = trainer.step()
                    if record:
                        losses.append(record.loss)
                        words += record.weight
                        report_step(record.step, record.loss, words / (time.perf_counter() - start_s))
        training_s = time.perf_counter() - start_s
        evaluation_loss = trainer.evaluate(held_out, word_loss, collate_fn=collate)
        return Report(
            num_workers=trainer.world.size,
            device=device_name(trainer.world.device),
            num_parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
            num_samples=options.epochs * len(training),
            training_s=training_s,
            losses=losses,
            evaluation_loss=evaluation_loss,
            unigram_entropy=unigram_entropy(stories),
            story=vocabulary.decode(write_story(trainer.model, seed=options.seed)),
            weights_sha256=weights_sha256(trainer.model),
            where_time_went=str(trainer.report()),
        )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def weights_sha256(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    default_workers = pl.device_count() if torch.cuda.is_available() else 2
    parser = argparse.ArgumentParser(description="Train a small transformer to tell stories.")
    parser.add_argument("--workers", type=int, default=default_workers, help="worker processes (here: %(default)s)")
    parser.add_argument("--epochs", type=int, default=7, help="passes over the stories (default: %(default)s)")
    parser.add_argument("--stories", type=int, default=4000, help="stories to train on (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of stories, weights and dropout (default: %(default)s)"
    )
    parser.add_argument("--exact", action="store_true", help="the same weights, bit for bit, on any number of workers")
    parser.add_argument("--quick", action="store_true", help="a few seconds only: fewer stories, a narrower model")
    parser.add_argument("--out", type=Path, default=Path("runs/tiny_stories"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.held_out, options.width = 400, 128
    if options.quick:
        options.epochs, options.stories, options.held_out, options.width = 3, 800, 80, 48
    return options


def main() -> int:
    options = parse_options()
    print(f"{options.stories} stories, {options.epochs} epochs, {options.workers} worker(s)", flush=True)
    report = pl.launch(train, options.workers, args=(options,))
    plot_path = options.out / "loss.png"
    plot_loss(report, plot_path)
    print(f"\nA story by the trained model:\n  {report.story}\n\n{report.summary()}\n{'loss curve':<16} {plot_path}\n")
    print(report.where_time_went)
    return 0 if report.evaluation_loss < report.unigram_entropy else 1


if __name__ == "__main__":
    sys.exit(main())
