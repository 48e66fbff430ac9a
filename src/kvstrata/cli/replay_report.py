"""What `kvstrata replay` prints."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvstrata.cli.reporting import plain_console, plain_table
from kvstrata.core.units import human_bytes
from kvstrata.replay.outcome import OPTIMUM, Outcome, cheapest
from kvstrata.replay.runs import Study
from kvstrata.replay.sizes import Sizes
from kvstrata.replay.trace import Trace

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Report"]


@dataclass(frozen=True, slots=True)
class Report:
    """The outcomes of one study."""

    trace: Trace
    study: Study
    outcomes: Sequence[Outcome]
    goal: float | None = None  # share of the possible hits to find the size for

    def print(self) -> None:
        console = plain_console()
        console.print(self._head())
        sizes = sorted({outcome.sizes for outcome in self.outcomes})
        if len(sizes) == 1:
            console.print(f"\n{_spell(sizes[0])}\n")
            console.print(self._policy_table())
        else:
            console.print()
            console.print(self._size_table(sizes))
        for sentence in self.answers():
            console.print(f"\n{sentence}", soft_wrap=True)

    def hit_rate(self, outcome: Outcome) -> float:
        """Of all blocks that were looked up, on the device or with us."""
        return outcome.hits / self.study.spool.lookup_blocks

    def answers(self) -> Iterator[str]:
        """How much memory the goal needs, a sentence for each policy."""
        if self.goal is None:
            return
        wanted = self.goal * self.study.reuse.possible_hits
        rate = wanted / self.study.spool.lookup_blocks
        goal = f"{self.goal:.0%} of the possible hits ({rate:.1%} of blocks)"
        for policy in dict.fromkeys(outcome.policy for outcome in self.outcomes):
            mine = [outcome for outcome in self.outcomes if outcome.policy == policy]
            enough = cheapest(mine, wanted)
            if enough:
                needs = ", or ".join(_spell(outcome.sizes) for outcome in enough)
                yield f"{policy}: {goal} need {needs}."
            else:
                best = max(mine, key=lambda outcome: outcome.hits)
                share = best.hits / max(1, self.study.reuse.possible_hits)
                yield f"{policy}: {goal} are not reached: {_spell(best.sizes)} give {share:.0%}."

    def as_plain(self) -> dict[str, Any]:
        """Values that JSON has."""
        spool, reuse, costs = self.study.spool, self.study.reuse, self.study.costs
        plain: dict[str, Any] = {
            "trace": {
                "path": str(self.trace.path),
                "format": self.trace.format,
                "requests": spool.requests,
                "span_seconds": spool.span_seconds,
                "input_tokens": spool.input_tokens,
                "tokens_per_block": costs.tokens_per_block,
                "block_bytes": costs.block_bytes,
                "lookup_blocks": spool.lookup_blocks,
                "device_blocks": spool.device_blocks,
                "distinct_blocks": reuse.distinct_blocks,
                "possible_hits": reuse.possible_hits,
            },
            "rates": asdict(costs.rates),
            "outcomes": [self._plain_outcome(outcome) for outcome in self.outcomes],
        }
        if self.goal is not None:
            plain["goal"] = {"share": self.goal, "answers": list(self.answers())}
        return plain

    def _plain_outcome(self, outcome: Outcome) -> dict[str, Any]:
        plain = asdict(outcome)
        sizes = plain.pop("sizes")
        return {
            "policy": plain.pop("policy"),
            **sizes,
            "hit_rate": self.hit_rate(outcome),
            "share_of_possible_hits": self._share(outcome),
            **plain,
        }

    def _share(self, outcome: Outcome) -> float:
        return outcome.hits / max(1, self.study.reuse.possible_hits)

    def _head(self) -> "Table":
        spool, reuse, costs = self.study.spool, self.study.reuse, self.study.costs
        table = plain_table("trace", self.trace.path.name)
        table.add_row("format", self.trace.format)
        table.add_row("requests", f"{spool.requests:,} in {_duration(spool.span_seconds)}")
        table.add_row("tokens", f"{spool.input_tokens:,}")
        size = f"{costs.tokens_per_block} tokens, {human_bytes(costs.block_bytes)}"
        table.add_row("blocks looked up", f"{spool.lookup_blocks:,} of {size}")
        distinct = human_bytes(reuse.distinct_blocks * costs.block_bytes)
        table.add_row("different blocks", f"{reuse.distinct_blocks:,}, {distinct}")
        if spool.device_blocks:
            table.add_row("hits on the device", f"{spool.device_blocks / spool.lookup_blocks:.1%}")
        possible = f"{reuse.possible_hits / spool.lookup_blocks:.1%}"
        table.add_row("possible hits", f"{possible} of blocks, with room for all")
        return table

    def _policy_table(self) -> "Table":
        """A column for each policy, at one size."""
        names = [outcome.policy for outcome in self.outcomes]
        table = plain_table("", *names, right=tuple(names))
        columns = [dict(self._figures(outcome)) for outcome in self.outcomes]
        for title in dict.fromkeys(title for column in columns for title in column):
            table.add_row(title, *(column.get(title, "") for column in columns))
        return table

    def _figures(self, outcome: Outcome) -> Iterator[tuple[str, str]]:
        lookups, block_bytes = self.study.spool.lookup_blocks, self.study.costs.block_bytes
        yield "hits, of all blocks", f"{self.hit_rate(outcome):.1%}"
        yield "hits, of the possible", f"{self._share(outcome):.1%}"
        if outcome.policy == OPTIMUM:
            yield "prefill saved", f"≤ {_duration(outcome.prefill_seconds)}"
            return
        has_disk = outcome.sizes.disk_bytes > 0
        if has_disk:
            yield "from host memory", f"{outcome.host_hits / lookups:.1%}"
            yield "from disk", f"{outcome.disk_hits / lookups:.1%}"
        yield "prefill saved", _duration(outcome.prefill_seconds)
        yield "loading takes", _duration(outcome.load_seconds)
        yield "loaded", human_bytes(outcome.hits * block_bytes)
        yield "saved", human_bytes(outcome.saved * block_bytes)
        if has_disk:
            yield "read from disk", human_bytes(outcome.disk_hits * block_bytes)
            yield "  in the busiest minute", _rate(outcome.peak_read_bytes_per_second)
            yield "written to disk", human_bytes(outcome.written * block_bytes)
            yield "  in the busiest minute", _rate(outcome.peak_write_bytes_per_second)
            yield "evicted from disk", human_bytes(outcome.evicted_disk * block_bytes)
        yield "evicted from host memory", human_bytes(outcome.evicted_host * block_bytes)
        if outcome.declined:
            yield "found, not loaded", human_bytes(outcome.declined * block_bytes)
        if outcome.shed:
            yield "not saved, no room", human_bytes(outcome.shed * block_bytes)

    def _size_table(self, sizes: Sequence[Sizes]) -> "Table":
        """A row for each size, a column for each policy: hits, and prefill saved."""
        names = list(dict.fromkeys(outcome.policy for outcome in self.outcomes))
        titles = ["host", *(["disk"] if any(each.disk_bytes for each in sizes) else [])]
        table = plain_table(*titles, *names, right=(*titles, *names))
        found = {(outcome.sizes, outcome.policy): outcome for outcome in self.outcomes}
        for each in sizes:
            bytes_of = (each.host_bytes, each.disk_bytes)
            cells = [human_bytes(count) for count in bytes_of[: len(titles)]]
            for name in names:
                outcome = found[each, name]
                at_most = "≤ " if name == OPTIMUM else ""
                saved = _duration(outcome.prefill_seconds)
                cells.append(f"{self.hit_rate(outcome):.1%}, {at_most}{saved}")
            table.add_row(*cells)
        return table


def _spell(sizes: Sizes) -> str:
    host = f"{human_bytes(sizes.host_bytes)} of host memory"
    return f"{host} and {human_bytes(sizes.disk_bytes)} of disk" if sizes.disk_bytes else host


def _duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"
