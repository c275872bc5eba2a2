"""The waiting queue and the queue of blocks against naive models of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.free_queue import FreeQueue
from engine.waiting_queue import WaitingQueue

NAMES = st.sampled_from("abcdefgh")
LEVELS = st.integers(-2, 2)
ENTRIES = st.lists(st.tuples(NAMES, LEVELS), max_size=8, unique_by=lambda entry: entry[0])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), NAMES, LEVELS),
        st.tuples(st.just("prepend"), NAMES, LEVELS),
        st.tuples(st.just("remove"), NAMES),
        st.tuples(st.just("refill"), ENTRIES),
        st.tuples(st.just("copy")),
    ),
    max_size=40,
)
NUM_BLOCKS = 7


class Naive:
    """A list of (level, id), searched and sorted as needed."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, str]] = []

    def __iter__(self):
        return (name for _, name in sorted(self.entries, key=lambda entry: entry[0]))

    def append(self, name: str, level: int) -> None:
        self._check_absent(name)
        self.entries.append((level, name))

    def prepend(self, name: str, level: int) -> None:
        self._check_absent(name)
        self.entries.insert(0, (level, name))

    def remove(self, name: str) -> None:
        if name not in list(self):
            raise ValueError
        self.entries = [entry for entry in self.entries if entry[1] != name]

    def refill(self, entries: list[tuple[str, int]]) -> None:
        self.entries = [(level, name) for name, level in entries]

    def copy(self) -> Naive:
        twin = Naive()
        twin.entries = list(self.entries)
        return twin

    def _check_absent(self, name: str) -> None:
        if name in list(self):
            raise ValueError


def assert_same(queue: WaitingQueue, model: Naive) -> None:
    assert list(queue) == list(model)
    assert len(queue) == len(model.entries)
    assert {name for name in "abcdefgh" if name in queue} == set(model)


def outcome(queue: WaitingQueue | Naive, name: str, *arguments: object) -> type | None:
    """Do it; the error, if it is refused."""
    try:
        getattr(queue, name)(*arguments)
    except ValueError:
        return ValueError
    return None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(operations=OPERATIONS)
def test_the_waiting_queue_does_what_a_sorted_list_does(operations):
    queue, model = WaitingQueue(), Naive()
    older: list[tuple[WaitingQueue, Naive]] = []
    for name, *arguments in operations:
        if name == "copy":
            # The work goes on with the copy; the original must stay as it is.
            older.append((queue, model))
            queue, model = queue.copy(), model.copy()
        else:
            assert outcome(queue, name, *arguments) == outcome(model, name, *arguments)
        assert_same(queue, model)
    for pair in older:
        assert_same(*pair)


def test_a_request_waits_only_once_and_leaves_only_once():
    queue = WaitingQueue()
    queue.append("a", 1)
    with pytest.raises(ValueError, match="'a' waits already"):
        queue.prepend("a", 0)
    queue.remove("a")
    with pytest.raises(ValueError, match="'a' does not wait"):
        queue.remove("a")
    assert list(queue) == []


def test_a_level_that_emptied_can_be_filled_again():
    queue = WaitingQueue()
    for name, level in (("a", 2), ("b", 0), ("c", 1)):
        queue.append(name, level)
    queue.remove("c")
    queue.append("d", 1)
    queue.prepend("e", 2)
    assert list(queue) == ["b", "d", "e", "a"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    empty=st.booleans(),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["append", "remove", "copy"]), st.integers(0, NUM_BLOCKS - 1)
        ),
        max_size=50,
    ),
)  # fmt: skip
def test_the_queue_of_blocks_does_what_a_list_does(empty, operations):
    queue = FreeQueue(NUM_BLOCKS, empty=empty)
    model = [] if empty else list(range(NUM_BLOCKS))
    older: list[tuple[FreeQueue, list[int]]] = []
    for name, block in operations:
        if name == "copy":
            older.append((queue, list(model)))
            queue = queue.copy()
        elif (block in model) == (name == "append"):
            with pytest.raises(ValueError, match=f"block {block} is "):
                getattr(queue, name)(block)
        else:
            getattr(queue, name)(block)
            getattr(model, name)(block)
        queue.check_integrity()
        assert list(queue) == model
        assert len(queue) == len(model)
        assert [b for b in range(NUM_BLOCKS) if b in queue] == sorted(model)
    for twin, blocks in older:
        assert list(twin) == blocks


def test_a_broken_link_is_noticed():
    queue = FreeQueue(4)
    queue._previous[2] = 0
    with pytest.raises(AssertionError, match="links are broken at block 1"):
        queue.check_integrity()
