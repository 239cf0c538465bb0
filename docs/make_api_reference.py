"""Write docs/api.md from the signatures and docstrings of everything public.

    python docs/make_api_reference.py

A test compares the page with what this script would write, so run it after changing a signature or a docstring.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import paceline

PAGE = Path(__file__).with_name("api.md")
# The public modules beside `paceline` itself.
MODULES = {
    "Errors": "paceline.errors",
    "Sources of data": "paceline.data",
    "What a run reports": "paceline.reports",
    "flodl": "paceline.compat.flodl",
    "ggmlR": "paceline.compat.ggmlr",
    "ResNetImageNet.jl": "paceline.compat.resnetimagenet",
}
# Classes that users are given and do not construct.
HANDED_OUT = {"Builder", "Ddp", "Handle", "StepRecord", "Trainer", "TrainingState"}
INTRODUCTION = """\
# Reference

Written by `python docs/make_api_reference.py` from signatures and docstrings: change those, not this page. For a way
in, read the [guide](guide.md).
"""
LONGEST_SIGNATURE = 110
ROOT = Path(inspect.getfile(paceline)).parent
DEFINITION = re.compile(r"(?P<names>[a-z]\w*(?:, [a-z]\w*)*)(?P<signature>\([\w, ]*\))?: (?P<text>.*)")
ARGUMENTS = re.compile(r"^Args:\n((?:    .*\n|\n)+)", re.MULTILINE)


def page() -> str:
    """The whole page."""
    sections = {"paceline": {name: getattr(paceline, name) for name in paceline.__all__}}
    seen = set(paceline.__all__)
    for title, name in MODULES.items():
        module = import_module(name)
        sections[title] = {f"{name}.{each}": getattr(module, each) for each in module.__all__ if each not in seen}
        seen |= set(module.__all__)
    parts = [INTRODUCTION, *(contents(title, things) for title, things in sections.items())]
    for title, things in sections.items():
        own = [f"In `{MODULES[title]}`.\n"] if title in MODULES else []
        parts += [f"## {title}\n", *own, *(entry(name, things[name]) for name in in_order(things))]
    return "\n".join(parts)


def is_error(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseException)


def in_order(names: Any) -> list[str]:
    return sorted(names, key=lambda name: (last(name).lower(), name))


def contents(title: str, things: dict[str, Any]) -> str:
    """A line of links."""
    links = (f"[`{last(name)}`](#{last(name).lower()})" for name in in_order(things))
    return filled(f"**{title}**: {', '.join(links)}") + "\n"


def last(name: str) -> str:
    return name.rpartition(".")[2]


def entry(name: str, thing: Any) -> str:
    """A class with its methods, a function, or a value."""
    parts = [f"### {last(name)}\n", fenced(signature(name, thing)), prose(thing), settings(thing)]
    if isinstance(thing, type):
        parts += [member(last(name), key, value) for key, value in vars(thing).items() if is_public(key, value)]
    return "\n".join(filter(None, parts))


def settings(thing: Any) -> str:
    """The settings of a group, with the help text of their declarations."""
    declared = [field for field in fields(thing) if "help" in field.metadata] if is_dataclass(thing) else []
    lines = [
        filled(f"- `{f.name}`: {f.metadata['help']}{' (affects the course)' * f.metadata['course']}", indent="  ")
        for f in declared
    ]
    return "\n".join(lines) + "\n" if lines else ""


def is_public(name: str, value: Any) -> bool:
    """Fields of dataclasses and named tuples are in their signature already."""
    is_callable = inspect.isfunction(value) or isinstance(value, classmethod | staticmethod | property)
    return is_callable and not name.startswith("_") and Path(source_file(value)).is_relative_to(ROOT)


def source_file(value: Any) -> str:
    """Where it was written; what dataclasses and named tuples generate was written nowhere."""
    function: Any = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return str(function.__code__.co_filename)


def member(owner: str, name: str, value: Any) -> str:
    if isinstance(value, property):
        getter: Any = value.fget
        text = f"{owner}.{name}: {inspect.signature(getter).return_annotation}"
    elif isinstance(value, classmethod | staticmethod):
        text = signature(f"{owner}.{name}", value.__func__, is_bound=isinstance(value, classmethod))
    else:
        text = signature(f"{owner}.{name}", value, is_bound=True)
    return "\n".join(filter(None, [fenced(text), prose(value)]))


def signature(name: str, thing: Any, *, is_bound: bool = False) -> str:
    """On one line if it fits there, else one parameter per line; annotations as they are in the source."""
    if not callable(thing):
        return f"{name} = {thing!r}"
    if name in HANDED_OUT or is_error(thing) or getattr(thing, "_is_protocol", False):
        return name
    found = inspect.signature(thing)
    parameters = list(found.parameters.values())[is_bound:]
    texts, kind = [], None
    for parameter in parameters:
        if parameter.kind == parameter.KEYWORD_ONLY and kind not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            texts.append("*")
        kind = parameter.kind
        texts.append(written(parameter))
    is_class = isinstance(thing, type)
    returns = "" if is_class or found.return_annotation is found.empty else f" -> {found.return_annotation}"
    short = f"{name}({', '.join(texts)}){returns}"
    if len(short) <= LONGEST_SIGNATURE:
        return short
    return f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){returns}"


def written(parameter: inspect.Parameter) -> str:
    stars = (
        "*" if parameter.kind == parameter.VAR_POSITIONAL else "**" if parameter.kind == parameter.VAR_KEYWORD else ""
    )
    annotation = "" if parameter.annotation is parameter.empty else f": {annotated(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return f"{stars}{parameter.name}{annotation}"
    return f"{stars}{parameter.name}{annotation}{' = ' if annotation else '='}{parameter.default!r}"


def annotated(annotation: Any) -> str:
    """Named tuples evaluate theirs."""
    text = getattr(annotation, "__forward_arg__", annotation)
    return text if isinstance(text, str) else inspect.formatannotation(annotation)


def fenced(text: str) -> str:
    return f"```text\n{text}\n```\n"


def prose(thing: Any) -> str:
    """The docstring, with its definitions of arguments as a list."""
    own = thing.__dict__.get("__doc__") if isinstance(thing, type) else getattr(thing, "__doc__", None)
    if not own or own.startswith(f"{getattr(thing, '__name__', '')}("):  # what dataclasses generate
        return ""
    text = ARGUMENTS.sub(lambda found: textwrap.dedent(found[1]), inspect.cleandoc(own) + "\n")
    return "\n\n".join(map(paragraph, text.strip().split("\n\n"))) + "\n"


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
    return filled(f"- {names}{found['signature'] or ''}: {found['text']}", indent="  ")


def filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page())
