"""Encoders: what their states are for a target and its draft, when one serves both, and which pairs cannot be served."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dsde import compat
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution.encoder_states import EncoderStates
from hf_dsde.execution.ragged_positions import counts_padding, why_no_ragged_rows
from hf_dsde.integration.heads import is_head

UNDERSTOOD_KWARGS = frozenset({"encoder_outputs", "decoder_attention_mask"})
"""What `generate` hands to an encoder-decoder's `forward` beyond what it hands to any model's."""
UNKNOWN_INPUT = -100
"""What `generate` puts in the place of inputs when it was given an encoder's states instead."""


def why_not_alone(model: PreTrainedModel) -> str | None:
    """Say why a model that reads an encoder's states cannot be run over ragged rows; None if it can, or reads none."""
    return why_no_ragged_rows(model) if compat.reads_encoder(model) else None


def why_not_target(target: PreTrainedModel) -> str | None:
    """Say why a target cannot get at its encoder's states."""
    if compat.reads_encoder(target) and not target.config.is_encoder_decoder:
        return "it is a decoder without its encoder. Pass the whole model; as an assistant it can stay without."
    return None


def why_not_together(target: PreTrainedModel, draft: PreTrainedModel) -> str | None:
    """Say why a draft cannot draft for a target because of their encoders; None if nothing known is in the way."""
    if is_head(draft):
        if not compat.reads_encoder(target):
            return None
        return f"it is a head, and {type(target).__name__} is an encoder-decoder. Use a draft model, or a text drafter"
    if not compat.reads_encoder(draft):
        return None
    if not target.config.is_encoder_decoder:
        return f"it reads an encoder's states, and {type(target).__name__} has no encoder. Use a decoder-only draft"
    if not draft.config.is_encoder_decoder:
        size, own = _encoder_config(target).hidden_size, draft.config.hidden_size
        if size != own:
            return (
                f"it reads encoder states of size {own}, and those of {type(target).__name__} have {size}. Load the "
                "draft with its encoder (for Whisper: AutoModelForSpeechSeq2Seq)"
            )
        return None
    theirs, ours = (model.get_encoder().main_input_name for model in (draft, target))
    if theirs != ours:
        return f"its encoder reads {theirs}, and the target's {ours}. Use a draft of the same kind"
    theirs, ours = (getattr(model.config, "num_mel_bins", None) for model in (draft, target))
    if theirs != ours:
        return f"its encoder reads {theirs} mel bins, and the target's {ours}. Use a draft made for the same features"
    return None


def target_states(
    target: PreTrainedModel, sequences: SequenceBatch, model_kwargs: dict[str, Any]
) -> EncoderStates | None:
    """Return what the target's encoder has made of the inputs, which `generate` has asked it; None without one."""
    if not target.config.is_encoder_decoder:
        return None
    is_padded = min(sequences.prompt_lengths) < sequences.prompt_width
    return EncoderStates(
        model_kwargs["encoder_outputs"][0],
        model_kwargs.get("attention_mask"),
        sequences.padding if is_padded and counts_padding(target) else None,
    )


def draft_states(
    target: PreTrainedModel, draft: PreTrainedModel | None, encoded: EncoderStates | None, inputs: Tensor | None
) -> EncoderStates | None:
    """Return what a draft's rows bring along: the target's states if its encoder serves both, else those of its own.

    Args:
        target: The target.
        draft: The draft; None where no model drafts.
        encoded: What the target's rows bring along.
        inputs: What both encoders read, `[rows or fewer, ...]`: fewer where a row is continued several times.

    Raises:
        ValueError: If the draft's own encoder has nothing to read.
    """
    if encoded is None or draft is None or not compat.reads_encoder(draft):
        return None
    if shares_encoder(target, draft):
        return encoded
    if inputs is None or (not inputs.is_floating_point() and bool((inputs == UNKNOWN_INPUT).all())):
        msg = (
            f"speculation_policy cannot be used with encoder_outputs and assistant_model ({type(draft).__name__}): it "
            "has an encoder of its own, which has to read the inputs. Pass these, or a draft whose encoder equals the "
            "target's."
        )
        raise ValueError(msg)
    times = len(encoded.hidden) // len(inputs)
    mask = None if encoded.mask is None else encoded.mask[::times]
    hidden = _encode(draft, inputs.to(draft.device), mask).repeat_interleave(times, dim=0)
    return EncoderStates(hidden, encoded.mask, encoded.offsets)


def _encode(model: PreTrainedModel, inputs: Tensor, mask: Tensor | None) -> Tensor:
    encoder: Any = model.get_encoder()
    arguments: dict[str, Any] = {
        encoder.main_input_name: inputs.to(model.dtype) if inputs.is_floating_point() else inputs
    }
    if mask is not None and "attention_mask" in inspect.signature(encoder.forward).parameters:
        arguments["attention_mask"] = mask.to(model.device)
    hidden: Tensor = encoder(**arguments, return_dict=True).last_hidden_state
    return hidden


def shares_encoder(target: PreTrainedModel, draft: PreTrainedModel) -> bool:
    """Whether one encoder's states serve both models.

    They do if the draft has none, or one that equals the target's: distilled drafts keep it as it was. Comparing
    weights takes less than a pass over them, and mostly ends at the first.
    """
    if not draft.config.is_encoder_decoder:
        return True
    ours, theirs = target.get_encoder(), draft.get_encoder()
    if ours is theirs:
        return True
    heads = [_encoder_config(model).num_attention_heads for model in (target, draft)]
    if heads[0] != heads[1] or repr(ours) != repr(theirs):
        return False
    pairs = list(zip(_tensors(ours), _tensors(theirs), strict=True))
    if any((a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) for a, b in pairs):
        return False
    first, *others = sorted(pairs, key=lambda pair: pair[0].numel())
    return torch.equal(*first) and bool(torch.stack([(a == b).all() for a, b in others]).all())


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _encoder_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(encoder=True)
