"""`kvstrata replay`: what a cache of some size would have given on recorded traffic."""

import errno
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

import typer

from kvstrata.cli import replay_options as o
from kvstrata.cli.reporting import JsonFlag, reported
from kvstrata.cli.sizes import size_of
from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.cli.replay_report import Report
    from kvstrata.core.tier_fields import Eviction
    from kvstrata.core.write_rule import WriteRule
    from kvstrata.replay.cost import Costs, Model
    from kvstrata.replay.formats import Reading
    from kvstrata.replay.outcome import Outcome
    from kvstrata.replay.runs import Run, Study
    from kvstrata.replay.sizes import Sizes
    from kvstrata.replay.trace import Trace

__all__ = ["replay"]

_GIGA: Final = 1e9


def replay(  # noqa: PLR0913 - each is an option
    trace: o.TraceArgument = None,
    *,
    host: o.Host = "64GiB",
    disk: o.Disk = None,
    device: o.Device = None,
    policy: o.Policies = "lru",
    disk_write: o.DiskWrite = "saved",
    sweep: o.Sweep = None,
    goal: o.Goal = 0.8,
    trace_format: o.Format = o.FormatName.AUTO,
    tokens_per_id: o.IdTokens = None,
    seconds_per_unit: o.SecondsPerUnit = None,
    label: o.Labels = None,
    tokens_per_block: o.BlockTokens = None,
    kv_bytes_per_token: o.TokenBytes = None,
    layers: o.Layers = 32,
    kv_heads: o.KVHeads = 8,
    head_size: o.HeadSize = 128,
    dtype: o.DType = "bfloat16",
    mla: o.MLA = False,
    prefill_rate: o.PrefillRate = 20_000,
    attention_tokens: o.AttentionTokens = 30_000,
    host_gbps: o.HostGBps = 20,
    disk_gbps: o.DiskGBps = 3,
    plot: o.Plot = None,
    jobs: o.Jobs = None,
    work_dir: o.WorkDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Run this cache's index, pools, policies and planner on a trace, without engine and bytes.

    Prints which share of all blocks would have been hits, in which tier, what would have been
    moved for it, the prefill that is saved, and the most hits that any cache of that size can have.

        kvstrata replay trace.jsonl --disk 1TiB --policy lru,s3fifo,cost

        kvstrata replay trace.jsonl --sweep host=16GiB..512GiB --plot hits.png

    A trace has the fields of Mooncake's traces (timestamp, input_length, output_length, hash_ids)
    or is an event log of ours. Bytes are those of the model, by default Llama-3.1-8B.

    Exits with 2 if the trace cannot be read, or an option is wrong.
    """
    with reported():
        from kvstrata.cli.replay_report import Report
        from kvstrata.replay.cost import Costs, Model, Rates
        from kvstrata.replay.formats import Reading, parse_labels
        from kvstrata.replay.simulator import CachePlan

        if plot is not None:
            _check_plot(plot, sweep)
        rule = _write_rule(disk_write)
        token_bytes = None
        if kv_bytes_per_token is not None:
            token_bytes = size_of("--kv-bytes-per-token", kv_bytes_per_token)
        model = Model(layers, kv_heads, head_size, dtype, mla, token_bytes)
        rates = Rates(prefill_rate, attention_tokens, host_gbps * _GIGA, disk_gbps * _GIGA)
        labels = parse_labels(label or [])
        reading = Reading(
            trace_format.value, tokens_per_id, seconds_per_unit, labels, tokens_per_block
        )
        opened = _open(trace, reading)
        costs = Costs(rates, opened.tokens_per_block, _block_bytes(opened, model))
        sizes = _sizes(host, disk, sweep or [], costs)
        runs: list[Run] = [
            CachePlan(name, each, rule) for each in sizes for name in _policies(policy)
        ]
        runs += sizes  # the optimum
        cores = len(os.sched_getaffinity(0))
        work = _Work(opened, costs, _device_blocks(device, costs), runs, jobs or cores)
        with _workplace(work_dir) as folder:
            study, outcomes = _do(work, folder)
    _show(Report(opened, study, outcomes, goal if sweep else None), plot, as_json=as_json)


class _Work(NamedTuple):
    trace: "Trace"
    costs: "Costs"
    device_blocks: int
    runs: "Sequence[Run]"
    jobs: int


def _do(work: _Work, folder: Path) -> "tuple[Study, list[Outcome]]":
    """Read the trace and replay it, with a bar on standard error if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from kvstrata.replay.reuse import find_reuse
    from kvstrata.replay.runs import Study, run_all
    from kvstrata.replay.scan import scan

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the trace", total=None)
        spool = scan(
            work.trace,
            folder,
            device_blocks=work.device_blocks,
            on_read=lambda done, total: bar.update(task, completed=done, total=total),
        )
        bar.update(task, description="looking for blocks that come again")
        study = Study(spool, find_reuse(spool), work.costs)
        title = f"replaying, {len(work.runs)} times"
        bar.update(task, description=title, completed=0, total=len(work.runs) * spool.events)
        outcomes = run_all(
            study,
            work.runs,
            jobs=work.jobs,
            on_event=lambda done: bar.update(task, completed=done),
        )
    return study, outcomes


def _show(report: "Report", plot: Path | None, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.as_plain(), indent=2))
    else:
        report.print()
    if plot is not None:
        from kvstrata.cli.replay_plot import draw

        draw(plot, report)
        typer.echo(f"drawn in {plot}", err=True)


