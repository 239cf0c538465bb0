"""The optimizers' step, replayed: when it is captured, when anew, and why not. The graphs are imitated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capture_runs import Case, FakeGraphs, both, class_loss, sgd, use_graphs
from models import mlp, vectors

import paceline as pl
from paceline.run.capture.outbox import Outbox
from paceline.run.capture.update import CapturedUpdate, optimizer_obstacle


def test_a_schedule_in_every_step_leaves_the_optimizer_to_python_and_says_so() -> None:
    def falling(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)

    outcome, _ = both(Case(num_epochs=5), scheduler=falling)
    assert outcome.captured == ["micro-batch"]
    assert outcome.reasons == ["'lr' of its settings changed in nearly every step"]


def test_a_learning_rate_that_changes_now_and_then_is_captured_anew() -> None:
    def in_stairs(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.5)

    outcome, _ = both(Case(num_epochs=5), scheduler=in_stairs)
    assert outcome.captured.count("optimizer") == outcome.captured.count("whole step") == 4
    assert not outcome.reasons


def load_own_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def replace_own_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter, values in optimizer.state.items():
        optimizer.state[parameter] = {name: value.clone() for name, value in values.items()}


@pytest.mark.parametrize("change", [load_own_state, replace_own_state])
def test_an_optimizer_whose_state_was_replaced_is_captured_anew(change: Any) -> None:
    def load(trainer: pl.Trainer, step: int) -> None:
        if step == 20:
            change(trainer.optimizer)

    outcome, _ = both(Case(during=load))
    assert outcome.captured.count("optimizer") == 2


def test_a_state_that_was_put_in_anothers_place_is_the_one_that_counts() -> None:
    def forget_one(trainer: pl.Trainer, step: int) -> None:
        if step == 20:
            state = next(iter(trainer.optimizer.state.values()))
            name = next(iter(state))
            state[name] = torch.zeros_like(state[name])

    outcome, _ = both(Case(during=forget_one))
    assert outcome.captured.count("optimizer") == 2


def parameters() -> list[torch.Tensor]:
    return [torch.zeros(2, requires_grad=True)]


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (torch.optim.SGD(parameters(), lr=0.1), None),
        (torch.optim.AdamW(parameters(), fused=True), None),
        (torch.optim.Adam(parameters(), fused=True), None),
        (torch.optim.RMSprop(parameters(), capturable=True), None),
        (torch.optim.AdamW(parameters()), "AdamW computes on the host"),
        (torch.optim.Adagrad(parameters()), "Adagrad computes on the host"),
        (torch.optim.SGD(parameters(), lr=torch.tensor(0.1)), "SGD reads a learning rate that is a tensor"),
        (type("SGD", (torch.optim.SGD,), {"__module__": "mine"})(parameters(), lr=0.1), "SGD computes on the host"),
    ],
)
def test_optimizers_that_a_graph_can_repeat(optimizer: torch.optim.Optimizer, reason: str | None) -> None:
    obstacle = optimizer_obstacle([optimizer])
    assert obstacle is None if reason is None else obstacle is not None and obstacle.startswith(reason)


def test_an_optimizer_that_cannot_be_captured_leaves_the_micro_batches_captured() -> None:
    outcome, _ = both(Case(optimizer=lambda p: torch.optim.Adagrad(p, lr=0.05)))
    assert outcome.captured == ["micro-batch"]
    assert len(outcome.reasons) == 1


def test_a_step_hook_of_the_optimizers_is_called_in_every_step() -> None:
    calls: list[int] = []

    def optimizer(given: Any) -> torch.optim.Optimizer:
        made = sgd(given)
        made.register_step_post_hook(lambda *_: calls.append(1))
        return made

    outcome = Case(optimizer=optimizer).run(FakeGraphs())
    assert len(calls) == 40
    assert outcome.reasons == ["SGD has step hooks, which a replay does not call"]


def test_the_numbers_of_the_step_before_are_safe_from_a_replayed_update() -> None:
    """Graphs share their memory: the optimizer's may overwrite what the graph of a whole step has left."""
    with pl.Trainer.setup(mlp, sgd, data=vectors(32), global_batch=16, runtime=pl.Runtime(quiet=True)) as trainer:
        graphs = FakeGraphs()
        use_graphs(trainer, graphs)
        update = trainer.run.loop.update
        assert isinstance(update, CapturedUpdate)
        for parameter in trainer.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        update.is_enabled = True
        while graphs.num_replayed == 0:
            update.step()
        left = torch.tensor(7.0)
        outbox = Outbox([left])
        update.recorder.before_replay(outbox)
        (loss,) = outbox.add()
        update.step()
        left.fill_(float("nan"))
        assert loss.item() == 7.0


def test_a_function_that_cannot_be_captured_leaves_the_optimizer_of_another_captured() -> None:
    with pl.Trainer.setup(mlp, sgd, data=vectors(16 * 60), global_batch=16, runtime=pl.Runtime(quiet=True)) as trainer:
        captured: list[str] = []
        trainer.listen(
            lambda event: captured.append(event.details.get("what", "")) if event.name == "capture" else None
        )
        use_graphs(trainer, FakeGraphs())
        first = trainer.step_with(lambda batch: class_loss(trainer.model, batch))
        second = trainer.step_with(lambda batch: class_loss(trainer.model, batch) * float(torch.rand(())))
        for epoch in trainer.epochs(1):
            for number, batch in enumerate(epoch):
                (second if 20 <= number < 32 else first)(batch)
    assert captured == ["micro-batch", "optimizer", "whole step", "micro-batch", "optimizer", "whole step"]
