import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvstrata.core.config import Config, Contradictions, config_from_json, config_to_json
from kvstrata.core.errors import ConfigError
from kvstrata.core.tiers import DiskTier, HostTier, SharedTier, Tier

GIB = 2**30

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
paths = st.lists(texts, min_size=1, max_size=3).map(lambda parts: Path("/", *parts))
capacities = st.integers(1, 2**63 - 1)
host_tiers = st.builds(HostTier, capacity=capacities | st.just("auto"))
disk_tiers = st.builds(
    DiskTier, paths=st.lists(paths, min_size=1, max_size=3).map(tuple), capacity=capacities
)
lowest_tiers = st.builds(SharedTier, path=paths, capacity=capacities)
seconds = st.floats(0, 86_400, exclude_min=True)
counts = st.integers(1, 2**63 - 1)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    socket = draw(st.none() | paths.filter(lambda path: len(bytes(path)) <= 107))
    wait, timeout = sorted((draw(seconds), draw(seconds)))
    # The tiers of an attached server are not the engine's to set.
    tiers: st.SearchStrategy[tuple[Tier, ...]] = st.just((HostTier(),))
    if socket is None:
        tiers = (
            st.tuples(host_tiers)
            | st.tuples(host_tiers, disk_tiers)
            | st.tuples(host_tiers, lowest_tiers)
            | st.tuples(host_tiers, disk_tiers, lowest_tiers)
        )
    return Config(
        tiers=draw(tiers),
        tokens_per_block=draw(st.none() | counts),
        server="embedded" if socket is None else "attached",
        socket=socket,
        weights_fingerprint=draw(st.none() | texts),
        block_format=draw(st.sampled_from(["exact", "int8"])),
        load_mode=draw(st.sampled_from(["auto", "blockwise", "layerwise"])),
        lookup_wait_seconds=wait,
        lookup_timeout_seconds=timeout,
        remote_lookup_seconds=draw(seconds),
        load_timeout_seconds=draw(seconds),
        save_timeout_seconds=draw(seconds),
        start_timeout_seconds=draw(seconds),
        reconnect_seconds=draw(seconds),
        drain_timeout_seconds=draw(seconds),
        max_saving_blocks=draw(counts),
        prefault=draw(st.booleans()),
        event_log=draw(st.none() | paths),
        kv_events=draw(st.sampled_from([None, "tcp://127.0.0.1:5557", "ipc:///run/e"])),
        kv_events_topic=draw(st.sampled_from(["", "kv@{model}", "{namespace}"])),
        kv_events_hashes=draw(st.sampled_from(["int", "bytes"])),
        recompute=draw(st.sampled_from(["auto", "never"])),
        quotas=tuple(draw(st.dictionaries(texts, st.floats(0.01, 1.0), max_size=3)).items()),
    )


@given(configs())
def test_a_configuration_survives_json(config: Config) -> None:
    text = config_to_json(config)
    assert config_from_json(text) == config
    assert config_to_json(config_from_json(json.dumps(json.loads(text)))) == text


@pytest.mark.parametrize(
    "said",
    [
        {"m": 0.25, "n": 1},
        "m=0.25, n=1",
        "{m: 0.25, n: 1}",
        ' {"m":0.25,"n":1}',
        [["m", 0.25], ["n", 1]],
        (("m", 0.25), ("n", 1.0)),
    ],
)
def test_quotas_can_be_said_in_several_ways(said: object) -> None:
    assert Config.model_validate({"quotas": said}).quotas == (("m", 0.25), ("n", 1.0))


@pytest.mark.parametrize(
    "said",
    [
        *({"m": 0}, {"m": 1.5}, {"m": True}, "m", "m=half", "m=0.1=0.2", 3),
        *("{m}", "{m: half}", "{m: true}", "{m:0.5}", "{m: 0.5", "{m: 2020-99-99}", "{[m]: 0.5}"),
    ],
)
def test_quotas_that_are_none_are_refused(said: object) -> None:
    with pytest.raises(ValidationError):
        Config.model_validate({"quotas": said})


