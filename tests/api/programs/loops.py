"""The loop itself: leaving it, nesting it, evaluating inside it, and what users forget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import pytest
import torch
from grouping import grouped
from torch import nn

import paceline as pl
from paceline.run.step import checks
from programs.program import (
    EQUAL,
    Program,
    X,
    Y,
    all_settings,
    class_loss,
    copy_of,
    equal_or_refused,
    in_order,
    refused,
    run_plain,
    sgd,
    usual_loop,
    usual_plain_loop,
    weights_of,
)

Outcome = Mapping[str, Any]


def take(trainer: pl.Trainer, batch: Any) -> pl.StepRecord | None:
    trainer.backward(class_loss(trainer.model, batch))
    return trainer.step()


# ---- leaving an epoch


def break_after_step(trainer: pl.Trainer, program: Program) -> None:
    """Two steps of each epoch, as a loop with a limit does it."""
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            record = take(trainer, batch)
            if record and record.step % 2 == 0:
                break


def break_in_micro_batch(trainer: pl.Trainer, program: Program) -> None:
    for epoch in trainer.epochs(program.epochs):
        for number, batch in enumerate(epoch):
            if number == 1:
                break
            take(trainer, batch)


def sliced(trainer: pl.Trainer, program: Program) -> None:
    for epoch in trainer.epochs(program.epochs):
        for batch in islice(epoch, 2):
            take(trainer, batch)


def twice(trainer: pl.Trainer, program: Program) -> None:
    for epoch in trainer.epochs(program.epochs):
        for _ in range(2):
            for batch in epoch:
                take(trainer, batch)


def listed(trainer: pl.Trainer, program: Program) -> None:
    for epoch in trainer.epochs(program.epochs):
        for batch in list(epoch):
            take(trainer, batch)


def kept_epochs(trainer: pl.Trainer, program: Program) -> None:
    """All of the epochs are asked for before the first is begun."""
    for epoch in list(islice(trainer.epochs(program.epochs), program.epochs)):
        for batch in epoch:
            take(trainer, batch)


def two_steps_each(_: int) -> Iterable[Any]:
    return islice(in_order(0), 2)


def ended(trainer: pl.Trainer, program: Program) -> None:
    """Early stopping by a hook."""
    trainer.every(1, lambda record: trainer.end() if record.step == 4 else None)
    usual_loop(trainer, program)


def ended_epochs(trainer: pl.Trainer, program: Program) -> None:
    trainer.every(2, lambda _: trainer.end_epoch())
    usual_loop(trainer, program)


def limited(trainer: pl.Trainer, _: Program) -> None:
    for epoch in trainer.epochs(max_steps=4):
        for batch in epoch:
            take(trainer, batch)


def four_steps(model: Any, made: Any, program: Program) -> Outcome:
    batches = [*in_order(0), *islice(in_order(1), 1)]
    return usual_plain_loop(model, made, Program(program.expect, batches=lambda _: batches, epochs=1))


def with_progress(trainer: pl.Trainer, program: Program) -> None:
    """As progress bars do it: `len`, then one after another."""
    for epoch in trainer.epochs(program.epochs):
        count = 0
        for batch in epoch:
            take(trainer, batch)
            count += 1
        assert 0 <= count <= len(epoch) == 11


def again(trainer: pl.Trainer, _: Program) -> None:
    for end in (1, 2):
        for epoch in trainer.epochs(end):
            for batch in epoch:
                take(trainer, batch)


# ---- what is forgotten


def no_step(trainer: pl.Trainer, program: Program) -> None:
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            trainer.backward(class_loss(trainer.model, batch))


def no_backward(trainer: pl.Trainer, program: Program) -> None:
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            class_loss(trainer.model, batch)
            trainer.step()


def skipping(trainer: pl.Trainer, program: Program) -> None:
    """`continue` for micro-batches that do not please."""
    for epoch in trainer.epochs(program.epochs):
        for number, batch in enumerate(epoch):
            if number == 1:
                continue
            take(trainer, batch)


def two_steps(trainer: pl.Trainer, program: Program) -> None:
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            take(trainer, batch)
            trainer.step()


def own_data_loader(trainer: pl.Trainer, _: Program) -> None:
    """The trainer's data is not used."""
    for x, y in zip(X.split(16), Y.split(16), strict=True):
        trainer.backward(nn.functional.cross_entropy(trainer.model(x), y))
        trainer.step()


# ---- in the middle


