"""The leading worker's eye on the run: progress on the terminal, metrics, events and pictures in the run's folder."""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, Self, TextIO

from paceline.api.trainer import Trainer
from paceline.checkpoint.folders import latest
from paceline.cli.config import Project
from paceline.cli.config.schema import Logger as LoggerSettings
from paceline.cli.config.show import plain
from paceline.cli.logs.panels import load_runs, make_panels
from paceline.cli.logs.picture import check_output, draw, write
from paceline.cli.logs.runs import LogsError
from paceline.observe.best_effort import BestEffort, attempt, describe, warn
from paceline.observe.event_log import EventLog
from paceline.observe.loggers.base import Loggers
from paceline.observe.loggers.by_name import make_logger
from paceline.observe.metrics import MetricsWriter
from paceline.observe.progress import Progress
from paceline.observe.rates import RateMeter, Rates
from paceline.observe.run_files import RunFiles, note_total_steps, write_json
from paceline.run.control import ControlServer, end_at_once, socket_path
from paceline.run.step.loop import StepRecord

# Beyond so many workers their shares say little, and fill the lines of metrics.
MAX_WORKERS_LOGGED = 64
# Records are added up after so many steps at the latest: by then their numbers have long arrived from a GPU.
MAX_UNREAD_STEPS = 64


