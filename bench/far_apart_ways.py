"""The ways in which workers far apart may train together: torch's own, torchft's and ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from bench.far_apart import Task
from bench.namespaces import ADDRESSES
from paceline.plan.slow_link import EXCHANGE, STEPS_IN_FLIGHT

if TYPE_CHECKING:
    from paceline import StepRecord, Trainer

OVERHEAD_TARGET = 0.1
POWER_SGD_RANK = 4
# The timed runs go several times over the samples in one epoch: at its end replicas would meet out of turn.
SPEED_REPEATS = 16
ENDLESS = 1_000_000

NO_TALK, NO_TALK_OURS = "no talk", "no talk, paceline"
DDP, FP16, POWER_SGD = "torch DDP", "DDP, fp16 hook", "DDP, PowerSGD"
POST_LOCAL, DILOCO = "torch post-local SGD", "torchft DiLoCo"
GRADIENTS, CADENCE = "gradients", "cadence"
GRADIENTS_INT8, GRADIENTS_SPARSE = "gradients, int8", "gradients, sparse"
AVERAGING, INT8, SPARSE = "averaging", "averaging, int8", "averaging, sparse"
SLOW_LINK = "slow link"

PEERS = (DDP, FP16, POWER_SGD, POST_LOCAL, DILOCO)
IN_EVERY_STEP = (DDP, FP16, POWER_SGD, GRADIENTS, GRADIENTS_INT8, GRADIENTS_SPARSE)
STREAMING = {INT8: "int8", SPARSE: "sparse"}
# They measure the link.
CHOOSING = (CADENCE, SLOW_LINK)
WAYS = (
    NO_TALK, NO_TALK_OURS, *PEERS, GRADIENTS, GRADIENTS_INT8, GRADIENTS_SPARSE, CADENCE, AVERAGING, *STREAMING,
    SLOW_LINK,
)  # fmt: skip


def diloco_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The outer optimizer that DiLoCo recommends."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


# Of torch and torchft


def bare(task: Task, name: str, model: nn.Module, tokens: Tensor) -> Iterator[None]:
    """Once over this worker's part of the samples, the same that it has in our runs; yields after each step."""
    from paceline.plan.epoch import EpochOrder

    order = torch.from_numpy(EpochOrder(len(tokens), seed=task.seed, epoch=0).indices(0, len(tokens)))
    with ExitStack() as stack:
        trained, optimizer = _peer(task, name, model, stack)
        for mine in order.split(task.micro_batch)[distributed.get_rank() :: task.num_hosts]:
            optimizer.zero_grad(set_to_none=True)
            trained(tokens[mine]).backward()
            optimizer.step()
            yield


def _peer(task: Task, name: str, model: nn.Module, stack: ExitStack) -> tuple[nn.Module, Any]:
    """What is trained in place of the model, and the optimizer."""
    if name == NO_TALK:
        return model, task.make_optimizer(model.parameters())
    if name == DILOCO:
        return model, _diloco(task, model, stack)
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    # One bucket for PowerSGD: with several, a run over Gloo ended with mismatched collectives, presumably because it
    # chains them in callbacks, whose order may differ between workers.
    one_bucket = {"bucket_cap_mb": 1024} if name == POWER_SGD else {"gradient_as_bucket_view": True}
    ddp = DistributedDataParallel(model, static_graph=name == DDP, **one_bucket)
    optimizer = task.make_optimizer(ddp.parameters())
    if name == FP16:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == POWER_SGD:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name == POST_LOCAL:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        local = post_localSGD_hook.PostLocalSGDState(None, distributed.new_subgroups(1)[0], start_localSGD_iter=0)
        ddp.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        return ddp, PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=task.every, warmup_steps=0))
    return ddp, optimizer


def _diloco(task: Task, model: nn.Module, stack: ExitStack) -> torch.optim.Optimizer:
    """torchft's streaming DiLoCo in fp32, which is what it has for Gloo; two fragments, as it cuts between modules."""
    from datetime import timedelta

    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank, first = distributed.get_rank(), os.environ["MASTER_ADDR"]
    host = ADDRESSES[rank] if first in ADDRESSES else first
    ports = [0]
    if rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=task.num_hosts)
        stack.callback(lighthouse.shutdown)
        ports = [int(lighthouse.address().rpartition(":")[2])]
    distributed.broadcast_object_list(ports)
    store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    optimizer = task.make_optimizer(model.parameters())
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        min_replica_size=task.num_hosts,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        use_async_quorum=False,
        init_sync=False,  # its transport of states uses the machine's name, which hosts in namespaces cannot reach
        replica_id=f"bench_{rank}",
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{first}:{ports[0]}",
        timeout=timedelta(seconds=120),
        hostname=host,
    )
    stack.callback(lambda: store)  # which must live as long as the manager
    stack.callback(manager.shutdown)
    stack.callback(distributed.barrier)
    parts = [nn.ModuleList(part) for part in _halves(model)]
    outer = [diloco_optimizer(part.parameters()) for part in parts]
    stack.enter_context(
        DiLoCo(
            manager, parts, optimizer, outer, sync_every=task.every, pin_memory=False,
            fragment_sync_delay=task.every // 2 - 1,
        )
    )  # fmt: skip
    return optimizer


