"""How much of the server one client may have. What a request may hold is in protocol.py."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The defaults are documented in docs/wire-protocol.md and are far above what an engine needs."""

    connections: int = 256
    connections_per_process: int = 64
    hello_seconds: float = 5.0  # from the connection to its whole first message
    frame_seconds: float = 5.0  # from the first byte of a message to its last
    send_seconds: float = 5.0  # in which a client that has bytes to read reads some
    unread_bytes: int = 1 << 20  # of replies; while more wait, no request is read
    unread_news_bytes: int = 8 << 20  # with news besides: a client with more is hung up on
    buffered_bytes: int = 256 << 20  # in both directions, of all; whoever holds most has to go
    tasks: int = 16_384  # of a connection
    task_blocks: int = 4 << 20  # of these tasks together
    tasks_answer_bytes: int = 2 << 20  # of one ``Tasks``
    shown_namespaces: int = 1024  # in one ``Report``: those with most blocks
    shown_parts_bytes: int = 1 << 20  # in one ``Report``: what these namespaces are made of
