"""Greedy speculative text of prompts with images is plain batched `generate`'s, whatever looks at them and drafts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tiny_calls import QUIET, compared, config_of, end_tokens, plain, speculative
from tiny_heads import tiny_head
from tiny_models import noisy_copy
from tiny_policies import RandomLengths
from tiny_vision import FAMILIES, IMAGE, THREE_AXES, VIDEO, families, image_batch, text_draft, tiny_vlm, vision_pair

import hf_dsde
from hf_dsde import compat
from hf_dsde.execution import attention

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

MIXED = ([3, 5], [7], [4, 2, 3])
"""One image, none, and two."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_rows_of_one_image_of_none_and_of_several(family: str) -> None:
    target, draft = vision_pair(family)
    output = compared(target, draft, image_batch(family, MIXED), RandomLengths(4, seed=1), max_new_tokens=20)
    assert 0.2 < output.speculation_statistics.acceptance_rate < 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_images_decide_the_text(family: str) -> None:
    """Without this, the other tests would show nothing."""
    target, _ = vision_pair(family)
    inputs = image_batch(family, MIXED)
    changed = {**inputs, "pixel_values": -5 * inputs["pixel_values"].flip(-1)}
    texts, others = (plain(target, given, max_new_tokens=6)[:, -6:] for given in (inputs, changed))
    assert [bool((text != other).any()) for text, other in zip(texts, others, strict=True)] == [True, False, True]


@pytest.mark.parametrize("rows", range(1, 7))
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_every_batch_size_while_rows_end(family: str, rows: int) -> None:
    target, draft = vision_pair(family)
    prompts = [[3, 5], [9], [1, 4, 2], [2], [1, 1], [6, 2, 2, 3]][-rows:]
    inputs = image_batch(family, prompts, seed=rows)
    ends = end_tokens(target, inputs, (0, 3), (rows - 1, 9))
    policy = RandomLengths(5, seed=rows, stop_probability=0.2)
    compared(target, draft, inputs, policy, max_new_tokens=16, eos_token_id=ends)


@pytest.mark.parametrize("family", families())
def test_text_alone_as_a_processor_returns_it(family: str) -> None:
    target, draft = vision_pair(family)
    inputs = image_batch(family, [[5], [9], [1]])
    compared(target, draft, inputs, RandomLengths(4, seed=2), max_new_tokens=12)
    words = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    compared(target, draft, words, RandomLengths(4, seed=2), max_new_tokens=12)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "paligemma", "idefics3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_as_it_is_set_and_packed_or_not(family: str, attention: str) -> None:
    target = hf_dsde.enable(tiny_vlm(family, attention=attention))
    if attention == "eager":  # in float64, plain `generate` itself gives NaN for padded rows
        target = target.float()
    draft = noisy_copy(target, 0.05)
    inputs = image_batch(family, MIXED)
    inputs["pixel_values"] = inputs["pixel_values"].to(target.dtype)
    for packed in (True, False):
        config = config_of(QUIET, packed_attention=packed)
        compared(target, draft, inputs, RandomLengths(4, seed=3), config, max_new_tokens=12)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "paligemma"])
def test_positions_after_images_are_not_those_of_the_next_call(family: str) -> None:
    target, draft = vision_pair(family)
    for prompts in (MIXED, [[5], [2], [8]], [[1, 2, 3], [2, 2], [4]]):
        compared(target, draft, image_batch(family, prompts), RandomLengths(4, seed=4), max_new_tokens=10)


def test_sliding_layers_look_back_across_an_image() -> None:
    target = hf_dsde.enable(tiny_vlm("qwen2_5_vl", use_sliding_window=True, sliding_window=8, max_window_layers=1))
    inputs = image_batch("qwen2_5_vl", MIXED)
    compared(target, noisy_copy(target, 0.05), inputs, RandomLengths(4, seed=5), max_new_tokens=24)


