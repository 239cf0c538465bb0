"""The settings of a project file. Error messages, `config show` and docs/project-files.md derive from them.

A setting that Python users also have is declared in the library; the section inherits it from there.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints

from paceline.cli.config.parts import Part
from paceline.core.settings import Limits, setting
from paceline.plan import cadence
from paceline.run.saving import options
from paceline.run.saving.options import Mode
from paceline.run.settings import Balancing, Batching, Loading, Optimization, Precision, Runtime
from paceline.sync.averaging import settings as averaging
from paceline.sync.compression import settings as gradients

LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow", "trackio"]
Schedule = Literal["constant", "linear", "cosine"]
TokenType = Literal["uint8", "uint16", "uint32", "int32", "int64"]


@typing.dataclass_transform(frozen_default=True)
class Section:
    """A mapping with declared settings. Subclasses are frozen dataclasses.

    kind: the value of `kind:` in a file that selects this section where several are possible.
    """

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.kind = kind
        dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        """Values are validated when the library's object is made from the section."""


class Tokens(Section, kind="tokens"):
    """Windows of token ids from flat files."""

    paths: str | tuple[str, ...] = setting("one or several files of token ids (.bin, .npy)")
    length: int = setting("tokens per sample", least=1)
    dtype: TokenType | None = setting("type of the ids in .bin files; uint16 if null", None)
    stride: int | None = setting("distance between the starts of two windows; the length if null", None, least=1)
    targets: bool = setting("give samples a y, which is x shifted by one token", True)
    vocab_size: int | None = setting("check that every id is smaller than this", None, least=1)


class Arrow(Section, kind="arrow"):
    """Rows of Arrow and Parquet files."""

    paths: str | tuple[str, ...] = setting("a file, a folder, a pattern such as data/*.arrow, or a list of these")
    columns: tuple[str, ...] | None = setting("columns to read; all if null", None)
    transform: Part | None = setting("called with each row, a dict", None)
    max_decoded_bytes: int = setting("memory for decoded row groups, per reading process", 256 << 20, least=1)


class Images(Section, kind="images"):
    """A folder of images, with one sub-folder per class."""

    root: str = setting("the folder")
    size: int = setting("side length of the model's input, in pixels", 224, least=1)
    augment: bool = setting("random crops and flips", True)
    classes: tuple[str, ...] | None = setting("sub-folders to use; all if null", None)
    mean: tuple[float, ...] | None = setting("per channel; ImageNet's if null", None)
    std: tuple[float, ...] | None = setting("per channel; ImageNet's if null", None, above=0)


class Hf(Section, kind="hf"):
    """A data set of the package `datasets`."""

    path: str = setting("a folder written by save_to_disk, or the first argument of load_dataset")
    name: str | None = setting("configuration of the data set, for load_dataset", None)
    split: str | None = setting("split to use, such as train", None)
    data_files: str | tuple[str, ...] | None = setting("files, for formats such as json and text", None)
    streaming: bool = setting("read the data set as a stream", False)


Source: TypeAlias = Part | Tokens | Arrow | Images | Hf


class Data(Section):
    train: Source = setting("training data")
    evaluation: Source | None = setting("evaluation data", None)
    collate: Part | None = setting("joins a list of samples into a batch", None)
    weight: Part | None = setting("weight(batch): number of items that the batch's loss is a mean over", None)


class Gradients(Section, gradients.Gradients, kind="gradients"):
    """Workers exchange gradients in every step."""


class SlowLink(Section, kind="slow link"):
    """Workers take steps independently; their weights are averaged every 32 steps, in few bytes."""


class SpeedHint(Section):
    slow_rank: int = setting("rank of the slow worker", least=0)
    ratio: float = setting("how many times faster the other workers are", least=1)


class Cadence(Section, cadence.Cadence, kind="cadence"):
    """The number of micro-batches per step is adjusted so that the exchange stays cheap."""

    speed_hint: SpeedHint | None = setting("which worker is slow, used until speeds are measured", None)  # type: ignore[assignment]


class Averaging(Section, averaging.Averaging, kind="averaging"):
    """Workers take steps independently; their weights are averaged periodically."""

    every: int | Cadence | Literal["auto"] = setting(
        "steps between averages, a cadence that adjusts them, or auto as in slow link", 32, least=1
    )
    outer: Part | None = setting("optimizer over the averaged weights, called with the parameters", None)  # type: ignore[assignment]


class EarlyStopping(Section):
    patience: int = setting("evaluations without improvement before the run ends", 3, least=1)
    min_delta: float = setting("smallest change that counts as an improvement", 0.0, least=0)
    metric: str = setting("metric of the evaluation", "loss")
    mode: Mode = setting("min: lower is better; max: higher is better", "min")


class Training(Section):
    """The settings of the section `trainer` that belong to no group of `paceline.run.settings`."""

    global_batch: int | None = setting("samples per optimizer step, over all workers", None, least=1)
    micro_batch: int | None = setting("samples per forward and backward pass; global_batch if null", None, least=1)
    micro_batches_per_worker: int | None = setting("instead of global_batch: micro-batches per step", None, least=1)
    epochs: int | None = setting("passes over the data", None, least=1)
    max_steps: int | None = setting("optimizer steps; with epochs, the smaller limit applies", None, least=1)
    seed: int = setting("seed of weights, order, dropout and augmentation", 0)
    exact: bool = setting("bitwise identical weights on any number of workers", False)
    precision: Precision = setting("data type of forward passes", "fp32")
    strategy: Gradients | Cadence | Averaging | SlowLink = setting("what workers exchange, and when", Gradients)
    shuffle: bool | None = setting("a new order in every epoch; if null, true or as in a given DataLoader", None)
    max_grad_norm: float | None = setting("gradient clipping; .inf only measures", None, least=0, finite=False)
    learning_rate: float | None = setting("learning rate of AdamW, instead of an optimizer section", None, above=0)
    weight_decay: float | None = setting("weight decay of AdamW, with learning_rate; 0 if null", None, least=0)
    schedule: Schedule | None = setting("learning rate schedule, instead of a scheduler section", None)
    warmup_steps: int = setting("steps of linear warmup", 0, least=0)
    schedule_steps: int | None = setting("step at which linear and cosine reach 0; the last if null", None, least=1)
    compile: bool = setting("compile the model with torch.compile", False)
    gradient_checkpointing: bool = setting("recompute activations in the backward pass to save memory", False)
    eval_every: int | None = setting("steps between evaluations; after each epoch if null", None, least=1)
    log_every: int = setting("steps between lines of metrics", 10, least=1)
    early_stopping: EarlyStopping | None = setting("end the run when the evaluation stops improving", None)
    max_loss_ratio: float | None = setting("end the run when loss / lowest loss exceeds this", None, above=1)


