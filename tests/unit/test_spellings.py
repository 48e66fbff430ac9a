"""Settings in the words of UCM and FlexKV."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata.core import spellings_of_flexkv, spellings_of_ucm
from kvstrata.core.config import Config, pipeline_string
from kvstrata.core.errors import ConfigError
from kvstrata.core.load import Setting, explain, load_config

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
GIB = 1 << 30


def ucm(store: dict[str, Any], name: str = "UcmPipelineStore", **top: Any) -> dict[str, Any]:
    entry = {"ucm_connector_name": name, "ucm_connector_config": store}
    return {"ucm_connectors": [entry], **top}


CACHE_POSIX = {
    "store_pipeline": "Cache|Posix",
    "storage_backends": "/mnt/test",
    "posix_capacity_gb": 100,
}


def tiers_of(overrides: dict[str, Any], environ: dict[str, str] | None = None) -> str:
    return pipeline_string(load_config(overrides, environ=environ or {}).tiers)


def fault_of(overrides: dict[str, Any], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, environ=environ or {})
    return str(caught.value)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="kvstrata.core.load")
    return caplog


def examples() -> dict[str, tuple[str, str]]:
    """The file that the page shows for each language, and the tiers that it promises."""
    found = re.findall(
        r"^```(yaml|json)\n((?:(?!```).*\n)*)```\n\nis read as `tiers: ([^`]*)`", PAGE, re.MULTILINE
    )
    return {language: (text, tiers) for language, text, tiers in found}


def test_the_file_of_ucm_that_the_page_shows_is_read_as_it_says(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    text, promised = examples()["yaml"]
    file = tmp_path / "ucm_config.yaml"
    file.write_text(text)
    assert tiers_of({"UCM_CONFIG_FILE": str(file)}) == promised
    assert tiers_of({}, {"UCM_CONFIG_FILE": str(file)}) == promised
    assert tiers_of(yaml.safe_load(text)) == promised
    note, idle = log.messages[0], log.messages[1]
    assert f"is read as tiers: {promised}" in note
    assert (
        "store_pipeline, storage_backends, cache_buffer_capacity_gb, posix_capacity_gb in the"
        in note
    )
    assert str(file) in note
    assert "without effect" in idle
    assert all(name in idle for name in ("io_direct", "enable_event_sync", "use_layerwise"))
    assert [record.levelname for record in log.records[:2]] == ["INFO", "WARNING"]


def test_the_file_of_flexkv_that_the_page_shows_is_read_as_it_says(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    text, promised = examples()["json"]
    file = tmp_path / "flexkv_config.json"
    file.write_text(text)
    assert tiers_of({}, {"FLEXKV_CONFIG_PATH": str(file)}) == promised
    (note,) = log.messages
    assert f"is read as tiers: {promised}" in note
    assert f"cpu_cache_gb, ssd_cache_gb, ssd_cache_dir in the file {file}" in note


def test_every_setting_that_the_page_names_is_known() -> None:
    read, _, _ = PAGE.partition("## From LMCache")  # whose settings are not
    tables = "".join(line for line in read.splitlines(keepends=True) if line.startswith("|"))
    names = set(re.findall(r"`([a-z][a-z_]*_[a-z_]+)[`:]", tables))
    ours = {"blend_rule", "max_blocks_per_file", "tokens_per_block", "huge_pages", "load_mode"}
    theirs = (
        {*spellings_of_ucm.NAMES, *spellings_of_ucm._BLENDING}
        | {*spellings_of_flexkv._TIERS, *spellings_of_flexkv.REFUSED, *spellings_of_flexkv.IDLE}
        | {"ucm_connector_config", "ucm_connector_module_path"}
    )
    assert len(names) > 25
    assert names - theirs - ours == set()


@pytest.mark.parametrize(
    ("store", "name", "tiers"),
    [
        (CACHE_POSIX, "UcmPipelineStore", "host:auto | disk:/mnt/test:100GiB"),
        (CACHE_POSIX | {"store_pipeline": "Posix"}, "UcmPipelineStore", "host:auto | disk:/mnt/test:100GiB"),
        (
            {"store_pipeline": "Cache|Empty", "cache_buffer_capacity_gb": 32},
            "UcmPipelineStore",
            "host:32GiB",
        ),
        (
            {"storage_backends": "/a:/b", "storage_capacity": 5 * GIB, "use_direct": False},
            "UcmNfsStore",
            "host:auto | disk:/a,/b:5GiB",
        ),
    ],
)  # fmt: skip
def test_stores_of_ucm(store: dict[str, Any], name: str, tiers: str) -> None:
    assert tiers_of(ucm(store, name)) == tiers


def test_two_files_of_ucm_that_differ_are_refused_and_one_that_is_not_there_is_named(
    tmp_path: Path,
) -> None:
    for name, gib in ("a", 100), ("b", 200):
        (tmp_path / name).write_text(yaml.safe_dump(ucm(CACHE_POSIX | {"posix_capacity_gb": gib})))
    fault = fault_of(
        {"UCM_CONFIG_FILE": str(tmp_path / "a")}, {"UCM_CONFIG_FILE": str(tmp_path / "b")}
    )
    assert f"the file {tmp_path / 'a'}" in fault
    assert f"the file {tmp_path / 'b'}" in fault
    assert "environment UCM_CONFIG_FILE" in fault_of({}, {"UCM_CONFIG_FILE": "/not/there.yaml"})


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (ucm(CACHE_POSIX | {"posix_capacity_gb": 0}), ["no bound", "posix_capacity_gb"]),
        (ucm(CACHE_POSIX | {"storage_backends": "relative"}), ["'relative' is not absolute"]),
        (ucm(CACHE_POSIX | {"posix_capacity": 3}), ["unknown setting 'posix_capacity' of UCM"]),
        (ucm(CACHE_POSIX | {"posix_capacity_gb": "many"}), ["posix_capacity_gb", "'many'"]),
        (ucm(CACHE_POSIX | {"store_pipeline": "Cache|Ds3fs"}), ["'Cache|Ds3fs'", "give `tiers`"]),
        (ucm({}, "UcmMooncakeStore"), ["store UcmMooncakeStore", "give `tiers`"]),
        (ucm(CACHE_POSIX, hit_ratio=0.9), ["hit_ratio"]),
        (ucm(CACHE_POSIX, ucm_sparse_config={"GSA": {}}), ["ucm_sparse_config", "attention_hook"]),
        (ucm({"store_pipeline": "Posix", "posix_capacity_gb": 1}), ["storage_backends is not set"]),
        ({"ucm_connectors": []}, ["has 0 entries"]),
        ({"ucm_connectors": 5}, ["a list is expected", "got 5"]),
        ({"ucm_connectors": ["UcmNfsStore"]}, ["a mapping is expected"]),
        ({"UCM_CONFIG_FILE": "/not/there.yaml"}, ["/not/there.yaml", "UCM_CONFIG_FILE"]),
        ({"UCM_CONFIG_FIEL": "/a"}, ["unknown setting 'UCM_CONFIG_FIEL'"]),
        ({"tiers": "host:1GiB", **ucm(CACHE_POSIX)}, ["words of UCM", "storage_backends", "once more"]),
    ],
)  # fmt: skip
def test_what_ucm_has_and_kvstrata_has_not_is_refused(
    overrides: dict[str, Any], parts: list[str]
) -> None:
    fault = fault_of(overrides)
    assert [part for part in parts if part not in fault] == []
    assert "hint:" in fault or "remedy:" in fault


BLEND_YAML = """
kv_connector: "BlendConnector"
kv_connector_module_path: "ucm.integration.vllm.blend_connector"
kv_connector_extra_config:
  # 存储配置
  store_pipeline: "Cache|Posix"
  storage_backends: "/data/ucm_cache"
  # Blend 配置
  blend_chunk_size: 64
  min_match_ratio: 0.8
  position_correction: true
  recompute_boundary: 2
  # RoPE 配置
  rope_theta: 10000.0
  head_dim: 128
