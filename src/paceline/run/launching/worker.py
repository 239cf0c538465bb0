"""One worker process, from its beginning in `fork_server.py` to its end; the environment tells its rank.

It prints nothing of its own: how it ended goes into the launch's folder, where the launcher reads it.

What lies in that folder: `start.json`, `call.pkl` and `secret` from the launcher; from rank 0 `result.pkl`; and in
`start-N` for the group's N-th start `store`, where the workers of one host find each other, and from the worker of rank
R `pid-R` (it is up and answers STACK_SIGNAL), `stack-R` (its Python stack when asked or crashed), `heard-R` (it was
told to end and needs a moment to save), `report-R.json` (how it ended).
With several nodes each has a folder of its own, with what its own workers say.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import json
import linecache
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from paceline.core.private_folder import why_not_private
from paceline.run.launching import fork_server

START_FILE = "start.json"
CALL_FILE = "call.pkl"
RESULT_FILE = "result.pkl"
STORE_FILE = "store"
SECRET_FILE = "secret"
STACK_SIGNAL = signal.SIGUSR1
STACK_WAIT_S = 0.5
# How long a worker that was stopped waits for the others to be done too: its end makes the agent end them.
STOPPED_WAIT_S = 30.0
LAUNCHING_FILES = (__file__, fork_server.__file__, "<frozen runpy>")  # whose frames lie above the user's

# How a worker ended, in its report.
DONE = "done"
FAILED = "failed"
COMMUNICATION = "communication"  # an exchange failed: mostly the echo of another worker's end
INTERRUPTED = "interrupted"
STOPPED = "stopped"  # it was asked to stop, and did after saving
NO_PROGRESS = "no progress"  # since the last restart: another one would gain nothing
ABORTED = "aborted"  # it was told to end at once, and not to start again

# EX_TEMPFAIL of sysexits.h: nothing is wrong, and running the same command again goes on.
STOPPED_EXIT_CODE = 75

# What a worker writes to its standard streams, where the user wants it in files.
OUTPUT_NAMES = ("out", "err")

# Names the file by which a worker tells its launcher that it has heard a signal and needs a moment.
HEARD_VARIABLE = "PACELINE_HEARD_FILE"


def start_folder(folder: Path, num_restarts: int) -> Path:
    return folder / f"start-{num_restarts}"


def heard_file(folder: Path, rank: int) -> Path:
    return folder / f"heard-{rank}"


def pid_file(folder: Path, rank: int) -> Path:
    return folder / f"pid-{rank}"


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"


def report_file(folder: Path, rank: int) -> Path:
    return folder / f"report-{rank}.json"


def output_file(folder: Path, rank: int, name: str) -> Path:
    return folder / f"rank-{rank}.{name}"


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the whole text or no file."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(text)
    unfinished.replace(path)


def load(path: Path) -> Any:
    """What `payload.py` saved. The launch made the folder, for itself alone: no pickle from elsewhere is loaded."""
    if reason := why_not_private(path.parent):
        raise PermissionError(f"{path} is not loaded: {path.parent} is not a private folder of this user: {reason}")
    with path.open("rb") as file:
        return pickle.load(file)


def user_traceback(error: BaseException, *also_launching: str) -> str:
    """The traceback as python would print it had it started the user's code itself."""
    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename in (*LAUNCHING_FILES, *also_launching):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))


def main(shared: Path, start: dict[str, Any]) -> NoReturn:
    """Do what `start` says, in the folder `shared` by all workers of this node, and end the process."""
    rank, num_restarts, ranks_here = _read_environment()
    if start["logs"] is not None:
        _write_to_files(Path(start["logs"]), rank, num_restarts)
    folder = start_folder(shared, num_restarts)
    folder.mkdir(exist_ok=True)
    _answer_stack_requests(folder, rank)
    os.environ[HEARD_VARIABLE] = str(heard_file(folder, rank))
    try:
        _take_over(start)
        _work(start, shared, rank)
        _finish_like_python()
        report: dict[str, Any] = {"outcome": DONE}
    except BaseException as error:
        report = _describe(error, folder, rank, ranks_here)
    write_atomically(report_file(folder, rank), json.dumps(report))
    if report["outcome"] == STOPPED:
        _wait_for_peers(folder, ranks_here)
    _leave({DONE: 0, STOPPED: STOPPED_EXIT_CODE}.get(report["outcome"], 1))


def _read_environment() -> tuple[int, int, range]:
    """This worker's rank, how often the workers were restarted, and the ranks of all workers of this node."""
    rank, local_rank, local_size, num_restarts = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    return rank, num_restarts, range(rank - local_rank, rank - local_rank + local_size)


