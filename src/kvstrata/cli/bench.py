"""`kvstrata bench`: KVStrata in vLLM beside its peers, on this machine."""

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstrata.cli.reporting import JsonFlag, ending_in_order, reported
from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.bench.models import Model
    from kvstrata.bench.record import Machine, Options, RunFolder
    from kvstrata.bench.session import Progress

__all__ = ["bench"]

_OUTPUT: Final = Path("kvstrata-bench")


def bench(  # noqa: PLR0913 - each is an option
    *,
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="`quick` (five minutes on two cores), or `full`.")
    ] = "quick",
    workload: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this one; repeatable. Unset: the profile's."),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this one; repeatable. Unset: the profile's that can run here.",
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Of each workload. Unset: the profile's.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A folder or a name on the hub. Unset: small and random."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="In Mooncake's format, instead of the sample."),
    ] = None,
    lmcache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="LMCache is installed there (pip install --target)."),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Of the run: every measurement, tables and drawings."),
    ] = _OUTPUT,
    as_json: JsonFlag = False,
) -> None:
    """Run vLLM with KVStrata, its peers and no connector on the same prompts, in turn.

    A run that was cut off goes on where it was when it is started again. Exits with 1 if something
    that should have been a hit was none.
    """
    with reported():
        options = _options(profile, workload, contender, rounds, model, trace, lmcache)
        folder = _folder(output, options)
        with ending_in_order(), _scratch() as scratch, _shown(options, folder) as progress:
            from kvstrata.bench.record import begun_now
            from kvstrata.bench.session import Session

            made, machine = _model(options, scratch), _machine(options, scratch)
            Session(folder, options, made, machine, begun_now(), scratch, progress).go()
        _report(folder, as_json)


def _options(  # noqa: PLR0913, PLR0917 - each is an option
    profile: str,
    workload: list[str] | None,
    contender: list[str] | None,
    rounds: int | None,
    model: str | None,
    trace: Path | None,
    lmcache: Path | None,
) -> "Options":
    """What is to be run; ``ConfigError`` if it is contradictory or cannot run here."""
    from kvstrata.bench.contenders import CONTENDERS
    from kvstrata.bench.profiles import PROFILES
    from kvstrata.bench.record import Options
    from kvstrata.bench.workloads import NAMES

    _check_names("--profile", [profile], list(PROFILES))
    _check_names("--workload", workload or [], NAMES)
    _check_names("--contender", contender or [], list(CONTENDERS))
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "the bench runs vLLM, which is not installed", hint="pip install 'kvstrata[vllm]'"
        )
    if lmcache is not None and not (lmcache / "lmcache").is_dir():
        raise ConfigError(
            f"--lmcache {lmcache}: no LMCache is installed there",
            hint="pip install --no-deps --target DIR -r bench/lmcache.lock, and name DIR",
        )
    chosen = PROFILES[profile]
    contenders = _able(contender, chosen.contenders, lmcache)
    return Options(
        profile=profile,
        workloads=_manned(workload, chosen.workloads, contenders),
        contenders=contenders,
        rounds=rounds,
        model=model,
        trace=None if trace is None else str(trace.absolute()),
        lmcache=None if lmcache is None else str(lmcache.absolute()),
    )


def _check_names(option: str, given: list[str], known: "list[str] | tuple[str, ...]") -> None:
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{option} {name}: there is none of that name", hint=f"one of {', '.join(known)}"
            )


def _able(asked: list[str] | None, usual: tuple[str, ...], lmcache: Path | None) -> tuple[str, ...]:
    """Those asked for, or all of *usual* that can run here; in one order, each once."""
    from kvstrata.bench.contenders import CONTENDERS
    from kvstrata.bench.services import find_valkey

    lacking = {
        "lmcache": None if lmcache else "--lmcache DIR",
        "valkey": None if find_valkey() else "valkey-server or redis-server",
        "kvstrata": None,
    }
    able = []
    for name in [name for name in CONTENDERS if name in (asked or usual)]:
        needs = " and ".join(n for n in map(lacking.get, CONTENDERS[name].services) if n)
        if not needs:
            able.append(name)
        elif asked:
            raise ConfigError(f"--contender {name}: it needs {needs}", hint="give it, or leave it")
        else:
            typer.echo(f"{name} is left out: it needs {needs}", err=True)
    return tuple(able)


