"""Setting names of other tools, translated into ours.

Names about saving are accepted in `trainer`, where other tools have them, and in `checkpoints`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.cli.config.errors import Problem
from paceline.cli.config.yaml_tree import Node, found

TRAINER, CHECKPOINTS = "trainer", "checkpoints"

# Other names for one of our settings.
_RENAMED = {
    "per_device_train_batch_size": (TRAINER, "micro_batch"),
    "gradient_accumulation_steps": (TRAINER, "micro_batches_per_worker"),
    "num_train_epochs": (TRAINER, "epochs"),
    "lr_scheduler_type": (TRAINER, "schedule"),
    "logging_steps": (TRAINER, "log_every"),
    "eval_steps": (TRAINER, "eval_every"),
    "save_steps": (CHECKPOINTS, "every_steps"),
    "save_total_limit": (CHECKPOINTS, "keep_last"),
    "fused_optimizers": (TRAINER, "fused"),
}
# Flags, with the setting and its values for true and false; None has no effect.
_FLAGS = {
    "dispatch_batches": (TRAINER, "feed", "dispatched", "sharded"),
    "shard_dataset": (TRAINER, "feed", "sharded", None),
    "save_optimizer_state": (CHECKPOINTS, "leave_out", None, "optimizer"),
    "save_scheduler_state": (CHECKPOINTS, "leave_out", None, "scheduler"),
    "save_rng_state": (CHECKPOINTS, "leave_out", None, "random"),
    "save_dataset_state": (CHECKPOINTS, "leave_out", None, "data"),
}
# The aliases that each section accepts. docs/make_project_files.py documents them.
_ALL = (*_RENAMED, *_FLAGS, "save_strategy")
ACCEPTED_IN = {TRAINER: _ALL, CHECKPOINTS: tuple(name for name in _ALL if name.startswith("save_"))}


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


class _Translation:
    """Replaces aliases in `sections`, the entries of each section by name. A value of null counts as not given."""

    def __init__(self, sections: dict[str, dict[str, Node]]) -> None:
        self.sections = sections
        self.problems: list[Problem] = []
        for name, (section, key) in _RENAMED.items():
            for node in self._take(name):
                is_long_name = name == "lr_scheduler_type" and node.content == "constant_with_warmup"
                self._set(section, key, Node("constant", node.origin) if is_long_name else node)
        self._batches()
        self._flags()
        self._saving()

    def _take(self, name: str) -> Iterator[Node]:
        """Remove and return the values given under an alias."""
        for section, names in ACCEPTED_IN.items():
            node = self.sections[section].pop(name, None) if name in names else None
            if node is not None and node.content is not None:
                yield replace(node, origin=replace(node.origin, alias=f"{section}.{name}"))

    def _get(self, section: str, key: str) -> Node | None:
        node = self.sections[section].get(key)
        return None if node is None or node.content is None else node

    def _set(self, section: str, key: str, node: Node) -> None:
        other = self._get(section, key)
        if other is None:
            self.sections[section][key] = node
        else:
            named = other.origin.alias or f"{section}.{key}"
            self._problem(node, f"and {named} at {other.origin} both set {section}.{key}: remove one")

    def _problem(self, node: Node, message: str, key: str = "") -> None:
        self.problems.append((node.origin, f"{node.origin.alias or key} {message}"))

    def _batches(self) -> None:
        """A batch per device is a micro-batch. By default, each worker then takes one per step."""
        micro_batch, per_worker = self._get(TRAINER, "micro_batch"), self._get(TRAINER, "micro_batches_per_worker")
        if micro_batch is not None and micro_batch.origin.alias and per_worker is None and not self._has_cadence():
            per_worker = self.sections[TRAINER]["micro_batches_per_worker"] = Node(1, micro_batch.origin)
        global_batch = self._get(TRAINER, "global_batch")
        if per_worker is not None and global_batch is not None:
            message = f"and trainer.global_batch at {global_batch.origin} both set the global batch: remove one"
            self._problem(per_worker, message, "trainer.micro_batches_per_worker")

    def _has_cadence(self) -> bool:
        """Whether the strategy determines the number of micro-batches per step."""
        strategy = self._get(TRAINER, "strategy")
        return strategy is not None and strategy.entries.get("kind", strategy).content == "cadence"

    def _flags(self) -> None:
        left_out = []
        for name, (section, key, if_true, if_false) in _FLAGS.items():
            for node in self._take(name):
                value = if_true if node.content else if_false
                feed = self._get(TRAINER, "feed")
                if not isinstance(node.content, bool):
                    self._problem(node, f"is {found(node)}: expected true or false")
                elif value == "data":
                    self._problem(node, "is false, but every checkpoint contains the position in the data: remove it")
                elif value is not None and key == "leave_out":
                    left_out.append(Node(value, node.origin))
                elif value is not None and not (feed and feed.origin.alias and feed.content == value):
                    self._set(section, key, Node(value, node.origin))
        if left_out:
            self._set(CHECKPOINTS, "leave_out", Node(tuple(left_out), left_out[0].origin))

    def _saving(self) -> None:
        for node in self._take("save_strategy"):
            steps = self._get(CHECKPOINTS, "every_steps")
            if node.content == "no":
                self._set(CHECKPOINTS, "save", Node(False, node.origin))
            elif node.content == "epoch" and steps is None:
                self._set(CHECKPOINTS, "every_epochs", Node(1, node.origin))
            elif node.content == "epoch" and steps is not None:
                self._problem(node, f"is 'epoch', but an interval in steps is given at {steps.origin}: remove one")
            elif node.content == "steps" and steps is None:
                self._problem(node, "is 'steps': give the interval with save_steps")
            elif node.content != "steps":
                self._problem(node, f"is {found(node)}: expected no, steps or epoch")
