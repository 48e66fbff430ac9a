"""The remote tiers that an operator can choose: engines that several nodes share blocks through."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvstrata.core.errors import ConfigError
from kvstrata.core.pipeline import redact, tier_kind, url_scheme
from kvstrata.core.tier_fields import Compressing, Writing, absolute, refuse_bool
from kvstrata.core.units import parse_bytes

__all__ = ["MooncakeTier", "ObjectTier", "RemoteTier", "ValkeyTier"]

_Timeout = Annotated[float, BeforeValidator(refuse_bool), Field(gt=0, le=3600, allow_inf_nan=False)]
_Lifetime = Annotated[
    float, BeforeValidator(refuse_bool), Field(ge=1, le=10 * 366 * 86_400, allow_inf_nan=False)
]
_Short = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, le=3600, allow_inf_nan=False)]
_File = Annotated[Path, AfterValidator(absolute)]
_Name = Annotated[str, Field(min_length=1)]


class RemoteTier(BaseModel):
    """What the remote tiers have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    kind: str
    url: str = Field(description="Address.", examples=["s3://bucket/prefix"])
    timeout_seconds: _Timeout = Field(
        default=2.0,
        description=(
            "Longest time in seconds for one call, which moves up to 8 MiB; then it counts as "
            "failed, and what it was to read is computed."
        ),
        examples=["2"],
    )
    missing_seconds: _Short = Field(
        default=1.0,
        description=(
            "Seconds for which a block that was not there is not asked for again. What another "
            "node writes meanwhile is found that much later. 0: always asked."
        ),
        examples=["1"],
    )
    compress: Compressing = False
    write: Writing = "saved"

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> "RemoteTier":
        scheme = url_scheme(self.url)
        if scheme is None or tier_kind(scheme) != self.kind:
            raise ConfigError(
                f"{redact(self.url)!r} is not the address of a {self.kind} tier",
                hint=f"for example {(type(self).model_fields['url'].examples or [''])[0]}",
            )
        return self

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """No secret of the address is ever shown."""
        for name, value in super().__repr_args__():
            yield name, redact(value) if isinstance(value, str) else value


class ObjectTier(RemoteTier):
    """A bucket, or a part of one, in an object store: one object a block."""

    kind: Literal["objects"] = "objects"
    url: str = Field(
        description=(
            "`s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`. Credentials are "
            "those of the environment, as that cloud's own tools find them, never part of it."
        ),
        examples=["s3://bucket/prefix"],
    )
    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s|]+$")] | None = Field(
        default=None,
        description="Address of a server that speaks the same protocol. Unset: the cloud's own.",
        examples=["http://minio:9000"],
    )
    region: _Name | None = Field(
        default=None,
        description="Region of the bucket, for S3. Unset: that of the environment.",
        examples=["eu-central-1"],
    )
    anonymous: bool = Field(
        default=False,
        description="Send no credentials: the bucket is open to all who reach it.",
        examples=["true"],
    )
    sign_payload: bool = Field(
        default=False,
        description=(
            "Have what is written to S3 signed with its content, at three times the CPU: for "
            "servers that demand it. Blocks have checksums of their own."
        ),
        examples=["true"],
    )
    parallel: Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=1024)] = Field(
        default=32,
        description="Requests of one call that are under way at the same time at most.",
        examples=["32"],
    )
    ttl_seconds: _Lifetime | None = Field(
        default=None,
        description=(
            "Seconds after which a block counts as gone; `kvstrata gc` deletes it. Unset: never."
        ),
        examples=["604800"],
    )
    snapshot_seconds: _Lifetime | None = Field(
        default=None,
        description=(
            "Age up to which what `kvstrata gc --snapshot` wrote is trusted: a block that is not in "
            "it is not asked for. What another node writes is found that much later at most. "
            "Unset: every block is asked for."
        ),
        examples=["3600"],
    )

    @model_validator(mode="after")
    def _is_what_the_cloud_knows(self) -> "ObjectTier":
        given = [name for name in ("region", "sign_payload") if getattr(self, name)]
        if given and not self.url.lower().startswith("s3:"):
            raise ConfigError(
                f"{' and '.join(given)} of a tier at {url_scheme(self.url)}://: for s3:// only",
                hint=f"take {' and '.join(given)} away",
            )
        return self


