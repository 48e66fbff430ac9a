"""Where an object store is and how it lets us in."""

import logging
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig, S3Credential, S3Store

    Client = AzureStore | GCSStore | S3Store

__all__ = ["ObjectAccess", "Place", "is_proxied", "open_client", "signs_urls", "tls_context"]

_log = logging.getLogger(__name__)

_SCHEMES: Final = {"s3": "bucket", "gs": "bucket", "az": "container"}
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}")
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,254}")
_ENDPOINT: Final = re.compile(r"https?://[A-Za-z0-9.\[\]:_-]+(/[A-Za-z0-9._~/-]*)?")
_STATIC_CREDENTIALS: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
# Each makes obstore send header fields that a signed URL does not bring about.
_HEADER_SETTINGS: Final = (
    "AWS_SERVER_SIDE_ENCRYPTION",
    "AWS_SSE_KMS_KEY_ID",
    "AWS_SSE_BUCKET_KEY_ENABLED",
    "AWS_SSE_CUSTOMER_KEY_BASE64",
    "AWS_CHECKSUM_ALGORITHM",
    "AWS_REQUEST_PAYER",
    "AWS_S3_EXPRESS",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectAccess:
    """How to reach an object store. What is ``None`` the environment says, as its own tools do.

    Credentials are never here: they come from the environment, files and instance metadata.
    """

    endpoint: str | None = None  # http(s)://host:port of what is compatible with S3, or of Azure
    region: str | None = None
    anonymous: bool = False  # send no credentials, and look for none
    sign_payload: bool = False  # S3: hash each value for its signature, for stores that insist
    parallel: int = 32  # requests of one call side by side, at most


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket or container, and a prefix in it."""

    scheme: Literal["s3", "gs", "az"]
    bucket: str
    prefix: str

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Read ``s3://bucket/prefix``, ``gs://…`` or ``az://container/…``; else a ConfigError.

        >>> Place.of_url("s3://models/kv/a/")
        Place(scheme='s3', bucket='models', prefix='kv/a')
        """
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        prefix = prefix.strip("/")
        segments = prefix.split("/") if prefix else []
        if (
            scheme not in _SCHEMES
            or _BUCKET.fullmatch(bucket) is None
            or any(_SEGMENT.fullmatch(segment) is None for segment in segments)
        ):
            # Not shown: people put keys into URLs.
            raise ConfigError(
                "the URL of an object store is not understood",
                hint="write s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, with "
                "letters, digits and ._=- in the prefix; credentials do not belong there",
            )
        return cls(cast("Literal['s3', 'gs', 'az']", scheme), bucket, prefix)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def open_client(
    place: Place, access: ObjectAccess, timeout_seconds: float, retries: int = 0
) -> "Client":
    """The library's client, which gives each request that long, and repeats it if *retries*.

    No network I/O; a setting that cannot be right is a ConfigError.
    """
    if find_spec("obstore") is None:
        raise ConfigError(
            f"{place} needs the package obstore", hint="pip install 'kvstrata[objects]'"
        )
    if not 1 <= access.parallel <= 1024:
        raise ConfigError(
            f"parallel is {access.parallel}", hint="give a number of requests from 1 to 1024"
        )
    if access.endpoint is not None and _ENDPOINT.fullmatch(access.endpoint) is None:
        raise ConfigError(
            f"the endpoint of {place} is not understood",
            hint="write http://host:port or https://host:port; credentials do not belong there",
        )
    from obstore.exceptions import BaseError

    options = _client_options(access, timeout_seconds)
    retry: RetryConfig = {"max_retries": retries}
    try:
        if place.scheme == "s3":
            return _open_s3(place, access, options, retry)
        if place.scheme == "az":
            return _open_azure(place, access, options, retry)
        return _open_gcs(place, access, options, retry)
    except ConfigError:
        raise
    except (BaseError, ValueError) as e:
        # The text may show a value from the environment; the class says what it is about.
        raise ConfigError(
            f"the settings of {place} are not understood ({type(e).__name__})",
            hint="check region, account and credentials in the environment",
        ) from None


def signs_urls(place: Place, access: ObjectAccess, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether requests by signed URL do all that those of the library do."""
    return (
        place.scheme == "s3"
        and not access.anonymous
        and not access.sign_payload
        and not place.bucket.endswith("--x-s3")
        and not any(environ.get(name) for name in _HEADER_SETTINGS)
    )


def is_proxied(origin: str) -> bool:
    """Whether the environment asks for a proxy between us and *origin*."""
    split = urlsplit(origin)
    return split.scheme in getproxies() and not proxy_bypass(split.hostname or "")


def tls_context(environ: Mapping[str, str] = os.environ) -> ssl.SSLContext:
    """Trusts what the system, ``SSL_CERT_FILE`` and ``AWS_CA_BUNDLE`` do."""
    context = ssl.create_default_context()
    bundle = environ.get("AWS_CA_BUNDLE")
    if bundle:
        context.load_verify_locations(bundle)
    return context


def _client_options(access: ObjectAccess, timeout_seconds: float) -> "ClientConfig":
    options: ClientConfig = {
        # Shorter: what cannot be connected to is named before the call is over.
        "connect_timeout": timedelta(seconds=0.75 * timeout_seconds),
        "timeout": timedelta(seconds=timeout_seconds),
        "pool_idle_timeout": timedelta(seconds=30),
        "pool_max_idle_per_host": str(2 * access.parallel),
        "user_agent": "kvstrata",
    }
    if access.endpoint is not None and access.endpoint.startswith("http://"):
        options["allow_http"] = True
    bundle = os.environ.get("AWS_CA_BUNDLE")
    if bundle:
        try:
            options["root_certificate"] = Path(bundle).read_bytes()
        except OSError as e:
            raise ConfigError(
                f"AWS_CA_BUNDLE: cannot read {bundle}: {e.strerror}",
                hint="name a file of certificates (PEM) that this user may read, or unset it",
            ) from e
    return options


def _open_s3(
    place: Place, access: ObjectAccess, options: "ClientConfig", retry: "RetryConfig"
) -> "S3Store":
    from obstore.store import S3Store

    config: dict[str, Any] = {"unsigned_payload": not access.sign_payload}
    if access.region is not None:
        config["region"] = access.region
    if access.endpoint is not None:
        config["endpoint"] = access.endpoint.rstrip("/")
    if access.anonymous:
        config["skip_signature"] = True
    elif _has_profile(os.environ):
        credentials = _ProfileCredentials()
        config["credential_provider"] = credentials
        if credentials.region is not None and not _has_region(config, os.environ):
            config["region"] = credentials.region
    return S3Store(place.bucket, client_options=options, retry_config=retry, **config)


def _open_azure(
    place: Place, access: ObjectAccess, options: "ClientConfig", retry: "RetryConfig"
) -> "AzureStore":
    from obstore.store import AzureStore

    config: dict[str, Any] = {}
    if access.endpoint is not None:
        config["endpoint"] = access.endpoint.rstrip("/")
    if access.anonymous:
        config["skip_signature"] = True
    return AzureStore(place.bucket, client_options=options, retry_config=retry, **config)


def _open_gcs(
    place: Place, access: ObjectAccess, options: "ClientConfig", retry: "RetryConfig"
) -> "GCSStore":
    from obstore.store import GCSStore

    config: dict[str, Any] = {}
    if access.endpoint is not None:
        config["base_url"] = access.endpoint.rstrip("/")
    if access.anonymous:
        config["skip_signature"] = True
    return GCSStore(place.bucket, client_options=options, retry_config=retry, **config)


def _has_profile(environ: Mapping[str, str]) -> bool:
    """Whether the shared files of AWS are to be asked, and the package that reads them is here."""
    if any(environ.get(name) for name in _STATIC_CREDENTIALS):
        return False
    profile = environ.get("AWS_PROFILE")
    files = (
        environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
    )
    if not profile and not any(Path(file).expanduser().is_file() for file in files):
        return False
    if find_spec("boto3") is not None:
        return True
    if profile:
        raise ConfigError(
            f"AWS_PROFILE is {profile}, and boto3 is not installed", hint="pip install boto3"
        )
    _log.warning("the credentials in ~/.aws are not used: boto3 is not installed")
    return False


def _profile(environ: Mapping[str, str]) -> str:
    """The name of the profile that boto3 takes."""
    return environ.get("AWS_DEFAULT_PROFILE") or environ.get("AWS_PROFILE") or "default"


def _has_region(config: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    return "region" in config or any(map(environ.get, ("AWS_REGION", "AWS_DEFAULT_REGION")))


class _ProfileCredentials:
    """The credentials of an AWS profile. They are asked for when needed: it may take a server."""

    def __init__(self) -> None:
        import boto3
        from botocore.exceptions import BotoCoreError

        try:
            self._session = boto3.Session()
        except BotoCoreError as e:
            raise ConfigError(
                f"the AWS profile {_profile(os.environ)} cannot be used: {type(e).__name__}",
                hint="check AWS_PROFILE, and the profile in ~/.aws/config and ~/.aws/credentials",
            ) from None
        self.region = self._session.region_name

    def __call__(self) -> "S3Credential":
        found = self._session.get_credentials()
        if found is None:
            raise ValueError("no credentials in the AWS profile")
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=5),
        }
