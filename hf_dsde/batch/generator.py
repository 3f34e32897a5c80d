"""The user's side of batch inference: one object for `datasets.map`, for streams of prompts and for whole jobs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dsde import compat
from hf_dsde.batch.admission import CacheBudget
from hf_dsde.batch.data_sets import rows_of_batch
from hf_dsde.batch.engine import BatchEngine, models_of
from hf_dsde.batch.fingerprint import Fingerprinted, generator_identity
from hf_dsde.batch.first_tokens import EmptyTextsWarning, FirstTokens
from hf_dsde.batch.job import InputRows, JobReport, run_job
from hf_dsde.batch.job_statistics import JobStatistics
from hf_dsde.batch.memory_plan import MemoryPlan, plan_memory
from hf_dsde.batch.prefetch import in_groups, prefetched
from hf_dsde.batch.preparation import Preparation
from hf_dsde.batch.refill_loop import FinishedText
from hf_dsde.batch.requests import RejectedRow, Request, RequestBuilder
from hf_dsde.batch.results import RowResult
from hf_dsde.config import SpeculationConfig
from hf_dsde.decoding.drafter import Drafter
from hf_dsde.execution.wrappers import unwrapped
from hf_dsde.integration.drafters import job_draft, model_of
from hf_dsde.integration.generation import Speculation
from hf_dsde.integration.validation import check_models
from hf_dsde.lossy_acceptance import described, warn_once
from hf_dsde.measurement.rounds import RoundListener
from hf_dsde.policies import StoppingPolicy
from hf_dsde.utils.checks import check_choice, check_flag, check_integer

DEFAULT_POLICY = "auto"
"""The policy of a data set where nobody has chosen one: rows come and go, and what drafting gains changes with them."""
ON_ERROR = ("record", "raise")
AHEAD = 4
"""Requests that are read and tokenised in advance, in batches."""
ENCODED_TOGETHER = 64
"""Prompts that a tokenizer works on at once, on all cores. The models wait for the first batch's."""
CALLABLES = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
"""Arguments of `generate` that are objects with code of their own."""


class RowError(ValueError):
    """A row from which nothing can be generated, under `on_error="raise"`."""


