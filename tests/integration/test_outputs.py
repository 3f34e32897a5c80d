"""What a call returns, field by field, against plain `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import EOS, PAD, VOCABULARY, noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

import hf_dsde
from hf_dsde import compat
from hf_dsde.decoding.recording import StepRecorder
from hf_dsde.integration.outputs import SpeculativeGenerateOutput

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

TARGET = hf_dsde.enable(tiny_model("llama"))
DRAFT = noisy_copy(TARGET, 0.05)
SEVERAL_ENDS = [EOS, 5, 9, 14, 33, 51, 77]
EVERYTHING = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
NEW_TOKENS = 14


def block(*rows: list[float]) -> Tensor:
    """A block over a vocabulary of two: entry x stands for the vector (x, -x)."""
    values = torch.tensor(rows)
    return torch.stack([values, -values], dim=-1)


def test_steps_are_assembled_from_rounds_of_different_lengths() -> None:
    recorder = StepRecorder(2)
    recorder.add(block([1, 2, 3], [10, 99, 99]), [3, 1])
    recorder.add(block([4, 99], [20, 30]), [1, 2])
    recorder.add(block([99], [40]), [0, 1])
    steps = recorder.steps(4)
    assert [step[:, 0].tolist() for step in steps] == [[1, 10], [2, 20], [3, 30], [4, 40]]
    assert [step[:, 1].tolist() for step in steps] == [[-1, -10], [-2, -20], [-3, -30], [-4, -40]]


def test_steps_that_a_row_never_reached_hold_zeros() -> None:
    recorder = StepRecorder(2)
    recorder.add(block([1, 2], [10, 99]), [2, 1])
    assert [step[:, 0].tolist() for step in recorder.steps(2)] == [[1, 10], [2, 0]]


def test_steps_can_be_asked_for_as_they_become_known() -> None:
    recorder = StepRecorder(2)
    recorder.add(block([1, 2], [10, 99]), [2, 1])
    first = recorder.steps(1)
    recorder.add(block([3], [20]), [1, 1])
    later = recorder.steps(2)
    assert len(first) == 1
    assert later[0] is first[0]
    assert later[1][:, 0].tolist() == [2, 20]


def test_the_recorder_keeps_copies() -> None:
    recorder = StepRecorder(1)
    round_scores = block([1, 2])
    recorder.add(round_scores, [2])
    round_scores.zero_()
    assert recorder.steps(2)[1][:, 0].tolist() == [2]


def generate_both(
    inputs: dict[str, Tensor], **options: Any
) -> tuple[GenerateDecoderOnlyOutput, SpeculativeGenerateOutput]:
    """Plain and speculative output of the same call."""
    options = {"max_new_tokens": NEW_TOKENS, **EVERYTHING, **options}
    plain = TARGET.generate(**inputs, **options)
    speculative = TARGET.generate(
        **inputs, **options, assistant_model=DRAFT, speculation_policy=RandomLengths(4, stop_probability=0.2)
    )
    return plain, speculative


def row_ends(output: GenerateDecoderOnlyOutput, prompt_width: int, ends: list[int]) -> list[int]:
    """Generated tokens of each row, its end-of-sequence token included."""
    lengths = []
    for row in output.sequences[:, prompt_width:].tolist():
        found = [step for step, token in enumerate(row) if token in ends]
        lengths.append(found[0] + 1 if found else len(row))
    return lengths


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4, "min_new_tokens": 3}], ids=["bare", "processed"])
@pytest.mark.parametrize("ends", [[EOS], SEVERAL_ENDS], ids=["few-ends", "many-ends"])
def test_scores_and_logits_are_those_of_plain_generate(options: dict[str, Any], ends: list[int]) -> None:
    inputs = ragged_batch(random_lengths(5))
    plain, speculative = generate_both(inputs, eos_token_id=ends, **options)
    assert torch.equal(plain.sequences, speculative.sequences)
    prompt_width = inputs["input_ids"].shape[1]
    lengths = row_ends(plain, prompt_width, ends)
    for field in ("scores", "logits"):
        expected, got = getattr(plain, field), getattr(speculative, field)
        assert isinstance(got, tuple)
        assert len(got) == len(expected) == plain.sequences.shape[1] - prompt_width
        for step, (theirs, ours) in enumerate(zip(expected, got, strict=True)):
            assert ours.shape == theirs.shape
            assert ours.dtype == theirs.dtype
            running = torch.tensor([step < length for length in lengths])
            torch.testing.assert_close(ours[running], theirs[running], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("normalize_logits", [False, True])
def test_transition_scores_work_on_the_output(normalize_logits: bool) -> None:
    inputs = ragged_batch(random_lengths(4))
    plain, speculative = generate_both(inputs, eos_token_id=SEVERAL_ENDS)
    lengths = row_ends(plain, inputs["input_ids"].shape[1], SEVERAL_ENDS)
    theirs, ours = (
        TARGET.compute_transition_scores(output.sequences, output.scores, normalize_logits=normalize_logits)
        for output in (plain, speculative)
    )
    assert ours.shape == theirs.shape
    for row, length in enumerate(lengths):
        torch.testing.assert_close(ours[row, :length], theirs[row, :length], rtol=1e-5, atol=1e-5)


def test_scores_are_what_a_sampled_text_was_drawn_from() -> None:
    """They are finite at every token that was drawn, and cut wherever top-k cut."""
    inputs = ragged_batch(random_lengths(4))
    torch.manual_seed(0)
    _, output = generate_both(inputs, do_sample=True, top_k=3, temperature=1.5, eos_token_id=SEVERAL_ENDS)
    prompt_width = inputs["input_ids"].shape[1]
    lengths = row_ends(output, prompt_width, SEVERAL_ENDS)
    for step, scores in enumerate(output.scores):
        for row in (row for row, length in enumerate(lengths) if step < length):
            assert scores[row, output.sequences[row, prompt_width + step]].isfinite()
            assert int(scores[row].isfinite().sum()) == 3
            kept = scores[row].isfinite()
            torch.testing.assert_close(scores[row][kept], output.logits[step][row][kept] / 1.5)


@pytest.mark.parametrize("fields", [{}, {"output_scores": True}, {"output_logits": True}, EVERYTHING], ids=str)
def test_only_what_was_asked_for_is_returned(fields: dict[str, bool]) -> None:
    plain, speculative = generate_both(
        ragged_batch([3, 5]), **{"output_scores": False, "output_logits": False, **fields}
    )
    assert isinstance(speculative, GenerateDecoderOnlyOutput)
    expected = set(plain) - set(compat.CACHE_ARGUMENTS) | {"speculation_statistics"}
    assert set(speculative) == expected
    assert isinstance(speculative.speculation_statistics, hf_dsde.SpeculationStatistics)
    assert speculative["speculation_statistics"] is speculative.speculation_statistics


def test_without_a_dictionary_a_tensor_is_returned_and_scores_are_not_collected() -> None:
    plain, speculative = generate_both(ragged_batch([3, 5]), return_dict_in_generate=False)
    assert isinstance(speculative, Tensor)
    assert torch.equal(plain, speculative)


@pytest.mark.parametrize("per_prompt", [2, 3])
def test_several_sequences_per_prompt_are_rows_in_plain_order(per_prompt: int) -> None:
    inputs = ragged_batch([4, 1, 6])
    # Sampling from one token is the only sampling that has one right text.
    plain, speculative = generate_both(inputs, num_return_sequences=per_prompt, do_sample=True, top_k=1)
    assert torch.equal(plain.sequences, speculative.sequences)
    assert speculative.sequences.shape[0] == 3 * per_prompt
    assert len(speculative.speculation_statistics.rows) == 3 * per_prompt
    for theirs, ours in zip(plain.scores, speculative.scores, strict=True):
        assert ours.shape == theirs.shape == (3 * per_prompt, VOCABULARY)


def test_rows_that_ended_are_padded() -> None:
    inputs = ragged_batch(random_lengths(6))
    plain, speculative = generate_both(inputs, eos_token_id=SEVERAL_ENDS)
    prompt_width = inputs["input_ids"].shape[1]
    lengths = row_ends(plain, prompt_width, SEVERAL_ENDS)
    assert min(lengths) < max(lengths)
    for row, length in enumerate(lengths):
        assert set(speculative.sequences[row, prompt_width + length :].tolist()) <= {PAD}
    assert [row.emitted for row in speculative.speculation_statistics.rows] == lengths


class StopWhenUnsure(StoppingCriteria):
    """Reads the scores that `generate` hands to criteria when it collects them."""

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...], **kwargs: Any) -> Tensor:
        return scores[-1].softmax(dim=-1).amax(dim=-1) < 0.075


def test_criteria_see_the_scores_of_the_step() -> None:
    inputs = ragged_batch(random_lengths(5))
    plain, speculative = generate_both(inputs, stopping_criteria=StoppingCriteriaList([StopWhenUnsure()]))
    assert plain.sequences.shape[1] - inputs["input_ids"].shape[1] > 1
    assert torch.equal(plain.sequences, speculative.sequences)
    assert len(plain.scores) == len(speculative.scores)
