"""For `bench watch`: a server of `paceline watch`, and what a page asks it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import Request, urlopen

TIMEOUT_S = 120.0


class Server:
    """A process of `paceline watch`, and requests to it. address: with the token, for a browser."""

    def __init__(self, process: subprocess.Popen[str], port: int, token: str) -> None:
        self.process, self._port, self._token = process, port, token
        self.address = f"http://127.0.0.1:{port}/?token={token}"

    def get(self, path: str) -> bytes:
        headers = {"Authorization": f"Bearer {self._token}"}
        with urlopen(Request(f"http://127.0.0.1:{self._port}{path}", headers=headers), timeout=TIMEOUT_S) as reply:
            content: bytes = reply.read()
        return content

    def connect(self, path: str) -> socket.socket:
        """A connection whose answer is still to be read."""
        connection = socket.create_connection(("127.0.0.1", self._port), TIMEOUT_S)
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nAuthorization: Bearer {self._token}\r\n\r\n"
        connection.sendall(request.encode())
        return connection

    @property
    def peak_mb(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) / 1024


class OpenPage:
    """Does what the page does: fetches a run and reads what is pushed."""

    def __init__(self, server: Server, run_id: str) -> None:
        self.num_bytes = 0
        picture_of_a_run(server, run_id)
        self._stream = server.connect(f"/api/stream?run={run_id}&log=1")
        self._stream.settimeout(None)  # the server may be suspended for minutes
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(ConnectionResetError):  # closed while the server sends
            while content := self._stream.recv(1 << 16):
                self.num_bytes += len(content)

    def close(self) -> None:
        self._stream.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._stream.close()


def picture_of_a_run(server: Server, run_id: str) -> None:
    for path in ("", "/metrics?points=2000", "/events", "/log", "/checkpoints", "/config"):
        server.get(f"/api/runs/{run_id}{path}")


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "paceline", "watch", str(folder), "--port", "0"]
    with started(command, folder, signal.SIGINT) as process:
        assert process.stdout is not None
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", process.stdout.readline().strip())
        assert match is not None
        yield Server(process, int(match[1]), match[2])


@contextmanager
def started(
    command: Sequence[str], folder: Path, end: signal.Signals, stderr: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, as one that is started in a terminal of its own."""
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.send_signal(end)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
