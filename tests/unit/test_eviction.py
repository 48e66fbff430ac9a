"""Which block a full tier gives up first."""

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.index.eviction import LRU


def names(*numbers: int) -> list[bytes]:
    return [bytes([n]) for n in numbers]


def anyone(_: bytes) -> bool:
    return True


def drained(policy: LRU) -> list[int]:
    order = []
    while (victim := policy.victim(anyone)) is not None:
        order.append(victim[0])
        policy.remove(victim)
    return order


def test_least_recently_added_goes_first() -> None:
    policy = LRU()
    for name in names(1, 2, 3):
        policy.add(name)
    assert drained(policy) == [1, 2, 3]


def test_of_blocks_used_together_the_last_of_the_prompt_goes_first() -> None:
    policy = LRU()
    for name in names(1, 2, 3, 9):
        policy.add(name)
    policy.touch(names(1, 2, 3))
    assert drained(policy) == [9, 3, 2, 1]


def test_touch_of_blocks_that_are_not_there_changes_nothing() -> None:
    policy = LRU()
    for name in names(1, 2):
        policy.add(name)
    policy.touch(names(7, 1, 8))
    assert len(policy) == 2
    assert drained(policy) == [2, 1]


def test_victim_stays_until_it_is_removed() -> None:
    policy = LRU()
    policy.add(b"a")
    assert policy.victim(anyone) == b"a"
    assert policy.victim(anyone) == b"a"
    policy.remove(b"a")
    assert policy.victim(anyone) is None


def test_no_victim_where_none_may_leave() -> None:
    policy = LRU()
    for name in names(1, 2, 3):
        policy.add(name)
    assert policy.victim(lambda _: False) is None
    assert len(policy) == 3


def test_removing_what_is_not_there_changes_nothing() -> None:
    policy = LRU()
    policy.add(b"a")
    policy.remove(b"b")
    assert drained(policy) == [97]


def test_search_does_not_pay_twice_for_a_block_that_may_not_leave() -> None:
    policy, asked = LRU(), list[bytes]()
    for name in names(1, 2, 3, 4):
        policy.add(name)

    def may_leave(name: bytes) -> bool:
        asked.append(name)
        return name not in names(1, 2)

    assert policy.victim(may_leave) == bytes([3])
    policy.remove(bytes([3]))
    assert policy.victim(may_leave) == bytes([4])
    assert asked == names(1, 2, 3, 4)


@given(st.lists(st.tuples(st.sampled_from("atr"), st.integers(0, 5)), max_size=50))
def test_order_is_that_of_a_plain_list(script: list[tuple[str, int]]) -> None:
    policy, order = LRU(), list[int]()
    for verb, number in script:
        name = bytes([number])
        if verb == "a" and number not in order:
            policy.add(name)
            order.append(number)
        elif verb == "t":
            policy.touch([name])
            if number in order:
                order.remove(number)
                order.append(number)
        elif verb == "r":
            policy.remove(name)
            order = [n for n in order if n != number]
    assert drained(policy) == order
