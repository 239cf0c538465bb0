"""Settings of a run as flat keywords: tests vary many of them, one at a time."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from paceline.run.settings import GROUPS

_GROUP_OF = {field.name: group for group, kind in GROUPS.items() for field in fields(kind)}
_RENAMED = {"fused_optimizers": "fused"}
_OF_CHECKPOINTS = ("resume", "allow", "skip")


def grouped(**flat: Any) -> dict[str, Any]:
    """Keywords for `Trainer.setup`: settings of its groups are put into their groups, all others stay."""
    flat = {_RENAMED.get(name, name): value for name, value in flat.items()}
    keywords = {name: value for name, value in flat.items() if name not in _GROUP_OF and name not in _OF_CHECKPOINTS}
    for group, kind in GROUPS.items():
        if own := {name: value for name, value in flat.items() if _GROUP_OF.get(name) == group}:
            keywords[group] = replace(keywords[group], **own) if group in keywords else kind(**own)
    if saving := {name: flat[name] for name in _OF_CHECKPOINTS if name in flat}:
        keywords["checkpoints"] = replace(flat["checkpoints"], **saving)
    return keywords
