"""What a logger is, and many of them as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from paceline.observe.best_effort import describe, warn
from paceline.observe.metrics import flat_items


class Logger(Protocol):
    """Takes a run's numbers, on rank 0: `log` from time to time, then `close` once, also after an error.

    Steps rise; a run that goes on from a checkpoint begins again behind it. A logger that must remember something
    from one start of a run to the next also has `state_dict` and `load_state_dict`, see `Stateful`.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Stateful(Protocol):
    """`load_state_dict` is called before the first `log`, if at all. State is what JSON can hold."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Loggers:
    """Several loggers as one. One that raises is switched off with a warning, and the run goes on without it; with
    `strict` the error is raised.

    Values may be nested (`{"eval": {"loss": 2.0}, "shares": [6, 2]}`): loggers receive numbers under flat names,
    "eval/loss" and "shares/0".
    """

    def __init__(self, loggers: Sequence[Logger], *, strict: bool = False) -> None:
        self._names = _distinct_names(loggers)
        self._active = dict(zip(self._names, loggers, strict=True))
        self._strict = strict

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = dict(flat_items(values))
        for name, logger in list(self._active.items()):
            self._call(name, partial(logger.log, step, numbers), f"at step {step}")

    def close(self) -> None:
        """Safe to call twice."""
        for name, logger in list(self._active.items()):
            self._call(name, logger.close, "when it was closed")
        self._active.clear()

    def state_dict(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, logger in list(self._active.items()):
            if isinstance(logger, Stateful):
                self._call(name, partial(_keep_state, states, name, logger), "saving its state")
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A logger that the state does not know begins anew, and so does one that cannot take it."""
        for name, logger in list(self._active.items()):
            if name in state and isinstance(logger, Stateful):
                self._call(name, partial(logger.load_state_dict, state[name]), "taking up its state")

    def _call(self, name: str, call: Callable[[], None], when: str) -> None:
        try:
            call()
        except Exception as error:
            if self._strict:
                raise
            self._active.pop(name, None)
            warn(
                f"the logger {name} failed {when} and is switched off; training goes on: {describe(error)}",
                stacklevel=4,
            )


def _keep_state(states: dict[str, Any], name: str, logger: Stateful) -> None:
    states[name] = logger.state_dict()


def _distinct_names(loggers: Sequence[Logger]) -> list[str]:
    """Class names, numbered where there are several of a class."""
    kinds = [type(logger).__name__ for logger in loggers]
    return [kind if kinds.count(kind) == 1 else f"{kind}-{kinds[: i + 1].count(kind)}" for i, kind in enumerate(kinds)]
