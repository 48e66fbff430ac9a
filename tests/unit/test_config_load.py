import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.core.load import _TIER_MODELS, Setting, explain, load_config, python_hash_seed
from kvstrata.core.tiers import DiskTier, HostTier

GIB = 2**30


def fault_of(
    overrides: dict[str, object] | None = None, environ: dict[str, str] | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, environ=environ or {})
    return str(caught.value)


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "kvstrata.yaml"
    path.write_text("tokens_per_block: 16\nprefault: false\nreconnect_seconds: 3\n")
    return path


def test_with_no_source_everything_is_the_default() -> None:
    assert load_config(environ={}) == Config()
    assert load_config({}, environ={"PATH": "/bin", "KVSTRATA": "x"}) == Config()


def test_overrides_win_over_the_environment_and_that_over_the_file(yaml_file: Path) -> None:
    environ = {
        "KVSTRATA_CONFIG": str(yaml_file),
        "KVSTRATA_TOKENS_PER_BLOCK": "32",
        "KVSTRATA_PREFAULT": "yes",
    }
    settings = explain({"tokens_per_block": 64}, environ=environ)
    assert settings["tokens_per_block"] == Setting(64, "kv_connector_extra_config")
    assert settings["prefault"] == Setting(value=True, source="environment KVSTRATA_PREFAULT")
    assert settings["reconnect_seconds"] == Setting(3.0, f"file {yaml_file}")
    assert settings["server"] == Setting("embedded", "default")
    assert list(settings) == list(Config.model_fields)


SOURCES = st.fixed_dictionaries(
    {}, optional={k: st.integers(1, 9) for k in ("over", "env", "file")}
)


@given(SOURCES)
def test_the_strongest_source_that_has_a_setting_gives_it(
    tmp_path_factory: pytest.TempPathFactory, given_by: dict[str, int]
) -> None:
    overrides: dict[str, object] = {}
    environ: dict[str, str] = {}
    if "file" in given_by:
        path = tmp_path_factory.getbasetemp() / f"{given_by['file']}.json"
        path.write_text(json.dumps({"max_saving_blocks": given_by["file"]}))
        overrides["config_file"] = str(path)
    if "env" in given_by:
        environ["KVSTRATA_MAX_SAVING_BLOCKS"] = str(given_by["env"])
    if "over" in given_by:
        overrides["max_saving_blocks"] = given_by["over"]
    expected = given_by.get("over", given_by.get("env", given_by.get("file", 4096)))
    assert load_config(overrides, environ=environ).max_saving_blocks == expected


def test_config_file_in_overrides_wins_over_the_variable(yaml_file: Path) -> None:
    environ = {"KVSTRATA_CONFIG": "/not/there.yaml"}
    assert load_config({"config_file": yaml_file}, environ=environ).tokens_per_block == 16


