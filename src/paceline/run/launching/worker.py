"""The main function of a worker process, which `fork_server.py` forks. Its environment has its rank.

It prints nothing itself: it writes how it ended to the folder of the launch, where its agent reads it.

That folder contains `start.json`, `call.pkl` and `secret` from the launcher, `result.pkl` from rank 0, and for the N-th
start of the workers a folder `start-N` with `store`, the rendezvous of the workers of one host, and for each rank R
`stack-R` (process id, then Python stacks on STACK_SIGNAL and after a crash), `heard-R` (the worker has received SIGTERM
and is saving), `report-R` (how it ended), and `reserved`, space for reports. If workers may change during a start, its
folder also has `board` and `generation` (see `run.membership`), and a store per generation. Each node has its own
folder.
"""

from __future__ import annotations

import atexit
import faulthandler
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

from paceline.core.errors import CommunicationTimeout
from paceline.core.private_folder import why_not_private
from paceline.run.launching.output import redirect_output
from paceline.run.launching.worker_exit import ExitKind, WorkerExit, is_own, read_stack, worker_file

START_FILE = "start.json"
CALL_FILE = "call.pkl"
RESULT_FILE = "result.pkl"
STORE_FOLDER = "store"
SECRET_FILE = "secret"
# Files in the folder of a start. The agent ends the workers and has printed why:
ANNOUNCED_FILE = "announced"
# On a signal, a worker finishes its step and saves:
STOPPABLE_FILE = "stoppable"
STACK_SIGNAL = signal.SIGUSR1
STACK_WAIT_S = 0.5

# EX_TEMPFAIL of sysexits.h: no error; the same command continues the run.
STOPPED_EXIT_CODE = 75

# Names the file that a worker creates when it has received SIGTERM and is saving.
HEARD_VARIABLE = "PACELINE_HEARD_FILE"

_KINDS = (
    ("builtins", "KeyboardInterrupt", ExitKind.INTERRUPTED),
    ("paceline.core.errors", "CommunicationError", ExitKind.COMMUNICATION),
    ("paceline.run.saving.stopping", "Stopped", ExitKind.STOPPED),
    ("paceline.run.membership.communicator", "LeftRun", ExitKind.LEFT),
    ("paceline.run.saving.resuming", "NoProgressError", ExitKind.NO_PROGRESS),
)


def start_folder(folder: Path, num_restarts: int) -> Path:
    return folder / f"start-{num_restarts}"


def load(path: Path) -> Any:
    """Load a file of `payload.py`, from the launch's private folder only: no other pickle is ever loaded."""
    if reason := why_not_private(path.parent):
        raise PermissionError(f"{path} is not loaded: {path.parent} is not a private folder of this user: {reason}")
    with path.open("rb") as file:
        return pickle.load(file)


def user_traceback(error: BaseException, *also_own: str) -> str:
    """The traceback without Paceline's frames above the user's code."""
    frame = error.__traceback__
    while frame and (is_own(file := frame.tb_frame.f_code.co_filename) or file in also_own):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))


def main(shared: Path, start: dict[str, Any]) -> NoReturn:
    """Run the script or the call that `start` names, in the folder `shared` by this node's workers, and exit."""
    rank, local_rank, local_size, num_restarts = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    if start["logs"] is not None:
        redirect_output(Path(start["logs"]), rank, num_restarts)
    folder = start_folder(shared, num_restarts)
    folder.mkdir(exist_ok=True)
    _answer_stack_requests(folder, rank)
    os.environ[HEARD_VARIABLE] = str(worker_file(folder, "heard", rank))
    sys.argv[:] = start["argv"]
    for name, lines in start["sources"].items():  # notebook cells: tracebacks show their lines
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    try:
        _run(start["script"], shared)
        # As at the end of a Python program: wait for the user's threads, and run exit handlers.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        ended = WorkerExit(ExitKind.DONE, rank)
    except BaseException as error:
        peers = range(rank - local_rank, rank - local_rank + local_size)
        ended = _describe(error, folder, rank, [peer for peer in peers if peer != rank])
    ended.write(folder)
    _exit({ExitKind.DONE: 0, ExitKind.LEFT: 0, ExitKind.STOPPED: STOPPED_EXIT_CODE}.get(ended.kind, 1))


