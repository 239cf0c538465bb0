"""Human-readable numbers, and text that is safe to print."""

from __future__ import annotations

import math
import re
import textwrap
from datetime import datetime
from functools import partial
from pathlib import Path

# Characters that control a terminal or are invisible: control characters except tab and newline, bidirectional marks,
# line and paragraph separators, and surrogates from file names that are not UTF-8.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def printable(text: str) -> str:
    """Text from files, safe for a terminal: control characters become escapes, such as \\x1b and \\u202e."""
    return _UNPRINTABLE.sub(_escape, text)


def one_line(text: str) -> str:
    """Like `printable`, also for newlines and tabs."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"  # JSON contains no raw \x1b, so it stays valid


def wrapped(text: str, width: int) -> str:
    """Lines of at most `width` columns, broken between words; continuations are indented.

    Indented lines, such as a traceback's, are kept.
    """
    wrap = partial(textwrap.fill, width=width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap(line) if len(line) > width and line[0] != " " else line for line in text.split("\n"))


def moment(unix_time: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Unix time as date and time; "?" for dates out of range."""
    try:
        return datetime.fromtimestamp(unix_time).strftime(form)
    except (OverflowError, ValueError, OSError):
        return "?"


def duration(seconds: float) -> str:
    """ "7.3 s", "3:05" (minutes), "2:03:05" (hours), "3 d 04:00"; "?" beyond a hundred thousand years."""
    if not abs(seconds) < 1e5 * 365 * 86400:
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
    """Three digits: "0.52", "81.3", "812", "52.1k", "1e+30"."""
    if not math.isfinite(value):
        return "?"
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    for factor, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * factor:
            return f"{_three_digits(value / factor)}{prefix}"
    return _three_digits(value)


def short_path(path: Path) -> str:
    """Relative to the current folder, if it is inside."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def size(num_bytes: float) -> str:
    """ "812 B", "1.23 GB"."""
    text = rate(num_bytes)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{num_bytes:.0f} B"


def loss(value: float | None) -> str:
    """Four significant digits: "2.312", "0.04512", "3.1e-07", "nan"; "-" for None."""
    return "-" if value is None else f"{value:.4g}"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
