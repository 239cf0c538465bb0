"""Exact sums on a GPU: the kernel's bits are those of torch's own operations, and of the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.sync.gradients import rounding
from paceline.sync.gradients.layout import BLOCK_NUMEL, BucketLayout
from paceline.sync.gradients.rounding import RoundedAddition

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = (1, 5, BLOCK_NUMEL, 10_000, 0, 3 * BLOCK_NUMEL + 1)
SCALES = (1.0, 1e-20, 1e20, 1e-3, 1.0, 1e6)


def totals(device: str, dtype: torch.dtype, weight: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Three terms added up, and the peaks of each."""
    generator = torch.Generator().manual_seed(0)
    parameters = {f"p{i}": torch.zeros(n, dtype=dtype, device=device) for i, n in enumerate(SIZES)}
    layout = BucketLayout(parameters, 0)
    gradient = torch.zeros(layout.numel, dtype=dtype, device=device)
    total = torch.zeros(layout.numel, dtype=torch.float64, device=device)
    addition = RoundedAddition(layout, gradient, total)
    addition.set_anchors(3.0 * 2.0 ** np.round(np.log2(SCALES) + 6))
    peaks = []
    for number in range(3):
        for view, scale in zip(layout.views(gradient), SCALES, strict=True):
            view.copy_((torch.randn(view.numel(), generator=generator) * scale).to(dtype))
        addition.add(weight, first=number == 0)
        peaks.append(addition.take_peaks()[0].clone().cpu())
    return total.cpu(), peaks


@pytest.mark.parametrize("weight", [1.0, 1 / 3, 0.0625])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kernel_torch_and_cpu_have_the_same_bits(
    dtype: torch.dtype, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, expected_peaks = totals("cpu", dtype, weight)
    with_kernel, peaks = totals("cuda", dtype, weight)
    assert rounding._kernel_on(torch.device("cuda:0")) is not None
    monkeypatch.setenv(rounding.SWITCH, "0")
    without, other_peaks = totals("cuda", dtype, weight)
    assert torch.equal(with_kernel, expected)
    assert torch.equal(without, expected)
    for own, other, cpu in zip(peaks, other_peaks, expected_peaks, strict=True):
        assert torch.equal(own, cpu)
        assert torch.equal(other, cpu)


def test_not_a_number_is_the_largest_of_all() -> None:
    layout = BucketLayout({"p": torch.zeros(1000, device="cuda"), "q": torch.zeros(3, device="cuda")}, 0)
    gradient = torch.ones(layout.numel, device="cuda")
    gradient[700] = torch.nan
    addition = RoundedAddition(layout, gradient, torch.zeros(layout.numel, dtype=torch.float64, device="cuda"))
    addition.add(1.0, first=True)
    assert addition.take_peaks().isnan().tolist() == [[True, False]]
