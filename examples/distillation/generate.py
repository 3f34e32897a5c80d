"""Training text: the target's own answers, written as shards of token rows.

Only the target's own distribution matters to a draft, so no outside answers are used. A shard is one generated batch,
named after its number; shards that exist are not made again, which is what makes a run resumable. Each round of
generation has shards of its own beside those of earlier rounds.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from distillation.prompts import Prompt, article_prompts, article_requests, save_prompts
from hf_dsde.execution.attention import packed_gqa_attention

logger = logging.getLogger(__name__)

PACKED_DECODE = "packed_decode"
# With a last few rows running on, a batch costs full time for little text: their unfinished answers are kept.
DONE_SHARE = 0.9
SENTINEL = "\u2063user message\u2063"
INVENTED_CHARACTERS = (12, 1200)


@dataclass(frozen=True)
class GenerationSettings:
    """How answers are made.

    Attributes:
        batch_size: Rows at a time.
        prompt_tokens: Longest prompt; longer ones are left out.
        row_tokens: Longest row, prompt included.
        temperature: Of the sampled third; the rest is greedy.
        sampled_share: Share of sampled rows.
        continued_share: Share of answers, sampled or not, that go on past their end up to the row limit, as the target
            writes when its end tokens stop nothing. What generates a fixed number of tokens drafts such text, too.
        seed: Of the order and of the sampling.
        round: Whose rows are generated, from 0. A later round's come on top of those of earlier ones; it should have
            another seed.
    """

    batch_size: int
    prompt_tokens: int
    row_tokens: int
    temperature: float = 0.8
    sampled_share: float = 1 / 3
    continued_share: float = 0.0
    seed: int = 0
    round: int = 0

    def __post_init__(self) -> None:
        """Refuse shares that are none.

        Raises:
            ValueError: A share is below 0 or above 1, or the round is below 0.
        """
        for name in ("sampled_share", "continued_share"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise ValueError(f"{name}: {share} is no share of the rows; give a number from 0 to 1")
        if self.round < 0:
            raise ValueError(f"round: rounds are counted from 0, which {self.round} is below; give 0 or more")

    @property
    def suffix(self) -> str:
        """What the names of the round's files end with."""
        return f"-{self.round}" if self.round else ""


@dataclass(frozen=True)
class Job:
    """One batch to generate: rendered prompts, the temperature (0 is greedy), and whether it goes on past the end."""

    texts: list[str]
    temperature: float
    continued: bool = False