class ValkeyTier(RemoteTier):
    """A Valkey or Redis server, a cluster of them, or what sentinels watch."""

    kind: Literal["valkey"] = "valkey"
    url: str = Field(
        description=(
            "`valkey://HOST:PORT`, `rediss://HOST:PORT` for TLS, or `unix:///PATH`; several "
            "`HOST:PORT` with commas between for a cluster or sentinels. `USER:PASSWORD@` before "
            "the host, percent-encoded."
        ),
        examples=["valkey://cache:6379"],
    )
    cluster: bool = Field(
        default=False,
        description="The hosts are some of a cluster; blocks are spread over all of it.",
        examples=["true"],
    )
    replicas: bool = Field(
        default=False,
        description=(
            "Read from the replicas of a cluster, or from those that sentinels name, too, also "
            "while their master is dead. A block that has not come to one yet is a miss there. "
            "Not with `ttl_seconds`."
        ),
        examples=["true"],
    )
    sentinel: _Name | None = Field(
        default=None,
        description="The hosts are sentinels, and this is the name of the master they watch.",
        examples=["mymaster"],
    )
    sentinel_username: _Name | None = Field(
        default=None, description="Whom to log in to the sentinels as.", examples=["kv"]
    )
    sentinel_password_file: _File | None = Field(
        default=None,
        description="Absolute path of a file that holds the password of the sentinels.",
        examples=["/run/secrets/sentinel"],
    )
    prefix: _Name = Field(
        default="kvstrata",
        description="What the names of all keys begin with. Give all nodes the same.",
        examples=["kvstrata"],
    )
    database: Annotated[int, BeforeValidator(refuse_bool), Field(ge=0, le=99_999)] = Field(
        default=0, description="Number of the database; a cluster has only 0.", examples=["1"]
    )
    username: _Name | None = Field(
        default=None, description="Whom to log in as, in place of one in the URL.", examples=["kv"]
    )
    password_file: _File | None = Field(
        default=None,
        description="Absolute path of a file that holds the password, in place of one in the URL.",
        examples=["/run/secrets/valkey"],
    )
    tls_ca_file: _File | None = Field(
        default=None,
        description="Absolute path of the certificates to trust. Unset: the system's.",
        examples=["/etc/ssl/valkey-ca.pem"],
    )
    tls_cert_file: _File | None = Field(
        default=None,
        description="Absolute path of this node's certificate, where the server asks for one.",
        examples=["/etc/ssl/node.pem"],
    )
    tls_key_file: _File | None = Field(
        default=None,
        description="Absolute path of the key of this node's certificate.",
        examples=["/etc/ssl/node.key"],
    )
    ttl_seconds: _Lifetime | None = Field(
        default=None,
        description=(
            "Seconds after its last use when the server drops a block. Unset: when it needs room, "
            "by its own `maxmemory-policy`."
        ),
        examples=["86400"],
    )


class MooncakeTier(RemoteTier):
    """A Mooncake Store: memory of many nodes, behind one master."""

    kind: Literal["mooncake"] = "mooncake"
    url: str = Field(
        description="`mooncake://HOST:PORT` of the master.",
        examples=["mooncake://master:50051"],
    )
    metadata: _Name = Field(
        default="P2PHANDSHAKE",
        description="Address of Mooncake's metadata server, or `P2PHANDSHAKE` for none.",
        examples=["http://master:8080/metadata"],
    )
    local_host: _Name | None = Field(
        default=None,
        description="Address by which other nodes reach this one. Unset: the one towards the master.",
        examples=["10.0.0.7"],
    )
    segment: Annotated[int, BeforeValidator(parse_bytes)] | None = Field(
        default=None,
        description="Bytes of memory that this node gives to the store. Unset: none.",
        examples=["16GiB"],
    )
    protocol: Literal["tcp", "rdma"] = Field(
        default="tcp", description="How bytes travel between nodes.", examples=["rdma"]
    )
    devices: str = Field(
        default="",
        description="Names of the RDMA devices, with commas between. Empty: found by Mooncake.",
        examples=["mlx5_0"],
    )
    prefix: _Name = Field(
        default="kvstrata",
        description="What the names of all keys begin with. Give all nodes the same.",
        examples=["kvstrata"],
    )
