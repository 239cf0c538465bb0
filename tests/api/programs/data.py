"""Data: samplers, collate functions, samples of every kind, weights in the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import paceline as pl
from paceline.core.seeding import Purpose, derive_seed
from paceline.plan.epoch import EpochOrder
from programs.program import (
    EQUAL,
    GLOBAL_BATCH,
    MICRO_BATCH,
    NUM_SAMPLES,
    Program,
    X,
    Y,
    equal_or_refused,
    refused,
    small,
)

PAIRS = TensorDataset(X, Y)


def rows(indices: Any) -> SimpleNamespace:
    return SimpleNamespace(x=X[indices], y=Y[indices])


def cut(order: Any, size: int = GLOBAL_BATCH) -> Iterator[Any]:
    order = torch.as_tensor(list(order))
    return (rows(part) for part in order.split(size))


def permuted(epoch: int) -> Iterable[Any]:
    """Paceline's own order of an epoch."""
    return cut(EpochOrder(NUM_SAMPLES, seed=0, epoch=epoch).indices(0, NUM_SAMPLES))


def drawn(make: Callable[[], Iterable[int]], epoch: int) -> Iterable[Any]:
    """What a sampler gives when torch is seeded for the epoch as Paceline seeds it."""
    torch.manual_seed(derive_seed(0, Purpose.ORDER, epoch))
    return cut(make())


def sampled(make: Callable[[], Any], **settings: Any) -> Program:
    """A DataLoader with this sampler, whose batches are the micro-batches."""
    return Program(
        EQUAL,
        data=lambda: DataLoader(PAIRS, batch_size=MICRO_BATCH, sampler=make()),
        batches=partial(drawn, make),
        settings=settings,
    )


class Backwards(Sampler[int]):
    """From the other end in every second epoch, and without the first samples: an order of the user's own."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = range(5, NUM_SAMPLES)
        return iter(order if self.epoch % 2 else reversed(order))

    def __len__(self) -> int:
        return NUM_SAMPLES - 5


def backwards(epoch: int) -> Iterable[Any]:
    sampler = Backwards()
    sampler.set_epoch(epoch)
    return cut(sampler)


SIZES = (3, 5, 1, 4, 2, 6, 3, 3)  # of the batches that a batch sampler of the user's makes


class BySize(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([part.tolist() for part in torch.arange(sum(SIZES)).split(SIZES)])

    def __len__(self) -> int:
        return len(SIZES)


def three_at_a_time(_: int) -> Iterable[Any]:
    parts = list(torch.arange(sum(SIZES)).split(SIZES))
    return [rows(torch.cat(parts[i : i + 3])) for i in range(0, len(parts), 3)]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)


class Bad(Dataset):
    """Some samples cannot be read."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index in (1, 17, 18, 19, 20):  # the whole of micro-batch 4, but for its last three of one
            raise ValueError(f"sample {index} is torn")
        return X[index], Y[index]


def without_bad(_: int) -> Iterable[Any]:
    return [rows([i for i in part if i not in (1, 17, 18, 19, 20)]) for part in whole_batches()]


def whole_batches() -> list[range]:
    return [range(i, min(i + GLOBAL_BATCH, NUM_SAMPLES)) for i in range(0, NUM_SAMPLES, GLOBAL_BATCH)]


class Augmented(Dataset):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return X[index] + 0.1 * torch.rand(()), Y[index]


def augmented(epoch: int) -> Iterable[Any]:
    for part in whole_batches():
        samples = []
        for index in part:
            torch.manual_seed(derive_seed(0, Purpose.SAMPLE, epoch, index))
            samples.append(Augmented()[index][0])
        yield SimpleNamespace(x=torch.stack(samples), y=Y[list(part)])


class Endless(Dataset):
    """A million million samples, computed when asked for."""

    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: int) -> Any:
        return torch.sin(torch.arange(1.0, 13.0) * (index % 1009)), index % 4


def of_many(trainer: pl.Trainer, program: Program) -> None:
    for epoch in trainer.epochs(max_steps=5):
        for batch in epoch:
            trainer.backward(program.loss(trainer.model, batch))
            trainer.step()


def first_of_many(_: int) -> Iterable[Any]:
    order = EpochOrder(10**12, seed=0, epoch=0)
    for step in range(5):
        samples = [Endless()[int(i)] for i in order.indices(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)]
        yield SimpleNamespace(x=torch.stack([x for x, _ in samples]), y=torch.tensor([y for _, y in samples]))


# ---- samples that are not tensors

WORDS = ["a", "bb", "ccc", "dddd"]
TEXTS = [WORDS[int(y)] * (1 + i % 3) for i, y in enumerate(Y)]


def of_texts(model: Any, texts: Any) -> torch.Tensor:
    x = torch.tensor([[float(text.count(c)) for c in "abcd"] + [len(text)] * 8 for text in texts])
    return functional.cross_entropy(model(x), torch.tensor(["abcd".index(text[0]) for text in texts]))


def texts(_: int) -> Iterable[Any]:
    return [[TEXTS[i] for i in part] for part in whole_batches()]