def test_the_process_environment_is_read_when_none_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSTRATA_TIERS", "Cache:8GiB|Posix:/x:1GiB")
    assert load_config().tiers == (
        HostTier(capacity=8 * GIB),
        DiskTier(paths=(Path("/x"),), capacity=GIB),
    )
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert python_hash_seed() == "7"
    assert python_hash_seed({}) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"tiers": [{"kind": "host", "capacity": "1GiB"}]}'),
        ("a.yaml", "tiers:\n  - {kind: host, capacity: 1GiB}\n"),
        ("a.yml", '{"tiers": "host:1GiB"}'),
        ("a.conf", '\n {"tiers": "host:1GiB"}'),
        ("a", "# ours\ntiers: host:1GiB\n"),
    ],
)
def test_a_file_is_yaml_or_json(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert load_config(environ={"KVSTRATA_CONFIG": str(path)}).tiers == (HostTier(capacity=GIB),)


@pytest.mark.parametrize("text", ["", "# nothing set\n", "{}"])
def test_a_file_may_set_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(text)
    assert load_config({"config_file": str(path)}, environ={}) == Config()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", b"- host\n", "holds a list, not a mapping"),
        ("a.yaml", b"host", "holds a str, not a mapping"),
        ("a.json", b"null", "holds a NoneType, not a mapping"),
        ("a.json", b"{", "is not JSON"),
        ("a", b"{tiers: host:1GiB}", "is not JSON"),
        ("a.yaml", b"a: b: c", "is not YAML: mapping values are not allowed here, line 1"),
        ("a.yaml", b"a: \x01", "is not YAML"),
        ("a.yaml", b"tiers: \xff", "cannot read the file"),
    ],
)
def test_a_file_that_is_no_mapping_is_an_error_that_names_it(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    fault = fault_of(environ={"KVSTRATA_CONFIG": str(path)})
    assert message in fault
    assert str(path) in fault
    assert "hint:" in fault


@pytest.mark.parametrize("named", ["", 7, None, "/not/there.yaml", "/", "/\0"])
def test_a_file_that_cannot_be_read_is_an_error_that_says_who_named_it(named: object) -> None:
    if named is None:
        assert load_config({"config_file": None}, environ={}) == Config()
    else:
        assert "config_file in kv_connector_extra_config" in fault_of({"config_file": named})


def test_an_unknown_key_names_its_source_and_the_nearest_known_name(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("token_per_block: 16\n")
    assert fault_of(environ={"KVSTRATA_CONFIG": str(path)}) == (
        f"unknown setting 'token_per_block' (from file {path})\n  hint: did you mean tokens_per_block?"
    )
    assert fault_of(environ={"KVSTRATA_TEIRS": "host"}) == (
        "unknown setting 'KVSTRATA_TEIRS' (from environment KVSTRATA_TEIRS)\n"
        "  hint: did you mean KVSTRATA_TIERS?"
    )
    assert fault_of({"prefualt": False}) == (
        "unknown setting 'prefualt' (from kv_connector_extra_config)\n"
        "  hint: did you mean prefault?"
    )


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("KVSTRATA_CONFIG_FILE", "KVSTRATA_CONFIG"),
        ("KVSTRATA_tiers", "KVSTRATA_TIERS"),
        ("KVSTRATA_Prefault", "KVSTRATA_PREFAULT"),
    ],
)
def test_only_the_exact_names_of_variables_are_known(variable: str, meant: str) -> None:
    assert f"did you mean {meant}?" in fault_of(environ={variable: "x"})


def test_config_file_is_not_a_setting_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"config_file": "y.json"}')
    assert "unknown setting 'config_file'" in fault_of({"config_file": str(path)})


def test_a_name_like_no_other_gets_the_list_of_all() -> None:
    fault = fault_of({"zzzz": 1})
    assert all(name in fault for name in Config.model_fields)


def test_an_unknown_key_of_a_tier_is_named_with_its_place() -> None:
    tiers = [{"kind": "host"}, {"kind": "disk", "paths": "/x", "capacity": 1, "kapacity": 2}]
    assert fault_of({"tiers": tiers}) == (
        "unknown setting 'tiers.1.kapacity' (from kv_connector_extra_config)\n"
        "  hint: did you mean capacity?"
    )


def test_a_setting_of_a_tier_without_its_unit_is_named_with_it_and_its_value() -> None:
    fault = fault_of({"tiers": "host | s3://bucket?ttl=7"})
    assert "unknown setting 'tiers.1.ttl' (got '7', from kv_connector_extra_config)" in fault
    assert "did you mean ttl_seconds? Seconds after which" in fault
    assert "For example 604800" in fault
    fault = fault_of({"tiers": "host | valkey://cache?password=secret"})
    assert "secret" not in fault


def test_a_wrong_value_is_named_with_its_source_and_a_remedy() -> None:
    fault = fault_of(environ={"KVSTRATA_LOAD_TIMEOUT_SECONDS": "soon"})
    assert "load_timeout_seconds: " in fault
    assert "(got 'soon', from environment KVSTRATA_LOAD_TIMEOUT_SECONDS)" in fault
    assert "hint: Longest time in seconds" in fault
    assert "For example 2." in fault


