"""Training programs drawn at random. A number decides everything about one, and gives its text."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from fuzz_parts import BATCH_NORMS, BY_MICRO_BATCH, MODELS, OPTIMIZERS, SCHEDULERS

DATA = {
    "columns": "data",
    "samples": "Samples(data)",
    "list": "listed(data)",
    "loader": "loader(data, {micro_batch}, shuffle={shuffle})",
}


@dataclass(frozen=True)
class Segment:
    """Part of a run: with so many workers up to step `until`, their shares by turns."""

    num_workers: int
    shares: tuple[tuple[int, ...], ...]
    until: int | None


@dataclass(frozen=True)
class Program:
    number: int
    model: str
    optimizer: str
    scheduler: str | None
    scheduler_every: str
    max_grad_norm: float | None
    num_samples: int
    micro_batch: int
    num_micro_batches: int
    physical_batch: int | None
    drop_last: bool
    shuffle: bool
    weighted: bool
    exact: bool
    data: str
    feed: str
    resident: bool
    epochs: int
    backward: str  # "trainer", "bare", "two calls"
    ema: float | None
    halves_gradients: bool
    evaluate_every: int | None
    frozen: tuple[tuple[int, int], ...]  # ranges of steps
    end_at: int | None  # trainer.end() after this step
    end_epoch_every: int | None  # trainer.end_epoch() after every so many steps
    break_every: int | None  # the same by `break`, on one worker
    segments: tuple[Segment, ...]
    shard: str | None

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.num_micro_batches

    @property
    def by_micro_batch(self) -> bool:
        return self.model in BY_MICRO_BATCH

    @property
    def has_batch_norm(self) -> bool:
        return self.model in BATCH_NORMS

    def text(self) -> str:
        """The program. `shares`, `until` and `folder` are those of a segment."""
        settings: dict[str, Any] = {
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "scheduler": self.scheduler,
            "scheduler_every": repr(self.scheduler_every) if self.scheduler_every != "step" else None,
            "max_grad_norm": self.max_grad_norm,
            "physical_batch": self.physical_batch,
            "drop_last": self.drop_last or None,
            "shuffle": self.shuffle if self.data != "loader" else None,
            "weight_fn": "weight" if self.weighted else None,
            "exact": self.exact or None,
            "feed": repr(self.feed) if self.feed != "sharded" else None,
            "resident": self.resident or None,
            "ema": self.ema,
            "shard": repr(self.shard) if self.shard else None,
            "seed": self.number,
            "checkpoints": "pl.Checkpoints(folder)" if len(self.segments) > 1 else None,
        }
        given = ", ".join(f"{name}={value}" for name, value in settings.items() if value is not None)
        data = DATA[self.data].format(micro_batch=self.micro_batch, shuffle=self.shuffle)
        lines = [
            f"# program {self.number}: " + "; then ".join(map(_described, self.segments)),
            f"data = columns({self.num_samples}, {self.number}, weighted={self.weighted})",
            f"make = lambda: build({self.model!r}, {self.number})",
            "with changing_shares(shares), pl.Trainer.setup(",
            f"    make, {self.optimizer}, data={data},",
            f"    **grouped({given}, shares=shares[0], quiet=True, timeout_s=20),",
            ") as trainer:",
            "    trainer.every(1, lambda record: losses.append(record.loss))",
            *(f"    {line}" for line in self._hooks()),
            f"    for epoch in trainer.epochs({self.epochs}, max_steps=until):",
            "        for batch in epoch:",
            *(f"            {line}" for line in self._body()),
            "    weights = dict(trainer.model.state_dict())",
        ]
        if self.ema:
            lines += ["    with trainer.ema_weights():", "        average = clones(trainer.model.state_dict())"]
        return "\n".join(lines)

    def _hooks(self) -> list[str]:
        lines = []
        if self.halves_gradients:
            lines.append("trainer.on_gradients(halve)")
        if self.frozen:
            lines.append(f"frozen = {self.frozen}")
            lines.append("set_frozen(trainer.model, trainer.position.step, frozen)")
            lines.append("trainer.every(1, lambda record: set_frozen(trainer.model, record.step, frozen))")
        if self.evaluate_every:
            call = "evaluations.append(trainer.evaluate(data, loss_of, micro_batch=3))"
            lines.append(f"trainer.every({self.evaluate_every}, lambda _: {call})")
        if self.end_at:
            lines.append(f"trainer.every(1, lambda record: trainer.end() if record.step == {self.end_at} else None)")
        if self.end_epoch_every:
            lines.append(f"trainer.every({self.end_epoch_every}, lambda _: trainer.end_epoch())")
        return lines

    def _body(self) -> list[str]:
        lines = {
            "trainer": ["trainer.backward(loss_of(trainer.model, batch))"],
            "bare": ["loss_of(trainer.model, batch).backward()"],
            "two calls": [
                "trainer.backward(0.25 * loss_of(trainer.model, batch))",
                "trainer.backward(0.75 * loss_of(trainer.model, batch))",
            ],
        }[self.backward]
        if not self.break_every:
            return [*lines, "trainer.step()"]
        return [*lines, "record = trainer.step()", f"if record and record.step % {self.break_every} == 0:", "    break"]


def _described(segment: Segment) -> str:
    until = "" if segment.until is None else f", up to step {segment.until}"
    return f"{segment.num_workers} workers, shares {', '.join(map(str, segment.shares))}{until}"


def draw(number: int) -> Program:
    """The program of this number."""
    rng = random.Random(number)

    def maybe(value: Any, chance: float) -> Any:
        return value if rng.random() < chance else None

    model = rng.choice(list(MODELS))
    is_normed, by_micro_batch = model in BATCH_NORMS, model in BY_MICRO_BATCH
    micro_batch = rng.randint(2 if is_normed else 1, 4)
    num_micro_batches = rng.randint(1, 6)
    global_batch = micro_batch * num_micro_batches
    num_samples = rng.randint(max(2, global_batch // 2), 3 * global_batch + micro_batch)
    if is_normed and num_samples % micro_batch == 1:
        num_samples += 1  # BatchNorm takes no tail of one sample
    drop_last = rng.random() < 0.2 and num_samples >= global_batch
    num_steps = num_samples // global_batch if drop_last else -(-num_samples // global_batch)
    epochs = rng.randint(1, 3)
    exact = rng.random() < 0.5
    backward = rng.choices(["trainer", "bare", "two calls"], [6, 2, 2])[0]
    if backward == "two calls" and (model == "dropout" or is_normed):
        backward = "trainer"  # a second forward draws, or counts, once more
    scheduler = maybe(rng.choice(SCHEDULERS), 0.6)
    if scheduler == "plateau" and backward == "bare":
        scheduler = "halving"  # nobody knows the loss
    scheduler_every = rng.choice(["step", "step", "epoch"]) if scheduler not in (None, "plateau") else "step"
    physical = maybe(2 * micro_batch, 0.15) if not exact and not by_micro_batch and num_micro_batches % 2 == 0 else None
    data = rng.choice(list(DATA))
    feed = rng.choices(["sharded", "dispatched"], [4, 1])[0]
    total = num_steps * epochs
    first = rng.randint(0, 3)
    frozen = maybe(((first, first + rng.randint(1, 3)), (first + 4, first + 5)), 0.2) or ()
    end_at = maybe(rng.randint(1, max(1, total)), 0.1)
    end_epoch_every = maybe(rng.randint(1, 3), 0.1)
    segments = _segments(rng, total)
    break_every = maybe(rng.randint(1, 3), 0.3) if len(segments) == 1 and segments[0].num_workers == 1 else None
    program = Program(
        number=number,
        model=model,
        optimizer=rng.choice(OPTIMIZERS),
        scheduler=scheduler,
        scheduler_every=scheduler_every,
        max_grad_norm=maybe(rng.choice([0.05, 0.5]), 0.3),
        num_samples=num_samples,
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
        physical_batch=physical,
        drop_last=drop_last,
        shuffle=rng.random() < 0.6,
        weighted=rng.random() < 0.4 and global_batch > 2 and num_samples % global_batch != 1 and not is_normed,
        exact=exact,
        data=data,
        feed=feed if physical is None else "sharded",
        resident=rng.random() < 0.2 and data == "columns" and feed == "sharded",
        epochs=epochs,
        backward=backward,
        ema=maybe(0.8, 0.2),
        halves_gradients=rng.random() < 0.2,
        evaluate_every=maybe(rng.randint(1, 3), 0.3),
        frozen=frozen,
        end_at=end_at if len(segments) == 1 else None,  # a run that is resumed goes on
        end_epoch_every=end_epoch_every,
        break_every=None if end_epoch_every else break_every,
        segments=segments,
        shard=None,
    )
    may_be_divided = not program.halves_gradients and program.optimizer != "Damped"
    return replace(program, shard=maybe(rng.choice(["optimizer", "gradients"]), 0.4) if may_be_divided else None)


def _segments(rng: random.Random, num_steps: int) -> tuple[Segment, ...]:
    """Mostly one; else the run is saved and goes on, up to three times, with other workers."""
    count = rng.choice([1, 1, 1, 2, 3]) if num_steps > 2 else 1
    ends: list[int | None] = [*sorted(rng.sample(range(1, num_steps), count - 1))] if count > 1 else []
    segments = []
    for until in [*ends, None]:
        size = rng.choices([1, 2, 3], [1, 3, 3])[0]
        shares = tuple(_speeds(rng, size) for _ in range(rng.choice([1, 1, 2, 3])))
        segments.append(Segment(size, shares, until))
    return tuple(segments)


def _speeds(rng: random.Random, size: int) -> tuple[int, ...]:
    """Relative speeds; zero: no share."""
    speeds = [rng.choice([0, 1, 1, 2, 3]) for _ in range(size)]
    if not any(speeds):
        speeds[rng.randrange(size)] = 1
    return tuple(speeds)
