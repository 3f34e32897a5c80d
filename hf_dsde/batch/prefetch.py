"""Builds requests in the background, so that no model waits for a tokenizer or a disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from hf_dsde.utils.checks import check_integer

T = TypeVar("T")
R = TypeVar("R")

_LONGEST_WAIT = 1.0
"""Seconds that closing waits for the thread. Only a source that blocks in its own `next` makes use of them."""


_END = object()


def in_groups(source: Iterable[T], size: int) -> Iterator[list[T]]:
    """What a source gives, `size` items at a time; an error comes after the items that came before it."""
    group: list[T] = []
    try:
        for item in source:
            group.append(item)
            if len(group) == size:
                yield group
                group = []
    except Exception:
        if group:
            yield group
        raise
    if group:
        yield group


def prefetched(source: Iterable[T], build: Callable[[T], R], ahead: int) -> Iterator[R]:
    """What `build` makes of each item of the source, in its order, up to `ahead` of them made in advance.

    One thread does the work. Tokenizers let go of Python's global lock while they work, and the models' process spends
    its time waiting for a device: a thread is enough, and nothing has to be pickled.

    The thread starts when the first item is asked for and ends with the source, with an error, or when the iterator is
    closed or forgotten. A source that blocks in its own `next` at that moment, such as a terminal, cannot be
    interrupted; its thread ends as soon as the source returns, and does not keep the process alive.

    Args:
        source: Any iterable; it is iterated in the thread.
        build: Makes the result of one item; called in the thread, one item at a time. For rows with their indices:
            `prefetched(enumerate(rows), lambda row: builder.build(*row), ahead=64)`.
        ahead: The most results that are made, or being made, before they are asked for; at least 1.

    Raises:
        BaseException: Whatever the source or `build` raises, at its place after the results that came before it.
    """
    check_integer("ahead", ahead, 1)
    return _prefetched(source, build, ahead)


def _prefetched(source: Iterable[T], build: Callable[[T], R], ahead: int) -> Iterator[R]:
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Slots, rather than a bound on the queue: they also count the result that is being made, and closing can hand out
    # one more, so that a thread that waits for its turn wakes up without ever having to poll.
    slots = threading.Semaphore(ahead)
    closed = threading.Event()

    def work() -> None:
        """Fill the queue until the source ends, fails, or nobody wants more."""
        made: Future[R] = Future()
        try:
            items = iter(source)
            while slots.acquire() and not closed.is_set() and (item := next(items, _END)) is not _END:
                made.set_result(build(item))  # type: ignore[arg-type]  # `next` with a default widens the type
                results.put(made)
                made = Future()
        except BaseException as error:  # noqa: BLE001  it is raised again where the results are read
            made.set_exception(error)
            results.put(made)
        results.put(_END)

    thread = threading.Thread(target=work, name="hf-dsde-prefetch", daemon=True)
    thread.start()
    try:
        while (made := results.get()) is not _END:
            slots.release()
            value = made.result()
            del made  # A finished request must not live on here while the next one is waited for.
            yield value
            del value
    finally:
        closed.set()
        slots.release()
        thread.join(_LONGEST_WAIT)
