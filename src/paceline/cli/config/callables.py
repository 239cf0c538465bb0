"""Whether what a project names can be the part that it is named as: looked at, never called.

A part is a function or class of the project or of an installed package, which takes what Paceline calls it with.
Functions and classes of Python's standard library are refused: `os:system` is no scheduler, and would run whatever it
is called with.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from paceline.cli.config.factories import Factory, Reference
from paceline.cli.config.schema import Settings

# The few that are of use: a collate function that leaves a list of samples as it is, a weight that counts rows.
_USEFUL = (list, tuple, dict, len)


class _Use(NamedTuple):
    """What a part is called with. `of_factory`: what its factory is called with, before the file's arguments.

    kind: what a class must be derived from.
    """

    arguments: tuple[str, ...]
    of_factory: tuple[str, ...]
    kind: type | None = None


_USES = {
    "model": _Use((), ()),
    "optimizer": _Use(("parameters",), ("parameters",), torch.optim.Optimizer),
    "scheduler": _Use(("optimizer",), ("optimizer",), LRScheduler),
    "loss": _Use(("model", "batch"), ("model", "batch")),
    "metrics": _Use(("model", "batch"), ("model", "batch")),
    "after": _Use(("model",), ("model",)),
    "collate": _Use(("samples",), ()),
    "weight": _Use(("batch",), ()),
    "transform": _Use(("sample",), ()),
    "outer": _Use(("parameters",), ("parameters",), torch.optim.Optimizer),
}


def check_parts(settings: Settings) -> None:
    """Raise `ConfigError` for a part that cannot be what it is named as. Imports its module."""
    for name, part in _parts(settings):
        use = _USES[name]
        if isinstance(part, Factory):
            _check(part, part.function(), use.of_factory, part.arguments, use.kind)
        elif isinstance(part, Reference):
            _check(part, part.build(), use.arguments, {}, use.kind)


def _parts(settings: Settings) -> Iterator[tuple[str, Any]]:
    for name in ("model", "optimizer", "scheduler", "loss", "metrics", "after"):
        yield name, getattr(settings, name)
    data = settings.data
    yield from (("collate", data.collate), ("weight", data.weight))
    yield from (("transform", getattr(source, "transform", None)) for source in (data.train, data.evaluation))
    yield "outer", getattr(settings.trainer.strategy, "outer", None)


def _check(part: Reference | Factory, thing: Any, called_with: tuple[str, ...], given: Any, kind: type | None) -> None:
    if not callable(thing):
        raise part.site.fail(f"{part.target} is of type {type(thing).__name__}, which cannot be called")
    if _is_of_python(thing):
        raise part.site.fail(
            f"{part.target} is a part of Python itself: name a function or class of the project or of a package"
        )
    if inspect.isclass(thing) and kind is not None and not issubclass(thing, kind):
        raise part.site.fail(f"{part.target} is a class, but not one of {kind.__module__}.{kind.__qualname__}")
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # some functions of C cannot be looked at
        return
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    required = [p.name for p in positional if p.default is p.empty and p.name not in given]
    if (len(positional) < len(called_with) and not takes_any) or (not given and len(required) > len(called_with)):
        asked = f"called with {', '.join(called_with)}" if called_with else "called without arguments"
        raise part.site.fail(
            f"{part.target}({', '.join(signature.parameters)}) cannot be {asked}: change its parameters"
        )


def _is_of_python(thing: Any) -> bool:
    if isinstance(thing, functools.partial):
        return _is_of_python(thing.func)
    if not (inspect.isroutine(thing) or inspect.isclass(thing)) or thing in _USEFUL:
        return False
    module = getattr(thing, "__module__", None) or type(getattr(thing, "__self__", None)).__module__
    return str(module).partition(".")[0] in sys.stdlib_module_names
