"""The tiers that an operator can choose, each with its settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from kvstrata.core.errors import ConfigError
from kvstrata.core.pipeline import order_fault, parse_pipeline, tier_kind
from kvstrata.core.remote_tiers import MooncakeTier, ObjectTier, ValkeyTier
from kvstrata.core.tier_fields import Compressing, Count, Evicting, Writing, absolute, refuse_bool
from kvstrata.core.units import parse_bytes

__all__ = ["DiskTier", "HostTier", "LowestTier", "SharedTier", "Tier", "Tiers"]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


def _host_capacity(value: object) -> int | str:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    return parse_bytes(value)


class HostTier(BaseModel):
    """Host memory, shared by the server and the workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["host"] = "host"
    capacity: Annotated[int | Literal["auto"], BeforeValidator(_host_capacity)] = Field(
        default="auto",
        description="Bytes of host memory. `auto`: 25 % of the memory available, at most 64 GiB.",
        examples=["8GiB"],
    )
    huge_pages: bool = Field(
        default=False,
        description=(
            "Take pages of 2 MiB, which the operator has set aside with `vm.nr_hugepages`: "
            "the memory is there eight times as fast at the start."
        ),
        examples=["true"],
    )
    numa_node: Annotated[int, BeforeValidator(refuse_bool), Field(ge=0)] | None = Field(
        default=None,
        description=(
            "Number of the NUMA node that the memory should come from. Unset: for a GPU's share of "
            "each block the node of that GPU, else any."
        ),
        examples=["0"],
    )
    eviction: Evicting = "lru"


class DiskTier(BaseModel):
    """Directories of block files, of this server alone; they survive restarts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["disk"] = "disk"
    paths: Annotated[
        tuple[Annotated[Path, AfterValidator(absolute)], ...],
        BeforeValidator(_listed),
        Field(min_length=1),
    ] = Field(
        description=(
            "Absolute path of the directory, or a list of them, one a device: blocks are spread "
            "over all. A directory is made if its parent allows it."
        ),
        examples=["/var/cache/kv"],
    )
    capacity: Annotated[int, BeforeValidator(parse_bytes)] = Field(
        description="Bytes of disk, in all directories together.",
        examples=["200GiB"],
    )
    max_blocks_per_file: Count = Field(
        default=32000,
        description="Most blocks in one file. Fixed when the directory is made.",
        examples=["32000"],
    )
    discard: bool = Field(
        default=False,
        description=(
            "Give the room of dropped blocks back to the file system at once (TRIM); writing them "
            "again then costs more."
        ),
        examples=["true"],
    )
    read_threads: Count = Field(
        default=4,
        description="Reads of up to 4 MiB that are under way at the same time.",
        examples=["4"],
    )
    max_queued_read_bytes: Annotated[int, BeforeValidator(parse_bytes)] = Field(
        default=4 << 30,
        description=(
            "Bytes of blocks that may wait to be read or be read at the same time. What is asked "
            "for beyond that is computed again."
        ),
        examples=["4GiB"],
    )
    write_depth: Count = Field(
        default=4,
        description=(
            "Writes that are at the disk at the same time. Twice as many threads prepare them: "
            "while some compute checksums, others keep the disk busy."
        ),
        examples=["4"],
    )
    write_bytes_per_second: Annotated[int, BeforeValidator(parse_bytes)] | None = Field(
        default=None,
        description="Bytes a second that are written on average. Unset: as many as the disk takes.",
        examples=["500MiB"],
    )
    eviction: Evicting = "lru"
    write: Writing = "saved"


class SharedTier(BaseModel):
    """A directory on a file system that several nodes have mounted, and share blocks in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["shared"] = "shared"
    path: Annotated[Path, AfterValidator(absolute)] = Field(
        description="Absolute path of the directory; it is made if its parent allows it.",
        examples=["/mnt/kv"],
    )
    capacity: Annotated[int, BeforeValidator(parse_bytes)] = Field(
        description="Bytes that all nodes together may keep there. Give all nodes the same.",
        examples=["2TiB"],
    )
    compress: Compressing = False
    write: Writing = "saved"


LowestTier = SharedTier | ObjectTier | ValkeyTier | MooncakeTier
"""What several nodes write to; a cache has one at most."""

Tier = HostTier | DiskTier | LowestTier


def _known_kind(item: object) -> object:
    if isinstance(item, Tier):
        return item
    if not isinstance(item, Mapping) or not isinstance(item.get("kind"), str):
        raise ConfigError(
            "a tier of the list is a mapping with a kind",
            hint="write {kind: host, capacity: …} or {kind: disk, paths: …, capacity: …}",
        )
    return {**item, "kind": tier_kind(item["kind"])}


def _spell_out(value: object) -> object:
    return parse_pipeline(value) if isinstance(value, str) else value


def _in_order(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    fault = order_fault([tier.kind for tier in tiers])
    if fault is not None:
        raise ConfigError(fault.message, hint=fault.hint)
    return tiers


Tiers = Annotated[
    tuple[Annotated[Tier, Field(discriminator="kind"), BeforeValidator(_known_kind)], ...],
    BeforeValidator(_spell_out),
    AfterValidator(_in_order),
]
"""Of one server, fastest first; a pipeline string is understood too."""
