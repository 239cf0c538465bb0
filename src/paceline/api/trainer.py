"""`Trainer.setup`: you own the loop, and the same code runs on one device or many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.api.ddp_config import DdpConfig
from paceline.api.heads import head_loss, head_prediction, plain_prediction, weight_by_head
from paceline.api.recording import RecordedRun, Recording
from paceline.api.summary import announce, announce_choice
from paceline.api.unknown_settings import explains_unknown_settings
from paceline.checkpoint.manifest import Pattern
from paceline.checkpoint.policy import Decision
from paceline.core.errors import MisuseError
from paceline.core.events import Event
from paceline.core.world import World
from paceline.data.adopt import LoadingOptions, adopt, adopt_for_evaluation
from paceline.plan.cadence import Cadence
from paceline.plan.epoch import Position
from paceline.plan.memory import MemoryReport
from paceline.run.assemble import assemble
from paceline.run.capture.step import StepFunction
from paceline.run.config import RunConfig, Strategy
from paceline.run.evaluation import collect
from paceline.run.evaluation.evaluate import EvaluationData, evaluate
from paceline.run.evaluation.predict import predict
from paceline.run.memory import memory_report
from paceline.run.report import Report
from paceline.run.run import Run, TrainingEpoch
from paceline.run.saving.export import export_weights, save_pretrained
from paceline.run.saving.options import Checkpoints
from paceline.run.saving.state import HasState, plain_model
from paceline.run.settings import Balancing, Batching, Loading, Optimization, Precision, Runtime, Shard
from paceline.run.step.build import ModuleOfWrapper, only_or_all
from paceline.run.step.record import StepRecord
from paceline.run.step.replica import OptimizerFactory, SchedulerFactory

if TYPE_CHECKING:
    from paceline.api.builder import Builder
    from paceline.plan.profile import Profile
    from paceline.run.micro_batch_finder import FoundMicroBatch


class Trainer:
    """A training run whose loop is yours. Make one with `Trainer.setup`.

    run: the run's parts.
    """

    def __init__(self, run: Run, recording: Recording | None = None) -> None:
        self.run = run
        self._recording = recording
        self._recorded: RecordedRun | None = None
        self._loop = run.loop
        self._needs_function = run.config.runtime.capture == "on"
        self._is_head = False

    @classmethod
    @explains_unknown_settings
    def setup(
        cls,
        model: Any,
        optimizer: OptimizerFactory,
        *,
        data: Any,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        scheduler: SchedulerFactory | None = None,
        weight_fn: Callable[[Any], int] | None = None,
        max_grad_norm: float | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        exact: bool = False,
        precision: Precision = "fp32",
        strategy: Strategy = "gradients",
        device: torch.device | str | None = None,
        init_from: str | PathLike[str] | None = None,
        checkpoints: Checkpoints | None = None,
        run: str | PathLike[str] | Recording | None = None,
        shard: Shard | None = None,
        batching: Batching = Batching(),
        loading: Loading = Loading(),
        balancing: Balancing = Balancing(),
        optimization: Optimization = Optimization(),
        runtime: Runtime = Runtime(),
    ) -> Trainer:
        """Join the world of this process (torchrun, `paceline run`, `paceline.launch`), or train alone.

        model: an nn.Module, an object that has one as an attribute, or a function that builds one. Every worker starts
            with rank 0's weights.
        optimizer: a function from parameters to a torch optimizer, or to a list of them; or, for a model that is
            already built, optimizers over its parameters. A class is called with its default learning rate.
        data: a list of samples; a tensor or array, or a tuple or dict of them with equally many rows; a map-style torch
            Dataset; a source of `paceline.data`; a stream, an iterable that can be iterated repeatedly, such as a torch
            IterableDataset; a torch DataLoader, whose settings are kept; or ready-made batches in `paceline.Batches` or
            `paceline.PerWorker`. Pairs arrive as micro-batches with .x and .y. See docs/data.md.
        global_batch: samples per optimizer step, over all workers. micro_batch: samples per forward and backward
            (default: the global batch); global_batch must be a multiple of it.
        scheduler: a function from the optimizer to a torch scheduler, or several, or a scheduler made over a ready-made
            optimizer. It is stepped after every optimizer step; see `Optimization(scheduler_every=...)`.
        weight_fn: from a micro-batch (on the host) to the integer that its loss is a mean over, such as the number of
            valid tokens (default: its samples).
        max_grad_norm: clip the norm of the mean gradient to this.
        shuffle: a new order in every epoch (default: True, or the DataLoader's setting).
        exact: weights are bit for bit the same on any number of workers, for one kind of device.
        precision: "fp32", "bf16" or "fp16", what `trainer.autocast()` casts to; fp16 adds loss scaling.
        strategy: "gradients" exchanges gradients in every step. For slow links (docs/slow-links.md), where the result
            depends on the workers: `paceline.Gradients(...)` compresses them; `paceline.Cadence(...)` makes large steps
            (give micro_batch and no global_batch); `paceline.Averaging(...)` averages weights, and so does "slow link".
        device: default, this worker's GPU, or the CPU.
        init_from: weights to start from unless a checkpoint is resumed: a checkpoint, a safetensors file, or a file
            with a state_dict.
        checkpoints: when and where to save the run: `paceline.Checkpoints(folder, every_steps=1000)`. A run that is
            set up again with the same folder resumes from the newest checkpoint there.
        run: a folder, such as "runs", in which this run gets a folder with metrics, events and a plot, as with
            `paceline train`; progress is shown, and `paceline logs` finds it. Or `paceline.Recording(...)`.
        shard: "optimizer" or "gradients", what the workers divide among them; see docs/memory.md. The same as
            `Optimization(shard=...)`.
        batching, loading, balancing, optimization, runtime: groups of further settings.
        """
        if shard is not None:
            optimization = replace(optimization, shard=shard)
        recording = run if isinstance(run, Recording) or run is None else Recording(run)
        options = LoadingOptions.of(
            batching,
            loading,
            global_batch=global_batch,
            micro_batch=micro_batch,
            shuffle=shuffle,
            strategy_sets_step=isinstance(strategy, Cadence),
        )
        adopted = adopt(data, options, seed)
        config = RunConfig(
            global_batch=adopted.global_batch,
            micro_batch=adopted.micro_batch,
            seed=seed,
            shuffle=adopted.shuffle,
            precision=precision,
            max_grad_norm=max_grad_norm,
            exact=exact,
            strategy=strategy,
            batching=batching,
            loading=replace(loading, feed=adopted.feed, readers=adopted.readers, collate_fn=adopted.collate_fn),
            balancing=balancing,
            optimization=optimization,
            runtime=runtime,
        )
        assembled = assemble(
            config,
            World.from_environment(device),
            model,
            optimizer,
            adopted.data,
            scheduler=scheduler,
            weight_fn=weight_fn,
            checkpoints=checkpoints,
            init_from=init_from,
        )
        try:
            announce(assembled.communicator, quiet=runtime.quiet, is_device_chosen=device is not None)
            announce_choice(assembled.communicator, assembled.events, quiet=runtime.quiet)
        except BaseException:
            assembled.cleanup.close()
            raise
        return cls(assembled, recording)

    @classmethod
    def setup_with(
        cls,
        config: DdpConfig,
        model: Any,
        optimizer: OptimizerFactory,
        *,
        data: Any,
        micro_batch: int,
        balancing: Balancing = Balancing(),
        runtime: Runtime = Runtime(),
        **settings: Any,
    ) -> Trainer:
        """`setup` with El Che: workers exchange gradients after as many micro-batches as keep the exchange cheap.

        With max_anchor=0 each step has as many micro-batches as there are workers. `settings` are those of `setup`.
        """
        size = World.from_environment("cpu").size
        if (hints := config.speed_hints(size)) is not None:
            balancing = replace(balancing, speed_hints=hints)
        if config.timeline is not None:
            runtime = replace(runtime, timeline=config.timeline)
        return cls.setup(
            model,
            optimizer,
            data=data,
            micro_batch=micro_batch,
            global_batch=micro_batch * size if config.strategy == "gradients" else None,
            strategy=config.strategy,
            max_grad_norm=config.max_grad_norm,
            balancing=balancing,
            runtime=runtime,
            **settings,
        )

    @classmethod
    def setup_head(cls, head: Any, optimizer: OptimizerFactory, *, data: Any, **settings: Any) -> Trainer:
        """`setup` for a model that computes its own loss: `trainer.loss(batch)`.

        head: a model, as for `setup`, with `compute_loss(batch)`; or a model of transformers, which is called with the
            entries of a dict batch, labels included, and whose output has the loss. From a local folder:
            `lambda: AutoModelForSequenceClassification.from_pretrained(folder)`. `trainer.predict` calls its
            `predict(batch)`, if it has one; `trainer.save_pretrained` saves its `tokenizer` with it.
        Without a weight_fn, a micro-batch of a transformers language model weighs the labels that its loss is a mean
        over: for causal models, which shift them, `(labels[..., 1:] != -100).sum()`. See docs/data.md.
        """
        return cls._setup_head(cls.setup, head, optimizer, data=data, **settings)

    @classmethod
    def setup_head_with(
        cls, config: DdpConfig, head: Any, optimizer: OptimizerFactory, *, data: Any, micro_batch: int, **settings: Any
    ) -> Trainer:
        """`setup_head` with El Che, as in `setup_with`."""
        setup = partial(cls.setup_with, config)
        return cls._setup_head(setup, head, optimizer, data=data, micro_batch=micro_batch, **settings)

    @staticmethod
    def _setup_head(setup: Callable[..., Trainer], *args: Any, **settings: Any) -> Trainer:
        trainer = setup(*args, **settings | {"weight_fn": weight_by_head(settings.get("weight_fn"))})
        trainer._is_head = True
        return trainer

    @classmethod
    def find_micro_batch(
        cls,
        model: Any,
        optimizer: OptimizerFactory,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        data: Any,
        global_batch: int,
        precision: Precision = "fp32",
        exact: bool = False,
        device: torch.device | str | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        runtime: Runtime = Runtime(),
    ) -> FoundMicroBatch:
        """The fastest micro-batch that fits the memory of every worker's device, to be given to `setup`.

            found = pl.Trainer.find_micro_batch(build, optimizer, loss_fn, data=samples, global_batch=256)
            trainer = pl.Trainer.setup(build, optimizer, data=samples, global_batch=256, micro_batch=found.micro_batch)

        loss_fn(model, batch): the loss of a micro-batch. Divisors of the global batch are tried with a replica made for
        this: model and optimizer are functions that build them. All workers of a world call it together, and each
        measures its own device.
        """
        from paceline.run.micro_batch_finder import find_micro_batch

        return find_micro_batch(
            model,
            optimizer,
            loss_fn,
            adopt_for_evaluation(data, collate_fn, seed=0).source,
            global_batch,
            precision=precision,
            exact=exact,
            world=World.from_environment(device),
            runtime=runtime,
        )

    @classmethod
    def builder(
        cls,
        model_factory: Callable[[], Any],
        optim_factory: Callable[[list[torch.Tensor]], Any],
        train_fn: Callable[[Any, Any], Any],
    ) -> Builder:
        """A run whose loop Paceline owns; `.run()` starts it in the background and returns its handle.

        model_factory: builds a model; every worker calls it. optim_factory: from its parameters to a torch optimizer.
        train_fn(model, batch): the loss, a mean over the micro-batch, or (loss, {"name": number}); the means of these
        numbers are in the epoch's metrics.

            handle = pl.Trainer.builder(build, optimizer, train_fn).dataset(data).batch_size(64).num_epochs(10).run()
            for metrics in handle: print(metrics.epoch, metrics.loss)
            state = handle.join()
        """
        from paceline.api.builder import Builder

        return Builder(model_factory, optim_factory, train_fn)

    @property
    def model(self) -> Any:
        """The module that was passed in or built, on this worker's device."""
        return self._loop.replica.model

    @property
    def unwrapped_model(self) -> Any:
        """The model without torch.compile's wrapper; where an object around a module was passed, that object."""
        model = plain_model(self.model)
        return model.wrapper if isinstance(model, ModuleOfWrapper) else model

    @property
    def optimizer(self) -> Any:
        """The optimizer; a list if there are several."""
        return only_or_all(self._loop.replica.optimizers)

    @property
    def scheduler(self) -> Any:
        """The scheduler; a list if there are several, None if there is none."""
        return only_or_all(self._loop.replica.schedulers or [None])

    @property
    def world(self) -> World:
        """The current workers and this worker's rank and device; another value after workers have left or joined."""
        return self.run.world

    @property
    def is_main(self) -> bool:
        """Whether this worker is rank 0 now."""
        return self.world.is_main

    @property
    def position(self) -> Position:
        """The next step to take."""
        return self._loop.position

    @property
    def last_record(self) -> StepRecord | None:
        """The record of the newest completed step, the same on every worker; None before the first of this process.

        Unlike the return value of `step`, it is also there on a worker that had no share in that step.
        """
        return self._loop.last_record

    @property
    def is_repeating(self) -> bool:
        """Whether exact mode repeats a step, so that the same micro-batches come again.

        Sums that the loop's body keeps then count them twice. Records do not: a step has one.
        """
        return self._loop.open.is_repeated

    @property
    def steps_per_epoch(self) -> int | None:
        """None where it is not known in advance: for a stream, and with a cadence."""
        return self.run.steps_per_epoch

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint that the run was resumed from; None for a fresh start."""
        return self.run.checkpointer.resumed_from

    def epochs(self, count: int | None = None, *, max_steps: int | None = None) -> Iterator[TrainingEpoch]:
        """The epochs from the run's position up to number `count`, or until the run has done `max_steps` steps."""
        if count is None and max_steps is None:
            raise ValueError("epochs() needs an end: give the number of epochs, or max_steps")
        for name, number in (("count", count), ("max_steps", max_steps)):
            if number is not None and not (isinstance(number, Integral) and number >= 0):
                raise ValueError(f"epochs({name}={number!r}): choose an integer >= 0")
        self.run.check_open()
        if self._recording is not None:
            self._recorded = RecordedRun(self._recording, self.run, self.run.total_steps(count, max_steps))
            self._recording = None
        return self.run.epochs(count, max_steps)

    def end(self) -> None:
        """End the epochs here, as after the last one; for early stopping.

        Inside `every` or `every_epoch`, on all workers.
        """
        self.run.check_between_steps("end()")
        self._loop.max_steps = self.position.step

    def end_epoch(self) -> None:
        """End the epoch after this step, on all workers; the next one begins. Inside `every` only.

        trainer.every(1, lambda record: trainer.end_epoch() if record.loss < 0.1 else None)
        """
        self._loop.end_epoch()

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of a micro-batch as the head computes it, in the run's precision; see `setup_head`."""
        if not self._is_head:
            raise MisuseError(
                "loss() needs a model that computes its own loss: make the trainer with Trainer.setup_head, or compute "
                "the loss from trainer.model"
            )
        with self.autocast():
            return head_loss(self.model, batch)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Backward of a micro-batch's loss, which is a mean over its samples. Several calls add up.

        retain_graph: keep the graph for a second backward through it. create_graph is refused, since gradients are
        exchanged as numbers: for a gradient penalty call `torch.autograd.grad(..., create_graph=True)` and add the
        penalty to the loss.

        A bare `loss.backward()` is legal too, except with fp16; the loss is then not recorded.
        """
        if self._needs_function:
            raise MisuseError('capture="on" needs the loss as a function: use trainer.step_with, or capture="auto"')
        if self._loop.is_closed:
            self.run.check_open()
        if create_graph:
            raise MisuseError(
                "backward(create_graph=True) is not supported, since exchanged gradients have no graph: for a "
                "gradient penalty call torch.autograd.grad(loss, inputs, create_graph=True), add the penalty to the "
                "loss and pass the sum to trainer.backward"
            )
        self._loop.backward(loss, retain_graph)

    def step(self) -> StepRecord | None:
        """End this micro-batch. If it was this worker's last of the step, complete the step and return its record.

        A worker without a share in a step does not get here: `last_record` has the record on every worker.
        """
        if self._loop.is_closed:
            self.run.check_open()
        return self._loop.step()

    def step_with(self, loss_of: Callable[[Any], torch.Tensor]) -> StepFunction:
        """A function that runs a micro-batch: the loss in the run's precision, `backward` and `step`.

            step = trainer.step_with(lambda batch: F.cross_entropy(trainer.model(batch.x), batch.y))
            for epoch in trainer.epochs(3):
                for batch in epoch:
                    step(batch)

        It returns what `step` returns. On a GPU that waits for the host, `loss_of` is recorded as a CUDA graph after
        some steps and replayed with the same result; its Python code does not run then. See `Runtime(capture=...)`.
        """

        def function(batch: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
            with self.autocast():
                return loss_of(batch), {}

        return self.run.stepping.with_function(function)

    def set_lr(self, lr: float, *, group: int | None = None) -> None:
        """Set the learning rate of all parameter groups, or of one (counted from 0, over all optimizers).

        In the loop's body it applies to the current step on every worker, even if only one worker calls it: a worker
        without a share in the step does not run the body. In hooks and between epochs all workers call it. For a rate
        that depends on the step alone, prefer `scheduler=`.
        """
        self._loop.set_learning_rate(float(lr), -1 if group is None else group)

    def memory_report(self) -> MemoryReport:
        """What this worker needs, by kind, in bytes; before the first step already. See docs/memory.md."""
        return memory_report(self.run)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward passes in the run's precision."""
        return self.run.autocast()

    def every(self, steps: int, hook: Callable[[StepRecord], object]) -> None:
        """Call `hook(record)` after every `steps` steps, on all workers together: for evaluation inside an epoch."""
        self._loop.hooks.every(steps, hook)

    def every_epoch(self, epochs: int, hook: Callable[[int], object]) -> None:
        """Call `hook(number)` at the end of every `epochs` epochs, on all workers together."""
        self._loop.hooks.every_epoch(epochs, hook)

    def on_gradients(self, hook: Callable[[Mapping[str, torch.Tensor]], object]) -> None:
        """Call `hook(parameters)` in every step, before clipping: `parameters[name].grad` is the global batch's mean.

        The hook may change the gradients, on all workers alike. It draws the same random numbers on all of them.
        """
        if self._loop.replica.pieces is not None:
            raise MisuseError(
                "on_gradients() needs whole gradients, but each worker has its own part of them (shard=): leave shard= "
                "out, or clip with max_grad_norm="
            )
        self._loop.hooks.on_gradients(hook)

    def listen(self, listener: Callable[[Event], object]) -> None:
        """Call `listener(event)` for events beside the steps, the same on all workers.

        "plan": the workers' shares changed (shares, before). "save": a checkpoint is written (folder). "world": workers
        left or joined; see docs/elastic.md. "drift": replicas drift apart, so they are averaged more often (drift,
        every). "averaging": strategy="slow link" has chosen (every, compress, fragments, reason). "capture", on the
        worker that captures: a graph was recorded (what, number), or none is replayed (what, reason).
        """
        self.run.events.listen(listener)

    def profile(self, loss_of: Callable[[Any], torch.Tensor], steps: int = 20) -> Profile:
        """Train some steps and return what `paceline plan` predicts from: this worker's device and machine.

            profile = trainer.profile(lambda batch: F.cross_entropy(trainer.model(batch.x), batch.y))
            Path("here.json").write_text(profile.to_json())

        The steps count: use a trainer that is made for it. In a world of one worker the device is measured alone, as
        predictions need it; all workers of a larger world call this together, which measures the exchange, and between
        several hosts the link. See docs/plan.md.
        """
        from paceline.run import probe

        return probe.profile(self.run, self.step_with(loss_of), steps)[0]

    def report(self) -> Report:
        """How the workers spent their time so far; print it for a table."""
        return self._loop.times.report()

    def evaluate(
        self, data: Any, eval_fn: Callable[[Any, Any], Any], *, micro_batch: int | None = None, collate_fn: Any = None
    ) -> float | dict[str, float]:
        """The mean of `eval_fn(model, batch)` over all of `data`: each sample once, divided among all workers.

        eval_fn returns a mean over its micro-batch, one number or a dict of them; means are weighted like training.
        Between epochs or inside `every`, on all workers. Replicas that differ are averaged first.
        """
        self.run.synchronize("evaluate()")
        operation = partial(evaluate, eval_fn=eval_fn, weight_fn=self.run.weight_fn)
        means: float | dict[str, float] = self._on_data(operation, data, micro_batch, collate_fn)
        return means

    def log_evaluation(self, values: Mapping[str, float]) -> None:
        """Add results, by name, to the metrics, plots and loggers of a run with `run=`, at the last completed step.

            trainer.log_evaluation({"loss": trainer.evaluate(test_set, loss_of)})

        Called on all workers with the same values.
        """
        if self._recorded is None:
            raise MisuseError(
                "log_evaluation() needs a recorded run: give Trainer.setup(run='runs'), and call it after the first "
                "epoch has begun"
            )
        self._recorded.log_evaluation(values)

    def predict(
        self,
        data: Any,
        fn: Callable[[Any, Any], Any] | None = None,
        *,
        micro_batch: int | None = None,
        collate_fn: Any = None,
    ) -> Any:
        """The results of `fn(model, batch)` for every sample of `data`, in the data's order, computed by all workers.

        fn: returns tensors with a row per sample, or lists with an item per sample, alone or in tuples, dicts and
            dataclasses; default: `model(batch)`, for pairs `model(batch.x)`, in the run's precision, or the head's
            prediction. With few samples, a worker without a share calls it too, to learn the structure of its result.
        Every worker gets all results, in tensors on its host; where they do not fit there twice, predict in parts. A
        tensor whose rows differ in shape becomes a list of rows. Between epochs or inside `every`, as `evaluate`.
        """
        self.run.synchronize("predict()")
        return self._on_data(partial(predict, fn=fn or self._predict_batch), data, micro_batch, collate_fn)

    def _on_data(
        self, operation: Callable[[Any, EvaluationData], Any], data: Any, micro_batch: int | None, collate_fn: Any
    ) -> Any:
        run = self.run
        default_size, readers = run.steps.micro_batch, run.config.loading.readers or 0

        def operate() -> Any:
            made = EvaluationData(
                data, run.communicator, run.config.seed, default_size, micro_batch, collate_fn, readers
            )
            return operation(run.model, made)

        with run.timeline.during("evaluation"):
            return run.together(operate)

    def _predict_batch(self, model: Any, batch: Any) -> Any:
        with self.autocast():
            return (head_prediction if self._is_head else plain_prediction)(model, batch)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Inside the block the model has the averaged weights (`Optimization(ema=...)`), afterwards its own again.

        Buffers, such as BatchNorm's statistics, are the model's own in both.
        """
        return self.run.ema_weights()

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, by rank, on every worker; between epochs or inside `every`, on all workers.

        A value consists of tensors, arrays, numbers, strings, lists, tuples and dicts, and may differ in shape between
        workers. Its tensors arrive on the host.
        """
        self.run.check_between_steps(
            "gather()",
            ". For a loss over more samples than a micro-batch has, such as in-batch negatives, choose a larger "
            "micro_batch, or see docs/contrastive.md",
        )
        return self.run.together(lambda: collect.gather(value, self.run.communicator))

    def reduce(self, value: Any, how: collect.Reduction = "mean") -> Any:
        """The "mean", "sum", "max" or "min" of a tensor or number over the workers, on every worker.

        Tensors must have one shape and dtype on all workers and are reduced in rank order. Every worker receives all
        of them: use it for metrics, not for large tensors. Between epochs or inside `every`, on all workers.
        """
        self.run.check_between_steps("reduce()")
        return self.run.together(lambda: collect.reduce(value, how, self.run.communicator))

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`, on every worker, in the form that `gather` returns.

        If that worker is lost in this call, the value is that of the lowest rank whose value is not None.
        """
        self.run.check_between_steps("broadcast()")
        if self.run.rejoining is not None:
            return self.run.rejoining.broadcast(value, source)
        return collect.broadcast(value, source, self.run.communicator)

    def main_first(self) -> AbstractContextManager[None]:
        """Rank 0 runs the block first, for example to fill a cache; then all other workers run it.

        They wait for it at most `timeout_s`. An error on rank 0 is raised on all workers.
        """
        self.run.check_between_steps("main_first()")
        return collect.main_first(self.run.communicator, self.run.together)

    def export(self, path: str | PathLike[str], *, ema: bool = False) -> None:
        """Write the model's weights, with `ema` the averaged ones, to one safetensors file.

        Names are those of the model's state_dict; a tied tensor appears under each of its names. Rank 0 writes, and the
        complete file appears atomically before any worker returns. Between epochs or inside `every`, on all workers.
        """
        self.run.synchronize("export()")
        with self.ema_weights() if ema else nullcontext():
            self.run.together(lambda: export_weights(self.model, Path(path), self.run.communicator))

    def save_pretrained(self, folder: str | PathLike[str], *, ema: bool = False) -> None:
        """Like `export`, but the model's own `save_pretrained` writes it, and its `tokenizer` if it has one."""
        self.run.synchronize("save_pretrained()")
        with self.ema_weights() if ema else nullcontext():
            self.run.together(lambda: save_pretrained(self.model, Path(folder), self.run.communicator))

    def register(self, name: str, thing: HasState, pattern: Pattern | str = Pattern.REPLICATED) -> None:
        """Include an object with `state_dict` and `load_state_dict` in checkpoints; before the first epoch.

        In a resumed run its state is loaded here. pattern: "replicated", the same on every worker; "global", rank 0's;
        "per_rank", every worker's own; "per_node", every node's own, held by its first worker.
        """
        names = [known.value.lower() for known in Pattern]
        if isinstance(pattern, str) and pattern.lower() not in names:
            raise ValueError(f"pattern={pattern!r}: choose one of {', '.join(names)}")
        self.run.checkpointer.register(name, thing, Pattern(pattern.upper()) if isinstance(pattern, str) else pattern)

    def state_components(self) -> dict[str, str]:
        """The components of this run's checkpoints, and how workers share each; empty without checkpoints."""
        return {name: pattern.value.lower() for name, pattern in self.run.checkpointer.components.items()}

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Save now, beside the scheduled checkpoints. `Checkpoints(keep_best=...)` chooses by `metrics`.

        Between epochs or inside `every`, on all workers. From a hook the checkpoint is written at the end of the step.
        """
        self.run.check_between_steps("save()")
        self.run.together(lambda: self.run.checkpointer.save(self._loop, metrics or {}))

    def request_save(self) -> None:
        """Have all workers save after one of the next steps. From any worker and any thread."""
        self.run.checkpointer.request(Decision.SAVE)

    def request_stop(self) -> None:
        """Have all workers raise `Stopped` after one of the next steps. From any worker and any thread.

        A run with checkpoints is saved first. With `Averaging`, workers stop at an average, where replicas are equal.
        """
        self.run.checkpointer.request(Decision.STOP)

    def request_leave(self, rank: int) -> None:
        """Have the worker with this rank leave the run after one of the next steps; the others go on.

        From any worker and any thread, in a run whose workers may change; see `paceline.launch(min_workers=...)`.
        """
        self.run.request_leave(rank)

    def close(self) -> None:
        """End the run: write a last checkpoint, unless an error is being handled, and release all resources.

        The workers' connection is closed, hooks are removed and process-wide settings restored. Safe to call twice.
        """
        self._end(sys.exception())

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._loop.explain(error)
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        recorded, self._recorded = self._recorded, None
        try:
            self.run.close(has_failed=error is not None)
        except BaseException as own:
            error = own
            raise
        finally:
            if recorded is not None:
                recorded.close(error)
