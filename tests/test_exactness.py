"""Greedy speculative text is plain batched `generate`'s text, token for token, whatever drafts and whatever stops.

Covers the kinds of transformers #30042, #30413, #48280, #46629 and vLLM #56531, #10559, #5000, #7252.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_calls import QUIET, assert_same_text, compared, config_of, end_tokens, endless_model, pair, plain, speculative
from tiny_models import (
    AGREEMENT,
    FAMILIES,
    PAD,
    VOCABULARY,
    WINDOW,
    noisy_copy,
    ragged_batch,
    random_lengths,
    tiny_model,
)
from tiny_policies import RandomLengths, ScriptedLengths
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.execution import model_runner

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "mixtral": ("mixtral", {"sliding_window": WINDOW}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "qwen2-hybrid": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "gemma2-all-sliding": ("gemma2", {"layer_types": ("sliding_attention",) * 2}),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-scaled-by-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-reordered": ("gpt2", {"reorder_and_upcast_attn": True}),
    "opt-projected": ("opt", {"word_embed_proj_dim": 16}),
    "gemma2-without-softcapping": ("gemma2", {"attn_logit_softcapping": None}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-shared-kv-heads": ("llama", {"num_key_value_heads": 4}),
}


@pytest.mark.parametrize("agreement", AGREEMENT)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_any_draft(family: str, agreement: str) -> None:
    target, draft = pair(family, agreement)
    seed = len(family)
    inputs = ragged_batch(random_lengths(4, seed=seed), seed=seed)
    output = compared(target, draft, inputs, RandomLengths(4, seed=seed), max_new_tokens=18)
    rate = output.speculation_statistics.acceptance_rate
    assert {"full": rate == 1.0, "half": 0.1 < rate < 0.95, "never": rate < 0.1}[agreement], rate


@pytest.mark.parametrize(("family", "changes"), WINDOWED.values(), ids=WINDOWED)
def test_sixty_four_tokens_across_a_window_of_eight(family: str, changes: dict[str, Any]) -> None:
    target, draft = pair(family, "half", **changes)
    inputs = ragged_batch([1, 5, 11])
    compared(target, draft, inputs, RandomLengths(6, seed=2), max_new_tokens=64)


@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_variants_of_attention(family: str, changes: dict[str, Any]) -> None:
    target, draft = pair(family, "half", **changes)
    inputs = ragged_batch([6, 1, 3])
    compared(target, draft, inputs, RandomLengths(4, seed=3), max_new_tokens=12)


@pytest.mark.parametrize("stop_probability", [0.0, 0.3], ids=["before-the-round", "inside-the-round"])
@pytest.mark.parametrize("rows", range(1, 10))
def test_every_batch_size(rows: int, stop_probability: float) -> None:
    target, draft = pair()
    inputs = ragged_batch(random_lengths(rows, seed=rows), seed=rows)
    ends = end_tokens(target, inputs, (0, 7), (rows - 1, 11))
    policy = RandomLengths(5, seed=rows, stop_probability=stop_probability)
    compared(target, draft, inputs, policy, max_new_tokens=16, eos_token_id=ends)


@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=9),
    extra_padding=st.integers(0, 3),
    agreement=st.sampled_from(sorted(AGREEMENT)),
    longest=st.integers(0, 8),
    stop_probability=st.sampled_from([0.0, 0.5]),
    max_new_tokens=st.integers(1, 14),
    end=st.none() | st.integers(0, 6),
    max_draft_length=st.integers(1, 6),
    fill_to_batch=st.booleans(),
    packed_attention=st.booleans(),
    drop_finished_rows=st.booleans(),
    buckets=st.sampled_from([model_runner.WIDTH_BUCKETS, (1,), (4,), (2, 5)]),
    view_bucket=st.sampled_from([1, 7, 64]),
    prefill_chunk=st.sampled_from([1, 3, 512]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=50)
def test_any_batch_lengths_and_settings(
    lengths: list[int],
    extra_padding: int,
    agreement: str,
    longest: int,
    stop_probability: float,
    max_new_tokens: int,
    end: int | None,
    buckets: tuple[int, ...],
    seed: int,
    **changes: Any,
) -> None:
    target, draft = pair("llama", agreement)
    inputs = {
        name: torch.nn.functional.pad(tensor, (extra_padding, 0), value=PAD)
        for name, tensor in ragged_batch(lengths, seed=seed).items()
    }
    arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if end is not None:
        arguments["eos_token_id"] = end_tokens(target, inputs, (seed % len(lengths), end))
    policy = RandomLengths(longest, seed=seed, stop_probability=stop_probability)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "WIDTH_BUCKETS", buckets)
        output = speculative(target, draft, inputs, policy, config_of(QUIET, **changes), **arguments)
    assert_same_text(output, plain(target, inputs, **arguments))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
@pytest.mark.parametrize(
    "changes",
    [{"packed_attention": False}, {"fill_to_batch": True}, {"view_bucket": 7, "prefill_chunk": 3}],
    ids=["not-packed", "filled-to-batch", "odd-buckets"],
)
def test_settings_do_not_change_the_text(changes: dict[str, Any], family: str) -> None:
    target, draft = pair(family)
    inputs = ragged_batch([9, 1, 4, 12])
    compared(target, draft, inputs, RandomLengths(5, seed=5), config_of(QUIET, **changes), max_new_tokens=20)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_that_leave_do_not_change_the_text(family: str, do_sample: bool) -> None:
    """Eight rows end one after the other, so that they leave the passes several times. Draws stay the same as well."""
    target, draft = pair(family)
    inputs = ragged_batch(random_lengths(8, seed=7), seed=7)
    ends = end_tokens(target, inputs, *((row, 2 + 3 * row) for row in range(6)))
    outputs = []
    for drop_finished_rows in (True, False):
        torch.manual_seed(5)
        config = config_of(QUIET, drop_finished_rows=drop_finished_rows)
        policy = RandomLengths(4, seed=8, stop_probability=0.2)
        outputs.append(
            speculative(
                target, draft, inputs, policy, config, max_new_tokens=30, eos_token_id=ends, do_sample=do_sample
            )
        )
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist()
    if not do_sample:
        assert_same_text(outputs[0], plain(target, inputs, max_new_tokens=30, eos_token_id=ends))
    assert len({row.emitted for row in outputs[0].speculation_statistics.rows}) > 3
    assert outputs[0].speculation_statistics.idle < outputs[1].speculation_statistics.idle


def test_gemma2_in_float64_equals_one_row_at_a_time() -> None:
    """Plain batched decoding returns NaN for padded rows there; unpadded rows are the reference that is left."""
    target = tiny_model("gemma2").double()
    draft = noisy_copy(target, AGREEMENT["half"])
    lengths = [5, 1, 9]
    inputs = ragged_batch(lengths)
    output = speculative(
        hf_dsde.enable(target), draft, inputs, RandomLengths(4), max_new_tokens=24, eos_token_id=VOCABULARY
    )
    for row, length in enumerate(lengths):
        alone = {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()}
        expected = plain(target, alone, max_new_tokens=24, eos_token_id=VOCABULARY)
        assert output.sequences[row, -24:].tolist() == expected[0, -24:].tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
def test_eager_attention_in_float32(family: str) -> None:
    target = hf_dsde.enable(tiny_model(family, attn_implementation="eager").float())
    target.generation_config.eos_token_id = None
    draft = noisy_copy(target, AGREEMENT["half"])
    inputs = ragged_batch([7, 1, 12])
    compared(target, draft, inputs, RandomLengths(4), max_new_tokens=20)


@pytest.mark.parametrize("agreement", ["full", "half"])
def test_very_different_lengths_in_one_round(agreement: str) -> None:
    target, draft = pair(agreement=agreement)
    asked = [7, 4, 0, 7, 2, 1, 0, 0]
    inputs = ragged_batch(random_lengths(8, seed=6), seed=6)
    output = compared(target, draft, inputs, ScriptedLengths([asked, asked[::-1]]), max_new_tokens=24)
    assert output.speculation_statistics.rounds[0].drafted == sum(asked)


@pytest.mark.parametrize("policy", ["dsde", "scripted"])
def test_more_rows_do_not_change_the_others(policy: str) -> None:
    target, draft = pair()
    inputs = ragged_batch([4, 1, 9])
    more = {name: torch.cat([tensor, torch.full((5, 9), int(name != "input_ids"))]) for name, tensor in inputs.items()}
    more["attention_mask"][3:, :-1] = 0

    def run(batch: dict[str, torch.Tensor], lengths: list[int]) -> torch.LongTensor:
        chosen = "dsde" if policy == "dsde" else ScriptedLengths([lengths])
        return speculative(target, draft, batch, chosen, max_new_tokens=20).sequences

    assert run(inputs, [3, 0, 5]).tolist() == run(more, [3, 0, 5, 7, 0, 1, 0, 7])[:3].tolist()


def test_static_zero_never_drafts() -> None:
    target, draft = pair()
    inputs = ragged_batch([5, 1])
    calls: list[int] = []
    hook = draft.register_forward_pre_hook(lambda *_: calls.append(1))
    output = speculative(target, draft, inputs, hf_dsde.StaticPolicy(0), max_new_tokens=10)
    hook.remove()
    assert_same_text(output, plain(target, inputs, max_new_tokens=10))
    assert len(calls) <= 1, "the prompt may be stored, but nothing is drafted"
    assert output.speculation_statistics.draft_steps == 0
    assert [r.pass_width for r in output.speculation_statistics.rounds] == [1] * 10


def test_drafting_resumes_after_rounds_without_drafts() -> None:
    target, draft = pair(agreement="full")
    inputs = ragged_batch([5, 1, 8])
    policy = ScriptedLengths([[0, 0, 0], [0, 3, 0], [0, 0, 0], [0, 0, 0], [4, 0, 0], [2, 2, 2]])
    output = compared(target, draft, inputs, policy, max_new_tokens=24)
    assert output.speculation_statistics.acceptance_rate == 1.0


def _with_vocabulary(model: PreTrainedModel, size: int) -> PreTrainedModel:
    """Cut the embeddings and the head of a copy, or extend them by random rows."""
    changed = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        changed.resize_token_embeddings(size, mean_resizing=False)
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("policy", hf_dsde.available_policies())
@pytest.mark.parametrize("size", [VOCABULARY - 30, VOCABULARY + 30], ids=["smaller", "larger"])
def test_draft_with_another_vocabulary_size(size: int, policy: str) -> None:
    target, draft = pair()
    inputs = ragged_batch([6, 1, 9])
    output = speculative(target, _with_vocabulary(draft, size), inputs, policy, max_new_tokens=20)
    expected = plain(target, inputs, max_new_tokens=20)
    assert int(expected.max()) >= VOCABULARY - 30, "the target has to write ids that the small draft lacks"
    assert_same_text(output, expected)
    assert output.speculation_statistics.accepted > 0


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_processor_that_allows_only_ids_the_draft_lacks(do_sample: bool) -> None:
    target, draft = pair()
    allowed = [VOCABULARY - 1, VOCABULARY - 2]
    output = speculative(
        target,
        _with_vocabulary(draft, VOCABULARY - 30),
        ragged_batch([6, 1]),
        hf_dsde.StaticPolicy(3),
        max_new_tokens=12,
        do_sample=do_sample,
        prefix_allowed_tokens_fn=lambda row, text: allowed,
    )
    assert set(output.sequences[:, -12:].flatten().tolist()) <= set(allowed)


def test_sampled_return_sequences() -> None:
    target, draft = pair()
    inputs = ragged_batch([6, 1])
    output = speculative(target, draft, inputs, "dsde", do_sample=True, num_return_sequences=3, max_new_tokens=9)
    assert output.sequences.shape == (6, 6 + 9)
    assert output.sequences[:, :6].tolist() == inputs["input_ids"].repeat_interleave(3, 0).tolist()
    assert len({tuple(row) for row in output.sequences.tolist()}) > 2


@pytest.mark.parametrize("fill_to_batch", [False, True])
def test_draft_whose_context_is_shorter_than_the_text(fill_to_batch: bool) -> None:
    """Rows start before, at and after the end of the draft's 24 positions, which GPT-2 cannot look up beyond."""
    target = endless_model("llama")
    draft = endless_model("gpt2", n_positions=24, seed=3)
    inputs = ragged_batch([5, 1, 22, 23, 24, 25, 40])
    config = QUIET.replace(fill_to_batch=fill_to_batch)
    compared(target, draft, inputs, RandomLengths(5), config, max_new_tokens=60)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_text_that_fills_the_target_s_positions(family: str) -> None:
    target, draft = pair(family, "full", max_position_embeddings=20)
    inputs = ragged_batch([5, 1])
    compared(target, draft, inputs, hf_dsde.StaticPolicy(7), max_new_tokens=15)


