"""Recorded passes after images: the text of plain decoding, with layers that are fused and without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from recorded import NotingCapture
from tiny_calls import QUIET, compared, config_of, end_tokens
from tiny_models import noisy_copy
from tiny_policies import RandomLengths
from tiny_vision import FAMILIES, families, image_batch, text_draft, tiny_vlm, vision_pair

import hf_dsde
from hf_dsde.execution.create_runner import RunnerWarning
from hf_dsde.execution.fused_families import why_not_fused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.usefixtures("recording"),
]

MIXED = ([3, 5], [7], [4, 2, 3])
NOT_FUSED = ("gemma3", "paligemma", "aya_vision", "qwen3_vl_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_models_around_a_text_model_of_a_known_structure_are_fused(family: str) -> None:
    target, _ = vision_pair(family)
    assert (why_not_fused(target) is None) == (family not in NOT_FUSED)
    body = target.model
    assert why_not_fused(body) is not None
    assert why_not_fused(getattr(body, "language_model", None) or body.text_model) is not None


def test_what_is_attached_inside_a_model_that_looks_at_images_is_found() -> None:
    model = tiny_vlm("llava")
    handle = model.model.register_forward_hook(lambda *_: None)
    assert "model has a forward hook" in str(why_not_fused(model))
    handle.remove()
    assert why_not_fused(model) is None
    model.model.language_model.layers[1].register_forward_hook(lambda *_: None)
    assert "model.language_model.layers.1 has a forward hook" in str(why_not_fused(model))


@pytest.mark.parametrize("family", families("qwen3_vl_moe"))  # calls its experts as data has it, on a CPU
def test_text_is_that_of_plain_decoding_while_rows_end(family: str, recording: list[NotingCapture]) -> None:
    target, draft = vision_pair(family)
    inputs = image_batch(family, [*MIXED, [2], [1, 1]])
    ends = end_tokens(target, inputs, (0, 3), (3, 6))
    for fused in (True, False) if family in ("llava", "qwen2_5_vl") else (True,):
        config = config_of(QUIET, runner="graph", fused_layers=fused)
        policy = RandomLengths(4, seed=1, stop_probability=0.2)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RunnerWarning)
            compared(target, draft, inputs, policy, config, max_new_tokens=16, eos_token_id=ends)
    assert sum(capture.recorded for capture in recording) > 2


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_calls_use_what_earlier_ones_have_recorded_and_nothing_of_their_images(
    family: str, recording: list[NotingCapture]
) -> None:
    target = hf_dsde.enable(tiny_vlm(family))
    drafts = [noisy_copy(target, 0.05), text_draft(target)]
    config = config_of(QUIET, runner="graph")
    counts = []
    for prompts in (MIXED, [[5], [2], [8]], MIXED):
        for draft in drafts:
            inputs = image_batch(family, prompts)
            compared(target, draft, inputs, "static", config, max_new_tokens=8)
        counts.append((len(recording), sum(capture.recorded for capture in recording)))
    assert counts[-1] == counts[-2]
    assert len({caches for caches, _ in counts}) == 1


def test_heads_read_what_a_recorded_target_makes_of_images() -> None:
    from tiny_heads import tiny_head

    target = hf_dsde.enable(tiny_vlm("qwen2_5_vl"))
    settings: dict[str, Any] = {"runner": "graph"}
    inputs = image_batch("qwen2_5_vl", MIXED)
    compared(target, tiny_head(target), inputs, "static", config_of(QUIET, **settings), max_new_tokens=12)
