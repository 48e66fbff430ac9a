"""Settings in force, as `kvstrata doctor` shows them: without secrets."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from kvstrata.core.config import pipeline_string
from kvstrata.core.errors import ConfigError
from kvstrata.core.load import Setting
from kvstrata.core.pipeline import redact
from kvstrata.core.tiers import Tier

__all__ = ["plain_settings", "settings_in_words"]


def plain_settings(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the value of each as one that JSON has."""
    values = {name: setting.value for name, setting in settings.items()}
    plain = TypeAdapter(dict[str, Any]).dump_python(values, mode="json")
    return {name: _without_secrets(value) for name, value in plain.items()}


def settings_in_words(settings: Mapping[str, Setting]) -> str:
    """Return those that somebody has set, one a line with its source."""
    given = {name: each for name, each in settings.items() if each.source != "default"}
    shown = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in plain_settings(given).items()
    }
    if "tiers" in given:
        shown["tiers"] = _tiers_in_words(given["tiers"].value)
    lines = [f"{name}: {shown[name]} (from {each.source})" for name, each in given.items()]
    return "\n".join(lines) or "all settings at their defaults"


def _tiers_in_words(tiers: tuple[Tier, ...]) -> str:
    """A pipeline string, where it says all and no part of it is to be hidden."""
    try:
        text = pipeline_string(tiers)
    except ConfigError:
        text = ""
    if text and redact(text) == text:
        return text
    listed = [
        {"kind": tier.kind, **tier.model_dump(mode="json", exclude_defaults=True)} for tier in tiers
    ]
    return json.dumps(_without_secrets(listed))


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_secrets(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    return redact(value) if isinstance(value, str) else value
