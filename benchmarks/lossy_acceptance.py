"""What lossy acceptance costs in quality and brings in speed, greedily, against the greedy answers of plain `generate`.

Per task and rule: answers that are the greedy ones, how long they are the same from the start, for word problems
whether the last number is the same, how likely the target finds the answers, and tokens per row and pass of the target.

python benchmarks/lossy_acceptance.py --output benchmarks/results/lossy_acceptance_cpu.json
python benchmarks/lossy_acceptance.py --device cuda --dtype bfloat16 --model FOLDER --draft FOLDER --prompts FILE
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import BatchEncoding

import hf_dsde
from hf_dsde import Consultant, LossyAcceptance, RuntimeOptions, SpeculationConfig, TypicalAcceptance, pairs
from hf_dsde.bench.workloads import Workload, prompts_of, read_prompt_file
from hf_dsde.lossy_acceptance import described
from hf_dsde.measurement import provenance
from hf_dsde.trace.prompts import Prompt

TASKS = ("math", "code", "news")
NUMBERS = "math"
"""The task whose answers end in a number."""
RULES: tuple[LossyAcceptance | None, ...] = (
    None,
    Consultant(threshold=0.7),
    Consultant(threshold=1.0),
    Consultant(threshold=2.0),
    TypicalAcceptance(threshold=0.3, alpha=0.55),
    TypicalAcceptance(threshold=0.09, alpha=0.3),
    TypicalAcceptance(threshold=0.01, alpha=0.1),
)
"""None is exact. Published are Consultant's 2.0, and typical acceptance's 0.09 and 0.3: it lets more pass the smaller
its numbers are. Of greedy text, a Consultant below 0.8 ln 2 (0.55) lets pass nothing but the target's best tokens."""
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt.

    Attributes:
        tokens: New tokens, the end token included.
        text: The same without special tokens.
        log_probability: Mean over the tokens, under the target's raw distribution, nats.
    """

    tokens: list[int]
    text: str
    log_probability: float


@dataclass
class Score:
    """What a rule did on a task.

    Attributes:
        answers: How many.
        equal: Share of them that are the greedy answer.
        shared_prefix: Tokens from the start that are the greedy answer's, as a share of the greedy answer; their mean.
        shared_prefix_tokens: The same in tokens.
        equal_numbers: Share of answers whose last number is the greedy answer's; None where no numbers are asked for.
        log_probability: Of the answers, the mean of their means.
        acceptance_rate: Accepted per drafted token.
        tokens_per_pass: Emitted tokens per row and pass of the target.
        seconds: Of all calls.
        tokens_per_second: Of all rows.
    """

    answers: int
    equal: float
    shared_prefix: float
    shared_prefix_tokens: float
    equal_numbers: float | None
    log_probability: float
    acceptance_rate: float
    tokens_per_pass: float
    seconds: float
    tokens_per_second: float


def shared_prefix(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens two answers share from the start."""
    differ = (place for place, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1])
    return next(differ, min(len(tokens), len(expected)))


