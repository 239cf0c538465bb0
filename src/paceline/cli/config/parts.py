"""Python objects that a project file names. They are imported when they are used, not when the file is loaded."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from paceline.cli.config.errors import ConfigError, Origin, fail, nearest

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_TARGET = re.compile(f"{_DOTTED}:{_DOTTED}")


def is_target(value: Any) -> bool:
    """Whether it is a text of the form `package.module:name`."""
    return isinstance(value, str) and _TARGET.fullmatch(value) is not None


def meant_target(value: Any) -> str:
    """The end of a message about a value that is not a target."""
    meant = ":".join(str(value).rsplit(".", 1))
    return f"; did you mean {meant}?" if isinstance(value, str) and is_target(meant) else ""


@dataclass(frozen=True)
class Part:
    """An object of a module, `package.module:name`, or the result of calling it.

    arguments: keyword arguments of the call, which may contain parts; None for the object itself.
    folder: the project's, where modules are searched first. key, origin: where the target is named.
    """

    target: str
    arguments: Mapping[str, Any] | None
    folder: Path = field(compare=False, repr=False)
    key: str = field(compare=False, repr=False)
    origin: Origin = field(compare=False, repr=False)

    def fail(self, message: str) -> ConfigError:
        return fail(self.origin, f"{self.key}: {message}")

    def build(self, *positional: Any) -> Any:
        """The object, or the result of the call with `positional` before the file's arguments."""
        thing = self.object()
        if self.arguments is None:
            return thing
        self._check_call(thing, [type(value).__name__ for value in positional])
        arguments = {name: _built(value) for name, value in self.arguments.items()}
        try:
            return thing(*positional, **arguments)
        except Exception as error:
            raise self.fail(f"{self.target} failed: {_described(error, self.folder)}") from error

    def as_function(self) -> Callable[..., Any]:
        """The function for a part that is called by the run: the object itself, or `build`."""
        function: Callable[..., Any] = self.object() if self.arguments is None else self.build
        return function

    def object(self) -> Any:
        """The named object. Imports its module."""
        module_name, _, path = self.target.partition(":")
        thing: Any = self._module(module_name)
        for name in path.split("."):
            if not hasattr(thing, name):
                where = module_name if inspect.ismodule(thing) else getattr(thing, "__qualname__", type(thing).__name__)
                raise self.fail(f"{where} has no {name!r}: {nearest(name, _own_names(thing, module_name))}")
            thing = getattr(thing, name)
        return thing

    def check(self, name: str = "") -> None:
        """Raise `ConfigError` if the part does not exist, or cannot be used as `name`."""
        thing = self.object()
        check_parts(self.arguments)
        if name not in _CALLED_WITH:
            return
        if _is_of_python(thing):  # `os:system` would execute any text it is called with
            use = "use a function or class of the project or a package"
            raise self.fail(f"{self.target} belongs to Python itself: {use}")
        base = _BASES.get(name)
        if inspect.isclass(thing) and base and not issubclass(thing, replace(self, target=base).object()):
            raise self.fail(f"{self.target} is a class that is not derived from {base.replace(':', '.')}")
        returns_function = name in _FUNCTIONS and self.arguments is not None
        self._check_call(thing, () if returns_function else _CALLED_WITH[name])

    def _check_call(self, function: Any, positional: Sequence[str]) -> None:
        """Before the call, so that a TypeError inside the function is not mistaken for one of the call."""
        if not callable(function):
            raise self.fail(f"{self.target} is not callable: it is of type {type(function).__name__}")
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # a C function
            return
        given, parameters = self.arguments or {}, list(signature.parameters.values())
        try:
            signature.bind(*positional, **given)
        except TypeError as error:
            names = [
                p.name for p in parameters[len(positional) :] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            ]
            unknown = [name for name in given if name not in names]
            if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
                raise self.fail(f"{self.target} has no argument {unknown[0]!r}: {nearest(unknown[0], names)}") from None
            shown, call = ", ".join(signature.parameters), ", ".join([*positional, *given]) or "no arguments"
            raise self.fail(f"{self.target}({shown}) cannot be called with {call}: {error}") from None

    def _module(self, name: str) -> Any:
        folder = self.folder
        if str(folder) not in sys.path:  # and stays there: modules also import inside functions
            sys.path.insert(0, str(folder))
            importlib.invalidate_caches()
        try:
            module = importlib.import_module(name)
        except Exception as error:
            if not isinstance(error, ModuleNotFoundError) or not f"{name}.".startswith(f"{error.name}."):
                raise self.fail(f"importing {name} failed: {_described(error, folder)}") from error
            known = nearest(str(error.name), [path.stem for path in folder.glob("*.py")])
            raise self.fail(f"module {error.name!r} is neither in {folder} nor installed: {known}") from error
        # A process has one module per name. It must not belong to another project, or to Python.
        package = name.partition(".")[0]
        imported = getattr(sys.modules[package], "__file__", None)
        for own in (folder / f"{package}.py", folder / package / "__init__.py"):
            if own.is_file() and imported is not None and own.resolve() != Path(imported).resolve():
                raise self.fail(f"{package} is already imported from {imported}, not from {own}: rename it")
        return module


def _own_names(thing: Any, module_name: str) -> list[str]:
    """The public names in a module or a class, without modules and what was imported from other packages."""

    def package(name: object) -> str:
        return str(name).partition(".")[0]

    names = []
    for name in dir(thing):
        value = inspect.getattr_static(thing, name, None)  # getattr() may import: lazy packages have thousands of names
        is_own = package(getattr(value, "__module__", module_name)) == package(module_name)
        if is_own and not inspect.ismodule(value) and not name.startswith("_"):
            names.append(name)
    return names


def _built(value: Any) -> Any:
    """A value of `arguments`, with parts replaced by their objects."""
    if isinstance(value, Part):
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


# The arguments that each part is called with. For a part with `arguments`, they come before these arguments, except for
# the parts in _FUNCTIONS, where the call returns the function.
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
_OPTIMIZER = "torch.optim:Optimizer"
_BASES = {"optimizer": _OPTIMIZER, "outer": _OPTIMIZER, "scheduler": "torch.optim.lr_scheduler:LRScheduler"}
# Built-in functions that are useful as parts: a collate function that keeps the samples, a weight that counts rows.
_USEFUL = (list, tuple, dict, len)


def check_parts(value: Any, name: str = "") -> None:
    """Check all parts in settings. name: of the setting. Imports modules; calls nothing."""
    if isinstance(value, Part):
        value.check(name)
    elif is_dataclass(value):
        for each in fields(value):
            check_parts(getattr(value, each.name), each.name)
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            check_parts(item)


def _is_of_python(thing: Any) -> bool:
    if isinstance(thing, functools.partial):
        return _is_of_python(thing.func)
    if not (inspect.isroutine(thing) or inspect.isclass(thing)) or thing in _USEFUL:
        return False
    module = getattr(thing, "__module__", None) or type(getattr(thing, "__self__", None)).__module__
    return str(module).partition(".")[0] in sys.stdlib_module_names
