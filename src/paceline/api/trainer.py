"""`Trainer.setup`: you own the loop, and the same code runs on one device or many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from paceline.api.ddp_config import DdpConfig
from paceline.api.heads import Calling, Head, PlainModel, weight_fn_of
from paceline.api.summary import announce, is_quiet
from paceline.checkpoint.manifest import Pattern
from paceline.checkpoint.policy import Decision
from paceline.comm.base import DEFAULT_TIMEOUT_S
from paceline.core.errors import MisuseError
from paceline.core.events import Event
from paceline.core.world import World, device_count
from paceline.data.adopt import LoadingOptions, adopt, adopt_for_evaluation
from paceline.data.feeds.make_feed import FeedKind
from paceline.data.sources.skip_bad import Skipped
from paceline.plan.cadence import Cadence
from paceline.plan.steps import Position
from paceline.run.assemble import Run, WeightByModel, assemble
from paceline.run.capture.step import StepFunction
from paceline.run.config import Capture, Precision, RunConfig, SchedulerInterval, Strategy
from paceline.run.evaluation import collect
from paceline.run.evaluation.evaluate import evaluate
from paceline.run.evaluation.predict import predict
from paceline.run.report import Report
from paceline.run.saving.export import export_weights, save_pretrained
from paceline.run.saving.options import Checkpoints
from paceline.run.saving.resuming import Resume, ResumeOptions
from paceline.run.saving.state import HasState, plain_model
from paceline.run.step.gc_policy import GarbageCollection
from paceline.run.step.loop import Loop, StepRecord
from paceline.run.step.replica import OptimizerFactory, SchedulerFactory, only_or_all

if TYPE_CHECKING:
    from paceline.api.builder import Builder


class Epoch:
    """One pass over the data: iterate over it, once, for this worker's micro-batches. `number` counts from 0."""

    def __init__(self, number: int, loop: Loop, num_micro_batches: int | None) -> None:
        self.number = number
        self.was_begun = False
        self._loop = loop
        self._num_micro_batches = num_micro_batches

    def __iter__(self) -> Iterator[Any]:
        check_open(self._loop)
        if self.was_begun:
            raise MisuseError(
                f"epoch {self.number} was iterated before, and an epoch can be iterated once: "
                "the next one comes from trainer.epochs(...)"
            )
        if self._loop.position.epoch != self.number:
            raise MisuseError(
                f"epoch {self.number} cannot be iterated: the run is in epoch {self._loop.position.epoch}. Take each "
                "epoch from trainer.epochs(...) when it is its turn"
            )
        self.was_begun = True
        # Made here, not kept: a `break` then ends the generator at once, and with it the step that was under way.
        return self._loop.micro_batches(self.number)

    def __len__(self) -> int:
        """The micro-batches of the whole epoch, over all workers; this one gets its share of them."""
        if self._num_micro_batches is None:
            raise TypeError("len(epoch) is not known: the data is a stream, which ends when it ends")
        return self._num_micro_batches


def check_open(loop: Loop) -> None:
    if loop.is_closed:
        raise MisuseError(
            "this trainer is closed, its run has ended: call Trainer.setup again, with the same model, or with "
            "checkpoints= to go on where it was saved"
        )


