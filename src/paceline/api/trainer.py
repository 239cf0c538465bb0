"""`Trainer.setup`: you own the loop, and the same code runs on one device or many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from paceline.api.ddp_config import DdpConfig
from paceline.comm.base import DEFAULT_TIMEOUT_S
from paceline.core.errors import MisuseError
from paceline.core.events import Event
from paceline.core.world import World, device_count
from paceline.data.bring import Way, as_data
from paceline.data.sources import as_source
from paceline.plan.cadence import Cadence
from paceline.plan.steps import Position
from paceline.run.assemble import Run, assemble
from paceline.run.config import Precision, RunConfig, Strategy
from paceline.run.evaluate import evaluate
from paceline.run.loop import Loop, StepRecord
from paceline.run.replica import OptimizerFactory, SchedulerFactory
from paceline.run.report import Report


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
        scheduler: SchedulerFactory | None = None,
        weight_fn: Callable[[Any], int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        exact: bool = False,
        precision: Precision = "fp32",
        strategy: Strategy = "gradients",
        shares: Sequence[float] | Literal["measured", "equal"] = "measured",
        speed_hints: Sequence[float] | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        threads: int | None = None,
        feed: Way = "sharded",
        readers: int = 0,
        prefetch: int | None = None,
        num_shards: int | None = None,
        shuffle_buffer: int = 0,
        overlap: bool = True,
    ) -> Trainer:
        """Join the world this process is in (torchrun, `paceline run`, `paceline.launch`) or train alone.

        model: an nn.Module, or a function that builds one; every worker starts with rank 0's weights.
        optimizer: a function from parameters to a torch optimizer. scheduler: from that to a torch scheduler, which
            is stepped after every optimizer step.
        data: a list of samples, a tensor or array, a tuple or dict of them with equally many rows, or a map-style
            torch Dataset; a source of `paceline.data`; or a stream, something to iterate over again and again, such as
            a torch IterableDataset. Samples that are pairs arrive as micro-batches with .x and .y.
        global_batch: samples per optimizer step, however many workers share them. micro_batch: samples per forward
            and backward (default: the global batch); global_batch must be a multiple of it. physical_batch: samples
            that a device may run at once, a multiple of micro_batch, one number or one per worker: what a large
            device needs to be busy. Not with exact, nor with BatchNorm.
        weight_fn: from a micro-batch (on the host) to the whole number its loss is a mean over, such as valid tokens;
            default: its samples.
        exact: weights that are bit-for-bit the same on any number of workers, for one kind of device.
        precision: what `trainer.autocast()` casts to; fp16 adds loss scaling.
        strategy: "gradients" exchanges gradients in every step. For slow links, where the result then depends on the
            workers: `paceline.Cadence(...)` makes steps of as many micro-batches as keep the exchange cheap (give
            micro_batch and no global_batch); `paceline.Averaging(...)` averages the replicas' weights every so many
            steps.
        shares: how workers divide a step. "measured": by the speed each was measured at, starting from speed_hints
            if given; "equal"; or one relative speed per worker. No choice changes the result.
        feed: "sharded", every worker reads its own micro-batches, or "dispatched", rank 0 reads and sends them; no
            weight depends on it.
        readers: processes per worker that read micro-batches ahead; worth it where reading takes its time.
            prefetch: how many micro-batches ahead (default: two per reader).
        num_shards: of a stream, into how many parts it is dealt: its order depends on it (default: the micro-batches
            of a step). shuffle_buffer: of a stream, from how many samples each next one is drawn; 0: not shuffled.
        overlap: exchange gradients while backward still runs.
        timeout_s: how long a worker waits for the others before it gives up. threads: CPU threads per worker.
        """
        config = RunConfig(
            global_batch=global_batch,
            micro_batch=micro_batch,
            physical_batch=tuple(physical_batch) if isinstance(physical_batch, Sequence) else physical_batch,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            precision=precision,
            max_grad_norm=max_grad_norm,
            exact=exact,
            strategy=strategy,
            shares=shares if isinstance(shares, str) else tuple(map(float, shares)),
            speed_hints=None if speed_hints is None else tuple(map(float, speed_hints)),
            feed=feed,
            readers=readers,
            prefetch=prefetch,
            num_shards=num_shards,
            shuffle_buffer=shuffle_buffer,
            overlap=overlap,
            backend=backend,
            timeout_s=timeout_s,
            threads=threads,
        )
        world = World.from_environment(device)
        source = as_data(data, collate_fn=collate_fn, seed=seed)
        if world.size == 1 and device is None and device_count() > 1:
            print(
                f"paceline: training on 1 of {device_count()} devices; start the script with `paceline run SCRIPT` "
                "to use all",
                file=sys.stderr,
            )
        run = assemble(
            config, world, model, optimizer, source, scheduler=scheduler, weight_fn=weight_fn, collate_fn=collate_fn
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
        source = as_source(data, collate_fn=collate_fn, seed=self._config.seed)
        self._run.loop.synchronize()
        return evaluate(
            self.model,
            source,
            eval_fn,
            self._run.communicator,
            micro_batch=self._run.steps.micro_batch if micro_batch is None else micro_batch,
            seed=self._config.seed,
            weight_fn=self._weight_fn,
        )

    def close(self) -> None:
        """Release the workers' connection, remove hooks, give back the process's settings. Safe to call twice."""
        self._run.cleanup.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
