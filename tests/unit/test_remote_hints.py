"""Every error of a remote tier says what to do about it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata import storage
from kvstrata.core import remote_tiers
from kvstrata.core.errors import ConfigError, FaultCause
from kvstrata.core.load import load_config
from kvstrata.storage.remote.mooncake.faults import unavailable

REMOTE = Path(storage.__file__).parent / "remote"
FILES = [*sorted(REMOTE.rglob("*.py")), Path(remote_tiers.__file__)]
ERRORS = {"ConfigError", "TierUnavailable"}


def errors_without_a_hint(source: str) -> Iterator[str]:
    """But for those of a store that we have closed ourselves."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ERRORS
        ):
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if "hint" not in given and given.get("cause") != "'closed'":
                yield ast.unparse(node)


def test_an_error_without_a_hint_is_found() -> None:
    source = "raise ConfigError('no')\nraise TierUnavailable('no', hint='yes', cause='name')"
    assert list(errors_without_a_hint(source)) == ["ConfigError('no')"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_error_has_a_hint(path: Path) -> None:
    assert list(errors_without_a_hint(path.read_text())) == []


@pytest.mark.parametrize("cause", ["unreachable", "timeout", "name", "refused"])
def test_every_cause_that_a_mooncake_pool_has_comes_with_a_remedy(cause: FaultCause) -> None:
    assert unavailable("mooncake://master:50051", "no", cause).hint
    assert unavailable("mooncake://master:50051", "no", cause, hint="yes").hint == "yes"


@pytest.mark.parametrize(
    ("tier", "named"),
    [
        ("gs://bucket?region=a", "region of a tier at gs://"),
        ("az://container?sign_payload=true", "sign_payload of a tier at az://"),
        ("gs://bucket?region=a&sign_payload=true", "region and sign_payload of a tier at gs://"),
    ],
)
def test_a_setting_that_only_s3_knows_is_named(tier: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{named}[\s\S]*hint: take .* away"):
        load_config({"tiers": f"host | {tier}"}, environ={})