def test_the_defaults_are_these() -> None:
    assert Config().model_dump() == {
        "tiers": (
            {
                "kind": "host",
                "capacity": "auto",
                "huge_pages": False,
                "numa_node": None,
                "eviction": "lru",
            },
        ),
        "tokens_per_block": None,
        "block_format": "exact",
        "server": "embedded",
        "socket": None,
        "weights_fingerprint": None,
        "load_mode": "auto",
        "lookup_wait_seconds": 0.001,
        "lookup_timeout_seconds": 0.1,
        "remote_lookup_seconds": 0.05,
        "load_timeout_seconds": 2.0,
        "save_timeout_seconds": 5.0,
        "start_timeout_seconds": 20.0,
        "reconnect_seconds": 1.0,
        "drain_timeout_seconds": 5.0,
        "max_saving_blocks": 4096,
        "prefault": True,
        "event_log": None,
        "event_log_bytes": 1 << 30,
        "kv_events": None,
        "kv_events_topic": "",
        "kv_events_hashes": "int",
        "kv_events_replay": None,
        "attention_hook": None,
        "metrics": None,
        "otlp_traces_endpoint": None,
        "recompute": "auto",
        "quotas": (),
        "blend": "requested",
        "blend_salts": (),
        "blend_chunk_size": 64,
        "blend_rule": "two_round_query",
        "blend_scored_layers": (),
        "blend_attention": "auto",
        "blend_again": False,
        "blend_if_slower": False,
        "recompute_ratio": 0.15,
        "recompute_boundary": 2,
        "recompute_first_tokens": 4,
        "blend_min_saved_tokens": 1024,
        "blend_min_saved_share": 0.3,
        "blend_audit_share": 0.01,
        "blend_audit_limit": 0.5,
        "position_correction": True,
        "min_match_ratio": None,
        "rope_theta": None,
        "head_dim": None,
        "blend_index_tokens": 8 << 20,
    }


def test_the_share_to_recompute_has_names() -> None:
    for said, ratio in (("fast", 0.05), ("balanced", 0.15), ("safe", 0.3), ("0.2", 0.2), (0, 0)):
        assert Config.model_validate({"recompute_ratio": said}).recompute_ratio == ratio
    for wrong in ("quick", -0.1, 1.1, True):
        with pytest.raises(ValidationError):
            Config.model_validate({"recompute_ratio": wrong})


def test_keys_stay_where_their_tokens_are() -> None:
    assert Config.model_validate({"position_correction": "true"}).position_correction
    with pytest.raises(ValidationError, match="keys that are not moved"):
        Config.model_validate({"position_correction": False})


@pytest.mark.parametrize("layers", [[2, 1], [1, 1], [-1]])
def test_scored_layers_are_named_once_in_order(layers: list[int]) -> None:
    with pytest.raises(ValidationError, match="blend_scored_layers is"):
        Config.model_validate({"blend_scored_layers": layers})


def test_every_setting_is_described() -> None:
    for model in (Config, HostTier, DiskTier, SharedTier):
        for name, field in model.model_fields.items():
            assert name == "kind" or (field.description and field.examples), name


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().prefault = False
    assert hash(Config()) == hash(Config())


def test_tiers_are_a_pipeline_string_or_a_list_that_says_the_same() -> None:
    as_list = [
        {"kind": "host", "capacity": "8GiB"},
        {"kind": "disk", "paths": "/var/cache/kv", "capacity": "200GiB"},
    ]
    expected = (
        HostTier(capacity=8 * GIB),
        DiskTier(paths=(Path("/var/cache/kv"),), capacity=200 * GIB),
    )
    assert Config.model_validate({"tiers": as_list}).tiers == expected
    as_text = "host:8GiB | disk:/var/cache/kv:200GiB"
    assert Config.model_validate({"tiers": as_text}).tiers == expected


def test_the_list_takes_ucms_words_and_auto() -> None:
    tiers = [{"kind": "Cache", "capacity": "AUTO"}, {"kind": "Posix", "paths": "/x", "capacity": 1}]
    assert Config.model_validate({"tiers": tiers}).tiers == (
        HostTier(capacity="auto"),
        DiskTier(paths=(Path("/x"),), capacity=1),
    )