def last_number(text: str) -> float | None:
    """The last number in a text, such as 1,234.5; None if there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def main(
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result there, as JSON.")] = None,
    model: Annotated[str | None, typer.Option(help="Target, by folder or Hub id; the packaged one by default.")] = None,
    draft: Annotated[str | None, typer.Option(help="Its draft or head.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Lines of JSON with prompt and task, for all tasks.")] = None,
    prompts_per_task: Annotated[int, typer.Option(min=1)] = 12,
    batch_size: Annotated[int, typer.Option(min=1)] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    draft_length: Annotated[int, typer.Option(min=1, help="Tokens drafted in every round.")] = 5,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option()] = "cpu",
) -> None:
    """Answer the same prompts by every rule and print what became of them."""
    warnings.simplefilter("ignore", hf_dsde.LossyAcceptanceWarning)
    precision = getattr(torch, dtype)
    if (model is None) != (draft is None):
        raise typer.BadParameter("--model and --draft belong together")
    if model is None or draft is None:
        pair = pairs.load_packaged_pair(precision, torch.device(device))
    else:
        pair = pairs.load_pair(model, draft, precision, torch.device(device))
    hf_dsde.enable(pair.target)
    given = None if prompts is None else read_prompt_file(prompts)
    scores: dict[str, dict[str, Score]] = {}
    for task in TASKS:
        texts = Workload(task, _prompts(task, given)).batch(prompts_per_task)
        batches = [texts[first : first + batch_size] for first in range(0, len(texts), batch_size)]
        scores[task] = measure(pair, batches, draft_length, max_new_tokens, numbers=task == NUMBERS)
        Console(width=150).print(_table(task, scores[task]))
    if output is not None:
        settings = {
            "model": model,
            "draft": draft,
            "dtype": dtype,
            "prompts_per_task": prompts_per_task,
            "batch_size": batch_size,
            "max_new_tokens": max_new_tokens,
            "draft_length": draft_length,
        }
        tasks = {task: {rule: asdict(score) for rule, score in by_rule.items()} for task, by_rule in scores.items()}
        result = {"provenance": provenance.collect(device), "settings": settings, "tasks": tasks}
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _prompts(task: str, given: list[Prompt] | None) -> list[Prompt]:
    return prompts_of(task) if given is None else given


def measure(
    pair: pairs.Pair, batches: Sequence[Sequence[str]], draft_length: int, max_new_tokens: int, *, numbers: bool
) -> dict[str, Score]:
    """Answer every batch by plain `generate` and by every rule.

    Args:
        pair: The models, the target enabled.
        batches: Prompts.
        draft_length: Tokens drafted in every round.
        max_new_tokens: Limit of every answer.
        numbers: Whether answers end in a number.

    Returns:
        By the name of the rule.
    """
    encoded = [pairs.encode(pair.tokenizer, batch).to(pair.target.device) for batch in batches]
    read, greedy = _Reader(pair), list[Answer]()
    for inputs in encoded:
        plain, _ = pairs.generate_once(pair, inputs, None, max_new_tokens=max_new_tokens, do_sample=False)
        greedy += read.answers(inputs, plain.sequences)
    scores = {}
    for rule in RULES:
        config = SpeculationConfig(
            "static",
            {"num_draft_tokens": draft_length},
            acceptance=rule,
            options=RuntimeOptions(cost_probe=False),
        )
        pairs.generate_once(pair, encoded[0], config, max_new_tokens=8, do_sample=False)  # warms up
        answers, parts, seconds = [], [], 0.0
        for inputs in encoded:
            out, took = pairs.generate_once(pair, inputs, config, max_new_tokens=max_new_tokens, do_sample=False)
            answers += read.answers(inputs, out.sequences)
            parts.append(out.speculation_statistics)
            seconds += took
        statistics = hf_dsde.SpeculationStatistics.merge(parts)
        prefixes = [shared_prefix(a.tokens, g.tokens) for a, g in zip(answers, greedy, strict=True)]
        same = [last_number(a.text) == last_number(g.text) for a, g in zip(answers, greedy, strict=True)]
        scores[described(rule)] = Score(
            answers=len(answers),
            equal=fmean(a.tokens == g.tokens for a, g in zip(answers, greedy, strict=True)),
            shared_prefix=fmean(n / len(g.tokens) for n, g in zip(prefixes, greedy, strict=True)),
            shared_prefix_tokens=fmean(prefixes),
            equal_numbers=fmean(same) if numbers else None,
            log_probability=fmean(answer.log_probability for answer in answers),
            acceptance_rate=statistics.acceptance_rate,
            tokens_per_pass=statistics.block_efficiency,
            seconds=seconds,
            tokens_per_second=statistics.emitted / seconds,
        )
    return scores


class _Reader:
    """Reads answers out of outputs. The target reads each once more, without padding, and none twice."""

    def __init__(self, pair: pairs.Pair) -> None:
        self._pair = pair
        self._known: dict[tuple[int, ...], float] = {}

    def answers(self, inputs: BatchEncoding, sequences: torch.Tensor) -> list[Answer]:
        """The answers of a batch."""
        width = inputs["input_ids"].shape[1]
        lengths = pairs.answer_lengths(sequences, width, pairs.end_tokens(self._pair)).tolist()
        answers = []
        for row, length in enumerate(lengths):
            first = width - int(inputs["attention_mask"][row].sum())
            text: list[int] = sequences[row, first : width + length].tolist()
            tokens = text[len(text) - length :]
            readable = str(self._pair.tokenizer.decode(tokens, skip_special_tokens=True))
            answers.append(Answer(tokens, readable, self._log_probability(text, length)))
        return answers

    @torch.inference_mode()
    def _log_probability(self, text: list[int], length: int) -> float:
        if tuple(text) not in self._known:
            ids = torch.tensor([text], device=self._pair.target.device)
            logits = self._pair.target(input_ids=ids[:, :-1], logits_to_keep=length).logits[0].float()
            likelihoods = logits.log_softmax(dim=-1).gather(1, ids[0, -length:, None])
            self._known[tuple(text)] = float(likelihoods.mean())
        return self._known[tuple(text)]


def _table(task: str, scores: dict[str, Score]) -> Table:
    table = Table(
        "acceptance", "equal", "shared prefix", "same number", "ln p a token", "accepted", "tokens a pass", "tokens/s"
    )
    table.title = f"{task}, {next(iter(scores.values())).answers} prompts"
    for name, score in scores.items():
        numbers = math.nan if score.equal_numbers is None else score.equal_numbers
        table.add_row(
            name,
            f"{score.equal:.0%}",
            f"{score.shared_prefix:.0%} ({score.shared_prefix_tokens:.0f})",
            "" if math.isnan(numbers) else f"{numbers:.0%}",
            f"{score.log_probability:.3f}",
            f"{score.acceptance_rate:.0%}",
            f"{score.tokens_per_pass:.2f}",
            f"{score.tokens_per_second:.1f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
