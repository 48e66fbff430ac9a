"""Time to first token in vLLM with and without a cache hit, KVStrata beside others.

    python -m bench.vllm_hit [--quick] [--json FILE] [--plot FILE.png]

Every configuration is an engine in processes of its own. All stay up and all but the one that is
asked are idle; each prompt is asked of one after the other, in an order that changes, so that a
machine that becomes slower does so for all of them. See bench/README.md for what is measured.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from bench.engine_process import Engine, environment

__all__ = ["Sample", "Samples", "Verdict", "markdown", "verdicts"]

TIMES: Final = {"miss": 1, "device hit": 3, "host hit": 3, "disk hit": 1}  # in a repetition
OPERATIONS: Final = tuple(TIMES)
PROMPT_TOKENS: Final = (
    1026,
    2050,
    6146,
)  # whole blocks and two: ExampleConnector finds nothing at one
BLOCK_TOKENS: Final = 64  # of KVStrata
VOCABULARY: Final = 1024
DTYPES: Final = {"float32": 4, "bfloat16": 2}  # bytes
HOST_BYTES: Final = 512 << 20
DISK_BYTES: Final = 4 << 30
SMALL_HOST_PROMPTS: Final = 1.2  # the small host memory holds so many of the largest prompt

COLD = ("miss", "none")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """An engine to be measured, and what it can be asked for."""

    title: str
    operations: tuple[str, ...]
    longest_hit_tokens: int | None = None  # it is not asked for hits of longer prompts


CONFIGURATIONS: Final = {
    "none": Configuration("no connector", ("miss", "device hit")),
    "kvstrata": Configuration("KVStrata", ("miss", "device hit", "host hit")),
    "kvstrata-layerwise": Configuration("KVStrata, layerwise", ("miss", "device hit", "host hit")),
    "kvstrata-disk": Configuration("KVStrata, disk", ("miss", "device hit", "disk hit")),
    "native": Configuration("vLLM tiering", ("miss", "device hit", "host hit")),
    "native-disk": Configuration("vLLM tiering, fs", ("miss", "device hit", "disk hit")),
    # It stores no more than the first step computes (max_num_batched_tokens), and the engine dies
    # of the load.
    "example": Configuration("ExampleConnector", ("miss", "device hit", "disk hit"), 4096),
    "lmcache": Configuration("LMCache", ("miss", "device hit", "host hit")),
}


# -- statistics ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt asked of one engine."""

    repetition: int
    tokens: int
    operation: str
    configuration: str
    again: int  # a hit is asked for several times
    seconds: float
    cached_tokens: int
    as_meant: bool  # it was the miss or hit, of the size and from the tier, that it should be


class Samples:
    """What was measured, by cell; only samples that were as meant count."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._cells: dict[tuple[int, str, str], dict[tuple[int, int], float]] = {}
        for s in samples:
            cell = self._cells.setdefault((s.tokens, s.operation, s.configuration), {})
            if s.as_meant:
                cell[s.repetition, s.again] = s.seconds

    def cells(self) -> list[tuple[int, str, str]]:
        """(tokens, operation, configuration) of everything that was tried, in table order."""
        order = list(CONFIGURATIONS)
        return sorted(self._cells, key=lambda c: (c[0], OPERATIONS.index(c[1]), order.index(c[2])))

    def seconds(self, tokens: int, operation: str, configuration: str) -> list[float]:
        return list(self._cells.get((tokens, operation, configuration), {}).values())

    def pairs(
        self, tokens: int, one: tuple[str, str], other: tuple[str, str]
    ) -> list[tuple[float, float]]:
        """Seconds of two (operation, configuration) measured close to each other."""
        left = self._cells.get((tokens, *one), {})
        right = self._cells.get((tokens, *other), {})
        return [(left[turn], right[turn]) for turn in sorted(left.keys() & right.keys())]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least *percent* of *values* do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Median of the ratios of two measurements taken close to each other."""
    return statistics.median(a / b for a, b in pairs) if pairs else None


