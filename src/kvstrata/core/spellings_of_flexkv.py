"""FlexKV's settings: the environment variables ``FLEXKV_*`` and the file of FLEXKV_CONFIG_PATH."""

from collections.abc import Mapping
from typing import Final

from kvstrata.core.settings_file import read_settings
from kvstrata.core.spellings import (
    GIB,
    Reader,
    Refusal,
    Said,
    Translation,
    agreed,
    shown_tiers,
)

__all__ = ["translate"]

PREFIX: Final = "FLEXKV_"
FILE_VARIABLE: Final = "FLEXKV_CONFIG_PATH"
SWITCH: Final = "ENABLE_FLEXKV"

_DEFAULT_HOST_BYTES: Final = 16 * GIB
_TIERS: Final = (
    *("cpu_cache_gb", "use_hugepage_cpu_buffer", "eviction_policy"),
    *("ssd_cache_gb", "ssd_cache_dir", "enable_ssd", "max_blocks_per_file"),
)

_SHARE: Final = "share blocks through a lowest tier instead, for example valkey://HOST:PORT"
_GIGABYTES: Final = "KVStrata counts bytes: give cpu_cache_gb and ssd_cache_gb"

REFUSED: Final[Mapping[str, Refusal]] = {
    "enable_flexkv": Refusal(
        "to run without a cache, start vLLM without --kv-transfer-config", (True,)
    ),
    "enable_cpu": Refusal("KVStrata always has a host tier: take it away", (True,)),
    "enable_gds": Refusal("blocks go through host memory: set it to 0", (False,)),
    "enable_nixl": Refusal("blocks go through host memory: set it to 0", (False,)),
    "enable_remote": Refusal(_SHARE, (False,)),
    "enable_kv_sharing": Refusal(_SHARE, (False,)),
    "enable_p2p_cpu": Refusal(_SHARE, (False,)),
    "enable_p2p_ssd": Refusal(_SHARE, (False,)),
    "enable_3rd_remote": Refusal(_SHARE, (False,)),
    "remote_cache_path": Refusal("give a directory that nodes share as a tier, shared:PATH:SIZE"),
    "use_mooncake_store_backend": Refusal(
        "give Mooncake's master as a tier, mooncake://HOST:PORT", (False,)
    ),
    "mooncake_store_config_path": Refusal("give Mooncake's master as a tier, mooncake://HOST:PORT"),
    "num_cpu_blocks": Refusal(_GIGABYTES),
    "num_ssd_blocks": Refusal(_GIGABYTES),
    "num_remote_blocks": Refusal("give the remote tier a capacity of its own"),
    "hugepage_size_bytes": Refusal("huge pages are of 2 MiB here: take it away", (2 << 20,)),
    "instance_num": Refusal(
        "start one `kvstrata server` and attach every engine to it: server: attached, socket: PATH",
        (1,),
    ),
    "instance_id": Refusal("every engine attaches as it is: take it away", (0,)),
    "server_launch_mode": Refusal(
        "start `kvstrata server` and set server: attached and socket: PATH", ("embedded",)
    ),
    "kv_cache_dtype": Refusal("vLLM's --kv-cache-dtype decides: take it away"),
    "master_host": Refusal("an engine over several machines is not served: take it away"),
    "master_ports": Refusal("an engine over several machines is not served: take it away"),
    **{
        name: Refusal(_SHARE)
        for name in (
            *("redis_host", "redis_port", "redis_password", "node_ttl_seconds", "local_ip"),
            *("local_zmq_ip", "local_zmq_port", "remote_file_prefix", "remote_file_num"),
            *("remote_file_size", "remote_config_custom"),
        )
    },
}
"""What says where blocks are kept, or for whom, in a way that KVStrata has not."""

