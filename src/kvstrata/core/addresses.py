"""Addresses in settings."""

import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from kvstrata.core.errors import ConfigError

_TCP: Final = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^:/\s\[\]]+)):(\d{1,5})")


class TcpAddress(NamedTuple):
    host: str
    port: int


def tcp_address(text: str) -> TcpAddress:
    """Return the parts of ``HOST:PORT`` or ``[IPV6]:PORT``; anything else is a ConfigError."""
    found = _TCP.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 65536:
        raise ConfigError(
            f"{text!r} is no address to listen at",
            hint="write it as 127.0.0.1:9464, or 0.0.0.0:9464 to be reached from other machines",
        )
    return TcpAddress(found[1] or found[2], int(found[3]))


def listening_address(text: str) -> str:
    """Return *text* if ``tcp_address`` understands it."""
    tcp_address(text)
    return text


def http_url(text: str) -> str:
    """Return *text* if it is a URL to send HTTP requests to; else a ConfigError."""
    parts = urlsplit(text)
    if parts.scheme in {"http", "https"} and parts.hostname and "@" not in parts.netloc:
        return text
    raise ConfigError(
        "this is no http:// or https:// URL without a user in it",
        hint="write it as http://127.0.0.1:4318/v1/traces; headers with secrets go into "
        "OTEL_EXPORTER_OTLP_HEADERS",
    )
