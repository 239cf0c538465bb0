"""A project's settings as YAML, with the origin of each value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from paceline.cli.config.errors import Origin
from paceline.cli.config.parts import Part
from paceline.cli.config.project import Project
from paceline.cli.config.schema import Section, settings_of
from paceline.cli.config.yaml_tree import dotted

_COMMENT_COLUMN = 48
_PLAIN = re.compile(r"[A-Za-z][\w./:-]*\w", re.ASCII)


def show(project: Project) -> str:
    """All settings as YAML, defaults included. Each line ends with a file and line, "command line" or "default".

    Loading the text gives the same settings.
    """
    return "".join(f"{line}\n" for line in _lines(plain(project.settings), project))


def plain(value: Any, *, is_argument: bool = False) -> Any:
    """A setting as a file has it: mappings, lists and scalars. In arguments, references are marked as such."""
    if isinstance(value, Part) and value.arguments is None:
        return {"reference": value.target} if is_argument else value.target
    if isinstance(value, Part):
        arguments = {"arguments": plain(value.arguments, is_argument=True)} if value.arguments else {}
        return {"factory": value.target, **arguments}
    if isinstance(value, dict):
        return {key: plain(item, is_argument=True) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item, is_argument=is_argument) for item in value]
    if isinstance(value, Section):
        section: Any = type(value)
        settings = {name: plain(getattr(value, name)) for name in settings_of(section)}
        return {"kind": value.kind, **settings} if value.kind else settings
    return value


def _lines(entries: dict[str, Any], project: Project, parent: str = "", indent: str = "") -> Iterator[str]:
    for name, value in entries.items():
        key = dotted(parent, name)
        if isinstance(value, dict) and value:
            yield f"{indent}{one_line(name)}:"
            yield from _lines(value, project, key, f"{indent}  ")
        else:
            text = f"{indent}{one_line(name)}: {one_line(_escaped(value))}"
            yield f"{text:<{_COMMENT_COLUMN}}  # {_place(project.origin(key), project.folder)}"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> Any:
        """Without quotes only if every YAML reader takes it for this string."""
        is_plain = _PLAIN.fullmatch(text) and yaml.safe_load(text) == text
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


def one_line(value: Any) -> str:
    """A value as YAML on one line."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=1e9, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("...\n").rstrip("\n")


def _escaped(value: Any) -> Any:
    """The value with every `${` written so that it is not taken for a variable."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "$${") if isinstance(value, str) else value


def _place(origin: Origin, folder: Path) -> str:
    place = f"{os.path.relpath(origin.source, folder)}:{origin.line}" if origin.line else origin.source
    if origin.variable_origin is not None:
        place += f", ${{{origin.variable}}} of {_place(origin.variable_origin, folder)}"
    return f"{place} ({origin.alias})" if origin.alias else place
