"""What cards would be given that no machine of this project has, planned from what such a card says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from transformers import PreTrainedModel

from hf_dsde.cli.options import Dtype, chosen_dtype
from hf_dsde.execution.fused_families import why_not_fused
from hf_dsde.kernels import dispatch, launching
from hf_dsde.kernels.attention_plan import plan_launch
from hf_dsde.utils import tuning
from hf_dsde.utils.tuning import HOPPER, SAFE, tuning_of

CARDS = {
    "V100": ((7, 0), 96, 80),
    "T4": ((7, 5), 64, 40),
    "A100": ((8, 0), 163, 108),
    "A10": ((8, 6), 99, 72),
    "L4": ((8, 9), 99, 58),
    "RTX 4090": ((8, 9), 99, 128),
    "H200": ((9, 0), 227, 132),
    "B200": ((10, 0), 227, 148),
    "RTX 5090": ((12, 0), 99, 170),
}
"""Compute capability; KiB of shared memory that one program can have; multiprocessors."""
WITHOUT_KERNELS = {"V100": "7.0", "T4": "7.5"}
CUDA = torch.device("cuda", 0)


@pytest.fixture(params=CARDS)
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let torch tell of a card, and a model be on it."""
    capability, shared, processors = CARDS[request.param]
    said = SimpleNamespace(shared_memory_per_block_optin=shared << 10, multi_processor_count=processors)
    cached: tuple[Any, ...] = (
        dispatch.why_no_kernels, dispatch.ops_for, launching.shared_memory, tuning._capability,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _=None: said)
    monkeypatch.setattr(dispatch, "_triton_version", lambda: (3, 6))
    monkeypatch.setattr(PreTrainedModel, "device", CUDA)
    for function in cached:
        function.cache_clear()
    yield request.param
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_passes_are_fused_from_ampere_on_and_those_of_older_cards_the_models_own(card: str, dtype: torch.dtype) -> None:
    reason = why_not_fused(tiny_model().to(dtype))
    if card in WITHOUT_KERNELS:
        assert reason == f"cuda:0 has compute capability {WITHOUT_KERNELS[card]}, and the kernels need 8.0"
    else:
        assert reason is None
    assert tuning_of(CUDA) is (HOPPER if card == "H200" else SAFE)


def test_commands_that_are_given_no_dtype_take_one_that_the_card_has(
    card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    expected = torch.float16 if card in WITHOUT_KERNELS else torch.bfloat16
    assert chosen_dtype(None, CUDA) is expected
    assert chosen_dtype(Dtype.BFLOAT16, CUDA) is torch.bfloat16
    assert chosen_dtype(None, torch.device("cpu")) is torch.bfloat16


@pytest.mark.parametrize("size", [2, 4], ids=["half", "single"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_attention_is_planned_within_the_shared_memory_that_the_card_names(card: str, dim: int, size: int) -> None:
    _, kilobytes, processors = CARDS[card]
    shared = launching.shared_memory(CUDA)
    assert shared == kilobytes << 10
    held_dim = 1 << (dim - 1).bit_length()
    for queries in (1, 4, 8, 40, 64, 200):
        for groups, slots in ((8, 16000), (256, 700)):
            plan = plan_launch(queries, groups, slots, dim, size, processors, shared, tuning_of(CUDA).attention)
            assert plan.block_m * plan.query_blocks >= queries
            assert min(plan.block_m, plan.block_n) >= 16
            # A block of keys, one of values, the queries, and the weights between the two products.
            least = size * (2 * plan.block_n * held_dim + plan.block_m * (held_dim + plan.block_n))
            assert least <= shared
            assert least + (plan.stages - 2) * size * 2 * plan.block_n * held_dim <= shared
