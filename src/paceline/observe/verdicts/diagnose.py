"""From evidence to verdicts: `diagnose(read_evidence(files))[0].text` is the sentence that a page shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.observe import formats
from paceline.observe.verdicts import health, speed
from paceline.observe.verdicts.evidence import Evidence, median_of
from paceline.observe.verdicts.verdict import SEVERITIES, Limits, Verdict

_RULES: tuple[Callable[[Evidence, Limits], Iterator[Verdict]], ...] = (
    health.ended,
    health.stalled,
    health.left,
    health.diverging,
    health.full_memory,
    speed.slow_workers,
    speed.unbalanced,
    speed.data_bound,
    speed.exchange_bound,
    speed.host_bound,
)
_PARTS = {
    "computing": "computing",
    "data": "waiting for data",
    "waiting": "for other workers",
    "exchange": "exchanging",
}


def diagnose(evidence: Evidence, limits: Limits | None = None) -> list[Verdict]:
    """All verdicts, the most severe first, then by cost. Never empty: the default is "nothing wrong"."""
    limits = limits or Limits()
    found = [verdict for rule in _RULES for verdict in rule(evidence, limits)]
    if not found:
        found = [_nothing_wrong(evidence)]
    return sorted(found, key=lambda verdict: (SEVERITIES.index(verdict.severity), -(verdict.lost or 0.0)))


def _nothing_wrong(evidence: Evidence) -> Verdict:
    lines = evidence.recent
    rate = evidence.lines[-1].samples_per_s if evidence.lines else None
    speed_text = "" if rate is None else f" at {formats.rate(rate)} samples/s"
    if not lines:
        count = len(evidence.lines)
        text = f"too early to tell: {count} line{'' if count == 1 else 's'} of metrics{speed_text}"
        is_plain = any(line.since_step for line in evidence.lines[:-2])
        if is_plain:  # one worker's times are not logged
            return Verdict("nothing wrong", "ok", f"nothing wrong{speed_text}")
        return Verdict("too early", "ok", text)
    parts = {name: median_of([getattr(part, name) for part in evidence.parts]) for name in _PARTS}
    known = {name: part for name, part in parts.items() if part is not None}
    times = ", ".join(f"{_PARTS[name]} {part:.0%}" for name, part in known.items())
    text = f"nothing wrong{speed_text}" + (f": {times} of the time" if times else "")
    return Verdict("nothing wrong", "ok", text, figures=known)
