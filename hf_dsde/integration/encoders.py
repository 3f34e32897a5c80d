"""Encoders: what their states are for a target and its draft, when one serves both, and which models do not fit."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_dsde import compat
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution.encoder_states import EncoderStates
from hf_dsde.execution.ragged_positions import counts_padding, why_no_ragged_rows
from hf_dsde.integration.heads import is_head
from hf_dsde.integration.refusal import PLAIN, refuse

_OF_ENCODER_DECODERS = frozenset({"encoder_outputs", "decoder_attention_mask"})
UNKNOWN_INPUT = -100
"""What `generate` puts in the place of inputs when it was given an encoder's states instead."""


def understood_kwargs(target: PreTrainedModel) -> frozenset[str]:
    """Return what `generate` hands to an encoder-decoder's `forward` beyond what it hands to any model's."""
    return _OF_ENCODER_DECODERS if target.config.is_encoder_decoder else frozenset()


def check_model(name: str, model: PreTrainedModel) -> None:
    """Refuse a model that reads an encoder's states and cannot be run over ragged rows.

    Args:
        name: What errors call it.
        model: Any model.

    Raises:
        ValueError: If it is one.
    """
    reason = why_no_ragged_rows(model) if compat.reads_encoder(model) else None
    if reason is not None:
        refuse(name, f"{reason}. {PLAIN}")


def check_target(target: PreTrainedModel) -> None:
    """Refuse a target that reads an encoder's states and has no encoder.

    Raises:
        ValueError: If it is one.
    """
    if compat.reads_encoder(target) and not target.config.is_encoder_decoder:
        way_out = "Pass the whole model; as an assistant it can stay without."
        refuse(f"model ({type(target).__name__})", f"it is a decoder without its encoder. {way_out}")


def check_pair(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Refuse a draft that cannot draft for a target because of their encoders.

    Raises:
        ValueError: If something known is in the way.
    """
    reason = _why_not_together(target, draft)
    if reason is not None:
        refuse(f"assistant_model ({type(draft).__name__})", f"{reason}. {PLAIN}")


def _why_not_together(target: PreTrainedModel, draft: PreTrainedModel) -> str | None:
    name = type(target).__name__
    if is_head(draft) and compat.reads_encoder(target):
        return f"it is a head, and {name} is an encoder-decoder. Use a draft model, or a drafter out of texts"
    if not compat.reads_encoder(draft):
        return None
    if not target.config.is_encoder_decoder:
        return f"it reads an encoder's states, and {name} has no encoder. Use a decoder-only draft"
    if draft.config.is_encoder_decoder:
        return _why_not_the_same_inputs(target, draft)
    size, own = _encoder_config(target).hidden_size, draft.config.hidden_size
    way_out = "Load the draft with its encoder (for Whisper: AutoModelForSpeechSeq2Seq)"
    return None if size == own else f"it reads states of size {own}, and {name}'s have {size}. {way_out}"


def _why_not_the_same_inputs(target: PreTrainedModel, draft: PreTrainedModel) -> str | None:
    name = type(target).__name__
    theirs, ours = (model.get_encoder().main_input_name for model in (draft, target))
    if theirs != ours:
        return f"its encoder reads {theirs}, and that of {name} {ours}. Use a draft of the same kind"
    theirs, ours = (getattr(model.config, "num_mel_bins", None) for model in (draft, target))
    if theirs != ours:
        return f"its encoder reads {theirs} mel bins, and that of {name} {ours}. Use a draft made for the same features"
    return None


def check_jobs(model: PreTrainedModel) -> None:
    """Refuse an encoder-decoder where rows begin one text after another, or texts are only read.

    Raises:
        ValueError: If it is one.
    """
    if compat.reads_encoder(model):
        msg = (
            f"model ({type(model).__name__}): prompts are texts alone here, and an encoder-decoder has inputs beside "
            "them. Call model.generate with speculation_policy for one batch after another."
        )
        raise ValueError(msg)


def check_call(target: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse what an encoder-decoder cannot be decoded with.

    Args:
        target: Any target.
        generation_config: Of the call.
        model_kwargs: What `generate` prepared.

    Raises:
        ValueError: For layers that it has not, and decoder prompts that are padded in a way that is not served.
    """
    if not target.config.is_encoder_decoder:
        return
    name = type(target).__name__
    if getattr(generation_config, "use_mtp", None):
        refuse("use_mtp=True", f"{name} is an encoder-decoder, and has no layers for it. Pass assistant_model.")
    given = model_kwargs.get("decoder_attention_mask")
    if given is None:
        return
    mask = given.bool()
    if not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        why = (
            "it hides tokens that are not in front of a row's decoder prompt. `generate` puts the start token in front "
            "of everything where no row begins with it: put it into decoder_input_ids, after the padding."
        )
        refuse("decoder_attention_mask", why)
    context = compat.context_length(target)
    if counts_padding(target) and context is not None and generation_config.max_length > context and not mask.all():
        why = f"{name} counts padding of decoder_input_ids among its {context} positions. Lower max_new_tokens."
        refuse(f"max_length={generation_config.max_length}", why)


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
        why = (
            "it has an encoder of its own, which has to read the inputs. Pass these, or a draft with the same encoder."
        )
        refuse(f"encoder_outputs and assistant_model ({type(draft).__name__})", why)
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
    mine, other = _tensors(ours), _tensors(theirs)
    pairs = [(mine[name], other[name]) for name in mine if name in other]
    if len(pairs) < max(len(mine), len(other)) or any(_layout(a) != _layout(b) for a, b in pairs):
        return False
    first, *others = sorted(pairs, key=lambda pair: pair[0].numel())
    return torch.equal(*first) and bool(torch.stack([(a == b).all() for a, b in others]).all())


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """What equal tensors have in common; one that is elsewhere until it is needed equals no other."""
    return tensor.shape, tensor.dtype, object() if tensor.device.type == "meta" else tensor.device


def _encoder_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(encoder=True)
