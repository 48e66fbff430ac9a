"""Sizes that options say."""

from kvstrata.core.errors import ConfigError

__all__ = ["size_of"]


def size_of(option: str, text: str) -> int:
    """The bytes that *text* says; a ``ConfigError`` names the option."""
    from kvstrata.core.units import parse_bytes

    try:
        return parse_bytes(text)
    except ConfigError as e:
        raise ConfigError(f"{option}: {e.args[0]}", hint=e.hint) from None
