"""The rules for what a store holds: values, keys, buffers, room."""

import pytest

from kvstrata.core.errors import InvariantViolated
from kvstrata.core.types import Read, Write
from kvstrata.storage.store import Store
from kvstrata.testing.samples import ONE, OTHER, dirty, fetch, key
from kvstrata.testing.subject import StoreSubject, only_if


class ValueRules(StoreSubject):
    """One caller, a healthy store."""

    # Values

    def test_a_stored_block_is_read_back_whole(self, store: Store) -> None:
        """What was ``STORED`` exists, and a read fills the whole buffer with its bytes."""
        assert self._put(store, 1, 2, 3) == [Write.STORED] * 3
        assert store.exists([key(1), key(2), key(3)]) == [True] * 3
        for number in (1, 2, 3):
            self._assert_holds(store, key(number), number)

    def test_a_missing_block_is_a_miss(self, store: Store) -> None:
        """What was never written is ``False``, ``MISS`` and ``False``: no error."""
        self._put(store, 1)
        assert store.exists([key(2)]) == [False]
        assert fetch(store, key(2)) is Read.MISS
        assert store.remove([key(2)]) == [False]

    def test_an_empty_batch_does_nothing(self, store: Store) -> None:
        """No keys, no results."""
        assert store.exists([]) == []
        assert store.read_into([], []) == []
        assert store.write([], [], []) == []
        assert store.remove([]) == []

    def test_answers_are_in_the_order_of_the_keys(self, store: Store) -> None:
        """Each key has its own answer and its own buffer, wherever misses are in the batch."""
        self._put(store, 1, 2, 3)
        numbers = [3, 9, 1, 8, 2]
        wanted = [key(number) for number in numbers]
        buffers = [dirty(store.statistics().block_bytes) for _ in numbers]
        assert store.exists(wanted) == [True, False, True, False, True]
        fates = store.read_into(wanted, buffers)
        assert fates == [Read.HIT, Read.MISS, Read.HIT, Read.MISS, Read.HIT]
        for position in (0, 2, 4):
            assert buffers[position] == self._value(store, numbers[position])

    def test_keys_and_values_of_zeros_are_keys_and_values(self, store: Store) -> None:
        """No key and no value is special: neither all zeros nor all ones."""
        length = store.statistics().block_bytes
        for number, byte in enumerate((b"\x00", b"\xff")):
            content = bytes(length) if number == 0 else self._value(store, 1)
            wanted = byte * len(key(0))
            assert store.write([wanted], [wanted], [memoryview(content)]) == [Write.STORED]
            assert fetch(store, wanted) == content

    def test_namespaces_do_not_mix(self, store: Store) -> None:
        """The same block key in another namespace is another block, in every call."""
        mine, other = key(1, ONE), key(1, OTHER)
        self._put_value(store, mine, 1)
        assert store.exists([other]) == [False]
        assert fetch(store, other) is Read.MISS
        assert store.remove([other]) == [False]
        assert self._put_value(store, other, 2) is Write.STORED
        self._assert_holds(store, mine, 1)
        assert store.remove([mine]) == [True]
        self._assert_holds(store, other, 2)

    def test_a_namespace_is_dropped_whole_and_alone(self, store: Store) -> None:
        """``drop_namespace`` forgets every block of one namespace, and says how many."""
        for number in (1, 2):
            self._put_value(store, key(number, ONE), number)
        self._put_value(store, key(1, OTHER), 3)
        assert store.drop_namespace(ONE) == 2
        assert store.drop_namespace(ONE) == 0
        assert fetch(store, key(1, ONE)) is Read.MISS
        self._assert_holds(store, key(1, OTHER), 3)
        assert self._put_value(store, key(1, ONE), 4) is Write.STORED

    def test_a_parent_may_be_missing(self, store: Store) -> None:
        """A parent is kept with the block and means nothing to the store."""
        content = memoryview(self._value(store, 1))
        parents = [None, key(1), key(99)]
        wanted = [key(1), key(2), key(3)]
        assert store.write(wanted, parents, [content] * 3) == [Write.STORED] * 3
        assert store.remove([key(1)]) == [True]
        self._assert_holds(store, key(2), 1)

    @only_if(lambda suite: suite.traits.variable)
    def test_a_variable_store_keeps_the_length(self, store: Store) -> None:
        """A shorter value is kept at its length and read into the first bytes of a buffer."""
        length = store.statistics().block_bytes
        lengths = [1, 7, length // 2, length - 1, length]
        values = [self.value(number, each) for number, each in enumerate(lengths)]
        wanted = [key(number) for number in range(len(lengths))]
        fates = store.write(wanted, [None] * len(wanted), [memoryview(v) for v in values])
        assert fates == [Write.STORED] * len(wanted)
        for each, value in zip(wanted, values, strict=True):
            exact, longer = dirty(len(value)), dirty(length)
            assert store.read_into([each, each], [exact, longer]) == [Read.HIT] * 2
            assert exact == value
            assert longer[: len(value)] == value

    # Overwriting and removing

    def test_a_key_that_is_there_keeps_its_value(self, store: Store) -> None:
        """A second write of a key is ``EXISTS`` and changes nothing."""
        self._put_value(store, key(1), 1)
        assert self._put_value(store, key(1), 2) is Write.EXISTS
        self._assert_holds(store, key(1), 1)

    def test_a_removed_block_is_gone_and_may_be_written_anew(self, store: Store) -> None:
        """After ``remove`` the key is free: a new value takes its place, never the old one."""
        self._put(store, 1, 2)
        assert store.remove([key(1)]) == [True]
        assert store.exists([key(1)]) == [False]
        assert fetch(store, key(1)) is Read.MISS
        assert self._put_value(store, key(1), 3) is Write.STORED
        self._assert_holds(store, key(1), 3)
        self._assert_holds(store, key(2), 2)

    def test_a_batch_may_hold_a_key_twice(self, store: Store) -> None:
        """The first writes or removes, the second finds that done; a read fills both buffers."""
        values = [memoryview(self._value(store, number)) for number in (1, 2)]
        assert store.write([key(1)] * 2, [None] * 2, values) == [Write.STORED, Write.EXISTS]
        buffers = [dirty(len(values[0])) for _ in range(2)]
        assert store.read_into([key(1)] * 2, buffers) == [Read.HIT] * 2
        assert buffers == [values[0]] * 2
        assert store.remove([key(1)] * 2) == [True, False]

    # Buffers

    def test_the_buffer_of_a_write_is_not_kept(self, store: Store) -> None:
        """The caller may change its buffer as soon as the call has returned."""
        buffer = memoryview(bytearray(self._value(store, 1)))
        store.write([key(1)], [None], [buffer])
        buffer[:] = b"\xdd" * len(buffer)
        self._assert_holds(store, key(1), 1)

    def test_the_buffer_of_a_read_is_not_kept(self, store: Store) -> None:
        """What the caller does to the bytes that it has read does not reach the store."""
        self._put(store, 1)
        buffer = dirty(store.statistics().block_bytes)
        store.read_into([key(1)], [buffer])
        buffer[:] = b"\xdd" * len(buffer)
        self._assert_holds(store, key(1), 1)

    def test_a_buffer_may_be_read_only_and_lie_anywhere(self, store: Store) -> None:
        """A write needs no writable buffer, and no call an aligned one."""
        content = self._value(store, 1)
        shifted = memoryview(bytearray(b"\xee" + content))[1:]
        read_only = [memoryview(content), shifted.toreadonly()]
        assert store.write([key(1), key(2)], [None] * 2, read_only) == [Write.STORED] * 2
        shifted[:] = b"\xee" * len(content)
        assert store.read_into([key(2)], [shifted]) == [Read.HIT]
        assert shifted == content

    def test_a_buffer_of_a_wrong_length_is_a_bug(self, store: Store) -> None:
        """Too long, or too short unless the store is variable, raises ``InvariantViolated``."""
        size = store.statistics()
        wrong = [0, size.block_bytes + 1] + ([] if size.variable else [size.block_bytes - 1])
        self._put(store, 1)
        for length in wrong:
            with pytest.raises(InvariantViolated):
                store.write([key(2)], [None], [dirty(length)])
            with pytest.raises(InvariantViolated):
                store.read_into([key(1)], [dirty(length)])
        assert store.exists([key(1), key(2)]) == [True, False]

    @only_if(lambda suite: suite.traits.variable)
    def test_a_buffer_shorter_than_its_value_is_a_bug(self, store: Store) -> None:
        """A variable store raises ``InvariantViolated`` rather than serving a part."""
        length = store.statistics().block_bytes
        self._put(store, 1)
        with pytest.raises(InvariantViolated):
            store.read_into([key(1)], [dirty(length - 1)])
        self._assert_holds(store, key(1), 1)

    def test_a_key_of_a_wrong_length_is_a_bug(self, store: Store) -> None:
        """Cut or padded keys could meet: they raise ``InvariantViolated``."""
        content = memoryview(self._value(store, 1))
        for wrong in (b"", key(1)[:-1], key(1) + b"\x00"):
            with pytest.raises(InvariantViolated):
                store.write([wrong], [None], [content])
            with pytest.raises(InvariantViolated):
                store.read_into([wrong], [dirty(len(content))])

    # Room

    def test_the_statistics_bear_the_traits_out(self, store: Store) -> None:
        """A store is *variable* if it says so, and has a capacity if it is ever full."""
        size = store.statistics()
        assert size.variable == self.traits.variable
        assert size.capacity_blocks > 0 or not self.traits.bounded

    @only_if(lambda suite: suite.traits.bounded)
    def test_a_full_store_says_so(self, store: Store) -> None:
        """Blocks that fit are ``STORED``, the others ``FULL``; nothing makes room by itself."""
        capacity = store.statistics().capacity_blocks
        numbers = range(1, capacity + 3)
        assert self._put(store, *numbers) == [Write.STORED] * capacity + [Write.FULL] * 2
        assert store.exists([key(number) for number in numbers]) == [True] * capacity + [False] * 2
        for number in numbers[:capacity]:
            self._assert_holds(store, key(number), number)
        assert self._put(store, 1, capacity + 1) == [Write.EXISTS, Write.FULL]

    @only_if(lambda suite: suite.traits.bounded)
    def test_a_removed_block_makes_room_for_another(self, store: Store) -> None:
        """Room is not lost, however often it changes hands."""
        capacity = store.statistics().capacity_blocks
        self._put(store, *range(1, capacity + 1))
        for number in range(capacity + 1, 3 * capacity):
            assert store.remove([key(number - capacity)]) == [True]
            assert self._put(store, number) == [Write.STORED]
            self._assert_holds(store, key(number), number)

    @only_if(lambda suite: suite.traits.counts)
    def test_statistics_count_what_is_there(self, store: Store) -> None:
        """``blocks`` follows writes and removals; sizes stay."""
        before = store.statistics()
        self._put(store, 1, 2, 3, 1)
        store.remove([key(2), key(9)])
        assert before.blocks == 0
        assert before.corrupt_blocks == 0
        assert store.statistics() == before._replace(blocks=2)
