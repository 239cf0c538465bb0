"""The server process of `paceline watch`."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from contextlib import suppress
from ipaddress import ip_address
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.cli.commands import CommandError
from paceline.cli.watch.access import Access, new_token
from paceline.cli.watch.app import make_app
from paceline.cli.watch.runs import Runs

DEFAULT_PORT = 8642
# Connections without a complete request are closed after this time.
REQUEST_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 30
# Connections whose client does not read are closed after this time.
UNREAD_TIMEOUT_S = 20.0
MAX_HEADER_BYTES = 16 << 10


class WatchServer:
    """Listens from construction on; `run` serves until a signal or `stop`.

    port: None for the default one, or a free one if that is taken; 0 for a free one.
    """

    def __init__(self, runs: Runs, host: str = "127.0.0.1", port: int | None = None, token: str | None = None) -> None:
        self.token = token or new_token()
        self._socket = _listening(host, port)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        is_local = _is_loopback(host)
        names = [] if is_local else [host, socket.gethostname(), socket.getfqdn()]
        app = Access(make_app(runs), self.token, self.port, names, is_local=is_local)
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        self._server = _Server(config)

    @property
    def address(self) -> str:
        """What to open in a browser."""
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/?token={self.token}"

    def run(self) -> None:
        _raise_file_limit()
        with self._socket, suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """From another thread."""
        self._server.stop()


class _Server(uvicorn.Server):
    """Is woken when it is to end. uvicorn's own looks ten times a second, which costs as much as showing a run."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        if not self.should_exit:
            await self._ended.wait()
        self._loop = None
        for connection in self.server_state.connections:
            connection.transport.close()  # pages follow their runs for ever

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.stop()

    def stop(self) -> None:
        self.should_exit = True
        if (loop := self._loop) is not None:
            loop.call_soon_threadsafe(self._ended.set)


class _Protocol(H11Protocol):
    """Closes connections that send no complete request, so that slow clients do not use up all connections."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._check = self.loop.call_later(REQUEST_TIMEOUT_S, self._close_if_idle)

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._check.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.loop.time() - self._idle_since >= REQUEST_TIMEOUT_S:
            self.transport.close()
        else:
            self._check = self.loop.call_later(REQUEST_TIMEOUT_S, self._close_if_idle)


def _listening(host: str, port: int | None) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:
        raise CommandError(f"--host {host}: not a known address: choose one of this machine", 2) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * UNREAD_TIMEOUT_S))
    for each in [DEFAULT_PORT, 0] if port is None else [port]:
        try:
            listener.bind((host, each))
            listener.listen(128)
            return listener
        except OSError as error:
            problem = error
    listener.close()
    where = host if port is None else f"{host}, port {port}"
    option = "--host" if problem.errno == errno.EADDRNOTAVAIL else "--port"
    raise CommandError(f"cannot listen on {where}: {problem.strerror}: choose another {option}") from problem


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    if soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
