"""Names that people know from elsewhere, put into ours.

Saving has a section of its own here; its names from elsewhere are taken in `trainer` as well, where they come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.cli.config.errors import Problem
from paceline.cli.config.tree import Node, found

TRAINER, CHECKPOINTS = "trainer", "checkpoints"

# Another name for the same thing, by the section ours is in.
RENAMED = {
    "per_device_train_batch_size": (TRAINER, "micro_batch"),
    "gradient_accumulation_steps": (TRAINER, "micro_batches_per_worker"),
    "num_train_epochs": (TRAINER, "epochs"),
    "lr_scheduler_type": (TRAINER, "schedule"),
    "logging_steps": (TRAINER, "log_every"),
    "eval_steps": (TRAINER, "eval_every"),
    "save_steps": (CHECKPOINTS, "every_steps"),
    "save_total_limit": (CHECKPOINTS, "keep_last"),
}
# Another name for a part of a list that says what is left out of checkpoints.
COMPONENTS = {
    "save_optimizer_state": "optimizer",
    "save_scheduler_state": "scheduler",
    "save_rng_state": "random",
    "save_dataset_state": None,
}
SAVE_STRATEGIES = ("no", "steps", "epoch")
# Names that are ours too; the page of aliases lists them.
SAME = ("max_steps", "learning_rate", "warmup_steps", "max_grad_norm", "weight_decay", "seed")

# What an alias becomes, in words.
MEANINGS = {
    **{name: f"`{section}.{key}`" for name, (section, key) in RENAMED.items()},
    "per_device_train_batch_size": "`trainer.micro_batch`, with `micro_batches_per_worker: 1` unless that is given",
    "lr_scheduler_type": "`trainer.schedule`; `constant_with_warmup` is `constant`",
    "dispatch_batches": "`trainer.feed`: true is `dispatched`, false `sharded`",
    "shard_dataset": "`trainer.feed: sharded`; false says nothing",
    "save_strategy": "`no`: `checkpoints.save: false`; `epoch`: `every_epochs: 1`; `steps` needs save_steps",
    "save_optimizer_state": "false: `optimizer` in `checkpoints.leave_out`",
    "save_scheduler_state": "false: `scheduler` in `checkpoints.leave_out`",
    "save_rng_state": "false: `random` in `checkpoints.leave_out`",
    "save_dataset_state": "true says nothing: the position is always saved, and false is an error",
    **{name: f"`trainer.{name}`, the same" for name in SAME},
}


# Where aliases are taken.
TAKEN_IN = {
    TRAINER: tuple(name for name in MEANINGS if name not in SAME),
    CHECKPOINTS: tuple(name for name in MEANINGS if name.startswith("save_")),
}


def without_aliases(root: Node) -> tuple[Node, list[Problem]]:
    """The tree in our own words; values keep their places, and remember the name they came under."""
    entries = dict(root.mapping or {})
    translation = _Translation({name: _entries(entries.get(name)) for name in TAKEN_IN})
    translation.translate()
    for name, content in translation.given.items():
        section = entries.get(name)
        if section is not None and section.mapping is not None:
            entries[name] = Node(content, section.origin)
        elif section is None and content:
            entries[name] = Node(content, root.origin)
    return Node(entries, root.origin), translation.problems


def _entries(section: Node | None) -> dict[str, Node]:
    return {} if section is None else dict(section.mapping or {})


class _Translation:
    """Works on `given`, the entries of each section by name."""

    def __init__(self, given: dict[str, dict[str, Node]]) -> None:
        self.given = given
        self.problems: list[Problem] = []

    def translate(self) -> None:
        for name, (section, key) in RENAMED.items():
            for node in self._take(name):
                is_long_name = name == "lr_scheduler_type" and node.content == "constant_with_warmup"
                self._set(section, key, Node("constant", node.origin) if is_long_name else node)
        self._batches()
        self._feed()
        self._saving()
        self._left_out()

    def _take(self, name: str) -> Iterator[Node]:
        """What was given under an alias, which is removed; null counts as nothing."""
        for section, names in TAKEN_IN.items():
            node = self.given[section].pop(name, None) if name in names else None
            if node is not None and node.content is not None:
                yield node.at(replace(node.origin, alias=f"{section}.{name}"))

    def _get(self, section: str, key: str) -> Node | None:
        """What was given under a name of ours; null counts as nothing."""
        node = self.given[section].get(key)
        return None if node is None or node.content is None else node

    def _set(self, section: str, key: str, node: Node) -> None:
        other = self._get(section, key)
        if other is None:
            self.given[section][key] = node
        else:
            named = other.origin.alias or f"{section}.{key}"
            self._problem(node, f"and {named} at {other.origin} are the same setting: leave one out")

    def _batches(self) -> None:
        """A batch per device is a micro-batch, and unless more is said each worker takes one per step."""
        micro_batch, per_worker = self._get(TRAINER, "micro_batch"), self._get(TRAINER, "micro_batches_per_worker")
        if micro_batch is not None and micro_batch.origin.alias and per_worker is None and not self._has_cadence():
            per_worker = self.given[TRAINER]["micro_batches_per_worker"] = Node(1, micro_batch.origin)
        global_batch = self._get(TRAINER, "global_batch")
        if per_worker is not None and global_batch is not None:
            name = per_worker.origin.alias or "trainer.micro_batches_per_worker"
            self.problems.append(
                Problem(
                    per_worker.origin,
                    f"{name} and trainer.global_batch at {global_batch.origin} both decide the global batch: "
                    "leave one out",
                )
            )

    def _has_cadence(self) -> bool:
        """Whether the strategy decides how many micro-batches make a step."""
        strategy = self._get(TRAINER, "strategy")
        kind = strategy if strategy is None or strategy.mapping is None else strategy.mapping.get("kind")
        return kind is not None and kind.content == "cadence"

    def _feed(self) -> None:
        shard, dispatch = next(self._take("shard_dataset"), None), next(self._take("dispatch_batches"), None)
        if not all(self._is_flag(node) for node in (shard, dispatch) if node is not None):
            return
        if shard is not None and dispatch is not None and shard.content and dispatch.content:
            self._problem(
                shard,
                f"and trainer.dispatch_batches at {dispatch.origin} are both true: drop dispatch_batches to have every "
                "worker read its own, or shard_dataset to have rank 0 read for all",
            )
        elif dispatch is not None:
            self._set(TRAINER, "feed", Node("dispatched" if dispatch.content else "sharded", dispatch.origin))
        elif shard is not None and shard.content:
            self._set(TRAINER, "feed", Node("sharded", shard.origin))

    def _saving(self) -> None:
        for node in self._take("save_strategy"):
            steps = self._get(CHECKPOINTS, "every_steps")
            if node.content not in SAVE_STRATEGIES:
                self._problem(node, f"is {found(node)}: give no, steps or epoch")
            elif node.content == "no":
                self._set(CHECKPOINTS, "save", Node(False, node.origin))
            elif node.content == "steps" and steps is None:
                self._problem(node, "is 'steps': say how many with save_steps")
            elif node.content == "epoch" and steps is not None:
                self._problem(node, f"is 'epoch', and steps are given at {steps.origin}: leave one out")
            elif node.content == "epoch":
                self._set(CHECKPOINTS, "every_epochs", Node(1, node.origin))

    def _left_out(self) -> None:
        left_out: list[Node] = []
        for name, component in COMPONENTS.items():
            for node in self._take(name):
                if not self._is_flag(node) or node.content:
                    continue
                if component is None:
                    self._problem(node, "is false, but every checkpoint holds the data's position: leave it out")
                else:
                    left_out.append(Node(component, node.origin))
        if left_out:
            self._set(CHECKPOINTS, "leave_out", Node(tuple(left_out), left_out[0].origin))

    def _is_flag(self, node: Node) -> bool:
        if isinstance(node.content, bool):
            return True
        self._problem(node, f"is {found(node)}: give true or false")
        return False

    def _problem(self, node: Node, message: str) -> None:
        self.problems.append(Problem(node.origin, f"{node.origin.alias} {message}"))
