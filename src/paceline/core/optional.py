"""Packages that only some users need: imported when used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def optional(module: str, *, package: str, extra: str, user: str = "this source") -> Any:
    """The module; where it is not installed, an error that tells how to install it. `user` is what needs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):  # installed, but something that it imports is missing
            raise
        raise ModuleNotFoundError(
            f"{package} is not installed, and {user} needs it: pip install 'paceline[{extra}]'", name=error.name
        ) from error


def pyarrow(module: str = "pyarrow") -> Any:
    """pyarrow, or one of its modules."""
    return optional(module, package="pyarrow", extra="arrow")
