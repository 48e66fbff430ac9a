"""Addresses and topics of KV events."""

import pytest

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.core.event_fields import topic, zmq_address
from kvstrata.core.load import load_config


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:5557", "tcp://*:1", "tcp://[::1]:65535", "tcp://node-7.lan:80", "ipc:///e"],
)
def test_an_address_that_others_can_reach(address: str) -> None:
    assert zmq_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:5557",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:http",
        "tcp://:5557",
        "tcp://a b:5557",
        "udp://127.0.0.1:5557",
        "inproc://events",
        "ipc://",
        "ipc:///",
        "ipc://relative",
    ],
)
def test_what_is_no_such_address(address: str) -> None:
    with pytest.raises(ConfigError, match="no address to publish at"):
        zmq_address(address)


@pytest.mark.parametrize("text", ["", "kv", "kv@{model}", "{namespace}{model}/x"])
def test_a_topic(text: str) -> None:
    assert topic(text) == text


@pytest.mark.parametrize("text", ["{", "}", "{}", "{node}", "{{model}}", "{model.real}"])
def test_what_is_no_topic(text: str) -> None:
    with pytest.raises(ConfigError, match="no topic"):
        topic(text)


def test_replays_are_for_those_who_publish_elsewhere() -> None:
    for others, remedy in (({}, "set kv_events, to"), ({"kv_events": "ipc:///e"}, "give each its")):
        with pytest.raises(ConfigError, match=f"kv_events_replay(.|\n)*{remedy}"):
            load_config({"kv_events_replay": "ipc:///e"} | others, environ={})
    Config.model_validate({"kv_events_replay": "ipc:///r", "kv_events": "ipc:///e"})
