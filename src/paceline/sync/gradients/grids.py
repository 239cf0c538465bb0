"""The grids of exact sums, one per tensor.

A float64 holds 53 bits. If every term is a whole multiple of 2**-e and no sum of them exceeds 2**(53-e), every
addition is exact, so the total depends neither on the order of the terms nor on how workers divided them. A term
is rounded to the grid by adding and subtracting an anchor large enough to push the lower bits out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

# Bits between the largest sum seen and the largest one allowed: a burst of 64 times needs no repetition. After the
# first micro-batch, which says less about the others, a burst of 2,000 times.
HEADROOM_BITS = 6
CALIBRATION_HEADROOM_BITS = 11
# A grid stays while the largest sum is this many bits below its limit, since moving it changes the rounding. Below that
# range it shrinks by one bit per step: a gradient that is only rounding errors (a bias before BatchNorm) varies widely.
COMFORT_BITS = (2, 12)
# If the largest term is this many bits below the limit, it keeps the 24 bits of float32. Below, the grid is too coarse.
COARSEST_BITS = 27
# For tensors that the calibrating micro-batch did not use.
INITIAL_TOP = 14


class Grids:
    """One power of two per tensor: fixed during a step, moved between steps, saved with the run.

    The sum of a step's terms may reach 2**top. This is judged by the largest term times the number of terms, because
    partial sums differ between workers and the judgement must not.

    `peaks`, in all methods: per tensor the largest magnitude of any micro-batch's weighted term. Inf and NaN fit any
    grid: they pass through.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._tops = np.full(len(self.names), INITIAL_TOP, np.int64)
        self._is_known = np.zeros(len(self.names), bool)
        self._comfortable: list[tuple[float, float]] | None = None  # `_comfort` by tensor

    @property
    def anchors(self) -> Floats:
        """`(x + anchor) - anchor` rounds x to a multiple of the grid's step, for |x| <= 2**top."""
        return np.ldexp(3.0, self._tops)

    @property
    def limits(self) -> tuple[Floats, Floats]:
        """By tensor: the limit of the sum of its terms, and the largest term below which its grid is too coarse."""
        return np.ldexp(1.0, self._tops), np.ldexp(1.0, self._tops - COARSEST_BITS)

    @property
    def are_known(self) -> bool:
        return bool(self._is_known.all())

    def calibrate(self, peaks: Floats, num_terms: int) -> None:
        """Choose the grids that are not known yet from the terms of one micro-batch."""
        reach = peaks * num_terms
        is_seen = ~self._is_known & (reach > 0) & np.isfinite(reach)
        self._fit_to(is_seen, reach, CALIBRATION_HEADROOM_BITS)
        self._is_known[:] = True

    def fit(self, peaks: Floats, num_terms: int) -> bool:
        """Whether every tensor's terms can be summed on its grid: within the limit, and not too coarsely."""
        return not misfit(torch.from_numpy(peaks), num_terms, [torch.from_numpy(each) for each in self.limits])

    def follow(self, peaks: Floats, num_terms: int) -> bool:
        """Move the grids for which these peaks are outside the comfortable range. Returns whether any moved."""
        reach = peaks * num_terms
        low, high = self._comfort()
        is_judged = (reach > 0) & np.isfinite(reach)
        is_coarse = is_judged & (peaks < self.limits[1])
        is_low = is_judged & (reach < low) & ~is_coarse
        is_refitted = is_coarse | (is_judged & (reach > high))
        self._tops[is_low] -= 1
        self._fit_to(is_refitted, reach, HEADROOM_BITS)
        return bool((is_low | is_refitted).any())

    def state(self) -> dict[str, int]:
        known = zip(self.names, self._tops.tolist(), self._is_known.tolist(), strict=True)
        return {name: top for name, top, is_known in known if is_known}

    def load(self, state: Mapping[str, int]) -> None:
        for index, name in enumerate(self.names):
            if name in state:
                self._tops[index], self._is_known[index] = state[name], True
        self._comfortable = None

    def _fit_to(self, which: Any, reach: Floats, headroom_bits: int) -> None:
        self._tops[which] = np.frexp(reach[which])[1] + headroom_bits
        self._comfortable = None

    def are_comfortable(self, peaks: Sequence[float], num_terms: int) -> bool:
        """A fast check: True if all fit and none would move. False if there is a NaN."""
        if self._comfortable is None:
            ranges = (each.tolist() for each in self._comfort())
            self._comfortable = list(zip(*ranges, strict=True))
        for peak, (low, high) in zip(peaks, self._comfortable, strict=True):  # noqa: SIM110 - faster than all()
            if not low <= peak * num_terms <= high:
                return False
        return True

    def _comfort(self) -> tuple[Floats, Floats]:
        """By tensor: between which values the sum of its terms may be for its grid to stay."""
        high, low = (np.ldexp(1.0, self._tops - bits) for bits in COMFORT_BITS)
        return low, high


def misfit(peaks: torch.Tensor, num_terms: int, limits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether some tensor's terms cannot be summed on its grid, on the peaks' device. limits: see `Grids.limits`."""
    reach = peaks * num_terms
    is_judged = (reach > 0) & reach.isfinite()
    largest, coarsest = limits
    return (is_judged & ((reach > largest) | (peaks < coarsest))).any()
