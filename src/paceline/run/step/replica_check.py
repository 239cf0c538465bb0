"""Whether the replicas are still equal, looked at now and then."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.core.errors import PacelineError
from paceline.run.step.replica import Replica
from paceline.sync.step_numbers import Numbers

EVERY_STEPS = 100
# At most this part of the time goes into looking.
MAX_COST = 1e-3
# How far apart norms may be on unlike devices, whose optimizers round differently.
TOLERANCE = 1e-3
# What looking takes, estimated generously: per parameter, and per byte.
_PARAMETER_S, _BYTE_S = 20e-6, 0.5e-9


class ReplicaCheck:
    """Compares a digest of all weights: every hundred steps, more rarely where steps are short, and when asked to.

    All workers look after the same steps, since they decide by times that all of them have. `communicator`: None for
    replicas that may differ.
    """

    def __init__(self, replica: Replica, communicator: Communicator | None) -> None:
        self._replica = replica
        self._communicator = communicator
        self._num_steps = 0  # since the last look
        self._are_alike: bool | None = None  # the workers' devices; None: not asked yet

    def after_step(self, num_micro_batches: int, numbers: Numbers, step: int) -> None:
        """A step is completed; `num_micro_batches` of it were rank 0's."""
        self._num_steps += 1
        if self._num_steps % EVERY_STEPS or self._communicator is None:
            return
        if self._communicator.world.device.type == "cpu":
            # By a time that all workers have. Of a GPU it may not have arrived; there steps are long enough.
            timing = numbers.timings[0]
            step_s = num_micro_batches * timing.micro_batch + timing.sync + timing.rest
            if self._num_steps * step_s * MAX_COST < self._cost_s():
                return
        self.look(step)

    def look(self, step: int) -> None:
        """Raise on all workers if any has other weights than rank 0. All call it together."""
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
                f"{len(different)} of {world.size * len(own)} digests differ. Something changes weights on some "
                "workers only, such as code in the loop's body, which a worker without a share skips: do it in "
                "a hook of trainer.every. Or a device computes wrongly"
            )

    def _cost_s(self) -> float:
        parameters = self._replica.parameters.values()
        return sum(_PARAMETER_S + _BYTE_S * p.numel() * p.element_size() for p in parameters)


@torch.no_grad()
def digests(parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of each parameter, an integer that depends on all of its bits; the same wherever it is computed."""
    return torch.stack([_digest(parameter.detach()) for parameter in parameters.values()])


@torch.no_grad()
def norms(parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([parameter.detach().double().norm() for parameter in parameters.values()])


def _kind(device: torch.device) -> str:
    """Devices of one kind compute the same bits."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(words).sum(dtype=torch.int64)
