"""What is measured beside what: configurations of one and the same engine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

__all__ = [
    "CONTENDERS",
    "Contender",
    "Deployment",
    "Service",
    "counts_path",
    "transfer_config",
]

Service = Literal["lmcache", "valkey", "kvstrata"]
_MODULE: Final = "kvstrata.integration.vllm.connector"
_BLEND_MODULE: Final = "kvstrata.integration.vllm.blend.connector"


class Deployment(msgspec.Struct, frozen=True):
    """How an engine is started."""

    contender: str
    folder: str  # for the files of this contender
    model: str
    engine_id: str
    device_blocks: int
    roomy_blocks: int  # of a device cache that holds everything
    host_bytes: int  # of host memory that holds everything
    small_host_bytes: int  # of host memory that has to give to a tier below
    disk_bytes: int
    block_tokens: int
    max_model_tokens: int
    device_share: float  # of the memory of an accelerator
    token_bytes: int  # of KV
    port: int = 0  # of LMCache's daemon
    store_port: int = 0  # of Valkey
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run the engine, and what it can be asked."""

    title: str
    tier: str = ""  # where hits outside the device come from: host, disk or remote
    services: tuple[Service, ...] = ()  # processes beside it; each may use those before it
    roomy: bool = False
    blends: bool = False
    longest_hit_tokens: int | None = None
    remark: str = ""  # stands below every table with it

    def can_hit(self, tier: str, tokens: int) -> bool:
        longest = self.longest_hit_tokens
        return tier == self.tier and (longest is None or tokens <= longest)


# A server that a busy machine leaves without a turn for longer than the default, a tenth of a second,
# would make of a hit a miss, which has no place among the hits: so what it costs would not be seen.
_LOOKUP_SECONDS: Final = 2.0
_OWN_COPIES: Final = (
    "on a CPU, where vLLM has none, its copies between device and host are the bench's"
)
CONTENDERS: Final = {
    "none": Contender("no connector"),
    "roomy": Contender(
        "no connector, room for all",
        roomy=True,
        remark="its device cache holds everything: what no cache outside the device can be ahead of",
    ),
    "kvstrata": Contender("KVStrata", "host"),
    "kvstrata-blockwise": Contender("KVStrata, blockwise", "host"),
    "kvstrata-layerwise": Contender("KVStrata, layerwise", "host"),
    "kvstrata-attached": Contender("KVStrata, attached server", "host", ("kvstrata",)),
    "kvstrata-disk": Contender("KVStrata, disk", "disk"),
    "kvstrata-remote": Contender("KVStrata, Valkey", "remote", ("valkey",)),
    "kvstrata-blend": Contender("KVStrata, blended", "host", blends=True),
    "native": Contender("vLLM tiering", "host", remark=_OWN_COPIES),
    "native-disk": Contender(
        "vLLM tiering, fs",
        "disk",
        remark=f"{_OWN_COPIES}; reads past the page cache, too, where the file system can, and checks nothing",
    ),
    # It stores no more than the first step computes (max_num_batched_tokens, 2048 on a CPU), and the
    # engine dies of the load.
    "example": Contender(
        "ExampleConnector",
        "disk",
        longest_hit_tokens=2050,
        remark="reads through the page cache, loads in the step and checks nothing",
    ),
    "lmcache": Contender("LMCache", "host", ("lmcache",)),
    "lmcache-disk": Contender(
        "LMCache, fs",
        "disk",
        ("lmcache",),
        remark="reads through the page cache and checks nothing",
    ),
    "lmcache-remote": Contender("LMCache, Valkey", "remote", ("valkey", "lmcache")),
}


def transfer_config(deployment: Deployment, device: str) -> dict[str, Any] | None:
    """vLLM's ``kv_transfer_config``; None without a connector. *device* is the engine's."""
    d = deployment
    disk = f"{d.folder}/disk"
    host, small_host = f"host:{d.host_bytes}", f"host:{d.small_host_bytes}"
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "kvstrata": lambda: _kvstrata(tiers=host),
        "kvstrata-blockwise": lambda: _kvstrata(tiers=host, load_mode="blockwise"),
        "kvstrata-layerwise": lambda: _kvstrata(tiers=host, load_mode="layerwise"),
        "kvstrata-attached": lambda: _kvstrata(server="attached", socket=f"{d.folder}/server.sock"),
        "kvstrata-disk": lambda: _kvstrata(tiers=f"{small_host} | disk:{disk}:{d.disk_bytes}"),
        "kvstrata-remote": lambda: _kvstrata(
            tiers=f"{small_host} | valkey://127.0.0.1:{d.store_port}/0"
        ),
        "kvstrata-blend": lambda: (
            _kvstrata(tiers=host, blend_audit_share=0, blend_if_slower=True)
            | {"kv_connector": "BlendConnector", "kv_connector_module_path": _BLEND_MODULE}
        ),
        "native": lambda: _native(d, device, d.host_bytes, []),
        "native-disk": lambda: _native(
            d, device, d.small_host_bytes, [{"type": "fs", "root_dir": disk}]
        ),
        "example": lambda: {
            "kv_connector": "CountedExampleConnector",
            "kv_connector_module_path": "kvstrata.bench.counted_example",
            "kv_connector_extra_config": {
                "shared_storage_path": disk,
                "counts_path": str(counts_path(d)),
            },
        },
        **dict.fromkeys(("lmcache", "lmcache-disk", "lmcache-remote"), lambda: _lmcache(d)),
    }
    if d.contender not in makers:
        return None
    return makers[d.contender]() | {"engine_id": d.engine_id, "kv_role": "kv_both"}


def counts_path(deployment: Deployment) -> Path:
    """Where the worker of a peer counts the bytes that it moves."""
    return Path(deployment.folder, "moved")


def _kvstrata(**settings: object) -> dict[str, Any]:
    return {
        "kv_connector": "KVStrataConnector",
        "kv_connector_module_path": _MODULE,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lookup_timeout_seconds": _LOOKUP_SECONDS} | settings,
    }


def _lmcache(deployment: Deployment) -> dict[str, Any]:
    return {
        "kv_connector": "CountedLMCacheConnector",
        "kv_connector_module_path": "kvstrata.bench.counted_lmcache",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": str(deployment.port),
            "token_bytes": deployment.token_bytes,
            "counts_path": str(counts_path(deployment)),
        },
    }


def _native(
    deployment: Deployment, device: str, host_bytes: int, secondary: list[dict[str, Any]]
) -> dict[str, Any]:
    extra: dict[str, Any] = {"cpu_bytes_to_use": host_bytes}
    if device == "cpu":  # vLLM's own worker copies with CUDA only
        extra |= {"spec_name": "CpuPagesSpec", "spec_module_path": "kvstrata.bench.native_tiering"}
        extra["counts_path"] = str(counts_path(deployment))
    elif secondary:
        extra |= {"spec_name": "TieringOffloadingSpec"}
    if device == "cpu" or secondary:
        extra["secondary_tiers"] = secondary
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
