"""A kernel that a device cannot run is replaced alone, with one warning; and what replaces attention."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_cases import ATTENTION_CASES, AttentionCase, make_attention, slow_attention, without_positions
from recorded import NotingCapture
from tiny_models import noisy_copy, ragged_batch, tiny_model

import hf_dsde
from hf_dsde.execution import create_runner as runners
from hf_dsde.kernels import fitting, reference
from hf_dsde.kernels.attention_plan import plan_launch
from hf_dsde.kernels.fitting import IN_TORCH, FittedOps, KernelWarning, does_not_fit, launch_that_fits
from hf_dsde.kernels.padded_attention import padded_attention


class OutOfResources(Exception):  # noqa: N818 - Triton's name
    """As Triton's."""

    __module__ = "triton.runtime.errors"


@pytest.fixture(autouse=True)
def _nothing_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_left_out", "_warned"):
        monkeypatch.setattr(fitting, name, set())
    monkeypatch.setattr(fitting, "_smaller", {})


def kernels_without(name: str, limit: int = 0, failure: Exception | None = None) -> Any:
    """Kernels that compute as torch does, of which one fails where its first tensor's last dimension is above a limit.

    Its launches are listed in `tried`.
    """
    kernels: Any = ModuleType("kernels")
    for each in (*IN_TORCH, "pays", "side_by_side"):
        setattr(kernels, each, getattr(reference, each))
    kernels.tried = []

    def broken(first: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        kernels.tried.append(first.shape)
        if first.shape[-1] > limit:
            raise failure or OutOfResources("shared memory, Required: 147456, Hardware limit: 101376.")
        return getattr(reference, name)(first, *arguments, **named)

    setattr(kernels, name, broken)
    return kernels


@pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")
@pytest.mark.parametrize("name", ["rms_norm", "ragged_attention", "rotate_and_store", "gated_linear"])
def test_a_call_goes_on_recorded_and_fused_without_the_kernel_that_does_not_fit(
    name: str, recording: list[NotingCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = kernels_without(name)
    monkeypatch.setattr(runners, "ops_for", lambda device: FittedOps(kernels))
    target = hf_dsde.enable(tiny_model(num_hidden_layers=1))
    call: dict[str, Any] = {**ragged_batch([3, 7, 1]), "do_sample": False, "max_new_tokens": 6}
    expected = target.generate(**call)
    call |= {"assistant_model": noisy_copy(target, 0.05), "speculation_policy": "static"}
    with pytest.warns(
        KernelWarning, match=rf"cpu cannot run the kernel {name} for torch.float64.*limit: 101376"
    ) as told:
        assert torch.equal(target.generate(**call), expected)
    assert len([each for each in told if each.category is KernelWarning]) == 1
    tried = len(kernels.tried)
    assert tried == len(set(kernels.tried)), "a launch that failed was tried again"
    before = sum(capture.recorded for capture in recording)
    assert before > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(target.generate(**call), expected)
    assert sum(capture.recorded for capture in recording) == before
    assert len(kernels.tried) == tried


def test_other_sizes_keep_the_kernel() -> None:
    kernels = kernels_without("rms_norm", limit=64)
    ops: Any = FittedOps(kernels)
    wide, narrow = torch.randn(2, 128), torch.randn(2, 64)
    with pytest.warns(KernelWarning):
        ops.rms_norm(wide, torch.ones(128), 1e-5)
    for x in (narrow, wide, narrow):
        weight = torch.ones(x.shape[1])
        assert torch.equal(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert [shape[1] for shape in kernels.tried] == [128, 64, 64]
    assert ops.pays is reference.pays


def test_faults_of_other_kinds_are_raised() -> None:
    class MisuseError(Exception):
        __module__ = "triton.runtime.errors"

    for failure in (ValueError("strides"), RuntimeError("CUDA error: illegal memory access"), MisuseError("no")):
        ops: Any = FittedOps(kernels_without("silu_mul", failure=failure))
        with pytest.raises(type(failure)):
            ops.silu_mul(torch.ones(1, 4), torch.ones(1, 4))
    assert does_not_fit(RuntimeError("PassManager::run failed"))
    assert not does_not_fit(OSError("PassManager::run failed"))


def test_attention_is_launched_smaller_before_it_is_left_to_torch() -> None:
    plan, tried = plan_launch(200, 8, 4096, 128, 2, 132), []

    def launch(each: Any, room: int) -> Any:
        tried.append(each)
        if each.block_m * each.block_n * each.stages > room:
            raise OutOfResources("shared memory")
        return each

    room = plan.block_m * plan.block_n // 4
    found = launch_that_fits(torch.device("cpu"), (128,), plan, lambda each: launch(each, room))
    assert found.block_m * found.query_blocks >= 200
    assert min(found.block_m, found.block_n) >= 16
    assert len(tried) > 2
    tried.clear()
    assert launch_that_fits(torch.device("cpu"), (128,), plan, lambda each: launch(each, room)) == found
    assert len(tried) == 1
    with pytest.raises(OutOfResources):
        launch_that_fits(torch.device("cpu"), (256,), plan, lambda each: launch(each, 0))
    with pytest.raises(ValueError, match="strides"):
        launch_that_fits(torch.device("cpu"), (64,), plan, lambda _: (_ for _ in ()).throw(ValueError("strides")))


@pytest.mark.parametrize("case", ATTENTION_CASES.values(), ids=ATTENTION_CASES)
def test_padded_attention_is_that_of_the_definition(case: AttentionCase) -> None:
    given = make_attention(case, torch.float64)
    for each in (given, without_positions(given)):
        head = (each.q, each.keys, each.values, each.block, each.scaling, each.window, each.reach)
        torch.testing.assert_close(padded_attention(*head), slow_attention(each), rtol=0, atol=1e-12)


def test_padded_attention_leaves_rows_of_the_cache_alone_that_take_no_part() -> None:
    given = make_attention(AttentionCase((9, 30), (2, 3)), torch.float64)
    more = torch.full_like(given.keys[:1], float("nan"))
    longer = replace(given, keys=torch.cat([given.keys, more]), values=torch.cat([given.values, more]))
    head = (longer.q, longer.keys, longer.values, longer.block, longer.scaling, longer.window, longer.reach)
    torch.testing.assert_close(padded_attention(*head), slow_attention(given), rtol=0, atol=1e-12)
