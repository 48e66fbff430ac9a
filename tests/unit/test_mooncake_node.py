"""The address and the settings of a Mooncake tier, and what the codes of the library mean."""

from pathlib import Path

import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.storage.remote.mooncake.codes import fault_of, has_failed
from kvstrata.storage.remote.mooncake.node import (
    MasterAddress,
    MooncakeNode,
    check_devices,
    orders_of,
)


@pytest.mark.parametrize(
    ("url", "host", "port", "as_the_library_takes_it"),
    [
        ("mooncake://master:51051", "master", 51051, "master:51051"),
        ("mooncake://10.0.0.7", "10.0.0.7", 50051, "10.0.0.7:50051"),
        ("mooncake://[fd00::1]:51051/", "fd00::1", 51051, "[fd00::1]:51051"),
    ],
)
def test_an_address(url: str, host: str, port: int, as_the_library_takes_it: str) -> None:
    address = MasterAddress.parse(url)
    assert address == (host, port)
    assert str(address) == as_the_library_takes_it


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://",
        "mooncake://:51051",
        "mooncake://master:0",
        "mooncake://master:many",
        "mooncake://[::1",
        "mooncake://master:70000",
        "mooncake://master/prefix",
        "mooncake://master?protocol=rdma",
        "valkey://master:51051",
        "mooncake://user:hush@master:51051",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="not an address") as raised:
        MasterAddress.parse(url)
    assert "hush" not in str(raised.value)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match=r"prefix 'a/b'[\s\S]*hint: use 1 to 64 letters"):
        MooncakeNode(prefix="a/b")
    with pytest.raises(ConfigError, match=r"protocol 'carrier pigeon'[\s\S]*hint: set tcp or rdma"):
        MooncakeNode(protocol="carrier pigeon")  # type: ignore[arg-type]  # as from a file
    with pytest.raises(ConfigError, match=r"segment_bytes -1[\s\S]*hint: give"):
        MooncakeNode(segment_bytes=-1)


def test_rdma_without_a_device_is_said_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    devices = tmp_path / "infiniband"
    monkeypatch.setattr("kvstrata.storage.remote.mooncake.node._RDMA_DEVICES", devices)
    rdma = MooncakeNode(protocol="rdma")
    check_devices(rdma, "mooncake://master:50051")
    devices.mkdir()
    check_devices(rdma, "mooncake://master:50051")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "mooncake://master:50051: protocol is rdma" in caplog.text
    assert "blocks go over TCP. Load the driver" in caplog.text
    caplog.clear()
    check_devices(MooncakeNode(protocol="rdma", devices="mlx5_0"), "mooncake://master:50051")
    assert "it cannot be used. Load the driver" in caplog.text
    caplog.clear()
    check_devices(MooncakeNode(), "mooncake://master:50051")
    (devices / "mlx5_0").mkdir()
    check_devices(rdma, "mooncake://master:50051")
    assert not caplog.records


@pytest.mark.parametrize(
    ("timeout_seconds", "rpc_ms", "connect_ms", "silence_seconds"),
    [(0.001, "1", "1", "1"), (2.0, "1500", "750", "1"), (10.0, "7500", "3750", "5")],
)
def test_the_library_waits_less_than_a_call(
    timeout_seconds: float, rpc_ms: str, connect_ms: str, silence_seconds: str
) -> None:
    """Of nodes it can only be told in whole seconds."""
    address = MasterAddress("master", 51051)
    environment = orders_of(address, MooncakeNode(), timeout_seconds).environment
    assert environment["MC_RPC_TIMEOUT_MS"] == rpc_ms
    assert environment["MC_RPC_CONNECT_TIMEOUT_MS"] == connect_ms
    assert environment["MC_TCP_PROGRESS_TIMEOUT_SEC"] == silence_seconds
    assert environment["MC_TCP_STATUS_TIMEOUT_SEC"] == silence_seconds


def test_what_says_nothing_of_a_block() -> None:
    assert [code for code in (1, 0, -704, -703, -200, -800, -900) if has_failed(code)] == [
        -800,
        -900,
    ]


@pytest.mark.parametrize(
    ("codes", "stalled", "cause"),
    [
        ([-900, -900], False, "unreachable"),
        ([-901], False, "timeout"),
        ([-800], False, "unreachable"),
        ([-800], True, "timeout"),
        ([-103, -103], True, "refused"),
    ],
)
def test_the_cause_of_a_fault(codes: list[int], stalled: bool, cause: str) -> None:
    assert fault_of(codes, stalled=stalled)[0] == cause
