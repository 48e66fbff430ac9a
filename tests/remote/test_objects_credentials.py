"""Credentials are found as the clouds' own tools find them: tokens in files, servers beside the machine.

Where S3 is asked, rclone checks the signatures that are made with them; of Google's and Azure's
requests it is looked at whom they say they come from.
"""

import base64
import json
import logging
import ssl
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from tests.remote.authority import Authority
from tests.remote.objects_engine import BUCKET, KEY_ID, SECRET, RcloneEngine, environment
from tests.remote.odd_server import OddServer, Request, answer

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Read, Write
from kvstrata.storage.remote.objects.access import ObjectAccess
from kvstrata.storage.remote.objects.store import ObjectStore
from kvstrata.testing.samples import fetch, key, random_value

BLOCK_BYTES: Final = 4096
TOKEN: Final = "token-that-nobody-may-read"
LATER: Final = "2100-01-01T00:00:00Z"
ISSUED: Final = {
    "AccessKeyId": KEY_ID,
    "SecretAccessKey": SECRET,
    "Token": TOKEN,
    "Expiration": LATER,
}


@contextmanager
def issuer(
    answers: Callable[[Request], bytes], authority: Authority | None = None
) -> Iterator[tuple[OddServer, str]]:
    """A server that gives credentials away, by TLS if an *authority* signs for it; and its address."""
    context = None
    if authority is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*authority.issue("issuer"))
    with closing(OddServer(answers, tls=context)) as server:
        yield server, f"http{'s' if context else ''}://127.0.0.1:{server.port}"


@contextmanager
def opened(url: str, environ: dict[str, str], endpoint: str) -> Iterator[ObjectStore]:
    access = ObjectAccess(endpoint=endpoint, region="nowhere-1")
    with (
        environment(environ),
        closing(ObjectStore(url, block_bytes=BLOCK_BYTES, access=access)) as store,
    ):
        yield store


def give_json(content: Any) -> bytes:
    return answer("200 OK", json.dumps(content).encode(), "Content-Type: application/json")


# S3


def of_instance(request: Request) -> bytes:
    """The metadata of an EC2 instance with a role, as of its second version."""
    if request.method == "PUT":
        assert request.target == "/latest/api/token"
        return answer("200 OK", b"session")
    assert request.fields["x-aws-ec2-metadata-token"] == "session"
    role = "/latest/meta-data/iam/security-credentials"
    if request.target.rstrip("/") == role:
        return answer("200 OK", b"cache-role")
    assert request.target == f"{role}/cache-role"
    return give_json({**ISSUED, "Code": "Success", "Type": "AWS-HMAC", "LastUpdated": LATER})


def of_pod(request: Request) -> bytes:
    """The agent of EKS Pod Identity."""
    assert (request.target, request.fields["authorization"]) == ("/v1/credentials", "of the pod")
    return give_json(ISSUED)


def of_web_identity(request: Request) -> bytes:
    """AWS STS, which is told who a service account is."""
    said = dict(urllib.parse.parse_qsl(request.target.partition("?")[2]))
    said |= dict(urllib.parse.parse_qsl(request.body.decode()))
    assert said["Action"] == "AssumeRoleWithWebIdentity"
    assert (said["RoleArn"], said["WebIdentityToken"]) == ("arn:aws:iam::1:role/kv", "of the pod")
    credentials = {name.replace("Token", "SessionToken"): text for name, text in ISSUED.items()}
    inside = "".join(f"<{name}>{text}</{name}>" for name, text in credentials.items())
    result = "AssumeRoleWithWebIdentityResult"
    body = f"<R><{result}><Credentials>{inside}</Credentials></{result}></R>"
    return answer("200 OK", body.encode(), "Content-Type: text/xml")


def environ_of_instance(address: str, _: Path) -> dict[str, str]:
    return {"AWS_METADATA_ENDPOINT": address}


def environ_of_pod(address: str, token: Path) -> dict[str, str]:
    return {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{address}/v1/credentials",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
    }


def environ_of_web_identity(address: str, token: Path) -> dict[str, str]:
    return {
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/kv",
        "AWS_ENDPOINT_URL_STS": address,
        "AWS_CA_BUNDLE": str(token.parent / "ca.pem"),
    }