class Trainer(Runtime, Optimization, Balancing, Loading, Batching, Training):
    """The section `trainer`: the groups of `paceline.run.settings`, flat."""

    timeline: bool = setting("record a timeline in the run's folder", True)  # type: ignore[assignment]
    # Not settings of a project file.
    collate_fn: ClassVar[None] = None  # type: ignore[misc]
    quiet: ClassVar[bool] = False  # type: ignore[misc]


class KeepBest(Section):
    metric: str = setting("metric of the evaluation")
    count: int = setting("number of checkpoints to keep", 1, least=1)
    mode: Mode = setting("min: lower is better; max: higher is better", "min")


class Checkpoints(Section, options.Checkpoints):
    save: bool = setting("save checkpoints", True)
    folder: str | None = setting("folder of the checkpoints; in the run's folder if null", None)  # type: ignore[assignment]
    keep_best: KeepBest | None = setting("best checkpoints to keep as well", None)  # type: ignore[assignment]
    init_from: str | None = setting("initial weights, if nothing is resumed", None)


class Logger(Section):
    name: LoggerName = setting("name of the logger")
    arguments: Mapping[str, Any] | None = setting("arguments of the logger, such as project for wandb", None)


class ProjectSettings(Section):
    """The whole file."""

    model: Part = setting("builds the model")
    data: Data = setting("training and evaluation data")
    optimizer: Part | None = setting("builds the optimizer; called with the parameters", None)
    scheduler: Part | None = setting("builds the scheduler; called with the optimizer", None)
    loss: Part | None = setting("loss(model, batch); if null, model(batch) returns the loss", None)
    metrics: Part | None = setting("metrics(model, batch) for evaluation; the loss if null", None)
    after: Part | None = setting("after(model), called at the end of the run; its result is printed", None)
    trainer: Trainer = setting("how to train", Trainer)
    checkpoints: Checkpoints = setting("how to save the run", Checkpoints)
    workers: int | None = setting("worker processes; one per device if null", None, least=1, most=1024)
    devices: tuple[int, ...] | Literal["cpu"] | None = setting("GPU numbers, or cpu; all GPUs if null", None, least=0)
    max_restarts: int = setting("how often failed workers are restarted; with min_workers, replaced", 0, least=0)
    min_workers: int | None = setting("continue without workers that die while this many are left", None, least=1)
    stall_s: float | None = setting("with min_workers: a longer micro-batch counts as a death", None, above=0)
    output: str = setting("folder for the folders of runs, relative to the current folder", "runs")
    loggers: tuple[LoggerName | Part | Logger, ...] = setting("loggers, in addition to the run's own files", ())


class Setting(NamedTuple):
    """A declared setting. `default` is MISSING if a value is required."""

    type: Any
    default: Any
    help: str
    limits: Limits


@cache
def settings_of(section: Any) -> dict[str, Setting]:
    """The settings of a section by name, in order."""
    hints, settings = get_type_hints(section), {}
    for f in fields(section):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        settings[f.name] = Setting(_in_files(hints[f.name]), default, f.metadata["help"], f.metadata["limits"])
    return settings


def _in_files(hint: Any) -> Any:
    """The type of a value in a file: without functions and paths that Python users may give, lists as tuples."""
    kept = tuple(o for o in options_of(hint) if (get_origin(o) or o) not in (Callable, os.PathLike))
    if len(kept) > 1:
        return Union[kept]  # noqa: UP007
    return tuple[get_args(hint)[0], ...] if get_origin(hint) is Sequence else kept[0]  # type: ignore[misc]


def options_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union; any other type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def top_sections() -> dict[str, Any]:
    """The sections of the file by key."""
    return {name: s.type for name, s in settings_of(ProjectSettings).items() if is_section(s.type)}


def describe(hint: Any, limits: Limits) -> str:
    """The allowed values in words, such as "an integer >= 1 or null"."""
    words = [word for option in options_of(hint) for word in _words(option, limits)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _words(option: Any, limits: Limits) -> Iterator[str]:
    bound = f" {limits}" if str(limits) else ""
    several = {bool: ("true", "false"), Part: ("package.module:name", "factory: package.module:name")}
    if get_origin(option) is Literal or option in several:
        yield from several.get(option) or map(str, get_args(option))
    elif get_origin(option) is tuple:
        item = get_args(option)[0]
        plural = {int: "integers", float: "numbers", str: "strings"}.get(item) or describe(item, Limits())
        yield f"a list of {plural}{bound}"
    elif is_section(option):
        yield f"kind: {option.kind}" if option.kind else f"a mapping of {', '.join(settings_of(option))}"
    else:
        words = {int: f"an integer{bound}", float: f"a number{bound}", str: "a string", types.NoneType: "null"}
        yield words.get(option, "a mapping")
