"""Our own event log as a trace: ``observe/events.py`` defines it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvstrata.core.errors import ConfigError
from kvstrata.observe.events import LOG_VERSION, LogHeader, LookupEvent, PutEvent, decode_event
from kvstrata.replay.hashing import Identities, identities_of_keys
from kvstrata.replay.lines import OnRead, bad_line, read_lines
from kvstrata.replay.trace import NO_PARENT, Kind, Request

__all__ = ["EventTrace", "read_header"]


@dataclass(frozen=True, slots=True)
class EventTrace:
    """The lookups and puts of an event log, in the order in which they happened."""

    path: Path
    header: LogHeader
    format: str = "kvstrata"
    behind_device: bool = True

    @property
    def tokens_per_block(self) -> int:
        return self.header.tokens_per_block

    @property
    def block_bytes(self) -> int:
        return self.header.block_bytes

    def read(self, on_read: OnRead | None = None) -> Iterator[Request]:
        """The events in order; ``ConfigError`` at the first line that is not as it should be.

        Of a clock that was set back only the order remains. A last line without its end was being
        written when the log was copied or its writer died; it does not count.
        """
        latest = 0.0
        for number, line in read_lines(self.path, on_read):
            try:
                event = decode_event(line)
            except msgspec.DecodeError as e:
                if not line.endswith(b"\n"):
                    return
                raise bad_line(self.path, number, str(e)) from e
            if isinstance(event, LogHeader):
                if event.version != self.header.version:
                    raise bad_line(
                        self.path,
                        number,
                        f"a log of version {event.version} begins here",
                        hint="replay it with the program that wrote it, and the lines before it alone",
                    )
                if event != self.header:
                    raise bad_line(
                        self.path,
                        number,
                        "a log of other blocks begins here",
                        hint="replay the two parts one after the other",
                    )
                continue
            if len(set(event.keys)) != len(event.keys):
                raise bad_line(self.path, number, "`keys` has a key twice")
            if isinstance(event, LookupEvent) and event.found_blocks > len(event.keys):
                raise bad_line(self.path, number, "`found_blocks` is more than the keys there are")
            latest = max(latest, event.t)
            try:
                request = self._request(event, latest)
            except ValueError as e:
                raise bad_line(self.path, number, f"a key is not hexadecimal: {e}") from e
            yield request

    def _request(self, event: LookupEvent | PutEvent, arrival_seconds: float) -> Request:
        blocks = _identities(event.namespace, event.keys)
        parent = NO_PARENT
        if event.parent is not None:
            parent = int(_identities(event.namespace, [event.parent])[0])
        if isinstance(event, PutEvent):
            kind, found, whole = Kind.PUT, 0, event.prompt_blocks
        else:
            kind, found, whole = Kind.LOOKUP, event.found_blocks, 0
        return Request(
            arrival_seconds,
            (event.first_block + len(blocks)) * self.tokens_per_block,
            blocks,
            kind,
            first_block=event.first_block,
            parent=parent,
            found_blocks=found,
            prompt_blocks=whole,
        )


def _identities(namespace: str, keys: list[str]) -> Identities:
    return identities_of_keys(bytes.fromhex(namespace), bytes.fromhex("".join(keys)))


class _Probe(msgspec.Struct):
    """What the first line of a log of any version has."""

    event: str
    version: int = 0


def read_header(path: Path) -> LogHeader | None:
    """The first line of an event log; None if *path* is none, ``ConfigError`` if of another version."""
    number, line = next(read_lines(path), (0, b""))
    try:
        probe = msgspec.json.decode(line, type=_Probe)
    except msgspec.DecodeError:
        return None
    if probe.event == "log" and probe.version != LOG_VERSION:
        raise ConfigError(
            f"{path} is an event log of version {probe.version}, this program reads {LOG_VERSION}",
            hint="replay it with the program that wrote it; if it goes on in version "
            f"{LOG_VERSION}, give the lines from there on",
        )
    try:
        event = decode_event(line)
    except msgspec.DecodeError as e:
        raise bad_line(path, number, str(e)) from e
    if not isinstance(event, LogHeader):
        raise bad_line(
            path,
            number,
            "an event log begins with its header",
            hint="give the log from its beginning, with the line that has tokens_per_block",
        )
    return event
