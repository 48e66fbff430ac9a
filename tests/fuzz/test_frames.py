"""Whatever a client says, the server stays as it was."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.caches import BLOCK_BYTES, key
from tests.fuzz.script import EDGES, HELLO, NAMESPACE, said
from tests.fuzz.victim import Victim

from kvstrata.manager.tasks import TaskState
from kvstrata.server import protocol as p


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    made = Victim(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.close()


@given(st.binary(max_size=2000))
def test_noise(victim: Victim, noise: bytes) -> None:
    victim.hear(lambda _: iter([noise]))


@given(st.binary(max_size=300))
def test_noise_after_a_hello(victim: Victim, noise: bytes) -> None:
    replies = victim.hear(lambda _: iter([p.encode(HELLO), noise]))
    assert isinstance(replies[0], p.Welcome)


@given(st.binary(max_size=600))
def test_messages_of_any_content_in_any_order(victim: Victim, data: bytes) -> None:
    victim.hear(partial(said, data))


edges = st.sampled_from(EDGES) | st.integers(-300, 300)
namespaces = st.sampled_from([NAMESPACE, NAMESPACE, b"", b"n" * 15, b"n" * 16])
joined = st.lists(st.integers(0, 11), max_size=12).map(lambda path: b"".join(map(key, path)))
names = st.sampled_from(["", "r", "r-1"])
ids = st.lists(edges, max_size=5) | st.just([0] * 4097)
messages: st.SearchStrategy[p.Request] = st.one_of(
    st.builds(p.Mapped, edges),
    st.builds(p.GetMatch, edges, namespaces, joined, names, edges),
    st.builds(
        p.PutMatch,
        edges,
        namespaces,
        joined,
        st.sampled_from([b"", key(0), b"short"]),
        names,
        edges,
    ),
    st.builds(p.Launch, ids),
    st.builds(p.Complete, ids),
    st.builds(p.CompletePart, edges, edges),
    st.builds(p.Fail, ids),
    st.builds(p.Cancel, ids),
    st.builds(p.TryWait, edges, ids),
    st.builds(p.Prefetch, edges, namespaces, joined),
    st.builds(p.Reset, edges, namespaces),
    st.builds(p.Register, namespaces, st.dictionaries(st.text(max_size=5), st.text(max_size=5))),
    st.builds(p.Stats, edges),
    st.builds(p.Measured, edges | st.floats()),
    st.builds(p.Explain, edges, st.text(max_size=5)),
    st.builds(p.Pin, edges, namespaces, joined, edges | st.floats()),
    st.builds(p.PinRequest, edges, names, edges | st.floats()),
    st.builds(p.Unpin, edges, edges),
    st.builds(p.Workers, edges),
    st.builds(p.Ping, edges),
)


@given(st.lists(messages, max_size=20), st.data())
def test_valid_frames_cut_and_changed(
    victim: Victim, script: list[p.Request], data: st.DataObject
) -> None:
    stream = p.encode(HELLO) + b"".join(p.encode(message) for message in script)
    start = data.draw(st.integers(0, len(stream)))
    end = data.draw(st.integers(start, min(len(stream), start + 8)))
    noise = data.draw(st.binary(max_size=8))
    victim.hear(lambda _: iter([stream[:start] + noise + stream[end:]]))


@given(st.lists(messages, max_size=12))
def test_each_question_is_answered_once_and_in_order(
    victim: Victim, script: list[p.Request]
) -> None:
    """Resets among themselves, and the others among themselves."""
    asked, resets = [HELLO.seq], set[int]()
    for message in script:
        if hasattr(message, "seq"):
            message.seq = len(asked)
            asked.append(message.seq)
        if isinstance(message, p.Reset):
            resets.add(message.seq)
    replies = victim.hear(lambda _: map(p.encode, [HELLO, *script]))
    answered = [reply.seq for reply in replies if hasattr(reply, "seq")]
    for some in (resets, set(asked) - resets):
        in_order = [seq for seq in asked if seq in some]
        found = [seq for seq in answered if seq in some]
        assert found == in_order[: len(found)]
    assert set(answered) <= set(asked)


def test_what_the_fuzzers_say_is_understood(victim: Victim) -> None:
    """Else all of the above would prove little: a whole save and a whole load are within reach."""
    for _ in range(8):  # what earlier clients have left unfinished is gone then
        victim.hear(lambda _: iter([]))
    asked, own = key(1) + key(2), b"own".ljust(16)

    def script(tasks: Sequence[int]) -> Iterator[bytes]:
        yield p.encode(HELLO)
        yield p.encode(p.PutMatch(1, own, asked, b""))
        yield p.encode(p.Launch([*tasks])) + p.encode(p.Complete([*tasks]))
        yield p.encode(p.GetMatch(2, own, asked))
        yield p.encode(p.Cancel([*tasks])) + p.encode(p.Reset(3, own))

    clean = [p.encode(HELLO), p.encode(p.Reset(1, own)), p.encode(p.Drain(2, False))]
    victim.hear(lambda _: iter(clean))
    welcome, put, get, dropped = victim.hear(script)
    assert isinstance(welcome, p.Welcome)
    assert welcome.slot_bytes == BLOCK_BYTES
    assert isinstance(put, p.Task)
    assert isinstance(get, p.Task)
    assert p.unpack(put.status).missing == [0, 1]
    assert (get.status.state, get.status.matched_blocks) == (TaskState.READY, 2)
    assert dropped == p.Number(3, 2)


@pytest.mark.slow
def test_atheris_finds_nothing_in_a_few_seconds(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.fuzz_frames"),
            *("-max_total_time=5", "-max_len=512", "-len_control=0", "-timeout=30"),
            f"-artifact_prefix={tmp_path}/",
        ],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "DONE" in run.stderr
    assert list(tmp_path.iterdir()) == []