class BatchGenerator(Fingerprinted):
    """Generates from every row of a data set with a target and a draft.

    A row that has finished is handed the next prompt at once, so that no row of the batch idles while there are
    prompts. Each text is what `model.generate` gives for its prompt alone: exactly in float32 and float64 when greedy,
    in distribution when sampling; unless `SpeculationConfig(acceptance=...)` asks for a lossy rule.

    As a callable it serves `Dataset.map(generator, batched=True)` and `IterableDataset.map`, whose cache tells settings
    and models apart without reading the weights. `stream` yields results one by one; `run` writes them to a file and
    goes on where it stopped.

    Rows are text, chat messages, token ids, or mappings with one of these in a column, as `RequestBuilder` says; a
    row's own `max_new_tokens` and `stop_strings` columns replace those given here, and its `chat_template_kwargs` and
    `tools` are added to the template's arguments.

    Args:
        model: The target, in evaluation.
        tokenizer: Its tokenizer.
        assistant_model: The draft: a model, a head that was made for the target, a `Drafter`, or the name of one that
            needs no model, such as "suffix", or a list of such a one and a model. A drafter serves one stream or job
            at a time.
        speculation_policy: A policy's name, a policy, or a `SpeculationConfig`. None takes the policy of
            `speculation_config`, and `auto` where that is None too.
        speculation_config: Every other setting of speculation.
        speculation_listeners: Hear of every round. Each batch that a loop begins with counts from 0.
        batch_size: Rows of the batch, at least 1. Halved when the device runs out of memory.
        max_new_tokens: The most tokens after each prompt.
        stop_strings: Text or texts whose appearance ends generation.
        max_prompt_tokens: Longer prompts become errors; None leaves it to the models' context.
        column: The column that holds the prompts; None looks for `messages`, `prompt`, `text` and `input_ids`.
        chat: Whether prompts of plain text are what a user asks, to be put into the tokenizer's chat template. False
            hands them to the model as they stand. Chat messages always go through the template.
        chat_template_kwargs: Arguments of the chat template.
        cache_budget: Bytes per device for the caches of both models, with what a head keeps of hidden states. None
            takes 80 % of what is free on a CUDA device, and does not limit others. Requests that need longer rows than
            a whole batch may have run later, in a smaller batch.
        refill: Whether rows that have finished begin the next text at once; False runs one batch after the other.
        on_error: `record` makes a result with an `error` of a bad row, `raise` raises `RowError`.
        **generate_kwargs: Any other argument of `generate`, `assistant_tokenizer` among them. Processors and criteria
            of your own are shown each row alone.

    Attributes:
        statistics: Counts of the stream or job that was begun last.

    Raises:
        ValueError: If an argument has no meaning here, or for any reason named in `hf_dsde.integration.validation`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        assistant_model: PreTrainedModel | Drafter | str | Sequence[PreTrainedModel | Drafter | str],
        speculation_policy: str | StoppingPolicy | SpeculationConfig | None = None,
        speculation_config: SpeculationConfig | None = None,
        speculation_listeners: Iterable[RoundListener] = (),
        batch_size: int = 16,
        max_new_tokens: int = 256,
        stop_strings: str | Sequence[str] = (),
        max_prompt_tokens: int | None = None,
        column: str | None = None,
        chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_budget: int | None = None,
        refill: bool = True,
        on_error: str = "record",
        **generate_kwargs: Any,
    ) -> None:
        self._model = unwrapped("model", model)
        self._draft = job_draft(assistant_model, self._model, tokenizer, generate_kwargs.get("assistant_tokenizer"))
        self._tokenizer = tokenizer
        self._batch_size = check_integer("batch_size", batch_size, 1)
        self._cache_budget = None if cache_budget is None else check_integer("cache_budget", cache_budget, 1)
        self._refill = check_flag("refill", refill)
        self._on_error = check_choice("on_error", on_error, ON_ERROR)
        if speculation_policy is None and speculation_config is None:
            speculation_policy = DEFAULT_POLICY
        self._speculation = Speculation.of(speculation_policy, speculation_config, speculation_listeners)
        if self._speculation.config.acceptance is not None:
            warn_once(self._speculation.config.acceptance)
        self._generate_kwargs = generate_kwargs
        self._preparation = Preparation(
            self._model, self._draft, tokenizer, self._speculation.config.options.packed_attention, generate_kwargs
        )
        self._request_settings: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "stop_strings": [stop_strings] if isinstance(stop_strings, str) else list(stop_strings),
            "max_prompt_tokens": max_prompt_tokens,
            "context": compat.context_length(self._model),
            "column": column,
            "chat": chat,
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
        }
        image_tokens = compat.stand_in_tokens(self._model.config)
        self._builder = RequestBuilder(tokenizer, **self._request_settings, image_tokens=image_tokens)
        self._warned_of_empty_texts = False
        self.statistics = JobStatistics(acceptance=described(self._speculation.config.acceptance))

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides a result: models by name, revision and a sample of weights, and every setting."""
        from datasets.fingerprint import Hasher

        settings = {**self._request_settings, "policy": self._speculation.policy.name}
        if not settings["chat"]:
            del settings["chat"]  # as when there was no such setting, so that jobs of that time go on
        for name in CALLABLES:
            if self._generate_kwargs.get(name) is not None:
                settings[name] = Hasher.hash(self._generate_kwargs[name])
        return generator_identity(
            self._model,
            self._draft,
            self._tokenizer,
            self._speculation.config,
            self._preparation.config,
            settings,
        )

    def __call__(
        self, batch: Mapping[str, Sequence[Any]] | Sequence[Any], *others: Any, **settings: Any
    ) -> dict[str, list[Any]]:
        """Generate for a batch of `Dataset.map(batched=True)`.

        Args:
            batch: Columns of equal length, of which only those that make prompts are looked at; or the values of the
                one column that `map(input_columns=...)` names.
            *others: None are taken: what `map` hands over with more `input_columns`, `with_indices` or `with_rank`.
            **settings: None are taken: the `fn_kwargs` of `map`.

        Returns:
            New columns: `generated_text` (empty for a bad row), `generated_token_ids`, `finish_reason`,
            `generation_error` (empty for a good row) and `generation_statistics`.

        Raises:
            TypeError: What `map` hands over is no batch, or something else as well.
            ValueError: No column can hold prompts.
            RowError: For a bad row, if `on_error` is `raise`.
        """
        rows = rows_of_batch(batch, others, settings, self._request_settings["column"])
        results = list(self.stream(rows, ordered=True))
        counts = ("prompt_tokens", "new_tokens", "rounds", "drafted", "accepted")
        tokens: list[Any] = [result.token_ids or [] for result in results]
        if not any(tokens):
            # Empty lists alone would not say what later batches have in theirs.
            tokens = [np.empty(0, dtype=np.int64)] * len(results)
        return {
            "generated_text": [result.text or "" for result in results],
            "generated_token_ids": tokens,
            "finish_reason": [result.finish_reason for result in results],
            "generation_error": [result.error or "" for result in results],
            "generation_statistics": [
                {name: getattr(result.statistics, name, 0) for name in counts} for result in results
            ],
        }

    def stream(self, prompts: Iterable[Any], *, ordered: bool = False) -> Iterator[RowResult]:
        """Yield the result of every row.

        Args:
            prompts: Rows; read and tokenised some batches ahead, in a thread. A row that is free waits for its prompt,
                and the batch with it.
            ordered: Whether results come in the order of the rows. Otherwise they come as they finish.

        Raises:
            RowError: For a bad row, if `on_error` is `raise`.
        """
        rows = InputRows(prompts, self._request_settings["column"], paths=False)
        results, _ = self._generate(rows.share(0, 1, ()), rows.are_at_hand)
        return _in_order(results) if check_flag("ordered", ordered) else results

    def run(
        self,
        dataset: Any,
        output: str | os.PathLike[str],
        *,
        ordered: bool = False,
        overwrite: bool = False,
        progress: bool | None = None,
    ) -> JobReport:
        """Generate for all rows and write the results to a file; what is there already is not done again.

        Under `accelerate launch` every process does its share, and one of them joins the results at the end.

        Args:
            dataset: A `Dataset`, an `IterableDataset`, any iterable of rows, or the path of a file of them.
            output: Path of a `.jsonl` or `.parquet` file.
            ordered: Whether the file is sorted by the rows' places in the end.
            overwrite: Whether to start over.
            progress: Whether to show a bar; None shows it in terminals and notebooks.

        Raises:
            ValueError: If the file holds results of other settings or of other data.
            RowError: For a bad row, if `on_error` is `raise`; what was finished before is kept.
        """
        rows = InputRows(dataset, self._request_settings["column"])
        return run_job(
            rows,
            partial(self._generate, at_hand=rows.are_at_hand),
            output,
            identity=self.identity,
            ordered=ordered,
            overwrite=overwrite,
            progress=progress,
        )

    def memory_plan(self, dataset: Any = None) -> MemoryPlan:
        """Say what `run` will take of each device's memory, and which rows its caches have room for.

        No model runs; rows are read and tokenised one after another.

        Args:
            dataset: As for `run`; None plans for the models alone.
        """
        rows = None if dataset is None else InputRows(dataset, self._request_settings["column"]).share(0, 1, ())
        return plan_memory(
            self._model,
            model_of(self._draft) or self._model,  # one that is there already takes nothing
            self._budget(),
            self._batch_size,
            self._speculation.config.max_draft_length,
            None if rows is None else map(self._request, rows),
        )

    def _budget(self) -> CacheBudget:
        models = models_of(self._model, self._draft)
        return CacheBudget.of(models, self._cache_budget, self._speculation.config.max_draft_length)

    def _generate(self, rows: Iterable[tuple[int, Any]], at_hand: bool) -> tuple[Iterator[RowResult], JobStatistics]:
        """Return an iterator over the results of rows with their places, and what counts them.

        Args:
            rows: The rows.
            at_hand: Whether none of them has to be waited for, so that they can be encoded many at a time.
        """
        packed_attention = self._speculation.config.options.packed_attention
        check_models(self._model, model_of(self._draft), packed_attention)  # also what changed since
        self.statistics = JobStatistics(acceptance=described(self._speculation.config.acceptance))
        engine = BatchEngine(
            self._model,
            self._draft,
            self._speculation,
            self._preparation,
            self._batch_size,
            self._budget(),
            self._refill,
            at_hand,
            self.statistics,
        )
        return self._results(engine, rows, min(ENCODED_TOGETHER, self._batch_size) if at_hand else 1), self.statistics

    def _results(self, engine: BatchEngine, rows: Iterable[tuple[int, Any]], together: int) -> Iterator[RowResult]:
        ahead = max(AHEAD * self._batch_size // together, 1)
        requests = chain.from_iterable(prefetched(in_groups(rows, together), self._builder.build_all, ahead))
        first_tokens = FirstTokens()
        for text in engine.texts(first_tokens.watched(requests)):
            self._warn_of_empty_texts(first_tokens.after(text))
            yield self._result(text)
        self._warn_of_empty_texts(first_tokens.at_the_end())

    def _warn_of_empty_texts(self, complaint: str | None) -> None:
        if complaint is None or not getattr(self._tokenizer, "chat_template", None) or self._warned_of_empty_texts:
            return
        self._warned_of_empty_texts = True
        warnings.warn(complaint, EmptyTextsWarning, stacklevel=2)

    def _request(self, row: tuple[int, Any]) -> Request | RejectedRow:
        return self._builder.build(*row)

    def _result(self, text: FinishedText | RejectedRow) -> RowResult:
        if isinstance(text, RejectedRow):
            if self._on_error == "raise":
                raise RowError(f"row {text.index}: {text.error}")
            return RowResult.failed(text.index, text.error)
        words = self._tokenizer.decode(text.tokens, skip_special_tokens=True)
        assert isinstance(words, str)
        return RowResult(text.request.index, words, text.tokens, text.finish_reason, None, text.statistics)


def _in_order(results: Iterator[RowResult]) -> Iterator[RowResult]:
    """Hold results back until all before them have come."""
    waiting: dict[int, RowResult] = {}
    following = 0
    for result in results:
        waiting[result.index] = result
        while following in waiting:
            yield waiting.pop(following)
            following += 1
