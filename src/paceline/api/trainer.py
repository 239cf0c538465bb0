"""`Trainer.setup`: you own the loop, and the same code runs on one device or many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.api.ddp_config import DdpConfig
from paceline.checkpoint.manifest import Pattern
from paceline.comm.base import DEFAULT_TIMEOUT_S
from paceline.core.errors import MisuseError
from paceline.core.events import Event
from paceline.core.world import World, device_count
from paceline.data.adopt import Wishes, adopt, adopt_for_evaluation
from paceline.data.bring import Way
from paceline.data.skip_bad import Skipped
from paceline.plan.cadence import Cadence
from paceline.plan.steps import Position
from paceline.run.assemble import Run, assemble
from paceline.run.checkpointing import SAVE, STOP
from paceline.run.checkpoints import Checkpoints
from paceline.run.config import Precision, RunConfig, Strategy
from paceline.run.evaluate import evaluate
from paceline.run.loop import Loop, StepRecord
from paceline.run.recovery import Resume, Start
from paceline.run.replica import OptimizerFactory, SchedulerFactory
from paceline.run.report import Report
from paceline.run.resuming import HasState


class Epoch:
    """One pass over the data: iterate over it for this worker's micro-batches. `number` counts from 0."""

    def __init__(self, number: int, loop: Loop) -> None:
        self.number = number
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        # Made here, not kept: a `break` then ends the generator at once, and with it the step that was under way.
        return self._loop.micro_batches(self.number)


