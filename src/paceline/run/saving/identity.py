"""What makes a run this run: the settings that decide its course, compared when it is resumed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from paceline.plan.steps import Position, Steps
from paceline.run.config import RunConfig
from paceline.run.replica import Replica

# A position counts the micro-batches of an epoch's order, so these cannot change in the middle of one.
_CUT_OF_AN_EPOCH = ("micro_batch", "num_samples", "data", "seed", "shuffle", "num_shards", "shuffle_buffer")


def identity(
    config: RunConfig, steps: Steps, data: Any, replica: Replica, device: torch.device, *, is_weighted: bool
) -> dict[str, Any]:
    """Plain values by name. Not in it: what only decides how fast, and when to stop."""
    values = {
        "global_batch": config.global_batch,
        "micro_batch": steps.micro_batch,
        "num_samples": len(data) if hasattr(data, "__len__") else None,
        "data": _fingerprint(data),
        "seed": config.seed,
        "shuffle": config.shuffle,
        "drop_last": config.drop_last,
        "num_shards": config.num_shards,
        "shuffle_buffer": config.shuffle_buffer,
        "precision": config.precision,
        "max_grad_norm": config.max_grad_norm,
        "weight_fn": "given" if is_weighted else "none",
        "strategy": _text(config.strategy),
        "optimizer": _types(replica.optimizers),
        "scheduler": _types(replica.schedulers),
        "exact": config.exact,
    }
    if replica.schedulers:
        values["scheduler_every"] = config.scheduler_every
    if config.exact:
        values["threads"] = config.threads or 1
        values["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return values


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], allow: Collection[str], position: Position
) -> list[str]:
    """What differs and may not: one line each. `allow` names what may."""
    if unknown := [name for name in allow if name not in now]:
        raise ValueError(f"allow={sorted(unknown)} names no setting that is compared: choose among {', '.join(now)}")
    lines = []
    for name in dict.fromkeys([*saved, *now]):
        # A setting that one of both does not know, of another version or mode, says nothing about the course.
        if name not in saved or name not in now or saved[name] == now[name]:
            continue
        line = f"{name}: {saved[name]!r} in the checkpoint, {now[name]!r} now"
        if name not in allow:
            lines.append(line)
        elif name in _CUT_OF_AN_EPOCH and position.micro_batch:
            lines.append(f"{line} (may change between epochs only; the checkpoint is inside epoch {position.epoch})")
    return lines


def _types(things: list[Any]) -> str:
    return ", ".join(type(thing).__name__ for thing in things) or "none"


def _fingerprint(data: Any) -> str | None:
    """What the data says about its content, where it does: reading it to find out would cost too much."""
    found = getattr(data, "fingerprint", None)
    found = found() if callable(found) else found
    return None if found is None else str(found)


def _text(strategy: Any) -> str:
    """A strategy's settings; of a function only that there is one, since functions cannot be compared."""
    if not is_dataclass(strategy):
        return str(strategy)
    values = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    shown = ", ".join(f"{name}={'...' if callable(value) else _text(value)}" for name, value in values.items())
    return f"{type(strategy).__name__}({shown})"
