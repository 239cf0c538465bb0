"""Checks during training: that the workers agree, that losses are finite, and that replicas stay equal.

A worker without a share in a step does not run the loop's body. If that code changes an optimizer, the set of trained
parameters or weights, replicas can become different without any error. So every exchange carries a digest of
hyper-parameters and trained parameters, and a digest of all weights is compared periodically.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.core.deferred import DeferredReader
from paceline.core.errors import MisuseError, NonFiniteError, PacelineError
from paceline.plan.shares import Plan, owner
from paceline.run.step.planner import GPU_LAG_STEPS
from paceline.run.step.replica import Number, Replica, plain_value
from paceline.sync.loss_scale import LossScale
from paceline.sync.numbers import LocalNumbers, Numbers

REPLICA_CHECK_STEPS = 100
# The largest fraction of the time to spend on comparisons.
MAX_COST = 1e-3
# With fp16: more than a loss scale needs to fall from 2**16 to its least value.
MAX_SKIPPED = 100
# Relative difference of norms that is allowed on different kinds of devices, which round differently.
TOLERANCE = 1e-3
# Estimated cost of a comparison, per parameter and per byte.
_PARAMETER_S, _BYTE_S = 20e-6, 0.5e-9


class Agreement:
    """Compares hyper-parameters and trained parameters of all workers, by a digest in each step's exchange."""

    def __init__(self, replica: Replica, communicator: Communicator) -> None:
        self._replica = replica
        self._communicator = communicator
        # All workers read a step's numbers after the same exchange: those that differ are explained together.
        lag = GPU_LAG_STEPS if communicator.world.device.type == "cuda" else 0
        self._reader = DeferredReader[Numbers](self._compare, lag)

    def check(self, numbers: Numbers, *, now: bool) -> None:
        """Raise on all workers if they differ. On a GPU some steps later, or `now`."""
        if self._communicator.world.size == 1 or isinstance(numbers, LocalNumbers):
            return
        self._reader.add(numbers)
        if now:
            self._reader.flush()

    def _compare(self, numbers: Numbers) -> None:
        digests = numbers.digests
        if digests.count(digests[0]) != len(digests):
            self._explain()

    def _explain(self) -> None:
        """Raise an error that names the difference. All workers have seen it and take part."""
        own = {"hyper-parameters": self._hyper_parameters(), "trained": list(self._replica.parameters)}
        everybody = [json.loads(text) for text in gather(json.dumps(own), self._communicator)]
        first = everybody[0]
        for rank, other in enumerate(everybody):
            if other["trained"] != first["trained"]:
                names = set(other["trained"]) ^ set(first["trained"])
                name = next((n for n in [*first["trained"], *other["trained"]] if n in names), first["trained"][0])
                here, elsewhere = (rank, 0) if name in other["trained"] else (0, rank)
                raise MisuseError(
                    f"parameter {name!r} is trained on rank {here} and not on rank {elsewhere}: a worker without a "
                    "share in a step skips the loop's body. Freeze, unfreeze and add parameters on all workers: in a "
                    "hook of trainer.every or trainer.every_epoch, or between epochs"
                )
            for field, value in first["hyper-parameters"].items():
                found = other["hyper-parameters"].get(field, "missing")
                if found != value:
                    raise MisuseError(
                        f"{field} is {found} on rank {rank} and {value} on rank 0: a worker without a share in a step "
                        "skips the loop's body. Give schedulers to the set-up (scheduler=), call trainer.set_lr, or "
                        "change hyper-parameters in a hook of trainer.every, which all workers reach"
                    )
        raise MisuseError("the workers' optimizers differ in number or type: every worker must build the same ones")

    def _hyper_parameters(self) -> dict[str, str]:
        groups = [(type(each).__name__, group) for each in self._replica.optimizers for group in each.param_groups]
        return {
            f"{key!r} in group {number} of {kind}": str(plain_value(value))
            for number, (kind, group) in enumerate(groups)
            for key, value in group.items()
            if key != "params"
        }


class FiniteWatch:
    """Raises `NonFiniteError` for a loss that is inf or NaN, in exact mode also for a gradient.

    On a CPU before the optimizer's step. On a GPU once the numbers have arrived: about a step later, or up to 32 steps
    later if CUDA graphs replay whole steps. `flush` waits for the rest.
    """

    def __init__(self) -> None:
        self._reader = DeferredReader(_raise_if_not_finite, is_ready=lambda step: step[2].has_arrived)
        self.flush = self._reader.flush

    def check(self, step: int, plan: Plan, numbers: Numbers) -> None:
        self._reader.add((step, plan, numbers))


def _raise_if_not_finite(of: tuple[int, Plan, Numbers]) -> None:
    step, plan, numbers = of
    found = numbers.non_finite()
    if found is None:
        return
    what, value, number = found
    rank = owner(plan, number)
    raise NonFiniteError(
        f"{what} is {value} at step {step}, micro-batch {number}, rank {rank}: check that micro-batch's data, lower "
        "the learning rate, or clip gradients",
        step=step,
        micro_batch=number,
        rank=rank,
    )


