"""Tiny random encoder-decoders of every known family, drafts for them, and inputs of different lengths."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from tiny_models import noisy_copy
from torch import Tensor
from transformers import PreTrainedModel, WhisperForCausalLM

import hf_dsde

VOCABULARY = 80
PAD, EOS, START = 0, 2, 3
MELS, FRAMES, LONGEST = 8, 40, 64
"""Of Whisper: bins, frames of one segment, and tokens of a text."""
TRANSCRIPT, ENGLISH, GERMAN, TRANSCRIBE, TRANSLATE, PREVIOUS, NO_TIMESTAMPS = range(51, 58)
FIRST_TIMESTAMP = NO_TIMESTAMPS + 1
SUPPRESSED, SUPPRESSED_AT_BEGIN = [5, 6, 11], [20, EOS]

_ATTENDING = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip
_LEARNED = {**_ATTENDING, "max_position_embeddings": LONGEST, "forced_eos_token_id": None}
_T5 = {
    "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20, "decoder_start_token_id": PAD,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5", "ForConditionalGeneration", {**_T5, "feed_forward_proj": "relu", "tie_word_embeddings": True}),
    "t5-gated": ("T5", "ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "mt5": ("MT5", "ForConditionalGeneration", _T5),
    "umt5": ("UMT5", "ForConditionalGeneration", _T5),
    "bart": ("Bart", "ForConditionalGeneration", _LEARNED),
    "mbart": ("MBart", "ForConditionalGeneration", _LEARNED),
    "pegasus": ("Pegasus", "ForConditionalGeneration", _LEARNED),
    "marian": ("Marian", "MTModel", _LEARNED),
    "blenderbot": ("Blenderbot", "ForConditionalGeneration", _LEARNED),
    "blenderbot-small": ("BlenderbotSmall", "ForConditionalGeneration", _LEARNED),
    "plbart": ("PLBart", "ForConditionalGeneration", _LEARNED),
    "whisper": (
        "Whisper",
        "ForConditionalGeneration",
        {**_ATTENDING, "num_mel_bins": MELS, "max_source_positions": FRAMES // 2, "max_target_positions": LONGEST,
         "decoder_start_token_id": TRANSCRIPT, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}  # fmt: skip
"""Family -> prefix of its classes' names, the rest of that of its model, and the shape of its configuration."""
READING = [family for family in FAMILIES if family != "whisper"]
"""Those whose encoders read tokens."""


def tiny_encoder_decoder(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a random model in evaluation mode and float64, whose text depends on its inputs and does not end."""
    prefix, suffix, shape = FAMILIES[family]
    common = {
        "vocab_size": VOCABULARY, "d_model": 32, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS,
        "decoder_start_token_id": START, "tie_word_embeddings": False,
    }  # fmt: skip
    config = getattr(transformers, f"{prefix}Config")(**{**common, **shape, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}{suffix}")(config).double()
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.data += 0.1 * torch.randn_like(weight)
            elif weight.requires_grad:
                weight.data = (1.0 if "relative" in name or "embed_positions" in name else 0.25) * torch.randn_like(
                    weight
                )
    model.generation_config.eos_token_id = None
    if family == "whisper":
        _speak(model)
    return model.eval()


def _speak(model: PreTrainedModel) -> None:
    """Give a Whisper model the settings of a multilingual checkpoint."""
    settings = {
        "is_multilingual": True, "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
        "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}, "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": PREVIOUS, "max_initial_timestamp_index": 5, "suppress_tokens": SUPPRESSED,
        "begin_suppress_tokens": SUPPRESSED_AT_BEGIN, "eos_token_id": EOS, "pad_token_id": PAD,
        "decoder_start_token_id": TRANSCRIPT, "max_length": LONGEST - 10,
    }  # fmt: skip
    for name, value in settings.items():
        setattr(model.generation_config, name, value)


@functools.cache
def pair(family: str, noise: float = 0.05) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return an enabled target and a draft that agrees with it as `noise` says. Calls leave no trace: all share it."""
    target = tiny_encoder_decoder(family)
    return hf_dsde.enable(target), noisy_copy(target, noise)


def distilled(model: PreTrainedModel, noise: float = 0.05) -> PreTrainedModel:
    """Return a draft whose encoder equals the model's, and whose decoder has fewer layers and noise."""
    config = copy.deepcopy(model.config)
    config.decoder_layers = 1
    draft = type(model)(config).double().eval()
    draft.load_state_dict(noisy_copy(model, noise).state_dict(), strict=False)
    draft.get_encoder().load_state_dict(model.get_encoder().state_dict())
    draft.generation_config = copy.deepcopy(model.generation_config)
    return draft


def decoder_alone(model: PreTrainedModel) -> WhisperForCausalLM:
    """Return a Whisper model's decoder as a model without an encoder."""
    draft = WhisperForCausalLM(copy.deepcopy(model.config)).double().eval()
    draft.model.decoder.load_state_dict(model.model.decoder.state_dict())
    draft.proj_out.load_state_dict(model.proj_out.state_dict())
    return draft


def texts(lengths: Sequence[int], *, seed: int = 0, padded_in_front: bool = False) -> dict[str, Tensor]:
    """Return inputs of an encoder that reads tokens, of the given lengths, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(4, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    if padded_in_front:
        mask = mask.flip(1)
    return {"input_ids": input_ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def sounds(rows: int, *, frames: int = FRAMES, seed: int = 0) -> Tensor:
    """Return inputs of Whisper's encoder, `[rows, MELS, frames]`, float64."""
    return torch.randn(rows, MELS, frames, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs_of(family: str, lengths: Sequence[int]) -> dict[str, Any]:
    """Return inputs for a family's encoder: of such lengths, where it has lengths."""
    return {"input_features": sounds(len(lengths))} if family == "whisper" else texts(lengths)


def decoder_prompts(model: PreTrainedModel, lengths: Sequence[int], *, seed: int = 1) -> dict[str, Tensor]:
    """Return left-padded decoder prompts of the given lengths, each of which begins with the model's start token."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    prompts = torch.randint(4, VOCABULARY, (len(lengths), width), generator=generator)
    first = width - torch.tensor(lengths)[:, None]
    columns = torch.arange(width)
    prompts = prompts.masked_fill(columns == first, model.config.decoder_start_token_id)
    mask = (columns >= first).long()
    return {"decoder_input_ids": prompts.masked_fill(mask == 0, PAD), "decoder_attention_mask": mask}
