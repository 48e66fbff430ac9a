"""`kvstrata gc`: delete blocks from an object store, the old ones or the oldest beyond a size."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstrata.cli.reporting import JsonFlag, reported
from kvstrata.cli.sizes import size_of
from kvstrata.core.errors import ConfigError, InvariantViolated
from kvstrata.core.types import NAMESPACE_ID_BYTES, NamespaceId
from kvstrata.core.units import human_bytes

if TYPE_CHECKING:
    from kvstrata.core.remote_tiers import ObjectTier
    from kvstrata.storage.remote.objects.access import ObjectAccess
    from kvstrata.storage.remote.objects.gc import GcReport, GcRule

__all__ = ["gc"]

_STORES: Final = ("s3://", "gs://", "az://")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*([smhdw])")


def gc(  # noqa: PLR0913 - each is an option
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="As in the settings of the tier, for example s3://bucket/prefix?endpoint=….",
        ),
    ],
    *,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="Delete blocks written longer ago, for example 12h, 7d or 4w."
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Delete the oldest blocks until no more than this is left, for example 10TiB. "
            "Blocks younger than an hour stay.",
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Only blocks of this one, as kvstrata inspect shows it."),
    ] = None,
    snapshot: Annotated[
        bool,
        typer.Option(
            "--snapshot",
            help="Write what is left of each namespace, for tiers with snapshot_seconds.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")
    ] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Server that speaks the same protocol; unset: the cloud."),
    ] = None,
    region: Annotated[
        str | None, typer.Option(metavar="NAME", help="Region of the bucket, for S3.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete blocks from an object store by age or size, while nodes read and write it.

    The age of a block is the time since it was written: reading does not renew it. Objects whose
    names are not those of blocks are counted and never touched. A block that is written anew while
    this runs stays; a node that wants one that is deleted has a miss. Credentials are found as the
    tier finds them, and must allow listing and deleting.

    Exits with 0 when all is done, with 1 if the store cannot be reached (another run does the
    rest), and with 2 for wrong input.
    """
    with reported():
        tier = _tier(url)
        from kvstrata.storage.remote.objects.gc import collect

        rule = _rule(tier, older_than, keep, namespace, snapshot=snapshot, dry_run=dry_run)
        with _progress() as progress:
            report = collect(
                tier.url, rule, access=_access(tier, endpoint, region), progress=progress
            )
    if as_json:
        plain = asdict(report) | {"left_bytes": report.left_bytes, "dry_run": dry_run}
        typer.echo(json.dumps(plain, indent=2))
    else:
        for line in _lines(report, tier.url, rule):
            typer.echo(line)


def _tier(url: str) -> "ObjectTier":
    """The tier that *url* names, with the settings in its query."""
    from kvstrata.core.load import load_config
    from kvstrata.core.pipeline import redact
    from kvstrata.core.remote_tiers import ObjectTier

    if not url.startswith(_STORES):
        raise ConfigError(
            f"URL {redact(url)!r}: only object stores are collected",
            hint="give s3://, gs:// or az:// and a bucket",
        )
    lowest = load_config({"tiers": f"host | {url}"}, environ={}, overrides_name="URL").lowest_tier
    if not isinstance(lowest, ObjectTier):
        raise InvariantViolated(f"{type(lowest).__name__} is no object store")
    return lowest


def _rule(
    tier: "ObjectTier",
    older_than: str | None,
    keep: str | None,
    namespace: str | None,
    *,
    snapshot: bool,
    dry_run: bool,
) -> "GcRule":
    from kvstrata.storage.remote.objects.gc import GcRule

    age = tier.ttl_seconds if older_than is None else _seconds(older_than)
    if age is None and keep is None and not snapshot:
        raise ConfigError(
            "nothing says what to do",
            hint="give --older-than, --keep or --snapshot, or ttl_seconds with the URL",
        )
    return GcRule(
        older_than_seconds=age,
        keep_bytes=None if keep is None else size_of("--keep", keep),
        namespace=None if namespace is None else _namespace(namespace),
        snapshot=snapshot,
        dry_run=dry_run,
    )


def _access(tier: "ObjectTier", endpoint: str | None, region: str | None) -> "ObjectAccess":
    from kvstrata.storage.remote.objects.access import ObjectAccess

    return ObjectAccess(
        endpoint=endpoint or tier.endpoint,
        region=region or tier.region,
        anonymous=tier.anonymous,
        sign_payload=tier.sign_payload,
        parallel=tier.parallel,
    )


@contextmanager
def _progress() -> "Iterator[Callable[[GcReport], None]]":
    """Yield what counts on standard error, if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("listing blocks") as status:

        def show(done: "GcReport") -> None:
            deleted = done.old_blocks + done.excess_blocks
            status.update(f"{done.blocks:,} blocks found, {deleted:,} deleted")

        yield show


def _lines(report: "GcReport", url: str, rule: "GcRule") -> Iterator[str]:
    yield f"found {_count(report.blocks, 'block')}, {human_bytes(report.found_bytes)}"
    done = "would be deleted" if rule.dry_run else "deleted"
    for blocks, size, why in (
        (report.old_blocks, report.old_bytes, "for their age"),
        (report.excess_blocks, report.excess_bytes, "beyond the size to keep"),
    ):
        if blocks:
            yield f"{done} {why}: {_count(blocks, 'block')}, {human_bytes(size)}"
    if not report.blocks:
        yield f"nothing to delete: look whether {url} is the address of the tier, prefix included"
    elif not report.old_blocks and not report.excess_blocks:
        nothing = "nothing would be deleted" if rule.dry_run else "nothing was deleted"
        is_asked = rule.older_than_seconds is not None or rule.keep_bytes is not None
        yield (
            f"{nothing}: no block is due; a lower --older-than or --keep does"
            if is_asked
            else nothing
        )
    if report.renewed_blocks:
        yield f"written anew meanwhile, and left: {_count(report.renewed_blocks, 'block')}"
    if report.other_objects:
        yield f"not blocks, and not touched: {_count(report.other_objects, 'object')}"
    if report.snapshots:
        yield f"snapshots written: {report.snapshots}"
    yield f"left {human_bytes(report.left_bytes)}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(
            f"--older-than {text!r} is not an age",
            hint="write a number and s, m, h, d or w, for example 7d",
        )
    return float(match[1]) * _UNITS[match[2]]


def _namespace(text: str) -> NamespaceId:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != NAMESPACE_ID_BYTES:
        raise ConfigError(
            f"--namespace {text!r} is not one", hint=f"{2 * NAMESPACE_ID_BYTES} hexadecimal digits"
        )
    return found