NESTED = [
    {"input": {"x": X[i], "names": [f"sample {i}", "n"]}, "target": (Y[i], {"id": i, "weight": 0.5})}
    for i in range(NUM_SAMPLES)
]


def of_nested(model: Any, batch: Any) -> torch.Tensor:
    assert batch["input"]["names"][0][0].startswith("sample")
    assert batch["target"][1]["weight"].dtype == torch.float64
    return functional.cross_entropy(model(batch["input"]["x"]), batch["target"][0])


def nested(_: int) -> Iterable[Any]:
    return [torch.utils.data.default_collate([NESTED[i] for i in part]) for part in whole_batches()]


WITH_NONE = [(X[i], Y[i], None if i % 3 else f"note {i}") for i in range(NUM_SAMPLES)]


def with_notes(samples: list[Any]) -> dict[str, Any]:
    x, y, notes = zip(*samples, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y), "notes": list(notes)}


def of_notes(model: Any, batch: Any) -> torch.Tensor:
    assert len(batch["notes"]) == len(batch["x"])
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def notes(_: int) -> Iterable[Any]:
    return [with_notes([WITH_NONE[i] for i in part]) for part in whole_batches()]


# ---- texts of different lengths; weights of tokens

LENGTHS = [1 + (5 * i) % 7 for i in range(NUM_SAMPLES)]
RAGGED = [torch.arange(n) % 5 + 1 for n in LENGTHS]


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 8, padding_idx=0), nn.Tanh(), nn.Linear(8, 6))