def test_prompts_of_very_different_length() -> None:
    target, draft = pair()
    inputs = ragged_batch([120, 1])
    compared(target, draft, inputs, RandomLengths(4), max_new_tokens=3)


def test_cost_probe_is_a_plain_round_of_long_calls_only() -> None:
    target, draft = pair(agreement="full")
    inputs = ragged_batch([5, 1])
    config = hf_dsde.SpeculationConfig()
    for max_new_tokens, probed in [(63, False), (64, True)]:
        output = compared(target, draft, inputs, hf_dsde.StaticPolicy(6), config, max_new_tokens=max_new_tokens)
        assert any(r.is_plain for r in output.speculation_statistics.rounds[:-1]) == probed
        assert output.speculation_statistics.acceptance_rate == 1.0


ROPE = {"rope_theta": 10000.0, "factor": 4.0}
CHANGING_ROPE: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic"}, "max_position_embeddings": 16}),
    "longrope": (
        "phi3",
        {
            "rope_parameters": {**ROPE, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
        },
    ),
}


@pytest.mark.parametrize("kind", CHANGING_ROPE)
def test_rotary_frequencies_that_change_midway(kind: str) -> None:
    """Plain decoding switches frequencies when the batch's longest row gets there; drafts would get there earlier."""
    family, changes = CHANGING_ROPE[kind]
    target = hf_dsde.enable(tiny_model(family, **changes))
    draft = noisy_copy(target, AGREEMENT["half"])
    inputs = ragged_batch([6, 1])
    compared(target, draft, inputs, RandomLengths(4), max_new_tokens=10)
    with pytest.raises(ValueError, match=f"rope_type='{kind}' and max_length=17.*within 16"):
        speculative(target, draft, inputs, RandomLengths(4), max_new_tokens=11)
