"""Python objects that a project file names. They are imported when they are used, not when the file is loaded."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from paceline.cli.config.errors import ConfigError, Origin, fail, nearest

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_TARGET = re.compile(f"{_DOTTED}:{_DOTTED}")


@dataclass(frozen=True)
class Site:
    """Where a target is named. Modules are searched in the project's folder first."""

    folder: Path
    key: str
    origin: Origin

    def fail(self, message: str) -> ConfigError:
        return fail(self.origin, f"{self.key}: {message}")


@dataclass(frozen=True)
class Reference:
    """An object of a module: `package.module:name`."""

    target: str
    site: Site = field(compare=False, repr=False)

    def build(self) -> Any:
        """The object. Imports its module."""
        module_name, _, path = self.target.partition(":")
        thing: Any = self._module(module_name)
        for name in path.split("."):
            if not hasattr(thing, name):
                where = module_name if inspect.ismodule(thing) else getattr(thing, "__qualname__", type(thing).__name__)
                names = [known for known in dir(thing) if not known.startswith("_")]
                raise self.site.fail(f"{where} has no {name!r}: {nearest(name, names)}")
            thing = getattr(thing, name)
        return thing

    as_function = build  # a reference is the part itself, a factory builds it

    def _module(self, name: str) -> Any:
        folder = str(self.site.folder)
        if folder not in sys.path:  # and stays there: modules also import inside functions
            sys.path.insert(0, folder)
            importlib.invalidate_caches()
        try:
            module = importlib.import_module(name)
        except Exception as error:
            is_missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
            if not is_missing:
                raise self.site.fail(f"importing {name} failed: {_described(error, self.site.folder)}") from error
            missing = str(getattr(error, "name", name))
            known = nearest(missing, [path.stem for path in self.site.folder.glob("*.py")])
            raise self.site.fail(
                f"module {missing!r} is neither in {self.site.folder} nor installed: {known}"
            ) from error
        self._check_is_own(name.partition(".")[0])
        return module

    def _check_is_own(self, package: str) -> None:
        """Refuse a module of another project, or of Python, in place of the project's module of the same name."""
        imported = getattr(sys.modules[package], "__file__", None)
        for own in (self.site.folder / f"{package}.py", self.site.folder / package / "__init__.py"):
            if own.is_file() and imported is not None and own.resolve() != Path(imported).resolve():
                raise self.site.fail(
                    f"{own} cannot be imported, because this process already imported {imported} as {package}: "
                    "rename it"
                )


@dataclass(frozen=True)
class Factory:
    """A call of `target` with keyword arguments, which may contain factories and references."""

    target: str
    arguments: Mapping[str, Any]
    site: Site = field(compare=False, repr=False)

    def build(self, *positional: Any) -> Any:
        """The result of the call with `positional` before the file's arguments."""
        function = self.function()
        _check_signature(self, function, [type(value).__name__ for value in positional], self.arguments)
        arguments = {name: _built(value) for name, value in self.arguments.items()}
        try:
            return function(*positional, **arguments)
        except Exception as error:
            raise self.site.fail(f"{self.target} failed: {_described(error, self.site.folder)}") from error

    def as_function(self) -> Callable[..., Any]:
        return self.build

    def function(self) -> Any:
        """The callable. Imports its module."""
        function = Reference(self.target, self.site).build()
        if not callable(function):
            raise self.site.fail(f"{self.target} is not callable: it is of type {type(function).__name__}")
        return function


def _built(value: Any) -> Any:
    """A value of `arguments`, with factories and references replaced by their objects."""
    if isinstance(value, Factory | Reference):
        return value.build()
    if isinstance(value, dict):
        return {key: _built(item) for key, item in value.items()}
    return [_built(item) for item in value] if isinstance(value, list) else value


