"""Processes forked from one that has imported torch are as if Python had started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded_python
import pytest
from preloaded_python import PreloadedPython

LOOK = """
import json, os, sys, tempfile
found = {
    "imported": "torch" in sys.modules, "argv": sys.argv, "path": sys.path[0], "folder": os.getcwd(),
    "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "group": os.getpgid(0), "variable": os.environ["ONE"],
    "fds": sorted(map(int, os.listdir("/proc/self/fd")))[:-1], "input": sys.stdin.read(), "main": __name__,
    "temporary": tempfile.gettempdir(),
}
print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", ["script", "module", "program"])
def test_it_is_started_as_asked(kind: str, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    words = {"script": [str(tmp_path / "look.py")], "module": ["-m", "look"], "program": ["-c", LOOK]}[kind]
    first, path = {"program": ("-c", "")}.get(kind, (str(tmp_path / "look.py"), str(tmp_path)))
    environment = {**os.environ, "ONE": "1", "TMPDIR": str(tmp_path)}
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "env": environment,
        "capture_output": True,
        "text": True,
    }
    ended = preloaded_python.run([sys.executable, *words, "a b"], input="some", check=True, **options)
    found = json.loads(ended.stdout)
    # Its channel to a seed of its own is the one file descriptor that an ordinary process would not have.
    assert found.pop("fds")[:3] == [0, 1, 2]
    assert found == {
        "imported": True,
        "argv": [first, "a b"],
        "path": path,
        "folder": str(tmp_path),
        "parent": os.getpid(),
        "leads": False,
        "group": os.getpgid(0),
        "variable": "1",
        "input": "some",
        "main": "__main__",
        "temporary": str(tmp_path),
    }


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("1 / 0", 1),
        ("raise SystemExit('a message')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import atexit, os; atexit.register(os._exit, 7)", 7),
    ],
)
def test_it_ends_as_a_process_of_its_own(program: str, code: int) -> None:
    words = [sys.executable, "-c", program]
    assert preloaded_python.run(words, capture_output=True).returncode == code
    with PreloadedPython([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as process:
        assert os.getsid(process.pid) == process.pid
        os.killpg(process.pid, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM


def test_what_torch_reads_at_its_start_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    words = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    assert preloaded_python.run(words, capture_output=True, text=True).stdout == "2\n"
