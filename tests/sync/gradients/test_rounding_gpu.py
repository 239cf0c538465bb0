"""Exact sums on a GPU: the kernel's bits are those of torch's own operations, and of the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.sync.gradients.layout import BLOCK_NUMEL, BucketLayout
from paceline.sync.gradients.rounding_gpu import SWITCH, KernelSums, exact_sums, kernels_on
from paceline.sync.gradients.sums import OneTermSums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = (1, 5, BLOCK_NUMEL, 10_000, 0, 3 * BLOCK_NUMEL + 1)
SCALES = (1.0, 1e-20, 1e20, 1e-3, 1.0, 1e6)


def gradients_of(layout: BucketLayout, generator: torch.Generator, where: str) -> list[torch.Tensor | None]:
    """where: aligned as autograd leaves them, at odd addresses, or with one of them missing."""
    made: list[torch.Tensor | None] = []
    for p, scale in zip(layout.parameters, SCALES, strict=True):
        values = (torch.randn(p.numel(), generator=generator) * scale).to(p.dtype)
        room = torch.zeros(p.numel() + 1, dtype=p.dtype, device=p.device)
        made.append(room[1:].copy_(values) if where == "odd" else values.to(p.device))
    if where == "missing":
        made[3] = None
    return made


def totals(
    device: str, dtype: torch.dtype, weight: float, where: str = "aligned"
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Three terms added up, and the peaks of each."""
    generator = torch.Generator().manual_seed(0)
    parameters = {f"p{i}": torch.zeros(n, dtype=dtype, device=device) for i, n in enumerate(SIZES)}
    layout = BucketLayout(parameters, 0)
    total = torch.zeros(layout.numel, dtype=torch.float64, device=device)
    sums = exact_sums(layout, total)
    assert isinstance(sums, KernelSums) == (kernels_on(layout.device) is not None)
    sums.set_anchors(3.0 * 2.0 ** np.round(np.log2(SCALES) + 6))
    peaks = []
    for number in range(3):
        sums.add(gradients_of(layout, generator, where), weight, first=number == 0)
        peaks.append(torch.as_tensor(sums.take_peaks()[0], dtype=torch.float64).clone().cpu())
    sums.settle()
    return total.cpu(), peaks


@pytest.mark.parametrize("where", ["aligned", "odd", "missing"])
@pytest.mark.parametrize("weight", [1.0, 1 / 3, 0.0625])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kernel_torch_and_cpu_have_the_same_bits(
    dtype: torch.dtype, weight: float, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, expected_peaks = totals("cpu", dtype, weight, where)
    assert kernels_on(torch.device("cuda:0")) is not None
    with_kernel, peaks = totals("cuda", dtype, weight, where)
    monkeypatch.setenv(SWITCH, "0")
    without, other_peaks = totals("cuda", dtype, weight, where)
    assert torch.equal(with_kernel, expected)
    assert torch.equal(without, expected)
    for own, other, cpu in zip(peaks, other_peaks, expected_peaks, strict=True):
        assert torch.equal(own, cpu)
        assert torch.equal(other, cpu)


def test_not_a_number_is_the_largest_of_all() -> None:
    layout = BucketLayout({"p": torch.zeros(1000, device="cuda"), "q": torch.zeros(3, device="cuda")}, 0)
    gradients: list[torch.Tensor | None] = [torch.ones(1000, device="cuda"), torch.ones(3, device="cuda")]
    torch.Tensor.__setitem__(gradients[0], 700, torch.nan)
    total = torch.zeros(layout.numel, dtype=torch.float64, device="cuda")
    sums = exact_sums(layout, total)
    sums.add(gradients, 1.0, first=True)
    assert sums.take_peaks().isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_completed_sum_is_the_mean_without_a_further_pass(dtype: torch.dtype) -> None:
    """`last` writes the means that `means` would compute from the total."""
    generator = torch.Generator().manual_seed(0)
    parameters = {f"p{i}": torch.zeros(n, dtype=dtype, device="cuda") for i, n in enumerate(SIZES)}
    layout = BucketLayout(parameters, 0)
    terms = [gradients_of(layout, generator, "aligned") for _ in range(3)]
    means = []
    for completes in (False, True):
        sums = exact_sums(layout, torch.zeros(layout.numel, dtype=torch.float64, device="cuda"))
        sums.set_anchors(3.0 * 2.0 ** np.round(np.log2(SCALES) + 6))
        for number, gradients in enumerate(terms):
            sums.add(gradients, 1 / 3, first=number == 0, last=completes and number == 2)
        means.append([mean.clone() for mean in sums.means(None)])
    assert all(map(torch.equal, *means))
    assert any(mean.any() for mean in means[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_lone_term_stays_in_place_without_signed_zeros(dtype: torch.dtype) -> None:
    values = [torch.tensor([1.0, -0.0, -3.0, 0.0] * 100), torch.tensor([-0.0]), torch.tensor([2.0] * BLOCK_NUMEL)]
    layout = BucketLayout({str(i): v.to("cuda", dtype) for i, v in enumerate(values)}, 0)
    sums = OneTermSums(layout, torch.zeros(layout.numel, device="cuda", dtype=torch.float64), in_place=True)
    gradients: list[torch.Tensor | None] = [v.to("cuda", dtype) for v in values]
    sums.add(gradients, 1.0, first=True)
    assert sums.largest().item() == 3.0
    for mean, gradient, value in zip(sums.means(None), gradients, values, strict=True):
        assert mean is gradient
        assert mean.tolist() == value.tolist()
        assert not mean[mean == 0].signbit().any()
