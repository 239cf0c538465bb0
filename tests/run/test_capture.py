"""Who is captured, when, and why not. The graphs are imitated: what CUDA's own do is tested where there is a GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from capture_runs import Case, FakeGraphs, Outcome, both, class_loss, sgd, use_graphs
from grouping import grouped
from models import SmallResNet, digest, images, mlp, vectors
from torch import nn
from worker_pool import WorkerPool

import paceline as pl
from paceline.core.world import World
from paceline.run.capture.graphs import Seconds, graphs_for
from paceline.run.capture.inputs import Inputs
from paceline.run.capture.step import COST_OF_CHANGE, MAX_EAGER
from paceline.run.config import RunConfig


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("micro_batch_size", [16, 4])
@pytest.mark.parametrize("build", [mlp, BatchNormNet])
def test_a_captured_run_ends_with_the_same_bits(build: Any, micro_batch_size: int, exact: bool) -> None:
    settings = {"global_batch": 16, "micro_batch": micro_batch_size}
    outcome, graphs = both(Case(build=build, settings=settings, num_epochs=3), exact=exact, max_grad_norm=1.0)
    assert outcome.captured.count("optimizer") == 1
    assert not outcome.reasons
    assert graphs.num_replayed > 40


def test_all_micro_batches_of_a_step_share_a_graph() -> None:
    outcome, _ = both(Case(settings={"global_batch": 16, "micro_batch": 4}))
    assert outcome.captured.count("micro-batch") == 1


def test_statistics_with_running_averages_are_combined_as_without_capture() -> None:
    case = Case(build=SmallResNet, data=images(8 * 16), settings={"global_batch": 16, "micro_batch": 4}, num_epochs=3)
    outcome, _ = both(case)
    assert not outcome.reasons


def test_a_smaller_batch_at_the_end_of_an_epoch_is_run_by_python() -> None:
    outcome, graphs = both(Case(data=vectors(16 * 20 + 5), num_epochs=3))
    assert outcome.captured[:3] == ["micro-batch", "optimizer", "whole step"]
    assert outcome.captured.count("optimizer") == outcome.captured.count("whole step") == 1
    assert not outcome.reasons
    assert graphs.num_replayed > 40


def test_parameters_that_only_some_shapes_use_get_their_state_before_a_graph_needs_it() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.usual, self.rare = nn.Linear(12, 4), nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.usual(x) if len(x) == 16 else self.usual(x) + self.rare(x)

    outcome, _ = both(Case(build=Branching, data=vectors(2 * 16 + 5), num_epochs=25))
    captured = outcome.captured
    assert [captured.count(what) for what in ("micro-batch", "optimizer", "whole step")] == [2, 2, 2]
    for end in range(len(captured)):
        assert captured[:end].count("whole step") <= captured[:end].count("optimizer")
    assert not outcome.reasons


def test_a_hook_that_comes_later_lies_between_the_gradients_and_the_optimizers() -> None:
    def add(trainer: pl.Trainer, step: int) -> None:
        if step == 25:
            trainer.on_gradients(lambda named: [p.grad.mul_(0.5) for p in named.values()])

    outcome, _ = both(Case(during=add))
    assert outcome.captured == ["micro-batch", "optimizer", "whole step"]


def test_what_a_graph_has_done_counts_for_its_own_step_only() -> None:
    def broken_off(trainer: pl.Trainer, step: int) -> None:
        if step == 41:  # Python runs the next, which is the smaller one at the epoch's end
            trainer.run.loop.update.is_done = True  # as an error between replay and update leaves it

    both(Case(data=vectors(16 * 20 + 5), during=broken_off))


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("rate_changes_every", [25, 1000])
def test_every_record_keeps_the_numbers_of_its_own_step(max_grad_norm: float | None, rate_changes_every: int) -> None:
    def in_stairs(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, rate_changes_every, 0.5)

    def numbers(graphs: FakeGraphs | None) -> list[tuple[float, float | None]]:
        records: list[pl.StepRecord] = []
        settings = {"global_batch": 16, "max_grad_norm": max_grad_norm, "garbage_collection": "as usual", "quiet": True}
        with pl.Trainer.setup(mlp, sgd, data=vectors(16 * 60), scheduler=in_stairs, **grouped(**settings)) as trainer:
            if graphs is not None:
                use_graphs(trainer, graphs)
            trainer.every(1, records.append)
            step = trainer.step_with(lambda batch: class_loss(trainer.model, batch))
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    step(batch)
        return [(record.loss, record.grad_norm) for record in records]

    graphs = FakeGraphs()
    assert numbers(graphs) == numbers(None)
    assert graphs.num_replayed > 100


def test_functions_that_take_turns_leave_each_others_losses_alone() -> None:
    def losses(graphs: FakeGraphs | None) -> list[float]:
        records: list[pl.StepRecord] = []
        with pl.Trainer.setup(
            mlp, sgd, data=vectors(16 * 60), global_batch=16, runtime=pl.Runtime(quiet=True)
        ) as trainer:
            if graphs is not None:
                use_graphs(trainer, graphs)
            trainer.every(1, records.append)
            steps = [
                trainer.step_with(lambda batch: class_loss(trainer.model, batch)),
                trainer.step_with(lambda batch: trainer.model(batch.x).square().mean()),
            ]
            for epoch in trainer.epochs(1):
                for number, batch in enumerate(epoch):
                    steps[number % 2](batch)
        return [record.loss for record in records]

    graphs = FakeGraphs()
    assert losses(graphs) == losses(None)
    assert graphs.num_replayed > 30


def test_a_loss_that_is_no_number_is_found_though_nobody_asks_for_it() -> None:
    x, y = vectors(16 * 20)
    x[-16:] = float("nan")
    with pl.Trainer.setup(
        mlp, sgd, data=(x, y), global_batch=16, shuffle=False, runtime=pl.Runtime(quiet=True)
    ) as trainer:
        use_graphs(trainer, FakeGraphs())
        step = trainer.step_with(lambda batch: class_loss(trainer.model, batch))
        with pytest.raises(pl.errors.NonFiniteError, match="loss is nan at step 20, micro-batch 0, rank 0"):
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    step(batch)


def test_batches_whose_shapes_never_repeat_are_not_captured() -> None:
    lengths = torch.randint(1, 2000, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    data = [torch.ones(n) for n in lengths]
    case = Case(
        build=lambda: nn.Linear(1, 1),
        data=data,
        loss=lambda model, batch: model(batch[0].mean().reshape(1, 1)).square().mean(),
        settings={"global_batch": 1, "collate_fn": list},
    )
    outcome, _ = both(case)
    assert outcome.reasons == ["too few micro-batches can be replayed: shapes or the model change too often"]


def test_a_model_that_keeps_the_device_busy_is_left_to_python() -> None:
    graphs = FakeGraphs(seconds=Seconds(host=1e-3, device=2e-3))
    outcome = Case().run(graphs)
    assert graphs.num_recorded == 0
    assert outcome.reasons == [
        "the device needs 2.00 ms for a micro-batch that is launched in 1.00 ms, so it does not wait for the host"
    ]


def test_on_captures_without_judging(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, graphs = _forced(Case(), FakeGraphs(seconds=Seconds(host=1e-3, device=2e-3)), monkeypatch)
    assert graphs.num_recorded == 3
    assert not outcome.reasons


def test_on_says_why_it_cannot_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        pl.errors.MisuseError, match=r'capture="on", but a micro-batch cannot be captured: it waits\. Change'
    ):
        _forced(Case(), FakeGraphs(fails="it waits"), monkeypatch)


def _forced(case: Case, graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, FakeGraphs]:
    monkeypatch.setattr("paceline.run.assemble.graphs_for", lambda *_: graphs)
    return case.run(capture="on"), graphs


def test_work_that_cannot_be_recorded_is_run_by_python_from_then_on() -> None:
    for settings in ({"global_batch": 16}, {"global_batch": 16, "micro_batch": 4}):
        case = Case(settings=settings)
        failed, plain = case.run(FakeGraphs(fails="it waits for the device")), case.run()
        assert failed.digest == plain.digest
        assert failed.reasons == ["it waits for the device"]


@pytest.mark.parametrize(
    ("device", "settings", "reason"),
    [
        ("cpu", {}, "cpu is not a CUDA device"),
        ("cuda:0", {"precision": "fp16"}, "with fp16 the host decides after backward whether a step is taken"),
        ("cuda:0", {"capture": "off"}, 'capture="off"'),
    ],
)
def test_what_is_known_beforehand_to_rule_capture_out(device: str, settings: Any, reason: str) -> None:
    world = World(device=torch.device(device))
    assert graphs_for(RunConfig(global_batch=8, **grouped(**settings)), world) == reason


def test_on_where_nothing_can_be_captured_is_an_error_before_anything_starts() -> None:
    with pytest.raises(ValueError, match='capture="on", but nothing can be captured: cpu is not a CUDA device; choose'):
        Case().run(capture="on", device="cpu")


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(ValueError, match="capture='yes' is unknown: choose 'auto', 'on' or 'off'"):
        Case().run(capture="yes")


def test_off_and_a_cpu_run_everything_by_python_and_say_nothing() -> None:
    assert Case().run(capture="off").events == Case().run().events == []


class Tempered(nn.Module):
    """Its output depends on an attribute that Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.num_calls = 0
        self.layer = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) / self.temperature