"""
BLEND_IN_A_PROGRAM: dict[str, Any] = {
    "store_pipeline": "Cache|Posix",
    "storage_backends": "/data/ucm_cache",
    "blend_chunk_size": 64,
    "min_match_ratio": 0.8,
}
OF_BLEND_YAML: dict[str, Any] = yaml.safe_load(BLEND_YAML)["kv_connector_extra_config"]
BLENDING = {
    "blend_chunk_size": 64,
    "min_match_ratio": 0.8,
    "position_correction": True,
    "recompute_boundary": 2,
    "rope_theta": 10000.0,
    "head_dim": 128,
}


def test_the_configuration_in_ucms_document_of_the_blend_connector_is_read(
    log: pytest.LogCaptureFixture,
) -> None:
    config = load_config(OF_BLEND_YAML, environ={})
    assert pipeline_string(config.tiers) == "host:auto | disk:/data/ucm_cache:100GiB"
    assert {name: getattr(config, name) for name in BLENDING} == BLENDING
    assert log.messages == [
        "UCM's posix_capacity_gb is not set: 100 GiB of disk are taken at most",
        (
            "UCM's store_pipeline, storage_backends in kv_connector_extra_config is read as tiers: "
            "host:auto | disk:/data/ucm_cache:100GiB"
        ),
    ]


def test_the_configuration_in_ucms_program_with_the_blend_connector_is_read() -> None:
    config = load_config(BLEND_IN_A_PROGRAM, environ={})
    assert pipeline_string(config.tiers) == "host:auto | disk:/data/ucm_cache:100GiB"
    assert (config.blend_chunk_size, config.min_match_ratio) == (64, 0.8)


def test_a_store_of_the_blend_connector_may_say_its_capacities() -> None:
    capacities = {"cache_buffer_capacity_gb": 8, "posix_capacity_gb": 200, "io_direct": True}
    said = tiers_of(OF_BLEND_YAML | capacities)
    assert said == "host:8GiB | disk:/data/ucm_cache:200GiB"


@pytest.mark.parametrize("place", ["list", "file"])
def test_settings_of_blending_beside_those_of_a_store_are_read(
    place: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "ucm_config.yaml"
    file.write_text(yaml.safe_dump(OF_BLEND_YAML))
    overrides = {
        "list": ucm(OF_BLEND_YAML | {"posix_capacity_gb": 100}),
        "file": {"UCM_CONFIG_FILE": str(file)},
    }[place]
    config = load_config(overrides, environ={})
    assert pipeline_string(config.tiers) == "host:auto | disk:/data/ucm_cache:100GiB"
    assert {name: getattr(config, name) for name in BLENDING} == BLENDING
    where = {"list": "kv_connector_extra_config", "file": f"the file {file}"}[place]
    assert f"UCM's head_dim in {where} is read as head_dim: 128" in log.messages


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            OF_BLEND_YAML | ucm(CACHE_POSIX),
            ["store_pipeline is 'Cache|Posix'", "take store_pipeline away, or ucm_connectors"],
        ),
        (
            OF_BLEND_YAML | {"tiers": "host:1GiB"},
            ["tiers is set in words of UCM (from store_pipeline, storage_backends in", "take one"],
        ),
        (
            OF_BLEND_YAML | {"store_pipeline": "Cache|Ds3fs"},
            ["with the pipeline 'Cache|Ds3fs'", "give `tiers` instead"],
        ),
        (
            {"storage_backends": "/data/ucm_cache", "blend_chunk_size": 64},
            ["store_pipeline is not set", "'/data/ucm_cache'", "Cache|Posix"],
        ),
        (OF_BLEND_YAML | {"posix_capacity_gb": 0}, ["no bound", "posix_capacity_gb"]),
        (
            OF_BLEND_YAML | {"position_correction": False},
            ["position_correction", "False", "take position_correction away"],
        ),
        (
            ucm(CACHE_POSIX | {"blend_chunk_size": 32}) | {"blend_chunk_size": 64},
            ["blend_chunk_size is set in words of UCM", "once more", "take one of them away"],
        ),
        (
            ucm(CACHE_POSIX | {"min_match_ratio": 80}),
            ["min_match_ratio", "got 80", "min_match_ratio in kv_connector_extra_config"],
        ),
        (OF_BLEND_YAML | {"storage_backend": "/a"}, ["unknown setting 'storage_backend'"]),
    ],
)  # fmt: skip
def test_what_contradicts_itself_beside_ucms_blending_is_refused(
    overrides: dict[str, Any], parts: list[str]
) -> None:
    fault = fault_of(overrides)
    assert [part for part in parts if part not in fault] == []
    assert "hint:" in fault or "remedy:" in fault


def test_an_empty_sparse_configuration_asks_for_nothing() -> None:
    assert tiers_of(ucm(CACHE_POSIX, ucm_sparse_config={})) == "host:auto | disk:/mnt/test:100GiB"


@pytest.mark.parametrize(
    ("environ", "tiers"),
    [
        ({"FLEXKV_CPU_CACHE_GB": "8"}, "host:8GiB"),
        ({"FLEXKV_CPU_CACHE_GB": "8", "FLEXKV_SSD_CACHE_GB": "0"}, "host:8GiB"),
        (
            {"FLEXKV_SSD_CACHE_GB": "64", "FLEXKV_SSD_CACHE_DIR": "/a;/b;"},
            "host:16GiB | disk:/a,/b:64GiB",
        ),
        ({"FLEXKV_CPU_CACHE_GB": "8", "FLEXKV_ENABLE_GDS": "0", "ENABLE_FLEXKV": "1"}, "host:8GiB"),
        ({"FLEXKV_EVICTION_POLICY": "lru", "FLEXKV_INSTANCE_NUM": "1"}, "host:16GiB"),
        ({"FLEXKV_IOURING_ENTRIES": "512"}, "host:auto"),
    ],
)
def test_variables_of_flexkv(environ: dict[str, str], tiers: str) -> None:
    assert tiers_of({}, environ) == tiers


def test_the_other_settings_of_flexkv_that_mean_the_same(tmp_path: Path) -> None:
    file = tmp_path / "flexkv.yml"
    file.write_text(
        "cpu_cache_gb: 8\nssd_cache_gb: 20\nssd_cache_dir: [/a, /b]\nenable_ssd: true\n"
        "enable_cpu: true\ntokens_per_block: 128\nmax_blocks_per_file: 100\n"
        "use_hugepage_cpu_buffer: true\nhugepage_size_bytes: 2097152\n"
    )
    config = load_config({}, environ={"FLEXKV_CONFIG_PATH": str(file)})
    assert config == Config.model_validate(
        {
            "tiers": [
                {"kind": "host", "capacity": 8 * GIB, "huge_pages": True},
                {
                    "kind": "disk",
                    "paths": ["/a", "/b"],
                    "capacity": 20 * GIB,
                    "max_blocks_per_file": 100,
                },
            ],
            "tokens_per_block": 128,
        }
    )


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"FLEXKV_CPU_CAHCE_GB": "8"}, ["'cpu_cahce_gb' of FlexKV", "FLEXKV_CPU_CAHCE_GB", "did you mean"]),
        ({"FLEXKV_SSD_CACHE_GB": "8"}, ["ssd_cache_gb is set and ssd_cache_dir is not", "give the directory"]),
        ({"FLEXKV_SSD_CACHE_GB": "8", "FLEXKV_SSD_CACHE_DIR": "./x"}, ["'./x' is not absolute"]),
        ({"FLEXKV_CPU_CACHE_GB": "-1"}, ["cpu_cache_gb", "FLEXKV_CPU_CACHE_GB"]),
        ({"FLEXKV_TOKENS_PER_BLOCK": "16.5"}, ["tokens_per_block: a whole number is expected"]),
        ({"FLEXKV_ENABLE_GDS": "1"}, ["enable_gds", "blocks go through host memory"]),
        ({"FLEXKV_INSTANCE_NUM": "2"}, ["instance_num", "kvstrata server"]),
        ({"FLEXKV_SERVER_LAUNCH_MODE": "external"}, ["server_launch_mode", "server: attached"]),
        ({"FLEXKV_EVICTION_POLICY": "lfu"}, ["eviction_policy", "s3fifo"]),
        ({"ENABLE_FLEXKV": "0"}, ["enable_flexkv", "without --kv-transfer-config"]),
        ({"FLEXKV_CONFIG_PATH": "/not/there.json"}, ["/not/there.json", "FLEXKV_CONFIG_PATH"]),
    ],
)  # fmt: skip
def test_what_flexkv_has_and_kvstrata_has_not_is_refused(
    environ: dict[str, str], parts: list[str]
) -> None:
    fault = fault_of({}, environ)
    assert [part for part in parts if part not in fault] == []
    assert "hint:" in fault


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("num_cpu_blocks: 100", ["num_cpu_blocks", "give cpu_cache_gb"]),
        ("enable_ssd: true", ["enable_ssd is true and ssd_cache_gb is not set"]),
        (
            "enable_ssd: false\nssd_cache_gb: 5\nssd_cache_dir: /a",
            ["enable_ssd is false and ssd_cache_gb is set", "take"],
        ),
        ("enable_remote: true", ["enable_remote", "lowest tier"]),
        ("use_mooncake_store_backend: true", ["mooncake://HOST:PORT"]),
        ("cpu_cache_gb: 4", ["cpu_cache_gb is '8'", "and 4", "take one of them away"]),
        ("CacheConfig: {}", ["unknown setting 'CacheConfig' of FlexKV"]),
    ],
)
def test_what_a_file_of_flexkv_must_not_say(content: str, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "flexkv.yml"
    file.write_text(content)
    fault = fault_of({}, {"FLEXKV_CONFIG_PATH": str(file), "FLEXKV_CPU_CACHE_GB": "8"})
    assert [part for part in parts if part not in fault] == []


def test_a_password_is_in_no_error(tmp_path: Path) -> None:
    file = tmp_path / "flexkv.yml"
    file.write_text("redis_password: hunter2\n")
    fault = fault_of({}, {"FLEXKV_CONFIG_PATH": str(file)})
    assert "redis_password" in fault
    assert "hunter2" not in fault


def test_their_words_and_ours_can_stand_side_by_side_where_they_differ() -> None:
    environ = {"FLEXKV_CPU_CACHE_GB": "8", "KVSTRATA_PREFAULT": "no"}
    settings = explain({"tokens_per_block": 32}, environ=environ)
    assert settings["tiers"].source == "FLEXKV_CPU_CACHE_GB in the environment"
    assert settings["prefault"] == Setting(value=False, source="environment KVSTRATA_PREFAULT")
    assert settings["tokens_per_block"].value == 32


@pytest.mark.parametrize(
    ("overrides", "environ"),
    [
        ({"tiers": "host:8GiB"}, {"FLEXKV_CPU_CACHE_GB": "8"}),
        ({}, {"KVSTRATA_TIERS": "host:8GiB", "FLEXKV_CPU_CACHE_GB": "8"}),
        (ucm(CACHE_POSIX), {"FLEXKV_CPU_CACHE_GB": "8"}),
    ],
)
def test_tiers_are_said_once(overrides: dict[str, Any], environ: dict[str, str]) -> None:
    fault = fault_of(overrides, environ)
    assert "tiers is set in words of FlexKV (from FLEXKV_CPU_CACHE_GB in the environment)" in fault
    assert "take one of them away" in fault


def test_a_wrong_value_of_theirs_is_named_with_its_source() -> None:
    fault = fault_of({}, {"FLEXKV_TOKENS_PER_BLOCK": "0"})
    assert "tokens_per_block" in fault
    assert "FLEXKV_TOKENS_PER_BLOCK in the environment" in fault
