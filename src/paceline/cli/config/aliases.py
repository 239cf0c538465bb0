"""Translates other tools' names of settings into Paceline's.

Names about saving are accepted in `trainer`, where other tools have them, and in `checkpoints`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.cli.config.errors import COMMAND_LINE, Problem
from paceline.cli.config.yaml_tree import Content, Node, Scalar, found

# Other names for a setting.
_RENAMED = {
    "per_device_train_batch_size": "trainer.micro_batch",
    "gradient_accumulation_steps": "trainer.micro_batches_per_worker",
    "num_train_epochs": "trainer.epochs",
    "lr_scheduler_type": "trainer.schedule",
    "logging_steps": "trainer.log_every",
    "eval_steps": "trainer.eval_every",
    "save_steps": "checkpoints.every_steps",
    "save_total_limit": "checkpoints.keep_last",
    "fused_optimizers": "trainer.fused",
}
_FEED, _LEAVE_OUT = "trainer.feed", "checkpoints.leave_out"
# Names whose values become settings, or are an error.
_CHOICES: dict[str, dict[Scalar, dict[str, Content] | str]] = {
    "dispatch_batches": {True: {_FEED: "dispatched"}, False: {_FEED: "sharded"}, "auto": {}},
    "shard_dataset": {True: {_FEED: "sharded"}, False: {}},
    "save_optimizer_state": {True: {}, False: {_LEAVE_OUT: "optimizer"}},
    "save_scheduler_state": {True: {}, False: {_LEAVE_OUT: "scheduler"}},
    "save_rng_state": {True: {}, False: {_LEAVE_OUT: "random"}},
    "save_dataset_state": {True: {}, False: ", but every checkpoint contains the position in the data: remove it"},
    "save_strategy": {"no": {"checkpoints.save": False}, "steps": {}, "epoch": {"checkpoints.every_epochs": 1}},
}
# Names of other tools that are not accepted, as their meaning differs or is unclear: errors name the setting to use.
SIMILAR = {
    **dict.fromkeys(("batch_size", "train_batch_size"), "trainer.global_batch"),
    **dict.fromkeys(("max_epochs", "num_epochs"), "trainer.epochs"),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision"), "trainer.precision"),
    "lr": "trainer.learning_rate",
    "gradient_clip_val": "trainer.max_grad_norm",
    "accumulate_grad_batches": "trainer.gradient_accumulation_steps",
    "log_every_n_steps": "trainer.log_every",
    "val_check_interval": "trainer.eval_every",
    "dataloader_num_workers": "trainer.readers",
    "torch_compile": "trainer.compile",
    "output_dir": "output",
    "report_to": "loggers",
    "resume_from_checkpoint": "checkpoints.resume",
}
# The aliases that each section accepts. docs/make_project_files.py documents them.
_ALL = (*_RENAMED, *_CHOICES)
ACCEPTED_IN = {"trainer": _ALL, "checkpoints": tuple(name for name in _ALL if name.startswith("save_"))}


def translate_aliases(root: Node) -> tuple[Node, list[Problem]]:
    """The tree without aliases. Values keep their places and remember the alias."""
    given = {name: root.entries.get(name, Node({}, root.origin)) for name in ACCEPTED_IN}
    translation = _Translation({name: dict(section.entries) for name, section in given.items()})
    translated = {
        name: Node(entries, given[name].origin)
        for name, entries in translation.sections.items()
        if isinstance(given[name].content, dict) and (entries or name in root.entries)
    }
    return Node(root.entries | translated, root.origin), translation.problems


def _overrides(node: Node, other: Node) -> bool:
    """Whether the first is from the command line and the second from a file, so that the first wins under any name."""
    return node.origin.source == COMMAND_LINE.source != other.origin.source


class _Translation:
    """Replaces aliases in `sections`, the entries of each section by name. A value of null counts as not given."""

    def __init__(self, sections: dict[str, dict[str, Node]]) -> None:
        self.sections = sections
        self.problems: list[Problem] = []
        for alias, key in _RENAMED.items():
            for node in self._take(alias):
                is_long_name = alias == "lr_scheduler_type" and node.content == "constant_with_warmup"
                self._set(key, Node("constant", node.origin) if is_long_name else node)
        self._batches()
        left_out = []
        for alias in _CHOICES:
            for node in self._take(alias):
                for key, content in self._chosen(node, _CHOICES[alias]).items():
                    if key == _LEAVE_OUT:
                        left_out.append(Node(content, node.origin))
                    else:
                        self._set(key, Node(content, node.origin))
        if left_out:
            self._set(_LEAVE_OUT, Node(tuple(left_out), left_out[0].origin))

    def _take(self, alias: str) -> Iterator[Node]:
        """Remove and return the values given under an alias."""
        for section, names in ACCEPTED_IN.items():
            node = self.sections[section].pop(alias, None) if alias in names else None
            if node is not None and node.content is not None:
                yield replace(node, origin=replace(node.origin, alias=f"{section}.{alias}"))

    def _get(self, key: str) -> Node | None:
        section, _, name = key.partition(".")
        node = self.sections[section].get(name)
        return None if node is None or node.content is None else node

    def _set(self, key: str, node: Node) -> None:
        section, _, name = key.partition(".")
        other = self._get(key)
        if other is None or _overrides(node, other):
            self.sections[section][name] = node
        elif _overrides(other, node):
            return
        elif not (key == _FEED and other.origin.alias and other.content == node.content):
            self._problem(node, f"and {other.origin.alias or key} at {other.origin} both set {key}: remove one")

    def _problem(self, node: Node, message: str, key: str = "") -> None:
        self.problems.append((node.origin, f"{node.origin.alias or key} {message}"))

    def _batches(self) -> None:
        """A batch per device is a micro-batch. By default, each worker then takes one per step."""
        micro_batch, per_worker = self._get("trainer.micro_batch"), self._get("trainer.micro_batches_per_worker")
        strategy, global_batch = self._get("trainer.strategy"), self._get("trainer.global_batch")
        has_cadence = strategy is not None and strategy.entries.get("kind", strategy).content == "cadence"
        if micro_batch is not None and micro_batch.origin.alias and per_worker is None and not has_cadence:
            per_worker = self.sections["trainer"]["micro_batches_per_worker"] = Node(1, micro_batch.origin)
        if per_worker is None or global_batch is None:
            return
        if _overrides(global_batch, per_worker):
            del self.sections["trainer"]["micro_batches_per_worker"]
        elif _overrides(per_worker, global_batch):
            del self.sections["trainer"]["global_batch"]
        else:
            message = f"and trainer.global_batch at {global_batch.origin} both set the global batch: remove one"
            self._problem(per_worker, message, "trainer.micro_batches_per_worker")

    def _chosen(self, node: Node, choices: dict[Scalar, dict[str, Content] | str]) -> dict[str, Content]:
        known = (choices[value] for value in choices if value == node.content and type(value) is type(node.content))
        *names, last = ("true" if value is True else "false" if value is False else str(value) for value in choices)
        chosen = next(known, f": expected {', '.join(names)} or {last}")
        steps = self._get("checkpoints.every_steps")
        if isinstance(chosen, str):
            self._problem(node, f"is {found(node)}{chosen}")
        elif node.content == "steps" and steps is None:
            self._problem(node, "is 'steps': give the interval with save_steps")
        elif node.content == "epoch" and steps is not None and _overrides(steps, node):
            return {}
        elif node.content == "epoch" and steps is not None and not _overrides(node, steps):
            self._problem(node, f"is 'epoch', but an interval in steps is given at {steps.origin}: remove one")
        else:
            return chosen
        return {}
