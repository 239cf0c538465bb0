"""The settings that decide a run's course. They are stored in checkpoints and compared when a run is resumed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import decided_by_rank_0
from paceline.data.fingerprint import facts_of
from paceline.plan.epoch import Position, Steps
from paceline.run.config import RunConfig
from paceline.run.settings import GROUPS
from paceline.run.step.replica import Replica

# A position counts the micro-batches of an epoch's order, so these cannot change inside an epoch.
_FIXED_INSIDE_EPOCH = ("micro_batch", "num_samples", "order", "seed", "shuffle", "num_shards", "shuffle_buffer")
# Facts about data that are reported but not compared.
_INFORMATIVE = ("hint", "unchecked", "unread")


def data_facts(data: Any, communicator: Communicator) -> dict[str, Any]:
    """Rank 0's facts about its data, on all workers: the others may have only a part of the data, or none."""
    facts: dict[str, Any] = decided_by_rank_0(
        lambda: {str(k): v if isinstance(v, int | list) else str(v) for k, v in facts_of(data).items()}, communicator
    )
    if not communicator.world.is_main:
        facts = {name: value for name, value in facts.items() if name not in _INFORMATIVE}  # only rank 0 warns
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
    """Plain values by name. Settings that only affect speed, and stopping criteria, are not included."""
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
        del values["ema"]  # the component `ema` shows whether there is an average
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
    """One line for each setting that differs and is not in `allow`."""
    if unknown := [name for name in allow if name not in now]:
        raise ValueError(f"allow={sorted(unknown)}: unknown setting; choose from {', '.join(now)}")
    lines = []
    # Settings that only one side has, because of its version or mode, are not compared.
    for name in [name for name in saved if name in now and saved[name] != now[name]]:
        if name == "data":
            lines += [] if name in allow else _data_differences(saved[name], now[name])
            continue
        line = f"{name}: {saved[name]!r} in the checkpoint, {now[name]!r} now"
        if name not in allow:
            lines.append(line)
        elif name in _FIXED_INSIDE_EPOCH and position.micro_batch:
            lines.append(f"{line} (may change between epochs only; the checkpoint is inside epoch {position.epoch})")
    if "data" not in allow and not lines:
        _warn_about_unchecked_data(saved.get("data"), now.get("data"))
    return lines


def _data_differences(saved: Any, now: Any) -> list[str]:
    """Compare the facts that both sides have; older checkpoints have a text instead, or none."""
    if not isinstance(saved, Mapping) or not isinstance(now, Mapping):
        return []
    lines = []
    for name in sorted((saved.keys() & now.keys()) - set(_INFORMATIVE)):
        before, after, label = saved[name], now[name], name
        if isinstance(before, list) and isinstance(after, list) and before != after:
            # Only the first item: a missing or new one shifts all others.
            shared = min(len(before), len(after))
            index = next((i for i in range(shared) if before[i] != after[i]), shared)
            label = f"{name}, number {index + 1}"
            before, after = (items[index] if index < len(items) else None for items in (before, after))
        if before != after:
            lines.append(f"data ({label}): {before!r} in the checkpoint, {after!r} now")
    return lines


def _warn_about_unchecked_data(saved: Any, now: Any) -> None:
    if not isinstance(saved, Mapping) or not isinstance(now, Mapping):
        return
    if unchecked := now.get("unchecked"):
        warnings.warn(
            f"the run is resumed with {unchecked} ({now.get('type')}): it cannot be checked that its samples are the "
            "same; give it an attribute `fingerprint` that changes with them",
            stacklevel=2,
        )
    elif "hint" in saved and "hint" in now and saved["hint"] != now["hint"]:
        warnings.warn(
            f"the samples that were compared are the same, but the data may differ elsewhere: {saved['hint']} in the "
            f"checkpoint, {now['hint']} now",
            stacklevel=2,
        )


def _types(objects: list[Any]) -> str:
    return ", ".join(type(each).__name__ for each in objects) or "none"


def _text(strategy: Any) -> str:
    """A strategy with its settings. Functions cannot be compared, so they appear as `...`."""
    if not is_dataclass(strategy):
        return str(strategy)
    values = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    shown = ", ".join(f"{name}={'...' if callable(value) else _text(value)}" for name, value in values.items())
    return f"{type(strategy).__name__}({shown})"
