"""A batch that does not fit becomes a smaller one, and every row gets the one text that it would have got."""

from __future__ import annotations

import gc
import random
import warnings
import weakref

import pytest
import torch
from resumed_job import generator, prompts
from watched_forward import watch

from hf_dsde.batch import engine
from hf_dsde.batch.engine import BatchSizeWarning
from hf_dsde.batch.output import read_results
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.integration import loop_builder

ROWS = prompts()[:20]
POISON = 95
"""A token that neither prompts nor texts have, for a row that is too large alone."""


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore about it")


@pytest.fixture(scope="module")
def undisturbed():
    texts = {result.index: result.token_ids for result in generator().stream(ROWS)}
    assert not any(POISON in text for text in texts.values())
    return texts


def check(results, undisturbed, failed=()) -> None:
    """None lost, none twice, no text changed."""
    assert sorted(result.index for result in results) == list(range(len(ROWS)))
    for result in results:
        if result.index in failed:
            assert result.finish_reason == "error"
        else:
            assert (result.token_ids, result.error) == (undisturbed[result.index], None)


@pytest.mark.parametrize(
    ("call", "model", "refill"),
    [
        (1, "_model", True),
        (1, "_draft", False),
        (2, "_model", False),
        (2, "_draft", True),
        (9, "_model", False),
        (9, "_draft", True),
    ],
)
def test_memory_that_runs_out_in_any_pass_halves_the_batch(undisturbed, model, call, refill):
    made = generator(batch_size=8, refill=refill)
    passes = watch(getattr(made, model), out_of_memory, lambda number, _: number == call)
    with pytest.warns(BatchSizeWarning, match=r"with [48] rows, so the batch has [42] from now on") as caught:
        results = list(made.stream(ROWS))
    assert passes.failures == 1
    assert len(caught) == 1
    check(results, undisturbed)
    sizes = made.statistics.batch_sizes
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 4
    assert made.statistics.texts == len(ROWS)


@pytest.mark.parametrize("call", [1, 2, 3, 4], ids=["target", "draft", "target again", "draft again"])
def test_memory_that_runs_out_while_a_row_is_refilled_loses_neither_text_nor_prompt(undisturbed, monkeypatch, call):
    calls = iter(range(1, 1000))
    store = ModelRunner.store

    def failing(self, spans, tokens):
        if next(calls) == 2 + call:  # after both models' first prompts
            raise out_of_memory()
        return store(self, spans, tokens)

    monkeypatch.setattr(ModelRunner, "store", failing)
    made = generator(batch_size=4)
    with pytest.warns(BatchSizeWarning, match="with 4 rows, so the batch has 2 from now on; [1-4] texts begin again"):
        results = list(made.stream(ROWS))
    check(results, undisturbed)
    assert made.statistics.batch_sizes == [4, 2]


def test_memory_that_runs_out_before_there_are_caches_halves_the_batch(undisturbed, monkeypatch):
    create = loop_builder.create_runner

    def failing(model, rows, *arguments, **options):
        if rows > 2:
            raise out_of_memory()
        return create(model, rows, *arguments, **options)

    monkeypatch.setattr(loop_builder, "create_runner", failing)
    made = generator(batch_size=16)
    with pytest.warns(BatchSizeWarning) as caught:
        results = list(made.stream(ROWS))
    check(results, undisturbed)
    assert made.statistics.batch_sizes == [16, 8, 4, 2]
    assert [str(warning.message).split(",")[0] for warning in caught] == [
        f"Memory ran out with {rows} rows" for rows in (16, 8, 4)
    ]
    assert "CUDA out of memory. Tried to allocate 2.00 GiB." in str(caught[0].message)
    assert "more about it" not in str(caught[0].message)


def test_a_batch_goes_down_to_one_row_if_it_must(undisturbed):
    made = generator(batch_size=8)
    watch(made._model, out_of_memory, lambda _, tokens: len(tokens) > 1)
    with pytest.warns(BatchSizeWarning) as caught:
        results = list(made.stream(ROWS))
    assert len(caught) == 3
    check(results, undisturbed)
    assert made.statistics.batch_sizes == [8, 4, 2, 1]


@pytest.mark.parametrize("place", [0, 5, 19])
def test_a_row_that_does_not_fit_alone_becomes_an_error_and_the_others_get_their_texts(undisturbed, place):
    rows = [*ROWS]
    rows[place] = {"input_ids": [3, POISON, 4]}
    made = generator(batch_size=4)
    watch(made._model, out_of_memory, lambda _, tokens: bool((tokens == POISON).any()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchSizeWarning)
        results = list(made.stream(rows))
    check(results, undisturbed, failed=(place,))
    (failed,) = (result for result in results if result.error)
    assert failed.error.startswith("memory ran out with one row in the batch: CUDA out of memory")
    assert (made.statistics.failed, made.statistics.texts) == (1, len(rows) - 1)


def test_a_device_without_any_memory_makes_an_error_of_every_row():
    made = generator(batch_size=4)
    watch(made._model, out_of_memory)
    with pytest.warns(BatchSizeWarning):
        results = list(made.stream(ROWS[:3]))
    assert sorted(result.index for result in results) == list(range(3))
    assert all(result.finish_reason == "error" for result in results)


@pytest.mark.parametrize("seed", range(2))
def test_memory_that_runs_out_at_random_changes_no_text(undisturbed, seed, tmp_path):
    rng = random.Random(seed)
    made = generator(batch_size=16)
    # With one row nothing fails, so that every text is to be had.
    for model in (made._model, made._draft):
        watch(model, out_of_memory, lambda _, tokens: len(tokens) > 1 and rng.random() < 0.06)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchSizeWarning)
        made.run(ROWS, tmp_path / "out.jsonl")
    check(list(read_results(tmp_path / "out.jsonl")), undisturbed)
    sizes = made.statistics.batch_sizes
    assert sizes == sorted(sizes, reverse=True)


def test_the_caches_that_did_not_fit_are_gone_when_memory_is_given_back(monkeypatch):
    create = loop_builder.create_runner
    runners: list[weakref.ref] = []
    alive: list[int] = []

    def watched(*arguments, **options):
        runner = create(*arguments, **options)
        runners.append(weakref.ref(runner))
        return runner

    monkeypatch.setattr(loop_builder, "create_runner", watched)
    monkeypatch.setattr(
        engine, "release_memory", lambda _: alive.append(sum(runner() is not None for runner in runners))
    )
    made = generator(batch_size=8)
    watch(made._model, out_of_memory, lambda number, _: number == 4)
    gc.disable()
    try:
        with pytest.warns(BatchSizeWarning):
            list(made.stream(ROWS))
    finally:
        gc.enable()
    assert alive == [0, 0]


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    made = generator(batch_size=4)
    watch(made._model, lambda: RuntimeError("device-side assert triggered"), lambda number, _: number == 3)
    with pytest.raises(RuntimeError, match="device-side assert"):
        list(made.stream(ROWS))
