"""An interactive zsh on a pseudo-terminal that reports its completions."""

from __future__ import annotations

import os
import pty
import select
import signal
from pathlib import Path
from time import monotonic
from typing import Self

START_S = 60.0
# Loads the script from fpath, as users do, and writes the completions to a file.
_SETTINGS = """\
fpath=($PWD/functions $fpath)
autoload -Uz compinit && compinit -u -D
compadd() {
    if [[ ${@[1,(i)(-|--)]} != *-(O|A|D)\\ * ]]; then
        local -a offered
        builtin compadd -A offered "$@"
        print -rl -- $offered >> .offered
    fi
    builtin compadd "$@"
}
tell() { : > .offered; _main_complete; mv .offered .answer }
zle -C tell complete-word tell
bindkey '^I' tell
"""
_CLEAR_LINE, _COMPLETE = "\x15", "\t"


class Zsh:
    """In `folder`, with `script` as the completion of paceline."""

    def __init__(self, folder: Path, script: str) -> None:
        self._answer = folder / ".answer"
        (folder / "functions").mkdir()
        (folder / "functions" / "_paceline").write_text(script)
        (folder / ".zshrc").write_text(_SETTINGS)
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe("zsh", ["zsh", "-i"], os.environ | {"ZDOTDIR": str(folder), "TERM": "xterm"})

    def offered(self, line: str) -> list[str]:
        self._answer.unlink(missing_ok=True)
        os.write(self._terminal, f"{_CLEAR_LINE}{line}{_COMPLETE}".encode())
        said, deadline = b"", monotonic() + START_S
        while not self._answer.exists():
            assert monotonic() < deadline, said.decode(errors="replace")
            if select.select([self._terminal], [], [], 0.02)[0]:
                said += os.read(self._terminal, 4096)
        return self._answer.read_text().split()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._terminal)
