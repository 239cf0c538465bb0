"""What makes a run this run: the settings that decide its course, compared when it is resumed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import decided_by_rank_0
from paceline.data.fingerprint import facts_of
from paceline.plan.steps import Position, Steps
from paceline.run.config import RunConfig
from paceline.run.settings import GROUPS
from paceline.run.step.replica import Replica

# A position counts the micro-batches of an epoch's order, so these cannot change in the middle of one.
_CUT_OF_AN_EPOCH = ("micro_batch", "num_samples", "order", "seed", "shuffle", "num_shards", "shuffle_buffer")


# Facts about data that are told but not compared.
_TOLD_ONLY = ("hint", "unchecked", "unread")


def data_facts(data: Any, communicator: Communicator) -> dict[str, Any]:
    """What rank 0 knows about its data, on all workers: another may hold a part of it only, or read none at all."""
    facts: dict[str, Any] = decided_by_rank_0(
        lambda: {str(k): v if isinstance(v, int | list) else str(v) for k, v in facts_of(data).items()}, communicator
    )
    if not communicator.world.is_main:
        facts = {name: value for name, value in facts.items() if name not in _TOLD_ONLY}  # one warning is enough
    return facts


def identity(
    config: RunConfig,
    steps: Steps,
    data: Any,
    replica: Replica,
    device: torch.device,
    *,
    is_weighted: bool,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Plain values by name. Not in it: what only decides how fast, and when to stop. `facts`: those of the data."""
    facts = dict(facts or {})
    values = {
        "global_batch": config.global_batch,
        "micro_batch": steps.micro_batch,
        "num_samples": len(data) if hasattr(data, "__len__") else None,
        "order": facts.pop("order", None),
        "data": facts or None,
        **_course(config),
        "weight_fn": "given" if is_weighted else "none",
        "strategy": _text(config.strategy),
        "optimizer": _types(replica.optimizers),
        "scheduler": _types(replica.schedulers),
    }
    if not replica.schedulers:
        del values["scheduler_every"]
    if config.optimization.ema is None:
        del values["ema"]  # whether there is an average is decided by the component `ema`
    if config.exact:
        values["threads"] = config.runtime.threads or 1
        values["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return values


def _course(config: RunConfig) -> dict[str, Any]:
    """The settings that are declared with course=True. The size of a step is in global_batch and micro_batch."""
    groups = [config, *(getattr(config, name) for name in GROUPS)]
    values = {
        setting.name: getattr(group, setting.name)
        for group in groups
        for setting in fields(group)
        if setting.metadata.get("course") and setting.name not in ("global_batch", "micro_batch", "batches_per_step")
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


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
        if name == "data":
            lines += [] if name in allow else _data_differences(saved[name], now[name])
            continue
        line = f"{name}: {saved[name]!r} in the checkpoint, {now[name]!r} now"
        if name not in allow:
            lines.append(line)
        elif name in _CUT_OF_AN_EPOCH and position.micro_batch:
            lines.append(f"{line} (may change between epochs only; the checkpoint is inside epoch {position.epoch})")
    if "data" not in allow and not lines:
        _warn_of_unknown_data(saved.get("data"), now.get("data"))
    return lines


def _data_differences(saved: Any, now: Any) -> list[str]:
    """Of the facts that both sides know; older checkpoints have a text there, or nothing."""
    if not isinstance(saved, Mapping) or not isinstance(now, Mapping):
        return []
    lines = []
    for name in sorted((saved.keys() & now.keys()) - set(_TOLD_ONLY)):
        before, after = saved[name], now[name]
        if isinstance(before, list) and isinstance(after, list):
            lines += _list_differences(name, before, after)
        elif before != after:
            lines.append(f"data ({name}): {before!r} in the checkpoint, {after!r} now")
    return lines


def _list_differences(name: str, before: list[Any], after: list[Any]) -> list[str]:
    """The first item that differs: one that is missing or new moves all that follow."""
    if before == after:
        return []
    shared = min(len(before), len(after))
    place = next((i for i in range(shared) if before[i] != after[i]), shared)
    was, is_now = (repr(items[place]) if place < len(items) else "nothing" for items in (before, after))
    return [f"data ({name}, number {place + 1}): {was} in the checkpoint, {is_now} now"]


def _warn_of_unknown_data(saved: Any, now: Any) -> None:
    if not isinstance(saved, Mapping) or not isinstance(now, Mapping):
        return
    if unchecked := now.get("unchecked"):
        warnings.warn(
            f"the run is resumed with {unchecked} ({now.get('type')}): whether its samples are those of before cannot "
            "be checked; give it an attribute `fingerprint` that changes with them",
            stacklevel=2,
        )
    elif "hint" in saved and "hint" in now and saved["hint"] != now["hint"]:
        warnings.warn(
            f"the data of the run is as before where it was read, but may differ elsewhere: {saved['hint']} in the "
            f"checkpoint, {now['hint']} now",
            stacklevel=2,
        )


def _types(things: list[Any]) -> str:
    return ", ".join(type(thing).__name__ for thing in things) or "none"


def _text(strategy: Any) -> str:
    """A strategy's settings; of a function only that there is one, since functions cannot be compared."""
    if not is_dataclass(strategy):
        return str(strategy)
    values = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    shown = ", ".join(f"{name}={'...' if callable(value) else _text(value)}" for name, value in values.items())
    return f"{type(strategy).__name__}({shown})"
