"""`kvstrata demo`: what KVStrata gains and that it changes no token, on this machine."""

import importlib.util
import json
import random
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstrata.cli.reporting import FAILED, JsonFlag, ending_in_order, plain_console, reported
from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from kvstrata.cli.demo_engine import EngineOrders
    from kvstrata.cli.demo_report import Measured

__all__ = ["demo"]

PROMPT_TOKENS: Final = 2049  # 2048 can be reused, and one must be computed
_TOKENS_PER_BLOCK: Final = 64
_OUTPUT_TOKENS: Final = 16
_VOCABULARY: Final = 1024
_TIERS: Final = "host:512MiB | disk:{}:1GiB"
_SEED: Final = 20


def demo(
    *,
    prompts: Annotated[int, typer.Option(min=1, max=10, help="Prompts that are timed.")] = 5,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the table too (extra 'plot').")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Work in this empty directory and leave all there."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Start vLLM three times with a small random model and show what a hit in each tier saves.

    Exits with 1 if a token differs from those without KVStrata, or if a hit did not hit.
    """
    from rich.console import Console

    began = time.monotonic()
    with reported():
        _check_environment()
        if plot is not None:
            from kvstrata.cli.demo_plot import check_plot

            check_plot(plot)
        with ending_in_order(), _workplace(keep) as folder:
            measured, device = _measure(folder, prompts, Console(stderr=True))
    if as_json:
        typer.echo(json.dumps(measured.as_plain(), indent=2))
    else:
        _print(measured, device, time.monotonic() - began)
    if plot is not None:
        from kvstrata.cli.demo_plot import draw

        draw(plot, f"prompts of {PROMPT_TOKENS:,} tokens on {device}", measured.series())
        typer.echo(f"drawn in {plot}", err=True)
    if keep is not None:
        typer.echo(f"all of it is left in {keep}", err=True)
    elif not as_json:
        typer.echo("kvstrata demo --keep DIR leaves the model, for kvstrata serve", err=True)
    if measured.faults():
        raise typer.Exit(FAILED)


def _check_environment() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "the demo runs vLLM, which is not installed",
            hint="pip install 'kvstrata[vllm]'",
        )


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="kvstrata-demo-") as name:
            yield Path(name)
        return
    folder = keep.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in folder.iterdir()]
    except OSError as e:
        raise ConfigError(f"--keep {keep}: {e.strerror}", hint="name an empty directory") from e
    if names:
        raise ConfigError(
            f"--keep {keep}: it holds {min(names)!r} already, and a cold run needs an empty cache",
            hint="name an empty directory",
        )
    yield folder


def _measure(folder: Path, prompts: int, console: "Console") -> "tuple[Measured, str]":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvstrata.cli.demo_report import Measured

    measured = Measured(PROMPT_TOKENS, _TOKENS_PER_BLOCK)
    device = ""
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for number, (title, orders) in enumerate(_plan(folder, prompts), start=1):
            if not console.is_terminal:
                console.print(f"engine {number}, {title} …")
            log = folder / f"engine-{number}.log"
            device = _follow(progress, f"engine {number}, {title}", orders, log, measured)
            medians = measured.medians(orders.phases)
            console.print(f"engine {number}, {title}: {medians}", highlight=False, soft_wrap=True)
    return measured, device


def _plan(folder: Path, prompts: int) -> "list[tuple[str, EngineOrders]]":
    from kvstrata.cli.demo_engine import EngineOrders, Phase

    choose = random.Random(_SEED)
    texts = [
        [choose.randrange(1, _VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(prompts + 1)
    ]

    def orders(phases: list[Phase], tiers: str | None) -> EngineOrders:
        engine_id = f"kvstrata-demo-{secrets.token_hex(8)}"
        model = str(folder / "model")
        return EngineOrders(model, texts, _OUTPUT_TOKENS, phases, engine_id, tiers)

    tiers = _TIERS.format(folder / "disk")
    return [
        ("without KVStrata", orders(["plain"], None)),
        ("with KVStrata", orders(["cold", "device", "host"], tiers)),
        ("restarted", orders(["disk"], tiers)),
    ]


def _follow(
    progress: "Progress", title: str, orders: "EngineOrders", log: Path, measured: "Measured"
) -> str:
    """Run one engine to its end; the device that it ran on."""
    from kvstrata.cli.demo_engine import Answered, PhaseEnded
    from kvstrata.cli.demo_process import EngineFailed, events_of
    from kvstrata.cli.demo_report import TITLES

    device = ""
    wanted = len(orders.prompts) * len(orders.phases)
    task = progress.add_task(f"{title}: starting", total=wanted)
    with closing(events_of(orders, log)) as events:
        for event in events:
            if isinstance(event, Answered | PhaseEnded):
                measured.add(event)
                progress.update(
                    task,
                    description=f"{title}: {TITLES[event.phase].partition(',')[0]}",
                    advance=isinstance(event, Answered),
                )
            else:
                device = event.device
    if not all(phase in measured.found_blocks for phase in orders.phases):
        raise EngineFailed("an engine has ended before all prompts were answered", hint=str(log))
    return device


def _print(measured: "Measured", device: str, seconds: float) -> None:
    from rich.text import Text

    console = plain_console()
    timed = len(measured.answers["plain"]) - 1
    console.print(
        f"vLLM on {device}, random Llama in float32, medians of {timed} prompts of "
        f"{measured.prompt_tokens:,} tokens, {_OUTPUT_TOKENS} generated; speed-up over the median of all "
        "cold prompts\n",
        soft_wrap=True,
    )
    console.print(measured.table())
    if not measured.is_steady:
        console.print(
            "\nthe cold medians, of two engines at two times, differ by more than a quarter: something "
            "else probably uses this machine, and the figures are not to be compared closely",
            soft_wrap=True,
        )
    faults = measured.faults()
    for fault in faults:
        console.print(Text.assemble(("wrong", "bold red"), f" {fault}"))
    verdict = "failed" if faults else "every hit has hit and no token differs"
    console.print(f"\n{verdict}; {seconds:.0f} s")
