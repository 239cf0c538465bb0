"""A run's events in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from paceline.observe import formats


def event_text(name: str, details: Mapping[str, Any]) -> str:
    """One line. Events that are not known here are shown with their details."""
    known = {"plan": _plan, "save": _save, "world": _world, "drift": _drift, "capture": _capture}
    known["averaging"] = lambda details: str(details["reason"])
    try:
        text = known[name](details) if name in known else _other(name, details)
    except (KeyError, TypeError, ValueError):  # written by another version
        text = _other(name, details)
    return formats.one_line(text)


def _plan(details: Mapping[str, Any]) -> str:
    shares, before = (":".join(map(str, details[key])) for key in ("shares", "before"))
    return f"shares {shares}, before {before}" if before else f"shares {shares}"


def _save(details: Mapping[str, Any]) -> str:
    return f"saved {PurePath(details['folder']).name}"


def _world(details: Mapping[str, Any]) -> str:
    left, joined, size = details.get("left") or [], details.get("joined") or [], details["size"]
    parts = [f"{_workers(left)} left"] if left else []
    parts += [f"{_workers(joined)} joined"] if joined else []
    text = " and ".join(parts) or "the workers changed"
    text += f" ({details['reason']})" if details.get("reason") else ""
    text += f"; {size} worker{'s go' if size != 1 else ' goes'} on"
    text += f" without {details['lost_steps']} steps that were in no average" if details.get("lost_steps") else ""
    return text + (f" after {formats.duration(details['seconds'])}" if details.get("seconds") is not None else "")


def _workers(ranks: list[Any]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _drift(details: Mapping[str, Any]) -> str:
    return f"replicas drift apart by {details['drift']:.3g}: averaging every {details['every']} steps"


def _capture(details: Mapping[str, Any]) -> str:
    if details.get("reason") is not None:
        return f"no CUDA graph of a {details['what']}: {details['reason']}"
    return f"captured a CUDA graph of a {details['what']}"


def _other(name: str, details: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{key} {value}" for key, value in details.items())
    return f"{name}: {shown}" if shown else name
