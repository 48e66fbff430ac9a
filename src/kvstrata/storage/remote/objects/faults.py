"""What goes wrong with an object store, in words that hold no key, signature or token.

The texts of obstore's exceptions quote requests and answers: a 403 can show the key id, the string
that was signed and the signature. Nothing of them is passed on but what is recognised here.
"""

import re
import socket
import ssl
from concurrent.futures import CancelledError
from typing import Final, NamedTuple

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from kvstrata.core.errors import FaultCause, TierUnavailable
from kvstrata.storage.remote.objects.connection import Answer, Nonsense

__all__ = ["FAULTS", "Refused", "as_unavailable", "is_full", "names_no_object", "refused"]


class Refused(Exception):
    """The engine answers with an error: its status, and its own word for it if it has one."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status = status
        self.code = code


FAULTS: Final = (OSError, BaseError, Nonsense, Refused, CancelledError)
"""What a call to an object store may raise besides bugs."""

_STATUS: Final = re.compile(r"status code: ([1-5][0-9][0-9])\b")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_FULL_CODES: Final = frozenset(
    {
        "InsufficientStorage",
        "QuotaExceeded",
        "XMinioAdminBucketQuotaExceeded",
        "XMinioStorageFull",
        "XMinioStorageQuotaExceeded",
    }
)
_EXPIRED_CODES: Final = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
_NO_BUCKET_CODES: Final = frozenset({"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"})
_ASKS_FOR_CREDENTIALS: Final = re.compile(
    r"//169\.254\.|/latest/api/token|/latest/meta-data|/computeMetadata/|/oauth2/|//sts\."
    r"|AssumeRole|token request"
)
_HINTS: Final[dict[FaultCause, str]] = {
    "unreachable": "check that the server runs and that this host may reach it",
    "timeout": "check the server and the network, or set a longer timeout_seconds",
    "name": "check the host name in the endpoint or the region, and the resolver",
    "refused": "check the state and the configuration of the server",
    "full": "make room, for example with kvstrata gc, or raise the quota",
}
_CERTIFICATE_HINT: Final = "name a file with the certificates to trust in AWS_CA_BUNDLE"
_HTTP_HINT: Final = "write https://, or set AWS_ALLOW_HTTP=true in the environment"
_CREDENTIALS_HINT: Final = (
    "check the credentials, and that they allow reading, writing, deleting and listing: without "
    "the right to list, S3 answers for a missing object as for a forbidden one"
)
_EXPIRED_HINT: Final = "renew the credentials: their session token has expired or is not valid"
_CLOCK_HINT: Final = "set the clock of this host: its time is too far from the server's"
_BUCKET_HINT: Final = "make the bucket, or correct its name and region"
_BARE_HINT: Final = (
    "check that the credentials have not expired, and that the region is that of the bucket"
)


class _Reason(NamedTuple):
    cause: FaultCause
    words: str
    hint: str | None = None  # unset: that of the cause


_HTTP: Final = _Reason("refused", "its endpoint is http and http is not allowed", _HTTP_HINT)
_UNTRUSTED: Final = _Reason("refused", "its certificate is not trusted", _CERTIFICATE_HINT)
_SIGNS: Final = (
    ("dns error", _Reason("name", "its host name is not known")),
    ("TimedOut", _Reason("timeout", "no answer in time")),
    ("operation timed out", _Reason("timeout", "no answer in time")),
    ("BadScheme", _HTTP),
    ("invalid peer certificate", _UNTRUSTED),
    ("InvalidCertificate", _UNTRUSTED),
    ("Connect", _Reason("unreachable", "no connection")),
    ("ConnectionReset", _Reason("unreachable", "the connection was reset")),
    ("IncompleteMessage", _Reason("unreachable", "closed in the middle of an answer")),
    ("IncompleteBody", _Reason("unreachable", "closed in the middle of an answer")),
    ("error reading a body", _Reason("unreachable", "closed in the middle of an answer")),
    ("error decoding response body", _Reason("unreachable", "closed in the middle of an answer")),
    ("error sending request", _Reason("unreachable", "no answer")),
)


def as_unavailable(name: str, done: str, fault: BaseException) -> TierUnavailable:
    """The error to raise ``from None`` for *fault*, one of ``FAULTS``, of the store *name*."""
    reason = _reason(fault)
    return TierUnavailable(
        f"{name} cannot be {done}: {reason.words}",
        hint=reason.hint or _HINTS.get(reason.cause),
        cause=reason.cause,
    )


def refused(fault: Exception) -> Refused | None:
    """The status and code that *fault* tells of; ``None`` if it does not."""
    if isinstance(fault, Refused):
        return fault
    text = str(fault)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is None:
        return None
    return Refused(int(status[1]), code[1] if code else "")


def is_full(answer: Refused | Answer) -> bool:
    """Whether the engine has no room, as against any other refusal."""
    return answer.status == 507 or answer.code in _FULL_CODES


def names_no_object(answer: Refused | Answer | None) -> bool:
    """Whether what is missing is an object, as against the bucket."""
    return answer is None or (answer.status == 404 and answer.code not in _NO_BUCKET_CODES)


def _reason(fault: BaseException) -> _Reason:
    if isinstance(fault, CancelledError):
        return _Reason("closed", "it is closed")
    if isinstance(fault, Refused):
        return _refusal(fault)
    if isinstance(fault, BaseError | FileNotFoundError):
        return _of_library(fault)
    if isinstance(fault, OSError):
        return _of_socket(fault)
    return _Reason("refused", str(fault))  # Nonsense, in our words


def _of_library(fault: Exception) -> _Reason:
    answer, text = refused(fault), str(fault)
    if _ASKS_FOR_CREDENTIALS.search(text) or (
        answer is None and isinstance(fault, PermissionDeniedError | UnauthenticatedError)
    ):
        return _Reason("credentials", "no credentials were found", _CREDENTIALS_HINT)
    return _refusal(answer) if answer is not None else _by_text(text)


def _refusal(answer: Refused) -> _Reason:
    words = f"refused with {answer.status} {answer.code}".rstrip()
    if answer.code in _EXPIRED_CODES:
        return _Reason("credentials", words, _EXPIRED_HINT)
    if answer.code == "RequestTimeTooSkewed":
        return _Reason("credentials", words, _CLOCK_HINT)
    if (answer.status, answer.code) == (400, ""):  # of a HEAD, which has no room for a code
        return _Reason("refused", words, _BARE_HINT)
    if answer.status in {401, 403}:
        return _Reason("credentials", words, _CREDENTIALS_HINT)
    if answer.status == 404:
        return _Reason("refused", words, _BUCKET_HINT)
    if answer.status in {301, 302, 307, 308} or answer.code == "AuthorizationHeaderMalformed":
        return _Reason("refused", words, "set the region of the bucket")
    return _Reason("full" if is_full(answer) else "refused", words)


def _by_text(text: str) -> _Reason:
    for sign, reason in _SIGNS:
        if sign in text:
            return reason
    return _Reason("refused", "an error that is not known")


def _of_socket(fault: OSError) -> _Reason:
    if isinstance(fault, TimeoutError):
        return _Reason("timeout", "no answer in time")
    if isinstance(fault, socket.gaierror):
        return _Reason("name", "its host name is not known")
    if isinstance(fault, ssl.SSLCertVerificationError):
        return _UNTRUSTED
    if isinstance(fault, ssl.SSLError):
        return _Reason("unreachable", "TLS failed")
    return _Reason("unreachable", fault.strerror or str(fault) or type(fault).__name__)
