"""Real workers. Functions are defined inside the tests, so that a worker need not import this file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from paceline.core.errors import WorkerError
from paceline.run.launching import agent, fork_server, worker
from paceline.run.launching import launch as launch_module
from paceline.run.launching.launch import launch
from paceline.run.launching.nodes import Nodes

END_S = 60.0  # a hang would be longer, on any machine: workers that are not ended sleep for 600 s


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own; nothing may be left in it, and no worker that was started from it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(agent, "GRACE_S", 1.0)
    monkeypatch.setattr(fork_server, "PRELOADED_MODULES", ())  # most functions here need none of them
    yield folder
    assert workers_of(folder) == []
    assert list(folder.iterdir()) == []


def workers_of(folder: Path) -> list[int]:
    """The running processes that have a path in `folder` among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                arguments = (entry / "cmdline").read_text(errors="replace").split("\0")
            except OSError:
                continue
            if any(argument.startswith(f"{folder}/") for argument in arguments):
                found.append(int(entry.name))
    return found


# The settings of the fixture above, for launchers in other processes.
FAST = """
from paceline.run.launching import agent, fork_server
agent.GRACE_S, fork_server.PRELOADED_MODULES = 1.0, ()
"""


def start_script(folder: Path, source: str) -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(FAST + textwrap.dedent(source))
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fail_on(num_workers: int, fn: Callable[..., Any], *args: Any) -> WorkerError:
    """The error of a launch that must fail."""
    with pytest.raises(WorkerError) as caught:
        launch(fn, num_workers, args=args)
    return caught.value


# Without workers


def test_one_worker_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(os.environ)
    assert launch(lambda x, *, y: (os.getpid(), x + y), 1, args=(1,), kwargs={"y": 2}) == (os.getpid(), 3)
    monkeypatch.setattr("paceline.core.world.device_count", lambda: 1)
    assert launch(os.getpid) == os.getpid()
    assert dict(os.environ) == environment
    with pytest.raises(ZeroDivisionError):
        launch(lambda: 1 / 0, 1)


@pytest.mark.parametrize("num_workers", [0, -1, 2.0, True, "2"])
def test_a_bad_number_of_workers_is_named(num_workers: Any) -> None:
    with pytest.raises(ValueError, match=rf"^num_workers={num_workers!r}: choose an integer >= 1"):
        launch(os.getpid, num_workers)


def test_a_worker_of_a_world_calls_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch(os.getpid) == launch(os.getpid, 2) == os.getpid()
    with pytest.raises(ValueError, match=r"num_workers=3 .* WORLD_SIZE=2: choose num_workers=2"):
        launch(os.getpid, 3)


@pytest.mark.parametrize(("rank", "membership", "is_told"), [("0", None, True), ("1", None, False), ("0", "x", False)])
def test_min_workers_has_no_effect_in_workers_of_others(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    membership: str | None,
    is_told: bool,
) -> None:
    """`paceline run` has workers that may change, torchrun does not."""
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "PACELINE_MEMBERSHIP": membership}.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    assert launch(lambda: "ran", min_workers=1) == "ran"
    assert ("min_workers has no effect in workers of torchrun" in capsys.readouterr().err) == is_told


def test_an_unpicklable_argument_stops_the_launch_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_run_workers", lambda *_, **__: pytest.fail("workers were started"))
    with pytest.raises(TypeError, match=r"^kwargs\['lock'\] cannot be sent to the workers"):
        launch(os.getpid, 2, kwargs={"lock": threading.Lock()})