def markdown(samples: Samples) -> str:
    """A table for each prompt length, in milliseconds."""
    lines: list[str] = []
    shown = 0
    for tokens, operation, configuration in samples.cells():
        if tokens != shown:
            shown = tokens
            lines += ["", f"First token of a prompt of {tokens} tokens, milliseconds:", ""]
            lines += [
                "| operation | configuration | min | median | p90 | / no connector | / cold |",
                "|---|---|---:|---:|---:|---:|---:|",
            ]
        cell = (operation, configuration)
        values = [1e3 * s for s in samples.seconds(tokens, *cell)]
        figures = ["no hit", "", ""]
        if values:
            figures = [
                f"{figure:.1f}"
                for figure in (min(values), statistics.median(values), percentile(values, 90))
            ]
        ratios = [
            _ratio_text(samples.pairs(tokens, cell, other)) for other in ((operation, "none"), COLD)
        ]
        title = CONFIGURATIONS[configuration].title
        lines.append(f"| {' | '.join([operation, title, *figures, *ratios])} |")
    return "\n".join(lines[1:])


def _ratio_text(pairs: Sequence[tuple[float, float]]) -> str:
    ratio = paired_ratio(pairs)
    return "" if ratio is None else f"{ratio:.3f}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One bound at one prompt length. ``met`` goes by *measured*, of pairs; *by_minima* beside."""

    bound: str
    tokens: int
    measured: float
    by_minima: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        return self.measured <= self.limit

    def __str__(self) -> str:
        word = "met    " if self.met else "NOT met"
        return (
            f"{word} {self.tokens:5d} tokens: {self.bound}: {self.measured:.3f}{self.unit} "
            f"(by minima {self.by_minima:.3f}{self.unit}), limit {self.limit:g}{self.unit}"
        )


@dataclasses.dataclass(frozen=True)
class Bound:
    """One figure of an engine beside another's."""

    text: str
    tokens: tuple[int, ...]
    one: tuple[str, str]
    other: tuple[str, str]
    limit: float
    difference: bool = False  # in milliseconds; otherwise a ratio

    def judge(self, samples: Samples, tokens: int) -> Verdict | None:
        pairs = samples.pairs(tokens, self.one, self.other)
        if not pairs:
            return None
        least = min(a for a, _ in pairs), min(b for _, b in pairs)
        unit = " ms" if self.difference else ""
        compare = _excess_ms if self.difference else _ratio
        measured = statistics.median(compare(pair) for pair in pairs)
        return Verdict(self.text, tokens, measured, compare(least), self.limit, unit)


def _excess_ms(pair: tuple[float, float]) -> float:
    return (pair[0] - pair[1]) * 1e3


def _ratio(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1]


def _bounds() -> Iterator[Bound]:
    every, two_thousand = PROMPT_TOKENS, (2050,)
    for name in ("kvstrata", "kvstrata-disk"):
        title = CONFIGURATIONS[name].title
        yield Bound(f"a miss with {title} / no connector", every, ("miss", name), COLD, 1.05)
        yield Bound(
            f"a device hit with {title} - no connector",
            every,
            ("device hit", name),
            ("device hit", "none"),
            1.0,
            difference=True,
        )
    host = ("host hit", "kvstrata")
    yield Bound("a host hit / cold", two_thousand, host, COLD, 0.2)
    yield Bound("a host hit / vLLM tiering's", every, host, ("host hit", "native"), 1.0)
    disk = ("disk hit", "kvstrata-disk")
    yield Bound("a disk hit / a host hit", two_thousand, disk, host, 2.0)


def verdicts(samples: Samples, bounds: Iterable[Bound] | None = None) -> list[Verdict]:
    """Every bound at every prompt length that was measured."""
    judged = (
        b.judge(samples, n) for b in (_bounds() if bounds is None else bounds) for n in b.tokens
    )
    return [verdict for verdict in judged if verdict is not None]


# -- the run ---------------------------------------------------------------------------------


