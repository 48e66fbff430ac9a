"""What goes wrong with a Valkey, as ``TierUnavailable`` with its cause."""

import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Final

from valkey.exceptions import AuthenticationError, ResponseError
from valkey.exceptions import TimeoutError as ValkeyTimeoutError

from kvstrata.core.errors import FaultCause, TierUnavailable
from kvstrata.storage.remote.valkey.resp import ErrorReply, NotRespError

__all__ = ["fault_of"]

_LOGIN_CODES: Final = {"NOAUTH", "WRONGPASS", "NOPERM", "DENIED"}
_HINTS: Final[dict[FaultCause, str]] = {
    "unreachable": "check that the server runs and that this host may reach it",
    "timeout": "check the server and the network, or set a longer timeout_seconds",
    "name": "check the host name and the resolver",
    "credentials": "check user, password, ACL and certificates of the tier, and of its sentinels",
    "refused": "check the state and the configuration of the server",
}


def fault_of(error: Exception, name: str, secrets: Sequence[str]) -> TierUnavailable:
    """*error* of the server called *name*, without any of *secrets*."""
    cause, why = _cause(error)
    for secret in secrets:
        why = why.replace(secret, "***")
    return TierUnavailable(f"{name}: {why}", hint=_HINTS[cause], cause=cause)


def _cause(error: Exception) -> tuple[FaultCause, str]:
    """The outermost of a chain that says what kind of fault it is: the library wraps errors."""
    for each in _chain(error):
        match each:
            case ErrorReply() | ResponseError() | AuthenticationError():
                return _answered(str(each))
            case NotRespError():
                return "refused", f"it does not speak the protocol: {each}"
            case TimeoutError() | ValkeyTimeoutError():
                return "timeout", "no answer in time"
            case socket.gaierror():
                return "name", f"its host name is not known: {each.strerror}"
            case ssl.SSLError() if _is_about_certificates(each):
                return "credentials", f"TLS: {each}"
    return "unreachable", f"it cannot be reached: {_root(error)}"


def _answered(text: str) -> tuple[FaultCause, str]:
    """An answer that is an error. It may quote what was sent: that part is left out."""
    said = text.partition(", with args")[0]
    code = said.partition(" ")[0]
    is_login = code in _LOGIN_CODES or "AUTH" in said or "password" in said
    if is_login:
        return "credentials", f"it does not let us in: {said}"
    if code == "MOVED":
        return "refused", "it is part of a cluster: set cluster for this tier"
    return "refused", f"it refuses: {said}"


def _is_about_certificates(error: ssl.SSLError) -> bool:
    return isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in (error.reason or "")


def _root(error: BaseException) -> str:
    """What the system says, if it is the system that says it."""
    said = [each.strerror for each in _chain(error) if isinstance(each, OSError) and each.strerror]
    return said[-1] if said else str(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__
