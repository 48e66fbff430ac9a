"""What a remote tier has to carry for many nodes, and which engine can: the tables of docs/scale.md.

    python -m bench.scale [--retention-minutes MINUTES] [--requests-a-second RATE]

Simulated hits, measured costs and stated assumptions, multiplied. Every constant below is one of
the latter two, and says which.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, get_args

from bench.scale_traffic import Cluster, Prompt, Routing, Shares, simulate, traffic

from kvstrata.replay.generate import TOKENS_PER_ID

GB: Final = 10**9
TB: Final = 10**12
NODES: Final = (10, 100, 1000)
ROUTINGS: Final[tuple[Routing, ...]] = get_args(Routing)
LEAST_SECONDS: Final = 2000.0  # of simulated traffic
LEAST_REQUESTS: Final = 20_000  # at the default rate; at less as many fewer

# Assumptions about a node of eight GPUs and its network.
BUSY: Final = 0.6  # share of the time in which it computes prompts
LOCAL_BYTES: Final = 1 << 40  # of its host tier
NETWORK_BYTES: Final = 25 * GB  # a second, each way: 200 Gbit/s
CORES: Final = 16  # that may go to moving blocks

# Assumptions about engines.
VALKEY_BYTES: Final = 2.5 * GB  # a second from one server, which answers on one thread
VALKEY_ROOM: Final = 256 << 30  # in one server
VALKEY_SERVERS: Final = 1000  # in a cluster, as its documentation advises at most
S3_GETS, S3_PUTS = 5500, 3500  # a second and prefix, as AWS documents; HEAD counts as GET
S3_PREFIXES: Final = 100  # into which a bucket may have split by itself, at most
MOONCAKE_ROOM: Final = 512 << 30  # that each node gives to the pool

# CPU seconds a GB at the client, measured by bench/remote.py: 4 MiB, 4 threads, in
# docs/performance.md.
READ_CPU: Final = {"Valkey": 0.117, "S3": 0.321, "Mooncake, TCP": 1.370}
WRITE_CPU: Final = {"Valkey": 0.228, "S3": 0.390, "Mooncake, TCP": 1.270}
SEARCH_WIDTHS: Final = {"Valkey": 64, "S3": 32, "Mooncake, TCP": 1024}  # keys asked for at once


class Model(NamedTuple):
    """KV of a token by the model's configuration; the prefill rate is an assumption."""

    title: str
    token_bytes: int
    tokens_per_block: int  # blocks of 4 to 5 MiB
    prefill_tokens: float  # a second, of a node that does nothing else

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.tokens_per_block


MODELS: Final = (
    Model("8 B", 2 * 32 * 8 * 128 * 2, 32, 8 * 20_000),
    Model("70 B", 2 * 80 * 8 * 128 * 2, 16, 18_000),
    Model("671 B", 61 * 576 * 2, 64, 30_000),
)


class Load(NamedTuple):
    """What one node of a cluster does, a second."""

    model: Model
    nodes: int
    routing: Routing
    shares: Shares
    prompt_tokens: float

    @property
    def prompts(self) -> float:
        return self.prompt_tokens / self.shares.tokens

    @property
    def read_bytes(self) -> float:
        return self.prompts * self.shares.found * TOKENS_PER_ID * self.model.token_bytes

    @property
    def written_bytes(self) -> float:
        missing = self.shares.searched - self.shares.found
        return self.prompts * missing * TOKENS_PER_ID * self.model.token_bytes

    @property
    def gets(self) -> float:
        return self.read_bytes / self.model.block_bytes

    @property
    def puts(self) -> float:
        return self.written_bytes / self.model.block_bytes

    def exists(self, engine: str) -> float:
        """Keys asked for: to find out what a prompt has there, and before each write."""
        finer = TOKENS_PER_ID / self.model.tokens_per_block
        searched, found = round(self.shares.searched * finer), round(self.shares.found * finer)
        return self.prompts * asked(searched, found, SEARCH_WIDTHS[engine]) + self.puts

    def cores(self, engine: str) -> float:
        moved = self.read_bytes * READ_CPU[engine] + self.written_bytes * WRITE_CPU[engine]
        return moved / GB

    @property
    def room_bytes(self) -> float:
        """Of all nodes' blocks in the remote tier."""
        block_bytes = TOKENS_PER_ID * self.model.token_bytes
        return self.nodes * self.prompts * self.shares.pool_blocks * block_bytes


