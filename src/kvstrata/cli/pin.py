"""`kvstrata pin` and `unpin`: blocks that an operator keeps from leaving, for a time."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstrata.cli.reporting import FAILED, JsonFlag, reported
from kvstrata.cli.servers import SocketOption, ask
from kvstrata.core.errors import ConfigError
from kvstrata.core.types import BLOCK_KEY_BYTES, NAMESPACE_ID_BYTES

if TYPE_CHECKING:
    from kvstrata.core.types import BlockKey

__all__ = ["pin", "unpin"]

_NOTHING: Final = "nothing is pinned: the server has none of these blocks, or no more may be pinned"


def pin(
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="Keys of a prompt's blocks, in order, as hex."),
    ] = None,
    *,
    namespace: Annotated[
        str, typer.Option(metavar="HEX", help="Namespace of the blocks, as inspect shows it.")
    ],
    ttl: Annotated[
        float, typer.Option(min=0.001, max=1e9, metavar="SECONDS", help="How long they stay.")
    ] = 3600.0,
    keys_from: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the keys from a file, one a line; - is stdin."),
    ] = None,
    socket: SocketOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Keep blocks from leaving host memory and disk, for a time.

    Pins as many of the leading keys as the server has, half of its blocks at most, and prints the
    number of the pin, which ends it before its time: kvstrata unpin NUMBER.

    Exits with 1 if nothing is pinned or no server answers.
    """
    with reported():
        where = _hex(namespace, NAMESPACE_ID_BYTES, "a namespace")
        blocks = [_hex(key, BLOCK_KEY_BYTES, "a key") for key in _all_keys(keys, keys_from)]
        answers = ask(socket, lambda client: client.pin(where, blocks, ttl))
        pinned = [(path, number, held) for path, (number, held) in answers if number]
        if as_json:
            rows = [{"socket": str(p), "number": n, "blocks": b} for p, n, b in pinned]
            typer.echo(json.dumps({"pins": rows}, indent=2))
        else:
            for path, number, held in pinned:
                typer.echo(
                    f"pin {number} at {path}: {held} of {len(blocks)} blocks for {ttl:g} seconds"
                )
        if not pinned:
            typer.echo(f"error: {_NOTHING}", err=True)
            raise typer.Exit(FAILED)


def unpin(
    number: Annotated[int, typer.Argument(min=1, max=2**31 - 1, help="Number of the pin.")],
    *,
    socket: SocketOption = None,
) -> None:
    """End a pin before its time.

    Exits with 1 if there is none of that number, or no server answers. With several servers give
    the socket: each has numbers of its own.
    """
    with reported():
        answers = ask(socket, lambda client: client.ping())
        if len(answers) > 1:
            raise ConfigError(
                f"{len(answers)} servers are running, and each numbers its pins itself",
                hint="name the one that kvstrata pin has shown: --socket",
            )
        ((path, _),) = answers
        ((_, was_there),) = ask(path, lambda client: client.unpin(number))
        if not was_there:
            typer.echo(f"error: {path} has no pin {number}", err=True)
            raise typer.Exit(FAILED)


def _all_keys(keys: list[str] | None, keys_from: Path | None) -> list[str]:
    found = list(keys or [])
    if keys_from is not None:
        try:
            is_stdin = str(keys_from) == "-"
            found += (sys.stdin.read() if is_stdin else keys_from.read_text()).split()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"cannot read {keys_from}: {e}") from e
    if not found:
        raise ConfigError("no key is given", hint="name keys, or a file of keys: --keys-from")
    return found


def _hex(text: str, length: int, what: str) -> "BlockKey":
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != length:
        raise ConfigError(f"{text!r} is not {what}: {2 * length} hexadecimal digits")
    return value