def mean_loss(model: Any, batch: Any) -> torch.Tensor:
    return class_loss(model, batch)


def evaluated(trainer: pl.Trainer, program: Program) -> Outcome:
    losses: list[Any] = []
    trainer.every(2, lambda _: losses.append(trainer.evaluate((X, Y), mean_loss, micro_batch=4)))
    usual_loop(trainer, program)
    losses.append(trainer.evaluate((X, Y), mean_loss, micro_batch=8))
    return {"evaluation": losses}


def plainly_evaluated(model: Any, made: Any, program: Program) -> Outcome:
    losses: list[float] = []

    def evaluate(model: Any, *_: Any) -> None:
        model.eval()
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(model(X), Y).item())
        model.train()

    def after(model: Any, _: Any, step: int) -> None:
        if step % 2 == 0:
            evaluate(model)

    trained = usual_plain_loop(model, made, Program(program.expect, after_step=after))
    evaluate(model)
    return {**trained, "evaluation": losses}


def inside(call: Callable[[pl.Trainer], object]) -> Callable[[pl.Trainer, Program], None]:
    def loop(trainer: pl.Trainer, program: Program) -> None:
        for epoch in trainer.epochs(program.epochs):
            for batch in epoch:
                if take(trainer, batch):
                    call(trainer)

    return loop


def last_record(trainer: pl.Trainer, program: Program) -> Outcome:
    """What README's loop prints."""
    losses, steps = [], []
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            take(trainer, batch)
        losses.append(trainer.last_record.loss)
        steps.append(trainer.last_record.step)
    return {"printed": losses, "steps": steps}


def plain_last_record(model: Any, made: Any, program: Program) -> Outcome:
    trained = usual_plain_loop(model, made, program)
    return {**trained, "printed": trained["loss"][2::3], "steps": [3, 6]}


def by_step_with(trainer: pl.Trainer, program: Program) -> None:
    step = trainer.step_with(lambda batch: class_loss(trainer.model, batch))
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            step(batch)


def clamped(trainer: pl.Trainer, _: Program) -> None:
    """Weights changed in the body, which a worker without a share does not run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "MAX_COST", 1.0)  # also steps of less than a millisecond are compared after 100 of them
        for epoch in trainer.epochs(max_steps=102):
            for batch in epoch:
                if take(trainer, batch):
                    with torch.no_grad():
                        for parameter in trainer.model.parameters():
                            parameter.clamp_(-0.2, 0.2)


def plainly_clamped(model: Any, made: Any, program: Program) -> Outcome:
    def clamp(model: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

    return usual_plain_loop(model, made, Program(program.expect, epochs=34, after_step=clamp))


def registered(trainer: pl.Trainer, program: Program) -> None:
    class Counter:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    trainer.register("counter", Counter())
    usual_loop(trainer, program)


# ---- whole programs


def not_closed(program: Program, given: dict[str, Any]) -> Outcome:
    trainer = pl.Trainer.setup(program.make, program.optimizer, **grouped(**all_settings(program, given)))
    losses: list[float] = []
    trainer.every(1, lambda record: losses.append(record.loss))
    usual_loop(trainer, program)
    return {"loss": losses, **weights_of(trainer.model)}


CELL = """
import torch, paceline as pl
from grouping import grouped
from torch import nn
from torch.utils.data import Dataset

class Pairs(Dataset):
    def __len__(self): return len(X)
    def __getitem__(self, index): return X[index], Y[index]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))
    def forward(self, x): return self.layers(x)

def optimizer(params): return torch.optim.SGD(params, lr=0.1, momentum=0.9)

trainer = pl.Trainer.setup(Net, optimizer, data=Pairs(), **grouped(**settings))
losses = []
trainer.every(1, lambda record: losses.append(record.loss))
"""
NEXT_CELL = """
for epoch in trainer.epochs(END):
    for batch in epoch:
        trainer.backward(nn.functional.cross_entropy(trainer.model(batch.x), batch.y))
        trainer.step()
