"""UCM's settings: in ``kv_connector_extra_config``, or in the file of its key UCM_CONFIG_FILE.

The key may be an environment variable, too: the command line has no other place for it.

Its connectors take a list with one store. Its document of ``BlendConnector`` has the settings of a
pipeline in no list, beside those of blending.
"""

from collections.abc import Mapping
from typing import Final

from kvstrata.core.settings_file import read_settings, show
from kvstrata.core.spellings import (
    GIB,
    Reader,
    Refusal,
    Said,
    Translation,
    agreed,
    shown_tiers,
)

__all__ = ["NAMES", "translate"]

FILE_KEY: Final = "UCM_CONFIG_FILE"

_LIST: Final = "ucm_connectors"
_IDLE: Final = frozenset({"enable_event_sync", "metrics_config_path", "use_layerwise"})
_REFUSED: Final[Mapping[str, Refusal]] = {
    "hit_ratio": Refusal("KVStrata answers with what it has: take it away"),
    "ucm_sparse_config": Refusal(
        "attention is computed in full: take it away, or write an attention_hook", ({},)
    ),
}
_IDLE_WORDS: Final = """
    buffer_number buffer_size cache_stream_number cpu_affinity_cores data_dir_shard_bytes
    io_direct posix_commit_concurrency posix_data_trans_concurrency posix_gc_check_interval_sec
    posix_gc_concurrency posix_gc_enable posix_gc_max_recycle_count_per_shard
    posix_gc_recycle_percent posix_gc_shard_sample_ratio posix_gc_trigger_threshold_ratio
    posix_io_engine posix_lookup_concurrency posix_open_concurrency recycle_enable
    recycle_threshold_ratio running_queue_depth shard_data_dir share_buffer_enable stream_number
    timeout_ms use_direct waiting_queue_depth
"""
_IDLE_OF_STORES: Final = frozenset(_IDLE_WORDS.split())
"""What tunes how UCM's own stores work."""

_PIPELINES: Final = {"cache|posix": True, "posix": True, "cache|empty": False}
"""Whether there are files at the end of a pipeline."""

_TIERS: Final = (
    *("store_pipeline", "storage_backends", "cache_buffer_capacity_gb"),
    *("posix_capacity_gb", "storage_capacity"),
)

NAMES: Final = (FILE_KEY, _LIST, *_TIERS, *sorted(_IDLE | _IDLE_OF_STORES), *_REFUSED)
"""What UCM reads in ``kv_connector_extra_config``, less the settings that have our names."""

_BLENDING: Final = (
    *("blend_chunk_size", "min_match_ratio", "position_correction", "recompute_boundary"),
    *("rope_theta", "head_dim"),
)
"""Of blending: ours have the same names."""

_IN_NO_LIST: Final = (*_TIERS, *_BLENDING, *sorted(_IDLE_OF_STORES))

_UNSAID_BYTES: Final = 100 * GIB
"""The document of ``BlendConnector`` has no word for it."""

_REMEDY: Final = "give `tiers` instead, for example host:8GiB | disk:/var/cache/kv:200GiB"


def translate(overrides: Mapping[str, object], environ: Mapping[str, str]) -> Translation | None:
    """Return what *overrides* and the file say in UCM's words; None if they say nothing in them.

    Raises:
        ConfigError: if the file of ``UCM_CONFIG_FILE`` cannot be read.
    """
    given = {k: v for k, v in overrides.items() if k in NAMES and k != FILE_KEY}
    places = {"kv_connector_extra_config": overrides, "environment": environ}
    files = [(place, found[FILE_KEY]) for place, found in places.items() if FILE_KEY in found]
    if not given and not files:
        return None
    result = Translation("UCM")
    sources = [_said(given, "kv_connector_extra_config")]
    for place, named in files:
        found = read_settings(named, f"{place} {FILE_KEY}")
        sources.append(_said(found, f"the file {named}"))
    together = agreed("UCM", sources, result.faults)
    alone = {name: together.pop(name) for name in _IN_NO_LIST if name in together}
    reader = Reader(together, result)
    lists = reader.given(_LIST)
    for listed in lists:
        stores = reader.entries(_LIST)
        if len(stores) == 1:
            _entry(Reader(_said(stores[0], listed.place), result), listed.place, result)
        elif not result.faults:
            message = f"{_LIST} has {len(stores)} entries, where UCM wants one"
            reader.fault(f"{message} (from {listed.place})", _REMEDY)
    _in_no_list(Reader(alone, result), lists, result)
    reader.close(idle=_IDLE, refused=_REFUSED)
    return result


