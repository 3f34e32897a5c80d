"""Passes over ragged rows with an encoder's states, beside the model's own passes over each row alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from encoder_decoders import FAMILIES, VOCABULARY, decoder_alone, inputs_of, texts, tiny_encoder_decoder
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.execution import packed_weights
from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.cross_runner import CrossRunner
from hf_dsde.execution.encoder_states import EncoderStates
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.packed_weights import can_pack
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span

INPUTS = [6, 2, 9, 4]
LENGTHS = [7, 1, 4, 5]
TOKENS = torch.randint(4, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def states_of(model: PreTrainedModel, inputs: dict[str, Tensor]) -> EncoderStates:
    hidden = model.get_encoder()(**inputs, return_dict=True).last_hidden_state
    return EncoderStates(hidden, inputs.get("attention_mask"))


@torch.no_grad()
def expected(model: PreTrainedModel, inputs: dict[str, Tensor], row: int, first: int = 0) -> Tensor:
    """Run a row alone, without any padding, and without a cache of ours; `[length, vocabulary]`.

    `first` tokens stand in front of it, none of which it sees.
    """
    length = LENGTHS[row]
    own = {name: values[row : row + 1] for name, values in inputs.items()}
    if "attention_mask" in own:
        own = {name: values[:, : INPUTS[row]] for name, values in own.items()}
    prompt = torch.cat([torch.full((1, first), 9), TOKENS[row : row + 1, :length]], dim=1)
    mask = torch.ones(prompt.shape[1], prompt.shape[1], dtype=torch.bool).tril()
    mask[first:, :first] = False
    mask = mask[None, None]  # said in full: left to itself, UMT5 lets tokens see later ones, up to some version
    return model(**own, decoder_input_ids=prompt, decoder_attention_mask=mask).logits[0, first:].float()


def block(rows: list[int], counts: list[int], starts: list[int]) -> RowBlock:
    """Return `counts` tokens of each row from `starts` on, in the first columns; of other rows none."""
    width = max(counts)
    positions = torch.full((len(LENGTHS), width), -1)
    tokens = torch.zeros_like(positions)
    for row, count, start in zip(rows, counts, starts, strict=True):
        positions[row, :count] = torch.arange(start, start + count)
        tokens[row, :count] = TOKENS[row, start : start + count]
    return RowBlock(tokens, positions)


def runner_of(model: PreTrainedModel, encoded: EncoderStates, **options: Any) -> CrossRunner:
    runner = create_runner(model, len(LENGTHS), 16, RuntimeOptions(view_bucket=4, **options), encoded=encoded)
    assert isinstance(runner, CrossRunner)
    return runner


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_get_the_logits_that_each_gets_alone(family: str) -> None:
    """Texts are stored in passes over some of the rows; then each row is fed its last tokens."""
    check_ragged_rows(tiny_encoder_decoder(family), inputs_of(family, INPUTS))


@pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="weights are packed on x86-64 only")
@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_packed_weights_of_float32_models(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "SMALLEST_WEIGHT", 0)
    inputs = inputs_of(family, INPUTS)
    inputs = {name: values.float() if values.is_floating_point() else values for name, values in inputs.items()}
    model = copy.deepcopy(tiny_encoder_decoder(family)).float()
    encoder = set(model.get_encoder().modules())
    passed: set[torch.nn.Module] = set()

    def note(layer: torch.nn.Module, _: Any) -> None:
        if "forward" in vars(layer):
            passed.add(layer)

    for layer in model.modules():
        if type(layer) is torch.nn.Linear and layer not in encoder:
            layer.register_forward_pre_hook(note)
    packed: list[Tensor] = []
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda *given: (packed.append(given[0]), reorder(*given))[1]
    )
    check_ragged_rows(model, inputs)
    assert len(packed) == len(passed) > 0, "nothing of the encoder is packed, and everything else"


@torch.no_grad()
def check_ragged_rows(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    runner = runner_of(model, states_of(model, inputs), prefill_chunk=4)
    spans = [Span(row, 0, max(length - 2, 0)) for row, length in enumerate(LENGTHS)]
    flat = torch.cat([TOKENS[span.row, : span.count] for span in spans])
    runner.store(spans, flat)
    counts = [min(length, 2) for length in LENGTHS]
    starts = [length - count for length, count in zip(LENGTHS, counts, strict=True)]
    logits = runner.forward(block([0, 1, 2, 3], counts, starts), max(LENGTHS)).logits
    for row, (count, start) in enumerate(zip(counts, starts, strict=True)):
        wanted = expected(model, inputs, row)[start:]
        torch.testing.assert_close(logits[row, :count], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
@torch.no_grad()
def test_rows_that_stay_keep_what_they_brought_along(family: str) -> None:
    model = tiny_encoder_decoder(family)
    inputs = inputs_of(family, INPUTS)
    runner = runner_of(model, states_of(model, inputs))
    first = [length - 1 for length in LENGTHS]
    runner.forward(block([0, 2, 3], [6, 3, 4], [0, 0, 0]), max(LENGTHS))
    runner.keep_rows([0, 2, 3])
    runner.keep_rows([2, 3])
    logits = runner.forward(block([2, 3], [1, 1], [first[2], first[3]]), max(LENGTHS)).logits
    for row in (2, 3):
        torch.testing.assert_close(logits[row, 0], expected(model, inputs, row)[-1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_some_rows_catch_up_after_a_pass_over_all() -> None:
    model = tiny_encoder_decoder("bart")
    inputs = texts(INPUTS)
    runner = runner_of(model, states_of(model, inputs))
    runner.forward(block([0, 1], [6, 1], [0, 0]), max(LENGTHS))
    runner.store([Span(2, 0, 3), Span(3, 0, 4)], torch.cat([TOKENS[2, :3], TOKENS[3, :4]]))
    logits = runner.forward(block([2, 3], [1, 1], [3, 4]), max(LENGTHS)).logits
    for row in (2, 3):
        torch.testing.assert_close(logits[row, 0], expected(model, inputs, row)[-1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_states_are_read_once() -> None:
    """Keys and values of cross-attention are made in the first pass over all rows, and stay."""
    model = tiny_encoder_decoder("bart")
    calls: list[int] = []
    attention = model.model.decoder.layers[0].encoder_attn
    attention.k_proj.register_forward_hook(lambda _, given, __: calls.append(len(given[0])))
    runner = runner_of(model, states_of(model, inputs_of("bart", INPUTS)))
    for start in range(3):
        runner.forward(block([0, 2, 3], [1, 1, 1], [start] * 3), 4)
    runner.store([Span(0, 3, 2), Span(3, 3, 1)], torch.tensor([7, 8, 9]))
    assert calls == [len(INPUTS)]


@pytest.mark.parametrize("family", ["bart", "pegasus"])
@torch.no_grad()
def test_positions_may_begin_after_padding(family: str) -> None:
    model = tiny_encoder_decoder(family)
    inputs = texts(INPUTS)
    states = states_of(model, inputs)
    offsets = torch.tensor([0, 6, 3, 2])
    runner = runner_of(model, EncoderStates(states.hidden, states.mask, offsets))
    logits = runner.forward(block([0, 1, 2, 3], LENGTHS, [0] * 4), max(LENGTHS)).logits
    for row, offset in enumerate(offsets.tolist()):
        wanted = expected(model, inputs, row, offset)
        torch.testing.assert_close(logits[row, : LENGTHS[row]], wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_decoder_alone_reads_the_states_of_the_whole_model() -> None:
    model = tiny_encoder_decoder("whisper")
    inputs = inputs_of("whisper", INPUTS)
    runner = runner_of(decoder_alone(model), states_of(model, inputs))
    logits = runner.forward(block([0, 1, 2, 3], LENGTHS, [0] * 4), max(LENGTHS)).logits
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(logits[row, :length], expected(model, inputs, row), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_compiled_or_hooked_model_is_run_as_its_modules_are() -> None:
    """The copies of modules that positions have to pass run no method that was taken from the modules themselves."""
    model = tiny_encoder_decoder("t5")
    model.decoder.forward = type(model.decoder).forward.__get__(model.decoder)  # as accelerate leaves it behind
    inputs = texts(INPUTS)
    runner = runner_of(model, states_of(model, inputs))
    logits = runner.forward(block([0, 1, 2, 3], LENGTHS, [0] * 4), max(LENGTHS)).logits
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(logits[row, :length], expected(model, inputs, row), rtol=1e-5, atol=1e-5)


def test_nobody_is_handed_hidden_states_of_such_a_model() -> None:
    model = tiny_encoder_decoder("t5")
    encoded = states_of(model, texts(INPUTS))
    with pytest.raises(
        ValueError, match=r"hidden_layers: \(1,\).*T5ForConditionalGeneration reads an encoder's states"
    ):
        create_runner(model, 4, 16, RuntimeOptions(), hidden_layers=(1,), encoded=encoded)


@pytest.mark.parametrize("layers", [(3, 2), (2, 2)])
def test_caches_have_the_layers_of_the_decoder(layers: tuple[int, int]) -> None:
    model = tiny_encoder_decoder("t5", num_layers=layers[0], num_decoder_layers=layers[1])
    runner = runner_of(model, states_of(model, texts(INPUTS)))
    assert len(runner.cache.layers) == layers[1]