class Trainer:
    """A training run whose loop is yours. Make one with `Trainer.setup`."""

    def __init__(self, run: Run, config: RunConfig, weight_fn: Callable[[Any], int] | None) -> None:
        self._run = run
        self._config = config
        self._weight_fn = weight_fn

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
        weight_fn: Callable[[Any], int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        max_grad_norm: float | None = None,
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
        feed: Way | None = None,
        readers: int | None = None,
        prefetch: int | None = None,
        num_shards: int | None = None,
        shuffle_buffer: int = 0,
        resident: bool = False,
        overlap: bool = True,
        checkpoints: Checkpoints | None = None,
        resume: Resume = "auto",
        init_from: str | PathLike[str] | None = None,
        allow: Sequence[str] = (),
        skip: Sequence[str] = (),
    ) -> Trainer:
        """Join the world this process is in (torchrun, `paceline run`, `paceline.launch`) or train alone.

        model: an nn.Module, or a function that builds one; every worker starts with rank 0's weights.
        optimizer: a function from parameters to a torch optimizer. scheduler: from that to a torch scheduler, which
            is stepped after every optimizer step.
        data: a list of samples, a tensor or array, a tuple or dict of them with equally many rows, or a map-style
            torch Dataset; a source of `paceline.data`; or a stream, something to iterate over again and again, such as
            a torch IterableDataset. Samples that are pairs arrive as micro-batches with .x and .y. A torch DataLoader
            is taken as it is: batch_size is micro_batch, num_workers is readers, and a sampler decides the order, drawn
            once per epoch for all workers (shuffle=True gives Paceline's own permutation). Batches that are made
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
        checkpoints: when to save the run, and where: `paceline.Checkpoints(folder, every_steps=1000)`.
        resume: "auto", from the newest checkpoint in that folder if there is one; True, there must be one; a path, from
            that checkpoint, and what the folder has of later steps is moved aside; None, the folder must have none.
        init_from: weights to start from where nothing is resumed: a checkpoint, a safetensors file, or a state_dict.
        allow: settings that may differ from those of the checkpoint, such as "global_batch". skip: components of the
            checkpoint that are not restored, such as "optimizer".
        """
        adopted = adopt(
            data,
            Wishes(
                global_batch=global_batch,
                micro_batch=micro_batch,
                physical_batch=physical_batch,
                batches_per_step=batches_per_step,
                has_steps_of_its_own=isinstance(strategy, Cadence),
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
        )
        world = World.from_environment(device)
        if world.size == 1 and device is None and device_count() > 1:
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
            start=Start(resume, init_from, tuple(allow), tuple(skip)),
        )
        return cls(run, config, weight_fn)

    @classmethod
    def setup_with(
        cls, config: DdpConfig, model: Any, optimizer: OptimizerFactory, *, data: Any, micro_batch: int, **settings: Any
    ) -> Trainer:
        """`setup` with El Che: workers exchange gradients after as many micro-batches as keep the exchange cheap.

        With max_anchor=0 each step is one micro-batch for every worker. `settings` are those of `setup`.
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

    @property
    def model(self) -> Any:
        return self._run.loop.replica.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._run.loop.replica.optimizer

    @property
    def scheduler(self) -> Any:
        return self._run.loop.replica.scheduler

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
    def steps_per_epoch(self) -> int:
        if isinstance(self._config.strategy, Cadence):
            raise MisuseError("a cadence decides as it goes how many steps an epoch has: count them as they come")
        return self._run.steps.num_steps

    def epochs(self, count: int) -> Iterator[Epoch]:
        """The run's epochs up to number `count`, from wherever it stands."""
        while self.position.epoch < count:
            number = self.position.epoch
            yield Epoch(number, self._run.loop)
            if self.position.epoch == number:
                return  # the epoch was left with `break`
        self._run.keeper.save_last(self._run.loop)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a micro-batch's loss, which is a mean over its samples. Several calls add up.

        A bare `loss.backward()` is legal too, except with fp16; the run then does not know the loss.
        """
        self._run.loop.backward(loss)

    def step(self) -> StepRecord | None:
        """End this micro-batch. If it was this worker's last of the step, complete the step and return its record."""
        return self._run.loop.step()

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward passes in the run's precision."""
        if self._config.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self._config.precision == "bf16" else torch.float16
        return torch.autocast(self.world.device.type, dtype=dtype)

    def every(self, steps: int, hook: Callable[[StepRecord], object]) -> None:
        """Call `hook(record)` after every so-many steps, on all workers together: the place to evaluate in an epoch."""
        self._run.loop.every(steps, hook)

    def listen(self, listener: Callable[[Event], object]) -> None:
        """Call `listener(event)` when something happens beside the steps, the same on all workers.

        "plan": the workers' shares changed (shares, before). "drift": replicas drift apart, so they are averaged more
        often (drift, every).
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
        if self._run.loop.is_inside_epoch:
            raise MisuseError(
                "evaluate() was called inside an epoch's loop, which workers leave at different times: call it between "
                "epochs, or register it with trainer.every(n, lambda record: ...)"
            )
        source, batch_size = adopt_for_evaluation(data, collate_fn, self._config.seed)
        self._run.loop.synchronize()
        return evaluate(
            self.model,
            source,
            eval_fn,
            self._run.communicator,
            micro_batch=(batch_size or self._run.steps.micro_batch) if micro_batch is None else micro_batch,
            seed=self._config.seed,
            weight_fn=self._weight_fn,
        )

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
        if self._run.loop.is_inside_epoch:
            raise MisuseError(
                "save() was called inside an epoch's loop, which workers leave at different times: call it between "
                "epochs, or register it with trainer.every(n, lambda record: ...)"
            )
        self._run.keeper.save(self._run.loop, metrics or {})

    def request_save(self) -> None:
        """Have all workers save after one of the next steps. From any worker and any thread."""
        self._run.keeper.ask(SAVE)

    def request_stop(self) -> None:
        """Have all workers save after one of the next steps and leave by `Stopped`. From any worker and any thread."""
        self._run.keeper.ask(STOP)

    def close(self) -> None:
        """End the run: a last checkpoint, unless an error is under way; then release what the run holds.

        The workers' connection is closed, hooks are removed, the process has its settings back. Safe to call twice.
        """
        self._close(has_failed=sys.exception() is not None)

    def _close(self, *, has_failed: bool) -> None:
        try:
            if not has_failed:
                self._run.keeper.finish(self._run.loop)
        finally:
            self._run.cleanup.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(has_failed=kind is not None)
