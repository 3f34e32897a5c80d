"""Records a trace of a pair: the target's own answers, and what both models think of every position.

One run of the decoding loop per temperature gives both tables. Its text is the target's own, exact at temperature 0 and
of the target's law at temperature 1, and goes through both models once more for `committed`; its rounds, the rejected
tokens included, become `drafted`. Logits are reduced to scalars a few positions at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BatchEncoding, EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_dsde import compat
from hf_dsde.config import SpeculationConfig
from hf_dsde.decoding.loop import SpeculativeLoop
from hf_dsde.decoding.sampling import BlockProcessor
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.stopping import Stopping
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.integration import encoders, validation
from hf_dsde.integration.drafters import model_drafter
from hf_dsde.integration.loop_builder import build_loop
from hf_dsde.measurement import provenance
from hf_dsde.measurement.statistics import StatisticsRecorder
from hf_dsde.pairs import Pair, encode, end_tokens
from hf_dsde.trace.position_signals import position_signals
from hf_dsde.trace.prompts import Prompt
from hf_dsde.trace.rounds import RoundNotes
from hf_dsde.trace.schema import COMMITTED, DRAFTED
from hf_dsde.trace.scoring import Text, score_answers
from hf_dsde.trace.writer import FLOAT32_MANTISSA_BITS, TraceWriter
from hf_dsde.utils.checks import check_flag, check_integer

TEMPERATURES = (0.0, 1.0)
"""Temperatures at which tokens are drawn from the distributions that the columns describe, or are their modes."""

OnBatch = Callable[[int], None]


@dataclass(frozen=True)
class _Batch:
    """Prompts that are answered together.

    Attributes:
        prompts: Their tasks and texts.
        inputs: The same as tokens, padded on the left.
        first: Sequence number of the first.
        temperature: 0 or 1.
    """

    prompts: Sequence[Prompt]
    inputs: BatchEncoding
    first: int
    temperature: float


@dataclass(frozen=True)
class _Settings:
    max_new_tokens: int
    draft_length: int
    seed: int

    @property
    def speculation(self) -> SpeculationConfig:
        """A static length in every round, without the plain round that measures costs."""
        return SpeculationConfig(
            "static",
            {"num_draft_tokens": self.draft_length},
            max_draft_length=self.draft_length,
            options=RuntimeOptions(cost_probe=False),
        )


def record_trace(
    pair: Pair,
    prompts: Sequence[Prompt],
    folder: Path | str,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    max_new_tokens: int = 200,
    batch_size: int = 8,
    draft_length: int = 8,
    seed: int = 0,
    tokens: bool = True,
    mantissa_bits: int = FLOAT32_MANTISSA_BITS,
    names: Mapping[str, str] | None = None,
    on_batch: OnBatch = lambda _sequences: None,
) -> Path:
    """Record a trace; `hf_dsde.trace.load_trace` reads it.

    No logits processor is applied and no setting of the models' generation configs but the end-of-sequence tokens: at
    temperature 0 the most likely token is taken, at temperature 1 tokens are drawn from the raw distributions.

    Args:
        pair: The models, in the dtype that generates and scores. float32 is the one to trust: in a lower precision a
            few percent of the tokens at temperature 0 are not the best ones of the scoring pass, whose shapes differ.
        prompts: Rows of the trace follow their order; batches are made of neighbours.
        folder: Must not exist, or be empty. It appears when the recording is complete.
        temperatures: 0, 1, or both. Sequence `t * len(prompts) + i` is prompt i at the t-th of them.
        max_new_tokens: Limit of every answer.
        batch_size: Prompts per batch.
        draft_length: Tokens drafted per round.
        seed: Of the sampling and of the draws of `residual_draft_probability`; each batch starts from it again, offset
            by its first sequence, so that what a batch brings does not depend on the batches before it.
        tokens: Whether token ids are written.
        mantissa_bits: How precisely the float columns are stored; see `hf_dsde.trace.writer.round_mantissa`.
        names: What `trace.json` calls the models, by `"target"` and `"draft"`; their own names when None.
        on_batch: Called after every batch with the number of its sequences.

    Returns:
        The folder.

    Raises:
        FileExistsError: The folder is not empty.
        ValueError: An argument is out of bounds, a prompt with its answer exceeds a model's context, or for any reason
            in `hf_dsde.integration.validation.check_models`.
    """
    settings = _Settings(
        max_new_tokens=check_integer("max_new_tokens", max_new_tokens, 1),
        draft_length=check_integer("draft_length", draft_length, 1),
        seed=check_integer("seed", seed, 0),
    )
    check_integer("batch_size", batch_size, 1)
    temperatures = _check_temperatures(temperatures)
    encoders.check_jobs(pair.target)
    validation.check_models(pair.target, pair.draft, settings.speculation.options.packed_attention)
    writer = TraceWriter(Path(folder), tokens=check_flag("tokens", tokens), mantissa_bits=mantissa_bits)
    batches = list(_batches(pair, prompts, temperatures, batch_size))
    _check_contexts(pair, batches, max_new_tokens)
    with writer, torch.no_grad():
        for batch in batches:
            _record_batch(pair, batch, settings, writer)
            on_batch(len(batch.prompts))
        writer.finish(
            {
                "pair": _names(pair, names),
                "dtype": str(pair.target.dtype).removeprefix("torch."),
                "temperatures": temperatures,
                "prompts": dict(Counter(prompt.task for prompt in prompts)),
                "max_new_tokens": max_new_tokens,
                "batch_size": batch_size,
                "draft_length": draft_length,
                "seed": seed,
                "provenance": _provenance(pair.target.device),
            }
        )
    return Path(folder)


def _record_batch(pair: Pair, batch: _Batch, settings: _Settings, writer: TraceWriter) -> None:
    """Answer a batch and append what it brings to both tables."""
    draws = None
    if batch.temperature > 0:
        draws = torch.Generator().manual_seed(settings.seed + batch.first)
    notes = RoundNotes(len(batch.prompts), draws)
    texts = _generate(pair, batch, settings, notes)
    _write(writer, DRAFTED, batch, notes.columns())
    _write(writer, COMMITTED, batch, _committed(pair, texts, settings.speculation.options, draws))


def _generate(pair: Pair, batch: _Batch, settings: _Settings, notes: RoundNotes) -> list[Text]:
    """Let the loop answer a batch while `notes` listens; the caller's random state stays as it was."""
    config = settings.speculation
    policy = config.build_policy()
    input_ids = batch.inputs["input_ids"]
    sequences = SequenceBatch(
        input_ids,
        batch.inputs["attention_mask"],
        max_new_tokens=settings.max_new_tokens,
        scratch=settings.draft_length + 1,
        pad_token=pair.tokenizer.pad_token_id,
    )
    capacity = max(sequences.prompt_lengths) + settings.max_new_tokens + settings.draft_length
    loop = build_loop(
        SpeculativeLoop,
        pair.target,
        model_drafter(pair.draft),
        sequences,
        capacity=capacity,
        policy=policy,
        process=BlockProcessor([]),
        stopping=Stopping(_criteria(pair, input_ids, settings.max_new_tokens), sequences),
        statistics=StatisticsRecorder(sequences.rows, policy.name),
        do_sample=batch.temperature > 0,
        config=config,
        listeners=[notes],
    )
    devices = {model.device for model in (pair.target, pair.draft) if model.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(settings.seed + batch.first)
        text, lengths = loop.run()
    width = sequences.prompt_width
    return [
        Text(row[width - prompt : width + length], prompt)
        for row, prompt, length in zip(text, sequences.prompt_lengths, lengths, strict=True)
    ]


def _criteria(pair: Pair, input_ids: Tensor, max_new_tokens: int) -> StoppingCriteriaList:
    """An answer ends at the limit and at the target's end-of-sequence tokens."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(input_ids.shape[1] + max_new_tokens)])
    ends = end_tokens(pair)
    if ends:
        criteria.append(EosTokenCriteria(torch.tensor(ends, device=input_ids.device)))
    return criteria


def _committed(
    pair: Pair, texts: Sequence[Text], options: RuntimeOptions, draws: torch.Generator | None
) -> dict[str, np.ndarray]:
    """Columns of the table `committed`, `sequence` being the row of the batch."""
    parts = []
    for chunk in score_answers(pair.target, pair.draft, texts, options):
        uniform = None if draws is None else torch.rand(len(chunk.row), generator=draws)
        scalars = position_signals(chunk.target_logits, chunk.draft_logits, chunk.tokens, uniform)
        parts.append({"sequence": chunk.row, "position": chunk.position, "token": chunk.tokens, **scalars})
    joined = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
    # Chunks come with ascending positions, which a stable sort by row keeps.
    order = np.argsort(joined["sequence"], kind="stable")
    return {name: values[order] for name, values in joined.items()}


def _write(writer: TraceWriter, table: str, batch: _Batch, columns: dict[str, np.ndarray]) -> None:
    if not columns:
        return
    tasks = np.array([prompt.task for prompt in batch.prompts], dtype=object)
    row = columns["sequence"]
    writer.add(table, {**columns, "task": tasks[row], "temperature": batch.temperature, "sequence": row + batch.first})


def _batches(pair: Pair, prompts: Sequence[Prompt], temperatures: Sequence[float], batch_size: int) -> Iterator[_Batch]:
    """Neighbouring prompts, at each temperature."""
    if not prompts:
        raise ValueError("`prompts` is empty: a trace needs at least one prompt")
    parts: list[tuple[int, Sequence[Prompt], BatchEncoding]] = []
    for first in range(0, len(prompts), batch_size):
        part = prompts[first : first + batch_size]
        inputs = encode(pair.tokenizer, [prompt.text for prompt in part]).to(pair.target.device)
        parts.append((first, part, inputs))
    for number, temperature in enumerate(temperatures):
        for first, part, inputs in parts:
            yield _Batch(part, inputs, number * len(prompts) + first, temperature)


def _check_temperatures(temperatures: Sequence[float]) -> list[float]:
    values = [float(temperature) for temperature in temperatures]
    if not values or len(set(values)) < len(values) or not set(values) <= set(TEMPERATURES):
        raise ValueError(
            f"`temperatures` is {list(temperatures)!r}, but 0, 1 or both are needed: the columns describe the "
            "distributions at temperature 1, and tokens of other temperatures are drawn from others"
        )
    return values


def _check_contexts(pair: Pair, batches: Sequence[_Batch], max_new_tokens: int) -> None:
    """Refuse texts that a model has no positions for, before hours of work run into them."""
    longest = max(int(batch.inputs["attention_mask"].sum(-1).max()) for batch in batches)
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        context = compat.context_length(model)
        if context is not None and longest + max_new_tokens > context:
            raise ValueError(
                f"`prompts` has one of {longest} tokens, which with `max_new_tokens`={max_new_tokens} exceeds the "
                f"{name}'s context of {context} tokens: leave it out, or lower `max_new_tokens`"
            )


def _names(pair: Pair, names: Mapping[str, str] | None) -> dict[str, str]:
    """What the models are called; a folder by its last part, since the rest is of one machine only."""
    given = dict(names or {})
    own = {"target": pair.target, "draft": pair.draft}
    for key, model in own.items():
        given.setdefault(key, Path(str(model.config._name_or_path)).name or type(model).__name__)
    return given


def _provenance(device: torch.device) -> dict[str, Any]:
    """Command, commit and versions; of the time only the date, which is what results are looked up by."""
    collected = provenance.collect(device)
    return {"date": collected.pop("time")[:10], **collected}