def _write_to_files(folder: Path, rank: int, num_restarts: int) -> None:
    """Let both streams, also of native code and of child processes, end in files: appended, never overwritten."""
    for stream, name in zip((sys.stdout, sys.stderr), OUTPUT_NAMES, strict=True):
        file = os.open(output_file(folder, rank, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if name == "err" and os.fstat(file).st_size > 0:
            os.write(file, f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')}: start {num_restarts + 1}\n".encode())
        stream.flush()
        os.dup2(file, stream.fileno())
        os.close(file)
        # Line by line: a crash leaves all lines before it.
        text = io.TextIOWrapper(
            io.BufferedWriter(_Output(stream.fileno())), "utf-8", "backslashreplace", line_buffering=True
        )
        setattr(sys, "stdout" if name == "out" else "stderr", text)


class _Output(io.FileIO):
    """A worker's output file. On a full disk output is lost; a print must not end the run."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _answer_stack_requests(folder: Path, rank: int) -> None:
    stack = stack_file(folder, rank).open("w")  # stays open: faulthandler writes to it until the end
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(STACK_SIGNAL, stack, all_threads=False)
    write_atomically(pid_file(folder, rank), str(os.getpid()))


def _take_over(start: dict[str, Any]) -> None:
    """Look like the launcher's process to the user's code."""
    sys.argv[:] = start["argv"]
    for name, lines in start["sources"].items():  # of notebook cells: tracebacks show their lines
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _work(start: dict[str, Any], folder: Path, rank: int) -> None:
    result = None
    try:
        if start["script"] is not None:
            runpy.run_path(start["script"], run_name="__main__")
        else:
            fn, args, kwargs = load(folder / CALL_FILE)
            result = fn(*args, **kwargs)
    except SystemExit as exit_request:
        if exit_request.code not in (None, 0):
            raise
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    if rank == 0 and start["script"] is None:
        from paceline.run.launching.payload import save_result

        save_result(folder / RESULT_FILE, result)


def _finish_like_python() -> None:
    """Wait for the user's threads and run exit handlers: after this nothing of theirs is left to do."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _describe(error: BaseException, folder: Path, rank: int, ranks_here: range) -> dict[str, Any]:
    report = {
        "outcome": FAILED,
        "time_s": time.monotonic(),
        "summary": _summary(error),
        "traceback": user_traceback(error),
        "peers": {},
    }
    # Errors that nobody imported cannot have been raised, so there is nothing to import here.
    errors = sys.modules.get("paceline.core.errors")
    recovery = sys.modules.get("paceline.run.saving.resuming")
    stopping = sys.modules.get("paceline.run.saving.stopping")
    if isinstance(error, KeyboardInterrupt):
        report["outcome"] = INTERRUPTED
    elif stopping is not None and isinstance(error, stopping.Stopped):
        report |= {"outcome": STOPPED, "step": error.step}
    elif recovery is not None and isinstance(error, recovery.NoProgressError):
        report["outcome"] = NO_PROGRESS
    elif errors is not None and isinstance(error, errors.CommunicationError):
        report["outcome"] = COMMUNICATION
        if isinstance(error, errors.CommunicationTimeout):
            report["peers"] = _stacks_of_peers(folder, rank, ranks_here)
    return report


def _summary(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _stacks_of_peers(folder: Path, rank: int, ranks_here: range) -> dict[int, str]:
    """Where the node's workers that are still running stand; empty text for one that does not answer."""
    running = [peer for peer in ranks_here if peer != rank and not report_file(folder, peer).exists()]
    for peer in running:
        try:
            os.kill(int(pid_file(folder, peer).read_text()), STACK_SIGNAL)
        except (FileNotFoundError, ProcessLookupError):
            continue  # not up yet, or gone
    stacks: dict[int, str] = {}
    deadline = time.monotonic() + STACK_WAIT_S
    while time.monotonic() < deadline:
        seen = {peer: _read_if_there(stack_file(folder, peer)) for peer in running}
        if seen == stacks and all(seen.values()):  # complete: unchanged since the last look
            break
        stacks = seen
        time.sleep(0.05)
    return stacks


def _wait_for_peers(folder: Path, ranks_here: range) -> None:
    deadline = time.monotonic() + STOPPED_WAIT_S
    while time.monotonic() < deadline:
        if all(report_file(folder, peer).exists() for peer in ranks_here):
            return
        time.sleep(0.05)


def _read_if_there(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _leave(code: int) -> NoReturn:
    """End without the interpreter's shutdown, in which native threads of a broken world hang or abort."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed: nobody reads it
    os._exit(code)
