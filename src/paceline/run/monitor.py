"""Progress, metrics, events and plots of a run, written by rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from paceline.checkpoint.folders import latest
from paceline.checkpoint.policy import Decision
from paceline.core.events import Event
from paceline.observe.best_effort import BestEffort, attempt, describe
from paceline.observe.events import EventLog, event_text
from paceline.observe.formats import short_path
from paceline.observe.loggers import Loggers
from paceline.observe.metrics import SAMPLES, MetricsWriter, read_curves
from paceline.observe.progress import Progress
from paceline.observe.rates import Rates
from paceline.observe.run_files import RunFiles, note_total_steps, write_json
from paceline.run.control import ControlServer, exit_immediately, socket_path
from paceline.run.launching.output import show_output
from paceline.run.run import Run
from paceline.run.step.record import StepRecord
from paceline.run.unlogged_steps import UnloggedSteps, known

# With more workers, their shares are left out of the lines of metrics.
MAX_WORKERS_LOGGED = 64


@dataclass(frozen=True)
class MonitorSettings:
    """What is shown and recorded, and how often.

    has_tokens: weights are tokens. make_loggers: called with the run's files and the number of completed steps. plot:
    draws the run's metrics into a file; returns the reason if it cannot. is_resumed: the user requested to resume, with
    or without a checkpoint. live_file: see `Progress`.
    """

    total_steps: int | None
    log_every: int
    has_tokens: bool
    make_loggers: Callable[[RunFiles, int], Sequence[Any]]
    plot: Callable[[RunFiles, Path], str | None]
    quiet: bool = False
    is_resumed: bool = False
    live_file: Path | None = None

    def is_logged(self, step: int) -> bool:
        """Whether the step has a line of metrics."""
        return step % self.log_every == 0 or step == 1


class Monitor:
    """Shows and records a run. outputs: closes everything that the monitor opens."""

    def __init__(self, run: Run, settings: MonitorSettings, files: RunFiles, outputs: ExitStack) -> None:
        self._run = run
        self._settings = settings
        self._files = files
        self._steps = UnloggedSteps(run.world.size, has_tokens=settings.has_tokens)
        self._logged_step = 0
        self._rates: Rates | None = None
        self._loss: tuple[float, int] | None = None
        step, total = run.loop.position.step, settings.total_steps
        progress = Progress(total, start_step=step, quiet=settings.quiet, live_file=settings.live_file)
        self._progress = outputs.enter_context(progress)
        self._metrics = BestEffort(files.metrics, lambda: MetricsWriter(files.metrics, step), MetricsWriter.close)
        outputs.callback(self._metrics.close)
        events = outputs.enter_context(closing(EventLog(files.events)))
        self.loggers = outputs.enter_context(closing(Loggers(settings.make_loggers(files, step))))
        run.events.listen(events.write)
        with attempt(files.status):
            note_total_steps(files, total)
        save, stop = (
            partial(self._ask, partial(run.checkpointer.request, each)) for each in (Decision.SAVE, Decision.STOP)
        )
        abort = partial(exit_immediately, run.world.rank)
        try:
            control = ControlServer(socket_path(files.root), self._status, save, stop, abort, self._leave)
        except Exception as error:
            self.note(f"`paceline runs` cannot reach this run: {describe(error)}")
        else:
            outputs.enter_context(control)
        if (found := run.checkpointer.resumed_from) is not None:
            is_own = found.parent.resolve() == files.checkpoints.resolve()
            self.note(f"resumed after step {step}, from {found.name if is_own else short_path(found)}")
        elif settings.is_resumed:
            self.note(f"{files.root.name} has no checkpoint: it starts from step 0")

    def after_step(self, record: StepRecord) -> None:
        self._steps.add(record)
        is_shown, is_logged = self._progress.is_due(record.step), self._settings.is_logged(record.step)
        # Reading numbers waits for a GPU, so only if they are needed.
        if (is_shown or is_logged) and (loss := known(record.loss)) is not None:
            self._loss = loss, record.step
        if is_logged:
            self.log_newest()
        if is_shown:
            self._rates = rates = self._rates or self._steps.take_rates()
            self._progress.show(
                record.step,
                known(record.loss),
                samples_per_s=rates.samples_per_s,
                tokens_per_s=rates.tokens_per_s,
                shares=record.shares,
                waiting=rates.waiting,
            )

    def after_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step, {"eval": dict(values)})
        self.note(f"step {step}  evaluation  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()))

    def note(self, text: str) -> None:
        self._progress.note(text)

    def finish(self, result: str | None) -> None:
        """Write the last step, the time report, a plot, and the result of the project's `after`."""
        self.log_newest()
        if self._run.loop.last_record is not None:  # else nothing was left to do: keep the report of the start before
            report = asdict(self._run.loop.times.report())
            with attempt(self._files.report):
                write_json(self._files.report, report)
        self._draw()
        if result is not None:
            self.note(result)

    def log_newest(self) -> None:
        """Write a line of metrics for the steps since the last one, unless the newest step has one."""
        if (record := self._steps.newest) is None or record.step <= self._logged_step:
            return
        self._logged_step = record.step
        self._rates = rates = self._steps.take_rates()
        values: dict[str, Any] = {
            "epoch": record.epoch,
            "loss": known(record.loss),
            "lr": record.lr,
            "samples_per_s": round(rates.samples_per_s, 2),
            "grad_norm": record.grad_norm,
            "tokens_per_s": None if rates.tokens_per_s is None else round(rates.tokens_per_s, 1),
        }
        if 1 < len(rates.shares) <= MAX_WORKERS_LOGGED:
            values["shares"] = list(rates.shares)
            values["waiting"] = [round(part, 4) for part in rates.waiting]
        found = {name: value for name, value in values.items() if value is not None}
        self._write(record.step, found, self._steps.take_num_samples(), _lanes(rates))

    def take_over(self, steps: UnloggedSteps, evaluation: tuple[int, Mapping[str, float]] | None) -> None:
        """Continue for a lost worker: write what it did not write of the newest step.

        steps: the steps since the last line, as known to this worker. evaluation: the step and values of the last one.
        """
        curves = read_curves(self._files.metrics, (SAMPLES, "eval"))
        self._steps, self._logged_step = steps, max(curves.series(SAMPLES)[0], default=0)
        if steps.newest is not None and steps.newest.step <= self._logged_step:
            steps.clear()
        self.log_newest()
        if evaluation is not None:
            step, values = evaluation
            is_written = any(step in curve.points[0] for curve in curves.curves.values())
            if step == self._run.loop.position.step and not is_written:
                self.after_evaluation(step, values)

    def _write(
        self, step: int, values: dict[str, Any], num_samples: int = 0, lanes: Mapping[str, Any] | None = None
    ) -> None:
        """lanes: for the metrics only; loggers would show each number as a curve."""
        line, begin = {**values, **(lanes or {})}, perf_counter()
        self._metrics.use(lambda metrics: metrics.log(step, line, num_samples))
        self.loggers.log(step, values)
        self._run.timeline.took("logging", begin)

    # Called in the control server's thread, which must not wait for a device: it uses only numbers on the host.

    def _status(self) -> dict[str, Any]:
        newest, rates, position = self._steps.newest, self._rates, self._run.loop.position
        loss, loss_step = self._loss or (None, None)
        checkpoint = latest(self._files.checkpoints)
        return {
            "pid": os.getpid(),
            "step": position.step,
            "epoch": position.epoch,
            "total_steps": self._settings.total_steps,
            "loss": loss,
            "loss_step": loss_step,
            "samples_per_s": None if rates is None else rates.samples_per_s,
            "eta_s": self._progress.left_s(position.step),
            "workers": self._run.world.size,
            "shares": [] if newest is None else newest.shares,
            "waiting": [] if rates is None else rates.waiting,
            "checkpoint": None if checkpoint is None else str(checkpoint.absolute()),
        }

    def _ask(self, request: Callable[[], object]) -> dict[str, int]:
        step = self._run.loop.position.step  # before the request, which may be served immediately
        request()
        return {"step": step}

    def _leave(self, rank: int) -> dict[str, int]:
        return self._ask(lambda: self._run.request_leave(rank))

    def _draw(self) -> None:
        path, begin = self._files.plots / "training.png", perf_counter()
        try:
            if (reason := self._settings.plot(self._files, path)) is not None:
                self.note(f"no plot: {reason}")
        except Exception as error:
            self.note(f"cannot write the plot {path}: {describe(error)}")
        finally:
            self._run.timeline.took("plotting", begin)


