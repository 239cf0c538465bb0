"""The logger protocol, and several loggers as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from paceline.observe.best_effort import describe, warn
from paceline.observe.metrics import flat_items


class Logger(Protocol):
    """Receives a run's metrics on rank 0: `log` repeatedly, then `close` once, also after an error.

    Steps increase; a resumed run continues after the step of its checkpoint. A logger with state that outlives a
    process also implements `Stateful`.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Stateful(Protocol):
    """The state must be representable as JSON. `load_state_dict` is called before the first `log`, if at all."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Loggers:
    """Several loggers as one. A logger that raises is disabled with a warning; with `strict` the error is raised.

    Values may be nested (`{"eval": {"loss": 2.0}, "shares": [6, 2]}`): loggers receive numbers under flat names,
    "eval/loss" and "shares/0".
    """

    def __init__(self, loggers: Sequence[Logger], *, strict: bool = False) -> None:
        self._active = dict(zip(_distinct_names(loggers), loggers, strict=True))
        self._strict = strict

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = dict(flat_items(values))
        for name, logger in list(self._active.items()):
            self._call(name, partial(logger.log, step, numbers), f"at step {step}")

    def close(self) -> None:
        """Safe to call twice."""
        for name, logger in list(self._active.items()):
            self._call(name, logger.close, "in close()")
        self._active.clear()

    def state_dict(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, logger in list(self._active.items()):
            if isinstance(logger, Stateful):
                self._call(name, lambda: states.update({name: logger.state_dict()}), "in state_dict()")  # noqa: B023
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loggers without an entry in `state` start from scratch."""
        for name, logger in list(self._active.items()):
            if name in state and isinstance(logger, Stateful):
                self._call(name, partial(logger.load_state_dict, state[name]), "in load_state_dict()")

    def _call(self, name: str, call: Callable[[], None], when: str) -> None:
        try:
            call()
        except Exception as error:
            if self._strict:
                raise
            self._active.pop(name, None)
            warn(
                f"the logger {name} failed {when} and is disabled, training continues: {describe(error)}", stacklevel=4
            )


def _distinct_names(loggers: Sequence[Logger]) -> list[str]:
    """Class names, numbered if several loggers have the same class."""
    kinds = [type(logger).__name__ for logger in loggers]
    return [kind if kinds.count(kind) == 1 else f"{kind}-{kinds[: i + 1].count(kind)}" for i, kind in enumerate(kinds)]
