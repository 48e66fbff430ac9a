"""`kvstrata pin` and `unpin`: blocks that an operator keeps from leaving, for a time."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from kvstrata.cli.reporting import FAILED, UNREADABLE_HINT, JsonFlag, reported, why_unreadable
from kvstrata.cli.servers import (
    KNOWN_REQUESTS,
    SocketOption,
    ask,
    key_as_given,
    namespace_as_given,
)
from kvstrata.core.errors import ConfigError, KVStrataError, LimitExceeded, NoTiers

if TYPE_CHECKING:
    from kvstrata.core.types import BlockKey
    from kvstrata.server.client import ManagerClient

__all__ = ["pin", "unpin"]

_NOT_HERE: Final = "none of these blocks is in host memory or on disk"
_UNKNOWN_HINT: Final = f"name keys, or an earlier request with the same prompt; {KNOWN_REQUESTS}"


class _Answer(NamedTuple):
    """What one server says to a pin."""

    number: int = 0  # 0: nothing is pinned
    blocks: int = 0
    is_known: bool = False  # the request, where one was named
    refused: KVStrataError | None = None


def pin(  # noqa: PLR0913 - each is an option
    key: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of a prompt's blocks, in order, as hex."),
    ] = None,
    *,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Namespace of these blocks, as inspect shows it."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            metavar="REQUEST",
            help="Instead of keys: the prompt of a recent request, by the id in its response.",
        ),
    ] = None,
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

    Pins the blocks of a prompt, named by a request or by their keys, from the first on as far as
    the server has them, half as many as the smaller tier holds at most. They stay in the tiers that
    they are in: a block that is only on disk is not copied to host memory. Prints the number of the
    pin, which ends it before its time: kvstrata unpin NUMBER. kvstrata inspect lists pins.

    Exits with 1 if nothing is pinned or no server answers.
    """
    with reported():
        if request is not None:
            if key or keys_from is not None or namespace is not None:
                raise ConfigError(
                    "--request and keys with a --namespace are two ways to name blocks",
                    hint="give one of them",
                )
            _pin(socket, _request_pinner(request, ttl), ttl, as_json=as_json, request=request)
            return
        blocks = [key_as_given(each) for each in _all_keys(key, keys_from)]
        if namespace is None:
            raise ConfigError(
                "keys are given and no --namespace",
                hint="take it from kvstrata inspect, or name a recent request: --request",
            )
        where = namespace_as_given(namespace)
        _pin(socket, _key_pinner(where, blocks, ttl), ttl, as_json=as_json, asked=len(blocks))


def unpin(
    number: Annotated[
        int, typer.Argument(metavar="NUMBER", min=1, max=2**31 - 1, help="Number of the pin.")
    ],
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
            hint = "kvstrata inspect lists those that there are"
            typer.echo(f"error: {path} has no pin {number}\n  hint: {hint}", err=True)
            raise typer.Exit(FAILED)


_Pinner = Callable[["ManagerClient"], _Answer]


def _key_pinner(where: bytes, blocks: "list[BlockKey]", ttl: float) -> _Pinner:
    return lambda client: _Answer(*client.pin(where, blocks, ttl))


def _request_pinner(request: str, ttl: float) -> _Pinner:
    def pin_request(client: "ManagerClient") -> _Answer:
        number, blocks = client.pin_request(request, ttl)
        return _Answer(number, blocks, bool(number or client.explain(request)))

    return pin_request


def _pin(
    socket: Path | None,
    pinner: _Pinner,
    ttl: float,
    *,
    as_json: bool,
    asked: int | None = None,
    request: str | None = None,
) -> None:
    """Ask all servers to pin, and print what they have; one that refuses stops no other."""

    def attempt(client: "ManagerClient") -> _Answer:
        try:
            return pinner(client)
        except (NoTiers, LimitExceeded) as e:
            return _Answer(refused=e)

    answers = ask(socket, attempt)
    pinned = [(path, answer) for path, answer in answers if answer.number]
    if as_json:
        rows = [{"socket": str(p), "number": a.number, "blocks": a.blocks} for p, a in pinned]
        typer.echo(json.dumps({"pins": rows}, indent=2))
    else:
        of = "" if asked is None else f"of {asked} "
        for path, answer in pinned:
            typer.echo(
                f"pin {answer.number} at {path}: {answer.blocks} {of}blocks for {ttl:g} seconds"
            )
    if not pinned:
        _raise_refusal([answer.refused for _, answer in answers])
        is_known = request is None or any(answer.is_known for _, answer in answers)
        unknown = f"no server knows a request {request!r}\n  hint: {_UNKNOWN_HINT}"
        why = _NOT_HERE if is_known else unknown
        typer.echo(f"error: nothing is pinned: {why}", err=True)
        raise typer.Exit(FAILED)


def _raise_refusal(refusals: list[KVStrataError | None]) -> None:
    """A server that has no room has the blocks; one without tiers matters if all are so."""
    for refusal in refusals:
        if isinstance(refusal, LimitExceeded) or (refusal is not None and all(refusals)):
            raise refusal


def _all_keys(keys: list[str] | None, keys_from: Path | None) -> list[str]:
    found = list(keys or [])
    if keys_from is not None:
        try:
            is_stdin = str(keys_from) == "-"
            found += (sys.stdin.read() if is_stdin else keys_from.read_text()).split()
        except (OSError, UnicodeDecodeError) as e:
            why = why_unreadable(e)
            raise ConfigError(f"cannot read {keys_from}: {why}", hint=UNREADABLE_HINT) from e
    if not found:
        raise ConfigError(
            "no key is given",
            hint="name keys, a file of keys (--keys-from), or a recent request (--request)",
        )
    return found