class MostRowsDone(StoppingCriteria):
    """Stops a whole batch once `DONE_SHARE` of its rows have ended."""

    def __init__(self, prompt_width: int, end_ids: Sequence[int]) -> None:
        self.prompt_width = prompt_width
        self.end_ids = list(end_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        """`input_ids` is `[B, T]` int64; returns `[B]` bool on its device. The rest is transformers' signature."""
        answers = input_ids[:, self.prompt_width :]
        ended = torch.isin(answers, torch.tensor(self.end_ids, device=answers.device)).any(dim=1)
        return (ended.float().mean() >= DONE_SHARE).expand(input_ids.shape[0])


def packed_decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Packed attention where one token is decoded, the stock function elsewhere.

    With a mask, the stock function repeats every KV head for each of its query heads, which triples the traffic of
    what already dominates a large batch.

    Args:
        module: The attention layer.
        query: `[B, H, Q, D]`.
        key: `[B, Hkv, L, D]`.
        value: `[B, Hkv, L, D]`.
        attention_mask: `[B, 1, Q, L]` bool, or None.
        scaling: Of the scores; `D**-0.5` when None.
        **kwargs: Passed on.

    Returns:
        `[B, Q, H, D]`, and None for the attention weights.
    """
    decodes = query.shape[2] == 1 and attention_mask is not None
    attend = packed_gqa_attention if decodes else sdpa_attention_forward
    return attend(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def render(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """One user message as the text that the model expects; the message itself for a model without chat template."""
    if not tokenizer.chat_template:
        return message
    messages = [{"role": "user", "content": message}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def end_token_ids(model: PreTrainedModel) -> list[int]:
    """The tokens that end an answer."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list) else [ids]


class TextGenerator:
    """Generates batches with one target, with a static cache and compiled decoding on a GPU."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: GenerationSettings
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.static = model.device.type == "cuda"
        self.end_ids = end_token_ids(model)
        if self.static:
            AttentionInterface.register(PACKED_DECODE, packed_decode_attention)
            AttentionMaskInterface.register(PACKED_DECODE, sdpa_mask)
            model.set_attn_implementation(PACKED_DECODE)

    def rows(self, job: Job) -> list[tuple[torch.Tensor, int]]:
        """Generate one batch.

        Returns:
            For each text the row `[T]` int64 on the CPU, prompt and answer without padding, and the prompt's length.
            Rows of a continued job have as many tokens after the prompt as any row can have, end tokens among them.
        """
        texts = list(job.texts)
        if self.static:
            # One shape for all batches: each other shape would be compiled and captured anew.
            texts += [texts[-1]] * (self.settings.batch_size - len(texts))
        inputs = self.tokenizer(
            texts,
            return_tensors="pt",
            padding="max_length" if self.static else "longest",
            max_length=self.settings.prompt_tokens if self.static else None,
            add_special_tokens=not self.tokenizer.chat_template,
            padding_side="left",
        ).to(self.model.device)
        width = inputs["input_ids"].shape[1]
        sampling: dict[str, Any] = {"do_sample": False}
        if job.temperature > 0:
            sampling = {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0}
        stopping: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([MostRowsDone(width, self.end_ids)])}
        if job.continued:
            stopping = {"eos_token_id": None}
        # The cache has one slot less than the row: with this length it is a multiple of 8, as fast kernels like it.
        length = self.settings.row_tokens + 1
        generate: Any = self.model.generate
        output = generate(
            **inputs,
            max_length=length,
            max_new_tokens=None,
            cache_implementation="static" if self.static else None,
            **stopping,
            **sampling,
        )
        end_ids = [] if job.continued else self.end_ids
        return self._unpadded(inputs["attention_mask"].cpu(), output.cpu(), len(job.texts), end_ids)

    def _unpadded(
        self, mask: torch.Tensor, output: torch.Tensor, count: int, end_ids: Sequence[int]
    ) -> list[tuple[torch.Tensor, int]]:
        """Cut off the padding, and what comes after an end: `mask` is `[B, P]` of the prompts, `output` is `[B, T]`."""
        width = mask.shape[1]
        lengths = mask.sum(dim=1)
        ends = torch.isin(output[:, width:], torch.tensor(end_ids))
        cut: list[tuple[torch.Tensor, int]] = []
        for row in range(count):
            prompt_length = int(lengths[row])
            # The pad token may be the end token itself, so the answer ends at the first of them.
            first_end = ends[row].nonzero()
            stop = width + int(first_end[0]) + 1 if len(first_end) else output.shape[1]
            cut.append((output[row, width - prompt_length : stop][: self.settings.row_tokens].clone(), prompt_length))
        return cut


def generate_shards(
    generator: TextGenerator, jobs: Sequence[Job], folder: Path, minutes: float, accelerator: Accelerator
) -> None:
    """Generate the shards of `jobs` that are still missing, until `minutes` have passed.

    Each process of an `accelerate launch` takes every n-th job.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    mine = range(accelerator.process_index, len(jobs), accelerator.num_processes)
    bar = tqdm(mine, desc=f"generating {folder.name}", disable=not accelerator.is_local_main_process, mininterval=5)
    tokens = 0
    started = time.monotonic()
    for number in bar:
        file = folder / f"shard-{number:05d}.safetensors"
        if file.exists():
            continue
        if time.monotonic() > end:
            break
        torch.manual_seed(generator.settings.seed * 100_003 + number)
        rows = generator.rows(jobs[number])
        write_shard(rows, file)
        tokens += sum(len(row) - prompt_length for row, prompt_length in rows)
        bar.set_postfix(new_tokens=tokens, per_second=round(tokens / (time.monotonic() - started)))
    bar.close()
    accelerator.wait_for_everyone()


def write_shard(rows: Sequence[tuple[torch.Tensor, int]], file: Path) -> None:
    """Write rows as one flat tensor with their lengths: two bytes a token where they are enough, otherwise four."""
    partial = file.with_suffix(".partial")
    tokens = torch.cat([row for row, _ in rows])
    small = bool((tokens <= torch.iinfo(torch.uint16).max).all())
    save_file(
        {
            "tokens": tokens.to(torch.uint16 if small else torch.int32),
            "lengths": torch.tensor([len(row) for row, _ in rows], dtype=torch.int32),
            "prompt_lengths": torch.tensor([prompt_length for _, prompt_length in rows], dtype=torch.int32),
        },
        partial,
    )
    partial.replace(file)


def read_shards(folder: Path) -> list[tuple[torch.Tensor, int]]:
    """All rows under a folder, as `([T] int32, prompt length)`, in an order that depends on the file names alone."""
    rows: list[tuple[torch.Tensor, int]] = []
    for file in sorted(folder.rglob("shard-*.safetensors")):
        shard = load_file(file)
        parts = shard["tokens"].to(torch.int32).split(shard["lengths"].tolist())
        rows += [
            (part, length) for part, length in zip(parts, shard["prompt_lengths"].tolist(), strict=True) if len(part)
        ]
    return rows


def invent_prompts(
    generator: TextGenerator, work_folder: Path, count: int, minutes: float, accelerator: Accelerator
) -> Path:
    """Let the target invent user messages, and news articles to summarise.

    Without a chat template there is no user turn to continue, and nothing is invented.

    Returns:
        The file with the invented prompts.
    """
    tokenizer, settings = generator.tokenizer, generator.settings
    file = work_folder / f"invented{settings.suffix}.json"
    if file.exists():
        return file
    prompts: list[Prompt] = []
    if tokenizer.chat_template and count:
        opening = render(tokenizer, SENTINEL).split(SENTINEL)[0]
        jobs = _batches([opening] * count, 1.0, settings.batch_size)
        folder = work_folder / f"invented-messages{settings.suffix}"
        generate_shards(generator, jobs, folder, minutes / 2, accelerator)
        messages = _answers(folder, tokenizer)
        requests = [render(tokenizer, prompt.text) for prompt in article_requests(count, settings.seed)]
        jobs = _batches(requests, settings.temperature, settings.batch_size)
        # Below "rows": the articles are answers of the target and are trained on like the others.
        folder = work_folder / "rows" / f"articles{settings.suffix}"
        generate_shards(generator, jobs, folder, minutes / 2, accelerator)
        articles = _answers(folder, tokenizer)
        shortest, longest = INVENTED_CHARACTERS
        prompts = [Prompt("other", text) for text in dict.fromkeys(messages) if shortest <= len(text) <= longest]
        prompts += article_prompts(list(dict.fromkeys(articles)), settings.seed)
    if accelerator.is_main_process:
        save_prompts(prompts, file)
        logger.info("%d invented prompts", len(prompts))
    accelerator.wait_for_everyone()
    return file


def plan_jobs(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, settings: GenerationSettings) -> list[Job]:
    """Batches of prompts of one task, one way of decoding and ending, and similar length, in shuffled order.

    Answers of one task end at similar lengths, so that few rows of a batch idle; shuffled, because a run may
    stop before the last batch.
    """
    rng = random.Random(settings.seed)
    # Numbers of its own: without continued answers the plan is the same as if there were no such thing.
    going_on = random.Random(f"continued-{settings.seed}")
    texts = [render(tokenizer, prompt.text) for prompt in prompts]
    tokenized = tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    groups: dict[tuple[str, bool, bool], list[tuple[int, str]]] = {}
    for prompt, text, ids in zip(prompts, texts, tokenized, strict=True):
        if len(ids) <= settings.prompt_tokens:
            sampled = rng.random() < settings.sampled_share
            continued = going_on.random() < settings.continued_share
            groups.setdefault((prompt.task, sampled, continued), []).append((len(ids), text))
    jobs: list[Job] = []
    for (_, sampled, continued), entries in groups.items():
        ordered = [text for _, text in sorted(entries)]
        jobs += _batches(ordered, settings.temperature if sampled else 0.0, settings.batch_size, continued)
    rng.shuffle(jobs)
    return jobs


def _batches(texts: Sequence[str], temperature: float, size: int, continued: bool = False) -> list[Job]:
    return [Job(list(texts[start : start + size]), temperature, continued) for start in range(0, len(texts), size)]


def _answers(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The generated parts of all rows under a folder, as text."""
    answers = [row[prompt_length:] for row, prompt_length in read_shards(folder)]
    decode: Callable[..., Any] = tokenizer.batch_decode
    return [text.strip() for text in decode([answer.tolist() for answer in answers], skip_special_tokens=True)]


def describe_rows(folder: Path) -> dict[str, int]:
    """Counts for the record: rows, tokens, and generated tokens under a folder."""
    rows = read_shards(folder)
    counts = {
        "rows": len(rows),
        "tokens": sum(len(row) for row, _ in rows),
        "generated_tokens": sum(len(row) - prompt_length for row, prompt_length in rows),
    }
    logger.info("training rows: %s", json.dumps(counts))
    return counts
