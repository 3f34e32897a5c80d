"""Rows that are free wait for others when that spares passes, and not for long."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from hf_dsde.batch.admission import Admission, Refilling
from hf_dsde.batch.requests import RejectedRow, Request


def job(rows: int, lengths: list[int], *, at_once: bool) -> tuple[int, int]:
    """Rounds of a job, and passes that stored prompts; every row emits a token a round."""
    waiting, left, rule = list(lengths[rows:]), lengths[:rows], Refilling(rows)
    rounds = passes = 0
    while any(left):
        rounds += 1
        ended = sum(n == 1 for n in left)
        left = [max(n - 1, 0) for n in left]
        free = left.count(0)
        due = rule.is_due(free, ended)
        if (due or (at_once and free)) and waiting:
            passes += 1
            left = [n or (waiting.pop(0) if waiting else 0) for n in left]
    assert not waiting
    return rounds, passes


def lengths_of(texts: int, longest: int) -> list[int]:
    numbers = random.Random(0)
    return [numbers.randint(1, longest) for _ in range(texts)]


@pytest.mark.parametrize("longest", [32, 256, 1024])
@pytest.mark.parametrize("rows", [32, 128])
def test_many_rows_spend_fewer_rounds_and_passes_together(rows: int, longest: int) -> None:
    lengths = lengths_of(20 * rows, longest)
    waited, at_once = job(rows, lengths, at_once=False), job(rows, lengths, at_once=True)
    assert waited[1] < 0.6 * at_once[1]
    assert sum(waited) < sum(at_once)


@pytest.mark.parametrize("longest", [64, 256])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_few_rows_lose_little(rows: int, longest: int) -> None:
    lengths = lengths_of(40 * rows, longest)
    assert sum(job(rows, lengths, at_once=False)) <= 1.02 * sum(job(rows, lengths, at_once=True))


def test_a_row_that_waits_costs_no_more_than_a_round_of_all() -> None:
    rule, lost = Refilling(100), 0.0
    for ended in (1, *[0] * 200):
        lost += 0.01
        if rule.is_due(1, ended):
            break
    assert lost <= 1.01


def test_nobody_waits_when_all_rows_are_free() -> None:
    assert Refilling(100).is_due(100, 1)
    assert Refilling(1).is_due(1, 1)
    assert not Refilling(100).is_due(0, 0)


def source(texts: int, taken: list[int]) -> Iterator[Request | RejectedRow]:
    """Requests with a row that is none between the second and the third; says which were asked for."""
    for index in range(texts):
        taken.append(index)
        if index == 2:
            yield RejectedRow(99, "no text")
        yield Request(index, [index], 4)


def test_how_many_are_left_is_known_of_what_is_at_hand() -> None:
    taken: list[int] = []
    admission = Admission(source(6, taken), 0, at_hand=True)
    assert [request.index for request in admission.take(1)] == [0]
    assert admission.left(3) == 3
    assert taken == [0, 1, 2, 3], "no more than it takes to say so"
    assert [row.index for row in admission.rejected] == [99]
    assert admission.left(9) == 5
    assert not admission.exhausted
    assert [request.index for request in admission.take(9)] == [1, 2, 3, 4, 5]
    assert admission.exhausted
    assert admission.left(1) == 0


def test_nobody_waits_to_know_how_many_are_left() -> None:
    taken: list[int] = []
    admission = Admission(source(2, taken), 0)
    assert admission.take(1)
    assert admission.left(100) == math.inf
    assert taken == [0]
    assert len(admission.take(2)) == 1
    assert admission.left(1) == 0
    assert admission.exhausted
