"""Which constants a device gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_dsde.utils import tuning
from hf_dsde.utils.tuning import HOPPER, SAFE, Tuning, tuning_for, tuning_of


@pytest.mark.parametrize(
    ("capability", "row"),
    [((9, 0), HOPPER), ((8, 0), SAFE), ((8, 9), SAFE), ((10, 0), SAFE), ((12, 0), SAFE), (None, SAFE)],
)
def test_a_capability_has_its_row_and_an_unknown_one_the_safe_row(capability: tuple[int, int], row: Tuning) -> None:
    assert tuning_for(capability) is row


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An A100 and a Hopper, which is the current one; gives which of them were asked."""
    asked: list[int] = []

    def capability(index: int) -> tuple[int, int]:
        asked.append(index)
        return ((8, 0), (9, 0))[index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    tuning._capability.cache_clear()
    yield asked
    tuning._capability.cache_clear()


def test_each_device_is_asked_once(gpus: list[int]) -> None:
    for _ in range(3):
        assert tuning_of(torch.device("cuda", 0)) is SAFE
        assert tuning_of(torch.device("cuda", 1)) is HOPPER
        assert tuning_of(torch.device("cuda")) is HOPPER
    assert sorted(gpus) == [0, 1]


def test_a_number_of_amd_s_is_no_capability(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert tuning_of(torch.device("cuda", 1)) is SAFE
    assert gpus == []


def test_a_hopper_s_launches_are_rehearsed_where_there_is_no_gpu() -> None:
    assert tuning_of(torch.device("cpu")) is HOPPER


@pytest.mark.parametrize("row", [HOPPER, SAFE], ids=["Hopper", "safe"])
def test_tables_ascend_and_have_an_entry_for_any_size(row: Tuning) -> None:
    for plans in (row.linears_plans, row.gated_plans):
        assert list(plans) == sorted(plans)
        assert max(plans) > 1 << 40
    assert list(row.stored_sizes) == sorted(set(row.stored_sizes))


def test_the_safe_row_leaves_products_to_the_library_and_launches_nothing_larger_than_a_hopper() -> None:
    assert not SAFE.paying
    assert SAFE.stored_sizes[-1] <= HOPPER.stored_sizes[-1]
    for name in ("branch_tokens", "whole_row", "wide_pass_tokens"):
        assert getattr(SAFE, name) <= getattr(HOPPER, name)