def _halves(model: nn.Module) -> list[list[nn.Module]]:
    nested = (nn.Sequential, nn.ModuleList)
    children = [each for child in model.children() for each in (child if isinstance(child, nested) else [child])]
    return [children[: len(children) // 2], children[len(children) // 2 :]]


@torch.no_grad()
def _average(model: nn.Module) -> None:
    """Give all workers the mean of their models: with local steps they have different ones after the last step."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            distributed.all_reduce(tensor)
            tensor.div_(distributed.get_world_size())


# Ours


def trainer_of(task: Task, name: str, tokens: Tensor, device: str = "cpu") -> Trainer:
    import paceline as pl
    from paceline.sync.averaging.settings import nesterov

    streaming = partial(pl.Averaging, overlap=True, outer=nesterov)
    strategies: dict[str, Callable[[], Any]] = {
        GRADIENTS: lambda: "gradients",
        GRADIENTS_INT8: lambda: pl.Gradients(compress="int8"),
        GRADIENTS_SPARSE: lambda: pl.Gradients(compress="sparse"),
        CADENCE: lambda: pl.Cadence(overhead_target=OVERHEAD_TARGET),
        NO_TALK_OURS: lambda: pl.Averaging(every=ENDLESS, divergence_threshold=None),
        AVERAGING: lambda: pl.Averaging(every=task.every),
        SLOW_LINK: lambda: "slow link",
        **{
            way: partial(
                streaming, every=task.every, fragments=max(1, task.every // STEPS_IN_FLIGHT), compress=compress
            )
            for way, compress in STREAMING.items()
        },
    }
    equal = pl.Balancing(shares="equal")
    division: dict[str, Any] = {} if name == CADENCE else {"global_batch": task.global_batch, "balancing": equal}
    return pl.Trainer.setup(
        task.make_model,
        task.make_optimizer,
        data=tokens,
        micro_batch=task.micro_batch,
        strategy=strategies[name](),
        seed=task.seed,
        device=None if device == "cuda" else device,
        runtime=pl.Runtime(threads=1, quiet=True, capture="off", backend="gloo" if device == "cuda" else None),
        **division,
    )


def steps_of(trainer: Trainer, num_epochs: int) -> Iterator[StepRecord]:
    for epoch in trainer.epochs(num_epochs):
        for batch in epoch:
            trainer.backward(trainer.model(batch))
            if record := trainer.step():
                yield record


# All of them


def interval_of(task: Task, name: str) -> int:
    """Steps from one exchange to the next."""
    if name == SLOW_LINK:
        return EXCHANGE.every // EXCHANGE.fragments
    if name in STREAMING:
        return min(task.every, STEPS_IN_FLIGHT)
    return {DILOCO: task.every // 2}.get(name, 1 if name in (*IN_EVERY_STEP, CADENCE, NO_TALK) else task.every)


def ring_bytes_per_step(task: Task, name: str) -> float:
    """That a host sends when all workers sum by a ring; 0 where it is little or not known beforehand."""
    bits = {FP16: 16, GRADIENTS_INT8: 8}.get(
        name, 32 if name in (DDP, GRADIENTS, CADENCE, POST_LOCAL, AVERAGING) else 16 if name == DILOCO else 0
    )
    ring = 2 * (task.num_hosts - 1) / task.num_hosts
    return ring * bits / 8 * task.num_parameters / interval_of(task, name)


def timed_loop(task: Task, name: str, see: Callable[[Any], object]) -> Iterator[int]:
    """Trains on and on. Yields after each step the samples it took: of all workers, unless they never talk.

    `see` is called with the record of every step and with the events, where there are any.
    """
    tokens = task.training_tokens().repeat(SPEED_REPEATS, 1)
    if name in (NO_TALK, *PEERS):
        for _ in bare(task, name, task.make_model(), tokens):
            yield task.micro_batch if name == NO_TALK else task.global_batch
        return
    with trainer_of(task, name, tokens) as trainer:
        trainer.listen(see)
        for record in steps_of(trainer, ENDLESS):
            see(record)
            yield sum(record.shares) * task.micro_batch


def final_loss(task: Task, name: str, device: str) -> float:
    """The loss on samples held out after one pass over the training samples.

    Whoever trains together is evaluated on the mean of all replicas.
    """
    tokens = task.training_tokens()
    if name in (NO_TALK, *PEERS):
        model = task.make_model().to(device)
        for _ in bare(task, name, model, tokens.to(device)):
            pass
        if name in (POST_LOCAL, DILOCO):
            _average(model)
        return task.loss_of(model.to("cpu"))
    with trainer_of(task, name, tokens, device) as trainer:
        for _ in steps_of(trainer, num_epochs=1):
            pass
        loss = trainer.evaluate(task.held_out_tokens(), lambda model, batch: model(batch))
        assert isinstance(loss, float)
        return loss


def sent_bytes() -> int:
    """By the interfaces of this host so far, headers included, except to itself."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line]
    return sum(int(counts.split()[8]) for name, counts in lines if name.strip() != "lo")


def missing_torchft() -> str | None:
    from importlib.util import find_spec

    return None if find_spec("torchft") else "torchft is not installed"