_IDLE_WORDS: Final = """
    ce_gather_nt ce_gather_threads ce_path_opt ce_segment_threshold cpp_metrics_port cpu_layout
    cpu_layout_type cudahost_chunk_safety_margin_bytes cudahost_chunk_size_gb
    cudahost_register_portable enable_ce_memcpy2d enable_collective_sync
    enable_layerwise_transfer enable_metrics enable_mps enable_swa_transfer enable_trace
    evict_ratio evict_start_threshold eviction_log_interval_s gds_layout gds_layout_type
    hit_reward_seconds hugetlbfs_dir idle_sleep_ms index_accel iouring_entries iouring_flags
    kv_shared_across_ranks_mode layerwise_eventfd_connect_max_retries layerwise_eventfd_socket
    layerwise_notify_mode layerwise_wait_timeout_s lease_ttl_ms log_level logging_prefix
    lt_pool_initial_capacity max_file_size_gb maybe_skip_put metrics_init metrics_shutdown
    mla_d2h_mode nixl_backend_plugin num_log_interval_requests nvcomp_batch_size
    nvcomp_ssd_packed_read_threads nvcomp_ssd_packed_write_threads py_metrics_port
    rebuild_interval_ms refresh_batch_size remote_cache_size_mode remote_layout
    remote_layout_type renew_lease_ms reset_barrier_poll_ms reset_barrier_timeout_ms
    safety_ttl_ms server_client_mode server_recv_port shutdown_wait_s slru_protected_threshold
    ssd_cache_iouring_entries ssd_cache_iouring_flags ssd_io_opt ssd_layout ssd_layout_type
    swa_multi_group swa_multi_layer sync_get trace_file_path trace_flush_interval_ms
    trace_max_file_size_mb trace_max_files transfer_manager_shutdown_timeout_s
    transfer_num_cta_d2h transfer_num_cta_h2d transfer_trace use_ce_transfer_d2h
    use_ce_transfer_h2d use_hugepage_tmp_buffer vmm_fd_sock_dir worker_shutdown_timeout_s
"""
IDLE: Final = frozenset(_IDLE_WORDS.split())
"""What tunes how FlexKV's own parts work."""


def translate(environ: Mapping[str, str]) -> Translation | None:
    """Return what *environ* says in FlexKV's words; None if it says nothing in them.

    Raises:
        ConfigError: if the file of ``FLEXKV_CONFIG_PATH`` cannot be read.
    """
    variables = {
        name.removeprefix(PREFIX).lower(): Said(value, name, "the environment")
        for name, value in environ.items()
        if (name.startswith(PREFIX) or name == SWITCH) and name != FILE_VARIABLE
    }
    file = environ.get(FILE_VARIABLE)
    if not variables and file is None:
        return None
    result = Translation("FlexKV")
    sources = [variables]
    if file is not None:
        found = read_settings(file, f"environment {FILE_VARIABLE}")
        sources.append({k: Said(v, k, f"the file {file}") for k, v in found.items()})
    reader = Reader(agreed("FlexKV", sources, result.faults), result)
    _tiers(reader, result)
    where = reader.given("tokens_per_block")
    tokens = reader.whole("tokens_per_block")
    if tokens is not None:
        result.give("tokens_per_block", tokens, where, str(tokens))
    reader.close(idle=IDLE, refused=REFUSED)
    return result


def _tiers(reader: Reader, result: Translation) -> None:
    where = reader.given(*_TIERS)
    host: dict[str, object] = {
        "kind": "host",
        "capacity": reader.gib("cpu_cache_gb") or _DEFAULT_HOST_BYTES,
        "huge_pages": reader.flag("use_hugepage_cpu_buffer") or False,
    }
    policy = reader.given("eviction_policy")
    if reader.text("eviction_policy") not in {None, "lru"}:
        reader.fault(
            f"eviction_policy is none of KVStrata's (from {policy[0].source})",
            "give `tiers` as a list, each tier with eviction: lru, s3fifo or cost",
        )
    disk = _disk_tier(reader)
    if where:
        tiers = [host] if disk is None else [host, disk]
        result.give("tiers", tiers, where, shown_tiers(tiers))


def _disk_tier(reader: Reader) -> dict[str, object] | None:
    """The SSD cache: there is one if it has a size, as in FlexKV."""
    where = "".join(f" (from {said.source})" for said in reader.given("enable_ssd"))
    has_paths = "ssd_cache_dir" in reader
    capacity, paths = reader.gib("ssd_cache_gb"), reader.paths("ssd_cache_dir", ";")
    wanted, blocks = reader.flag("enable_ssd"), reader.whole("max_blocks_per_file")
    if wanted is False and capacity is not None:
        reader.fault(f"enable_ssd is false and ssd_cache_gb is set{where}", "take one of them away")
    if wanted and capacity is None:
        reader.fault(f"enable_ssd is true and ssd_cache_gb is not set{where}", "set ssd_cache_gb")
    if capacity is None:
        return None
    if not has_paths:
        reader.fault(
            "ssd_cache_gb is set and ssd_cache_dir is not",
            "give the directory too, as an absolute path: ssd_cache_dir",
        )
    disk: dict[str, object] = {"kind": "disk", "paths": paths, "capacity": capacity}
    return disk if blocks is None else {**disk, "max_blocks_per_file": blocks}