def asked(searched: int, found: int, width: int) -> int:
    """Keys asked for in a search among so many, of which the leading *found* are there.

    >>> asked(10, 4, 64), asked(1000, 400, 64), asked(0, 0, 64)
    (10, 79, 0)
    """
    there, end, total = 0, searched, 0
    while there < end:
        count = min(width, end - there)
        total += count
        spread = [
            there + number * (end - there - 1) // max(1, count - 1) for number in range(count)
        ]
        there = max([there, *(place + 1 for place in spread if place < found)])
        end = min([end, *(place for place in spread if place >= found)])
    return total


def loads(rate: float, retention_seconds: float) -> Iterator[Load]:
    """Every model, number of nodes and routing; *rate*: simulated requests a second and node.

    The remote tier keeps a block for *retention_seconds* after its last use.
    """
    for nodes in NODES:
        seconds = max(
            2 * retention_seconds,
            LEAST_SECONDS,
            LEAST_REQUESTS * min(1, rate / 0.02) / (rate * nodes),
        )
        prompts = traffic(max(200, round(rate * nodes * seconds)), seconds, seed=nodes)
        for model in MODELS:
            for routing in ROUTINGS:
                yield _load(model, prompts, Cluster(nodes, routing, retention_seconds))


def _load(model: Model, prompts: Sequence[Prompt], cluster: Cluster) -> Load:
    """The simulation has less traffic than a node, and its memory is less in the same measure."""
    simulated = sum(each.tokens for each in prompts) / prompts[-1].seconds / cluster.nodes
    computed = 0.4
    for _ in range(3):  # more hits, more prompts, a fuller memory, fewer hits
        real = model.prefill_tokens * BUSY / computed
        room = LOCAL_BYTES / (TOKENS_PER_ID * model.token_bytes) * simulated / real
        shares = simulate(prompts, cluster, local_blocks=round(room))
        computed = shares.computed
    return Load(
        model, cluster.nodes, cluster.routing, shares, model.prefill_tokens * BUSY / computed
    )


# -- the tables --------------------------------------------------------------------------------


