"""An epoch whose loop was left by `break`.

A single worker may leave an epoch early. Several workers may not: the loop's body runs for different micro-batches on
each, so they would leave at different steps. That is an error on all of them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from paceline.core.errors import GenerationEnded
from paceline.sync.numbers import ABANDONED, abandoned_error

if TYPE_CHECKING:
    from paceline.run.step.loop import Loop


class LeftEpoch:
    """The epoch that this worker left last, until the next one begins."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._number: int | None = None
        self._is_settled = True

    def note(self, number: int) -> None:
        self._number, self._is_settled = number, False

    def settle(self) -> None:
        """Do the work that is due at the end of the epoch, or raise an error on all workers."""
        if self._is_settled:
            return
        self._is_settled = True
        loop = self._loop
        if loop.position.epoch == self._number and not loop.is_over and loop.world.size > 1:
            self._end_all()
        loop.complete_epoch()

    def begin_next(self) -> bool:
        """Advance to the next epoch. Returns False if the last one was not left early."""
        self.settle()
        loop, left = self._loop, self._number
        self._number = None
        if left != loop.position.epoch or loop.is_over:
            return False
        loop.next_epoch()
        loop.hooks.run_due()
        return True

    def _end_all(self) -> NoReturn:
        if self._loop.world.device.type == "cpu":  # others would read the request some steps later on a GPU
            with suppress(GenerationEnded):  # another worker was lost: the run ends in any case
                self._request_end()
        raise abandoned_error([self._loop.world.rank])

    def _request_end(self) -> None:
        """Take part in the others' steps without gradients until all workers have read that this one left."""
        loop, exchange = self._loop, self._loop.exchange
        is_under_way = loop.open.is_under_way
        if loop.open.has_micro_batch:
            exchange.end_micro_batch(None)
        loop.open.has_micro_batch, loop.open.is_last = False, True
        while loop.position.epoch == self._number and not loop.is_over:
            if not is_under_way:
                if loop.checkpointer.is_active:
                    loop.save_or_stop()
                mine = loop.begin_step()
                if mine is None:
                    break
                if mine:
                    exchange.begin_micro_batch(mine[-1], 0, is_last=True)
                    exchange.end_micro_batch(None)
            is_under_way = False
            if loop.exchange_step([], ABANDONED) is not None:  # raises the error as soon as all have read the request
                exchange.complete()
                loop.position = loop.open.step.after
        exchange.synchronize()
