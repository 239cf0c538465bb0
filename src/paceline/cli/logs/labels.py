"""Names for runs in the same plot: the settings in which they differ, or else their shortest unique names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.cli.commands import shortened
from paceline.observe.run_files import RunFiles, read_settings

MAX_SETTINGS = 3
MAX_LABEL = 40
_MAX_VALUE = 20
_SHORT = {"learning_rate": "lr"}
# Settings that do not change what a plot shows.
_IGNORED = (
    *("output.", "loggers.", "max_restarts.", "min_workers.", "stall_s.", "checkpoints.", "after."),
    *("trainer.timeline.", "trainer.log_every."),
)


def run_labels(runs: Sequence[RunFiles]) -> list[str]:
    """One label per run, all different."""
    configs = [_settings(files) for files in runs]
    if len(runs) > 1 and all(configs):
        known = dict.fromkeys(key for config in configs for key in config)
        keys = [key for key in known if any(config.get(key) != configs[0].get(key) for config in configs)]
        labels = [", ".join(f"{_short(key, keys)}={_value(config.get(key))}" for key in keys) for config in configs]
        is_short = 0 < len(keys) <= MAX_SETTINGS and max(map(len, labels)) <= MAX_LABEL
        if is_short and len(set(labels)) == len(labels):
            return labels
    return short_names(runs)


def short_names(runs: Sequence[RunFiles]) -> list[str]:
    """The shortest unique names: the configs' names, these with the time of day, or the folders' names."""
    configs = [files.config_name for files in runs]
    with_time = [f"{files.config_name} {files.time_of_day}".strip() for files in runs]
    unique = [labels for labels in (configs, with_time) if len(set(labels)) == len(labels)]
    return unique[0] if unique else [files.root.name for files in runs]


def _settings(files: RunFiles) -> dict[str, Any]:
    return {key: value for key, value in read_settings(files.config).items() if not f"{key}.".startswith(_IGNORED)}


def _short(key: str, keys: Sequence[str]) -> str:
    """The last word of a key, if no other one ends with it."""
    last = _last(key)
    return last if sum(_last(other) == last for other in keys) == 1 else key


def _last(key: str) -> str:
    word = key.rpartition(".")[2]
    return _SHORT.get(word, word)


def _value(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else "default" if value is None else str(value)
    return shortened(text, _MAX_VALUE)
