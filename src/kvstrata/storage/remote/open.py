"""Makes the store of a remote tier."""

from pathlib import Path

from kvstrata.core.errors import ConfigError
from kvstrata.core.remote_tiers import MooncakeTier, ObjectTier, RemoteTier, ValkeyTier
from kvstrata.storage.mapping import HostMapping
from kvstrata.storage.remote.mooncake.node import MooncakeNode
from kvstrata.storage.remote.mooncake.store import MooncakeStore
from kvstrata.storage.remote.objects.access import ObjectAccess
from kvstrata.storage.remote.objects.store import ObjectStore
from kvstrata.storage.remote.valkey.address import Login, TlsFiles, ValkeyAccess
from kvstrata.storage.remote.valkey.store import ValkeyStore
from kvstrata.storage.store import Store

__all__ = ["open_remote"]


def open_remote(tier: RemoteTier, *, block_bytes: int, memory: HostMapping | None) -> Store:
    """A store of values of up to *block_bytes* on the engine that *tier* names; asks nobody.

    *memory* is the host tier, between which and the engine bytes move. Raises ``ConfigError`` if
    a package is missing or a setting is wrong.
    """
    match tier:
        case ObjectTier():
            return _objects(tier, block_bytes)
        case ValkeyTier():
            return _valkey(tier, block_bytes)
        case MooncakeTier():
            return _mooncake(tier, block_bytes, memory)
    raise ConfigError(
        f"there is no store for a {tier.kind} tier", hint="use objects, valkey or mooncake"
    )


def _objects(tier: ObjectTier, block_bytes: int) -> Store:
    return ObjectStore(
        tier.url,
        block_bytes=block_bytes,
        ttl_seconds=tier.ttl_seconds,
        snapshot_seconds=tier.snapshot_seconds,
        timeout_seconds=tier.timeout_seconds,
        access=ObjectAccess(
            endpoint=tier.endpoint,
            region=tier.region,
            anonymous=tier.anonymous,
            sign_payload=tier.sign_payload,
            parallel=tier.parallel,
        ),
    )


def _valkey(tier: ValkeyTier, block_bytes: int) -> Store:
    url = tier.url
    if tier.database:
        url += f"?db={tier.database}" if url.startswith("unix:") else f"/{tier.database}"
    return ValkeyStore(
        url,
        block_bytes=block_bytes,
        ttl_seconds=tier.ttl_seconds,
        timeout_seconds=tier.timeout_seconds,
        access=ValkeyAccess(
            login=Login(tier.username, _secret(tier.password_file)),
            tls=TlsFiles(tier.tls_ca_file, tier.tls_cert_file, tier.tls_key_file),
            cluster=tier.cluster,
            replicas=tier.replicas,
            sentinel=tier.sentinel,
            sentinel_login=Login(tier.sentinel_username, _secret(tier.sentinel_password_file)),
            prefix=tier.prefix,
        ),
    )


def _mooncake(tier: MooncakeTier, block_bytes: int, memory: HostMapping | None) -> Store:
    return MooncakeStore(
        tier.url,
        block_bytes=block_bytes,
        timeout_seconds=tier.timeout_seconds,
        memory=memory,
        node=MooncakeNode(
            local_host=tier.local_host,
            segment_bytes=tier.segment or 0,
            protocol=tier.protocol,
            devices=tier.devices,
            metadata=tier.metadata,
            prefix=tier.prefix,
        ),
    )


def _secret(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        secret = path.read_text().strip()
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"the password file {path} of the valkey tier cannot be read: {e}",
            hint="check its path, and that this user may read it",
        ) from e
    if not secret:
        raise ConfigError(
            f"the password file {path} of the valkey tier is empty",
            hint="write the password into it, or take the setting away",
        )
    return secret
