"""Text that is sampled after images follows the target's own law: chi-squared against enumeration."""

from __future__ import annotations

import pytest
import torch
from sampled_law import pearson
from scipy import stats
from tiny_calls import QUIET, config_of
from tiny_models import PAD, noisy_copy
from tiny_vision import IMAGE, tiny_vlm
from torch import Tensor
from transformers import PreTrainedModel

import hf_dsde

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]

RIGHT, WRONG = 1e-4, 1e-6
WORDS = torch.tensor([3, 4, 5, 6, 7])
"""The only tokens that are sampled."""
ROWS, DEPTH, TOKENS = 768, 2, 4


def small_target(family: str) -> PreTrainedModel:
    """A model that samples few words: all others get no probability."""
    target = tiny_vlm(family, initializer_range=0.4)
    others = torch.ones(target.lm_head.out_features, dtype=torch.bool)
    others[WORDS] = False
    target.generation_config.suppress_tokens = others.nonzero()[:, 0].tolist()
    return hf_dsde.enable(target.float())


def prompts(family: str) -> dict[str, Tensor]:
    """A prompt with an image, padded, and one with two."""
    rows = [[PAD] * 6 + [8, IMAGE, IMAGE, 9], [5, IMAGE, IMAGE, 9, IMAGE, IMAGE, IMAGE, IMAGE, 4, 3]]
    counts = [2, 2, 4]
    if family == "gemma3":
        rows = [[PAD] * 6 + [IMAGE] * 4 + [9], [IMAGE] * 4 + [9] + [IMAGE] * 4 + [4, 3]]
        counts = [4, 4, 4]
    input_ids = torch.tensor(rows)
    types = (input_ids == IMAGE).long()
    inputs = {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long()}
    generator = torch.Generator().manual_seed(0)
    if family == "gemma3":
        pixels = torch.randn(len(counts), 3, 8, 8, generator=generator)
        return {**inputs, "token_type_ids": types, "pixel_values": pixels}
    grids = torch.tensor([[1, 4, 2], [1, 2, 4], [1, 4, 4]])
    pixels = torch.randn(sum(4 * count for count in counts), 96, generator=generator)
    return {**inputs, "mm_token_type_ids": types, "pixel_values": pixels, "image_grid_thw": grids}


def of_row(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """The inputs of one prompt alone, unpadded."""
    real = inputs["attention_mask"][row].bool()
    alone = {name: inputs[name][row : row + 1, real] for name in inputs if inputs[name].shape[:1] == (2,)}
    images = slice(0, 1) if row == 0 else slice(1, 3)
    if "image_grid_thw" not in inputs:
        return {**alone, "pixel_values": inputs["pixel_values"][images]}
    patches = inputs["image_grid_thw"].prod(1).tolist()
    first = 0 if row == 0 else patches[0]
    pixels = inputs["pixel_values"][first : first + sum(patches[images])]
    return {**alone, "pixel_values": pixels, "image_grid_thw": inputs["image_grid_thw"][images]}


def exact_law(target: PreTrainedModel, alone: dict[str, Tensor]) -> Tensor:
    """The law of the first words after a prompt, `[words ** DEPTH]`, by plain decoding of every text."""
    law = torch.ones(1, dtype=torch.float64)
    texts = torch.empty(1, 0, dtype=torch.long)
    for _ in range(DEPTH):
        rows = []
        for text in texts:
            longer = {**alone, "input_ids": torch.cat([alone["input_ids"], text[None]], dim=1)}
            for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
                if name in alone:
                    added = torch.full((1, len(text)), int(name == "attention_mask"))
                    longer[name] = torch.cat([alone[name], added], dim=1)
            with torch.no_grad():
                rows.append(target(**longer).logits[0, -1, WORDS].double().softmax(-1))
        law = (law[:, None] * torch.stack(rows)).flatten()
        texts = torch.cat([texts.repeat_interleave(len(WORDS), 0), WORDS.repeat(len(texts))[:, None]], dim=1)
    return law


def p_value(family: str, target: PreTrainedModel, draft: PreTrainedModel) -> float:
    inputs = prompts(family)
    repeats = ROWS // 2
    repeated = {name: value.repeat(repeats, *[1] * (value.dim() - 1)) for name, value in inputs.items()}
    torch.manual_seed(0)
    output = target.generate(
        **repeated, do_sample=True, top_k=0, max_new_tokens=TOKENS, assistant_model=draft, speculation_policy="static",
        speculation_config=config_of(QUIET, max_draft_length=2), return_dict_in_generate=True,
    )  # fmt: skip
    assert 0.1 < output.speculation_statistics.acceptance_rate < 0.97
    words = torch.searchsorted(WORDS, output.sequences[:, -TOKENS:][:, :DEPTH].contiguous())
    outcomes = (words * len(WORDS) ** torch.arange(DEPTH - 1, -1, -1)).sum(dim=1)
    statistic, freedom = 0.0, 0
    for row in range(2):
        observed = outcomes[row::2].bincount(minlength=len(WORDS) ** DEPTH).double()
        parts = pearson(observed, repeats * exact_law(target, of_row(inputs, row)))
        statistic, freedom = statistic + parts[0], freedom + parts[1]
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_sampled_text_has_the_law_of_the_target(family: str) -> None:
    target = small_target(family)
    assert p_value(family, target, noisy_copy(target, 0.5)) > RIGHT


def test_positions_that_do_not_go_on_after_the_image_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_target("qwen2_5_vl")
    draft = noisy_copy(target, 0.5)
    from hf_dsde.execution.kv_cache import RaggedCache

    monkeypatch.setattr(RaggedCache, "aimed_shifts", None)
    assert p_value("qwen2_5_vl", target, draft) < WRONG