def test_workers_divide_the_cores_unless_the_user_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    nodes = Nodes(2, "a:1")

    def threads(count: int) -> str:
        return launch_module._environment(tmp_path, count, nodes)["OMP_NUM_THREADS"]

    assert [threads(count) for count in (1, 2, 4, 16)] == ["9", "4", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads(2) == "7"


def test_folders_of_killed_launchers_are_swept_and_live_ones_kept(temporary_folder: Path) -> None:
    abandoned = temporary_folder / f"{launch_module.folder_prefix()}abandoned"
    in_the_making = temporary_folder / f".{launch_module.folder_prefix()}new"
    abandoned.mkdir()
    (abandoned / "start.json").touch()
    in_the_making.mkdir()
    with launch_module.run_folder() as first, launch_module.run_folder() as second:
        assert first.stat().st_mode & 0o777 == 0o700
        assert sorted(temporary_folder.iterdir()) == sorted([in_the_making, first, second])
        with pytest.raises(BlockingIOError), launch_module._locked(first):
            pass
    in_the_making.rmdir()


@pytest.mark.usefixtures("temporary_folder")
def test_folders_of_other_hosts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for temporary files may be on a file system whose locks exclude only processes of their own host."""
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    with launch_module.run_folder() as folder:
        monkeypatch.setattr("socket.gethostname", lambda: "node-2")
        monkeypatch.setattr(launch_module, "_locked", lambda _: nullcontext())
        with launch_module.run_folder():
            assert folder.exists()


# Workers that do well


def test_a_world_that_works(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sibling.py").write_text("NAME = 'imported from the caller\\'s path'\n")
    environment, handlers = dict(os.environ), [signal.getsignal(number) for number in range(1, 32)]

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    def work(point: Point, folder: Path) -> dict[str, Any]:
        import atexit
        from concurrent.futures import ThreadPoolExecutor

        import sibling
        import torch
        import torch.distributed as dist

        from paceline.run.launching.launch import launch

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        left_running = subprocess.Popen(["sleep", "600"])
        if rank == 1:
            atexit.register((folder / "at-exit").touch)
            ThreadPoolExecutor().submit(lambda: (time.sleep(0.2), (folder / "in-thread").touch()))
            (folder / "pid-of-rank-1").write_text(str(left_running.pid))
            raise SystemExit(0)  # a normal end
        print("a line from rank 0")
        return {
            "point": Point(point.x + 1),
            "total": total,
            "nested": launch(os.getpid) == os.getpid(),
            "sibling": sibling.NAME,
            "cwd": str(Path.cwd()),
            "argv": sys.argv,
            "threads": torch.get_num_threads(),
            "pids": [os.getpid(), left_running.pid],
        }

    result = launch(work, 2, args=(Point(1),), kwargs={"folder": tmp_path})

    assert type(result["point"]) is Point
    assert result["point"].x == 2
    assert result["total"].tolist() == [3.0]
    assert result["nested"]
    assert result["sibling"] == "imported from the caller's path"
    assert (result["cwd"], result["argv"]) == (str(Path.cwd()), sys.argv)
    assert result["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    for pid in [*result["pids"], int((tmp_path / "pid-of-rank-1").read_text())]:
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), END_S)  # init reaps what the workers left
    assert (tmp_path / "at-exit").exists()
    assert (tmp_path / "in-thread").exists()
    assert capfd.readouterr() == ("a line from rank 0\n", "")
    assert dict(os.environ) == environment
    assert [signal.getsignal(number) for number in range(1, 32)] == handlers


def test_threads_may_launch_at_the_same_time() -> None:
    results: dict[str, Any] = {}

    def run(name: str) -> None:
        results[name] = launch(lambda: (name, os.environ["RANK"], os.environ["WORLD_SIZE"]), 2)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"a": ("a", "0", "2"), "b": ("b", "0", "2")}


def test_a_script_needs_no_guard_and_its_error_is_printed_once(tmp_path: Path) -> None:
    script = start_script(
        tmp_path,
        """
        import os
        from dataclasses import dataclass
        from paceline.run.launching.launch import launch

        print("script body", flush=True)

        @dataclass
        class Sample:
            number: int

        def check(sample):
            if sample.number == 7 and os.environ["RANK"] == "1":
                raise ValueError(f"bad sample {sample.number}")  # the user's line
            return Sample(sample.number * 2)

        doubled = launch(lambda: check(Sample(4)), 2)
        print(type(doubled) is Sample, doubled.number, flush=True)
        launch(check, 2, args=(Sample(7),))
        """,
    )
    out, err = script.communicate(timeout=60)
    assert script.returncode == 1
    assert out == "script body\nTrue 8\n"
    assert err.count("rank 1 failed: ValueError: bad sample 7\n\nTraceback (most recent call last):") == 1
    assert err.count('raise ValueError(f"bad sample {sample.number}")  # the user\'s line') == 1
    assert err.count("Traceback") == 2  # the caller's and, inside the message, the worker's
    assert err.startswith("Traceback")
    assert err.endswith("\nValueError: bad sample 7\n")
    assert "worker.py" not in err


def test_notebook_cells_are_launched_and_their_lines_shown() -> None:
    """What a notebook does: cells compiled from strings, run in `__main__`, known to linecache and to no file."""
    notebook = """
        import linecache

        def run_cell(number, source):
            name = f"<cell {number}>"
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            exec(compile(source, name, "exec"), globals())

        run_cell(1, "from paceline import launch\\nscale = 3\\ndef work(x):\\n    return scale * x\\n")
        run_cell(2, "print(launch(work, 2, args=(5,)))\\n")
        run_cell(3, "def broken():\\n    return scale / 0  # in a cell\\nlaunch(broken, 2)\\n")
    """
    program = FAST + textwrap.dedent(notebook)
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True)
    assert done.stdout == "15\n"
    assert done.stderr.count(" failed: ZeroDivisionError: division by zero\n") == 1
    assert '  File "<cell 3>", line 2, in broken\n    return scale / 0  # in a cell\n' in done.stderr


# Workers that fail


# They meet through files, so that a failure finds the others where the test wants them.


def test_a_failure_does_not_wait_for_a_worker_that_ignores_sigterm(tmp_path: Path) -> None:
    def work(ready: Path) -> None:
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready.touch()
            time.sleep(600)
        while not ready.exists():
            time.sleep(0.01)
        raise KeyError("weights")

    error = fail_on(2, work, tmp_path / "ready")
    assert error.rank == 0
    assert str(error).startswith("rank 0 failed: KeyError: 'weights'\n\nTraceback (most recent call last):\n  File ")
    assert 'raise KeyError("weights")' in error.traceback_text
    assert error.traceback_text in str(error) + "\n"


def test_a_failure_does_not_wait_for_a_stopped_worker(tmp_path: Path) -> None:
    def work(ready: Path) -> None:
        if os.environ["RANK"] == "0":
            ready.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        while not ready.exists():
            time.sleep(0.01)
        raise ValueError("bad sample 7")

    error = fail_on(2, work, tmp_path / "ready")
    assert error.rank == 1
    assert str(error).startswith("rank 1 failed: ValueError: bad sample 7\n\n")
    assert 'raise ValueError("bad sample 7")' in error.traceback_text


def test_a_killed_worker_is_named_though_another_does_not_end(tmp_path: Path) -> None:
    def work(ready: Path) -> None:
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready.touch()
            time.sleep(600)
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    error = fail_on(2, work, tmp_path / "ready")
    assert str(error) == "rank 1 was killed by SIGKILL (out of memory? `dmesg` shows what the kernel killed)"
    assert (error.rank, error.traceback_text) == (1, "")


def test_a_crash_in_native_code_shows_where(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        import ctypes

        if os.environ["RANK"] == "0":
            ctypes.string_at(0)  # crashes here
        time.sleep(600)

    error = fail_on(2, work)
    assert str(error).startswith(
        "rank 0 was killed by SIGSEGV (a crash in native code)\n\nits last Python stack:\n  File "
    )
    assert "ctypes.string_at(0)  # crashes here" in error.traceback_text
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("plain_processes")  # a stack shows how the worker was started
def test_a_timeout_shows_where_the_others_stand(tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        from paceline.core.errors import CommunicationTimeout

        (folder / os.environ["RANK"]).touch()
        if os.environ["RANK"] == "1":
            time.sleep(600)  # never arrives
        if os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGSTOP)
        while not ((folder / "1").exists() and (folder / "2").exists()):
            time.sleep(0.01)
        time.sleep(1.0)  # the exchange that nobody joins
        raise CommunicationTimeout("nobody came within 1 s")

    error = fail_on(3, work, tmp_path)
    assert error.rank == 0
    assert str(error).startswith("rank 0 failed: CommunicationTimeout: nobody came within 1 s\n\nTraceback")
    assert 'raise CommunicationTimeout("nobody came within 1 s")' in error.traceback_text
    where, _, rest = str(error).partition("rank 1 is still running, at:\n")[2].partition("\n\n")
    assert where.startswith(f'  File "{__file__}", line ')
    assert where.endswith("in work\n    time.sleep(600)  # never arrives")
    assert rest == "rank 2 is still running but did not report its stack: it is suspended, or has not started yet"


def test_other_ways_to_end() -> None:
    def leave(kind: str) -> Any:
        if os.environ["RANK"] == "1":
            return None
        if kind == "exit code":
            sys.exit(3)
        if kind == "interrupt":
            raise KeyboardInterrupt
        return {"lock": threading.Lock()}

    assert str(fail_on(2, leave, "exit code")).startswith("rank 0 failed: SystemExit: 3\n")
    result = "rank 0 failed: TypeError: the return value of rank 0['lock'] cannot be sent to the caller"
    assert str(fail_on(2, leave, "result")).startswith(result)
    with pytest.raises(KeyboardInterrupt):
        launch(leave, 2, args=("interrupt",))


# Launchers that end


def test_nothing_is_started_for_a_launcher_that_is_gone(tmp_path: Path) -> None:
    start = tmp_path / worker.START_FILE
    start.write_text(json.dumps({"launcher_pid": os.getppid(), "path": sys.path}))
    ended = subprocess.run([sys.executable, "-P", fork_server.__file__, str(start), "0"], capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [worker.START_FILE]


LAUNCHER = """
    import os, signal, time
    from pathlib import Path
    from paceline.run.launching.launch import launch

    def work(folder):
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(folder, "up-" + os.environ["RANK"]).write_text("")
        time.sleep(600)

    launch(work, 2, args=(os.environ["TMPDIR"] + "/..",))
"""


@pytest.mark.parametrize(
    ("number", "returncode", "last_line"),
    [(signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, 143, ""), (signal.SIGKILL, -9, "")],
)
def test_workers_end_with_their_launcher(
    tmp_path: Path, temporary_folder: Path, number: signal.Signals, returncode: int, last_line: str
) -> None:
    launcher = start_script(tmp_path, LAUNCHER)
    try:
        wait_until(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists())
        assert len(workers_of(temporary_folder)) == 3  # with the process they come from
        launcher.send_signal(number)
        out, err = launcher.communicate(timeout=END_S)
    finally:
        launcher.kill()
    assert launcher.returncode == returncode
    assert out == ""
    assert err.strip().rpartition("\n")[2] == last_line
    assert "rank" not in err
    if number == signal.SIGKILL:
        wait_until(lambda: workers_of(temporary_folder) == [], END_S)
        (left,) = temporary_folder.iterdir()
        assert json.loads((left / "start.json").read_text())["launcher_pid"] == launcher.pid
        with launch_module.run_folder():  # the next launch
            assert not left.exists()
