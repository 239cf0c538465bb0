"""How much memory a worker needs for the state of a run, from the number of parameters and the settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

# The memory of exchanges where state is divided: so many buckets of so many elements are in flight.
NUM_SLOTS = 4
CHUNKS_PER_WORKER = 16
CHUNK_NUMEL = 1 << 19
GPU_CHUNK_NUMEL = 1 << 22


@dataclass(frozen=True)
class StateSize:
    """What the memory depends on.

    parameter_bytes: of one number of the weights. optimizer_bytes: of the optimizer's state for one parameter, 8 for
    Adam in float32. share: the part of the model that this worker updates, where state is divided. redundancy: workers
    that update each part. micro_batches: of this worker in a step. frozen: parameters that are not trained.
    """

    num_parameters: int
    parameter_bytes: int = 4
    optimizer_bytes: float = 8
    num_workers: int = 1
    micro_batches: int = 1
    exact: bool = False
    fp16: bool = False
    ema: bool = False
    shard: str | None = None
    share: float | None = None
    redundancy: int = 1
    chunk_numel: int = GPU_CHUNK_NUMEL
    frozen: int = 0
    master_weights: bool = False


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on one worker. gradients: of one micro-batch. activations: None if they are not known yet."""

    weights: int
    gradients: int
    sums: int
    optimizer: int
    exchange: int
    ema: int = 0
    activations: int | None = None

    @property
    def state(self) -> int:
        """What the workers divide with shard=: the sums of gradients, the optimizer's state, and buckets in flight."""
        return self.sums + self.optimizer + self.exchange

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.state + self.ema + (self.activations or 0)

    def with_activations(self, peak_bytes: int) -> MemoryReport:
        """peak_bytes: the most that was allocated in a step."""
        return replace(self, activations=max(peak_bytes - replace(self, activations=None).total, 0))

    def __str__(self) -> str:
        known = {name: value for name, value in asdict(self).items() if value is not None and (value or name != "ema")}
        parts = ", ".join(f"{name} {gigabytes(value)}" for name, value in known.items())
        unknown = "" if self.activations is not None else "; activations come on top"
        return f"{gigabytes(self.total)} per worker: {parts}{unknown}"


def memory_of(size: StateSize) -> MemoryReport:
    """The memory of one worker, without activations."""
    count, weight = size.num_parameters, size.parameter_bytes
    sum_bytes = 8 if size.exact and size.micro_batches * size.num_workers > 1 else max(weight, 4)
    is_divided = size.shard is not None and (size.num_workers > 1 or size.master_weights)
    master = 4 if size.master_weights and weight < 4 else 0
    gradient_bytes = 4 if master else weight
    per_sum = sum_bytes + (gradient_bytes if sum_bytes != gradient_bytes else 0)
    share, exchange, local = 1.0, 0, 0
    if is_divided:
        share = min(size.redundancy / size.num_workers, 1.0) if size.share is None else size.share
        chunk = chunk_numel(count, size.num_workers, size.chunk_numel)
        exchange = chunk * (NUM_SLOTS * sum_bytes + (weight if sum_bytes == 8 else 0))
        # A worker's own sums of several micro-batches, of what others own.
        others = 1.0 - share / size.redundancy
        local = round(others * count * sum_bytes) if size.shard == "optimizer" and size.micro_batches > 1 else 0
    elif size.num_workers == 1 and size.micro_batches == 1 and not (size.exact or size.fp16):
        per_sum = 0  # fp16's loss scaling needs the sums too
    return MemoryReport(
        weights=(count + size.frozen) * weight,
        gradients=count * weight,
        sums=round(share * count * per_sum) + local,
        optimizer=round(share * count * (size.optimizer_bytes + master)),
        exchange=exchange,
        ema=round(share * count * max(weight, 4)) if size.ema else 0,
    )


def chunk_numel(num_parameters: int, num_workers: int, at_most: int) -> int:
    """The elements of a chunk: few enough that small models too are divided about evenly."""
    return min(at_most, max(num_parameters // (CHUNKS_PER_WORKER * num_workers), 1))


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
