"""Training on rows of a target's own text: the loss of a layer draft, and the loop for any draft and loss."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Row = tuple[torch.Tensor, int]

# A multiple of 64 wastes few positions and keeps the number of different shapes small.
LENGTH_MULTIPLE = 64


@dataclass(frozen=True)
class TrainingSettings:
    """How the draft is trained.

    Attributes:
        learning_rate: Highest rate of AdamW, reached after `warmup_steps`, then a cosine down to zero.
        minutes: Planned training time, over all invocations; the cosine ends there.
        steps: Planned steps instead of a time, if given.
        tokens_per_batch: Positions per step and process, padding included.
        chunk_tokens: Positions whose logits are held at a time.
        hard_weight: Of the cross entropy to the target's most likely token, added to that to its distribution.
        prompt_weight: Weight of a prompt position against 1 for an answer position.
        warmup_steps: Steps of linear warm-up.
        weight_decay: Of AdamW.
        clip_norm: Largest gradient norm.
        checkpoint_minutes: Time between checkpoints.
        seed: Of the order of the rows.
    """

    learning_rate: float = 1.5e-3
    minutes: float = 15.0
    steps: int | None = None
    tokens_per_batch: int = 49_152
    chunk_tokens: int = 8_192
    hard_weight: float = 0.5
    prompt_weight: float = 0.3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    checkpoint_minutes: float = 1.0
    seed: int = 0


@dataclass
class Progress:
    """How far training has come; saved with every checkpoint."""

    step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    seconds: float = 0.0
    positions: int = 0

    def share(self, settings: TrainingSettings) -> float:
        """Done share of the plan, from 0 to 1."""
        if settings.steps is not None:
            return min(1.0, self.step / settings.steps)
        return min(1.0, self.seconds / (60 * settings.minutes))


class DistillationLoss(nn.Module):
    """Cross entropy of a draft to its target's distribution, plus that to the target's most likely token.

    The logits of a batch would fill the GPU (49152 positions x 49152 tokens), so they are made, used and made again
    in the backward pass a chunk of positions at a time.
    """

    def __init__(
        self, draft: PreTrainedModel, target: PreTrainedModel, chunk_tokens: int, hard_weight: float, compiled: bool
    ) -> None:
        super().__init__()
        self.draft = draft
        self.target = target
        self.chunk_tokens = chunk_tokens
        self.hard_weight = hard_weight
        chunk_loss: Callable[..., torch.Tensor] = self._chunk_loss
        self.chunk_loss = torch.compile(chunk_loss, dynamic=False) if compiled else chunk_loss

    def forward(self, input_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch.

        Args:
            input_ids: `[B, T]` int64, padded on the right: under causal attention no real position sees the padding.
            weights: `[B, T]` float32, zero at padding.

        Returns:
            A float32 scalar.
        """
        with torch.no_grad():
            target_hidden = self.target.model(input_ids=input_ids, use_cache=False).last_hidden_state
        draft_hidden = self.draft.model(input_ids=input_ids, use_cache=False).last_hidden_state
        flat = weights.flatten()
        losses = [
            checkpoint(
                self.chunk_loss,
                draft_hidden.flatten(0, 1)[index],
                target_hidden.flatten(0, 1)[index],
                flat[index] * real,
                use_reentrant=False,
            )
            for index, real in weighty_chunks(flat, self.chunk_tokens)
        ]
        return torch.stack(losses).sum() / flat.sum()

    def _chunk_loss(
        self, draft_hidden: torch.Tensor, target_hidden: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Summed loss of one chunk: hidden states `[N, D]`, weights `[N]`."""
        with torch.no_grad():
            target_logits = self.target.lm_head(target_hidden).float()
            target_probs = target_logits.softmax(dim=-1)
            best = target_logits.argmax(dim=-1, keepdim=True)
        draft_log_probs = self.draft.lm_head(draft_hidden).float().log_softmax(dim=-1)
        soft = -(target_probs * draft_log_probs).sum(dim=-1)
        hard = -draft_log_probs.gather(-1, best).squeeze(-1)
        return ((soft + self.hard_weight * hard) * weight).sum()


def weighty_chunks(weights: torch.Tensor, chunk_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Positions with a weight, so many at a time.

    Args:
        weights: `[N]`.
        chunk_tokens: Every chunk has so many, the last one by repetition of position 0: one shape for all.

    Yields:
        Positions `[chunk_tokens]` int64, and which of them count: 1 or 0, of the weights' dtype.
    """
    kept = weights.nonzero().squeeze(1)
    missing = -len(kept) % chunk_tokens
    real = weights.new_ones(len(kept) + missing)
    if missing:
        real[-missing:] = 0
    kept = torch.cat([kept, kept.new_zeros(missing)])
    yield from zip(kept.split(chunk_tokens), real.split(chunk_tokens), strict=True)


def epoch_batches(rows: Sequence[Row], settings: TrainingSettings, epoch: int) -> list[list[int]]:
    """Row numbers of each batch of an epoch: rows of similar length together, otherwise in random order."""
    rng = random.Random(f"{settings.seed}-{epoch}")
    # The noise keeps a row's companions from being the same in each epoch.
    order = sorted(range(len(rows)), key=lambda index: len(rows[index][0]) + rng.uniform(0, LENGTH_MULTIPLE))
    batches: list[list[int]] = []
    current: list[int] = []
    for index in order:
        width = -(-len(rows[index][0]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        if current and width * (len(current) + 1) > settings.tokens_per_batch:
            batches.append(current)
            current = []
        current.append(index)
    batches.append(current)
    rng.shuffle(batches)
    return batches


def collate(rows: Sequence[Row], prompt_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch.

    Returns:
        Tokens `[B, T]` int64 padded on the right, and weights `[B, T]` float32. The position of an answer's first
        token is the prompt's last.
    """
    width = -(-max(len(tokens) for tokens, _ in rows) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    weights = torch.zeros(len(rows), width)
    for row, (tokens, prompt_length) in enumerate(rows):
        input_ids[row, : len(tokens)] = tokens
        weights[row, : len(tokens)] = 1.0
        weights[row, : max(0, prompt_length - 1)] = prompt_weight
    return input_ids, weights


def _batch_stream(
    rows: Sequence[Row], settings: TrainingSettings, progress: Progress, accelerator: Accelerator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end from where `progress` stands, which they move on; each process gets its own."""
    while True:
        batches = epoch_batches(rows, settings, progress.epoch)
        usable = max(1, len(batches) // accelerator.num_processes)
        for number in range(progress.batch_in_epoch, usable):
            chosen = batches[(number * accelerator.num_processes + accelerator.process_index) % len(batches)]
            progress.batch_in_epoch = number + 1
            yield collate([rows[index] for index in chosen], settings.prompt_weight)
        progress.epoch += 1
        progress.batch_in_epoch = 0


def _optimizer(draft: PreTrainedModel, settings: TrainingSettings) -> torch.optim.Optimizer:
    """AdamW on the draft's own weights: embeddings and head are the target's and stay as they are."""
    trainable = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trainable, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
    )


def _set_learning_rate(optimizer: Any, settings: TrainingSettings, progress: Progress) -> float:
    """Linear warm-up, then a cosine over the planned time or steps."""
    warmup = min(1.0, (progress.step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    rate = settings.learning_rate * warmup * 0.5 * (1 + math.cos(math.pi * progress.share(settings)))
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def save_checkpoint(file: Path, draft: PreTrainedModel, optimizer: Any, progress: Progress) -> None:
    """Write the draft's trainable weights, the optimizer and the position in the data, in one step."""
    partial = file.with_suffix(".partial")
    weights = {name: value for name, value in draft.named_parameters() if value.requires_grad}
    torch.save({"draft": weights, "optimizer": optimizer.state_dict(), "progress": vars(progress)}, partial)
    partial.replace(file)


def load_checkpoint(file: Path, draft: PreTrainedModel, optimizer: Any) -> Progress:
    """Restore what `save_checkpoint` wrote; a fresh start if there is none."""
    if not file.exists():
        return Progress()
    state = torch.load(file, map_location=draft.device, weights_only=True)
    parameters = dict(draft.named_parameters())
    with torch.no_grad():
        for name, value in state["draft"].items():
            parameters[name].copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def train(
    draft: PreTrainedModel,
    loss_module: nn.Module,
    rows: Sequence[Row],
    settings: TrainingSettings,
    file: Path,
    accelerator: Accelerator,
    stop_at: float = math.inf,
) -> Progress:
    """Train `draft` in place until the plan is fulfilled or the clock says `stop_at`.

    Args:
        draft: In float32.
        loss_module: Gives a batch's mean loss for what `collate` makes, and holds the draft.
        rows: Of tokens.
        settings: The plan.
        file: The checkpoint, from which training goes on if it exists.
        accelerator: Devices and mixed precision.
        stop_at: Time on `time.monotonic()` at which to save a checkpoint and return, whatever is left of the plan.

    Returns:
        How far training has come; `share(settings)` is 1 when the plan is fulfilled.
    """
    loss_module, optimizer = accelerator.prepare(loss_module, _optimizer(draft, settings))
    progress = load_checkpoint(file, draft, optimizer)
    draft.train()
    shown = accelerator.is_local_main_process
    bar = tqdm(initial=progress.step, total=settings.steps, desc="training", disable=not shown, mininterval=10)
    last_save = clock = time.monotonic()
    stream = _batch_stream(rows, settings, progress, accelerator)
    while progress.share(settings) < 1 and clock < stop_at:
        input_ids, weights = next(stream)
        rate = _set_learning_rate(optimizer, settings, progress)
        loss = loss_module(input_ids.to(accelerator.device), weights.to(accelerator.device))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(draft.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        progress.positions += int((weights > 0).sum()) * accelerator.num_processes
        if progress.step % 20 == 0:
            # Reading the loss waits for the GPU, which also keeps the clock honest.
            bar.set_postfix(loss=f"{loss.item():.3f}", lr=f"{rate:.1e}", epoch=progress.epoch)
        now = time.monotonic()
        progress.seconds += now - clock
        clock = now
        bar.update(1)
        if accelerator.is_main_process and now - last_save > 60 * settings.checkpoint_minutes:
            save_checkpoint(file, draft, optimizer, progress)
            last_save = now
    bar.close()
    if accelerator.is_main_process:
        save_checkpoint(file, draft, optimizer, progress)
    accelerator.wait_for_everyone()
    draft.eval()
    return progress
