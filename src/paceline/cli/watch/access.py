"""Who may use the server: an ASGI middleware that checks every request before anything else sees it.

- Host must name this machine. A page of another site that points its own name at 127.0.0.1 (DNS rebinding) is refused.
- Origin, if there is one, must be the server's own: another site's page cannot read answers or press buttons.
- The token must be in the address, in an Authorization header, or in the cookie that `/?token=...` sets.
- Bodies are short.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from ipaddress import ip_address
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException

from paceline.observe.json_lines import to_json

MAX_BODY_BYTES = 4096

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(?::\d{1,5})?")
HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


def new_token() -> str:
    return secrets.token_urlsafe(24)


class Access:
    """names: host names, besides IP addresses, that a browser may use for this server.

    is_local: the server listens on the loopback interface only, so that no other address can be meant.
    """

    def __init__(self, app: App, token: str, port: int, names: Iterable[str] = (), *, is_local: bool = True) -> None:
        self._app, self._token = app, token
        self._names = {"localhost", *(name.lower() for name in names)}
        self._is_local = is_local
        self._cookie = f"paceline_watch_{port}"  # cookies do not depend on the port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # websockets: closed without an answer
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        send = _with_headers(send, self._cookie_to_set(scope))
        if problem := self._problem(scope, headers):
            await answer(send, *problem)
            return
        await self._app(scope, _limited(receive), send)

    def _problem(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if not self._is_known(host):
            return 403, f"unknown host {host[:100]!r}: open the address that paceline watch printed"
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            return 403, f"requests from {origin[:100]!r} are refused"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return 413, f"the body is longer than {MAX_BODY_BYTES} bytes"
        if not any(
            secrets.compare_digest(token.encode(), self._token.encode()) for token in self._tokens(scope, headers)
        ):
            return 401, "the token is missing or wrong: open the address that paceline watch printed"
        return None

    def _is_known(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        try:
            address = ip_address(match[1].strip("[]"))
        except ValueError:
            return match[1].lower() in self._names
        return address.is_loopback or not self._is_local

    def _tokens(self, scope: Scope, headers: dict[str, str]) -> list[str]:
        found = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])[:1]
        scheme, _, value = headers.get("authorization", "").partition(" ")
        found += [value.strip()] if scheme.lower() == "bearer" else []
        for part in headers.get("cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            found += [value] if name == self._cookie else []
        return found

    def _cookie_to_set(self, scope: Scope) -> bytes | None:
        """After the first visit. The answer to a wrong token does not set it, as it is not a success."""
        if scope["path"] != "/" or b"token=" not in scope["query_string"]:
            return None
        return f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict".encode()


def _limited(receive: Receive) -> Receive:
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
        return message

    return limited


def _with_headers(send: Send, cookie: bytes | None) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [*HEADERS, *([(b"set-cookie", cookie)] if cookie and message["status"] == 200 else [])]
            message = {**message, "headers": [*message.get("headers", []), *own]}
        await send(message)

    return with_headers


async def answer(send: Send, status: int, error: str) -> None:
    """An error as JSON. The connection is closed: what is left of the request is not read."""
    body = to_json({"error": error}).encode()
    headers = [(b"content-type", b"application/json; charset=utf-8"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