def _said(found: Mapping[str, object], place: str) -> dict[str, Said]:
    return {name: Said(value, name, place) for name, value in found.items()}


def _entry(reader: Reader, place: str, result: Translation) -> None:
    """The one entry of the list: a name, and the configuration of the store so named."""
    name = reader.text("ucm_connector_name")
    config = reader.mapping("ucm_connector_config") or {}
    reader.close(idle=(), refused={"ucm_connector_module_path": Refusal(_REMEDY)})
    _store(name, place, Reader(_said(config, place), result), result)


def _in_no_list(store: Reader, lists: list[Said], result: Translation) -> None:
    """The settings of one pipeline, and of blending, that stand by themselves."""
    tiers = store.given(*_TIERS)
    if not tiers:
        _blending(store, result)
        store.close(idle=_IDLE_OF_STORES, refused={})
        return
    first = tiers[0]
    said = f"{first.name} is {show(first.value)} (from {first.source})"
    if lists:
        message = f"{said}, and stores are listed as well (from {lists[0].source})"
        store.fault(message, f"take {first.name} away, or {_LIST}")
    elif "store_pipeline" not in store:
        store.fault(f"{said}, and store_pipeline is not set", 'set store_pipeline: "Cache|Posix"')
    else:
        _store("UcmPipelineStore", first.place, store, result, unsaid_bytes=_UNSAID_BYTES)


def _store(
    name: str | None, place: str, store: Reader, result: Translation, *, unsaid_bytes: int = 0
) -> None:
    """The configuration of the store *name*, and of blending beside it.

    Without a capacity its disk tier has *unsaid_bytes*; 0: it has to be said.
    """
    said = store.given(*_TIERS)
    pipeline = store.text("store_pipeline")
    if name == "UcmPipelineStore":
        files = _PIPELINES.get((pipeline or "").replace(" ", "").lower())
    else:
        files = True if name == "UcmNfsStore" else None
    if files is None:
        kind = f"{name} with the pipeline {pipeline!r}" if pipeline else f"store {name}"
        store.fault(f"{kind} is not one of KVStrata's (from {place})", _REMEDY)
        return
    host: dict[str, object] = {
        "kind": "host",
        "capacity": store.gib("cache_buffer_capacity_gb") or "auto",
    }
    tiers = [host, _disk_tier(store, result, unsaid_bytes)] if files else [host]
    _blending(store, result)
    store.close(idle=_IDLE_OF_STORES, refused={})
    result.give("tiers", tiers, said, shown_tiers(tiers))


def _disk_tier(store: Reader, result: Translation, unsaid_bytes: int) -> dict[str, object]:
    if "storage_backends" not in store:
        store.fault(
            "storage_backends is not set", "say where the files are to be: an absolute path"
        )
    said = store.given("posix_capacity_gb", "storage_capacity")
    capacity = store.gib("posix_capacity_gb") or store.whole("storage_capacity")
    if not said and unsaid_bytes:
        capacity = unsaid_bytes
        shown = f"{unsaid_bytes // GIB} GiB of disk are taken at most"
        result.notes.append(f"UCM's posix_capacity_gb is not set: {shown}")
    if not capacity:
        store.fault(
            "storage has no bound, it would fill the disk",
            "say how much it may take: posix_capacity_gb",
        )
    paths = store.paths("storage_backends", ":")
    return {"kind": "disk", "paths": paths, "capacity": capacity or 0}


def _blending(reader: Reader, result: Translation) -> None:
    for name in _BLENDING:
        said = reader.given(name)
        value = reader.value(name)
        if value is not None:
            result.give(name, value, said, show(value))