def test_a_changed_attribute_is_seen_and_captured_anew() -> None:
    def change(trainer: pl.Trainer, step: int) -> None:
        if step == 60:
            trainer.model.temperature = 2.0

    outcome, _ = both(Case(build=Tempered, during=change, num_epochs=5))
    assert outcome.reasons == ["'temperature' of 'model' changed"]
    assert outcome.captured.count("micro-batch") == 2


def test_a_model_that_changes_all_the_time_is_left_to_python() -> None:
    def change(trainer: pl.Trainer, step: int) -> None:
        if step % 8 == 0:
            trainer.model.temperature += 0.1

    outcome, _ = both(Case(build=Tempered, during=change, num_epochs=5))
    assert outcome.captured.count("micro-batch") == MAX_EAGER // COST_OF_CHANGE
    assert outcome.reasons[-1] == "too few micro-batches can be replayed: shapes or the model change too often"


def test_a_layer_that_is_switched_to_evaluation_is_seen() -> None:
    def switch(trainer: pl.Trainer, step: int) -> None:
        if step == 20:
            trainer.model.layers[1].eval()

    outcome, _ = both(Case(build=BatchNormNet, during=switch))
    assert outcome.reasons == ["'training' of 'layers.1' changed"]


def test_parameters_that_moved_are_seen() -> None:
    def move(trainer: pl.Trainer, step: int) -> None:
        if step == 20:
            for parameter in trainer.model.parameters():
                parameter.data = parameter.data.clone()

    outcome, _ = both(Case(during=move))
    assert outcome.reasons == ["a parameter or buffer has moved to other memory"]
    assert outcome.captured == 2 * ["micro-batch", "optimizer", "whole step"]