def _manned(
    asked: list[str] | None, usual: tuple[str, ...], contenders: tuple[str, ...]
) -> tuple[str, ...]:
    """Those asked for, or all of *usual* that one of *contenders* takes part in.

    The last ones leave engines behind that have gone through faults: their order is not the user's.
    """
    from kvstrata.bench.workloads import workloads

    manned = []
    for name, made in workloads().items():
        if name not in (asked or usual):
            continue
        if any(contender in made.contenders for contender in contenders):
            manned.append(name)
        elif asked:
            raise ConfigError(
                f"--workload {name}: none of the contenders takes part in it",
                hint=f"choose some of {', '.join(made.contenders)}",
            )
    return tuple(manned)


def _folder(output: Path, options: "Options") -> "RunFolder":
    from kvstrata.bench.record import RunFolder

    try:
        return RunFolder(output.absolute(), options)
    except OSError as e:
        raise ConfigError(f"--output {output}: {e.strerror}", hint="name another one") from e


def _model(options: "Options", scratch: Path) -> "Model":
    from vllm.platforms import current_platform

    from kvstrata.bench.models import random_model, users_model

    on_cpu = current_platform.is_cpu()
    if options.model is None:
        return random_model(scratch / "model", on_cpu)
    return users_model(options.model, on_cpu)


def _machine(options: "Options", scratch: Path) -> "Machine":
    from vllm.platforms import current_platform

    from kvstrata.bench.contenders import CONTENDERS
    from kvstrata.bench.fleet import environment
    from kvstrata.bench.record import this_machine
    from kvstrata.bench.services import versions

    beside = {service for name in options.contenders for service in CONTENDERS[name].services}
    lmcache = Path(options.lmcache) if options.lmcache else None
    return this_machine(
        current_platform.device_type,
        environment(None)["VLLM_CPU_OMP_THREADS_BIND"],
        scratch,
        versions(beside, lmcache),
    )


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as name:
        yield Path(name)


@contextmanager
def _shown(options: "Options", folder: "RunFolder") -> "Iterator[Progress]":
    """A bar of all rounds on standard error; those that were measured before are done.

    Where that is no terminal, a line for each round.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvstrata.bench.session import rounds_of

    numbers = [
        folder.is_done(name, number)
        for name in options.workloads
        for number in range(rounds_of(options, name))
    ]
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console) as bar:
        done = sum(numbers)
        task = bar.add_task("", total=len(numbers), completed=done)

        class Shown:
            def say(self, doing: str) -> None:
                bar.update(task, description=doing)

            def advance(self, share: float) -> None:
                bar.advance(task, share)

            def end_round(self) -> None:
                nonlocal done
                done += 1
                bar.update(task, completed=done)
                if not console.is_terminal:
                    doing = bar.tasks[task].description
                    typer.echo(f"{doing}: {done} of {len(numbers)} rounds", err=True)

        yield Shown()


def _report(folder: "RunFolder", as_json: bool) -> None:
    from kvstrata.bench.report import as_plain, markdown, results_of

    text, plain = markdown(folder), as_plain(folder)
    (folder.path / "report.md").write_text(text)
    (folder.path / "report.json").write_text(json.dumps(plain, indent=1) + "\n")
    results = results_of(folder)
    if importlib.util.find_spec("matplotlib") is None:
        typer.echo("nothing is drawn: matplotlib is not installed", err=True)
    else:
        from kvstrata.bench.plot import draw

        for workload in results.workloads():
            draw(folder.path / f"{workload}.png", results, workload)
    if as_json:
        typer.echo(json.dumps(plain, indent=1))
    else:
        _print(text)
    typer.echo(f"everything is in {folder.path}", err=True)
    if any(figures.not_as_meant for figures in results.every()):
        raise typer.Exit(1)


def _print(text: str) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        typer.echo(text)
