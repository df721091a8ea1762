"""Requests that must not reach the application are refused here, before their body is read."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(frozen=True)
class Limits:
    """Bounds on requests; one that goes beyond is refused with a 4xx status that names the bound.

    Attributes:
        request_bytes: bytes of a request with files. They are written to disk while they arrive.
        json_bytes: bytes of any other request. These are held in memory.
        file_bytes: bytes of one file.
        files: files of a request.
        pixels: pixels of an image, read from its header before anything is decoded.
        sound_values: samples of a sound, times its channels, read from its header.
        requests: requests in progress at once.
        waiting: changes (lessons, for instance) that wait for the one in progress.
        seconds: time in which a request must have arrived in full.
    """

    request_bytes: int = 256 << 20
    json_bytes: int = 64 << 10
    file_bytes: int = 64 << 20
    files: int = 500
    pixels: int = 64_000_000
    sound_values: int = 64_000_000
    requests: int = 64
    waiting: int = 16
    seconds: float = 300.0


UPLOADS = frozenset({"/api/predict", "/api/learn"})
"""Paths that take files, and so bodies of more than a few kilobytes."""
_DRAIN_SECONDS = 5.0
_HEADERS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def is_loopback(host: str) -> bool:
    """Whether a host name or address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """ASGI middleware that checks the sender and size of requests, and counts the bytes that arrive.

    - ``Host`` must name this server. Otherwise a page of another site could point its own name at 127.0.0.1 after it
      was loaded and read the answers (DNS rebinding). An IP address is no name that anybody can point elsewhere.
    - ``Origin``, which browsers send with every POST, must be the server itself, so that a page of another site cannot
      teach or undo (cross-site request forgery).
    - With a token, everything below ``/api`` needs ``Authorization: Bearer TOKEN``. The page itself holds no data.

    Args:
        app: the application behind.
        host: the address the server listens on.
        token: what clients must know; None for no check.
        limits: bounds of requests.
    """

    def __init__(self, app: ASGIApp, *, host: str, token: str | None, limits: Limits) -> None:
        self._app = app
        self._local = is_loopback(host)
        self._names = {"localhost"}
        if not self._local:
            self._names |= {name.lower() for name in (host, socket.gethostname(), socket.getfqdn())}
        self._token = token
        self._limits = limits
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, then pass it on."""
        if scope["type"] != "http":  # "lifespan"; WebSockets are disabled in uvicorn
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            limit = self._check(scope)
        except HTTPException as refusal:
            await _refuse(refusal, scope, receive, send_with_headers)
            return
        self._requests += 1
        try:
            await self._app(scope, self._counted(receive, limit), send_with_headers)
        finally:
            self._requests -= 1

    def _check(self, scope: Scope) -> int:
        """How many bytes the request's body may have; HTTPException for a request that is refused."""
        headers, path = Headers(scope=scope), scope["path"]
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            page = host if origin is None else urlsplit(origin).netloc.lower()
        except ValueError:
            raise HTTPException(400, "the Host or Origin header is malformed") from None
        if not self._may_ask(name):
            raise HTTPException(403, f"this server does not answer to the host {name[:200]!r}")
        if page != host:
            raise HTTPException(403, "requests from pages of other sites are refused")
        if self._token is not None and path.startswith("/api"):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = secrets.compare_digest(given.strip().encode(), self._token.encode())
            if scheme.lower() != "bearer" or not right:
                raise HTTPException(
                    401,
                    "send the token that was printed when the server started: Authorization: Bearer TOKEN",
                    {"www-authenticate": "Bearer"},
                )
        if self._requests >= self._limits.requests:
            raise HTTPException(
                429, f"{self._limits.requests} requests are in progress: try again", {"retry-after": "1"}
            )
        limit = self._limits.json_bytes
        if path in UPLOADS and headers.get("content-type", "").lower().startswith("multipart/form-data"):
            limit = self._limits.request_bytes
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > limit:
            raise HTTPException(413, _too_large(limit))
        return limit

    def _may_ask(self, name: str) -> bool:
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or not self._local or name in self._names

    def _counted(self, receive: Receive, limit: int) -> Receive:
        """Receive at most ``limit`` bytes, in the time allowed; for bodies that do not tell their length."""
        received = 0
        deadline = anyio.current_time() + self._limits.seconds
        complete = False

        async def counted() -> Message:
            nonlocal received, complete
            if complete:  # what comes now is the end of the connection, which may take as long as the answer
                return await receive()
            with anyio.move_on_after(deadline - anyio.current_time()):
                message = await receive()
                received += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if received > limit:
                    if not complete:
                        await _drain(receive)
                    raise HTTPException(413, _too_large(limit))
                return message
            raise HTTPException(408, f"the request did not arrive within {self._limits.seconds:g} seconds")

        return counted


async def _refuse(refusal: HTTPException, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, then discard what is still sent: many clients read the answer only after they have sent everything."""
    response = JSONResponse({"detail": refusal.detail}, refusal.status_code, refusal.headers)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    body = b"" if scope["method"] == "HEAD" else bytes(response.body)
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await _drain(receive)
    await send({"type": "http.response.body", "body": b""})


async def _drain(receive: Receive) -> None:
    with anyio.move_on_after(_DRAIN_SECONDS):
        while (await receive()).get("more_body", False):
            pass


def _too_large(limit: int) -> str:
    return f"the request is larger than {limit >> 20} MiB" if limit >> 20 else f"the request is larger than {limit} B"