class Counting(Tempered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.layer(x) / self.num_calls


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.layer = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.layer(x) / self.seen


class Drawing(Tempered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * random.random()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Counting, "'num_calls' of 'model' changed"),
        (Replacing, "'seen' was replaced by another tensor"),
        (Drawing, "the function draws random numbers on the host"),
        (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(12, 4)), "the function draws random numbers on the host"),
    ],
)
def test_a_forward_pass_that_does_more_than_a_graph_would_is_left_to_python(build: Any, reason: str) -> None:
    def case() -> Case:
        random.seed(3)
        return Case(build=build)

    captured, plain = case().run(FakeGraphs()), case().run()
    assert captured.reasons == [reason]
    assert not captured.captured
    assert captured.digest == plain.digest


def test_a_gradient_hook_of_the_users_is_called_for_every_micro_batch() -> None:
    calls: list[int] = []

    def build() -> nn.Module:
        model = mlp()
        model[0].weight.register_hook(lambda _: calls.append(1))
        return model

    outcome = Case(build=build).run(FakeGraphs())
    assert len(calls) == 40
    assert outcome.reasons == ["parameter '0.weight' has a gradient hook, which a replay does not call"]


def test_a_backward_hook_of_a_module_is_called_for_every_micro_batch() -> None:
    calls: list[int] = []

    def build() -> nn.Module:
        model = mlp()
        model[2].register_full_backward_hook(lambda *_: calls.append(1))
        return model

    outcome = Case(build=build).run(FakeGraphs())
    assert len(calls) == 40
    assert outcome.reasons == ["module '2' has a backward hook, which a replay does not call"]


def test_an_attribute_that_is_an_array_may_be_replaced() -> None:
    class WithArray(Tempered):
        def __init__(self) -> None:
            super().__init__()
            self.seen = np.zeros(3)

    def replace(trainer: pl.Trainer, step: int) -> None:
        if step == 25:
            trainer.model.seen = np.ones(3)

    outcome, _ = both(Case(build=WithArray, during=replace))
    assert outcome.reasons == ["'seen' of 'model' changed"]


