"""The gate: who is inside keeps others from being alone, and the other way round."""

import threading

from tests.caches import PATIENCE_SECONDS, eventually

from kvstrata.manager.gate import Gate


def test_many_are_inside_together() -> None:
    gate, both = Gate(), threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def go_in() -> None:
        with gate.passing():
            both.wait()

    other = threading.Thread(target=go_in)
    other.start()
    go_in()
    other.join(PATIENCE_SECONDS)


def test_nobody_is_alone_while_one_is_inside_and_the_gate_opens_again() -> None:
    gate = Gate()
    with gate.passing(), gate.shut(0.01) as is_alone:
        assert not is_alone
    with gate.shut(0) as is_alone:
        assert is_alone
    with gate.passing():
        pass


def test_one_at_a_time_is_alone() -> None:
    gate = Gate()
    with gate.shut(0) as first:
        with gate.shut(0.01) as second:
            assert (first, second) == (True, False)
        with gate.shut(0.01) as third:  # the one that gave up has not taken the place
            assert not third
    with gate.shut(0) as is_alone:
        assert is_alone


def test_who_wants_to_be_alone_is_not_overtaken() -> None:
    """Else a writer that never pauses would put off a reset for ever."""
    gate, order, leave = Gate(), list[str](), threading.Event()

    def inside() -> None:
        with gate.passing():
            order.append("inside")
            assert leave.wait(PATIENCE_SECONDS)

    def alone() -> None:
        with gate.shut(PATIENCE_SECONDS) as is_alone:
            assert is_alone
            order.append("alone")

    def late() -> None:
        with gate.passing():
            order.append("late")

    threads = [threading.Thread(target=inside)]
    threads[0].start()
    eventually(lambda: order == ["inside"], "nobody goes in")
    for target, waiting in ((alone, lambda: gate._shutting == 1), (late, lambda: True)):
        threads.append(threading.Thread(target=target))
        threads[-1].start()
        eventually(waiting, "nobody waits")
    leave.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert order == ["inside", "alone", "late"]
