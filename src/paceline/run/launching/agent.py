"""The workers of one launch on this node: watched, ended together, and started again.

How the nodes of a launch find together and agree is `meeting.py`'s, what processes do is `processes.py`'s.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.core.rank_variables import STORE_VARIABLE
from paceline.run.launching import worker
from paceline.run.launching.failure import ASKED, DIED, Ending, first_ending, first_failure, read_reports
from paceline.run.launching.processes import Processes
from paceline.run.launching.rendezvous import Meeting, Outcome
from paceline.run.launching.worker import heard_file, output_file

GRACE_S = 3.0  # between asking a worker to end and killing it
# A worker leaves the others before it says why: so long they are left alone if all they know is that it has left.
CAUSE_WAIT_S = 2.0
POLL_S = 0.1


class Workers:
    """The workers of one launch on this node: started by `wait`, gone after the `with` block.

    `folder` is theirs and the launcher's; `worker.py` says what lies in it. Where one fails, on whichever node, all are
    started again, up to `max_restarts` times. `logs` is where their output goes, if not to the terminal.
    """

    def __init__(
        self,
        folder: Path,
        processes: Processes,
        meeting: Meeting,
        max_restarts: int = 0,
        logs: Path | None = None,
    ) -> None:
        self._shared = folder
        self._processes = processes
        self._meeting = meeting
        self._max_restarts = max_restarts
        self._logs = logs
        self._num_restarts = 0
        self._asked: set[int] = set()  # the ranks that were asked to end
        self._killed: set[int] = set()  # those of them that did not
        self._is_asked_to_end = False
        self._has_said = False  # how the current start ended here

    def __enter__(self) -> Workers:
        return self

    def wait(self) -> BaseException | None:
        """Return when all workers, of all nodes, have ended for good: the first failure of the last start, or None."""
        self._start()
        while not self._is_over():
            self._start_again()
        ending = self._meeting.first_ending()
        return None if ending is None else ending.error()

    def stop(self) -> BaseException | None:
        """Ask the workers to end, and wait for those that heard it and save: what they say, or None."""
        self._is_asked_to_end = True
        self._ask()
        deadline_s = time.monotonic() + GRACE_S
        while self._processes.pids and (running := self._processes.running):
            saving = [rank for rank in running if heard_file(self._folder, rank).exists()]
            if time.monotonic() > deadline_s and (self._somebody_failed() or self._reports().keys() >= set(saving)):
                break
            self._processes.listen(POLL_S)
        return first_failure(self._folder, self._meeting.num_workers_here, {}, self._killed, self._meeting.first_rank)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the workers if they still run, and let the other nodes know."""
        try:
            if self._processes.running and not self._is_asked_to_end:
                self.stop()
        finally:  # a second Ctrl-C comes straight here
            self._is_asked_to_end = True
            self._kill()
            self._say_how_it_ended()

    @property
    def _folder(self) -> Path:
        """Where the workers of the current start report."""
        return worker.start_folder(self._shared, self._num_restarts)

    def _start(self) -> None:
        first_rank = self._meeting.first_rank
        ranks = range(first_rank, first_rank + self._meeting.num_workers_here)
        self._asked, self._killed, self._has_said = set(), set(), False
        self._processes.start({rank: self._environment(rank, rank - first_rank) for rank in ranks})

    def _environment(self, rank: int, local_rank: int) -> dict[str, str]:
        """What torchrun tells its workers."""
        meeting = self._meeting
        values: dict[str, Any] = {
            "RANK": rank,
            "WORLD_SIZE": meeting.num_workers,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": meeting.num_workers_here,
            "GROUP_RANK": meeting.index,
            "GROUP_WORLD_SIZE": meeting.num_nodes,
            "ROLE_NAME": "worker",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": meeting.num_workers,
            "TORCHELASTIC_RUN_ID": meeting.run_id,
            "TORCHELASTIC_RESTART_COUNT": self._num_restarts,
            "TORCHELASTIC_MAX_RESTARTS": self._max_restarts,
        }
        if meeting.num_nodes == 1:
            values[STORE_VARIABLE] = self._folder / worker.STORE_FILE
        return {name: str(value) for name, value in values.items()} | meeting.environment

    def _is_over(self) -> bool:
        """Return when the current start has ended on all nodes: whether it was the last."""
        self._watch()
        self._say_how_it_ended()
        outcomes = self._meeting.outcomes()
        while outcomes is None and not self._meeting.lost():
            time.sleep(POLL_S)
            outcomes = self._meeting.outcomes()
        return outcomes is None or not all(outcome.may_start_again for outcome in outcomes)

    def _watch(self) -> None:
        """Return when this node's workers have ended: by themselves, or because one failed, here or elsewhere."""
        patience_s = deadline_s = float("inf")
        while self._processes.running:
            now_s = time.monotonic()
            if now_s > deadline_s:
                self._kill()
            elif deadline_s == float("inf") and (self._somebody_failed() or self._meeting.is_failing()):
                patience_s = min(patience_s, now_s + (CAUSE_WAIT_S if self._are_echoes() else 0.0))
                if now_s >= patience_s:
                    self._ask()
                    deadline_s = now_s + GRACE_S
            self._processes.listen(POLL_S)

    def _somebody_failed(self) -> bool:
        return bool(self._failures())

    def _are_echoes(self) -> bool:
        """Whether workers have failed, but only at exchanges: the cause may be about to show."""
        return self._failures() == {worker.COMMUNICATION}

    def _failures(self) -> set[str]:
        """How workers failed by now: those that have reported an error, and those that are gone without a report."""
        reports = self._reports()
        # Who was stopped waits for the others by itself.
        told = {report["outcome"] for report in reports.values()} - {worker.DONE, worker.STOPPED}
        return told if self._processes.exit_codes.keys() <= reports.keys() else told | {DIED}

    def _ask(self) -> None:
        self._asked |= set(self._processes.running)
        self._processes.terminate()

    def _kill(self) -> None:
        self._killed |= set(self._processes.running)
        self._processes.kill()

    def _start_again(self) -> None:
        self._processes.kill()  # what the ended workers left running
        ending = self._meeting.first_ending()
        reason = ending.text.partition("\n")[0] if ending is not None else "the workers ended"
        self._num_restarts += 1
        print(f"paceline: restart {self._num_restarts}: {reason}", file=sys.stderr)
        self._meeting.begin(self._num_restarts)
        self._start()

    # How a start ended

    def _reports(self) -> dict[int, dict[str, Any]]:
        return read_reports(self._folder, self._meeting.num_workers_here, self._meeting.first_rank)

    def _say_how_it_ended(self) -> None:
        if not self._has_said:
            self._meeting.say(self._outcome())
            self._has_said = True

    def _outcome(self) -> Outcome:
        """How this node's part of the start ended, for the others to know."""
        said = [report["outcome"] for report in self._reports().values()]
        if said == [worker.DONE] * self._meeting.num_workers_here:
            return Outcome(is_done=True)
        is_final = not {worker.STOPPED, worker.ABORTED, worker.NO_PROGRESS, worker.INTERRUPTED}.isdisjoint(said)
        has_another = self._num_restarts < self._max_restarts and not self._is_asked_to_end
        return Outcome(False, self._ending(), may_start_again=has_another and not is_final)

    def _ending(self) -> Ending | None:
        first_rank = self._meeting.first_rank
        exit_codes = {
            rank: exit_code
            for rank, exit_code in self._processes.exit_codes.items()
            if rank not in self._asked or exit_code != -signal.SIGTERM
        }
        ending = first_ending(self._folder, self._meeting.num_workers_here, exit_codes, self._killed, first_rank)
        if self._is_asked_to_end and (ending is None or ending.kind not in (worker.FAILED, DIED, worker.STOPPED)):
            return Ending(ASKED, first_rank, f"the command was ended on node {self._meeting.name}")
        where = "" if ending is None else self._where(ending.rank)
        return ending.add(where) if ending is not None and where else ending

    def _where(self, rank: int) -> str:
        """Where to look for more about a worker, as far as it is not plain."""
        node = f"rank {rank} ran on node {self._meeting.name}" if self._meeting.num_nodes > 1 else ""
        output = f"the output of rank {rank} is in {output_file(self._logs, rank, 'err')}" if self._logs else ""
        return "; ".join(filter(None, [node, output]))
