"""The settings of a project file. Errors, `show`, the page of all keys and the command line's help come from here."""

# ruff: noqa: RUF009 - `setting` makes a dataclasses.field

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from paceline.checkpoint.compare import Level
from paceline.cli.config.factories import Factory, Reference
from paceline.cli.config.fields import setting
from paceline.comm.base import DEFAULT_TIMEOUT_S
from paceline.run.saving.options import Mode
from paceline.run.settings import Capture, FeedKind, GarbageCollection, Precision, SchedulerInterval

Schedule = Literal["constant", "linear", "cosine"]
LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True)
class Tokens:
    """Windows of token ids out of flat files."""

    KIND: ClassVar[str] = "tokens"

    paths: str | tuple[str, ...] = setting("one file of token ids (.bin, .npy), or several")
    length: int = setting("tokens of a sample", least=1)
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = setting("of raw files: uint16 if null", None)
    stride: int | None = setting("from one window's start to the next; the length if null", None, least=1)
    targets: bool = setting("whether samples have y, one token further than x", True)
    vocab_size: int | None = setting("check that every id is below", None, least=1)


@dataclass(frozen=True)
class Arrow:
    """Rows of Arrow and Parquet files."""

    KIND: ClassVar[str] = "arrow"

    paths: str | tuple[str, ...] = setting("a file, a folder, a pattern such as data/*.arrow, or several of these")
    columns: tuple[str, ...] | None = setting("which to read; all if null", None)
    transform: Reference | Factory | None = setting("called with each row, a dict", None)
    max_decoded_bytes: int = setting("memory for decoded row groups, in each process that reads", 256 << 20, least=1)


@dataclass(frozen=True)
class Images:
    """A folder of images, one sub-folder per class."""

    KIND: ClassVar[str] = "images"

    root: str = setting("the folder")
    size: int = setting("side of what the model sees, in pixels", 224, least=1)
    augment: bool = setting("crop and flip at random", True)
    classes: tuple[str, ...] | None = setting("names of the sub-folders to use; all if null", None)
    mean: tuple[float, ...] | None = setting("per channel; ImageNet's if null", None)
    std: tuple[float, ...] | None = setting("per channel; ImageNet's if null", None, above=0)


@dataclass(frozen=True)
class Hf:
    """A data set of the package `datasets`."""

    KIND: ClassVar[str] = "hf"

    path: str = setting("a folder that save_to_disk wrote, or what load_dataset takes")
    name: str | None = setting("the data set's configuration, for load_dataset", None)
    split: str | None = setting("which split, such as train", None)
    data_files: str | tuple[str, ...] | None = setting("files, for formats such as json and text", None)
    streaming: bool = setting("read it as a stream", False)


@dataclass(frozen=True)
class Data:
    train: Factory | Tokens | Arrow | Images | Hf = setting("what to train on")
    evaluation: Factory | Tokens | Arrow | Images | Hf | None = setting("what to evaluate on", None)
    collate: Reference | Factory | None = setting("a function that joins a list of samples to a batch", None)
    weight: Reference | Factory | None = setting("a function from a batch to what its loss is a mean over", None)


@dataclass(frozen=True)
class Gradients:
    """Exchange gradients in every step."""

    KIND: ClassVar[str] = "gradients"


@dataclass(frozen=True)
class SpeedHint:
    slow_rank: int = setting("the slow worker", least=0)
    ratio: float = setting("how many times as fast the others are", least=1)


@dataclass(frozen=True)
class Cadence:
    """Steps of as many micro-batches as keep the exchange cheap."""

    KIND: ClassVar[str] = "cadence"

    anchor: int = setting("micro-batches of the slowest worker between exchanges, to start with", 10, least=1)
    overhead_target: float = setting("what an exchange may cost, as a part of computing", 0.1, least=0.01, most=0.5)
    max_anchor: int = setting("the most micro-batches without an exchange", 200, least=1)
    max_batch_diff: int | None = setting("by how much a worker's count may change at once", None, least=1)
    speed_hint: SpeedHint | None = setting("which worker is slow, until it is measured", None)


