"""CUDA graphs: a run that replays them ends with the bits of one that does not. CI has no GPU; run by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from capture_runs import Case, Outcome, class_loss, sgd
from models import images, mlp, vectors
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.run.capture.graphs import CudaGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"one": {"global_batch": 16}, "three": {"global_batch": 12, "micro_batch": 4}}


class ConvNet(nn.Module):
    """BatchNorm with a momentum; a running average would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def dropout_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 4), nn.Dropout(0.1))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, fused=True)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)


CASES = {
    "mlp": Case(),
    "dropout": Case(build=dropout_mlp),
    "batch norm": Case(build=ConvNet, data=images(16 * 20)),
    "adamw": Case(build=dropout_mlp, optimizer=adamw),
    "clipping": Case(optimizer=adamw, settings={**SIZES["one"], "max_grad_norm": 0.3}),
    "schedule": Case(optimizer=adamw, settings={**SIZES["one"], "scheduler": falling, "max_grad_norm": 0.3}),
    "ragged": Case(data=vectors(16 * 20 + 5), num_epochs=3),
}


def both(case: Case, **settings: Any) -> Outcome:
    """The captured run, once it was seen to end as the one without capture."""
    captured = case.run(device="cuda", capture="auto", **settings)
    plain = case.run(device="cuda", capture="off", **settings)
    assert captured.records == plain.records
    assert captured.digest == plain.digest
    return captured


@pytest.fixture(autouse=True)
def same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the device waits for the host depends on the machine, and cuDNN's sums on the moment."""
    monkeypatch.setattr("paceline.run.capture.step.LAUNCH_BOUND", float("inf"))
    monkeypatch.setattr("torch.backends.cudnn.deterministic", True)


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_a_captured_run_ends_with_the_same_bits(name: str, size: str, exact: bool) -> None:
    case = replace(CASES[name], settings={**CASES[name].settings, **SIZES[size]})
    outcome = both(case, exact=exact)
    assert "micro-batch" in outcome.captured, outcome.events
    assert ("optimizer" in outcome.captured) == (name != "schedule"), outcome.events
    is_whole = size == "one" and not exact and name != "schedule"
    assert ("whole step" in outcome.captured) == is_whole, outcome.events


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
def test_bf16_is_captured(exact: bool) -> None:
    assert both(Case(build=dropout_mlp, optimizer=adamw), precision="bf16", exact=exact).captured


def test_two_ranks_on_one_gpu_replay_and_agree(pool: WorkerPool) -> None:
    def work(capture: str) -> Outcome:
        settings = {"global_batch": 16, "micro_batch": 4, "shares": "equal"}
        case = Case(build=dropout_mlp, optimizer=adamw, settings=settings)
        return case.run(device="cuda", capture=capture, exact=True)

    def judged_worthwhile(capture: str) -> Outcome:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("paceline.run.capture.step.LAUNCH_BOUND", float("inf"))
            return work(capture)

    captured, plain = pool.run(judged_worthwhile, 2, "auto"), pool.run(work, 2, "off")
    (alone,) = pool.run(work, 1, "off")
    assert {outcome.digest for outcome in captured} == {outcome.digest for outcome in plain} == {alone.digest}
    assert all("micro-batch" in outcome.captured and "optimizer" in outcome.captured for outcome in captured)


class Syncing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = dropout_mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        if self.kind == "item" and y.sum().item() == 0.5:
            return y * 2
        if self.kind == "cpu":
            return y + y.detach().mean().cpu().to(y.device)
        return y[y.sum(1) > -1e9]  # asks the device how many there are


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["item", "cpu", "mask"])
def test_a_model_that_waits_for_the_device_is_left_to_python_and_the_device_is_as_it_was(kind: str, size: str) -> None:
    outcome = both(Case(build=lambda: Syncing(kind), settings=SIZES[size]))
    assert not outcome.captured
    assert len(outcome.reasons) == 1
    assert "captur" in outcome.reasons[0]


def test_an_error_in_the_backward_of_a_capture_leaves_everything_as_it_was() -> None:
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            gradient.sum().item()
            return gradient

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(Waits.apply(model(batch.x)), batch.y)

    outcome = both(Case(build=dropout_mlp, loss=loss))
    assert not outcome.captured


def test_on_says_why_it_cannot_capture() -> None:
    with pytest.raises(pl.errors.MisuseError, match=r'capture="on", but a micro-batch cannot be captured: .*capturing'):
        Case(build=lambda: Syncing("item")).run(device="cuda", capture="on")
    assert Case().run(device="cuda", capture="on").captured  # the next run is none the worse for it


def test_fp16_is_left_to_python() -> None:
    outcome = Case().run(device="cuda", precision="fp16")
    assert outcome.reasons == ["with fp16 the host decides after backward whether a step is taken"]


def test_a_large_model_keeps_the_device_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    wide = Case(
        build=lambda: nn.Sequential(nn.Linear(12, 8192), nn.Linear(8192, 8192), nn.Linear(8192, 4)),
        data=vectors(2048 * 12),
        settings={"global_batch": 2048},
    )
    outcome = wide.run(device="cuda")
    assert not outcome.captured
    assert outcome.reasons[0].startswith("the device needs")
    assert Case().run(device="cuda").captured


def test_a_nan_is_found() -> None:
    x, y = vectors(16 * 20)
    x[-16:] = float("nan")
    with pytest.raises(pl.errors.NonFiniteError, match="loss is nan at step 20, micro-batch 0, rank 0"):
        Case(data=(x, y)).run(device="cuda", shuffle=False)


def test_steps_neither_allocate_nor_wait_once_they_are_captured() -> None:
    data = tuple(t.cuda() for t in vectors(16 * 60))
    with pl.Trainer.setup(
        mlp, sgd, data=data, global_batch=16, device="cuda", runtime=pl.Runtime(quiet=True)
    ) as trainer:
        step = trainer.step_with(lambda batch: class_loss(trainer.model, batch))
        allocated = []
        for epoch in trainer.epochs(1):
            for batch in epoch:
                if trainer.position.step == 40:
                    torch.cuda.set_sync_debug_mode("error")
                step(batch)
                allocated.append(torch.cuda.memory_allocated())
            torch.cuda.set_sync_debug_mode("default")
    assert max(allocated[40:]) <= max(allocated[20:40])


def test_graphs_can_be_recorded_again_after_all_were_dropped() -> None:
    """Torch frees the memory pool with its last graph. It cannot be used again: another one is."""
    graphs = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))
    x = torch.ones(1000, device="cuda")
    for _ in range(3):
        graph, doubled = graphs.record(lambda: 2 * x)
        graph.replay()
        assert doubled.sum().item() == 2000
        del graph, doubled
