"""What cannot be decoded with an encoder beside it: said by argument, value and way out, before a decoder runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_decoders import START, decoder_alone, decoder_prompts, pair, sounds, texts, tiny_encoder_decoder
from tiny_models import tiny_model
from tiny_text import tiny_tokenizer
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.pairs import Pair
from hf_dsde.trace import Prompt, record_trace

CALL: dict[str, Any] = {"max_new_tokens": 6, "speculation_policy": "static"}


def refused(target: PreTrainedModel, draft: Any, *texts_of_message: str, **call: Any) -> None:
    """Check that a call is refused in these words, and that no decoder ran."""
    decoders = [
        model.get_decoder() if model.config.is_encoder_decoder else model
        for model in (target, draft)
        if isinstance(model, PreTrainedModel)
    ]
    passes: list[Any] = []
    hooks = [decoder.register_forward_pre_hook(lambda *_: passes.append(None)) for decoder in decoders]
    with pytest.raises(ValueError, match="speculation_policy cannot be used with") as refusal:
        target.generate(assistant_model=draft, **{**CALL, **call})
    for hook in hooks:
        hook.remove()
    for text in texts_of_message:
        assert text in str(refusal.value)
    assert passes == []


def test_a_draft_whose_encoder_reads_something_else() -> None:
    target = pair("bart")[0]
    whisper = pair("whisper")[1]
    refused(target, whisper, "(WhisperForConditionalGeneration)", "reads input_features", "Use a draft", **texts([3]))
    other = tiny_encoder_decoder("whisper", num_mel_bins=12)
    words = "(WhisperForConditionalGeneration)", "reads 12 mel bins, and that of WhisperForConditionalGeneration 8"
    refused(pair("whisper")[0], other, *words, input_features=sounds(1), language="en")


def test_a_decoder_alone_of_another_size() -> None:
    alone = decoder_alone(tiny_encoder_decoder("whisper", d_model=16))
    words = "(WhisperForCausalLM)", "states of size 16", "AutoModelForSpeechSeq2Seq"
    refused(pair("whisper")[0], alone, *words, input_features=sounds(1), language="en")


def test_drafts_that_read_an_encoder_where_there_is_none() -> None:
    llama = hf_dsde.enable(tiny_model("llama", vocab_size=80))
    prompt = {"input_ids": torch.tensor([[4, 5]])}
    for draft in (pair("t5")[1], decoder_alone(pair("whisper")[1])):
        refused(llama, draft, f"({type(draft).__name__})", "LlamaForCausalLM has no encoder", "decoder-only", **prompt)


def test_a_target_without_its_encoder() -> None:
    alone = hf_dsde.enable(decoder_alone(pair("whisper")[0]))
    words = "model (WhisperForCausalLM)", "Pass the whole model"
    refused(alone, copy.deepcopy(alone), *words, input_ids=torch.tensor([[4, 5]]))


def test_heads_and_layers_for_multi_token_prediction() -> None:
    from tiny_heads import tiny_head

    target = pair("t5")[0]
    head = tiny_head(tiny_model("llama", vocab_size=80))
    refused(target, head, f"({type(head).__name__})", "T5ForConditionalGeneration is an encoder-decoder", **texts([3]))
    refused(target, None, "use_mtp=True", "Pass assistant_model", **texts([3]), use_mtp=True)


def test_decoder_prompts_that_are_padded_elsewhere() -> None:
    target, draft = pair("bart")
    behind = {"decoder_input_ids": torch.tensor([[START, 5, 6], [START, 7, 0]])}
    behind["decoder_attention_mask"] = (behind["decoder_input_ids"] != 0).long()
    refused(target, draft, "decoder_attention_mask", "put it into decoder_input_ids", **texts([3, 2]), **behind)
    started = {"decoder_input_ids": torch.tensor([[8, 5, 6], [0, 0, 7]])}  # no row begins with the start token
    started["decoder_attention_mask"] = (started["decoder_input_ids"] != 0).long()
    refused(target, draft, "decoder_attention_mask", "put it into decoder_input_ids", **texts([3, 2]), **started)


def test_texts_that_would_leave_the_table_of_positions() -> None:
    target, draft = pair("bart")
    prompts = decoder_prompts(target, [4, 1])
    words = "max_length=66", "among its 64 positions", "max_new_tokens"
    refused(target, draft, *words, **texts([3, 2]), **prompts, max_new_tokens=62)


def test_a_replaced_forward_on_the_way_to_positions() -> None:
    target, draft = (copy.deepcopy(model) for model in pair("t5"))
    target.decoder.forward = lambda *arguments, **options: None
    words = "model (T5ForConditionalGeneration)", "`forward` of decoder was replaced"
    refused(target, draft, *words, **texts([3]))


def test_a_class_of_somebody_elses() -> None:
    class Mine(type(tiny_encoder_decoder("bart"))):  # type: ignore[misc] # a class that is made at run time
        pass

    target = tiny_encoder_decoder("bart")
    target.__class__ = Mine
    words = "(Mine)", "model_type 'bart' in test_encoder_refusals", "transformers' own classes"
    refused(hf_dsde.enable(target), pair("bart")[1], *words, **texts([3]))


@pytest.mark.parametrize("options", [{"decoder_position_ids": torch.tensor([[0]])}, {"output_attentions": True}])
def test_what_the_loop_does_not_hand_on(options: dict[str, Any]) -> None:
    draft = pair("whisper")[1]
    refused(pair("whisper")[0], draft, next(iter(options)), input_features=sounds(1), language="en", **options)


def test_another_vocabulary_is_not_translated() -> None:
    target, draft = pair("bart")
    tokenizers = {"tokenizer": tiny_tokenizer(80), "assistant_tokenizer": tiny_tokenizer(80, swapped=(40, 41))}
    refused(target, draft, "2 token ids differ", "this one reads an encoder's states", **texts([3]), **tokenizers)


def test_jobs_over_data_sets(tmp_path: Path) -> None:
    target, draft = pair("bart")
    with pytest.raises(ValueError, match=r"model \(BartFor.*prompts are texts alone here.*Call model.generate"):
        hf_dsde.BatchGenerator(target, tiny_tokenizer(80), assistant_model=draft)
    with pytest.raises(ValueError, match=r"model \(BartFor.*prompts are texts alone here.*Call model.generate"):
        record_trace(
            Pair(target, draft, tiny_tokenizer(80)), [Prompt("qa", "ab")], tmp_path / "traces", max_new_tokens=4
        )