class Run:
    """Asks every engine the same prompts."""

    def __init__(
        self,
        engines: dict[str, Engine],
        advance: Callable[[], None],
        prompt_tokens: Sequence[int] = PROMPT_TOKENS,
    ) -> None:
        self._engines = engines
        self._advance = advance
        self._prompt_tokens = prompt_tokens
        self._random = random.Random(0)
        self.samples: list[Sample] = []

    def repetition(self, number: int) -> None:
        """Fresh prompts, every operation of every engine on each."""
        prompts = {n: self._prompt(n) for n in self._prompt_tokens}
        for turn, (tokens, prompt) in enumerate(prompts.items()):
            for operation in ("miss", "device hit", "host hit"):
                for again in range(TIMES[operation]):
                    if operation == "host hit":
                        self._reset(operation)
                    for engine in self._able(operation, number + turn + again, tokens):
                        self._measure(number, tokens, operation, again, engine, prompt)
        self._push_to_disk()
        for turn, (tokens, prompt) in enumerate(prompts.items()):
            for engine in self._able("disk hit", number + turn, tokens):
                self._measure(number, tokens, "disk hit", 0, engine, prompt)

    def _able(self, operation: str, rotate: int, tokens: int = 0) -> list[Engine]:
        """The engines to be asked for *operation*, in an order turned by *rotate*."""
        able = [
            engine for name, engine in self._engines.items() if can_measure(name, operation, tokens)
        ]
        start = rotate % len(able) if able else 0
        return able[start:] + able[:start]

    def _measure(
        self,
        number: int,
        tokens: int,
        operation: str,
        again: int,
        engine: Engine,
        prompt: list[int],
    ) -> None:
        own_disk = operation == "disk hit" and engine.name.startswith("kvstrata")
        promoted = engine.promoted_blocks() if own_disk else 0
        engine.ask(self._prompt(8))  # an engine in use: not one whose code has left the CPU caches
        seconds, cached = engine.ask(prompt)
        hit = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        as_meant = cached == (0 if operation == "miss" else hit)
        if own_disk:
            as_meant &= engine.promoted_blocks() - promoted == hit // BLOCK_TOKENS
        self.samples.append(
            Sample(number, tokens, operation, engine.name, again, seconds, cached, as_meant)
        )
        engine.settle()
        self._advance()

    def _reset(self, operation: str) -> None:
        for engine in self._able(operation, 0):
            engine.reset()

    def _push_to_disk(self) -> None:
        """Make the engines with a small host memory forget what they hold above the disk."""
        fillers = [self._prompt(max(self._prompt_tokens)) for _ in range(2)]
        for engine in self._able("disk hit", 0):
            if engine.name != "example":  # it has nothing above the disk
                for filler in fillers:
                    engine.ask(filler)
                    engine.settle()
            engine.reset()

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(1, VOCABULARY) for _ in range(tokens)]


def can_measure(name: str, operation: str, tokens: int) -> bool:
    configuration = CONFIGURATIONS[name]
    longest = configuration.longest_hit_tokens
    too_long = operation.startswith(("host", "disk")) and longest is not None and tokens > longest
    return operation in configuration.operations and not too_long


def operations_of_repetition(names: Iterable[str]) -> int:
    return sum(
        TIMES[op] * can_measure(n, op, t) for n in names for op in OPERATIONS for t in PROMPT_TOKENS
    )


def start_engines(options: argparse.Namespace, folder: Path) -> dict[str, Engine]:
    """All at once; returns when all are ready."""
    from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

    shape = TinyLlama(
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        layers=options.layers,
        heads=options.hidden // 32,
        kv_heads=max(4, options.hidden // 128),
        vocab_size=VOCABULARY,
        dtype=options.dtype,
    )
    write_tiny_llama(folder / "model", shape)
    token_bytes = shape.layers * 2 * shape.kv_heads * shape.head_dim * DTYPES[shape.dtype]
    engines = {}
    for name in options.configurations:
        order = {
            "configuration": name,
            "folder": str(folder / name),
            "model": str(folder / "model"),
            "dtype": options.dtype,
            "engine_id": f"bench-{os.getpid()}-{name}",
            "host_bytes": HOST_BYTES,
            "small_host_bytes": int(SMALL_HOST_PROMPTS * max(PROMPT_TOKENS) * token_bytes),
            "disk_bytes": DISK_BYTES,
        }
        engines[name] = Engine(name, order, environment(options.lmcache))
    try:
        for engine in engines.values():
            engine.wait_ready(300)
    except BaseException:
        for engine in engines.values():
            engine.close()
        raise
    return engines


def measure(options: argparse.Namespace) -> list[Sample]:
    from rich.console import Console
    from rich.progress import Progress

    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=options.folder) as folder,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        starting = progress.add_task("starting the engines", total=None)
        engines = start_engines(options, Path(folder))
        progress.remove_task(starting)
        total = (options.repetitions + 1) * operations_of_repetition(engines)
        asking = progress.add_task("asking", total=total)
        run = Run(engines, lambda: progress.advance(asking))
        try:
            for number in range(options.repetitions + 1):
                run.repetition(number)
        finally:
            for engine in engines.values():
                engine.close()
    return [sample for sample in run.samples if sample.repetition > 0]  # 0 warms up


