"""Prompts with images on a GPU: the text of plain decoding in float32, by passes that are recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_calls import QUIET, assert_same_text, config_of, plain, speculative
from tiny_models import noisy_copy
from tiny_policies import RandomLengths
from tiny_vision import FAMILIES, image_batch, text_draft, tiny_vlm

import hf_dsde
from hf_dsde.execution.cuda_graphs import CudaCapture
from hf_dsde.execution.fused_families import why_not_fused
from hf_dsde.execution.workspaces import workspaces

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]

RECORDED = [family for family in FAMILIES if family != "qwen3_vl_moe"]


@pytest.fixture(scope="module", autouse=True)
def released() -> Iterator[None]:
    """Keep no recorded passes for other files."""
    yield
    for model in list(workspaces._idle):
        workspaces.release(model)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", RECORDED)
def test_text_is_that_of_plain_generate_and_the_second_call_records_nothing(
    family: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host = tiny_vlm(family)
    drafts = [noisy_copy(on_host, 0.05), text_draft(on_host)]
    target = hf_dsde.enable(on_host.float().cuda())
    if fused and why_not_fused(target) is not None:
        pytest.skip("its layers are not fused")
    passes: list[int] = []
    original = CudaCapture.__call__
    monkeypatch.setattr(CudaCapture, "__call__", lambda self, *bodies: passes.append(1) or original(self, *bodies))
    inputs = image_batch(family, [[3, 5], [7], [4, 2, 3], [2]])
    inputs = {
        name: value.cuda().float() if value.is_floating_point() else value.cuda() for name, value in inputs.items()
    }
    expected = plain(target, inputs, max_new_tokens=24)
    for draft in drafts:
        draft.float().cuda()
        for call in range(2):
            passes.clear()
            policy = RandomLengths(4, seed=1)
            config = config_of(QUIET, fused_layers=fused)
            assert_same_text(speculative(target, draft, inputs, policy, config, max_new_tokens=24), expected)
            assert bool(passes) == (call == 0)
