"""Where settings come from, and which source wins. The only reader of the environment.

``overrides`` (``kv_connector_extra_config`` or the command line) > ``KVSTRATA_*`` > the file >
defaults. What is said in the words of UCM or FlexKV has no place in this order: it must not be said
in ours as well. All faults of one load are reported together.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Final, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from kvstrata.core import spellings_of_flexkv, spellings_of_ucm
from kvstrata.core.config import Config, Contradictions, quota_pairs
from kvstrata.core.errors import ConfigError
from kvstrata.core.remote_tiers import MooncakeTier, ObjectTier, ValkeyTier
from kvstrata.core.settings_file import read_settings, show
from kvstrata.core.spellings import Fault, Translation, lines_of
from kvstrata.core.tiers import DiskTier, HostTier, SharedTier, Tier

__all__ = ["ENVIRONMENT_PREFIX", "Setting", "explain", "load_config", "python_hash_seed"]

_log = logging.getLogger(__name__)

ENVIRONMENT_PREFIX: Final = "KVSTRATA_"
FILE_VARIABLE: Final = "KVSTRATA_CONFIG"
FILE_KEY: Final = "config_file"

_UNITS: Final = ("_seconds", "_bytes")
_FIELDS: Final = Config.model_fields
_TIER_MODELS: Final[dict[str, type[Tier]]] = {
    "host": HostTier,
    "disk": DiskTier,
    "shared": SharedTier,
    "objects": ObjectTier,
    "valkey": ValkeyTier,
    "mooncake": MooncakeTier,
}


class Setting(NamedTuple):
    """One setting in force, and who said so."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class _Source:
    """One place that settings come from."""

    name: str
    values: Mapping[str, object]
    extra_known: tuple[str, ...] = ()  # names it takes that are not settings
    prefix: str = ""  # what this source writes before a setting's name, in capitals

    def label(self, key: str) -> str:
        """Name the source of *key* as an error should."""
        return f"{self.name} {self.spell(key)}" if self.prefix else self.name

    def spell(self, key: str) -> str:
        return f"{self.prefix}{key.upper()}" if self.prefix else key


def load_config(
    overrides: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides_name: str = "kv_connector_extra_config",
) -> Config:
    """Return the configuration that all sources together say.

    Args:
        overrides: Settings that win over all others; its key ``config_file`` names the file.
        environ: The environment; this process's if None.
        overrides_name: What errors call *overrides*.

    Raises:
        ConfigError: naming every unknown key and every wrong value, with their sources.
    """
    config, _, theirs = _load(overrides, environ, overrides_name)
    for each in theirs:
        for is_warning, line in lines_of(each):
            _log.log(logging.WARNING if is_warning else logging.INFO, "%s", line)
    return config


def explain(
    overrides: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides_name: str = "kv_connector_extra_config",
) -> dict[str, Setting]:
    """Return every setting in force with its source, in the model's order.

    Takes and raises what ``load_config`` does.
    """
    config, origins, _ = _load(overrides, environ, overrides_name)
    return {
        key: Setting(getattr(config, key), origins[key].label(key) if key in origins else "default")
        for key in _FIELDS
    }


def python_hash_seed(environ: Mapping[str, str] | None = None) -> str | None:
    """Return PYTHONHASHSEED, on which vLLM's block hashes depend, or None if it is not set."""
    return (os.environ if environ is None else environ).get("PYTHONHASHSEED")


def _load(
    overrides: Mapping[str, object] | None,
    environ: Mapping[str, str] | None,
    overrides_name: str,
) -> tuple[Config, dict[str, _Source], list[Translation]]:
    faults: list[Fault] = []
    overrides, environ = overrides or {}, os.environ if environ is None else environ
    sources = _sources(overrides, environ, overrides_name)
    values: dict[str, object] = {}
    origins: dict[str, _Source] = {}
    for source in _with_file(sources, faults):
        faults += _unknown_keys(source)
        for key in _FIELDS.keys() & source.values.keys():
            values[key] = source.values[key]
            origins[key] = source
    theirs = _in_other_words(overrides, environ, faults)
    for each in theirs:
        faults += each.faults
        faults += _said_twice(each, origins)
        if not each.faults:
            values |= each.settings
            origins |= {key: _Source(name, each.settings) for key, name in each.origins.items()}
    config, wrong = _validate(values, origins)
    faults += wrong
    if config is None or faults:
        raise _as_error(faults)
    return config, origins, theirs


# --- sources ---------------------------------------------------------------------------------