def test_on_refuses_a_loop_that_gives_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.run.assemble.graphs_for", lambda *_: FakeGraphs())
    with (
        pl.Trainer.setup(
            mlp, sgd, data=vectors(32), global_batch=16, runtime=pl.Runtime(quiet=True, capture="on")
        ) as trainer,
        pytest.raises(pl.errors.MisuseError, match="needs the loss as a function: use trainer"),
    ):
        for batch in next(trainer.epochs(1)):
            trainer.backward(class_loss(trainer.model, batch))


def test_a_batch_with_something_opaque_is_left_to_python() -> None:
    case = Case(
        data=[(torch.randn(12), i % 4) for i in range(64)],
        settings={"global_batch": 8, "collate_fn": _with_object},
        loss=lambda model, batch: class_loss(model, batch["pair"]),
    )
    outcome, _ = both(case)
    assert outcome.reasons == ["the batch has a value of type object, whose changes cannot be detected"]


def _with_object(samples: list[Any]) -> dict[str, Any]:
    from paceline.data.sources.base import Pair

    x, y = torch.stack([s[0] for s in samples]), torch.tensor([s[1] for s in samples])
    return {"pair": Pair(x, y), "extra": object()}


@pytest.mark.parametrize("micro_batch_size", [16, 4])
def test_weights_may_differ_from_one_micro_batch_to_the_next(micro_batch_size: int) -> None:
    def weight_of(batch: Any) -> int:
        return int(batch.y.sum()) % 5  # 0 now and then

    settings = {"global_batch": 16, "micro_batch": micro_batch_size, "weight_fn": weight_of}
    outcome, graphs = both(Case(settings=settings))
    assert not outcome.reasons
    assert graphs.num_replayed > 30


def test_hooks_that_change_the_gradients_and_an_average_of_the_weights_see_what_they_would() -> None:
    def run(graphs: FakeGraphs | None) -> Any:
        with pl.Trainer.setup(
            mlp,
            sgd,
            data=vectors(320),
            global_batch=16,
            optimization=pl.Optimization(ema=0.9),
            runtime=pl.Runtime(quiet=True),
        ) as trainer:
            if graphs is not None:
                use_graphs(trainer, graphs)
            trainer.on_gradients(lambda named: [p.grad.mul_(0.5) for p in named.values()])
            step = trainer.step_with(lambda batch: class_loss(trainer.model, batch))
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    step(batch)
            with trainer.ema_weights():
                return digest(trainer.model.state_dict())

    assert run(FakeGraphs()) == run(None)


def test_two_workers_replay_and_agree(pool: WorkerPool) -> None:
    def work(is_captured: bool) -> tuple[str, int]:
        graphs = FakeGraphs()
        case = Case(settings={"global_batch": 16, "micro_batch": 4, "shares": "equal"})
        return case.run(graphs if is_captured else None, exact=True).digest, graphs.num_replayed

    captured, plain = pool.run(work, 2, True), pool.run(work, 2, False)
    assert {d for d, _ in captured} == {d for d, _ in plain}
    assert all(num_replayed > 40 for _, num_replayed in captured)


def test_the_builders_numbers_are_those_of_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.api import builder_worker

    def means(graphs: Any) -> list[float]:
        monkeypatch.setattr("paceline.run.assemble.graphs_for", lambda *_: graphs or "none")
        received: list[dict[str, Any]] = []

        class FakeChannel:
            def send(self, metrics: dict[str, Any]) -> None:
                received.append(metrics)

            def is_stop_requested(self) -> bool:
                return False

        def train_fn(model: Any, batch: Any) -> Any:
            logits = model(batch.x)
            accuracy = (logits.argmax(1) == batch.y).double().mean()
            return nn.functional.cross_entropy(logits, batch.y), {"accuracy": accuracy}

        made = builder_worker.WorkerTask(
            mlp,
            sgd,
            train_fn,
            vectors(320),
            2,
            (torch.device("cpu"),),
            {"global_batch": 16, "micro_batch": 4, "runtime": pl.Runtime(quiet=True)},
        )
        builder_worker.train(made, FakeChannel())  # type: ignore[arg-type]
        return [metrics["scalars"]["accuracy"] for metrics in received]

    graphs = FakeGraphs()
    assert means(graphs) == means(None)
    assert graphs.num_replayed > 20


def test_a_batch_of_constants_has_nothing_to_copy() -> None:
    inputs = Inputs({"number": 3})
    inputs.fill([])
    assert inputs.batch == {"number": 3}