def of_tokens(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """The mean over the next tokens that are not padding; zero where there are none."""
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return total / max(1, num_targets(batch))


def num_targets(batch: torch.Tensor) -> int:
    return int((batch[:, 1:] != 0).sum())


def ragged(_: int) -> Iterable[Any]:
    return [padded([RAGGED[i] for i in part]) for part in whole_batches()]


# The second micro-batch of the first step has no token to predict.
SHORT = [torch.tensor([1 + i % 5]) if 4 <= i < 8 else tokens for i, tokens in enumerate(RAGGED)]


def with_nothing(_: int) -> Iterable[Any]:
    return [padded([SHORT[i] for i in part]) for part in whole_batches()]


def only_long(samples: list[Any]) -> Any:
    """Leaves out what it does not like, as collate functions for broken images do."""
    kept = [(x, y) for x, y in samples if x[0] > -0.5]
    return tuple(torch.stack(column) for column in zip(*kept, strict=True))


def of_pair(model: Any, batch: Any) -> torch.Tensor:
    x, y = (batch.x, batch.y) if hasattr(batch, "x") else batch
    return functional.cross_entropy(model(x), y)


def kept(_: int) -> Iterable[Any]:
    return [rows([i for i in part if X[i, 0] > -0.5]) for part in whole_batches()]


PAIR_LIST = list(zip(X, Y, strict=True))

PROGRAMS: dict[str, Program] = {
    "a permutation in every epoch": Program(EQUAL, batches=permuted, settings={"shuffle": True}),
    "a list of samples": Program(EQUAL, data=lambda: PAIR_LIST),
    "columns by name": Program(
        EQUAL,
        data=lambda: {"x": X, "y": Y},
        settings={"shuffle": False},
        loss=lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]),
        batches=lambda _: [{"x": X[list(part)], "y": Y[list(part)]} for part in whole_batches()],
    ),
    "NumPy arrays": Program(EQUAL, data=lambda: (X.numpy(), Y.numpy())),
    "a DataLoader": Program(EQUAL, data=lambda: DataLoader(PAIRS, batch_size=MICRO_BATCH)),
    "a DataLoader alone": Program(
        EQUAL,
        data=lambda: DataLoader(PAIRS, batch_size=GLOBAL_BATCH),
        settings={"global_batch": ..., "micro_batch": ...},
    ),
    "a DataLoader that shuffles": Program(
        EQUAL, data=lambda: DataLoader(PAIRS, batch_size=MICRO_BATCH, shuffle=True), batches=permuted
    ),
    "a DataLoader with drop_last": Program(
        EQUAL,
        data=lambda: DataLoader(PAIRS, batch_size=MICRO_BATCH, drop_last=True),
        batches=lambda _: cut(range(NUM_SAMPLES // MICRO_BATCH * MICRO_BATCH)),
    ),
    "drop_last": Program(EQUAL, settings={"drop_last": True}, batches=lambda _: cut(range(2 * GLOBAL_BATCH))),
    "RandomSampler with replacement": sampled(lambda: RandomSampler(PAIRS, replacement=True, num_samples=30)),
    "WeightedRandomSampler": sampled(lambda: WeightedRandomSampler((Y + 1.0).tolist(), 50)),
    "SubsetRandomSampler": sampled(lambda: SubsetRandomSampler(range(3, 37))),
    "a sampler of one's own": Program(
        EQUAL, data=lambda: DataLoader(PAIRS, batch_size=MICRO_BATCH, sampler=Backwards()), batches=backwards
    ),
    "Subset": Program(
        EQUAL,
        data=lambda: Subset(PAIRS, range(1, 40, 2)),
        settings={"shuffle": False},
        batches=lambda _: cut(range(1, 40, 2)),
    ),
    "ConcatDataset": Program(
        EQUAL,
        data=lambda: ConcatDataset([Subset(PAIRS, range(20)), Subset(PAIRS, range(20, NUM_SAMPLES))]),
        settings={"shuffle": False},
    ),
    "torch's BatchSampler with batches_per_step": Program(
        equal_or_refused(r"batches_per_step.*(global_batch|batch_sampler|BatchSampler)"),
        data=lambda: DataLoader(PAIRS, batch_sampler=BatchSampler(SequentialSampler(PAIRS), MICRO_BATCH, False)),
        settings={"batches_per_step": GLOBAL_BATCH // MICRO_BATCH},
    ),
    "torch's BatchSampler": Program(
        EQUAL, data=lambda: DataLoader(PAIRS, batch_sampler=BatchSampler(SequentialSampler(PAIRS), MICRO_BATCH, False))
    ),
    "a batch sampler of one's own": Program(
        EQUAL,
        data=lambda: DataLoader(PAIRS, batch_sampler=BySize()),
        settings={"batches_per_step": 3},
        batches=three_at_a_time,
    ),
    "DistributedSampler": Program(
        refused(r"DistributedSampler gives each worker a part of the data, but Paceline divides the data itself"),
        data=lambda: DataLoader(PAIRS, batch_size=MICRO_BATCH, sampler=DistributedSampler(PAIRS, 2, 0)),
    ),
    "worker_init_fn": Program(
        refused(r"worker_init_fn, which Paceline's readers do not call"),
        data=lambda: DataLoader(PAIRS, batch_size=MICRO_BATCH, worker_init_fn=print),
    ),
    "a stream": Program(EQUAL, data=Stream),
    "a stream in a DataLoader": Program(EQUAL, data=lambda: DataLoader(Stream(), batch_size=MICRO_BATCH)),
    "batches that are made elsewhere": Program(
        EQUAL,
        data=lambda: pl.Batches([(x, y) for x, y in zip(X.split(4), Y.split(4), strict=True)]),
        settings={"batches_per_step": 4},
    ),
    "one worker reads for all": Program(EQUAL, settings={"feed": "dispatched"}),
    "data on the device": Program(EQUAL, settings={"resident": True}),
    "random augmentation": Program(EQUAL, data=Augmented, settings={"shuffle": False}, batches=augmented),
    "bad samples left out": Program(
        EQUAL, data=Bad, settings={"shuffle": False, "skip_bad_samples": True}, batches=without_bad
    ),
    "bad samples": Program(refused(r"sample 1 is torn"), data=Bad, settings={"shuffle": False}),
    "strings": Program(EQUAL, data=lambda: TEXTS, loss=of_texts, batches=texts),
    "nested dicts": Program(EQUAL, data=lambda: NESTED, loss=of_nested, batches=nested),
    "None in samples": Program(
        equal_or_refused(r"NoneType"),
        data=lambda: WITH_NONE,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        batches=lambda _: [(X[list(part)], Y[list(part)]) for part in whole_batches()],
    ),
    "None in samples, with a collate_fn": Program(
        EQUAL, data=lambda: WITH_NONE, settings={"collate_fn": with_notes}, loss=of_notes, batches=notes
    ),
    "one sample": Program(EQUAL, data=lambda: (X[:1], Y[:1]), batches=lambda _: [rows([0])]),
    "no sample": Program(refused(r"(no|0|empty|at least one) sample|is empty"), data=lambda: (X[:0], Y[:0])),
    "1e12 samples": Program(EQUAL, data=Endless, loop=of_many, batches=first_of_many, epochs=1),
    "one micro-batch per step": Program(EQUAL, settings={"micro_batch": GLOBAL_BATCH}),
    "micro-batches of one sample": Program(EQUAL, settings={"micro_batch": 1}),
    "a micro-batch that does not divide": Program(
        refused(r"global_batch=16 is not a multiple of micro_batch=5"), settings={"micro_batch": 5}
    ),
    "token weights, ragged collate": Program(
        EQUAL,
        build=language_model,
        data=lambda: RAGGED,
        loss=of_tokens,
        batches=ragged,
        settings={"collate_fn": padded, "weight_fn": num_targets},
    ),
    "token weights, none in a micro-batch": Program(
        EQUAL,
        build=language_model,
        data=lambda: SHORT,
        loss=of_tokens,
        batches=with_nothing,
        settings={"collate_fn": padded, "weight_fn": num_targets},
    ),
    "a weight that is no whole number": Program(
        refused(r"weight_fn returned 0\.5: it must be an integer >= 0"), settings={"weight_fn": lambda _: 0.5}
    ),
    "a collate_fn that drops samples": Program(
        EQUAL, build=small, data=lambda: PAIR_LIST, settings={"collate_fn": only_long}, loss=of_pair, batches=kept
    ),
    "a collate_fn whose rows cannot be counted": Program(
        equal_or_refused(r"weight_fn"),
        data=lambda: TEXTS,
        loss=of_texts,
        batches=texts,
        settings={"collate_fn": lambda samples: tuple(samples)},
    ),
}
