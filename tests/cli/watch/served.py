"""For tests of the server of `paceline watch`: a server in a thread, and requests to it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `watch`")

from paceline.cli.watch.runs import Runs
from paceline.cli.watch.server import WatchServer


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Requests with the token. headers: None removes one that is usually sent."""

    def __init__(self, server: WatchServer) -> None:
        self.server = server
        self.host = f"127.0.0.1:{server.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)

    def request(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str | None) -> Reply:
        connection = self.connect()
        usual: dict[str, str | None] = {"Host": self.host, "Authorization": f"Bearer {self.server.token}", **headers}
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            if body is not None:
                usual.setdefault("Content-Length", str(len(body)))
            for name, value in usual.items():
                if value is not None:
                    connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            with suppress(BrokenPipeError, ConnectionResetError):  # refused before everything was sent
                connection.send(body or b"")
            reply = connection.getresponse()
            return Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        reply = self.request(path)
        assert reply.status == 200, reply
        return reply.json

    def post(self, path: str, body: bytes = b"{}", **headers: str | None) -> Reply:
        return self.request(path, "POST", body, **{"Content-Type": "application/json", **headers})

    @contextmanager
    def stream(self, path: str, **headers: str) -> Iterator[Iterator[tuple[str, Any, str]]]:
        """Event, data and id, as they come."""
        connection = self.connect()
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.server.token}", **headers})
            reply = connection.getresponse()
            assert reply.status == 200
            yield _events(reply)
        finally:
            connection.close()


def _events(reply: http.client.HTTPResponse) -> Iterator[tuple[str, Any, str]]:
    fields: dict[str, str] = {}
    while line := reply.readline().decode():
        if line != "\n":
            name, _, value = line.rstrip("\n").partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield fields["event"], json.loads(fields["data"]), fields.get("id", "")
            fields = {}


@contextmanager
def served(folder: Path, **settings: Any) -> Iterator[Client]:
    server = WatchServer(Runs(folder), port=0, **settings)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield Client(server)
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()
