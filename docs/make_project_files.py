"""Writes the tables of docs/project-files.md from the schema: python docs/make_project_files.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from paceline.cli.config.schema import ProjectSettings, describe, is_section, options_of, settings_of
from paceline.cli.config.show import one_line, plain

PAGE = Path(__file__).parent / "project-files.md"

# The names of other tools, with the settings they become.
ALIASES = {
    "per_device_train_batch_size": "`trainer.micro_batch`, with `micro_batches_per_worker: 1` unless that is given",
    "gradient_accumulation_steps": "`trainer.micro_batches_per_worker`",
    "num_train_epochs": "`trainer.epochs`",
    "lr_scheduler_type": "`trainer.schedule`; `constant_with_warmup` is `constant`",
    "logging_steps": "`trainer.log_every`",
    "eval_steps": "`trainer.eval_every`",
    "save_steps": "`checkpoints.every_steps`",
    "save_total_limit": "`checkpoints.keep_last`",
    "fused_optimizers": "`trainer.fused`",
    "dispatch_batches": "`trainer.feed`: true is `dispatched`, false is `sharded`",
    "shard_dataset": "`trainer.feed: sharded`; false has no effect",
    "save_strategy": "`no`: `checkpoints.save: false`; `epoch`: `every_epochs: 1`; `steps` requires save_steps",
    "save_optimizer_state": "false: `optimizer` in `checkpoints.leave_out`",
    "save_scheduler_state": "false: `scheduler` in `checkpoints.leave_out`",
    "save_rng_state": "false: `random` in `checkpoints.leave_out`",
    "save_dataset_state": "true has no effect: the position is always saved; false is an error",
}
SAME = ("max_steps", "learning_rate", "warmup_steps", "max_grad_norm", "weight_decay", "seed")


class Key(NamedTuple):
    """A setting. section: the dotted key of its section, "" for the top level. kind: that of the section, if any."""

    section: str
    kind: str
    name: str
    allowed: str
    default: str
    help: str


def keys(section: Any = ProjectSettings, name: str = "", seen: frozenset[Any] = frozenset()) -> Iterator[Key]:
    """Every setting, those of a section before those of its sub-sections."""
    settings = settings_of(section)
    for key, setting in settings.items():
        if not is_section(setting.type):
            default = "" if setting.default is MISSING else plain(setting.default)
            shown = "" if default == "" else default["kind"] if isinstance(default, dict) else one_line(default)
            allowed = describe(setting.type, setting.limits).replace("factory: package.module:name", "a factory")
            yield Key(name, section.kind, key, allowed, shown, setting.help)
    for key, setting in settings.items():
        for option in options_of(setting.type):
            if is_section(option) and option not in seen:
                seen |= {option}
                yield from keys(option, f"{name}.{key}" if name else key, seen)


def alias_table() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in ALIASES.items()]
    rows += [f"| `{name}` | `trainer.{name}`, the same |" for name in SAME]
    return "\n".join(["| name | becomes |", "| --- | --- |", *rows])


def settings_tables() -> str:
    tables = []
    for (section, kind), group in groupby(keys(), lambda key: (key.section, key.kind)):
        heading = f"`{section}`" if section else "Top level"
        rows = [f"| `{k.name}` | {k.allowed} | {f'`{k.default}`' if k.default else ''} | {k.help} |" for k in group]
        lines = ["| key | value | default | |", "| --- | --- | --- | --- |", *rows]
        tables.append("\n".join([f"### {heading}" + (f", `kind: {kind}`" if kind else ""), "", *lines]))
    return "\n\n".join(tables)


def page() -> str:
    """The page with new tables."""
    text = PAGE.read_text()
    for name, table in (("aliases", alias_table()), ("settings", settings_tables())):
        marked = f"<!-- {name} -->\n\n{table}\n\n<!-- end -->"
        text, count = re.subn(rf"<!-- {name} -->\n.*?<!-- end -->", lambda _: marked, text, flags=re.DOTALL)  # noqa: B023
        assert count == 1, f"the page has no place for the {name}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