def test_of_a_wrong_word_the_remedy_is_the_default_and_not_an_example() -> None:
    assert fault_of({"block_format": "int4"}) == (
        "block_format: Input should be 'exact' or 'int8' (got 'int4', from kv_connector_extra_config)\n"
        "  hint: set one of these, or leave block_format out: it is 'exact' then"
    )
    fault = fault_of({"tiers": [{"kind": "host", "eviction": "mru"}]})
    assert fault.endswith("hint: set one of these, or leave eviction out: it is 'lru' then")


def test_a_wrong_value_inside_a_tier_is_named_with_its_place() -> None:
    tiers = [{"kind": "host"}, {"kind": "disk", "capacity": "8G"}]
    fault = fault_of({"tiers": tiers})
    assert "tiers.1.paths is missing (from kv_connector_extra_config)" in fault
    assert "tiers.1.capacity: '8G' has an unknown unit 'G' (got '8G', from" in fault


@pytest.mark.parametrize(
    "said", [{"llama": 0.5, "tiny": 1.5}, "llama=0.5, tiny=1.5", "{llama: 0.5, tiny: 1.5}"]
)
def test_a_wrong_quota_is_named_with_its_model(said: object) -> None:
    fault = fault_of({"quotas": said})
    assert fault.startswith("quotas.tiny: Input should be less than or equal to 1 (got ")
    assert "from kv_connector_extra_config" in fault


@pytest.mark.parametrize("said", [[[1, 0.5]], [[]], [3], ["m"], {1: 0.5}])
def test_a_quota_without_a_name_is_named_by_its_number(said: object) -> None:
    assert "quotas.0" in fault_of({"quotas": said})


def test_quotas_in_the_environment_may_be_a_mapping_of_yaml() -> None:
    environ = {"KVSTRATA_QUOTAS": "{tiny: 0.5, /models/llama: 0.25}"}
    expected = (("tiny", 0.5), ("/models/llama", 0.25))
    assert load_config(environ=environ).quotas == expected
    fault = fault_of(environ={"KVSTRATA_QUOTAS": "{tiny: 0.5"})
    assert fault.startswith("quotas: what begins with '{' is read as a mapping in YAML")
    assert "with a blank after the colon" in fault


def test_a_setting_of_a_tier_that_stands_alone_gets_the_list_to_write_it_in() -> None:
    assert fault_of({"eviction": "s3fifo"}) == (
        "unknown setting 'eviction' (from kv_connector_extra_config)\n"
        "  hint: eviction is a setting of a tier (host, disk): give `tiers` as a list, in a file "
        "or in kv_connector_extra_config, for example tiers: [{kind: host, eviction: s3fifo}]"
    )
    assert fault_of(environ={"KVSTRATA_WRITE": "reused"}) == (
        "unknown setting 'KVSTRATA_WRITE' (from environment KVSTRATA_WRITE)\n"
        "  hint: write is a setting of a tier (disk, shared, objects, valkey, "
        "mooncake): give `tiers` as a list, in a file "
        "or in kv_connector_extra_config, for example tiers: [{kind: host}, {kind: disk, "
        "paths: /var/cache/kv, capacity: 200GiB, write: reused:2}]"
    )


@pytest.mark.parametrize(
    "name", sorted({name for model in _TIER_MODELS.values() for name in model.model_fields})
)
def test_the_list_that_such_a_hint_shows_is_right(tmp_path: Path, name: str) -> None:
    example = fault_of({name: 1}).partition("for example ")[2]
    path = tmp_path / "a.yaml"
    path.write_text(example)
    tiers = load_config({"config_file": path}, environ={}).tiers
    assert any(name in tier.model_fields_set for tier in tiers)


