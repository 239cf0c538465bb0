"""The run's secret, known to its workers only, with which they authenticate their messages.

The launcher of a single host creates one for each run. On several hosts and under torchrun the user provides it:
PACELINE_SECRET_FILE names a file that only the user can read, or PACELINE_SECRET is the secret itself.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

FILE_VARIABLE = "PACELINE_SECRET_FILE"
VARIABLE = "PACELINE_SECRET"
MIN_BYTES = 16

_DIGEST_BYTES = hashlib.sha256().digest_size


class ForgedError(ValueError):
    """A message that was not written by a worker of this run."""


class Secret:
    """Signs messages and checks signatures, by HMAC-SHA256."""

    def __init__(self, value: bytes, name: str = "the secret") -> None:
        if len(value) < MIN_BYTES:
            remedy = f"use at least {MIN_BYTES}, for example from `openssl rand -hex 32`"
            raise ValueError(f"{name} has {len(value)} bytes: {remedy}")
        self._value = value

    def sign(self, content: bytes, purpose: str) -> bytes:
        """The content with its signature, which is valid for this purpose only."""
        return self._signature(content, purpose) + content

    def check(self, message: bytes, purpose: str) -> bytes:
        """The content of a signed message; ForgedError if it was not signed with this secret for this purpose."""
        signature, content = message[:_DIGEST_BYTES], message[_DIGEST_BYTES:]
        if not hmac.compare_digest(signature, self._signature(content, purpose)):
            cause = "another process interferes, or the secrets differ"
            raise ForgedError(f"{purpose} was not written by a worker of this run: {cause}")
        return content

    def name(self, purpose: str) -> str:
        """A name that cannot be computed without the secret."""
        return self._signature(b"", purpose).hex()[:32]

    def _signature(self, content: bytes, purpose: str) -> bytes:
        return hmac.digest(self._value, purpose.encode() + b"\0" + content, "sha256")


def run_secret() -> Secret | None:
    """The secret of this process's run; None if the run has none."""
    if path := os.environ.get(FILE_VARIABLE):
        return read_secret(Path(path))
    value = os.environ.get(VARIABLE)
    return None if value is None else Secret(value.strip().encode())


def read_secret(path: Path) -> Secret:
    """The secret in this file. ValueError if other users could read or change it."""
    try:
        with path.open("rb") as file:
            mode, owner = os.fstat(file.fileno()).st_mode, os.fstat(file.fileno()).st_uid
            value = file.read().strip()
    except OSError as error:
        raise ValueError(f"the secret file {path} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IRWXO | stat.S_IWGRP) or owner not in (0, os.geteuid()):
        raise ValueError(
            f"the secret file {path} has mode {stat.S_IMODE(mode):04o} and owner {owner}: others could read or change "
            f"it. `chmod 600 {path}` as user {os.geteuid()}; for a Kubernetes secret, defaultMode: 0440"
        )
    return Secret(value, f"the secret in {path}")