class Trainer:
    """A training run whose loop is yours. Make one with `Trainer.setup`."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        weight_fn: Callable[[Any], int] | None,
        calling: Calling | None = None,
    ) -> None:
        self._run = run
        self._config = config
        self._weight_fn = weight_fn
        self._calling = calling or PlainModel()

    @classmethod
    def setup(
        cls,
        model: Any,
        optimizer: OptimizerFactory,
        *,
        data: Any,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        physical_batch: int | Sequence[int] | None = None,
        batches_per_step: int | None = None,
        scheduler: SchedulerFactory | None = None,
        scheduler_every: SchedulerInterval = "step",
        weight_fn: Callable[[Any], int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        max_grad_norm: float | None = None,
        fused_optimizers: bool = True,
        train_mode: bool = True,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        skip_bad_samples: bool | Callable[[Skipped], None] = False,
        exact: bool = False,
        precision: Precision = "fp32",
        strategy: Strategy = "gradients",
        shares: Sequence[float] | Literal["measured", "equal"] = "measured",
        speed_hints: Sequence[float] | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        threads: int | None = None,
        feed: FeedKind | None = None,
        readers: int | None = None,
        prefetch: int | None = None,
        num_shards: int | None = None,
        shuffle_buffer: int = 0,
        resident: bool = False,
        overlap: bool = True,
        garbage_collection: GarbageCollection = "between steps",
        capture: Capture = "auto",
        ema: float | None = None,
        quiet: bool = False,
        checkpoints: Checkpoints | None = None,
        resume: Resume = "auto",
        init_from: str | PathLike[str] | None = None,
        allow: Sequence[str] = (),
        skip: Sequence[str] = (),
        timeline: str | PathLike[str] | None = None,
    ) -> Trainer:
        """Join the world this process is in (torchrun, `paceline run`, `paceline.launch`) or train alone.

        model: an nn.Module, or a function that builds one; every worker starts with rank 0's weights.
        optimizer: a function from parameters to a torch optimizer, or to a list of them; or, where the model is made
            already, optimizers over its parameters. A class, such as torch.optim.AdamW, is used with its own default
            learning rate. scheduler: a function from that to a torch scheduler, or several, or one that was made over
            such an optimizer; stepped after every optimizer step, or with scheduler_every="epoch" at the end of every
            epoch.
        fused_optimizers: SGD, Adam and AdamW update all parameters in one kernel, unless they were made with another
            choice (`fused=`, `foreach=`).
        train_mode: put a model that is in evaluation mode, as those of `from_pretrained` are, into training mode. In
            one that is in training mode, layers that are not, such as frozen BatchNorm, stay so. False: every module
            stays in the mode it is in.
        data: a list of samples, a tensor or array, a tuple or dict of them with equally many rows, or a map-style
            torch Dataset; a source of `paceline.data`; or a stream, something to iterate over again and again, such as
            a torch IterableDataset. Samples that are pairs arrive as micro-batches with .x and .y. A torch DataLoader
            is taken as it is: batch_size is global_batch, or micro_batch where global_batch is given too; num_workers
            is readers; a sampler decides the order, drawn once per epoch for all workers (shuffle=True gives
            Paceline's own permutation). Batches that are made
            elsewhere: `paceline.Batches(iterable)`, `paceline.PerWorker(iterables)`.
        global_batch: samples per optimizer step, however many workers share them. micro_batch: samples per forward
            and backward (default: the global batch); global_batch must be a multiple of it. physical_batch: samples
            that a device may run at once, a multiple of micro_batch, one number or one per worker: what a large
            device needs to be busy. Not with exact, nor with BatchNorm.
        batches_per_step: instead of these, for data that comes as whole batches (`Batches`, `PerWorker`, a DataLoader
            with a batch_sampler or batch_size=None): each is one micro-batch, and so many make a step.
        weight_fn: from a micro-batch (on the host) to the whole number its loss is a mean over, such as valid tokens;
            default: its samples.
        shuffle: a new order in every epoch (default: yes, or as a DataLoader says). drop_last: leave out an epoch's
            last step if it is smaller. skip_bad_samples: go on without samples that cannot be read, with a warning for
            each, or with a call of your function.
        exact: weights that are bit-for-bit the same on any number of workers, for one kind of device.
        precision: what `trainer.autocast()` casts to; fp16 adds loss scaling.
        strategy: "gradients" exchanges gradients in every step. For slow links, where the result then depends on the
            workers: `paceline.Cadence(...)` makes steps of as many micro-batches as keep the exchange cheap (give
            micro_batch and no global_batch); `paceline.Averaging(...)` averages the replicas' weights every so many
            steps.
        shares: how workers divide a step. "measured": by the speed each was measured at, starting from speed_hints
            if given; "equal"; or one relative speed per worker. No choice changes the result.
        feed: "sharded", every worker reads its own micro-batches, or "dispatched", rank 0 reads and sends them
            (default: "dispatched" for `Batches`); no weight depends on it.
        readers: processes per worker that read micro-batches ahead; worth it where reading takes its time.
            prefetch: how many micro-batches ahead (default: two per reader).
        num_shards: of a stream, into how many parts it is dealt: its order depends on it (default: as many as it can
            be divided into). shuffle_buffer: from how many samples of a shard each next one is drawn; 0: not shuffled.
        resident: keep all of the data on the device; for tensors and arrays that fit there.
        overlap: exchange gradients while backward still runs.
        timeout_s: how long a worker waits for the others before it gives up. threads: CPU threads per worker.
        garbage_collection: "between steps", Python's full collections come between two steps of an epoch, on all
            workers at the same ones; "as usual", whenever Python thinks fit. See docs/performance.md.
        capture: what `step_with` launches on a GPU is recorded once as a CUDA graph and replayed: "auto", where that
            pays and can be done; "on", or else an error that says why not; "off". See docs/capture.md.
        ema: the decay, such as 0.999, of an average of the weights that is kept beside them, after every step
            decay * average + (1 - decay) * weights; see `ema_weights`. Not with Averaging.
        quiet: say nothing about devices on stderr; so does the environment variable PACELINE_QUIET=1.
        checkpoints: when to save the run, and where: `paceline.Checkpoints(folder, every_steps=1000)`.
        resume: "auto", from the newest checkpoint in that folder if there is one; True, there must be one; a path, from
            that checkpoint, and what the folder has of later steps is moved aside; None, the folder must have none.
        init_from: weights to start from where nothing is resumed: a checkpoint, a safetensors file, or a state_dict.
        allow: settings that may differ from those of the checkpoint, such as "global_batch". skip: components of the
            checkpoint that are not restored, such as "optimizer".
        timeline: a folder in which every worker records what its time goes into; `paceline timeline FOLDER` shows it.
        """
        adopted = adopt(
            data,
            LoadingOptions(
                global_batch=global_batch,
                micro_batch=micro_batch,
                physical_batch=physical_batch,
                batches_per_step=batches_per_step,
                strategy_sets_step=isinstance(strategy, Cadence),
                shuffle=shuffle,
                shuffle_buffer=shuffle_buffer,
                num_shards=num_shards,
                feed=feed,
                readers=readers,
                collate_fn=collate_fn,
                skip_bad_samples=skip_bad_samples,
                resident=resident,
            ),
            seed,
        )
        config = RunConfig(
            global_batch=adopted.global_batch,
            micro_batch=adopted.micro_batch,
            physical_batch=tuple(physical_batch) if isinstance(physical_batch, Sequence) else physical_batch,
            seed=seed,
            shuffle=adopted.shuffle,
            drop_last=drop_last,
            precision=precision,
            max_grad_norm=max_grad_norm,
            scheduler_every=scheduler_every,
            fused_optimizers=fused_optimizers,
            exact=exact,
            strategy=strategy,
            shares=shares if isinstance(shares, str) else tuple(map(float, shares)),
            speed_hints=None if speed_hints is None else tuple(map(float, speed_hints)),
            feed=adopted.feed,
            readers=adopted.readers,
            prefetch=prefetch,
            num_shards=num_shards,
            shuffle_buffer=shuffle_buffer,
            resident=resident,
            overlap=overlap,
            backend=backend,
            timeout_s=timeout_s,
            threads=threads,
            garbage_collection=garbage_collection,
            capture=capture,
        )
        world = World.from_environment(device)
        if world.size == 1 and device is None and device_count() > 1 and not is_quiet(quiet):
            print(
                f"paceline: training on 1 of {device_count()} devices; start the script with `paceline run SCRIPT` "
                "to use all",
                file=sys.stderr,
            )
        run = assemble(
            config,
            world,
            model,
            optimizer,
            adopted.data,
            scheduler=scheduler,
            weight_fn=weight_fn,
            collate_fn=adopted.collate_fn,
            checkpoints=checkpoints,
            start=ResumeOptions(resume, init_from, tuple(allow), tuple(skip)),
            ema=ema,
            timeline=None if timeline is None else Path(timeline),
            train_mode=train_mode,
        )
        try:
            announce(run.communicator, quiet=quiet)
        except BaseException:
            run.cleanup.close()
            raise
        return cls(run, config, run.weight_fn)

    @classmethod
    def setup_with(
        cls, config: DdpConfig, model: Any, optimizer: OptimizerFactory, *, data: Any, micro_batch: int, **settings: Any
    ) -> Trainer:
        """`setup` with El Che: workers exchange gradients after as many micro-batches as keep the exchange cheap.

        With max_anchor=0 each step has as many micro-batches as there are workers. `settings` are those of `setup`.
        """
        size = World.from_environment(settings.get("device")).size
        return cls.setup(
            model,
            optimizer,
            data=data,
            micro_batch=micro_batch,
            global_batch=micro_batch * size if config.strategy == "gradients" else None,
            strategy=config.strategy,
            speed_hints=config.speed_hints(size),
            max_grad_norm=config.max_grad_norm,
            **settings,
        )

    @classmethod
    def setup_head(cls, head: Any, optimizer: OptimizerFactory, *, data: Any, **settings: Any) -> Trainer:
        """`setup` for a model that computes its own loss, which `trainer.loss(batch)` then gives.

        head: what `setup` takes as a model and has `compute_loss(batch)`; or a model of transformers, which is called
            with the entries of a batch that is a dict, labels among them, and whose output has the loss. From a local
            folder: `lambda: AutoModelForSequenceClassification.from_pretrained(folder)`. Its `predict(batch)`, if it
            has one, is what `trainer.predict` calls; its `tokenizer` is saved with it by `trainer.save_pretrained`.
        Without a weight_fn, a micro-batch of a language model of transformers weighs the labels that its loss is a mean
        over: for causal ones, which shift them, `(labels[..., 1:] != -100).sum()`. See docs/data.md.
        """
        settings["weight_fn"] = settings.get("weight_fn") or WeightByModel(weight_fn_of)
        plain = cls.setup(head, optimizer, data=data, **settings)
        return cls(plain._run, plain._config, plain._weight_fn, Head())

    @classmethod
    def setup_head_with(
        cls, config: DdpConfig, head: Any, optimizer: OptimizerFactory, *, data: Any, micro_batch: int, **settings: Any
    ) -> Trainer:
        """`setup_head` with El Che, as `setup_with` is `setup` with it."""
        settings["weight_fn"] = settings.get("weight_fn") or WeightByModel(weight_fn_of)
        plain = cls.setup_with(config, head, optimizer, data=data, micro_batch=micro_batch, **settings)
        return cls(plain._run, plain._config, plain._weight_fn, Head())

    @classmethod
    def builder(
        cls,
        model_factory: Callable[[], Any],
        optim_factory: Callable[[list[torch.Tensor]], Any],
        train_fn: Callable[[Any, Any], Any],
    ) -> Builder:
        """A run whose loop is the framework's; `.run()` starts it in the background and returns its handle.

        model_factory: builds a model; every worker calls it. optim_factory: from its parameters to a torch optimizer.
        train_fn(model, batch): the loss, a mean over the micro-batch, or (loss, {"name": number}) with numbers of your
        own, whose means stand in the epoch's metrics.

            handle = pl.Trainer.builder(build, optimizer, train_fn).dataset(data).batch_size(64).num_epochs(10).run()
            for metrics in handle: print(metrics.epoch, metrics.loss)
            state = handle.join()
        """
        from paceline.api.builder import Builder

        return Builder(model_factory, optim_factory, train_fn)

    @property
    def model(self) -> Any:
        return self._run.loop.replica.model

    @property
    def unwrapped_model(self) -> Any:
        """The model without torch.compile's wrapper."""
        return plain_model(self.model)

    @property
    def optimizer(self) -> Any:
        """The optimizer; a list where there are several."""
        return only_or_all(self._run.loop.replica.optimizers)

    @property
    def scheduler(self) -> Any:
        """The scheduler; a list where there are several, None where there is none."""
        return only_or_all(self._run.loop.replica.schedulers or [None])

    @property
    def world(self) -> World:
        return self._run.communicator.world

    @property
    def is_main(self) -> bool:
        return self.world.is_main

    @property
    def position(self) -> Position:
        """The next step to take."""
        return self._run.loop.position

    @property
    def last_record(self) -> StepRecord | None:
        """The record of the newest completed step, the same on every worker; None before the first of this process.

        What `step` returns, but also on a worker that had no share in that step and so never came to its loop's body.
        """
        return self._run.loop.last_record

    @property
    def is_repeating(self) -> bool:
        """Whether the micro-batches that now come have come before: exact mode had to begin the step again.

        What a loop's body adds up by itself counts them twice then. Records do not: a step has one.
        """
        return self._run.loop.is_repeating

    @property
    def steps_per_epoch(self) -> int | None:
        """None where nobody knows beforehand: for a stream, and with a cadence, which decides as it goes."""
        return self._run.steps_per_epoch

    def epochs(self, count: int | None = None, *, max_steps: int | None = None) -> Iterator[Epoch]:
        """The run's epochs up to number `count`, or until the run has `max_steps` steps; from wherever it stands."""
        if count is None and max_steps is None:
            raise ValueError("epochs() without an end: give the number of epochs, or max_steps")
        self._check_open()
        loop = self._run.loop
        loop.begin_next_epoch()  # where the last one was left by `break`
        loop.max_steps = max_steps
        while not loop.is_over and (count is None or self.position.epoch < count):
            begun_at = self.position
            epoch = Epoch(begun_at.epoch, loop, self._run.micro_batches_per_epoch)
            yield epoch
            self._check_open()
            if loop.begin_next_epoch():
                if count is None and self.position.step == begun_at.step:
                    raise MisuseError(
                        f"epoch {epoch.number} was left without a step, so that max_steps={max_steps} will never be "
                        "reached: leave it after a step, or give epochs() a number of epochs"
                    )
            elif self.position.epoch == epoch.number and not loop.is_over:
                if epoch.was_begun:
                    return  # an exception ended it
                raise MisuseError(
                    f"epoch {epoch.number} was not iterated, so the next one cannot begin: write "
                    "`for batch in epoch`, or leave the loop over the epochs with `break`"
                )
        self._run.keeper.save_last(loop)

    def end(self) -> None:
        """Let the epochs end here, as they would after the last one; for early stopping.

        Inside `every` or `every_epoch`, on all workers: in an epoch's loop they would leave at different steps.
        """
        if self._run.loop.is_inside_epoch:
            raise MisuseError(
                "end() was called inside an epoch's loop, which workers leave at different times: call it in a hook of "
                "trainer.every or trainer.every_epoch, where all of them decide alike"
            )
        self._run.loop.max_steps = self.position.step

    def end_epoch(self) -> None:
        """Let the epoch end after this step, on all workers; the next one begins. Inside `every` only.

        trainer.every(1, lambda record: trainer.end_epoch() if record.loss < 0.1 else None)
        """
        self._run.loop.end_epoch()

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of a micro-batch as the head computes it, in the run's precision; see `setup_head`."""
        with self.autocast():
            return self._calling.loss(self.model, batch)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Backward of a micro-batch's loss, which is a mean over its samples. Several calls add up.

        retain_graph: keep what a second backward through the same graph needs. create_graph is refused: gradients are
        exchanged as numbers. For a gradient penalty take `torch.autograd.grad(..., create_graph=True)` and add what it
        gives to the loss.

        A bare `loss.backward()` is legal too, except with fp16; the run then does not know the loss.
        """
        if self._config.capture == "on":
            raise MisuseError('capture="on" needs the loss as a function: use trainer.step_with, or capture="auto"')
        self._check_open()
        if create_graph:
            raise MisuseError(
                "backward(create_graph=True) would need the graph of gradients that are exchanged as numbers: for a "
                "gradient penalty call torch.autograd.grad(loss, inputs, create_graph=True), add the penalty to the "
                "loss and pass the sum to trainer.backward"
            )
        self._run.loop.backward(loss, retain_graph=retain_graph)

    def step(self) -> StepRecord | None:
        """End this micro-batch. If it was this worker's last of the step, complete the step and return its record.

        A worker without a share in a step does not come here: `last_record` has the record on every worker.
        """
        self._check_open()
        return self._run.loop.step()

    def step_with(self, loss_of: Callable[[Any], torch.Tensor]) -> StepFunction:
        """A function of micro-batches that does it all: the loss, in the run's precision, `backward` and `step`.

            step = trainer.step_with(lambda batch: F.cross_entropy(trainer.model(batch.x), batch.y))
            for epoch in trainer.epochs(3):
                for batch in epoch:
                    step(batch)

        It returns what `step` returns. On a GPU that waits for the host, `loss_of` is recorded as a CUDA graph after
        some steps and replayed, with the same result; its Python code does not run then. See `capture` in `setup`.
        """

        def function(batch: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
            with self.autocast():
                return loss_of(batch), {}

        return self._run.stepping.with_function(function)

    def set_lr(self, lr: float, *, group: int | None = None) -> None:
        """Set the learning rate of all parameter groups, or of one (counted from 0, over all optimizers).

        In the loop's body it holds for the step under way, on every worker, whoever of them calls it: a worker without
        a share in the step does not run the body. In hooks and between epochs all workers call it. A rate that follows
        the step by a rule is better left to `scheduler=`.
        """
        self._run.loop.set_learning_rate(float(lr), -1 if group is None else group)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward passes in the run's precision."""
        if self._config.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self._config.precision == "bf16" else torch.float16
        return torch.autocast(self.world.device.type, dtype=dtype)

    def every(self, steps: int, hook: Callable[[StepRecord], object]) -> None:
        """Call `hook(record)` after every so-many steps, on all workers together: the place to evaluate in an epoch."""
        self._run.loop.every(steps, hook)

    def every_epoch(self, epochs: int, hook: Callable[[int], object]) -> None:
        """Call `hook(number)` when every so-many epochs have ended, on all workers together."""
        self._run.loop.every_epoch(epochs, hook)

    def on_gradients(self, hook: Callable[[Mapping[str, torch.Tensor]], object]) -> None:
        """Call `hook(parameters)` in every step, before clipping: `parameters[name].grad` is the global batch's mean.

        The hook may change the gradients, on all workers alike; random numbers that it draws are the same on all.
        """
        self._run.loop.on_gradients(hook)

    def listen(self, listener: Callable[[Event], object]) -> None:
        """Call `listener(event)` when something happens beside the steps, the same on all workers.

        "plan": the workers' shares changed (shares, before). "drift": replicas drift apart, so they are averaged more
        often (drift, every). "capture", on the worker that captures: a graph was recorded (what, number), or none is
        replayed (what, reason).
        """
        self._run.events.listen(listener)

    def report(self) -> Report:
        """Where the workers' time went so far; print it for a table."""
        return self._run.loop.report()

    def evaluate(
        self, data: Any, eval_fn: Callable[[Any, Any], Any], *, micro_batch: int | None = None, collate_fn: Any = None
    ) -> float | dict[str, float]:
        """The mean of `eval_fn(model, batch)` over all of `data`: each sample once, over all workers.

        eval_fn returns a mean over its micro-batch, one number or a dict of them; means are weighted like training.
        Between epochs or inside `every`: all workers must reach it together. Replicas that differ are averaged first.
        """
        self._meet("evaluate()")
        source, batch_size = adopt_for_evaluation(data, collate_fn, self._config.seed)
        with self._run.timeline.during("evaluation"):
            return evaluate(
                self.model,
                source,
                eval_fn,
                self._run.communicator,
                micro_batch=(batch_size or self._run.steps.micro_batch) if micro_batch is None else micro_batch,
                seed=self._config.seed,
                weight_fn=self._weight_fn,
            )

    def predict(
        self,
        data: Any,
        fn: Callable[[Any, Any], Any] | None = None,
        *,
        micro_batch: int | None = None,
        collate_fn: Any = None,
    ) -> Any:
        """What `fn(model, batch)` returns, for every sample of `data` once and in its order, computed by all workers.

        fn: returns tensors with a row per sample, or lists with an item per sample, alone or in tuples, dicts and
            dataclasses; default: `model(batch)`, of pairs `model(batch.x)`, in the run's precision, or what a head
            predicts. A worker without a share of few samples calls it too, to know what it returns.
        Every worker gets all of it, in tensors on its host: outputs that do not fit there twice are predicted part by
        part. Where the rows of a tensor differ in shape it is a list of rows. Between epochs or inside `every`, as
        `evaluate`.
        """
        self._meet("predict()")
        source, batch_size = adopt_for_evaluation(data, collate_fn, self._config.seed)
        with self._run.timeline.during("evaluation"):
            return predict(
                self.model,
                source,
                fn or self._predict_batch,
                self._run.communicator,
                micro_batch=(batch_size or self._run.steps.micro_batch) if micro_batch is None else micro_batch,
                seed=self._config.seed,
            )

    def ema_weights(self) -> AbstractContextManager[None]:
        """Inside the block the model has the averaged weights (`setup(ema=...)`), afterwards its own again.

        Buffers, such as BatchNorm's statistics, are the model's own in both.
        """
        return self._run.average.in_model()

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, by rank, on every worker; between epochs or inside `every`, on all workers.

        A value is made of tensors, arrays, numbers, strings, lists, tuples and dicts, and may have another shape on
        every worker. Its tensors arrive on the host.
        """
        self._refuse_inside_epoch(
            "gather()",
            ". For a loss over more samples than a micro-batch has, such as in-batch negatives, choose a larger "
            "micro_batch, or see docs/contrastive.md",
        )
        return collect.gather(value, self._run.communicator)

    def reduce(self, value: Any, how: collect.Reduction = "mean") -> Any:
        """The "mean", "sum", "max" or "min" of a tensor or number over the workers, on every worker.

        Tensors must have one shape and dtype on all of them, and are reduced in rank order: for metrics, not for
        what is large, since every worker receives all of them. Between epochs or inside `every`, on all workers.
        """
        self._refuse_inside_epoch("reduce()")
        return collect.reduce(value, how, self._run.communicator)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value that rank `source` gives, on every worker, as `gather` would bring it."""
        self._refuse_inside_epoch("broadcast()")
        return collect.broadcast(value, source, self._run.communicator)

    def main_first(self) -> AbstractContextManager[None]:
        """Rank 0 runs the block first, such as one that fills a cache, and then all others do.

        They wait for it no longer than `timeout_s`. An error on rank 0 is raised on all workers.
        """
        self._refuse_inside_epoch("main_first()")
        return collect.main_first(self._run.communicator)

    def export(self, path: str | PathLike[str], *, ema: bool = False) -> None:
        """Write the model's weights, with `ema` the averaged ones, to one safetensors file.

        Names are those of the model's state_dict; tied tensors appear under each of theirs. Rank 0 writes, and the file
        is there in one moment, complete, before any worker returns. Between epochs or inside `every`, on all workers.
        """
        self._meet("export()")
        with self.ema_weights() if ema else nullcontext():
            export_weights(self.model, Path(path), self._run.communicator)

    def save_pretrained(self, folder: str | PathLike[str], *, ema: bool = False) -> None:
        """Have the model's own `save_pretrained` write it, and its `tokenizer` if it has one, as `export` does."""
        self._meet("save_pretrained()")
        with self.ema_weights() if ema else nullcontext():
            save_pretrained(self.model, Path(folder), self._run.communicator)

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint that the run goes on from; None for a fresh start."""
        return self._run.keeper.resumed_from

    def register(self, name: str, thing: HasState, pattern: Pattern | str = Pattern.REPLICATED) -> None:
        """Let an object with `state_dict` and `load_state_dict` take part in checkpoints; before the first epoch.

        In a run that is resumed its state is loaded here. pattern: "replicated", the same on every worker; "global",
        rank 0's; "per_rank", every worker's own; "per_node", every node's own, held by its first worker.
        """
        names = [known.value.lower() for known in Pattern]
        if isinstance(pattern, str) and pattern.lower() not in names:
            raise ValueError(f"pattern={pattern!r}: choose one of {', '.join(names)}")
        self._run.keeper.register(name, thing, Pattern(pattern.upper()) if isinstance(pattern, str) else pattern)

    def state_components(self) -> dict[str, str]:
        """What a checkpoint of this run holds, by name, and how workers share it; empty if it is not saved."""
        return {name: pattern.value.lower() for name, pattern in self._run.keeper.components.items()}

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Save now, beside what is saved anyway; `metrics` are what `Checkpoints(keep_best=...)` chooses by.

        Between epochs or inside `every`, on all workers. From a hook it is done when the step is over.
        """
        self._refuse_inside_epoch("save()")
        self._run.keeper.save(self._run.loop, metrics or {})

    def request_save(self) -> None:
        """Have all workers save after one of the next steps. From any worker and any thread."""
        self._run.keeper.request(Decision.SAVE)

    def request_stop(self) -> None:
        """Have all workers leave by `Stopped` after one of the next steps. From any worker and any thread.

        A run with checkpoints is saved before that. Replicas that are averaged stop where they meet, all being equal.
        """
        self._run.keeper.request(Decision.STOP)

    def close(self) -> None:
        """End the run: a last checkpoint, unless an error is under way; then release what the run holds.

        The workers' connection is closed, hooks are removed, the process has its settings back. Safe to call twice.
        """
        self._close(has_failed=sys.exception() is not None)

    def _check_open(self) -> None:
        check_open(self._run.loop)

    def _refuse_inside_epoch(self, call: str, advice: str = "") -> None:
        self._check_open()
        self._run.loop.settle()
        if self._run.loop.is_inside_epoch:
            raise MisuseError(
                f"{call} was called inside an epoch's loop, which workers leave at different times: call it between "
                f"epochs, or register it with trainer.every(n, lambda record: ...){advice}"
            )

    def _meet(self, call: str) -> None:
        """All workers are here, and their replicas are made equal where the strategy lets them differ."""
        self._refuse_inside_epoch(call)
        self._run.loop.synchronize()

    def _predict_batch(self, model: Any, batch: Any) -> Any:
        with self.autocast():
            return self._calling.predict(model, batch)

    def _close(self, *, has_failed: bool) -> None:
        if self._run.loop.is_closed:
            return
        self._run.loop.is_closed = True
        try:
            if has_failed:
                self._run.loop.abandon()
            else:
                self._run.loop.settle()
                self._run.keeper.finish(self._run.loop)
        finally:
            self._run.cleanup.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._run.loop.explain(error)
        self._close(has_failed=kind is not None)