def test_a_wrong_pipeline_is_shown_with_its_source_and_a_caret() -> None:
    assert fault_of(environ={"KVSTRATA_TIERS": "host | dsk:/x:1GiB"}) == (
        "tiers (from environment KVSTRATA_TIERS): unknown tier 'dsk'\n"
        "  host | dsk:/x:1GiB\n"
        "         ^\n"
        "  hint: did you mean 'disk'?"
    )


def test_all_that_is_wrong_is_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("prefalt: true\nlookup_wait_seconds: 1\ntokens_per_block: 0\n")
    fault = fault_of(
        {"socket": "/run/kv.sock", "tiers": "host:8G"},
        {"KVSTRATA_CONFIG": str(path), "KVSTRATA_TEIRS": "host"},
    )
    assert fault.startswith("6 settings are wrong\n")
    for part in (
        "did you mean prefault?",
        "did you mean KVSTRATA_TIERS?",
        f"tokens_per_block: Input should be greater than or equal to 1 (got 0, from file {path})",
        "write 8GiB (powers of 1024) or 8GB (powers of 1000)",
        (
            "server is 'embedded' and socket is '/run/kv.sock' "
            "(server from default, socket from kv_connector_extra_config)"
        ),
        f"(lookup_wait_seconds from file {path}, lookup_timeout_seconds from default)",
    ):
        assert part in fault


def test_an_unreadable_file_does_not_hide_other_faults() -> None:
    fault = fault_of({"config_file": "/not/there"}, {"KVSTRATA_PREFAULT": "maybe"})
    assert fault.startswith("2 settings are wrong\n")
    assert "cannot read the file /not/there" in fault
    assert "prefault: " in fault


def test_a_wrong_value_is_not_blamed_for_a_contradiction_as_well() -> None:
    fault = fault_of({"server": "remote", "socket": "/run/kv.sock"})
    assert "'embedded' or 'attached'" in fault
    assert "settings are wrong" not in fault


def test_errors_call_the_overrides_what_they_are() -> None:
    with pytest.raises(ConfigError, match="from command line"):
        load_config({"prefualt": 1}, environ={}, overrides_name="command line")


def test_the_address_of_a_tier_is_shown_without_its_secrets() -> None:
    found = explain({"tiers": "host | valkey://me:hunter2@cache:6379"}, environ={})["tiers"].value
    assert "hunter2" not in repr(found)
    assert "hunter2" not in str(found)
    assert "valkey://***@cache:6379" in repr(found)
    assert found[1].url == "valkey://me:hunter2@cache:6379"


def test_secrets_and_long_values_are_kept_out_of_errors() -> None:
    secret = {"kind": "valkey", "url": "valkey://:hunter2@cache", "password": "hunter2"}
    assert "hunter2" not in fault_of({"tiers": [{"kind": "host"}, secret]})
    assert "hunter2" not in fault_of({"tiers": "host | valkey://:hunter2@cache | host"})
    assert "hunter2" not in fault_of({"tiers": "host | valkey://:hunter2@cache?parallel=3"})
    assert "hunter2" not in fault_of({"tiers": [{"kind": "s3", "url": "valkey://:hunter2@cache"}]})
    assert "hunter2" not in fault_of({"password": "hunter2"})
    assert "hunter2" not in fault_of({"server": "redis://:hunter2@cache"})
    assert len(fault_of({"server": "x" * 100_000})) < 1000


@given(
    st.dictionaries(
        st.sampled_from([*Config.model_fields, "x"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=20)
        | st.lists(
            st.dictionaries(st.sampled_from(["kind", "path", "capacity"]), st.text("hostdik/1"))
        ),
        max_size=4,
    )
)
def test_any_overrides_give_a_configuration_or_a_configuration_error(
    overrides: dict[str, object],
) -> None:
    try:
        assert isinstance(load_config(overrides, environ={}), Config)
    except ConfigError as e:
        error = e
        assert "from kv_connector_extra_config" in str(error)
