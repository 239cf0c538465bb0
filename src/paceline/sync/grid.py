"""The grid on which exact sums are exact.

A float64 holds 53 bits. If every term is a whole multiple of 2**-e and no sum of them exceeds 2**(53-e), every
addition is exact, so the total depends neither on the order of the terms nor on how workers divided them. A term
is rounded to the grid by adding and subtracting an anchor large enough to push the lower bits out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Bits between the largest sum seen and the largest one allowed: a burst of 64 times needs no repetition.
HEADROOM_BITS = 6
# The grid stays while the largest sum is this many bits below its limit; a moved grid rounds differently,
# so it should not follow every breath of the gradients.
COMFORT_BITS = (2, 12)
# A sum this far below the limit keeps 27 bits, still more than float32. Further down the grid is too coarse.
COARSEST_BITS = 24
# Before anything was seen: gradients of ordinary models, times tokens where those are counted, have their largest
# between 2**-10 and 2**14. Others cost one repeated step.
INITIAL_TOP = 14


class Grid:
    """One power of two for one buffer: fixed during a step, moved between steps, saved with the run.

    The sum of a step's terms may reach 2**top. Whether it could is judged term by term, against an equal part of
    that limit, because partial sums differ from worker to worker and the judgement must not.
    """

    def __init__(self, top: int = INITIAL_TOP) -> None:
        self.top = top

    @property
    def step(self) -> float:
        """What all terms are rounded to multiples of."""
        return math.ldexp(1.0, self.top - 51)

    @property
    def anchor(self) -> float:
        """`(x + anchor) - anchor` rounds x to a multiple of the step, for |x| <= 2**top."""
        return math.ldexp(3.0, self.top)

    def fits(self, peaks: Sequence[float]) -> bool:
        """Whether terms with these largest magnitudes (one per term) can be summed here: neither over nor coarse.

        Inf and NaN fit: they pass through any grid and mean what they mean elsewhere.
        """
        reach = _reach(peaks)
        if reach == 0.0 or not math.isfinite(reach):
            return True
        return math.ldexp(1.0, self.top - COARSEST_BITS) <= reach <= math.ldexp(1.0, self.top)

    def follow(self, peaks: Sequence[float]) -> None:
        """Move to suit these peaks, unless they are comfortable where the grid is."""
        reach = _reach(peaks)
        if reach == 0.0 or not math.isfinite(reach):
            return
        high, low = (math.ldexp(1.0, self.top - bits) for bits in COMFORT_BITS)
        if not low <= reach <= high:
            self.top = math.frexp(reach)[1] + HEADROOM_BITS


def _reach(peaks: Sequence[float]) -> float:
    # Not max(): that may pass over a NaN.
    return math.nan if any(map(math.isnan, peaks)) else max(peaks, default=0.0) * len(peaks)