def _sources(
    overrides: Mapping[str, object], environ: Mapping[str, str], overrides_name: str
) -> tuple[_Source, _Source]:
    """Return environment and overrides, the weaker first."""
    variables = {
        _setting_name(name): value
        for name, value in environ.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    environment = _Source("environment", variables, (FILE_VARIABLE,), ENVIRONMENT_PREFIX)
    settings = {str(k): v for k, v in overrides.items() if k not in spellings_of_ucm.NAMES}
    given = _Source(overrides_name, settings, (FILE_KEY,))
    return environment, given


def _setting_name(variable: str) -> str:
    """Return the setting that *variable* names, or the variable itself if it names none."""
    rest = variable.removeprefix(ENVIRONMENT_PREFIX)
    return rest.lower() if rest == rest.upper() and rest.lower() in _FIELDS else variable


def _with_file(sources: tuple[_Source, _Source], faults: list[Fault]) -> Iterator[_Source]:
    environment, given = sources
    if FILE_KEY in given.values:
        named, said_by = given.values[FILE_KEY], f"{FILE_KEY} in {given.name}"
    else:
        named, said_by = environment.values.get(FILE_VARIABLE), f"environment {FILE_VARIABLE}"
    if named is not None:
        try:
            yield _Source(f"file {named}", read_settings(named, said_by))
        except ConfigError as e:
            faults.append(Fault(str(e.args[0]), e.hint or ""))
    yield environment
    yield given


def _in_other_words(
    overrides: Mapping[str, object], environ: Mapping[str, str], faults: list[Fault]
) -> list[Translation]:
    """What the settings of other projects come to, where there are any."""
    found: list[Translation] = []
    for translate in (
        partial(spellings_of_ucm.translate, overrides, environ),
        partial(spellings_of_flexkv.translate, environ),
    ):
        try:
            translation = translate()
        except ConfigError as e:
            faults.append(Fault(str(e.args[0]), e.hint or ""))
        else:
            found += [] if translation is None else [translation]
    return found


# --- faults ----------------------------------------------------------------------------------


def _unknown_keys(source: _Source) -> Iterator[Fault]:
    for key in source.values:
        if key in _FIELDS or key in source.extra_known:
            continue
        known = [*(source.spell(name) for name in _FIELDS), *source.extra_known]
        where = f"{source.name} {key}" if source.prefix else source.name
        remedy = _as_tier_setting(key.removeprefix(source.prefix).lower()) or _suggest(key, known)
        yield Fault(f"unknown setting {key!r} (from {where})", remedy)


def _said_twice(theirs: Translation, origins: Mapping[str, _Source]) -> Iterator[Fault]:
    """There is no order between their words and ours."""
    for key in theirs.settings.keys() & origins.keys():
        yield Fault(
            f"{key} is set in words of {theirs.project} (from {theirs.origins[key]}) and once more "
            f"(from {origins[key].label(key)})",
            "take one of them away",
        )


def _as_tier_setting(name: str) -> str | None:
    """Return how to set *name* if it is a setting of a tier, else None."""
    kinds = [kind for kind, model in _TIER_MODELS.items() if name in model.model_fields]
    if not kinds:
        return None
    fields = _TIER_MODELS[kinds[0]].model_fields
    shown = [f"kind: {kinds[0]}"] + [
        f"{each}: {(field.examples or [''])[0]}"
        for each, field in fields.items()
        if each != "kind" and (field.is_required() or each == name)
    ]
    before = "" if kinds[0] == "host" else "{kind: host}, "
    return (
        f"{name} is a setting of a tier ({', '.join(kinds)}): give `tiers` as a list, in a file or "
        f"in kv_connector_extra_config, for example tiers: [{before}{{{', '.join(shown)}}}]"
    )


def _suggest(key: str, known: Iterable[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(key.lower(), by_lower, n=1, cutoff=0.6)
    if close:
        return f"did you mean {by_lower[close[0]]}?"
    return f"known are {', '.join(by_lower.values())}"


def _validate(
    values: Mapping[str, object], origins: Mapping[str, _Source]
) -> tuple[Config | None, list[Fault]]:
    """Return the model, or None and what is wrong with *values*.

    The model reports contradictions only where each value is valid alone, so after a wrong value
    the others are looked at again without it.
    """
    try:
        return Config.model_validate(values), []
    except ValidationError as e:
        errors = e.errors(include_url=False)
    faults = [fault for error in errors for fault in _value_faults(error, origins)]
    wrong = {str(error["loc"][0]) for error in errors if error["loc"]}
    if wrong:
        faults += _contradictions_without(values, origins, wrong)
    return None, faults


def _contradictions_without(
    values: Mapping[str, object], origins: Mapping[str, _Source], wrong: set[str]
) -> Iterator[Fault]:
    try:
        Config.model_validate({k: v for k, v in values.items() if k not in wrong})
    except ValidationError as e:
        for error in e.errors(include_url=False):
            yield from _contradiction_faults(error, origins, wrong)


def _value_faults(error: Any, origins: Mapping[str, _Source]) -> Iterator[Fault]:
    if not error["loc"]:
        yield from _contradiction_faults(error, origins, set())
        return
    key = str(error["loc"][0])
    source = origins[key].label(key)
    cause = error.get("ctx", {}).get("error")
    field, siblings = _innermost(error["loc"])
    where = _where(error["loc"], origins[key].values[key])
    if error["type"] == "extra_forbidden":
        yield _unknown_key_of_a_tier(error, where, source, siblings)
        return
    message = cause.args[0] if isinstance(cause, ConfigError) else error["msg"]
    hint = cause.hint if isinstance(cause, ConfigError) else None
    if "\n" in message:  # it shows the value itself
        text = f"{where} (from {source}): {message}"
    elif error["type"] == "missing":
        text = f"{where} is missing (from {source})"
    else:
        text = f"{where}: {message} (got {show(error['input'])}, from {source})"
    if error["type"] == "literal_error" and isinstance(field.default, str):
        name = error["loc"][-1]
        hint = f"set one of these, or leave {name} out: it is {field.default!r} then"
    yield Fault(text, hint or _remedy(field))


def _unknown_key_of_a_tier(
    error: Any, where: str, source: str, siblings: Mapping[str, FieldInfo]
) -> Fault:
    name = str(error["loc"][-1])
    with_unit = [each for each in siblings if each.rpartition("_")[0] == name]
    if len(with_unit) == 1 and with_unit[0].endswith(_UNITS):
        return Fault(
            f"unknown setting {where!r} (got {show(error['input'])}, from {source})",
            f"did you mean {with_unit[0]}? {_remedy(siblings[with_unit[0]])}",
        )
    return Fault(f"unknown setting {where!r} (from {source})", _suggest(name, siblings))


def _contradiction_faults(
    error: Any, origins: Mapping[str, _Source], wrong: set[str]
) -> Iterator[Fault]:
    cause = error.get("ctx", {}).get("error")
    if not isinstance(cause, Contradictions):
        return
    for each in cause.found:
        if wrong.isdisjoint(each.keys):
            sources = ", ".join(
                f"{key} from {origins[key].label(key) if key in origins else 'default'}"
                for key in each.keys
            )
            yield Fault(f"{each.message} ({sources})", each.hint)


def _innermost(
    location: tuple[int | str, ...],
) -> tuple[FieldInfo, Mapping[str, FieldInfo]]:
    """Return the field that *location* is about, and the names it could have been."""
    if len(location) > 2 and location[2] in _TIER_MODELS:
        fields = _TIER_MODELS[str(location[2])].model_fields
        if len(location) > 3 and location[3] in fields:
            return fields[str(location[3])], fields
        return _FIELDS[str(location[0])], fields
    return _FIELDS[str(location[0])], _FIELDS


def _where(location: tuple[int | str, ...], value: object) -> str:
    """Return the dotted name of *location* in *value*: of a quota with the name of its model.

    Of a tier without the tag that pydantic puts after an index.
    """
    if location[0] == "quotas" and len(location) > 1 and isinstance(location[1], int):
        return f"quotas.{_quota_name(quota_pairs(value), location[1])}"
    return ".".join(str(part) for i, part in enumerate(location) if i != 2)


def _quota_name(pairs: object, number: int) -> str:
    pair = pairs[number] if isinstance(pairs, tuple | list) else None
    if isinstance(pair, tuple | list) and pair and isinstance(pair[0], str):
        return pair[0]
    return str(number)


def _remedy(field: FieldInfo) -> str:
    examples = " or ".join(str(example) for example in field.examples or ())
    return f"{field.description} For example {examples}."


def _as_error(faults: list[Fault]) -> ConfigError:
    if len(faults) == 1:
        return ConfigError(faults[0].message, hint=faults[0].remedy)
    lines = [f"{len(faults)} settings are wrong"]
    for number, fault in enumerate(faults, start=1):
        first, *rest = fault.message.splitlines()
        lines += [f"  {number}. {first}", *(f"   {line}" for line in rest)]
        lines.append(f"     remedy: {fault.remedy}")
    return ConfigError("\n".join(lines))
