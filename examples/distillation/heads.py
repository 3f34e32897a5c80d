"""An EAGLE-3 head for a target, its draft vocabulary, and the loss that it is trained with."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import LlamaConfig, PreTrainedModel

from distillation.generate import end_token_ids, read_shards
from distillation.train import Row, weighty_chunks
from distillation.unrolled import UNROLLED, draft_logits, draft_token_ids, one_step, read_target, unrolled
from hf_dsde.heads.eagle3 import Eagle3Head, Eagle3Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadShape:
    """Sizes of the head's layer; those of the target's layers where None.

    Attributes:
        intermediate_size: Of the MLP.
        attention_heads: Of the queries.
        key_value_heads: Of the keys and values.
    """

    intermediate_size: int | None = None
    attention_heads: int | None = None
    key_value_heads: int | None = None


@dataclass(frozen=True)
class HeadLossSettings:
    """What the head is trained for.

    Attributes:
        steps: Unrolled steps: how deep the chains are.
        step_decay: Weight of a step against the step before it.
        hard_weight: Of the cross entropy to the target's most likely token, added to that to its distribution.
        chunk_tokens: Positions whose logits are held at a time. On average half a chunk of each batch is filled up.
    """

    steps: int = 5
    step_decay: float = 0.9
    hard_weight: float = 0.5
    chunk_tokens: int = 4_096


def choose_draft_vocabulary(rows: Sequence[Row], size: int, vocabulary: int, end_ids: Sequence[int]) -> list[int]:
    """The tokens that occur most often in generated text, in ascending order; those that end an answer always.

    Args:
        rows: Training rows, whose prompts do not count.
        size: How many tokens; where fewer occur, the lowest other ones are added.
        vocabulary: Size of the target's vocabulary.
        end_ids: The tokens that end an answer.
    """
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for tokens, prompt_length in rows:
        counts += torch.bincount(tokens[prompt_length:].long(), minlength=vocabulary)
    counts[list(end_ids)] = counts.sum() + 1
    order = counts.argsort(descending=True, stable=True)
    return sorted(order[:size].tolist())


def prepare_draft_vocabulary(target: PreTrainedModel, work_folder: Path, size: int) -> list[int]:
    """The draft vocabulary of the work folder, chosen from its rows if there is none yet."""
    file = work_folder / "draft_vocabulary.json"
    if not file.exists():
        rows = read_shards(work_folder / "rows")
        vocabulary = target.get_input_embeddings().weight.shape[0]
        for count in (2 * size, size // 2, size):
            ids = choose_draft_vocabulary(rows, min(count, vocabulary), vocabulary, end_token_ids(target))
            logger.info("a draft vocabulary of %d tokens: %.4f of the generated text", len(ids), coverage(rows, ids))
        keep_draft_vocabulary(work_folder, ids)
    return list(json.loads(file.read_text(encoding="utf-8")))


def keep_draft_vocabulary(work_folder: Path, draft_ids: Sequence[int]) -> None:
    """Write down the draft vocabulary that the work folder's checkpoints are for.

    Raises:
        ValueError: There is another one, and what it was chosen for.
    """
    file = work_folder / "draft_vocabulary.json"
    if not file.exists():
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(list(draft_ids)), encoding="utf-8")
        partial.replace(file)
    elif json.loads(file.read_text(encoding="utf-8")) != list(draft_ids):
        raise ValueError(
            f"work_folder: {str(file)!r} holds another draft vocabulary than the head that training begins with; "
            "remove it and head_checkpoint.pt, if this is a new training"
        )


def coverage(rows: Sequence[Row], draft_ids: Sequence[int] | Tensor) -> float:
    """Share of the rows' generated tokens that are in the draft vocabulary."""
    answers = torch.cat([tokens[prompt_length:] for tokens, prompt_length in rows])
    return float(torch.isin(answers, torch.as_tensor(draft_ids)).float().mean())