"""


def notebook(_: Program, given: dict[str, Any]) -> Outcome:
    """Cells in `__main__`: one that sets up, one that trains and is run again; none that closes."""
    settings = {**given, "global_batch": 16, "micro_batch": 4, "shuffle": False}
    names: dict[str, Any] = {"__name__": "__main__", "X": X, "Y": Y, "settings": settings}
    exec(CELL, names)
    for end in (1, 2):
        exec(NEXT_CELL.replace("END", str(end)), names)
    return {"loss": names["losses"], **weights_of(names["trainer"].model.layers)}


def closed(program: Program, given: dict[str, Any]) -> Outcome:
    with pl.Trainer.setup(program.make, program.optimizer, **grouped(**all_settings(program, given))) as trainer:
        usual_loop(trainer, program)
    for epoch in trainer.epochs(program.epochs + 1):
        for batch in epoch:
            take(trainer, batch)
    return weights_of(trainer.model)


def one_after_another(program: Program, given: dict[str, Any]) -> Outcome:
    """Three trainers in one process, each going on with the model of the one before."""
    model, losses = program.make(), []
    for _ in range(3):
        with pl.Trainer.setup(model, program.optimizer, **grouped(**all_settings(program, given))) as trainer:
            trainer.every(1, lambda record: losses.append(record.loss))
            usual_loop(trainer, program)
    return {"loss": losses, **weights_of(model)}


def three_times(program: Program) -> Outcome:
    model, losses = program.make(), []
    for _ in range(3):
        losses += usual_plain_loop(model, program.optimizer(model.parameters()), program)["loss"]
    return {"loss": losses, **weights_of(model)}


def nested_trainers(program: Program, given: dict[str, Any]) -> Outcome:
    """An inner run for every epoch of the outer one, closed in another order than opened."""
    settings = all_settings(program, given)
    outer = pl.Trainer.setup(program.make, program.optimizer, **grouped(**settings))
    inner_weights: dict[str, Any] = {}
    for epoch in outer.epochs(program.epochs):
        for batch in epoch:
            take(outer, batch)
        inner = pl.Trainer.setup(copy_and_train(outer.model), program.optimizer, **grouped(**settings))
        for inner_epoch in inner.epochs(1):
            for batch in inner_epoch:
                take(inner, batch)
        inner_weights = {f"inner {name}": value for name, value in weights_of(inner.model).items()}
        if epoch.number == 0:
            inner.close()
    outer.close()
    inner.close()
    return {**weights_of(outer.model), **inner_weights}


def copy_and_train(model: nn.Module) -> nn.Module:
    return copy_of(model).requires_grad_(True)


def plainly_nested(program: Program) -> Outcome:
    model = program.make()
    usual_plain_loop(model, program.optimizer(model.parameters()), program)
    inner = copy_and_train(model)
    usual_plain_loop(inner, program.optimizer(inner.parameters()), Program(program.expect, epochs=1))
    return {**weights_of(model), **{f"inner {name}": value for name, value in weights_of(inner).items()}}


def two_by_turns(program: Program, given: dict[str, Any]) -> Outcome:
    """Two trainers over two models, step by step in turn, as a GAN would have it."""
    settings = all_settings(program, given)
    with (
        pl.Trainer.setup(program.make, program.optimizer, **grouped(**settings)) as first,
        pl.Trainer.setup(program.make, sgd_slow, **grouped(**settings)) as second,
    ):
        for one, other in zip(first.epochs(program.epochs), second.epochs(program.epochs), strict=True):
            for a, b in zip(one, other, strict=True):
                take(first, a)
                take(second, b)
        return {**weights_of(first.model), **{f"second {n}": v for n, v in weights_of(second.model).items()}}


def sgd_slow(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def plainly_by_turns(_: Program) -> Outcome:
    first = {name: value for name, value in run_plain(Program(EQUAL)).items() if name != "loss"}
    second = {name: value for name, value in run_plain(Program(EQUAL, optimizer=sgd_slow)).items() if name != "loss"}
    return {**first, **{f"second {name}": value for name, value in second.items()}}


def built_differently(program: Program, given: dict[str, Any]) -> Outcome:
    """Every worker builds a model of another width."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 8 + torch.distributed.get_rank()), nn.Linear(8, 4))

    with pl.Trainer.setup(build, program.optimizer, **grouped(**all_settings(program, given))) as trainer:
        return weights_of(trainer.model)


def seeded_differently(program: Program, given: dict[str, Any]) -> Outcome:
    """Every worker begins with other weights: rank 0's count."""
    torch.manual_seed(torch.distributed.get_rank())
    model, losses = program.build(), []
    with pl.Trainer.setup(model, program.optimizer, **grouped(**all_settings(program, given))) as trainer:
        trainer.every(1, lambda record: losses.append(record.loss))
        usual_loop(trainer, program)
    return {"loss": losses, **weights_of(model)}