def test_the_tiers_can_be_asked_for_by_kind() -> None:
    host, disk = HostTier(capacity=1), DiskTier(paths=(Path("/x"),), capacity=2)
    assert Config(tiers=(host,)).host_tier == Config(tiers=(host, disk)).host_tier == host
    assert Config(tiers=(host,)).disk_tier is None
    assert Config(tiers=(host, disk)).disk_tier == disk
    shared = SharedTier(path=Path("/y"), capacity=3)
    assert Config(tiers=(host, disk)).lowest_tier is None
    assert Config(tiers=(host, disk, shared)).lowest_tier == shared


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([], "there is no tier"),
        ([{"kind": "disk", "paths": "/x", "capacity": 1}], "needs a host tier before it"),
        (
            [{"kind": "disk", "paths": "/x", "capacity": 1}, {"kind": "host"}],
            "comes before the disk tier",
        ),
        ([{"kind": "host"}, {"kind": "host"}], "a second host tier"),
        (
            [{"kind": "host"}, {"kind": "s3", "url": "valkey://a"}],
            "is not the address of an? objects",
        ),
        (
            [{"kind": "host"}, {"kind": "valkey", "url": "cache:6379"}],
            "is not the address of a valkey",
        ),
        ([{"capacity": 1}], "a mapping with a kind"),
        (["host"], "a mapping with a kind"),
        ([{"kind": "host"}, {"kind": "disk", "paths": "x", "capacity": 1}], "not absolute"),
        ([{"kind": "host"}, {"kind": "disk", "paths": "/x\0", "capacity": 1}], "zero character"),
        ([{"kind": "host"}, {"kind": "disk", "paths": "/x"}], "Field required"),
        ([{"kind": "host"}, {"kind": "disk", "paths": [], "capacity": 1}], "at least 1 item"),
        (
            [
                {"kind": "host"},
                {"kind": "shared", "path": "/x", "capacity": 1},
                {"kind": "disk", "paths": "/y", "capacity": 1},
            ],
            "the disk tier comes before the shared tier",
        ),
        ([{"kind": "host", "capacity": "8G"}], "unknown unit"),
        ([{"kind": "host", "size": "8GiB"}], "Extra inputs"),
    ],
)
def test_a_list_of_tiers_that_cannot_work_is_refused(tiers: list[Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config.model_validate({"tiers": tiers})


@pytest.mark.parametrize(
    "name",
    [
        "lookup_wait_seconds",
        "lookup_timeout_seconds",
        "load_timeout_seconds",
        "save_timeout_seconds",
        "start_timeout_seconds",
        "reconnect_seconds",
        "drain_timeout_seconds",
    ],
)
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, 86_401, True, "soon", None])
def test_a_time_is_more_than_nothing_and_at_most_a_day(name: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate({name: value})
    assert caught.value.errors()[0]["loc"] == (name,)


@pytest.mark.parametrize("name", ["tokens_per_block", "max_saving_blocks"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_a_count_is_a_whole_number_from_1(name: str, value: object) -> None:
    with pytest.raises(ValidationError):
        Config.model_validate({name: value})
    assert getattr(Config.model_validate({name: 1}), name) == 1


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"server": "attached"}, ("server", "socket")),
        (
            {"server": "attached", "socket": "/run/kv.sock", "tiers": "host:1GiB"},
            ("server", "tiers"),
        ),
        ({"socket": "/run/kv.sock"}, ("server", "socket")),
        ({"lookup_wait_seconds": 1}, ("lookup_wait_seconds", "lookup_timeout_seconds")),
        ({"lookup_timeout_seconds": 1e-9}, ("lookup_wait_seconds", "lookup_timeout_seconds")),
    ],
)
def test_a_contradiction_names_both_settings(
    values: dict[str, object], keys: tuple[str, str]
) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(values)
    cause = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(cause, Contradictions)
    (found,) = cause.found
    assert found.keys == keys
    assert all(key in found.message for key in keys)


def test_settings_at_the_edge_of_a_contradiction_hold() -> None:
    Config.model_validate({"lookup_wait_seconds": 0.1})
    Config.model_validate({"server": "attached", "socket": "/run/kv.sock"})


@pytest.mark.parametrize(
    ("socket", "message"), [("kv.sock", "not absolute"), ("/" + "x" * 107, "108 bytes long")]
)
def test_a_socket_is_an_absolute_path_that_the_kernel_can_take(socket: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config.model_validate({"server": "attached", "socket": socket})
    longest = "/" + "x" * 106
    assert Config.model_validate({"server": "attached", "socket": longest}).socket == Path(longest)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"teirs": []}', '{"prefault": 7}', b"\xff"]
)
def test_text_that_is_no_configuration_is_a_configuration_error(text: str | bytes) -> None:
    with pytest.raises(ConfigError, match="not a configuration in JSON"):
        config_from_json(text)