class MainMonitor:
    """The monitor of rank 0. If that worker is lost, the next rank 0 continues with its own monitor.

    Every worker has one, which follows the steps if workers may be lost. `make` is called when a worker becomes rank 0.
    """

    def __init__(self, run: Run, settings: MonitorSettings, make: Callable[[], Monitor]) -> None:
        self._run = run
        self._settings = settings
        self._make = make
        self._steps = UnloggedSteps(run.world.size, has_tokens=settings.has_tokens)  # while another is rank 0
        self._evaluation: tuple[int, Mapping[str, float]] | None = None
        self._loggers_state: dict[str, Any] = {}
        self._monitor = make() if run.world.is_main else None
        if self._monitor is not None or run.rejoining is not None:
            run.loop.hooks.every(1, self.after_step)
        run.events.listen(self._hear)

    def after_step(self, record: StepRecord) -> None:
        if self._monitor is not None:
            self._monitor.after_step(record)
            return
        # Rank 0 has written the line of the previous step, since it has completed this one.
        if self._steps.newest is not None and self._settings.is_logged(self._steps.newest.step):
            self._steps.clear()
        self._steps.add(record)

    def after_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._evaluation = step, values
        if self._monitor is not None:
            self._monitor.after_evaluation(step, values)

    def note(self, text: str) -> None:
        if self._monitor is not None:
            self._monitor.note(text)

    def finish(self, result: Callable[[], str | None] = lambda: None) -> None:
        """result: called on rank 0."""
        if self._monitor is not None:
            self._monitor.finish(result())

    def state_dict(self) -> dict[str, Any]:
        """The state of the loggers."""
        return self._loggers_state if self._monitor is None else self._monitor.loggers.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loggers_state = state
        if self._monitor is not None:
            self._monitor.loggers.load_state_dict(state)

    def _hear(self, event: Event) -> None:
        if event.name != "world":
            return
        # A line ends with every change: it has one number per worker, and workers that joined know no earlier steps.
        if self._monitor is not None:
            self._monitor.log_newest()
        elif self._run.world.is_main:
            with attempt("the output of rank 0"):
                show_output()
            with attempt("the record of the run"):  # again at the next change
                self._monitor = self._make()  # its event log also receives this event
                self._monitor.loggers.load_state_dict(self._loggers_state)
                self._monitor.take_over(self._steps, self._evaluation)
        else:
            self._steps.clear()
        self.note(event_text(event.name, event.details))


def _lanes(rates: Rates) -> dict[str, Any]:
    """Where the workers' time went, for a line of metrics."""
    if not rates.lanes or len(rates.shares) > MAX_WORKERS_LOGGED:
        return {}
    lanes = {name: [round(part, 4) for part in parts] for name, parts in rates.lanes.items()}
    efficiency = None if rates.efficiency is None else round(rates.efficiency, 4)
    return {"lanes": lanes, "speeds": [float(f"{speed:.4g}") for speed in rates.speeds], "efficiency": efficiency}
