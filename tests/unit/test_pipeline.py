from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.config import Config, pipeline_string
from kvstrata.core.errors import ConfigError
from kvstrata.core.load import load_config
from kvstrata.core.pipeline import order_fault, parse_pipeline, redact, tier_kind
from kvstrata.core.remote_tiers import ObjectTier
from kvstrata.core.tiers import DiskTier, HostTier, SharedTier, Tier

GIB = 2**30

capacities = st.integers(1, 2**63 - 1)
host_tiers = st.builds(HostTier, capacity=capacities | st.just("auto"))
words = st.text(
    st.characters(codec="utf-8", exclude_characters="|/,\0"), min_size=1, max_size=20
).filter(lambda word: word == word.strip())
paths = st.lists(words, min_size=1, max_size=4).map(lambda parts: Path("/", *parts))
disk_tiers = st.builds(
    DiskTier, paths=st.lists(paths, min_size=1, max_size=3).map(tuple), capacity=capacities
)
shared_tiers = st.builds(SharedTier, path=paths, capacity=capacities)
urls = st.builds(
    "{}://{}".format, st.just("s3"), st.from_regex(r"[a-z0-9][a-z0-9/@:_-]*", fullmatch=True)
)
object_tiers = st.builds(
    ObjectTier,
    url=urls,
    endpoint=st.none() | st.from_regex(r"https?://[a-z0-9&=%?#+/:.-]+", fullmatch=True),
    region=st.none() | st.text(st.characters(codec="utf-8", exclude_characters="|\0"), min_size=1),
    anonymous=st.booleans(),
    parallel=st.integers(1, 1024),
    timeout_seconds=st.floats(0.001, 3600),
    ttl_seconds=st.none() | st.floats(1, 1e6),
    write=st.sampled_from(["saved", "reused:2"]),
)
tiers = (
    st.tuples(host_tiers)
    | st.tuples(host_tiers, object_tiers)
    | st.tuples(host_tiers, disk_tiers)
    | st.tuples(host_tiers, shared_tiers)
    | st.tuples(host_tiers, disk_tiers, shared_tiers)
)


@given(tiers)
def test_a_pipeline_string_reads_back_as_the_tiers_it_was_made_from(
    given_tiers: tuple[Tier, ...],
) -> None:
    assert Config.model_validate({"tiers": pipeline_string(given_tiers)}).tiers == given_tiers


@given(
    st.text(st.characters(codec="utf-8"), max_size=60) | st.text("host:disk/|1GiB ", max_size=40)
)
def test_any_text_is_either_a_pipeline_or_a_configuration_error(text: str) -> None:
    try:
        kinds = [tier["kind"] for tier in parse_pipeline(text)]
    except ConfigError as e:
        kinds = []
        caret_line = str(e.args[0]).splitlines()[-1]
    assert kinds[:1] == ["host"] or caret_line.strip() == "^"


@pytest.mark.parametrize(
    "text", ["host", "host:auto", " Host : AUTO ", "Cache", "cache:auto", "host:"]
)
def test_a_host_tier_without_a_capacity_is_auto(text: str) -> None:
    assert parse_pipeline(text) == [{"kind": "host", "capacity": "auto"}]


@pytest.mark.parametrize(
    "text",
    [
        "host:8GiB | disk:/var/cache/kv:200GiB",
        "Cache:8GiB|Posix:/var/cache/kv:200GiB",
        "  host : 8 GiB  |  disk : /var/cache/kv : 200GiB  ",
        "host:8GiB\n| disk:/var/cache/kv:200GiB\n",
    ],
)
def test_both_vocabularies_and_any_blanks_say_the_same(text: str) -> None:
    assert parse_pipeline(text) == [
        {"kind": "host", "capacity": 8 * GIB},
        {"kind": "disk", "paths": ["/var/cache/kv"], "capacity": 200 * GIB},
    ]


def test_a_path_may_hold_colons() -> None:
    assert parse_pipeline("host|disk:/a:b:c:1GiB")[1]["paths"] == ["/a:b:c"]