def test_an_unpadded_batch() -> None:
    """`generate` drops a mask that hides nothing."""
    target, draft = vision_pair("qwen2_5_vl")
    inputs = image_batch("qwen2_5_vl", [[3, 5]])
    compared(target, draft, inputs, RandomLengths(4, seed=6), max_new_tokens=12)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_several_texts_of_each_prompt(family: str) -> None:
    target, draft = vision_pair(family, "full")
    inputs = image_batch(family, [[3, 5], [4, 2]])
    torch.manual_seed(0)
    once = {"max_new_tokens": 6, "do_sample": True, "top_k": 1}
    output = speculative(target, draft, inputs, "static", num_return_sequences=2, **once)
    expected = plain(target, inputs, max_new_tokens=6).repeat_interleave(2, dim=0)
    assert output.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_videos(family: str) -> None:
    target, draft = vision_pair(family)
    inputs = image_batch(family, [[3, 5], [7]])
    is_video = inputs["input_ids"] == IMAGE
    video = torch.cat([inputs.pop("pixel_values")] * 2)  # two frames after each other, twice the tokens
    grid = inputs.pop("image_grid_thw") * torch.tensor([2, 1, 1])
    longer = {}
    for name, filler in (("input_ids", VIDEO), ("attention_mask", 1), ("mm_token_type_ids", 2)):
        values = inputs[name].masked_fill(is_video, filler)
        added = torch.where(is_video[:, -10:].any(1, keepdim=True), filler, {"input_ids": 0}.get(name, 0))
        place = int(is_video[0].nonzero()[0])
        longer[name] = torch.cat(
            [values[:, :place], added.expand(-1, int(is_video[0].sum())), values[:, place:]], dim=1
        )
    order = longer["attention_mask"].argsort(dim=1, stable=True)  # the row without a video is padded in front
    longer = {name: values.gather(1, order) for name, values in longer.items()}
    compared(
        target,
        draft,
        {**longer, "pixel_values_videos": video, "video_grid_thw": grid},
        RandomLengths(4, seed=7),
        max_new_tokens=12,
    )


DRAFTERS: dict[str, Any] = {
    "text model": text_draft,
    "texts": lambda target: "suffix",
    "head": tiny_head,
    "texts and a model": lambda target: ["suffix", noisy_copy(target, 0.05)],
}


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "idefics3"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_whoever_drafts(family: str, drafter: str) -> None:
    target, _ = vision_pair(family)
    draft = DRAFTERS[drafter](target)
    compared(target, draft, image_batch(family, MIXED), "static", max_new_tokens=20)


def test_own_attention_is_that_of_the_thread_that_asks_for_it() -> None:
    """Other calls of the same model go on with theirs meanwhile."""
    model = tiny_vlm("qwen2_5_vl")
    inputs = image_batch("qwen2_5_vl", MIXED)
    with torch.no_grad():
        expected = model(**inputs).logits
    raised: list[BaseException] = []

    def elsewhere() -> None:
        try:
            model(**inputs)
        except NotImplementedError as refusal:
            raised.append(refusal)

    with torch.no_grad(), attention.packed_attention(model):
        with attention.own_attention(model):
            assert torch.equal(model(**inputs).logits, expected)
            other = threading.Thread(target=elsewhere)
            other.start()
            other.join()
        elsewhere()
    assert len(raised) == 2


def test_a_model_set_to_flash_attention_reads_images_by_an_attention_that_needs_no_such_kernel() -> None:
    model = tiny_vlm("qwen2_5_vl")
    inputs = image_batch("qwen2_5_vl", MIXED)
    with torch.no_grad():
        expected = model(**inputs).logits
    for config in (model.config, model.config.text_config):
        compat.set_attention_setting(config, "flash_attention_2")
    with torch.no_grad(), attention.packed_attention(model), attention.own_attention(model):
        assert torch.equal(model(**inputs).logits, expected)


def test_masks_of_booleans_stay_as_they_are() -> None:
    target, draft = vision_pair("llava")
    inputs = image_batch("llava", MIXED)
    inputs["attention_mask"] = inputs["attention_mask"].bool()
    before = inputs["attention_mask"].clone()
    compared(target, draft, inputs, RandomLengths(4, seed=9), max_new_tokens=8)
    assert torch.equal(inputs["attention_mask"], before)


def test_prompt_lookup() -> None:
    target, _ = vision_pair("qwen2_5_vl")
    inputs = image_batch("qwen2_5_vl", MIXED)
    output = target.generate(
        **inputs, prompt_lookup_num_tokens=3, speculation_policy="static", do_sample=False, max_new_tokens=20
    )
    assert output.tolist() == plain(target, inputs, max_new_tokens=20).tolist()


@pytest.mark.parametrize("family", THREE_AXES)
def test_an_image_takes_fewer_positions_than_tokens(family: str) -> None:
    """What the tests of three axes rest on: some row's positions do go on elsewhere than its tokens say."""
    target, _ = vision_pair(family)
    plain(target, image_batch(family, MIXED), max_new_tokens=1)
    deltas = target.model.rope_deltas.flatten().tolist()
    assert deltas[1] == 0
    assert deltas[0] != deltas[2]
