"""The kernel that adds many gradients at once: bit for bit what is added one by one. CI has no GPU; run by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import SmallTransformer, digest, mlp, tokens, vectors
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.sync.buckets import OneTermBucket, add_exactly, in_layout_of, largest_magnitude
from paceline.sync.fused import SWITCH, Arrival, FusedAddition, fused_addition
from paceline.sync.gradients import BucketedGradients
from paceline.sync.grid import Grid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Around the sizes of a program's chunk and block, and a tensor that many programs share.
SHAPES = [(), (1,), (3, 5), (0,), (1023,), (1024,), (1025,), (8191,), (8192,), (8193,), (64, 33, 3, 3), (700, 1024)]
ODD_NUMBERS = [0.0, -0.0, 1e-40, -1e-45, 1e-320, 2.0**-52, 1.0 / 3.0, 1e4, -3e4]


@pytest.fixture(scope="module")
def kernel() -> FusedAddition:
    found = fused_addition(DEVICE)
    assert found is not None, "this machine has a GPU: the log says why the kernel is not used"
    return found


def gradients(dtype: torch.dtype, *, seed: int, specials: tuple[float, ...] = ()) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    made = []
    for number, shape in enumerate(SHAPES):
        gradient = torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float64)
        # Over 60 powers of two, as small gradients are cut off by the grid and must be cut off alike.
        gradient *= torch.exp2(torch.randint(-50, 10, shape, generator=generator, device=DEVICE).double())
        flat = gradient.view(-1)
        odd = torch.tensor([*ODD_NUMBERS, *specials], device=DEVICE, dtype=torch.float64)
        if flat.numel() > 2 * len(odd):
            flat[number : number + len(odd)] = odd
        made.append(gradient.to(dtype))
    return made


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN has many bit patterns, which mean the same; 0.0 and -0.0 do not."""
    whole = {8: torch.int64, 4: torch.int32}[a.element_size()]
    is_nan = a.isnan()
    return torch.equal(is_nan, b.isnan()) and torch.equal(a[~is_nan].view(whole), b[~is_nan].view(whole))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("weight", [1.0, 3.0, 1 / 3, 7 / 65536 / 11])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_on_a_grid_have_the_bits_of_plain_torch(
    dtype: torch.dtype, weight: float, first: bool, kernel: FusedAddition
) -> None:
    grids = [Grid(top) for top in (14, 3, 20)]
    terms = gradients(dtype, seed=1)
    totals = [torch.randn(t.shape, device=DEVICE, dtype=torch.float64) for t in terms]
    expected = [total.clone() for total in totals]
    peaks, expected_peaks = (torch.zeros(3, 4, device=DEVICE, dtype=torch.float64) for _ in range(2))
    arrivals = []
    for i, (term, total, reference) in enumerate(zip(terms, totals, expected, strict=True)):
        arrivals.append(Arrival(term, total, peaks[i % 3], grids[i % 3].anchor, first))
        add_exactly(reference.view(-1), term.view(-1), weight, grids[i % 3], first=first)
        place = expected_peaks[i % 3, 2]
        torch.maximum(place, largest_magnitude(term), out=place)
    kernel.add(arrivals, weight, 2)
    assert all(same_bits(a, b) for a, b in zip(totals, expected, strict=True))
    assert same_bits(peaks, expected_peaks)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_passes_through_and_shows_in_the_peak(
    dtype: torch.dtype, special: float, kernel: FusedAddition
) -> None:
    terms = gradients(dtype, seed=2, specials=(special,))
    totals = [torch.zeros(t.shape, device=DEVICE, dtype=torch.float64) for t in terms]
    expected = [total.clone() for total in totals]
    peaks = torch.zeros(1, device=DEVICE, dtype=torch.float64)
    kernel.add([Arrival(t, s, peaks, Grid().anchor, False) for t, s in zip(terms, totals, strict=True)], 0.25, 0)
    for term, reference in zip(terms, expected, strict=True):
        add_exactly(reference.view(-1), term.view(-1), 0.25, Grid(), first=False)
    assert all(same_bits(a, b) for a, b in zip(totals, expected, strict=True))
    assert peaks.isnan().item() if special != special else peaks.item() == float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_only_term_has_the_bits_of_plain_torch(dtype: torch.dtype, kernel: FusedAddition) -> None:
    for term in gradients(dtype, seed=3, specials=(float("inf"),)):
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        total, expected = (torch.full(term.shape, 5.0, device=DEVICE, dtype=sums) for _ in range(2))
        peaks = torch.zeros(1, device=DEVICE, dtype=sums)
        kernel.add([Arrival(term, total, peaks, None, True)], 1 / 3, 0)
        bucket = OneTermBucket.__new__(OneTermBucket)
        bucket.views = [expected]
        bucket.add(0, term, 1 / 3, first=True)
        assert same_bits(total, expected)
        assert same_bits(peaks, largest_magnitude(term).to(sums).reshape(1))


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
        lambda x: x.flatten()[:1].expand(x.numel()).view(x.shape),
    ],
    ids=["transposed", "channels last", "part of another", "expanded"],
)
def test_gradients_of_any_layout_are_added_where_they_belong(
    lay_out: Callable[[torch.Tensor], torch.Tensor], kernel: FusedAddition
) -> None:
    term = lay_out(torch.randn(8, 6, 5, 7, device=DEVICE))
    total = torch.zeros(8, 6, 5, 7, device=DEVICE, dtype=torch.float64)
    peaks = torch.zeros(1, device=DEVICE, dtype=torch.float64)
    kernel.add([Arrival(in_layout_of(total, term), total, peaks, Grid().anchor, True)], 1.0, 0)
    torch.testing.assert_close(total, term.double(), rtol=0, atol=2.0**-37)


