"""Assemble a run from the user's model, optimizer and data and the run's configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch

from paceline.checkpoint.manifest import Pattern
from paceline.comm import connect
from paceline.comm.base import Communicator, Link
from paceline.comm.single import SingleCommunicator
from paceline.core.events import Events
from paceline.core.world import World, why_unusable
from paceline.data.epochs import NumberedData
from paceline.data.feeds.make_feed import DataSettings, make_feed, make_link
from paceline.data.sources.streams import IterableStream
from paceline.observe.timeline.recorder import NoTimeline, TimelineRecorder
from paceline.plan.cadence import Cadence
from paceline.run.batch_norm import batch_norm_in_training, explain_one_sample_tail
from paceline.run.capture.graphs import graphs_for
from paceline.run.capture.step import Stepping
from paceline.run.config import RunConfig
from paceline.run.determinism import process_settings
from paceline.run.membership.communicator import ElasticCommunicator
from paceline.run.membership.member import Membership
from paceline.run.membership.rejoining import Rejoining
from paceline.run.run import Run
from paceline.run.saving.checkpointer import Checkpointer, RunParts
from paceline.run.saving.identity import data_facts, identity
from paceline.run.saving.options import Checkpoints
from paceline.run.saving.state import plain_model
from paceline.run.sharding.divide import divide
from paceline.run.step.build import watch_replacement
from paceline.run.step.ema import average_of
from paceline.run.step.gc_policy import GcPolicy
from paceline.run.step.loop import Loop
from paceline.run.step.planner import planner_for
from paceline.run.step.replica import OptimizerFactory, Replica, SchedulerFactory
from paceline.sync.averaging.strategy import AveragedReplicas, Averaging, GradientsFirst
from paceline.sync.buffers import Buffers, statistics_of
from paceline.sync.compression.gradients import CompressedGradients
from paceline.sync.compression.residuals import Residuals
from paceline.sync.compression.settings import Gradients
from paceline.sync.gradients.direct import DirectGradients
from paceline.sync.gradients.exchange import MeanGradients
from paceline.sync.gradients.sharded import ShardedGradients
from paceline.sync.gradients.shards import Shards
from paceline.sync.strategy import GradientExchange

logger = logging.getLogger("paceline")


@dataclass(frozen=True)
class WeightByModel:
    """A weight_fn that depends on the model: `find(model)` returns it, or None to weight by samples."""

    find: Callable[[Any], Callable[[Any], int] | None]


def assemble(
    config: RunConfig,
    world: World,
    model: Any,
    optimizer: OptimizerFactory,
    data: NumberedData | IterableStream,
    *,
    scheduler: SchedulerFactory | None = None,
    weight_fn: Callable[[Any], int] | WeightByModel | None = None,
    checkpoints: Checkpoints | None = None,
    init_from: str | PathLike[str] | None = None,
) -> Run:
    """Check the settings, connect the workers and build the run. On failure all resources are released."""
    steps = config.steps_of_stream() if isinstance(data, IterableStream) else config.steps_of(len(data))
    config.check_workers(world.size)
    membership = Membership.from_environment()
    if membership is not None and config.optimization.shard is not None and config.optimization.redundancy == 1:
        logger.info(
            "with shard= and redundancy=1, the loss of a worker restarts all of them from the newest checkpoint"
        )
        membership = None
    with ExitStack() as stack:
        if world.device.type == "cuda":
            _check_device(world.device)
            torch.cuda.set_device(world.device)
        graphs = graphs_for(config, world)
        stack.enter_context(process_settings(world, exact=config.exact, threads=config.runtime.threads))
        communicator = _connect(config, world, membership)
        # From the number of workers at the start, also in a worker that joins later: buffers have the same size on all.
        max_micro_batches = config.max_micro_batches(world.size if membership is None else membership.first_size)
        world, can_change = communicator.world, membership is not None
        stack.callback(communicator.close)
        replica = Replica(
            model,
            optimizer,
            scheduler,
            communicator,
            config.seed,
            fused=config.optimization.fused,
            train_mode=config.optimization.train_mode,
        )
        stack.callback(replica.close)
        if config.optimization.scheduler_every == "epoch":
            replica.refuse_plateau()
        shards = divide(replica, config.optimization, communicator, can_change=can_change)
        stack.callback(watch_replacement(replica.model, replica.parameters))
        if isinstance(weight_fn, WeightByModel):
            weight_fn = weight_fn.find(plain_model(replica.model))
        has_one_sample_tail = not isinstance(data, IterableStream) and steps.num_samples % steps.micro_batch == 1
        if has_one_sample_tail and steps.micro_batch > 1 and not config.batching.drop_last:
            for hook in explain_one_sample_tail(replica.model, steps):
                stack.callback(hook.remove)
        if config.batching.physical_batch is not None and (name := batch_norm_in_training(replica.model)) is not None:
            raise ValueError(
                f"physical_batch would change the statistics of the BatchNorm layer {name!r}: leave it out, or "
                "choose a larger micro_batch"
            )
        events = Events()
        facts = None if checkpoints is None else data_facts(data, communicator)
        own = identity(config, steps, data, replica, world.device, is_weighted=weight_fn is not None, facts=facts)
        is_averaging = isinstance(config.strategy, Averaging) and (world.size > 1 or can_change)
        timeline, ema = config.runtime.timeline, config.optimization.ema
        lane = _lane(world, membership)
        recorder = NoTimeline() if timeline is None else TimelineRecorder(Path(timeline), lane, events)
        stack.callback(recorder.close)
        parts = RunParts(replica, own, communicator, events, is_averaging, recorder, config.runtime.quiet)
        # Loads the weights, before the exchange reads them.
        checkpointer = Checkpointer(checkpoints, init_from, parts)
        stack.callback(checkpointer.close)
        average = None if ema is None else average_of(replica, ema)
        if average is not None and checkpoints is not None:
            checkpointer.register("ema", average, Pattern.REPLICATED)
        residuals = Residuals()
        exchanges = _Exchanges(config, replica, communicator, events, max_micro_batches, shards, residuals)
        exchange = exchanges.of_weights() if is_averaging else exchanges.of_gradients()
        if isinstance(exchange, CompressedGradients):
            residuals.owner = exchange
        stack.callback(exchange.close)
        planner = planner_for(config, world, max_micro_batches, can_change=can_change)
        settings = _data_settings(config, world, weight_fn)
        link = partial(_elastic_link, communicator) if isinstance(communicator, ElasticCommunicator) else make_link
        feed = make_feed(data, settings, steps, planner.plan, communicator, link)
        stack.callback(feed.close)
        gc_policy = GcPolicy(config.runtime.garbage_collection)
        stack.callback(gc_policy.close)
        loop = Loop(
            config, communicator, replica, exchange, feed, planner, events, checkpointer, average, recorder, gc_policy
        )
        checkpointer.load_loop(loop)
        if checkpoints is not None:
            if getattr(config.strategy, "compress", None) == "sparse":
                checkpointer.register("residuals", residuals, Pattern.PER_RANK)
            if loop.loss_scale is not None and isinstance(config.strategy, Averaging):
                checkpointer.register("loss_scale", loop.loss_scale, Pattern.PER_RANK)
        rejoining = None
        if isinstance(communicator, ElasticCommunicator):
            rejoining = Rejoining(communicator, loop, checkpointer, average, events, config.optimization)
            loop.recover_with(rejoining)
        stepping = Stepping(loop, exchange, events, graphs, config)
        is_counted = not isinstance(data, IterableStream)
        return Run(
            config=config,
            loop=loop,
            steps=steps,
            steps_per_epoch=steps.num_steps if is_counted and not isinstance(config.strategy, Cadence) else None,
            micro_batches_per_epoch=steps.num_micro_batches if is_counted else None,
            communicator=communicator,
            events=events,
            checkpointer=checkpointer,
            average=average,
            timeline=recorder,
            stepping=stepping,
            rejoining=rejoining,
            weight_fn=weight_fn,
            cleanup=stack.pop_all(),
        )


def _connect(config: RunConfig, world: World, membership: Membership | None) -> Communicator:
    backend, timeout_s = config.runtime.backend, config.runtime.timeout_s
    if membership is None:
        return connect(world, backend, timeout_s)
    return ElasticCommunicator(membership, world, backend, timeout_s)


def _elastic_link(communicator: ElasticCommunicator, world: World, timeout_s: float, join_timeout_s: float) -> Link:
    """A link that is aborted when the current generation ends."""
    link = make_link(world, timeout_s, join_timeout_s, communicator.rendezvous_point())
    communicator.abort_with(link.abort)
    return link


def _lane(world: World, membership: Membership | None) -> World:
    """The world that names this worker's timeline file. Ranks may change, and a worker that joins has none yet."""
    if membership is None:
        return world
    return replace(world, rank=membership.number, size=max(world.size, membership.number + 1))


