"""How often a target accepts its draft's tokens, measured on the target's own held-out answers.

No speculative decoding is run. Every accepted prefix is a prefix of the target's text, so one pass of the draft over a
finished answer gives what it would have proposed at every position, and walking along the answer gives the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distillation.generate import end_token_ids, render
from distillation.prompts import Prompt

Row = tuple[torch.Tensor, int]


@dataclass(frozen=True)
class EvaluationSettings:
    """What is measured.

    Attributes:
        candidates: Draft tokens per round (K).
        answer_tokens: Longest answer.
        continued_tokens: Length of answers that go on past their end, measured as well; 0 leaves them out.
        batch_size: Answers generated at a time.
        score_rows: Answers scored at a time.
        seed: Of the sampled answers and of the acceptance draws.
    """

    candidates: int = 4
    answer_tokens: int = 200
    continued_tokens: int = 0
    batch_size: int = 100
    score_rows: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Acceptance:
    """One line of the result table.

    Attributes:
        task: Where the prompts come from.
        temperature: 0 is greedy.
        prompts: Number of answers.
        positions: Number of answer tokens.
        greedy_agreement: Share of positions whose most likely draft token is the target's most likely one.
        overlap: Mean of `sum_x min(target_probs, draft_probs)`, the acceptance rate of speculative sampling at
            temperature 1 (Leviathan et al. 2023, corollary 3.6).
        tokens_per_call: Answer tokens per target call with K candidates, the prefill not counted.
    """

    task: str
    temperature: float
    prompts: int
    positions: int
    greedy_agreement: float
    overlap: float
    tokens_per_call: float


def count_calls(accepted: Sequence[bool], candidates: int) -> int:
    """Target calls needed for an answer, given for each position whether the draft's token would be accepted there.

    A call accepts up to `candidates` draft tokens and adds one token of its own.
    """
    calls = 0
    position = 0
    while position < len(accepted):
        calls += 1
        run = 0
        while run < candidates and position < len(accepted) and accepted[position]:
            run += 1
            position += 1
        position += 1
    return calls


def evaluate(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    score: Callable[..., Any] | None = None,
) -> list[dict[str, Any]]:
    """Measure a pair at temperatures 0 and 1 for each task.

    With `continued_tokens`, two more lines measure the greedy answers of all tasks together where no end token stops
    them: "continued" in whole, as benchmarks with a fixed number of new tokens read them, and "past the end" what comes
    after the first end token, if there is any.

    Both models should be in float32 and on one device, otherwise rounding decides some positions.

    Args:
        draft: What drafts.
        target: Whose answers are walked along.
        tokenizer: The target's.
        prompts: Of all tasks.
        settings: What is measured.
        score: Scores finished answers, and takes and gives what `measure` does, which is the default.
    """
    score = score or measure
    results: list[dict[str, Any]] = []
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        texts = [prompt.text for prompt in prompts if prompt.task == task]
        for temperature in (0.0, 1.0):
            torch.manual_seed(settings.seed)
            rows = answers(target, tokenizer, texts, temperature, settings)
            results.append(asdict(score(draft, target, rows, task, temperature, settings)))
    if settings.continued_tokens:
        rows = answers(target, tokenizer, [prompt.text for prompt in prompts], 0.0, settings, continued=True)
        for name, part in (("continued", rows), ("past the end", past_the_end(rows, end_token_ids(target)))):
            if part:
                results.append(asdict(score(draft, target, part, name, 0.0, settings)))
    return results


def past_the_end(rows: Sequence[Row], end_ids: Sequence[int]) -> list[Row]:
    """The rows in which something comes after the answer's first end token, with all up to this token as prompt."""
    later: list[Row] = []
    for tokens, prompt_length in rows:
        ends = torch.isin(tokens[prompt_length:-1], torch.tensor(end_ids)).nonzero()
        if len(ends):
            later.append((tokens, prompt_length + int(ends[0]) + 1))
    return later


def answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    temperature: float,
    settings: EvaluationSettings,
    *,
    continued: bool = False,
) -> list[Row]:
    """The target's answers, as rows `[T]` int64 on the CPU without padding, with the prompt's length.

    With `continued`, they go on past their end and all have `settings.continued_tokens`.
    """
    rows: list[Row] = []
    for start in range(0, len(texts), settings.batch_size):
        part = texts[start : start + settings.batch_size]
        rows += _answer_batch(target, tokenizer, part, temperature, settings, continued)
    return rows


@torch.inference_mode()
def _answer_batch(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    temperature: float,
    settings: EvaluationSettings,
    continued: bool,
) -> list[Row]:
    """As `answers`, in one batch."""
    inputs = tokenizer(
        [render(tokenizer, text) for text in texts],
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=not tokenizer.chat_template,
    ).to(target.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    length: dict[str, Any] = {"max_new_tokens": settings.answer_tokens}
    if continued:
        length = {"max_new_tokens": settings.continued_tokens, "eos_token_id": None}
    generate: Any = target.generate
    output = generate(**inputs, **length, **sampling).cpu()
    width = inputs["input_ids"].shape[1]
    ends = torch.isin(output[:, width:], torch.tensor([] if continued else end_token_ids(target)))
    rows: list[Row] = []
    for row, prompt_length in enumerate(inputs["attention_mask"].sum(dim=1).tolist()):
        first_end = ends[row].nonzero()
        stop = width + int(first_end[0]) + 1 if len(first_end) else output.shape[1]
        rows.append((output[row, width - prompt_length : stop], prompt_length))
    return rows


@torch.inference_mode()
def measure(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    rows: Sequence[Row],
    task: str,
    temperature: float,
    settings: EvaluationSettings,
) -> Acceptance:
    """Score finished answers."""
    agreement = overlap = 0.0
    positions = calls = 0
    draws = torch.Generator().manual_seed(settings.seed)
    for start in range(0, len(rows), settings.score_rows):
        part = rows[start : start + settings.score_rows]
        input_ids = pad_sequence([tokens for tokens, _ in part], batch_first=True).to(target.device)
        target_logits = target(input_ids=input_ids, use_cache=False).logits.float()
        draft_logits = draft(input_ids=input_ids, use_cache=False).logits.float()
        for row, (tokens, prompt_length) in enumerate(part):
            span = slice(prompt_length - 1, len(tokens) - 1)
            same = target_logits[row, span].argmax(-1) == draft_logits[row, span].argmax(-1)
            target_probs = target_logits[row, span].softmax(-1)
            draft_probs = draft_logits[row, span].softmax(-1)
            agreement += float(same.sum())
            overlap += float(torch.minimum(target_probs, draft_probs).sum())
            positions += len(same)
            answer = tokens[prompt_length:, None].to(target.device)
            if temperature == 0:
                accepted = draft_logits[row, span].argmax(-1) == answer.squeeze(1)
            else:
                # Given that the answer has token x here, it came from the draft with probability min(1, q(x)/p(x)):
                # that of "x proposed and accepted", min(p(x), q(x)), over that of x, p(x).
                ratio = draft_probs.gather(-1, answer) / target_probs.gather(-1, answer)
                accepted = torch.rand(len(same), generator=draws) < ratio.squeeze(1).cpu()
            calls += count_calls(accepted.tolist(), settings.candidates)
    return Acceptance(
        task=task,
        temperature=temperature,
        prompts=len(rows),
        positions=positions,
        greedy_agreement=agreement / positions,
        overlap=overlap / positions,
        tokens_per_call=positions / calls,
    )
