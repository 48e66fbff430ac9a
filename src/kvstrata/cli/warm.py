"""`kvstrata warm`: bring prompts up into host memory before somebody asks for them."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from kvstrata.cli.reporting import FAILED, UNREADABLE_HINT, JsonFlag, reported, why_unreadable
from kvstrata.cli.servers import (
    KNOWN_REQUESTS,
    SocketOption,
    key_as_given,
    namespace_as_given,
    only_server,
)
from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.core.keys import Keys
    from kvstrata.core.types import NamespaceId
    from kvstrata.server.client import ManagerClient
    from kvstrata.server.warming import Warmed

__all__ = ["warm"]

_ANSWER_SECONDS: Final = 10.0
_FILE_BYTES: Final = 256 << 20


class _Prompt(NamedTuple):
    name: str
    namespace: "NamespaceId"
    keys: "Keys"


def warm(  # noqa: PLR0913 - each is an option
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Prompts, one a line as JSON: a list of token ids, or a text; - is stdin.",
        ),
    ] = None,
    *,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model or folder whose tokenizer reads the texts."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="REQUEST", help="Instead: the prompt of a recent request, by its id."),
    ] = None,
    keys_from: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead: the keys of one prompt, as hex, one a line."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Of the engine that will ask; unset: the only one."),
    ] = None,
    socket: SocketOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Bring blocks of prompts up from disk or a remote tier into host memory, and show how far it is.

    A prompt comes as far as its blocks are in some tier and host memory has room; others leave for it
    as for any request. Prompts of tokens alone have keys that can be made here: not with LoRA, images or
    a cache salt; that needs vLLM, and texts need transformers. With several servers give the socket.

    Exits with 1 if some prompt is not whole in host memory at the end, or no server answers.
    """
    with reported():
        from kvstrata.cli.prompt_file import read_prompts
        from kvstrata.server.client import observe

        ways = sum(each is not None for each in (file, request, keys_from))
        if ways != 1:
            raise ConfigError(
                "prompts are named in several ways" if ways else "nothing says which prompts",
                hint="give one of FILE, --request and --keys-from",
            )
        named = file if keys_from is None else keys_from
        content = b"" if named is None else _read(named)
        path = only_server(socket)
        with closing(observe(path, timeout_seconds=_ANSWER_SECONDS)) as client:
            if request is not None:
                found = [_of_request(client, request)]
            else:
                where, parts = _namespace(client, namespace)
                if keys_from is not None:
                    listed = content.decode(errors="replace").split()
                    keys = [key_as_given(each) for each in listed]
                    found = [_Prompt(str(keys_from), where, keys)]
                else:
                    prompts = read_prompts(content, str(file), parts, tokenizer)
                    found = [_Prompt(name, where, keys) for name, keys in prompts]
            _bring_up(client, found, as_json=as_json)


def _bring_up(client: "ManagerClient", prompts: list[_Prompt], *, as_json: bool) -> None:
    from kvstrata.server.warming import warm as bring_up

    rows = []
    with _shown() as (show, say):
        for prompt in prompts:

            def progress(state: "Warmed", name: str = prompt.name) -> None:
                show(name, state)

            state = bring_up(client, prompt.namespace, prompt.keys, progress)
            rows.append({"prompt": prompt.name, **state._asdict()})
            if not as_json:
                say(
                    f"{prompt.name}: {state.host_blocks:,} of {state.asked_blocks:,} blocks are in "
                    "host memory"
                )
    if as_json:
        typer.echo(json.dumps({"prompts": rows}, indent=2))
    if any(row["host_blocks"] != row["asked_blocks"] for row in rows):
        raise typer.Exit(FAILED)


@contextmanager
def _shown() -> Iterator[tuple[Callable[[str, "Warmed"], None], Callable[[str], None]]]:
    """Draws how far it is, where standard error is a terminal; and says a line, which the bar leaves whole."""
    if not sys.stderr.isatty():
        yield (lambda _name, _state: None), typer.echo
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(name: str, state: "Warmed") -> None:
            bar.update(
                task, description=name, completed=state.host_blocks, total=state.asked_blocks
            )

        def say(line: str) -> None:
            bar.stop()
            typer.echo(line)
            bar.start()

        yield show, say


def _of_request(client: "ManagerClient", request: str) -> _Prompt:
    for decision in reversed(client.explain(request)):
        namespace, last = bytes.fromhex(decision.namespace), bytes.fromhex(decision.last_block)
        keys = client.prompt(namespace, last) if last else []
        if len(keys):
            return _Prompt(request, namespace, keys)
    typer.echo(
        f"error: no block of a request {request!r} is known\n"
        f"  hint: name keys or prompts instead; {KNOWN_REQUESTS}",
        err=True,
    )
    raise typer.Exit(FAILED)


def _namespace(client: "ManagerClient", given: str | None) -> "tuple[NamespaceId, dict[str, str]]":
    report = client.stats()
    known = {each.namespace: each.parts for each in report.namespaces} if report else {}
    if given is not None:
        return namespace_as_given(given), known.get(given, {})
    used = [name for name, parts in known.items() if parts]
    if not used:
        raise ConfigError(
            "no engine has used this server yet, so no namespace is known",
            hint="start an engine with it, or name the namespace that its disk or remote tier has: --namespace",
        )
    if len(used) > 1:
        raise ConfigError(
            f"{len(used)} namespaces are in use: {', '.join(used)}",
            hint="name the one of the engine that will ask, as kvstrata inspect shows it: --namespace",
        )
    return bytes.fromhex(used[0]), known[used[0]]


def _read(file: Path) -> bytes:
    try:
        if str(file) == "-":
            content = sys.stdin.buffer.read(_FILE_BYTES + 1)
        else:
            with file.open("rb") as source:
                content = source.read(_FILE_BYTES + 1)
    except OSError as e:
        why = why_unreadable(e)
        raise ConfigError(f"cannot read {file}: {why}", hint=UNREADABLE_HINT) from e
    if len(content) > _FILE_BYTES:
        raise ConfigError(f"{file} has more than {_FILE_BYTES:,} bytes", hint="split it")
    return content
