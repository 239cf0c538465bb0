"""Optional dependencies, imported on demand."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def optional(module: str, *, package: str, extra: str, user: str = "this source") -> Any:
    """The module. If it is not installed, the error says how to install it; `user` is the feature that needs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):  # installed, but one of its dependencies is missing
            raise
        raise ModuleNotFoundError(
            f"{package} is not installed, and {user} needs it: pip install 'paceline[{extra}]'", name=error.name
        ) from error


def pyarrow(module: str = "pyarrow") -> Any:
    """pyarrow or one of its submodules."""
    return optional(module, package="pyarrow", extra="arrow")