def _answer_stack_requests(folder: Path, rank: int) -> None:
    file = worker_file(folder, "stack", rank).open("w")  # stays open: faulthandler writes to it until the end
    faulthandler.enable(file, all_threads=False)
    faulthandler.register(STACK_SIGNAL, file, all_threads=False)
    file.write(f"{os.getpid()}\n")  # only now may peers send the signal
    file.flush()


def _run(script: str | None, folder: Path) -> None:
    result = None
    try:
        if script is not None:
            runpy.run_path(script, run_name="__main__")
        else:
            fn, args, kwargs = load(folder / CALL_FILE)
            result = fn(*args, **kwargs)
    except SystemExit as exit_request:
        if exit_request.code not in (None, 0) or _kind(exit_request) is ExitKind.LEFT:
            raise
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    if os.environ["RANK"] == "0" and script is None:  # now: ranks change when a worker is lost
        from paceline.run.launching.payload import save_result

        save_result(folder / RESULT_FILE, result)


def _describe(error: BaseException, folder: Path, rank: int, peers: list[int]) -> WorkerExit:
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be shown)"
    summary = f"{type(error).__name__}: {text}" if text else type(error).__name__
    trace, kind = user_traceback(error), _kind(error)
    step = error.step if kind == ExitKind.STOPPED else 0  # type: ignore[attr-defined]
    if kind == ExitKind.LEFT:
        return WorkerExit(kind, rank, f"rank {rank} left: {error.reason}")  # type: ignore[attr-defined]
    ended = WorkerExit(kind, rank, f"rank {rank} failed: {summary}\n\n{trace.rstrip()}", trace, step)
    if isinstance(error, CommunicationTimeout):
        return ended.with_notes(*_stacks_of(folder, peers))
    return ended


def _kind(error: BaseException) -> ExitKind:
    """By the error's class, without imports: a module that is not imported has raised no error."""
    for module, name, kind in _KINDS:
        if module in sys.modules and isinstance(error, getattr(sys.modules[module], name)):
            return kind
    return ExitKind.DIED if _is_device_failure(error) else ExitKind.FAILED


def _is_device_failure(error: BaseException) -> bool:
    """Whether a device failed. That counts as a death; running out of its memory does not, since it would recur."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or str(error).startswith(("CUDA error", "HIP error", "NCCL error"))


def _stacks_of(folder: Path, peers: list[int]) -> list[str]:
    """The stacks of this node's other workers that are still running."""
    running = [peer for peer in peers if not worker_file(folder, "report", peer).exists()]
    for peer in running:
        try:
            os.kill(int(worker_file(folder, "stack", peer).read_text().partition("\n")[0]), STACK_SIGNAL)
        except (FileNotFoundError, ProcessLookupError, ValueError):
            continue  # not up yet, or gone
    stacks: dict[int, str] = {}
    deadline_s = time.monotonic() + STACK_WAIT_S
    while time.monotonic() < deadline_s:
        before, stacks = stacks, {peer: read_stack(folder, peer) for peer in running}
        if stacks == before and all(stacks.values()):  # unchanged since the last read: complete
            break
        time.sleep(0.05)
    return [
        f"rank {peer} is still running, at:\n{stack}"
        if stack
        else f"rank {peer} is still running but did not report its stack: it is suspended, or has not started yet"
        for peer, stack in stacks.items()
    ]


def _exit(code: int) -> NoReturn:
    """Exit without the interpreter's shutdown, in which native threads of a broken world may hang or abort."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed by its reader
    os._exit(code)
