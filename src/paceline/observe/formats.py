"""Numbers as people read them."""

from __future__ import annotations

import math

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def duration(seconds: float) -> str:
    """ "7.3 s", "3:05" (minutes), "2:03:05" (hours), "3 d 04:00"."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s" if seconds < 59.5 else "1:00"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02}:{minutes:02}"


def rate(value: float) -> str:
    """Three digits: "0.52", "81.3", "812", "52.1k"."""
    if not math.isfinite(value):
        return "?"
    for factor, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * factor:
            return f"{_three_digits(value / factor)}{prefix}"
    return _three_digits(value)


def loss(value: float | None) -> str:
    """Four digits that matter: "2.312", "0.04512", "3.1e-07", "nan"; "-" where there is none."""
    return "-" if value is None else f"{value:.4g}"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
