"""What cannot be decoded of prompts with images is refused before anybody looks at them, and says what to do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny_model
from tiny_text import tiny_tokenizer
from tiny_vision import IMAGE, image_batch, tiny_vlm, vision_pair

import hf_dsde
from hf_dsde import compat
from hf_dsde.batch.generator import BatchGenerator

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


def blind(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Let a model fail when it looks at an image."""

    def look(*_: Any, **__: Any) -> None:
        raise AssertionError("the images have been looked at")

    model.model.get_image_features = look  # type: ignore[assignment]
    return hf_dsde.enable(model)


def test_a_kind_of_model_that_is_not_known_to_look_at_images_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "IMAGE_MODEL_TYPES", compat.IMAGE_MODEL_TYPES - {"llava"})
    target = blind(tiny_vlm("llava"))
    words = (
        r"pixel_values of a model of type 'llava': its later passes .* types look at them once: .*qwen2_vl.*"
        r"Leave out `speculation_policy`"
    )
    with pytest.raises(ValueError, match=words):
        target.generate(**image_batch("llava", [[3, 2]]), assistant_model="suffix", speculation_policy="static")


def test_a_prompt_that_ends_in_an_image() -> None:
    inputs = image_batch("llava", [[5, 1], [2, 3]])
    inputs["input_ids"][0, -1] = IMAGE
    target = blind(tiny_vlm("llava"))
    call = partial(target.generate, assistant_model="suffix", speculation_policy="static", max_new_tokens=4)
    with pytest.raises(ValueError, match=r"input_ids whose rows \[0\] end in an image: .*Let text follow the image"):
        call(**inputs)


def test_images_for_a_model_of_text_alone() -> None:
    target = hf_dsde.enable(tiny_model())
    with pytest.raises(ValueError, match="pixel_values"):
        target.generate(
            input_ids=torch.tensor([[3, 4]]),
            pixel_values=torch.zeros(1, 3, 8, 8),
            assistant_model="suffix",
            speculation_policy="static",
        )


def test_positions_that_end_in_different_places() -> None:
    target, _ = vision_pair("qwen2_5_vl")
    inputs = image_batch("qwen2_5_vl", [[3, 2]])
    positions = torch.arange(inputs["input_ids"].shape[1]).expand(3, 1, -1).clone()
    positions[2] += 1
    with pytest.raises(ValueError, match="position_ids: a token's position"):
        target.generate(
            **inputs, position_ids=positions, assistant_model="suffix", speculation_policy="static", max_new_tokens=4
        )


def test_cross_attention_to_images_is_refused() -> None:
    """Mllama's layers look at the images in every pass."""
    text = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "cross_attention_layers": [1], "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_global_layers": 1,
        "attention_heads": 2, "image_size": 8, "patch_size": 4, "vision_output_dim": 32, "max_num_tiles": 1,
        "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=90)
    target = hf_dsde.enable(transformers.MllamaForConditionalGeneration(config).eval())
    pixels = {"pixel_values": torch.zeros(1, 1, 1, 3, 8, 8), "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long)}
    with pytest.raises(ValueError, match="speculation_policy cannot be used with"):
        target.generate(
            input_ids=torch.tensor([[1, 90, 5]]), **pixels, assistant_model="suffix", speculation_policy="static"
        )


@pytest.mark.parametrize("images", [True, False])
def test_a_model_that_takes_one_mask_for_layers_that_slide_and_others(images: bool) -> None:
    text = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
    target = blind(tiny_vlm("paligemma", model_type="gemma2", **text))
    inputs = image_batch("paligemma", [[3, 2] if images else [3]])
    with pytest.raises(ValueError, match="some of its layers slide and some do not"):
        target.generate(**inputs, assistant_model="suffix", speculation_policy="static", max_new_tokens=4)


def generator(family: str = "llava", **arguments: Any) -> BatchGenerator:
    target, draft = vision_pair(family)
    return BatchGenerator(target, tiny_tokenizer(), assistant_model=draft, batch_size=2, max_new_tokens=6, **arguments)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_rows_of_a_data_set_bring_text_alone(family: str) -> None:
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 92, IMAGE, 93, 7]}, {"input_ids": [9]}]
    first, second, third = generator(family).stream(rows)
    assert "the prompt has the token ids [90], which stand for images" in str(second.error)
    assert "model.generate(**processor(images, texts)" in str(second.error)
    target, _ = vision_pair(family)
    for result, row in ((first, rows[0]), (third, rows[2])):
        expected = target.generate(torch.tensor([row["input_ids"]]), do_sample=False, max_new_tokens=6)
        assert result.token_ids == expected[0, len(row["input_ids"]) :].tolist()


def test_images_as_arguments_of_a_whole_data_set() -> None:
    with pytest.raises(ValueError, match=r"pixel_values.*Rows bring text alone"):
        generator(pixel_values=torch.zeros(1, 3, 8, 8))
