"""All settings of a project file in a row: for the command line's help and the page about project files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.cli.config.fields import Setting, is_section, kind_of, options_of, settings_of
from paceline.cli.config.schema import Settings
from paceline.cli.config.show import one_line, plain


@dataclass(frozen=True)
class Key:
    """A setting. `section` is the dotted key of the mapping it stands in, "" for the file itself.

    `kind` is what that mapping must be for it, where it may be one of several; `default` is empty where there is none.
    """

    section: str
    kind: str
    name: str
    allowed: str
    default: str
    help: str


def keys(section: Any = Settings, name: str = "", seen: set[Any] | None = None) -> Iterator[Key]:
    """Every setting once, a section's own before those of the sections in it."""
    seen = set() if seen is None else seen
    seen.add(section)
    settings = settings_of(section).values()
    for setting in settings:
        if not is_section(setting.type):
            default = _default(setting)
            yield Key(name, kind_of(section) or "", setting.name, setting.allowed, default, setting.help)
    for setting in settings:
        for option in options_of(setting.type):
            if is_section(option) and option not in seen:
                yield from keys(option, f"{name}.{setting.name}" if name else setting.name, seen)


def _default(setting: Setting) -> str:
    if setting.is_required:
        return ""
    default = plain(setting.default)
    return default["kind"] if isinstance(default, dict) else one_line(default)