def _described(error: Exception, folder: Path) -> str:
    """The error, with the last line of the project's code in its traceback."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(folder)]
    # A SyntaxError names the file itself.
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own and not isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {error}{where}"


def target_problem(target: str) -> str | None:
    """What is wrong with a target; None if it has the right form."""
    if _TARGET.fullmatch(target):
        return None
    module, _, name = target.rpartition(".")
    hint = f"; did you mean {module}:{name}?" if module and _TARGET.fullmatch(f"{module}:{name}") else ""
    return f"is {target!r}: expected package.module:name{hint}"


# The arguments that each part is called with. A factory of a part is called with them too, before its own arguments,
# except for the parts in _FUNCTIONS: those factories return the function.
_CALLED_WITH = {
    "model": (),
    "optimizer": ("parameters",),
    "scheduler": ("optimizer",),
    "loss": ("model", "batch"),
    "metrics": ("model", "batch"),
    "after": ("model",),
    "collate": ("samples",),
    "weight": ("batch",),
    "transform": ("sample",),
    "outer": ("parameters",),
}
_FUNCTIONS = ("collate", "weight", "transform")
# The class that a class given as this part must be derived from.
_BASES = {
    "optimizer": "torch.optim:Optimizer",
    "outer": "torch.optim:Optimizer",
    "scheduler": "torch.optim.lr_scheduler:LRScheduler",
}
# Built-in functions that are useful as parts: a collate function that keeps the samples, a weight that counts rows.
_USEFUL = (list, tuple, dict, len)


def check_parts(value: Any, name: str = "") -> None:
    """Raise `ConfigError` if a part does not exist or cannot be used as `name`. Imports modules; calls nothing."""
    if isinstance(value, Factory):
        function = value.function()
        check_parts(value.arguments)
        _check_part(value, function, name, () if name in _FUNCTIONS else _CALLED_WITH.get(name, ()), value.arguments)
    elif isinstance(value, Reference):
        _check_part(value, value.build(), name, _CALLED_WITH.get(name, ()), {})
    elif is_dataclass(value):
        for each in fields(value):
            check_parts(getattr(value, each.name), each.name)
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            check_parts(item)


def _check_part(
    part: Reference | Factory, thing: Any, name: str, arguments: tuple[str, ...], given: Mapping[str, Any]
) -> None:
    if name not in _CALLED_WITH:
        return
    if not callable(thing):
        raise part.site.fail(f"{part.target} is not callable: it is of type {type(thing).__name__}")
    if _is_of_python(thing):  # `os:system` would execute any text it is called with
        raise part.site.fail(
            f"{part.target} belongs to Python itself: use a function or class of the project or a package"
        )
    base = _BASES.get(name)
    if inspect.isclass(thing) and base and not issubclass(thing, Reference(base, part.site).build()):
        raise part.site.fail(f"{part.target} is a class that is not derived from {base.replace(':', '.')}")
    _check_signature(part, thing, arguments, given)


def _check_signature(
    part: Reference | Factory, function: Any, arguments: Sequence[str], given: Mapping[str, Any]
) -> None:
    """Before the call, so that a TypeError inside the function is not mistaken for one of the call."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some C functions have no signature
        return
    kinds = {p.kind for p in parameters}
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for taken in positional[: len(arguments)]:
        by_name.pop(taken, None)
    missing = [name for name, p in by_name.items() if p.default is p.empty and name not in given]
    is_short = len(positional) < len(arguments) and inspect.Parameter.VAR_POSITIONAL not in kinds
    if is_short or (missing and isinstance(part, Reference)):
        signature = ", ".join(p.name for p in parameters)
        call = f"with {', '.join(arguments)}" if arguments else "without arguments"
        raise part.site.fail(f"{part.target}({signature}) cannot be called {call}: change its parameters")
    for name in given:
        if name not in by_name and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise part.site.fail(f"{part.target} has no argument {name!r}: {nearest(name, by_name)}")
    if missing:
        raise part.site.fail(f"{part.target} requires {', '.join(missing)}: add the values to `arguments`")


def _is_of_python(thing: Any) -> bool:
    if isinstance(thing, functools.partial):
        return _is_of_python(thing.func)
    if not (inspect.isroutine(thing) or inspect.isclass(thing)) or thing in _USEFUL:
        return False
    module = getattr(thing, "__module__", None) or type(getattr(thing, "__self__", None)).__module__
    return str(module).partition(".")[0] in sys.stdlib_module_names
