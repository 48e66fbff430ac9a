"""Who may ask the page for what. Wraps an ASGI application."""

import hmac
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, Final, NamedTuple

__all__ = ["FILES", "ORDERS", "WARM_FILE", "Access", "Bodies", "Guard"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Bodies(NamedTuple):
    """What some requests carry."""

    media_type: str
    most_bytes: int
    remedy: str

    @property
    def too_long(self) -> str:
        return f"a body of at most {self.most_bytes:,} bytes, with its length{self.remedy}"


WARM_FILE: Final = "/api/warm-file"
ORDERS: Final = Bodies("application/json", 64 << 10, "")
FILES: Final = Bodies("application/jsonl", 16 << 20, ": split the file, or use kvstrata warm")
"""Of ``WARM_FILE`` alone; all others are ``ORDERS``."""

_REQUESTS_PER_SECOND: Final = 50.0
_BURST: Final = 200.0
_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Access:
    """The rules of one page."""

    def __init__(self, hosts: Collection[str], token: str | None, *, admin: bool) -> None:
        """*hosts* are what a browser may call the page, with the port.

        With a *token* all data needs it; verbs need one, and *admin*.
        """
        self.admin = admin and token is not None
        self._hosts = frozenset(host.lower() for host in hosts)
        self._token = None if token is None else token.encode()

    def is_host(self, host: str) -> bool:
        """Whether the page is called so: a name that somebody else controls is not ours."""
        return host.lower() in self._hosts

    def is_origin(self, origin: str) -> bool:
        """Whether a script of *origin* is ours; https where a proxy speaks it."""
        scheme, _, host = origin.partition("://")
        return scheme in {"http", "https"} and self.is_host(host)

    @property
    def needs_token(self) -> bool:
        return self._token is not None

    def is_token(self, authorization: str) -> bool:
        """Takes as long whatever is said."""
        said = authorization.removeprefix("Bearer ").encode()
        return self._token is not None and hmac.compare_digest(said, self._token)


class Guard:
    """Lets through what ``Access`` allows. Tokens are taken from a header alone, never from a URL."""

    def __init__(
        self, app: App, access: Access, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._access = access
        self._clock = clock
        self._allowance = _BURST
        self._counted_at = clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no web sockets: the server closes them
        refusal = self._refusal(scope)

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        if refusal is None:
            await self._app(scope, receive, send_safely)
            return
        status, why = refusal
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send_safely({"type": "http.response.start", "status": status, "headers": headers})
        await send_safely({"type": "http.response.body", "body": why.encode()})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Why *scope* is not let through."""
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            if name in {b"host", b"authorization", b"origin"} and name.decode() in headers:
                return 400, f"two headers {name.decode()}"
            headers[name.decode("latin-1")] = value.decode("latin-1")
        if not self._access.is_host(headers.get("host", "")):
            return 403, "this page has another name: see kvstrata page --allow-host"
        if not self._has_allowance():
            return 429, "too many requests"
        if scope["method"] not in {"GET", "HEAD", "POST"}:
            return 405, "GET, HEAD and POST alone"
        if not scope["path"].startswith("/api/"):
            return None
        if self._access.needs_token and not self._access.is_token(headers.get("authorization", "")):
            return 401, "a token is needed"
        return self._refusal_of_verb(scope["path"], headers) if scope["method"] == "POST" else None

    def _refusal_of_verb(self, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        if not self._access.admin:
            return 403, "this page only shows: start it with --admin"
        if "origin" in headers and not self._access.is_origin(headers["origin"]):
            return 403, "another site asks"
        bodies = FILES if path == WARM_FILE else ORDERS
        if headers.get("content-type", "").partition(";")[0].strip() != bodies.media_type:
            return 415, f"{bodies.media_type} alone"
        said = headers.get("content-length", "")
        if not (said.isascii() and said.isdigit()) or int(said) > bodies.most_bytes:
            return 413, bodies.too_long
        return None

    def _has_allowance(self) -> bool:
        now = self._clock()
        self._allowance += (now - self._counted_at) * _REQUESTS_PER_SECOND
        self._allowance = min(self._allowance, _BURST)
        self._counted_at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True
