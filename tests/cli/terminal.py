"""A real terminal for tests: commands run in tmux, and the test reads what a person would see.

The commands run one after another in the same Python process, which imports torch once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Self

LINES = 50
TIMEOUT_S = 120.0
# Reads a command line, runs it, and prints its exit code. `>/dev/tty` redirects as a shell would.
DRIVER = """
import os, shlex, sys
from contextlib import redirect_stdout
from paceline.cli.main import main

while True:
    words = shlex.split(input("$ paceline "))
    if words == ["clear"]:
        print(end="\\x1b[H\\x1b[2J")
        continue
    target = open("/dev/tty", "w") if words[-1] == ">/dev/tty" else sys.stdout
    with redirect_stdout(target):
        code = main([word for word in words if word != ">/dev/tty"])
    print("exit code", code, flush=True)
"""


class Terminal:
    """A window of tmux with `columns` columns, in which commands of paceline can be typed."""

    def __init__(self, columns: int, folder: Path) -> None:
        self._columns, self._folder = columns, folder
        self._home = Path(tempfile.mkdtemp(prefix="tmux-"))  # a socket's path must be short

    def type(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def wait_for(self, pattern: str, count: int = 1) -> str:
        """The screen once it has that many matches of the pattern."""
        deadline = monotonic() + TIMEOUT_S
        while len(re.findall(pattern, screen := self.screen())) < count:
            assert monotonic() < deadline, f"waited {TIMEOUT_S:.0f} s for {pattern!r}"
            sleep(0.1)  # each look starts a process
        return screen

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p").rstrip("\n")

    def clear(self) -> None:
        self.type("clear", "Enter")
        self.wait_for(r"^\$ paceline *$")

    def _tmux(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        command = ["tmux", "-S", str(self._home / "socket"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    def __enter__(self) -> Self:
        driver = self._home / "driver.py"
        driver.write_text(DRIVER)
        kept = {name: value for name, value in os.environ.items() if name not in ("TMUX", "NO_COLOR")}
        size = ["-x", str(self._columns), "-y", str(LINES)]
        command = ["new-session", "-d", *size, "-c", str(self._folder), sys.executable, str(driver)]
        self._tmux("-f", "/dev/null", *command, environment=kept)
        try:
            self.wait_for(r"\$ paceline")
        except BaseException:
            self._tmux("kill-server")
            shutil.rmtree(self._home)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            error.add_note(f"the terminal:\n{self.screen()}")
        self._tmux("kill-server")
        shutil.rmtree(self._home)


def normalized(screen: str) -> str:
    """The screen without what changes from run to run: times, rates, and the lengths of bars."""
    joined = re.sub(r"\n +(?=runs/)", " ", screen)
    joined = re.sub(r"(?s)(?<=Traceback \(most recent call last\):\n).*?(?=\n\w+Error)", "  ...", joined)
    joined = re.sub(r"rank-\d", "rank-N", joined)
    # If the other one failed first; the line may be wrapped.
    joined = re.sub(r"paceline: rank \d ended without saving.*\n(  there is no checkpoint\n)?", "", joined)
    joined = re.sub(r"step-\d+|(?<=after step )\d+", "N", joined)
    joined = re.sub(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(-\d+)?", "TIME", joined)
    joined = re.sub(r"[━╸╺]+ +", "━━━ ", joined)
    joined = re.sub(r"\d[\d.]*k? samples/s", "N samples/s", joined)
    joined = re.sub(r"waiting \d+%:\d+%", "waiting N%:N%", joined)
    joined = re.sub(r"(\d+:)+\d+ left|[\d.]+ s left", "T left", joined)
    joined = re.sub(r"(line|rank|shares) \d[\d:]*", r"\1 N", joined)
    return re.sub(r"loss [\d.]+", "loss X", joined)