def plot(samples: Samples, path: Path) -> None:
    """Bars of the medians from minimum to 90th percentile, a panel for each operation."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(OPERATIONS), figsize=(16, 4.5), layout="constrained")
    width = 0.8 / len(CONFIGURATIONS)
    for panel, operation in zip(panels, OPERATIONS, strict=True):
        for i, (name, configuration) in enumerate(CONFIGURATIONS.items()):
            cells = [
                (x + i * width, [1e3 * second for second in seconds])
                for x, tokens in enumerate(PROMPT_TOKENS)
                if (seconds := samples.seconds(tokens, operation, name))
            ]
            if cells:
                medians = [statistics.median(values) for _, values in cells]
                below = [m - min(v) for m, (_, v) in zip(medians, cells, strict=True)]
                above = [percentile(v, 90) - m for m, (_, v) in zip(medians, cells, strict=True)]
                places = [x for x, _ in cells]
                panel.bar(
                    places,
                    medians,
                    width,
                    yerr=[below, [max(0.0, a) for a in above]],
                    label=configuration.title,
                    color=f"C{i}",
                )
        panel.set_title(operation)
        panel.set_xticks([x + 0.4 - width / 2 for x in range(len(PROMPT_TOKENS))], PROMPT_TOKENS)
        panel.set_xlabel("prompt tokens")
        panel.legend(fontsize="small")
    panels[0].set_ylabel("first token, ms (median; min to p90)")
    figure.savefig(path, dpi=120)


def to_json(options: argparse.Namespace, samples: Sequence[Sample]) -> str:
    about = {
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "threads_bind": environment()["VLLM_CPU_OMP_THREADS_BIND"],
        "hidden": options.hidden,
        "layers": options.layers,
        "dtype": options.dtype,
        "repetitions": options.repetitions,
    }
    rows = [dataclasses.asdict(sample) for sample in samples]
    return json.dumps({"about": about, "samples": rows}, indent=1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to first token in vLLM, by configuration.")
    add_engine_options(parser)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="5 repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw (needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repetitions = 5
    choose_configurations(parser, options)
    return options


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=384, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--folder", type=Path, help="where the engines keep files; default /tmp")
    parser.add_argument("--lmcache", type=Path, metavar="FOLDER", help="LMCache is installed there")
    parser.add_argument(
        "--configurations",
        nargs="+",
        choices=CONFIGURATIONS,
        help="default: all, LMCache if it is there",
    )


def choose_configurations(
    parser: argparse.ArgumentParser, options: argparse.Namespace, of: Iterable[str] = CONFIGURATIONS
) -> None:
    """Those that were asked for, or all *of* that can run here."""
    if options.configurations is None:
        options.configurations = [n for n in of if n != "lmcache" or options.lmcache]
    if "lmcache" in options.configurations and options.lmcache is None:
        parser.error("lmcache needs --lmcache FOLDER: see bench/README.md for how to fill it")


def failed_hits(samples: Iterable[Sample]) -> list[str]:
    """A line for each sample that was not as meant."""
    return [
        f"{s.configuration}: repetition {s.repetition}: {s.tokens} tokens were no {s.operation}"
        for s in samples
        if not s.as_meant
    ]


def main() -> int:
    options = parse(sys.argv[1:])
    measured = measure(options)
    samples = Samples(measured)
    print(markdown(samples), end="\n\n")
    print(*verdicts(samples), sep="\n")
    if options.json:
        options.json.write_text(to_json(options, measured) + "\n")
    if options.plot:
        plot(samples, options.plot)
    failed = failed_hits(measured)
    if failed:
        print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
