"""How an agent reads the exits of workers that it has asked to stop."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from paceline.run.launching.agent import Agent
from paceline.run.launching.worker_exit import ExitKind


class NoServer:
    """No worker was started."""

    pids: ClassVar[dict[int, int]] = {}
    running: ClassVar[list[int]] = []
    exit_codes: ClassVar[dict[int, int]] = {}

    def terminate(self, exclude: list[int]) -> None:
        assert not exclude

    def poll(self, timeout_s: float) -> None:
        pass


def test_a_signal_before_the_workers_are_started(tmp_path: Path) -> None:
    """On a host that was about to join others."""
    nodes = cast("Any", SimpleNamespace(num_restarts=0, has_others=True, num_nodes=2))
    assert Agent(tmp_path, cast("Any", NoServer()), nodes).stop() is None


ENDED, DIED = ExitKind.ENDED, ExitKind.DIED


@pytest.mark.parametrize(
    ("is_elastic", "exit_code", "kind"),
    [
        (False, -signal.SIGTERM, ENDED),
        (False, -signal.SIGKILL, ENDED),
        (True, -signal.SIGTERM, ENDED),
        (True, 3, ENDED),  # a handler of the user's
        (True, -signal.SIGKILL, DIED),  # the others save without it, or are too few
    ],
)
def test_a_worker_without_a_report_that_was_asked_to_stop(
    tmp_path: Path, is_elastic: bool, exit_code: int, kind: ExitKind
) -> None:
    agent = cast("Any", object.__new__(Agent))
    agent._launch_folder, agent._nodes = tmp_path, SimpleNamespace(num_restarts=0)
    agent._supervisor = object() if is_elastic else None
    agent._is_stopping, agent._sent = True, signal.SIGTERM
    assert agent._read_exit(1, exit_code).kind is kind
