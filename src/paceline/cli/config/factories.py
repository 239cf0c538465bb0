"""Python of the user's, named in a project file and imported when it is used."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from paceline.cli.config.errors import ConfigError, Origin, fail, nearest

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_TARGET = re.compile(f"{_DOTTED}:{_DOTTED}")


@dataclass(frozen=True)
class Site:
    """Where a name stands in which project. It is searched for in the project's folder first."""

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
        """The object itself. Imports its module."""
        module_name, _, path = self.target.partition(":")
        thing: Any = self._module(module_name)
        for name in path.split("."):
            if not hasattr(thing, name):
                where = module_name if inspect.ismodule(thing) else getattr(thing, "__qualname__", type(thing).__name__)
                names = [known for known in dir(thing) if not known.startswith("_")]
                raise self.site.fail(f"{where} has no {name!r}: {nearest(name, names)}")
            thing = getattr(thing, name)
        return thing

    def as_function(self) -> Any:
        """What makes the part: the object itself."""
        return self.build()

    def _module(self, name: str) -> Any:
        folder = str(self.site.folder)
        if folder not in sys.path:  # for good: modules also import inside of functions
            sys.path.insert(0, folder)
            importlib.invalidate_caches()
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise self._broken(name, error) from error  # it is there, and imports something that is not
            modules = [path.stem for path in self.site.folder.glob("*.py")]
            raise self.site.fail(
                f"there is no module {error.name!r}, neither in {self.site.folder} nor installed: "
                f"{nearest(error.name, modules)}"
            ) from error
        except Exception as error:
            raise self._broken(name, error) from error
        self._check_is_own(name.partition(".")[0])
        return module

    def _check_is_own(self, package: str) -> None:
        """A process has one module of a name: not silently that of another project, or of Python, for the project's."""
        imported = getattr(sys.modules[package], "__file__", None)
        for own in (self.site.folder / f"{package}.py", self.site.folder / package / "__init__.py"):
            if own.is_file() and imported is not None and own.resolve() != Path(imported).resolve():
                raise self.site.fail(
                    f"{own} cannot be imported, since {package} is {imported} in this process already: rename it"
                )

    def _broken(self, name: str, error: Exception) -> ConfigError:
        return self.site.fail(f"importing {name} failed: {_described(error, self.site.folder)}")


@dataclass(frozen=True)
class Factory:
    """A call: of the function `target`, with keyword arguments, which may hold factories and references again."""

    target: str
    arguments: Mapping[str, Any]
    site: Site = field(compare=False, repr=False)

    def build(self, *positional: Any) -> Any:
        """What the function returns, called with `positional` before the file's arguments."""
        function = self.function()
        self._check_arguments(function, len(positional))
        arguments = {name: built(value) for name, value in self.arguments.items()}
        try:
            return function(*positional, **arguments)
        except Exception as error:
            raise self.site.fail(f"{self.target} failed: {_described(error, self.site.folder)}") from error

    def as_function(self) -> Callable[..., Any]:
        """What makes the part: `build`."""
        return self.build

    def function(self) -> Callable[..., Any]:
        """What it calls. Imports its module."""
        function = Reference(self.target, self.site).build()
        if not callable(function):
            raise self.site.fail(f"{self.target} is {type(function).__name__}, which cannot be called")
        return cast("Callable[..., Any]", function)

    def _check_arguments(self, function: Callable[..., Any], num_positional: int) -> None:
        """Said before the call, and so never mistaken for a TypeError inside of it."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # some functions of C cannot be looked at
            return
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        for taken in positional[:num_positional]:
            by_name.pop(taken.name, None)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for name in self.arguments:
            if name not in by_name and not takes_any:
                raise self.site.fail(f"{self.target} has no argument {name!r}: {nearest(name, by_name)}")
        missing = [n for n, p in by_name.items() if p.default is p.empty and n not in self.arguments]
        if missing:
            raise self.site.fail(f"{self.target} needs {', '.join(missing)}: give them under `arguments`")


def built(value: Any) -> Any:
    """A value of `arguments` with what it names in place of the names."""
    if isinstance(value, Factory | Reference):
        return value.build()
    if isinstance(value, dict):
        return {key: built(item) for key, item in value.items()}
    return [built(item) for item in value] if isinstance(value, list) else value


def check_names(value: Any) -> None:
    """Raise `ConfigError` if something that settings name is not there. Imports it, and builds nothing."""
    if isinstance(value, Reference):
        value.build()
    elif isinstance(value, Factory):
        value.function()
        check_names(value.arguments)
    elif is_dataclass(value):
        for each in fields(value):
            check_names(getattr(value, each.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            check_names(item)
    elif isinstance(value, list | tuple):
        for item in value:
            check_names(item)


def _described(error: Exception, folder: Path) -> str:
    """The error, and the last line of the project's own code that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)]
    # A file that cannot be parsed is named by the error itself.
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own and not isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {error}{where}"


def target_problem(target: str) -> str | None:
    """What is wrong with a name; None if it can be one."""
    if _TARGET.fullmatch(target):
        return None
    module, _, name = target.rpartition(".")
    hint = f": did you mean {module}:{name}?" if module and _TARGET.fullmatch(f"{module}:{name}") else ""
    return f"is {target!r}, which names no function of a module, package.module:name{hint}"