def _check_device(device: torch.device) -> None:
    if (problem := why_unusable(device)) is not None:
        raise ValueError(
            f"{device} cannot run a kernel: {problem}. Leave it out with CUDA_VISIBLE_DEVICES, or install a torch that "
            "supports it"
        )


def _data_settings(config: RunConfig, world: World, weight_fn: Callable[[Any], int] | None) -> DataSettings:
    loading = config.loading
    return DataSettings(
        seed=config.seed,
        shuffle=config.shuffle,
        feed=loading.feed or "sharded",
        readers=loading.readers or 0,
        prefetch=loading.prefetch,
        num_shards=loading.num_shards,
        shuffle_buffer=loading.shuffle_buffer,
        weight_fn=weight_fn,
        collate_fn=loading.collate_fn,
        at_once=config.micro_batches_at_once(world.rank),
        resident=loading.resident,
    )


@dataclass(frozen=True)
class _Exchanges:
    """Makes the exchange of a run. shards: None if nothing is divided. residuals: what compression keeps."""

    config: RunConfig
    replica: Replica
    communicator: Communicator
    events: Events
    max_micro_batches: int
    shards: Shards | None
    residuals: Residuals

    def of_weights(self) -> GradientExchange:
        strategy = self.config.strategy
        assert isinstance(strategy, Averaging)
        if strategy.first_step == 0:
            return self._averaged(strategy)
        first = GradientsFirst(self.of_gradients(), partial(self._averaged, strategy), strategy.first_step, self.events)
        return cast("GradientExchange", first)  # forwards to one

    def of_gradients(self) -> GradientExchange:
        config = self.config
        is_alone = isinstance(self.communicator, SingleCommunicator)
        kind: Callable[..., MeanGradients] = MeanGradients
        if self.shards is not None:
            every_micro_batch = config.optimization.shard == "gradients"
            kind = partial(ShardedGradients, shards=self.shards, every_micro_batch=every_micro_batch)
        elif isinstance(config.strategy, Gradients) and not is_alone:
            kind = partial(CompressedGradients, compress=config.strategy.compress, seed=config.seed)
        elif is_alone and config.max_micro_batches(1) == 1 and not config.exact and config.precision != "fp16":
            return DirectGradients(self.replica.parameters)
        return self._mean(kind, self.communicator, self.max_micro_batches)

    def _averaged(self, strategy: Averaging) -> GradientExchange:
        replica, communicator, seed = self.replica, self.communicator, self.config.seed
        alone = SingleCommunicator(World(device=communicator.world.device))
        many = self._mean(MeanGradients, alone, self.config.max_micro_batches(1))
        one = None if self.config.precision == "fp16" else DirectGradients(replica.parameters)
        parameters, statistics = list(replica.parameters.values()), statistics_of(replica.model)
        return AveragedReplicas(
            strategy, many, one, parameters, statistics, communicator, self.events, seed, self.residuals
        )

    def _mean(
        self, kind: Callable[..., MeanGradients], communicator: Communicator, max_micro_batches: int
    ) -> MeanGradients:
        return kind(
            self.replica.parameters,
            communicator,
            Buffers(self.replica.model, communicator),
            max_micro_batches=max_micro_batches,
            exact=self.config.exact,
            overlap=self.config.runtime.overlap,
        )