def _open(path: Path | None, reading: "Reading") -> "Trace":
    from kvstrata.replay.formats import open_trace, sample_path

    if path is None:
        typer.echo("no trace is given: this is the synthetic one that comes with us", err=True)
    return open_trace(path or sample_path(), reading)


def _block_bytes(trace: "Trace", model: "Model") -> int:
    """Of a block of *trace*: what an event log says, or what *model* needs."""
    return trace.block_bytes or model.bytes_per_block(trace.tokens_per_block)


def _sizes(host: str, disk: str | None, sweep: list[str], costs: "Costs") -> "list[Sizes]":
    from kvstrata.core.units import human_bytes
    from kvstrata.replay.sizes import parse_axis, sizes_of

    axes = [parse_axis(text) for text in sweep]
    disk_bytes = 0 if disk is None else size_of("--disk", disk)
    sizes = sizes_of(size_of("--host", host), disk_bytes, axes)
    for each in sizes:
        for tier, size_bytes in (("host", each.host_bytes), ("disk", each.disk_bytes)):
            if 0 < size_bytes < costs.block_bytes:
                raise ConfigError(
                    f"{tier}: {human_bytes(size_bytes)} hold no block of "
                    f"{human_bytes(costs.block_bytes)}",
                    hint=f"give more with --{tier}, or say with --layers … what model it is",
                )
    return sizes


def _policies(names: str) -> "list[Eviction]":
    from kvstrata.core.tier_fields import Eviction

    known: tuple[Eviction, ...] = get_args(Eviction)
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown or len(set(wanted)) != len(wanted):
        raise ConfigError(
            f"--policy {names}: "
            + (f"no policy {unknown[0]!r}" if unknown else "one is there twice"),
            hint=f"give one or more of {', '.join(known)}, with commas between",
        )
    return [name for name in known if name in wanted]


def _device_blocks(device: str | None, costs: "Costs") -> int:
    return 0 if device is None else size_of("--device", device) // costs.block_bytes


def _write_rule(text: str) -> "WriteRule":
    from kvstrata.core.write_rule import parse_write_rule

    try:
        return parse_write_rule(text)
    except ConfigError as e:
        raise ConfigError(f"--disk-write: {e.args[0]}", hint=e.hint) from None


def _check_plot(plot: Path, sweep: list[str] | None) -> None:
    from kvstrata.cli.demo_plot import check_plot

    if not sweep:
        raise ConfigError(
            "--plot draws a sweep, and there is none",
            hint="give sizes to try, for example --sweep host=16GiB..512GiB",
        )
    check_plot(plot)


@contextmanager
def _workplace(work_dir: Path | None) -> Iterator[Path]:
    """A directory that is gone afterwards."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="kvstrata-replay-", dir=work_dir)
    except OSError as e:
        raise ConfigError(
            f"no directory can be made in {work_dir or tempfile.gettempdir()}: {e.strerror}",
            hint="name a writable directory with --work-dir",
        ) from e
    with folder as name:
        try:
            yield Path(name)
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
            raise ConfigError(
                f"{name} has no room for the trace in compact form",
                hint="name a directory with more room with --work-dir: 32 bytes for each block",
            ) from e
