"""An extension of Griffe, which reads the API of the documentation site from the source.

Settings are declared as `name: type = setting("help text", default, ...)`: signatures show the default, and
the class lists the help texts. Docstrings define arguments in lines such as `name: text`, which also become a list.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe

DEFINITION = re.compile(r"(?P<names>[a-z]\w*(?:, [a-z]\w*)*)(?P<signature>\([\w, ]*\))?: (?P<text>.*)")
ARGUMENTS = re.compile(r"^Args:\n((?:    .*\n|\n)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Applied to every object when its module was read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        settings = [line for attribute in cls.attributes.values() for line in declared(attribute)]
        if settings and (cls.docstring is None or settings[0].partition(":")[0] not in cls.docstring.value):
            text = f"{cls.docstring.value}\n\n" if cls.docstring else ""
            cls.docstring = griffe.Docstring(text + "\n".join(settings), parent=cls)


def declared(attribute: griffe.Attribute) -> Iterator[str]:
    """A line of the list for `setting(...)`. The attribute keeps its default alone, which signatures show."""
    call = attribute.value
    if not isinstance(call, griffe.ExprCall) or str(call.function) != "setting":
        return
    given = {str(each.name): each.value for each in call.arguments if isinstance(each, griffe.ExprKeyword)}
    plain = [each for each in call.arguments if not isinstance(each, griffe.ExprKeyword)]
    attribute.value = plain[1] if len(plain) > 1 else given.get("default")
    text = ast.literal_eval(f"({plain[0]})")
    yield f"- `{attribute.name}`: {text}{' (affects the course)' * (str(given.get('course')) == 'True')}"


def as_markdown(text: str) -> str:
    """A docstring, with its definitions of arguments as a list."""
    text = ARGUMENTS.sub(lambda found: textwrap.dedent(found[1]), text + "\n")
    return "\n\n".join(map(paragraph, text.strip().split("\n\n")))


def paragraph(text: str) -> str:
    """A definition begins where a line does, and goes on over lines that begin no other."""
    items: list[str] = []
    for line in text.split("\n"):
        if DEFINITION.fullmatch(line) or not (items and DEFINITION.match(items[0])):
            items.append(line)
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(map(item, items))


def item(text: str) -> str:
    found = DEFINITION.fullmatch(text)
    if found is None:
        return text
    names = ", ".join(f"`{name}`" for name in found["names"].split(", "))
    return f"- {names}{found['signature'] or ''}: {found['text']}"