INSIDE = r"was called inside an epoch's loop, which workers leave at different times"
LEFT = r"\bleft\b.*break|break.*\bleft\b"

PROGRAMS: dict[str, Program] = {
    # One worker goes on with the next epoch, without the step that was begun; several would leave at different steps.
    "break after a step": Program((EQUAL, refused(LEFT), refused(LEFT)), loop=break_after_step, batches=two_steps_each),
    "break in a micro-batch": Program(
        (EQUAL, refused(LEFT), refused(LEFT)), loop=break_in_micro_batch, batches=lambda _: []
    ),
    "a slice of an epoch": Program((EQUAL, refused(LEFT), refused(LEFT)), loop=sliced, batches=lambda _: []),
    "trainer.end_epoch": Program(EQUAL, loop=ended_epochs, batches=two_steps_each),
    "an epoch iterated twice": Program(refused(r"(once|twice|again|already)"), loop=twice),
    "a list of an epoch": Program(refused(r"asked for before step\(\) was called"), loop=listed),
    "a list of epochs": Program(equal_or_refused(r"epoch"), loop=kept_epochs),
    "trainer.end": Program(EQUAL, loop=ended, plain_loop=four_steps),
    "max_steps": Program(EQUAL, loop=limited, plain_loop=four_steps),
    "len(epoch)": Program(EQUAL, loop=with_progress),
    "epochs asked for again": Program(EQUAL, loop=again),
    "no step()": Program(refused(r"asked for before step\(\) was called"), loop=no_step),
    "no backward()": Program(refused(r"step\(\) was called before backward\(\)"), loop=no_backward),
    "continue": Program(refused(r"asked for before step\(\) was called"), loop=skipping),
    "step() twice": Program(refused(r"step\(\) was called without a micro-batch"), loop=two_steps),
    "batches of one's own": Program(refused(r"backward\(\) was called outside of a micro-batch"), loop=own_data_loader),
    "evaluation in the middle": Program(EQUAL, loop=evaluated, plain_loop=plainly_evaluated),
    "evaluate() in the loop": Program(
        refused(r"evaluate\(\) " + INSIDE), loop=inside(lambda t: t.evaluate((X, Y), mean_loss))
    ),
    "gather() in the loop": Program(refused(r"gather\(\)"), loop=inside(lambda t: t.gather(1))),
    "save() in the loop": Program(refused(r"save\(\) " + INSIDE), loop=inside(lambda t: t.save())),
    "end() in the loop": Program(refused(r"end\(\) " + INSIDE), loop=inside(lambda t: t.end())),
    "trainer.last_record": Program(EQUAL, loop=last_record, plain_loop=plain_last_record),
    "step_with": Program(EQUAL, loop=by_step_with),
    "weights changed in the loop": Program(
        (EQUAL, EQUAL, refused(r"(differ|drift).*0\.weight|0\.weight.*differ")),
        loop=clamped,
        plain_loop=plainly_clamped,
        epochs=34,
    ),
    "register without checkpoints": Program(equal_or_refused(r"register.*checkpoints"), loop=registered),
    "no close": Program(EQUAL, whole=not_closed),
    "a notebook": Program(EQUAL, whole=notebook),
    "training after close": Program(refused(r"closed"), whole=closed),
    "three trainers one after another": Program(EQUAL, whole=one_after_another, plain_whole=three_times),
    "nested trainers": Program(EQUAL, whole=nested_trainers, plain_whole=plainly_nested),
    # The worker without a share goes through all of the first trainer's steps before the second's first.
    "two trainers by turns": Program(
        (EQUAL, EQUAL, equal_or_refused(r"CommunicationTimeout: |CommunicationError: ")),
        whole=two_by_turns,
        plain_whole=plainly_by_turns,
        settings={"timeout_s": 2.0},
        modes=("plain",),
    ),
    "another model on every worker": Program(
        (EQUAL, *[refused(r"ranks \[1.*built a model whose parameters or buffers differ from rank 0's")] * 2),
        whole=built_differently,
        plain_whole=lambda _: weights_of(pl_initialized()),
    ),
    "other weights on every worker": Program(EQUAL, whole=seeded_differently, optimizer=sgd),
}


def pl_initialized() -> nn.Module:
    """The model that one worker builds in `built_differently`, seeded as Paceline seeds factories."""
    from paceline.core.seeding import Purpose, derive_seed

    torch.manual_seed(derive_seed(0, Purpose.MODEL_INIT))
    return nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4))
