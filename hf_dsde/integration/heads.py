"""Which drafts are heads, and whether a head was made for a target."""

from __future__ import annotations

from typing import TypeGuard

from transformers import PreTrainedModel

from hf_dsde.heads.eagle3 import Eagle3Head
from hf_dsde.heads.head import DraftHead


def is_head(draft: PreTrainedModel) -> TypeGuard[DraftHead]:
    """Whether a draft is a head, which reads the target's hidden states beside its tokens."""
    return isinstance(draft, DraftHead)


def check_head(target: PreTrainedModel, head: DraftHead) -> None:
    """Refuse a head that was made for another target, as far as sizes tell.

    Args:
        target: The target.
        head: The head.

    Raises:
        ValueError: If hidden size, layers or vocabulary are not the target's.
    """
    config = target.config.get_text_config(decoder=True)
    size = head.settings.feature_size if isinstance(head, Eagle3Head) else head.config.hidden_size
    last_id = head.config.vocab_size - 1 if head.draft_ids is None else int(head.draft_ids.max())
    deepest = max(head.feature_layers)
    wrong = None
    if size != config.hidden_size:
        wrong = f"reads hidden states of size {size}, and the target's have {config.hidden_size}"
    elif deepest > config.num_hidden_layers:
        wrong = f"reads the states after layer {deepest}, and the target has {config.num_hidden_layers} layers"
    elif head.config.vocab_size != config.vocab_size:
        wrong = f"has a vocabulary of {head.config.vocab_size} tokens, and the target's has {config.vocab_size}"
    elif last_id >= config.vocab_size:
        wrong = f"guesses token {last_id}, and the target's vocabulary has {config.vocab_size}"
    if wrong is not None:
        msg = (
            f"assistant_model ({type(head).__name__}) {wrong}: it was made for another model than "
            f"{type(target).__name__} {target.name_or_path!r}. Pass the head of this target."
        )
        raise ValueError(msg)
