"""Commands called in the test's own process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from paceline.cli.main import main


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class _Output(io.StringIO):
    encoding = "utf-8"


def invoke(*arguments: object) -> Ended:
    """`paceline ...`."""
    out, err = _Output(), _Output()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([*map(str, arguments)])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())