def table(titles: str, rows: Sequence[Sequence[str]], *, text_columns: int = 3) -> str:
    rule = text_columns * "|---" + (titles.count("|") + 1 - text_columns) * "|---:" + "|"
    return "\n".join([f"| {titles} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def models_table() -> str:
    rows = [
        (
            model.title,
            f"{model.token_bytes / 1024:.1f} KiB",
            f"{model.tokens_per_block}",
            f"{model.block_bytes / 2**20:.1f} MiB",
            f"{model.prefill_tokens:,.0f}",
            f"{model.prefill_tokens * BUSY * model.token_bytes / GB:.1f}",
        )
        for model in MODELS
    ]
    titles = "model | KV a token | tokens a block | a block | prefill, tokens/s | KV computed, GB/s"
    return table(titles, rows, text_columns=1)


def node_table(found: Sequence[Load]) -> str:
    rows = [
        (
            *_place(load),
            f"{load.shares.local:.0%}",
            f"{load.shares.remote:.0%}",
            f"{load.shares.computed:.0%}",
            f"{load.prompts:.1f}",
            f"{load.read_bytes / GB:.1f}",
            f"{load.written_bytes / GB:.1f}",
            f"{load.gets:,.0f}",
            f"{load.puts:,.0f}",
            f"{load.exists('Valkey'):,.0f}",
            *(f"{load.cores(engine):.1f}" for engine in READ_CPU),
        )
        for load in found
    ]
    titles = (
        "model | nodes | routing | local | remote | computed | prompts/s | read, GB/s "
        "| written, GB/s | GET/s | PUT/s | exists/s | "
    )
    return table(titles + " | ".join(f"cores, {engine}" for engine in READ_CPU), rows)


def engine_table(found: Sequence[Load]) -> str:
    rows = [
        (
            *_place(load),
            f"{load.nodes * load.read_bytes / GB:,.0f}",
            f"{load.nodes * load.written_bytes / GB:,.0f}",
            f"{load.nodes * (load.gets + load.puts + load.exists('S3')):,.0f}",
            f"{load.room_bytes / TB:,.1f}",
            f"{valkey_servers(load):,}",
            f"{s3_prefixes(load):,}",
            f"{load.room_bytes / load.nodes / 2**30:,.0f}",
        )
        for load in found
    ]
    titles = (
        "model | nodes | routing | read, GB/s | written, GB/s | S3 requests/s | held, TB "
        "| Valkey servers | S3 prefixes | Mooncake, GiB a node"
    )
    return table(titles, rows)


def verdict_table(found: Sequence[Load]) -> str:
    rows = [(*_place(load), *(verdict(load, engine) for engine in READ_CPU)) for load in found]
    return table("model | nodes | routing | " + " | ".join(READ_CPU), rows, text_columns=6)


def valkey_servers(load: Load) -> int:
    moved = load.nodes * max(load.read_bytes, load.written_bytes)
    return max(math.ceil(moved / VALKEY_BYTES), math.ceil(load.room_bytes / VALKEY_ROOM))


def s3_prefixes(load: Load) -> int:
    gets = load.nodes * (load.gets + load.exists("S3"))
    return max(math.ceil(gets / S3_GETS), math.ceil(load.nodes * load.puts / S3_PUTS))


def verdict(load: Load, engine: str) -> str:
    """``holds``, with what it takes, or what it breaks at."""
    broken = [reason for reason, is_broken in _limits(load, engine).items() if is_broken]
    if broken:
        return "no: " + ", ".join(broken)
    if engine == "Valkey":
        servers = valkey_servers(load)
        return "one server" if servers == 1 else f"{servers} servers"
    if engine == "S3":
        prefixes = s3_prefixes(load)
        return "one prefix" if prefixes == 1 else f"{prefixes} prefixes"
    return "holds"


def _limits(load: Load, engine: str) -> dict[str, bool]:
    limits = {
        "network of a node": max(load.read_bytes, load.written_bytes) > NETWORK_BYTES,
        "cores of a node": load.cores(engine) > CORES,
    }
    if engine == "Valkey":
        limits["servers"] = valkey_servers(load) > VALKEY_SERVERS
    elif engine == "S3":
        limits["prefixes"] = s3_prefixes(load) > S3_PREFIXES
    else:
        limits["memory of the nodes"] = load.room_bytes > load.nodes * MOONCAKE_ROOM
    return limits


def _place(load: Load) -> tuple[str, str, str]:
    return load.model.title, f"{load.nodes}", load.routing


def main() -> int:
    parser = argparse.ArgumentParser(description="What a remote tier has to carry.")
    parser.add_argument(
        "--requests-a-second",
        type=float,
        default=0.02,
        help="simulated for each node; default 0.02. More is finer, and slower",
    )
    parser.add_argument(
        "--retention-minutes",
        type=float,
        default=5,
        help="for which the remote tier keeps a block after its last use; default 5",
    )
    options = parser.parse_args()
    if not 0 < options.requests_a_second <= 10:
        parser.error("between 0 and 10 requests a second")
    simulated = loads(options.requests_a_second, 60 * options.retention_minutes)
    found = sorted(simulated, key=lambda load: MODELS.index(load.model))
    print(models_table(), node_table(found), engine_table(found), verdict_table(found), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
