"""How much of host memory requests in line may ask for: what is counted, and until when."""

from types import SimpleNamespace
from typing import Any

from kvstrata.integration.vllm.ahead import Ahead
from kvstrata.manager.tasks import TaskState, TaskStatus
from kvstrata.server import protocol as p
from kvstrata.server.client import Pending


def line(slots: int = 40) -> tuple[Any, Ahead]:
    """To a server, and what may be asked of it: for a quarter of *slots*."""
    link: Any = SimpleNamespace(number=1, host_slots=slots)
    return link, Ahead(link)


def ask(ahead: Ahead, blocks: int) -> Pending:
    pending = Pending(0.0)
    ahead.take(pending, blocks)
    return pending


def answer(pending: Pending, found: int, state: TaskState = TaskState.READY) -> None:
    status = TaskStatus(1, state, matched_blocks=found)
    pending.reply, pending.status = p.Task(1, p.pack(status)), status


ANY = 99  # which one may ask for that is alone


def room(ahead: Ahead) -> int:
    return max(blocks for blocks in range(1 + ANY) if ahead.fits(blocks))


def test_what_is_asked_for_counts_until_the_answer_and_then_what_was_found() -> None:
    _, ahead = line()
    first, second, third = (ask(ahead, 3) for _ in range(3))
    assert room(ahead) == 1
    answer(first, 1)
    assert room(ahead) == 3
    answer(second, 2, TaskState.PROMOTING)
    third.reply = p.Refused(1, "code", "message", None)
    assert room(ahead) == 7


def test_a_search_may_find_all_until_it_has_ended() -> None:
    _, ahead = line()
    pending = ask(ahead, 9)
    answer(pending, 2, TaskState.SEARCHING)
    assert room(ahead) == 1
    answer(pending, 4, TaskState.PROMOTING)
    assert room(ahead) == 6


def test_what_is_given_back_does_not_count_answered_or_not() -> None:
    _, ahead = line()
    never_answered, first, second = (ask(ahead, 3) for _ in range(3))
    ahead.give_back(never_answered)
    assert room(ahead) == 4
    answer(first, 1)
    assert room(ahead) == 6
    ahead.give_back(first)
    assert room(ahead) == 7
    ahead.give_back(second)
    answer(second, 3)
    assert room(ahead) == ANY


def test_another_server_keeps_nothing_of_what_was_asked_of_the_one_before() -> None:
    link, ahead = line()
    before = ask(ahead, 9)
    link.number, link.host_slots = 2, 80
    assert room(ahead) == ANY
    ask(ahead, 5)
    answer(before, 9)
    ahead.give_back(before)
    assert room(ahead) == 15


def test_what_is_asked_first_of_another_server_counts() -> None:
    link, ahead = line()
    ask(ahead, 9)
    link.number = 2
    ask(ahead, 4)
    assert room(ahead) == 6