@dataclass(frozen=True)
class Averaging:
    """Steps of each worker's own, and every so often the mean of the replicas."""

    KIND: ClassVar[str] = "averaging"

    every: int | Cadence = setting("steps between two averages, or a cadence that finds them", 32, least=1)
    first_step: int = setting("before so many steps gradients are exchanged (post-local SGD)", 0, least=0)
    overlap: bool = setting("train on while the mean is computed", False)
    transfer: Literal["fp32", "bf16", "fp16"] = setting("the type in which changes travel", "fp32")
    outer: Factory | None = setting("an optimizer over the common weights, called with them", None)
    divergence_threshold: float | None = setting("drift above which averages come more often", 0.05, above=0)


@dataclass(frozen=True)
class EarlyStopping:
    patience: int = setting("evaluations without a better value before the run ends", 3, least=1)
    min_delta: float = setting("by how much a value must be better", 0.0, least=0)
    metric: str = setting("which value of the evaluation", "loss")
    mode: Mode = setting("whether lower or higher is better", "min")


@dataclass(frozen=True)
class Trainer:
    global_batch: int | None = setting("samples per optimizer step, over all workers", None, least=1)
    micro_batch: int | None = setting("samples per forward and backward; the global batch if null", None, least=1)
    micro_batches_per_worker: int | None = setting(
        "instead of global_batch: micro_batch x this x workers, decided at the first start", None, least=1
    )
    physical_batch: int | tuple[int, ...] | None = setting(
        "samples that a device may run at once, one number or one per worker", None, least=1
    )
    batches_per_step: int | None = setting("for data that comes as whole batches: how many make a step", None, least=1)
    epochs: int | None = setting("passes over the data", None, least=1)
    max_steps: int | None = setting("optimizer steps; with epochs, whichever comes first", None, least=1)
    seed: int = setting("of weights, order, dropout and augmentation", 0)
    exact: bool = setting("weights that are bit for bit the same on any number of workers", False)
    precision: Precision = setting("what forward passes compute in", "fp32")
    max_grad_norm: float | None = setting(
        "clip the gradient's norm; .inf only measures it", None, least=0, finite=False
    )
    learning_rate: float | None = setting("of AdamW, instead of an optimizer section", None, above=0)
    weight_decay: float | None = setting("of AdamW, with learning_rate; 0 if null", None, least=0)
    schedule: Schedule | None = setting("of the learning rate, instead of a scheduler section", None)
    scheduler_every: SchedulerInterval = setting("when the scheduler section's scheduler is stepped", "step")
    warmup_steps: int = setting("steps in which the learning rate rises to its full height", 0, least=0)
    schedule_steps: int | None = setting(
        "where linear and cosine reach 0; max_steps, or the steps of all epochs, if null", None, least=1
    )
    strategy: Gradients | Cadence | Averaging = setting("what workers exchange, and when", Gradients)
    shares: Literal["measured", "equal"] | tuple[float, ...] = setting(
        "how workers divide a step: by measured speed, equally, or by one speed per worker", "measured", above=0
    )
    speed_hints: tuple[float, ...] | None = setting("one speed per worker, until they are measured", None, above=0)
    shuffle: bool | None = setting("a new order in every epoch; yes, or as a DataLoader says, if null", None)
    shuffle_buffer: int = setting("of a stream: from how many samples the next is drawn", 0, least=0)
    num_shards: int | None = setting("of a stream: into how many parts it is dealt", None, least=1)
    drop_last: bool = setting("leave out an epoch's last step if it is smaller", False)
    skip_bad_samples: bool = setting("go on without samples that cannot be read", False)
    feed: FeedKind | None = setting("who reads: every worker its own, or rank 0 for all", None)
    readers: int | None = setting("processes per worker that read ahead", None, least=0, most=256)
    prefetch: int | None = setting("how many micro-batches are read ahead", None, least=1)
    resident: bool = setting("keep all of the data on the device", False)
    overlap: bool = setting("exchange gradients while backward still runs", True)
    backend: str | None = setting("of torch.distributed; by the device if null", None)
    timeout_s: float = setting("how long a worker waits for the others", DEFAULT_TIMEOUT_S, above=0)
    threads: int | None = setting("CPU threads per worker", None, least=1)
    fused_optimizers: bool = setting("update all parameters in one kernel where torch has one", True)
    train_mode: bool = setting("put the model into training mode; false: as its factory returns it", True)
    garbage_collection: GarbageCollection = setting("when Python collects all of its garbage", "between steps")
    capture: Capture = setting("whether a GPU replays steps as CUDA graphs; by itself where that pays", "auto")
    ema: float | None = setting("decay of averaged weights, such as 0.999", None, above=0, below=1)
    compile: bool = setting("compile the model with torch.compile", False)
    gradient_checkpointing: bool = setting("compute activations again instead of keeping them", False)
    eval_every: int | None = setting("steps between evaluations; after each epoch if null", None, least=1)
    log_every: int = setting("steps between lines of metrics", 10, least=1)
    timeline: bool = setting("record what each worker does when, in the run's folder", True)
    early_stopping: EarlyStopping | None = setting("end the run when the evaluation gets no better", None)
    max_loss_ratio: float | None = setting("end the run when the loss is so many times its lowest", None, above=1)