class Convolutions(nn.Module):
    """Channels last, BatchNorm, and a parameter that is used in every other micro-batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        self.sometimes = nn.Parameter(torch.ones(4))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.norm(self.first(x)))).mean((2, 3))
        return y * self.sometimes if self.norm.training and x[0, 0, 0, 0] > 0 else y


IMAGES = torch.randn(96, 3, 8, 8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(4, (96,), generator=torch.Generator().manual_seed(1))
RUNS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "transformer": (SmallTransformer, tokens(96)),
    "convolutions": (Convolutions, (IMAGES, CLASSES)),
    "mlp": (mlp, vectors(96)),
}


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, torch.Tensor):
        return functional.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
    return functional.cross_entropy(model(batch[0]), batch[1])


def outcome(name: str, **settings: Any) -> str:
    """A digest of the end of a short run."""
    build, data = RUNS[name]
    settings = {"global_batch": 16, "micro_batch": 4, "exact": True, "device": "cuda", "quiet": True, **settings}
    backward = settings.pop("backward", lambda trainer, loss: trainer.backward(loss))
    with pl.Trainer.setup(build, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), data=data, **settings) as trainer:
        for epoch in trainer.epochs(2):
            for batch in epoch:
                with trainer.autocast():
                    loss = loss_of(trainer.model, batch)
                backward(trainer, loss)
                trainer.step()
        return digest(trainer.model.state_dict(), trainer.optimizer.state_dict())


def twice(trainer: pl.Trainer, loss: torch.Tensor) -> None:
    """Every parameter gets two gradients in one micro-batch."""
    (0.3 * loss).backward(retain_graph=True)
    trainer.backward(0.7 * loss)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("micro_batch", [4, 16])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_with_the_same_bits_without_the_kernel(
    name: str, micro_batch: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = outcome(name, micro_batch=micro_batch, precision=precision)
    monkeypatch.setenv(SWITCH, "0")
    assert outcome(name, micro_batch=micro_batch, precision=precision) == fused


@pytest.mark.parametrize("micro_batch", [4, 16])
def test_several_backwards_in_a_micro_batch_end_with_the_same_bits(
    micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = outcome("mlp", micro_batch=micro_batch, backward=twice)
    monkeypatch.setenv(SWITCH, "0")
    assert outcome("mlp", micro_batch=micro_batch, backward=twice) == fused


@pytest.mark.parametrize("name", RUNS)
def test_steps_of_one_micro_batch_take_the_same_course_on_two_ranks(name: str, pool: WorkerPool) -> None:
    def run() -> str:
        return outcome(name, micro_batch=16)

    assert set(pool.run(run, 2)) == set(pool.run(run, 1))


def test_waiting_gradients_are_added_before_their_memory_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = outcome("transformer")
    monkeypatch.setattr("paceline.sync.gradients.WAITING_BYTES", 1)
    assert outcome("transformer") == fused


def test_a_grid_that_does_not_fit_repeats_the_step_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def burst(trainer: pl.Trainer, loss: torch.Tensor) -> None:
        trainer.backward(loss * 1e6 if trainer.position.step == 3 else loss)

    fused = outcome("mlp", backward=burst)
    monkeypatch.setenv(SWITCH, "0")
    assert outcome("mlp", backward=burst) == fused


# In exact mode of several micro-batches the host has to see whether the sums fitted; nowhere else may it wait.
@pytest.mark.parametrize("settings", [{}, {"exact": False}, {"micro_batch": 16}, {"micro_batch": 16, "exact": False}])
def test_a_warm_step_neither_waits_for_the_device_nor_allocates_on_it(settings: dict[str, Any]) -> None:
    build, data = mlp, RUNS["mlp"][1]
    on_device = tuple(t.to(DEVICE) for t in data)
    optimizer = lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)  # noqa: E731
    settings = {"global_batch": 16, "micro_batch": 4, "exact": True, "device": "cuda", "quiet": True, **settings}
    with pl.Trainer.setup(build, optimizer, data=on_device, **settings) as trainer:
        for number, epoch in enumerate(trainer.epochs(8)):
            if number == 4:
                torch.cuda.synchronize()
                before = torch.cuda.memory_stats()
                torch.cuda.set_sync_debug_mode("error")
            try:
                for batch in epoch:
                    trainer.backward(loss_of(trainer.model, batch))
                    trainer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    assert after["segment.all.allocated"] == before["segment.all.allocated"]
    assert after["num_sync_all_streams"] == before["num_sync_all_streams"]


def test_exact_mode_takes_the_memory_of_its_buffers_and_no_more() -> None:
    def peak(exact: bool) -> int:
        big = lambda: nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))  # noqa: E731
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with pl.Trainer.setup(
            big, lambda p: torch.optim.SGD(p, lr=0.1), data=torch.randn(64, 2048), global_batch=16, exact=exact
        ) as trainer:
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    trainer.backward(trainer.model(batch).square().mean())
                    trainer.step()
        return torch.cuda.max_memory_allocated() - before

    peak(True), peak(False)  # libraries take memory of their own when they are first used
    parameters = 2 * (2048 * 2048 + 2048) * 4
    assert peak(True) <= peak(False) + parameters + (1 << 20)


def test_a_captured_graph_adds_the_gradients_one_by_one() -> None:
    """Addresses are fetched from the host: a graph would fetch those of another step."""
    parameter = nn.Parameter(torch.zeros(8, device=DEVICE))
    exchange = bucketed(parameter)
    term = torch.ones(8, device=DEVICE)

    def micro_batch() -> None:
        exchange.begin_step((range(2),), total_weight=2)
        exchange.begin_micro_batch(0, 1, is_last=False)
        parameter.grad = term.clone()
        exchange.end_micro_batch(None)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        micro_batch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        micro_batch()
    term.fill_(6.0)
    graph.replay()
    torch.cuda.synchronize()
    assert exchange._buckets[0].views[0].tolist() == [3.0] * 8


def bucketed(parameter: nn.Parameter) -> BucketedGradients:
    from paceline.comm.single import SingleCommunicator
    from paceline.core.world import World
    from paceline.sync.buffers import Buffers

    communicator = SingleCommunicator(World(device=DEVICE))
    return BucketedGradients(
        {"p": parameter}, communicator, Buffers(None, communicator), max_micro_batches=2, exact=True
    )
