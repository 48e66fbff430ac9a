"""An engine that is started anew while requests come in, whose clients wait and ask again."""

import time

from msgspec.structs import replace

from kvstrata.bench.fleet import Member
from kvstrata.bench.meter import Meter
from kvstrata.bench.traffic import Conversation, Ran, Traffic

__all__ = ["run_with_restart"]


def run_with_restart(member: Member, traffic: Traffic, restart_seconds: float, meter: Meter) -> Ran:
    """Give *traffic* to *member*, and start its engine anew *restart_seconds* after the beginning.

    What is due meanwhile waits until the engine is ready, and what was under way is asked again; the
    times of both count from when they were first due. All conversations are due at a time, and have
    one turn. To *meter* the start does not count.
    """
    began = time.perf_counter()
    first = member.run(replace(traffic, cut_seconds=restart_seconds))
    answered = {answer.conversation for answer in first.answers}
    left = [n for n in range(len(traffic.conversations)) if n not in answered]
    meter.pause()
    member.restart()
    meter.go_on()
    passed_seconds = time.perf_counter() - began
    rest = [_due_from(passed_seconds, traffic.conversations[n]) for n in left]
    last = member.run(replace(traffic, conversations=rest))
    later = [replace(answer, conversation=left[answer.conversation]) for answer in last.answers]
    came_seconds = [
        (traffic.conversations[answer.conversation].due_seconds or 0.0) + answer.first_token_seconds
        for answer in later
        if answer.failure is None
    ]
    return Ran(
        passed_seconds + last.seconds,
        sorted([*first.answers, *later], key=lambda answer: answer.conversation),
        last.engine_died,
        silent_seconds=min(came_seconds) - first.seconds if came_seconds else None,
    )


def _due_from(passed_seconds: float, conversation: Conversation) -> Conversation:
    """As it is due for traffic that begins *passed_seconds* later; less than 0 is overdue."""
    return replace(conversation, due_seconds=(conversation.due_seconds or 0.0) - passed_seconds)
