"""`kvstrata page`: a cache server in a browser, live."""

import ipaddress
import logging
import secrets
import signal
import sys
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstrata.cli.reporting import reported, why_unreadable
from kvstrata.cli.servers import SocketOption, ask, only_server
from kvstrata.core.errors import ConfigError, ServerUnavailable

__all__ = ["page"]

_NEEDED: Final = ("starlette", "uvicorn", "h11")
_SHORTEST_TOKEN: Final = 16
_HTTP_PORT: Final = 80
_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")


def page(  # noqa: PLR0913 - each is an option
    *,
    socket: SocketOption = None,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS:PORT", help="Where to listen.")
    ] = "127.0.0.1:8765",
    admin: Annotated[
        bool, typer.Option("--admin", help="Let those with the token clear, pin, warm and drain.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the token from a file; 16 characters or more."),
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="KVSTRATA_PAGE_TOKEN", hidden=True, help="For processes.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Model or folder whose tokenizer reads texts in files of prompts."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST", help="Another name that browsers call the page, as of a proxy."
        ),
    ] = None,
) -> None:
    """Show a cache server in a browser, until SIGTERM or Ctrl-C.

    Read-only unless --admin is given. Verbs need a token, and an address other than loopback needs one
    for everything: from --token-file or KVSTRATA_PAGE_TOKEN, or made and shown if this is a terminal.
    The page asks the server as kvstrata stats does, once a second however many look at it. There is no
    encryption: put a proxy in front where others share the network. With several servers give the
    socket. Needs kvstrata[page].

    Exits with 0 when it was told to end, and with 1 if no socket is given and no server answers.
    """
    with reported():
        missing = [name for name in _NEEDED if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"the page needs {', '.join(missing)}", hint="pip install 'kvstrata[page]'"
            )
        from kvstrata.cli.prompt_file import read_keys_apart
        from kvstrata.server.page.app import listen as listen_at
        from kvstrata.server.page.app import run_page
        from kvstrata.server.page.guard import Access

        logging.basicConfig(
            level=logging.INFO,
            format="%(levelname)s %(asctime)s [%(name)s] %(message)s",
            stream=sys.stderr,
        )
        host, port = _address(listen)
        is_loopback = _is_loopback(host)
        chosen = _token(token_file, token)
        is_made = chosen is None and (admin or not is_loopback)
        if is_made:
            chosen = _made_token()
        path = only_server(socket)
        access = Access(_hosts(host, port, allow_host or [], is_loopback), chosen, admin=admin)
        listener = listen_at(host, port)
        shown = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        fragment = f"#token={chosen}" if is_made else ""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the page takes it
        with suppress(KeyboardInterrupt):
            _warn_of_nobody(path)
            typer.echo(f"{path} is shown at {shown}{fragment}")
            run_page(path, listener, access, partial(read_keys_apart, tokenizer=tokenizer))


def _warn_of_nobody(path: Path) -> None:
    """A page may be there before its server is."""
    try:
        ask(path, lambda client: client.ping())
    except ServerUnavailable as e:
        typer.echo(f"warning: {e}\nthe page goes on asking", err=True)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(
            f"--listen {text!r} is no address and port", hint="for example 127.0.0.1:8765"
        )
    if host != "localhost":
        try:
            ipaddress.ip_address(host)
        except ValueError as e:
            raise ConfigError(
                f"--listen {text!r}: {host!r} is no IP address",
                hint="name an address of this machine; --allow-host takes names",
            ) from e
    return host, int(port)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def _hosts(host: str, port: int, allowed: list[str], is_loopback: bool) -> set[str]:
    """What browsers may call the page."""
    names = {f"[{host}]" if ":" in host else host, *(_LOOPBACK_NAMES if is_loopback else ())}
    ports = {f":{port}"} | ({""} if port == _HTTP_PORT else set())  # browsers leave it out
    return {name + said for name in names for said in ports} | set(allowed)


def _token(token_file: Path | None, token: str | None) -> str | None:
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(
                f"cannot read --token-file {token_file}: {why_unreadable(e)}",
                hint="openssl rand -hex 32 > FILE; chmod 600 FILE makes one",
            ) from e
    if token is not None and (len(token) < _SHORTEST_TOKEN or not token.isascii()):
        raise ConfigError(
            f"the page's token has fewer than {_SHORTEST_TOKEN} ASCII characters",
            hint="openssl rand -hex 32 prints a good one",
        )
    return token


def _made_token() -> str:
    if not sys.stdout.isatty():
        raise ConfigError(
            "this page needs a token, and one that is made here would end up in a log",
            hint="openssl rand -hex 32 > FILE; chmod 600 FILE; kvstrata page --token-file FILE",
        )
    return secrets.token_urlsafe(32)