@pytest.mark.parametrize(
    ("answers", "environ"),
    [
        pytest.param(of_instance, environ_of_instance, id="instance"),
        pytest.param(of_pod, environ_of_pod, id="pod"),
        pytest.param(of_web_identity, environ_of_web_identity, id="web identity"),
    ],
)
def test_s3_is_signed_with_what_was_issued(
    answers: Callable[[Request], bytes],
    environ: Callable[[str, Path], dict[str, str]],
    rclone: RcloneEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    token = tmp_path / "token"
    token.write_text("of the pod")
    url, endpoint = f"s3://{BUCKET}/issued", rclone.endpoint(*rclone.address())
    authority = Authority(tmp_path, "ca") if answers is of_web_identity else None
    caplog.set_level(logging.DEBUG)
    with (
        issuer(answers, authority) as (server, address),
        opened(url, environ(address, token), endpoint) as store,
    ):
        value = memoryview(random_value(1, BLOCK_BYTES))
        assert store.write([key(1)], [None], [value]) == [Write.STORED]
        assert fetch(store, key(1)) == bytes(value)
        assert store.exists([key(1), key(2)]) == [True, False]
        assert store.remove([key(1)]) == [True]
        asked = len(server.requests)
        assert store.exists([key(1)]) == [False]
        assert len(server.requests) == asked, "credentials that last are asked for once"
    assert SECRET not in caplog.text
    assert TOKEN not in caplog.text


def test_the_token_of_a_session_goes_with_each_request() -> None:
    """Of the library's requests and of ours, which it signs."""
    with (
        issuer(of_instance) as (_, address),
        closing(OddServer(lambda _: answer("404 Not Found"))) as storage,
        opened(
            "s3://bucket",
            {"AWS_METADATA_ENDPOINT": address},
            f"http://127.0.0.1:{storage.port}",
        ) as store,
    ):
        assert store.exists([key(1)]) == [False]
        assert fetch(store, key(1)) is Read.MISS
        with pytest.raises(TierUnavailable):
            store.drop_namespace(bytes(16))
        for request in storage.requests:
            in_url = dict(urllib.parse.parse_qsl(request.target.partition("?")[2]))
            tokens = {
                in_url.get("X-Amz-Security-Token"),
                request.fields.get("x-amz-security-token"),
            }
            assert TOKEN in tokens, request
        assert {request.method for request in storage.requests} >= {"HEAD", "GET"}


# Google Cloud Storage and Azure


def of_google_instance(request: Request) -> bytes:
    assert request.fields["metadata-flavor"] == "Google"
    if request.target.startswith("/computeMetadata/v1/instance/service-accounts/default/token"):
        return give_json({"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"})
    return answer("404 Not Found")


def of_managed_identity(request: Request) -> bytes:
    assert request.fields["x-identity-header"] == "of the machine"
    asked = urllib.parse.parse_qs(request.target.partition("?")[2])
    assert asked["resource"] == ["https://storage.azure.com"]
    content = {"access_token": TOKEN, "expires_on": "4102444800", "token_type": "Bearer"}
    return give_json(content | {"resource": "https://storage.azure.com"})


def of_entra(request: Request) -> bytes:
    said = dict(urllib.parse.parse_qsl(request.body.decode()))
    assert request.target == "/tenant/oauth2/v2.0/token"
    assert (said["client_id"], said["client_assertion"]) == ("client", "of the pod")
    return give_json({"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"})


def google_instance(address: str, _: Path) -> dict[str, str]:
    return {"GCE_METADATA_HOST": address.removeprefix("http://")}


def managed_identity(address: str, _: Path) -> dict[str, str]:
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "IDENTITY_ENDPOINT": f"{address}/token",
        "IDENTITY_HEADER": "of the machine",
    }


def workload_identity(address: str, token: Path) -> dict[str, str]:
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_TENANT_ID": "tenant",
        "AZURE_CLIENT_ID": "client",
        "AZURE_FEDERATED_TOKEN_FILE": str(token),
        "AZURE_AUTHORITY_HOST": address,
    }


@pytest.mark.parametrize(
    ("url", "answers", "environ"),
    [
        pytest.param("gs://bucket", of_google_instance, google_instance, id="Google instance"),
        pytest.param("az://container", of_managed_identity, managed_identity, id="Azure machine"),
        pytest.param("az://container", of_entra, workload_identity, id="Azure workload"),
    ],
)
def test_a_token_that_was_issued_goes_with_each_request(
    url: str,
    answers: Callable[[Request], bytes],
    environ: Callable[[str, Path], dict[str, str]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    token = tmp_path / "token"
    token.write_text("of the pod")
    caplog.set_level(logging.DEBUG)
    with (
        issuer(answers) as (server, address),
        closing(OddServer(lambda _: answer("404 Not Found"))) as storage,
        opened(url, environ(address, token), f"http://127.0.0.1:{storage.port}") as store,
    ):
        assert store.exists([key(1)]) == [False]
        assert fetch(store, key(1)) is Read.MISS
        assert len(storage.requests) == 2
        assert {r.fields["authorization"] for r in storage.requests} == {f"Bearer {TOKEN}"}
        assert len(server.requests) == 1, "tokens that last are asked for once"
    assert TOKEN not in caplog.text


def test_a_google_service_account_signs_for_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
    account = {
        "type": "service_account",
        "private_key": pem,
        "private_key_id": "first",
        "client_email": "cache@kv.example",
    }
    file = tmp_path / "account.json"
    file.write_text(json.dumps(account))
    caplog.set_level(logging.DEBUG)
    environ = {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}
    with closing(OddServer(lambda _: answer("404 Not Found"))) as storage:
        with opened("gs://bucket", environ, f"http://127.0.0.1:{storage.port}") as store:
            assert store.exists([key(1)]) == [False]
        (request,) = storage.requests
    kind, _, token = request.fields["authorization"].partition(" ")
    signed, _, signature = token.rpartition(".")
    public = private.public_key()
    public.verify(_decoded(signature), signed.encode(), padding.PKCS1v15(), hashes.SHA256())
    claims = json.loads(_decoded(signed.partition(".")[2]))
    assert (kind, claims["iss"]) == ("Bearer", "cache@kv.example")
    assert pem.splitlines()[1] not in caplog.text


def _decoded(text: str) -> bytes:
    """Of a JSON Web Token, which is base64 without its padding (RFC 7515)."""
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