class UpdateCheck:
    """Decides whether a step's numbers allow its update. loss_scale: of fp16, which may overflow."""

    def __init__(self, loss_scale: LossScale | None) -> None:
        self._loss_scale = loss_scale
        self._watch = FiniteWatch()
        self.flush = self._watch.flush

    def allows_update(self, step: int, plan: Plan, numbers: Numbers, norm: Number | None) -> bool:
        """False if fp16 overflowed; without fp16 a non-finite number is an error. norm: of the gradient."""
        if self._loss_scale is not None:
            assert norm is not None
            self._loss_scale.update(
                is_loss_finite=all(map(math.isfinite, numbers.losses)), is_gradient_finite=math.isfinite(norm.item())
            )
            if self._loss_scale.num_skipped == MAX_SKIPPED:
                raise NonFiniteError(
                    f"{MAX_SKIPPED} steps in a row were skipped, up to step {step}, since a loss or a gradient was not "
                    "finite: this is no overflow of fp16 that a smaller loss scale avoids. Check the data, lower the "
                    "learning rate, or choose precision='bf16'",
                    step=step,
                )
            return not self._loss_scale.num_skipped
        self._watch.check(step, plan, numbers)
        if isinstance(norm, torch.Tensor) and norm.is_cpu and not math.isfinite(norm.item()):
            raise NonFiniteError(
                f"the gradient's norm is {norm.item()} at step {step} although every loss is finite: the weights are "
                f"those of step {step - 1}. Look for a division by zero or an overflow in the model's backward",
                step=step,
            )
        return True


class ReplicaCheck:
    """Compares a digest of all weights every 100 steps (less often if steps are short) and on request.

    Workers compare after the same steps, since they decide by exchanged times. communicator: None for replicas that may
    differ.
    """

    def __init__(self, replica: Replica, communicator: Communicator | None) -> None:
        self._replica = replica
        self._communicator = communicator
        self._num_steps = 0  # since the last comparison
        self._are_alike: bool | None = None  # whether all devices are of one kind; None: unknown

    def regroup(self) -> None:
        """The communicator has other workers now, which must all compare after the same steps."""
        self._num_steps, self._are_alike = 0, None

    def after_step(self, num_micro_batches: int, numbers: Numbers, step: int) -> None:
        """Called every REPLICA_CHECK_STEPS steps. num_micro_batches: of rank 0 in this step."""
        self._num_steps += REPLICA_CHECK_STEPS
        if self._communicator is None:
            return
        if self._communicator.world.device.type == "cpu":
            # By a time that all workers know. A GPU's may not have arrived, but its steps are long enough.
            timing = numbers.timings[0]
            step_s = num_micro_batches * timing.micro_batch + timing.sync + timing.rest
            if self._num_steps * step_s * MAX_COST < self._cost_s():
                return
        self.compare(step)

    def compare(self, step: int) -> None:
        """Raise on all workers if the weights of any differ from rank 0's. Called by all together."""
        if self._communicator is None or self._communicator.world.size == 1:
            return
        self._num_steps = 0
        world = self._communicator.world
        if self._are_alike is None:
            self._are_alike = len(set(gather(_kind(world.device), self._communicator))) == 1
        own = (digests if self._are_alike else norms)(self._replica.parameters)
        rows = torch.zeros(world.size, len(own), dtype=own.dtype, device=world.device)
        rows[world.rank] = own
        self._communicator.all_reduce(rows).wait()
        is_other = rows != rows[0] if self._are_alike else (rows - rows[0]).abs() > TOLERANCE * rows[0].abs()
        different = is_other.nonzero().tolist()
        if different:
            rank, index = different[0]
            name = list(self._replica.parameters)[index]
            raise PacelineError(
                f"after step {step} the weights of {name!r} on rank {rank} differ from rank 0's: "
                f"{len(different)} of {world.size * len(own)} digests differ. Some code changes weights on some "
                "workers only, such as code in the loop's body, which a worker without a share skips: move it to a "
                "hook of trainer.every. Or a device computes wrong results"
            )

    def _cost_s(self) -> float:
        parameters = self._replica.parameters.values()
        return sum(_PARAMETER_S + _BYTE_S * p.numel() * p.element_size() for p in parameters)


@torch.no_grad()
def digests(parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """By parameter: an integer that depends on all of its bits and not on the device."""
    return torch.stack([_digest(parameter.detach()) for parameter in parameters.values()])


@torch.no_grad()
def norms(parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([parameter.detach().double().norm() for parameter in parameters.values()])


def _kind(device: torch.device) -> str:
    """Devices of one kind compute identical results."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(words).sum(dtype=torch.int64)