def default_feature_layers(layers: int) -> tuple[int, int, int]:
    """The layers that heads of this kind read: a low, a middle and a high one.

    Args:
        layers: Of the target.
    """
    return (min(2, layers), layers // 2, max(layers - 3, 1))


def new_head(
    target: PreTrainedModel,
    draft_ids: Sequence[int],
    shape: HeadShape,
    feature_layers: Sequence[int] | None = None,
    *,
    train_product: bool = True,
) -> Eagle3Head:
    """An untrained head: a random layer, and the target's rows of the draft vocabulary as the product with it.

    Args:
        target: Any causal LM, in the dtype that the head should have.
        draft_ids: The draft vocabulary, in ascending order.
        shape: Sizes of the layer.
        feature_layers: As in `Eagle3Settings`; `default_feature_layers` if None.
        train_product: Whether the vocabulary product is trained. Otherwise it remains the target's, which a saved head
            does without, however large its draft vocabulary.
    """
    text: Any = target.config.get_text_config(decoder=True)
    embeddings = target.get_input_embeddings().weight
    rope = text.rope_parameters
    config = LlamaConfig(
        vocab_size=embeddings.shape[0],
        hidden_size=text.hidden_size,
        intermediate_size=shape.intermediate_size or text.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.attention_heads or text.num_attention_heads,
        num_key_value_heads=shape.key_value_heads or text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        # Targets with several kinds of layers have one set for each.
        rope_parameters=dict(rope.get("full_attention", rope)),
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=False,
    )
    layers = tuple(feature_layers or default_feature_layers(text.num_hidden_layers))
    settings = Eagle3Settings(layers, text.hidden_size, len(draft_ids), fc_norm=True)
    head = Eagle3Head(config, settings).to(embeddings.device, embeddings.dtype)
    rows: Any = target.get_output_embeddings().weight
    if head.draft_ids is not None:
        head.draft_ids.copy_(torch.tensor(draft_ids))
    with torch.no_grad():
        head.lm_head.weight.copy_(rows[draft_token_ids(head)])
    head.share_with(target, lm_head=not train_product)
    return head


def step_weights(input_ids: Tensor, weights: Tensor, drafted: Tensor, settings: HeadLossSettings) -> Tensor:
    """What the guess at each position counts, by step.

    A guess at a token outside the draft vocabulary counts nothing, and neither do the later ones of its chain, which
    decoding would not come to. Where the text is drawn from the target's law p, a position so counts in the mean
    what p has inside the draft vocabulary: as much as can be accepted of a guess there.

    Args:
        input_ids: `[B, T]` int64.
        weights: Of the guess at the token that comes after each one, `[B, T]`, zero at padding.
        drafted: Whether a token is in the draft vocabulary, `[V]` bool.
        settings: Steps and their decay.

    Returns:
        `[steps, B, T]`, summing up to 1. Step j at position t is that of chain t - j: it guesses token t + 2.
    """
    real = weights > 0
    # The law of token t + 2 is that of position t + 1; the text itself has to go so far.
    base = pad(weights[:, 1:-1] * real[:, 2:], (0, 2))
    inside = pad(drafted[input_ids[:, 2:]], (0, 2)).to(base.dtype)
    alive = torch.ones_like(base)
    steps = []
    for step in range(settings.steps):
        alive = inside * (pad(alive, (1, 0))[:, :-1] if step else alive)
        each = base * alive
        steps.append(settings.step_decay**step * each / each.sum().clamp_min(1e-9))
    together = torch.stack(steps)
    return together / together.sum().clamp_min(1e-9)


class HeadLoss(nn.Module):
    """Cross entropy of a head's guesses to its target's distribution, plus that to the target's most likely token.

    Both models guess within the draft vocabulary: the target's law, too, is computed there alone, once a position for
    all steps. Logits are held for a chunk of positions at a time, and made only once (`GradientAtOnce`).

    Args:
        head: Gets the attention `UNROLLED`.
        target: The teacher, in any dtype.
        settings: The loss.
        compile_loss: Compile the part over the draft vocabulary, for one shape.
        compile_head: Compile the head's steps, for any shape.
    """

    def __init__(
        self,
        head: Eagle3Head,
        target: PreTrainedModel,
        settings: HeadLossSettings,
        *,
        compile_loss: bool = False,
        compile_head: bool = False,
    ) -> None:
        super().__init__()
        head.set_attn_implementation(UNROLLED)
        self.head = head
        self.target = target
        self.settings = settings
        product: Any = target.get_output_embeddings()
        rows, bias = product.weight.detach(), getattr(product, "bias", None)
        drafted = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        ids = draft_token_ids(head)
        drafted[ids] = True
        self.register_buffer("drafted", drafted, persistent=False)
        self.register_buffer("rows", rows[ids], persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach()[ids], persistent=False)
        chunk_loss: Callable[..., Tensor] = self._chunk_loss
        self.chunk_loss = torch.compile(chunk_loss, dynamic=False) if compile_loss else chunk_loss
        self.one_step: Callable[..., Any] = one_step
        if compile_head:
            # One graph for each number of earlier steps, and more where a batch has a single row.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * settings.steps)
            self.one_step = torch.compile(one_step, dynamic=True)

    def forward(self, input_ids: Tensor, weights: Tensor) -> Tensor:
        """The mean loss of a batch; arguments and result as those of `DistillationLoss`."""
        by_step = step_weights(input_ids, weights, self.drafted, self.settings).flatten(1)
        # Made first, because counting waits for the GPU: later the work that follows would already have to be queued.
        chunks = list(weighty_chunks(by_step[0], self.settings.chunk_tokens))
        features, target_hidden = read_target(self.target, self.head, input_ids)
        states = self.head.project(list(features))
        chains = unrolled(self.head, states, input_ids, self.settings.steps, self.one_step)
        # By the position of the chain's last token, so that all steps are held against one law.
        aligned = [pad(states, (0, 0, step, 0))[:, : input_ids.shape[1]] for step, states in enumerate(chains)]
        flat = torch.stack(aligned).flatten(1, 2)
        laws = target_hidden.flatten(0, 1)
        weights_of_guess = [self.head.lm_head.weight]
        if not self.head.settings.norm_output:
            weights_of_guess += self.head.norm.parameters()
        trained = [weight for weight in weights_of_guess if weight.requires_grad]
        losses = [
            GradientAtOnce.apply(self.chunk_loss, laws[index + 1], by_step[:, index] * real, flat[:, index], *trained)
            for index, real in chunks
        ]
        return torch.stack(losses).sum()

    def _chunk_loss(self, target_hidden: Tensor, weights: Tensor, states: Tensor) -> Tensor:
        """Weighted loss of one chunk: hidden states `[N, size]`, weights `[steps, N]`, states `[steps, N, H]`."""
        hard = self.settings.hard_weight
        with torch.no_grad():
            target_logits = linear(target_hidden, self.rows, self.bias).float()
            best = target_logits.argmax(dim=-1, keepdim=True)
            chosen = torch.arange(len(self.rows), device=best.device) == best
            # Both cross entropies in one: with labels that sum up to 1 + hard.
            labels = target_logits.softmax(dim=-1) + hard * chosen
        total = weights.new_zeros(())
        for step in range(len(states)):
            logits = draft_logits(self.head, states[step]).float()
            entropy = (1 + hard) * logits.logsumexp(dim=-1) - (labels * logits).sum(dim=-1)
            total = total + (entropy * weights[step]).sum()
        return total


class GradientAtOnce(torch.autograd.Function):
    """A scalar function that makes its gradient in the forward pass, so that nothing large is kept or made again.

    `GradientAtOnce.apply(function, *constants, states, *parameters)`, with two constants.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, function: Callable[..., Tensor], first: Tensor, second: Tensor, states: Tensor, *parameters: Tensor
    ) -> Tensor:
        """Return `function(first, second, states)`; the parameters are those that it uses and that are trained."""
        with torch.enable_grad():
            own = states.detach().requires_grad_()
            value = function(first, second, own)
            ctx.save_for_backward(*torch.autograd.grad(value, (own, *parameters)))
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Scale the gradients; constants have none."""
        return None, None, None, *(part * grad for part in ctx.saved_tensors)
