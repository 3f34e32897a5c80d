"""Building in the background: order, bounds, errors in their place, and threads that end."""

from __future__ import annotations

import itertools
import threading
import time
import weakref

import pytest

from hf_dsde.batch.prefetch import in_groups, prefetched


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "hf-dsde-prefetch"]


def _wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@pytest.mark.parametrize("ahead", [1, 3, 100])
@pytest.mark.parametrize("count", [0, 50])
def test_results_come_in_the_order_of_the_source(count, ahead):
    assert list(prefetched(range(count), lambda item: item * item, ahead)) == [item * item for item in range(count)]


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_exactly_the_given_number_of_results_is_made_in_advance(ahead):
    pulled = []

    def source():
        for item in itertools.count():
            pulled.append(item)
            yield item

    results = prefetched(source(), str, ahead)
    assert next(results) == "0"
    assert _wait_until(lambda: len(pulled) == 1 + ahead)
    time.sleep(0.05)
    assert len(pulled) == 1 + ahead
    assert next(results) == "1"
    assert _wait_until(lambda: len(pulled) == 2 + ahead)
    results.close()


def test_source_and_build_run_in_one_other_thread():
    seen = set()

    def source():
        for _ in range(5):
            seen.add(threading.get_ident())
            yield None

    list(prefetched(source(), lambda _: seen.add(threading.get_ident()), 2))
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_an_error_of_the_source_is_raised_behind_the_rows_before_it():
    def source():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    results = prefetched(source(), str, 10)
    assert [next(results), next(results)] == ["1", "2"]
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)
    assert not _threads()


def test_an_error_of_build_and_of_a_source_that_cannot_be_iterated_is_raised():
    with pytest.raises(ZeroDivisionError):
        list(prefetched([1, 0], lambda item: 1 / item, 2))
    with pytest.raises(TypeError, match="not iterable"):
        list(prefetched(3, str, 2))


def test_a_stray_stop_iteration_does_not_end_the_results_quietly():
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(prefetched([1, 2], lambda _: next(iter(())), 2))


@pytest.mark.parametrize("how", ["close", "forget"])
def test_leaving_early_ends_a_thread_that_waits_for_its_turn(how):
    results = prefetched(itertools.count(), str, 1)
    next(results)
    assert len(_threads()) == 1
    started = time.monotonic()
    if how == "close":
        results.close()
    else:
        del results
    assert time.monotonic() - started < 0.5
    assert not _threads()


def test_closing_does_not_wait_forever_for_a_source_that_blocks(monkeypatch):
    monkeypatch.setattr("hf_dsde.batch.prefetch._LONGEST_WAIT", 0.05)
    release = threading.Event()

    def source():
        yield 1
        release.wait()
        yield 2

    results = prefetched(source(), str, 4)
    next(results)
    results.close()
    (thread,) = _threads()
    assert thread.daemon
    release.set()
    assert _wait_until(lambda: not _threads())


def test_no_thread_is_started_before_the_first_result_is_asked_for():
    prefetched(range(3), str, 2)
    assert not _threads()


def test_a_result_that_was_handed_over_is_not_kept_while_the_next_is_waited_for():
    class Large:
        pass

    made, go_on = [], threading.Event()

    def build(item):
        if item == 1:
            go_on.wait()
        large = Large()
        made.append(weakref.ref(large))
        return large

    results = prefetched(range(2), build, 1)
    next(results)
    waiting = threading.Thread(target=next, args=(results,))
    waiting.start()
    try:
        assert _wait_until(lambda: made[0]() is None)
    finally:
        go_on.set()
        waiting.join()
    results.close()


@pytest.mark.parametrize("ahead", [0, -1, True, 1.5, None])
def test_the_number_in_advance_is_checked_at_the_call(ahead):
    with pytest.raises((TypeError, ValueError), match="`ahead`"):
        prefetched([], str, ahead)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 6, 7])
def test_groups_hold_all_items_in_order_and_only_the_last_is_smaller(count):
    groups = list(in_groups(range(count), 3))
    assert [item for group in groups for item in group] == list(range(count))
    assert all(len(group) == 3 for group in groups[:-1])
    assert all(groups)


def test_an_error_comes_after_the_group_of_the_items_before_it():
    def source():
        yield from (1, 2, 3, 4)
        raise OSError("the disk is gone")

    groups = in_groups(source(), 3)
    assert [next(groups), next(groups)] == [[1, 2, 3], [4]]
    with pytest.raises(OSError, match="the disk is gone"):
        next(groups)