def test_a_disk_tier_may_have_several_directories_and_a_shared_one_below_it() -> None:
    assert parse_pipeline("host | disk:/nvme0/kv, /nvme1/kv:2GiB | shared:/mnt/kv:9GiB")[1:] == [
        {"kind": "disk", "paths": ["/nvme0/kv", "/nvme1/kv"], "capacity": 2 * GIB},
        {"kind": "shared", "path": "/mnt/kv", "capacity": 9 * GIB},
    ]


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("", 0, "a tier is missing"),
        ("host |", 6, "a tier is missing"),
        ("| host", 0, "a tier is missing"),
        ("host || disk:/x:1GiB", 6, "a tier is missing"),
        ("host | ???", 7, "a tier starts with"),
        ("hots:8GiB", 0, "unknown tier 'hots'"),
        ("host8:8GiB", 0, "unknown tier 'host8'"),
        ("host 8GiB", 4, "expected ':'"),
        ("host:8G", 5, "unknown unit 'G'"),
        ("host:  8GiB:1", 7, "not a number of bytes"),
        ("host | disk", 11, "absolute path"),
        ("host | disk:cache:1GiB", 12, "absolute path"),
        ("host | disk:/x", 14, "a capacity after its path"),
        ("host | disk:/x:", 15, "a capacity after its path"),
        ("host | disk:/x: 1XB", 16, "unknown unit 'XB'"),
        ("disk:/x:1GiB", 0, "needs a host tier before it"),
        ("disk:/x:1GiB | host", 0, "comes before the disk tier"),
        ("shared:/x:1GiB", 0, "a shared tier needs a host tier before it"),
        ("host | shared:/x:1GiB | disk:/y:1GiB", 7, "the disk tier comes before the shared tier"),
        ("host | disk:/x, y:1GiB", 16, "absolute path"),
        ("host | disk:/x,,/y:1GiB", 15, "absolute path"),
        ("host | shared:/x,/y:1GiB", 16, "a shared tier has one directory"),
        ("host | host:1GiB", 7, "a second host tier"),
        ("host | disk:/x:1GiB | disk:/y:1GiB", 22, "a second disk tier"),
        ("host | s3:bucket", 7, "an objects tier needs an address"),
        ("host | valkey", 7, "a valkey tier needs an address"),
        ("host | mooncake://", 7, "a mooncake tier needs an address"),
        ("s3://bucket", 0, "an objects tier needs a host tier before it"),
        ("host | s3://a | disk:/y:1GiB", 7, "the disk tier comes before the objects tier"),
        ("host | s3://a | gs://b", 16, "a second objects tier"),
        ("host | shared:/x:1GiB | s3://a", 24, "an objects tier besides the shared tier"),
    ],
)
def test_a_fault_is_shown_with_a_caret_under_the_character(
    text: str, at: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_pipeline(text)
    assert str(caught.value.args[0]).splitlines()[1:] == [f"  {text}", "  " + " " * at + "^"]


def test_a_fault_in_several_lines_is_shown_in_one_so_that_the_caret_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pipeline("host:1GiB\n| dsk:/x:1GiB")
    assert str(caught.value.args[0]).splitlines()[1:] == [
        "  host:1GiB | dsk:/x:1GiB",
        " " * 14 + "^",
    ]


def test_the_nearest_tier_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean 'disk'"):
        tier_kind("dsk")


def test_secrets_in_an_address_are_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pipeline("host | valkey://me:pass/w@rd@cache:6379?token=secret | host")
    assert "pass" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "  host | valkey://***@cache:6379?*** | host" in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "valkey://u:SECRET x@h:1",
        "valkey://u:SECRET|x@h:1",
        "valkey://u:SECRET?x@h:1",
        "valkey:u:SECRET@h:1",
        "valkey:/u:SECRET@h:1",
        "valky://u:SECRET@h:1",
    ],
)
def test_an_address_that_cannot_be_read_shows_no_secret(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"tiers": f"host | {address}"}, environ={})
    assert "SECRET" not in str(caught.value)
    with pytest.raises(ValueError, match="tiers") as raw:
        Config.model_validate({"tiers": f"host | {address}"})
    assert "SECRET" not in str(raw.value)


def test_the_query_of_an_address_is_the_settings_of_its_tier() -> None:
    text = "host | s3://bucket/a/b?endpoint=http://minio:9000&ttl_seconds=60&region=a%26b"
    assert parse_pipeline(text)[1] == {
        "kind": "objects",
        "url": "s3://bucket/a/b",
        "endpoint": "http://minio:9000",
        "ttl_seconds": "60",
        "region": "a&b",
    }


@pytest.mark.parametrize("query", ["?", "?a", "?a=1&a=2", "?a=1&&b=2", "?=1"])
def test_a_query_that_is_no_list_of_settings_is_refused(query: str) -> None:
    text = f"host | s3://bucket{query}"
    if query == "?":
        assert parse_pipeline(text)[1] == {"kind": "objects", "url": "s3://bucket"}
        return
    with pytest.raises(ConfigError, match="expected NAME=VALUE"):
        parse_pipeline(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("valkey://me:pw@cache | host", "valkey://***@cache | host"),
        ("s3://bucket/a?key=1 | s3://b?key=2", "s3://bucket/a?*** | s3://b?***"),
        ("host:8GiB | disk:/a@b?c:1GiB", "host:8GiB | disk:/a@b?c:1GiB"),
    ],
)
def test_only_secrets_are_taken_out_of_a_pipeline(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize("path", ["/a|b", "/a ", "/a\u3000"])
def test_a_path_that_the_string_cannot_hold_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="list of mappings"):
        pipeline_string((HostTier(), DiskTier(paths=(Path(path),), capacity=1)))


@pytest.mark.parametrize(
    ("kinds", "position"),
    [
        ([], 0),
        (["disk"], 0),
        (["disk", "host"], 0),
        (["host", "host"], 1),
        (["host", "disk", "disk"], 2),
        (["host"], None),
        (["host", "disk"], None),
    ],
)
def test_there_is_one_host_tier_first_and_at_most_one_disk_tier(
    kinds: list[str], position: int | None
) -> None:
    fault = order_fault(kinds)
    assert (fault.position if fault else None) == position
