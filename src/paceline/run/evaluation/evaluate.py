"""Evaluation: every sample once, divided among all workers, with the same result on any number of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.core.generators import seed_device
from paceline.core.seeding import Purpose, derive_seed
from paceline.core.settings import check_value
from paceline.data.adopt import adopt_for_evaluation
from paceline.data.epochs import seeded_epoch
from paceline.data.feeds.sharded import Delivery, prefetcher_of, reader_of
from paceline.data.sources.base import Columns, Read
from paceline.plan.epoch import Steps
from paceline.plan.shares import ranges, shares
from paceline.run.evaluation.collect import gather

# The name of a result that is one number.
UNNAMED = ""

T = TypeVar("T")


class EvaluationData:
    """Data in micro-batches, in its own order. `mine`: the numbers of this worker's micro-batches, possibly none.

    micro_batch: defaults to the batch size of a DataLoader, else to `default_size`. readers: processes that read; a
    DataLoader has its own number of them.
    """

    def __init__(
        self,
        data: Any,
        communicator: Communicator,
        seed: int,
        default_size: int,
        micro_batch: int | None = None,
        collate_fn: Any = None,
        readers: int = 0,
    ) -> None:
        self._source, batch_size, own_readers = adopt_for_evaluation(data, collate_fn, seed)
        self._readers = readers if own_readers is None else own_readers
        check_value("micro_batch", micro_batch, int | None, least=1)
        size = micro_batch or batch_size or default_size
        steps = Steps(len(self._source), size, size)
        self._epoch = seeded_epoch(0, steps, len(self._source), seed=seed, shuffle=False)
        self._seed = seed
        self.communicator = communicator
        self.device = communicator.world.device
        self.mine = ranges(shares(steps.num_micro_batches, (1.0,) * communicator.world.size))[communicator.world.rank]

    @torch.no_grad()
    def visit(
        self,
        model: Any,
        numbers: range,
        handle: Callable[[Read, Any, int], T],
        weight_fn: Callable[[Any], int] | None,
        *,
        is_weighed: bool,
    ) -> list[T]:
        """The results of `handle(read, batch, weight)` for these micro-batches; the batch, on the device, may be None.

        The model is in evaluation mode. Random numbers are seeded per micro-batch; torch's generators are restored.
        is_weighed: the number of samples is not needed.
        """
        deliver = Delivery(self._source, self.device, weight_fn)
        handled = []
        with preserved_modes(model) as modules, torch.random.fork_rng([self.device] * (self.device.type == "cuda")):
            for module in modules:
                module.training = False
            with closing(self._reads(numbers, is_weighed=is_weighed)) as reads:
                for number, read in zip(numbers, reads, strict=True):
                    if read.batch is None and read.skipped:
                        raise ValueError(
                            f"all samples of the evaluation's micro-batch {number} are bad: {read.skipped[0].error}"
                        )
                    batch, weight = deliver(read)
                    seed_device(self.device, derive_seed(self._seed, Purpose.EVALUATION, number))
                    handled.append(handle(read, batch, weight))
        return handled

    def _reads(self, numbers: range, *, is_weighed: bool) -> Generator[Read]:
        """These micro-batches on the host, read ahead as in training."""
        read = reader_of(self._source, is_weighed=is_weighed)
        # Processes that only index tensors would cost time.
        num_readers = 0 if isinstance(self._source, Columns) else min(self._readers, len(numbers))
        prefetcher = prefetcher_of(self._source, read, num_readers, self.communicator.timeout_s)
        if prefetcher is None:
            yield from map(read, map(self._epoch.request, numbers))
            return
        with closing(prefetcher):
            for place, number in enumerate(numbers):
                prefetcher.expect(map(self._epoch.request, numbers[place:]))
                yield prefetcher.take(self._epoch.request(number))


@contextmanager
def preserved_modes(model: Any) -> Iterator[list[nn.Module]]:
    """The modules of a model. The end of the block restores their training modes."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    were_training = [module.training for module in modules]
    try:
        yield modules
    finally:
        for module, was_training in zip(modules, were_training, strict=True):
            module.training = was_training


def evaluate(
    model: Any, data: EvaluationData, eval_fn: Callable[[Any, Any], Any], weight_fn: Callable[[Any], int] | None
) -> float | dict[str, float]:
    """The mean of `eval_fn(model, batch)` over all samples, weighted like training.

    eval_fn returns a mean over its micro-batch: one number, or a dict of them. Every worker gets the results of all
    micro-batches, so that they are summed in the same order everywhere.
    """

    def result_of(_: Read, batch: Any, weight: int) -> tuple[int, dict[str, torch.Tensor]]:
        if batch is None:  # collate_fn returned no sample
            return 0, {}
        return weight, _as_scalars(eval_fn(model, batch), data.device)

    own = data.visit(model, data.mine, result_of, weight_fn, is_weighed=weight_fn is not None)
    zero = torch.zeros((), dtype=torch.float64, device=data.device)
    columns = {
        name: torch.stack([scalars.get(name, zero) for _, scalars in own]).cpu()
        for name in _common_names(scalars for _, scalars in own)
    }
    parts = gather((columns, [weight for weight, _ in own]), data.communicator)
    names = _common_names(columns for columns, _ in parts)
    if not names:
        raise ValueError("collate_fn left no sample of the data to evaluate: give data of which it keeps some")
    rows = [
        torch.stack([columns[name] for name in names], 1) if columns else torch.zeros(len(own_weights), len(names))
        for columns, own_weights in parts
    ]
    weights = torch.tensor([[weight] for _, own_weights in parts for weight in own_weights], dtype=torch.float64)
    # A mean with weight 0 may be 0/0.
    values = torch.where(weights > 0, torch.cat(rows), 0.0)
    means = ((values * weights).sum(0) / weights.sum()).tolist()
    return means[0] if names == [UNNAMED] else dict(zip(names, means, strict=True))


def is_number(value: Any) -> bool:
    """Whether this is one real number, or a tensor with one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def _as_scalars(result: Any, device: torch.device) -> dict[str, torch.Tensor]:
    named = result if isinstance(result, Mapping) and result else {UNNAMED: result}
    scalars = {}
    for name, value in named.items():
        if not is_number(value):
            shown = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(
                f"eval_fn returned {shown}{f' as {name!r}' if name else ''}: it must return one number, the mean over "
                "its micro-batch, or a dict of such numbers"
            )
        scalars[name] = torch.as_tensor(value, dtype=torch.float64, device=device).reshape(())
    return scalars


def _common_names(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names that all results have, except empty ones."""
    first, *others = [list(result) for result in results if result] or [[]]
    for names in others:
        if set(names) != set(first):
            raise ValueError(
                f"eval_fn returned {names} for one micro-batch and {first} for another: it must always return the same "
                "names"
            )
    return first
