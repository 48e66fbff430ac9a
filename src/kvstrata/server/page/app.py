"""The page: its files, what it shows, and its verbs."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvstrata.core.errors import ConfigError, KVStrataError
from kvstrata.server.page.guard import FILES, ORDERS, WARM_FILE, Access, Bodies, Guard
from kvstrata.server.page.sampler import Sampler
from kvstrata.server.page.verbs import ReadPrompts, Verbs

__all__ = ["listen", "make_app", "run_page"]

_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/dom.js": ("dom.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/sections.js": ("sections.js", "text/javascript"),
    "/prompts.js": ("prompts.js", "text/javascript"),
    "/verbs.js": ("verbs.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_CONNECTIONS: Final = 64
_HEADER_BYTES: Final = 16 << 10
_VERBS_AT_A_TIME: Final = 4
_BODY_SECONDS: Final = 120.0


def make_app(sampler: Sampler, verbs: Verbs, access: Access) -> Guard:
    """The page as an ASGI application; *sampler* is the caller's."""
    free = asyncio.Semaphore(_VERBS_AT_A_TIME)
    file = asyncio.Lock()  # held while one is sent and read

    async def state(request: Request) -> Response:
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdigit()) or len(after) > 15:
            return _refused(400, f"after: {after[:40]!r} is not the number of a sample")
        seen = sampler.seen(int(after))
        shown = {"admin": access.admin, "seen": seen, "warming": verbs.warming}
        return _json(200, shown)

    async def verb(request: Request) -> Response:
        body = await _body(request, ORDERS)
        if free.locked():
            return _refused(429, f"{_VERBS_AT_A_TIME} verbs are running: try again")
        async with free:
            try:
                name = request.path_params["verb"]
                answer = await asyncio.to_thread(verbs.carry_out, name, body)
            except KVStrataError as e:
                return _failed(e)
        return _json(200, answer)

    async def warm_file(request: Request) -> Response:
        if file.locked():
            return _refused(429, "another file is being read: try again")
        async with file:
            content = await _body(request, FILES)
            try:
                begun = verbs.warm_file(dict(request.query_params), content)
                state = await asyncio.wrap_future(begun)
            except KVStrataError as e:
                return _failed(e)
        return _json(200, {"prompts": state.prompts, "blocks": state.asked_blocks})

    routes = [Route(path, _file(*named)) for path, named in _FILES.items()]
    routes.append(Route("/api/state", state))
    routes.append(Route(WARM_FILE, warm_file, methods=["POST"]))
    routes.append(Route("/api/{verb:str}", verb, methods=["POST"]))
    return Guard(Starlette(routes=routes), access)


def listen(host: str, port: int) -> socket.socket:
    """A socket for ``run_page``; ``ConfigError`` if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as e:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {e.strerror or e}",
            hint="choose another address of this machine: --listen",
        ) from e


def run_page(
    path: Path, listener: socket.socket, access: Access, read_prompts: ReadPrompts
) -> None:
    """Show the server at *path* until SIGINT or SIGTERM. For the main thread."""
    sampler, verbs = Sampler(path), Verbs(path, read_prompts)
    config = uvicorn.Config(
        make_app(sampler, verbs, access),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        limit_concurrency=_CONNECTIONS,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        http="h11",
        loop="asyncio",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)

    def stop(*_: object) -> None:
        """uvicorn takes signals itself once its loop runs; an exception would leave half a loop."""
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    sampler.start()
    try:
        server.run(sockets=[listener])
    finally:
        sampler.close()
        listener.close()


def _file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("kvstrata.server.page").joinpath("static", name).read_bytes()

    async def serve(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return serve


async def _body(request: Request, bodies: Bodies) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > bodies.most_bytes:
                    raise HTTPException(413, bodies.too_long)
    except TimeoutError as e:
        raise HTTPException(408, f"the body is not here after {_BODY_SECONDS:.0f} s") from e
    except ClientDisconnect as e:
        raise HTTPException(400, "the body ends early") from e  # nobody hears it
    return bytes(body)


def _failed(error: KVStrataError) -> Response:
    return _refused(400 if isinstance(error, ConfigError) else 409, str(error))


def _json(status: int, value: object) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _refused(status: int, why: str) -> Response:
    return _json(status, {"problem": why})