class Watch:
    """Rank 0's. A context manager: lines and files are closed at its end, however the run ended."""

    def __init__(
        self, trainer: Trainer, project: Project, files: RunFiles, terminal: str | None, *, quiet: bool
    ) -> None:
        settings = project.settings
        self._trainer = trainer
        self._files = files
        self._log_every = settings.trainer.log_every
        self._has_tokens = settings.data.weight is not None
        self._unread: deque[StepRecord] = deque()
        self._newest: StepRecord | None = None
        self._logged_step = 0
        self._meter = RateMeter(trainer.world.size)
        self._rates: Rates | None = None
        self._loss: tuple[float, int] | None = None
        self._origin: tuple[float, int] | None = None
        step = trainer.position.step
        self._total = total = total_steps(trainer, project)
        with ExitStack() as stack:
            stream = stack.enter_context(_opened(terminal))
            self._progress = stack.enter_context(Progress(total, start_step=step, stream=stream, quiet=quiet))
            self._metrics = BestEffort(files.metrics, lambda: MetricsWriter(files.metrics, step), MetricsWriter.close)
            stack.callback(self._metrics.close)
            self._events = EventLog(files.events)
            stack.callback(self._events.close)
            self._held = stack.pop_all()
        made = [_logger(each, project, files, step) for each in settings.loggers]
        self.loggers = Loggers([logger for logger in made if logger is not None])
        self._held.callback(self.loggers.close)
        trainer.listen(self._events.write)
        with attempt(files.status):
            note_total_steps(files, total)
        self._open_control()
        if trainer.resumed_from is not None:
            self.note(f"going on after step {step}, from {trainer.resumed_from}")

    def after_step(self, record: StepRecord) -> None:
        self._unread.append(record)
        self._newest = record
        self._origin = self._origin or (monotonic(), record.step)  # the first step takes longer than others
        is_shown, is_logged = self._progress.is_due(record.step), record.step % self._log_every == 0
        if is_shown or is_logged or record.step == 1:
            # Only now are numbers read, for which a GPU is waited for.
            self._take_steps(len(self._unread))
            if (loss := _known(record.loss)) is not None:
                self._loss = loss, record.step
        elif len(self._unread) >= MAX_UNREAD_STEPS:
            self._take_steps(MAX_UNREAD_STEPS // 2)
        if is_logged or record.step == 1:
            self._log(record)
        if is_shown:
            self._show(record)

    def after_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._metrics.use(lambda metrics: metrics.log(step, {"eval": dict(values)}))
        self.loggers.log(step, {"eval": dict(values)})
        self.note(f"step {step}  evaluation  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()))

    def note(self, text: str) -> None:
        self._progress.note(text)

    def finish(self, last_words: str | None) -> None:
        """The run is complete: its last step, where its time went, a picture, and what the project says about it."""
        if self._newest is not None and self._newest.step > self._logged_step:
            self._take_steps(len(self._unread))
            self._log(self._newest)
        report = asdict(self._trainer.report())
        with attempt(self._files.report):
            write_json(self._files.report, report)
        self._draw()
        if last_words is not None:
            self.note(last_words)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _take_steps(self, count: int) -> None:
        """Add up the oldest records."""
        for _ in range(count):
            record = self._unread.popleft()
            syncs = [timing.sync for timing in record.timings]
            tokens = record.weight if self._has_tokens else None
            self._meter.add(record.num_samples, record.shares, syncs, tokens)

    def _log(self, record: StepRecord) -> None:
        self._logged_step = record.step
        self._rates = rates = self._meter.take()
        loss = _known(record.loss)
        values: dict[str, Any] = {
            "epoch": record.epoch,
            **({} if loss is None else {"loss": loss}),
            "lr": record.lr,
            "samples_per_s": round(rates.samples_per_s, 2),
        }
        if record.grad_norm is not None:
            values["grad_norm"] = record.grad_norm
        if rates.tokens_per_s is not None:
            values["tokens_per_s"] = round(rates.tokens_per_s, 1)
        if 1 < len(rates.shares) <= MAX_WORKERS_LOGGED:
            values["shares"] = list(rates.shares)
            values["waiting"] = [round(part, 4) for part in rates.waiting]
        self._metrics.use(lambda metrics: metrics.log(record.step, values))
        self.loggers.log(record.step, values)

    def _show(self, record: StepRecord) -> None:
        self._rates = rates = self._rates or self._meter.take()
        self._progress.show(
            record.step,
            _known(record.loss),
            samples_per_s=rates.samples_per_s,
            tokens_per_s=rates.tokens_per_s,
            shares=record.shares,
            waiting=rates.waiting,
        )

    def _open_control(self) -> None:
        """Let `paceline runs` ask; a run that nobody can ask goes on."""
        try:
            control = ControlServer(
                socket_path(self._files.root), self._status, self._ask_to_save, self._ask_to_stop, self._abort
            )
        except Exception as error:
            self.note(f"`paceline runs` cannot reach this run: {describe(error)}")
        else:
            self._held.enter_context(control)

    # Called by the control's thread, which must not wait for a device: it tells what was read already.

    def _status(self) -> dict[str, Any]:
        newest, rates, position = self._newest, self._rates, self._trainer.position
        loss, loss_step = self._loss or (None, None)
        checkpoint = latest(self._files.checkpoints)
        return {
            "pid": os.getpid(),
            "step": position.step,
            "epoch": position.epoch,
            "total_steps": self._total,
            "loss": loss,
            "loss_step": loss_step,
            "samples_per_s": None if rates is None else rates.samples_per_s,
            "eta_s": self._left_s(position.step),
            "workers": self._trainer.world.size,
            "shares": [] if newest is None else newest.shares,
            "waiting": [] if rates is None else rates.waiting,
            "checkpoint": None if checkpoint is None else str(checkpoint.absolute()),
        }

    def _ask_to_save(self) -> dict[str, int]:
        step = self._trainer.position.step  # before: the save may follow at once
        self._trainer.request_save()
        return {"step": step}

    def _ask_to_stop(self) -> dict[str, int]:
        step = self._trainer.position.step
        self._trainer.request_stop()
        return {"step": step}

    def _abort(self) -> None:
        end_at_once(self._trainer.world.rank)

    def _left_s(self, step: int) -> float | None:
        if self._total is None or self._origin is None or step <= self._origin[1]:
            return None
        since_s, first = self._origin
        return (monotonic() - since_s) / (step - first) * (self._total - step)

    def _draw(self) -> None:
        path = self._files.plots / "training.png"
        try:
            check_output(path)
            panels = make_panels(load_runs([self._files]))
            write(draw(panels, self._files.root.name), path)
        except LogsError as error:
            self.note(f"no picture: {error}")
        except Exception as error:
            self.note(f"the picture cannot be written: {path}: {describe(error)}")


def total_steps(trainer: Trainer, project: Project) -> int | None:
    """Steps of the whole run; None where nobody knows."""
    settings = project.settings.trainer
    limits = [] if settings.max_steps is None else [settings.max_steps]
    if settings.epochs is not None and trainer.steps_per_epoch is not None:
        limits.append(settings.epochs * trainer.steps_per_epoch)
    return min(limits, default=None)


@contextmanager
def _opened(terminal: str | None) -> Iterator[TextIO]:
    """Where progress is shown: the terminal by its name if it can be opened, else this process's output."""
    try:
        file = None if terminal is None else Path(terminal).open("w")  # noqa: SIM115
    except OSError:
        file = None
    if file is None:
        yield sys.stdout
        return
    try:
        yield file
    finally:
        with suppress(OSError):  # the progress that it still holds cannot be written
            file.close()


def _logger(setting: Any, project: Project, files: RunFiles, step: int) -> Any:
    """None, after a warning, for one whose files or service cannot be reached. What is a mistake is an error."""
    name = setting if isinstance(setting, str) else getattr(setting, "name", setting)
    try:
        if isinstance(setting, str):
            return make_logger(setting, files, step, plain(project.settings))
        if isinstance(setting, LoggerSettings):
            return make_logger(setting.name, files, step, plain(project.settings), **(setting.arguments or {}))
        return setting.build()
    except OSError as error:
        warn(f"the logger {name} cannot be made and is left out; training goes on: {describe(error)}")
        return None


def _known(loss: float) -> float | None:
    """None for NaN: with averaging nobody knows the loss before the first meeting."""
    return None if math.isnan(loss) else loss
