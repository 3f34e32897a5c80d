"""How far a target follows its EAGLE-3 head, measured on the target's own held-out answers.

As in `evaluate`, no speculative decoding is run: an unrolled pass over a finished answer gives what the head would
draft after each of its tokens, as long as the answer goes the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from distillation.evaluate import EvaluationSettings, Row
from distillation.heads import coverage
from distillation.unrolled import UNROLLED, draft_logits, draft_token_ids, read_target, unrolled
from hf_dsde.heads.eagle3 import Eagle3Head


@dataclass(frozen=True)
class HeadAcceptance:
    """One line of the result table. Depth 1 is the first draft token of a round.

    Attributes:
        task: Where the prompts come from.
        temperature: 0 is greedy.
        prompts: Number of answers.
        positions: Number of answer tokens.
        coverage: Share of them that are in the draft vocabulary.
        tokens_per_call: Answer tokens per target call, the prefill not counted, by the number of draft tokens a round,
            from 1.
        accepted: Share of accepted draft tokens by depth, of those whose predecessors were accepted, over rounds that
            begin at every token of the answers.
        overlap: Mean of `sum_x min(target_probs, draft_probs)` over the same draft tokens, by depth: the acceptance
            rate of speculative sampling at temperature 1 (Leviathan et al. 2023, corollary 3.6).
    """

    task: str
    temperature: float
    prompts: int
    positions: int
    coverage: float
    tokens_per_call: list[float]
    accepted: list[float]
    overlap: list[float]


def count_rounds(accepted: Sequence[Sequence[bool]], candidates: int) -> int:
    """Target calls needed for an answer.

    Args:
        accepted: For each token of the answer and each depth, whether a round that begins at this token would have its
            draft token of that depth accepted, those before it being accepted.
        candidates: Draft tokens a round. A call adds one token of its own.
    """
    calls = position = 0
    while position < len(accepted):
        calls += 1
        run = 0
        while run < candidates and position + run < len(accepted) and accepted[position][run]:
            run += 1
        position += run + 1
    return calls


@torch.inference_mode()
def measure_head(
    head: Eagle3Head,
    target: PreTrainedModel,
    rows: Sequence[Row],
    task: str,
    temperature: float,
    settings: EvaluationSettings,
) -> HeadAcceptance:
    """Score finished answers; `settings.candidates` is the greatest depth."""
    before = head.config._attn_implementation
    head.set_attn_implementation(UNROLLED)
    depth = settings.candidates
    calls = torch.zeros(depth, dtype=torch.int64)
    reached, accepted, overlap = (torch.zeros(depth, dtype=torch.float64) for _ in range(3))
    draws = torch.Generator().manual_seed(settings.seed)
    for start in range(0, len(rows), settings.score_rows):
        part = rows[start : start + settings.score_rows]
        for ok, shared in _score(head, target, part, temperature, depth, draws):
            inside = torch.arange(len(ok))[:, None] + torch.arange(depth) < len(ok)
            reach = inside & torch.cat([torch.ones(len(ok), 1), ok[:, :-1].cumprod(dim=1)], dim=1).bool()
            reached += reach.sum(dim=0)
            accepted += (ok & reach).sum(dim=0)
            overlap += (shared * reach).sum(dim=0)
            table = ok.tolist()
            calls += torch.tensor([count_rounds(table, count) for count in range(1, depth + 1)])
    head.set_attn_implementation(before)
    positions = sum(len(tokens) - prompt_length for tokens, prompt_length in rows)
    return HeadAcceptance(
        task=task,
        temperature=temperature,
        prompts=len(rows),
        positions=positions,
        coverage=coverage(rows, draft_token_ids(head).cpu()),
        tokens_per_call=(positions / calls).tolist(),
        accepted=(accepted / reached.clamp_min(1)).tolist(),
        overlap=(overlap / reached.clamp_min(1)).tolist(),
    )


def _score(
    head: Eagle3Head,
    target: PreTrainedModel,
    rows: Sequence[Row],
    temperature: float,
    depth: int,
    draws: torch.Generator,
) -> list[tuple[Tensor, Tensor]]:
    """For each row whether draft tokens are accepted, `[A, depth]` bool, and their overlaps, `[A, depth]` float64.

    Line a of the A answer tokens is a round that begins there; beyond the answer all is 0.
    """
    input_ids = pad_sequence([tokens for tokens, _ in rows], batch_first=True).to(target.device)
    features, hidden = read_target(target, head, input_ids)
    product: torch.nn.Module = target.get_output_embeddings()
    draft_ids = draft_token_ids(head)
    states = head.project(list(features))
    logits = [draft_logits(head, step) for step in unrolled(head, states, input_ids, depth)]
    scored = []
    for row, (tokens, prompt_length) in enumerate(rows):
        answer = tokens[prompt_length:].to(target.device)
        count = len(answer)
        target_probs = product(hidden[row, prompt_length - 1 : len(tokens) - 1]).float().softmax(dim=-1)
        ok = torch.zeros(count, depth, dtype=torch.bool)
        shared = torch.zeros(count, depth, dtype=torch.float64)
        uniform = torch.rand(count, depth, generator=draws)
        # Round a begins with chain prompt_length + a - 2; after a prompt of one token the first round has none.
        without = max(0, 2 - prompt_length)
        for step in range(min(depth, count - without)):
            first = prompt_length + without - 2
            draft = logits[step][row, first : first + count - without - step].float()
            at = slice(without + step, count)
            lines = slice(without, count - step)
            draft_probs = draft.softmax(dim=-1)
            inside = target_probs[at][:, draft_ids]
            shared[lines, step] = torch.minimum(inside, draft_probs).sum(dim=-1).double().cpu()
            proposed = draft_ids[draft.argmax(dim=-1)]
            if temperature == 0:
                ok[lines, step] = (proposed == answer[at]).cpu()
            else:
                # As in `measure`: given the answer's token x, with probability min(1, q(x)/p(x)).
                chosen = (draft_probs * (draft_ids == answer[at, None])).sum(dim=-1)
                ratio = chosen / target_probs[at].gather(-1, answer[at, None]).squeeze(1)
                ok[lines, step] = uniform[lines, step] < ratio.cpu()
        scored.append((ok, shared))
    return scored