@dataclass(frozen=True)
class KeepBest:
    metric: str = setting("which value of the evaluation")
    count: int = setting("how many stay", 1, least=1)
    mode: Mode = setting("whether lower or higher is better", "min")


@dataclass(frozen=True)
class Checkpoints:
    save: bool = setting("whether the run is saved", True)
    folder: str | None = setting("where; the run's own folder if null", None)
    every_steps: int | None = setting("steps between checkpoints", None, least=1)
    every_minutes: float | None = setting("minutes between checkpoints; 10 if no every_ is given", None, above=0)
    every_epochs: int | None = setting("epochs between checkpoints", None, least=1)
    final: bool = setting("save when the run ends", True)
    keep_last: int | None = setting("how many of the newest stay; all if null", 3, least=1)
    keep_best: KeepBest | None = setting("how many of the best stay beside them", None)
    keep_every: int | None = setting("those of every so many steps stay for ever", None, least=1)
    snapshot_every: int | None = setting("steps between snapshots in memory, for restarts", None, least=1)
    leave_out: tuple[str, ...] = setting("components not to save, such as optimizer", ())
    on_error: Literal["stop", "continue"] = setting("what to do when a checkpoint cannot be written", "stop")
    check_replicas: Level = setting("what to compare between workers before each save", "none")
    disk: Literal["shared", "per node"] = setting("whether workers see one disk", "shared")
    num_writers: int = setting("workers that write", 1, least=1)
    handle_signals: bool = setting("SIGTERM and SIGINT save before the run ends", True)
    resume: Literal["auto"] | bool | str | None = setting(
        "auto: from the newest if there is one; true: there must be one; null: none may be there; or a path", "auto"
    )
    init_from: str | None = setting("weights to start from where nothing is resumed", None)
    allow: tuple[str, ...] = setting("settings that may differ from the checkpoint's", ())
    skip: tuple[str, ...] = setting("components of the checkpoint that are not restored", ())


@dataclass(frozen=True)
class Logger:
    name: LoggerName = setting("which")
    arguments: Mapping[str, Any] | None = setting("its own, such as project of wandb", None)


@dataclass(frozen=True)
class Settings:
    model: Reference | Factory = setting("what makes the model")
    data: Data = setting("what to train and evaluate on")
    optimizer: Reference | Factory | None = setting("makes the optimizer, called with the parameters", None)
    scheduler: Reference | Factory | None = setting("makes the scheduler, called with the optimizer", None)
    loss: Reference | Factory | None = setting("loss(model, batch); if null, model(batch) is the loss", None)
    metrics: Reference | Factory | None = setting("metrics(model, batch) for evaluation; the loss if null", None)
    after: Reference | Factory | None = setting("after(model) when all is trained; what it returns is printed", None)
    trainer: Trainer = setting("how to train", Trainer)
    checkpoints: Checkpoints = setting("how the run is saved", Checkpoints)
    workers: int | None = setting("worker processes; one per device if null", None, least=1, most=1024)
    devices: tuple[int, ...] | Literal["cpu"] | None = setting("numbers of GPUs, or cpu; all if null", None, least=0)
    max_restarts: int = setting("how often the workers are started again when one fails", 0, least=0)
    output: str = setting("the folder in which runs get theirs, seen from the current folder", "runs")
    loggers: tuple[LoggerName | Factory | Logger, ...] = setting("where metrics go beside the run's own files", ())
