"""What `kvstrata top` draws."""

from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstrata.cli.reporting import plain_table
from kvstrata.cli.top_verbs import VERBS, Line
from kvstrata.core.units import human_bytes
from kvstrata.server.page.samples import activity

if TYPE_CHECKING:
    from kvstrata.manager.report import CacheReport, RunReport, TierReport
    from kvstrata.server.page.sampler import Seen

__all__ = ["picture"]

COLORS: Final = {"host": "blue", "disk": "yellow", "remote": "magenta", "none": "bright_black"}
_BAR: Final = 24
_MINUTE: Final = 60
_TREE_LINES: Final = 12


def picture(seen: "Seen", *, height: int | None = None, line: Line | None = None) -> Group:
    """All that is known, cut to *height* lines if given, and the command that is being typed."""
    report = seen.report
    lines: list[RenderableType] = [_heading(seen)]
    if line is not None:
        lines.append(_command(line))
    if seen.problem:
        lines.append(Text(seen.problem, "bold red"))
    if report is None:
        return Group(*lines)
    lines += [Text(), *_figures(seen, report), Text(), _tier_table(seen, report), Text()]
    if seen.hottest:
        left = _TREE_LINES if height is None else height - 15 - len(report.tiers) * 2
        if left > 1:
            lines += [_prompt_table(seen.hottest[:left], report.tiers[0].block_bytes), Text()]
    lines.append(_namespace_table(report))
    return Group(*lines)


def _heading(seen: "Seen") -> Text:
    heading = Text("kvstrata top  ", "bold", no_wrap=True)
    if seen.report is not None and seen.report.drain != "off":
        said = "drained: safe to stop" if seen.report.drain == "drained" else "draining"
        heading.append(f"{said}  ", "yellow")
    return heading.append(seen.socket, "not bold")


def _command(line: Line) -> Text:
    """A long one goes on below: what is typed has to be seen."""
    if not line.verb:
        keys = "  ".join(f"{key} {verb}" for key, verb in VERBS.items())
        return Text(f"q quits  {keys}", "bright_black", no_wrap=True)
    command = Text(f"kvstrata {line.verb} {line.typed}█  ", overflow="fold")
    if line.refusal:
        return command.append(line.refusal, "bold red")
    return command.append("Enter runs it, Escape leaves it", "bright_black")


def _figures(seen: "Seen", report: "CacheReport") -> list[Text]:
    recent = activity(seen.samples[-_MINUTE:])
    seconds = recent.seconds or 1.0
    block_bytes = report.tiers[0].block_bytes
    rate = recent.hit_rate
    first = Text.assemble(
        "hit rate ",
        ("-" if rate is None else f"{rate:.1%}", "bold"),
        "  ",
        _parts(recent.looked_up, sum(recent.looked_up.values())),
        f"  {recent.lookups / seconds:,.1f} lookups/s",
        f"  engines {len(report.engines)}",
        no_wrap=True,
    )
    moved = "  ".join(
        f"{name} {human_bytes(round(blocks * block_bytes / seconds))}/s"
        for name, blocks in recent.moved.items()
        if blocks or name in {"loaded", "saved"}
    )
    held = (
        f"  running {report.running_gets} loads, {report.running_puts} saves"
        f"  leased {report.leased_blocks:,}  pinned {report.pinned_blocks:,} blocks"
    )
    return [first, Text(moved + held, no_wrap=True, overflow="ellipsis")]


def _parts(counts: dict[str, int], total: int, width: int = _BAR) -> Text:
    bar = Text()
    for name, count in counts.items():
        bar.append("█" * round(width * count / total) if total else "", COLORS[name])
    bar.append("·" * max(0, width - len(bar)), "bright_black")
    return bar


def _tier_table(seen: "Seen", report: "CacheReport") -> Table:
    table = plain_table("tier", "", "used", "of", "", right=("used", "of"))
    for tier in report.tiers:
        full = tier.used_blocks / tier.capacity_blocks if tier.capacity_blocks else 0.0
        filled = Text("█" * round(_BAR * full), COLORS.get(tier.tier, "white"))
        filled.append("·" * (_BAR - len(filled)), "bright_black")
        table.add_row(
            Text(tier.tier, COLORS.get(tier.tier, "white")),
            filled,
            human_bytes(tier.used_blocks * tier.block_bytes),
            human_bytes(tier.capacity_blocks * tier.block_bytes) if tier.capacity_blocks else "-",
            _notes(seen, tier),
        )
    return table


def _notes(seen: "Seen", tier: "TierReport") -> Text:
    calls: dict[str, tuple[int, float]] = {}
    for sample in seen.samples[-_MINUTE:]:
        for name, each in sample.operations.items():
            if name.startswith(f"{tier.tier} "):
                count, seconds = calls.get(name, (0, 0.0))
                calls[name] = count + each.calls, seconds + each.seconds
    notes = [f"{tier.used_blocks:,} blocks"]
    notes += [f"{tier.waiting_blocks:,} to be written"] if tier.waiting_blocks else []
    notes += [f"still to be cleared of {tier.uncleared}"] if tier.uncleared else []
    notes += [
        f"{name.partition(' ')[2]} {1e3 * seconds / count:.1f} ms"
        for name, (count, seconds) in sorted(calls.items())
    ]
    text = Text("  ".join(notes))
    if tier.switched_off:
        text.append("  switched off after failures", "bold red")
    return text


def _prompt_table(runs: "list[RunReport]", block_bytes: int) -> Table:
    table = plain_table("hottest prompts", "hits", "blocks", "bytes", "host", "disk", "remote")
    for column in table.columns[1:]:
        column.justify = "right"
    depths: list[int] = []
    for run in runs:
        depths.append(0 if run.above < 0 else depths[run.above] + 1)
        name = Text("  " * depths[-1] + ("└ " if depths[-1] else "") + run.last_block[:12])
        numbers = (run.hits, run.blocks, None, run.host_blocks, run.disk_blocks, run.remote_blocks)
        size = human_bytes(run.blocks * block_bytes)
        table.add_row(name, *(size if number is None else f"{number:,}" for number in numbers))
    return table


def _namespace_table(report: "CacheReport") -> Table:
    numbers = ("blocks", "in host", "on disk")
    table = plain_table("namespace", "model", *numbers, right=numbers)
    for each in sorted(report.namespaces, key=lambda n: -n.blocks):
        model = Text(each.parts.get("model", "not used yet"), overflow="ellipsis", no_wrap=True)
        counts = (each.blocks, each.host_blocks, each.disk_blocks)
        table.add_row(Text(each.namespace), model, *(f"{count:,}" for count in counts))
    return table
