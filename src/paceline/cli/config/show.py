"""A project's settings as a project file that says where each came from."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import yaml  # type: ignore[import-untyped]

from paceline.cli.config.errors import Origin
from paceline.cli.config.factories import Factory, Reference
from paceline.cli.config.fields import kind_of, settings_of
from paceline.cli.config.project import Project
from paceline.cli.config.tree import dotted

_COMMENT_COLUMN = 48
_PLAIN = re.compile(r"[A-Za-z][\w./:-]*\w", re.ASCII)


def show(project: Project) -> str:
    """All settings as YAML, defaults too, with a comment on each line: a file and line, "command line" or "default".

    Read again, it gives the same settings.
    """
    lines = []
    for text, key in _lines(plain(project.settings), ""):
        origin = project.origin(key) if key else None
        lines.append(text if origin is None else f"{text:<{_COMMENT_COLUMN}}  # {_place(origin, project)}")
    return "\n".join(lines) + "\n"


def plain(value: Any) -> Any:
    """A setting as a file would say it: mappings, lists and scalars."""
    if isinstance(value, Reference):
        return value.target
    if isinstance(value, Factory):
        return {"factory": value.target, **({"arguments": _argument(value.arguments)} if value.arguments else {})}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if not is_dataclass(value):
        return value
    kind = kind_of(value)
    settings = {name: plain(getattr(value, name)) for name in settings_of(value.__class__)}
    return settings if kind is None else {"kind": kind, **settings}


def _argument(value: Any) -> Any:
    """A value of `arguments`, where a text is a text and a reference must say that it is one."""
    if isinstance(value, Reference):
        return {"reference": value.target}
    if isinstance(value, dict):
        return {key: _argument(item) for key, item in value.items()}
    return [_argument(item) for item in value] if isinstance(value, list) else plain(value)


def _lines(entries: dict[str, Any], parent: str, indent: str = "") -> Iterator[tuple[str, str]]:
    """Lines, and the key whose origin each one shows; none for those that only begin a section."""
    for name, value in entries.items():
        key = dotted(parent, name)
        if isinstance(value, dict) and value:
            yield f"{indent}{_text(name)}:", ""
            yield from _lines(value, key, f"{indent}  ")
        else:
            yield f"{indent}{_text(name)}: {one_line(value)}", key


def one_line(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {one_line(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(one_line, value))}]"
    if isinstance(value, str):
        return _text(value.replace("${", "$${"))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _number(value)
    return "null" if value is None else str(value)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    mantissa, e, exponent = repr(value).partition("e")
    # With a point it is a number for readers of YAML 1.1 too.
    return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}{e}{exponent}"


def _text(text: str) -> str:
    """Without quotes where every reader of YAML takes it for this text."""
    if _PLAIN.fullmatch(text) and yaml.safe_load(text) == text:
        return text
    quoted: str = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=math.inf)
    return quoted.rstrip("\n")


def _place(origin: Origin, project: Project) -> str:
    place = origin.source
    if origin.line:
        place = f"{os.path.relpath(origin.source, project.folder)}:{origin.line}"
    if origin.variable_origin is not None:
        place += f", ${{{origin.variable}}} of {_place(origin.variable_origin, project)}"
    return f"{place} ({origin.alias})" if origin.alias else place
