"""What drafters of texts remember: a corpus and earlier answers, in calls and jobs, on disk, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from test_drafters import cycling_model
from test_suffix_drafter import Texts, begun, write
from tiny_calls import assert_same_text, compared, endless_model, plain, speculative
from tiny_models import VOCABULARY, ragged_batch
from tiny_text import tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde import SpeculationConfig
from hf_dsde.decoding import run_ahead
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.drafting import Drafter

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


def test_answers_of_earlier_calls_are_known_where_they_are_shared() -> None:
    target, inputs = endless_model(), ragged_batch([7, 12, 9])
    accepted = {}
    for shares in (True, False):
        drafter = hf_dsde.SuffixDrafter(share_answers=shares)
        outputs = [compared(target, drafter, inputs, "static", max_new_tokens=24) for _ in range(2)]
        accepted[shares] = [output.speculation_statistics.accepted for output in outputs]
    assert accepted[False][0] == accepted[False][1]
    assert accepted[True][1] > 40 > accepted[True][0]


def test_rows_that_have_finished_serve_those_that_go_on() -> None:
    drafter = hf_dsde.SuffixDrafter()
    sequences = begun(drafter, [[3, 4], [5, 6], [7, 8]])
    write(sequences, [[20, 21, 22], [30], [20]])
    drafter.keep_rows([1, 2])
    assert list(drafter.propose(sequences, [0, 9, 9])[2].tokens) == [21]
    write(sequences, [[], [31], [21]])
    drafter.finish()
    assert drafter.memory.texts == [[3, 4, 20, 21, 22], [5, 6, 30, 31], [7, 8, 20, 21]]


def job(target: PreTrainedModel, drafter: Any, prompts: Texts, rows: int = 3, **arguments: Any) -> list[Any]:
    generator = hf_dsde.BatchGenerator(
        target,
        tiny_tokenizer(),
        assistant_model=drafter,
        batch_size=rows,
        max_new_tokens=16,
        **{"speculation_policy": "static", "do_sample": False, **arguments},
    )
    return list(generator.stream(prompts, ordered=True))


def prompts_of_a_job() -> list[list[int]]:
    """Every second prompt is one that was asked before, and they end after different numbers of tokens."""
    numbers = random.Random(0)
    prompts = [[numbers.randrange(3, VOCABULARY) for _ in range(numbers.randrange(1, 12))] for _ in range(6)]
    return [prompt for pair in zip(prompts, [prompts[0], *prompts], strict=False) for prompt in pair]


@pytest.mark.parametrize("refill", [True, False])
def test_a_jobs_texts_are_those_of_each_prompt_alone(refill: bool) -> None:
    target, prompts = endless_model(), prompts_of_a_job()
    rows = [{"input_ids": prompt, "max_new_tokens": 3 + 5 * (n % 4)} for n, prompt in enumerate(prompts)]
    alone = [
        target.generate(torch.tensor([row["input_ids"]]), do_sample=False, max_new_tokens=row["max_new_tokens"])
        for row in rows
    ]
    expected = [text[0, len(row["input_ids"]) :].tolist() for text, row in zip(alone, rows, strict=True)]
    accepted = {}
    for shares in (True, False):
        drafter = hf_dsde.SuffixDrafter(share_answers=shares)
        results = job(target, drafter, rows, refill=refill)
        assert [result.token_ids for result in results] == expected
        accepted[shares] = sum(result.statistics.accepted for result in results)
        remembered = [[*row["input_ids"][-8:], *text] for row, text in zip(rows, expected, strict=True)]
        assert sorted(drafter.memory.texts) == (sorted(remembered) if shares else [])
    assert accepted[True] > accepted[False]


@pytest.mark.usefixtures("recording")
def test_the_text_is_the_targets_own_where_the_host_works_beside_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes in the answers that are over while the target's pass is under way."""
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    target, drafter = endless_model(), hf_dsde.SuffixDrafter()
    for _ in range(2):
        output = compared(target, drafter, ragged_batch([1, 9, 4, 6]), "static", max_new_tokens=24)
    assert output.speculation_statistics.accepted > 40
    prompts = prompts_of_a_job()
    expected = [result.token_ids for result in job(target, target, prompts)]
    assert [result.token_ids for result in job(target, drafter, prompts)] == expected


@pytest.mark.parametrize("name", ["suffix", "sssd", "prompt_lookup"])
def test_a_row_that_begins_another_text_drafts_as_if_it_had_begun_with_it(name: str) -> None:
    target = cycling_model()
    prompts = [prompt * 2 for prompt in prompts_of_a_job()[1:8]]

    def counts(drafter: Any, prompts: Texts) -> list[tuple[int, int]]:
        results = job(target, drafter, prompts, rows=1, speculation_policy=SpeculationConfig("static", cost_cap=False))
        return [(result.statistics.drafted, result.statistics.accepted) for result in results]

    made = {"suffix": hf_dsde.SuffixDrafter, "sssd": hf_dsde.SSSDDrafter}
    apart = made[name](share_answers=False) if name in made else name
    assert counts(apart, prompts) == [count for prompt in prompts for count in counts(apart, [prompt])]


@pytest.mark.parametrize("policy", ["goodput", "auto"])
def test_a_job_under_policies_that_weigh_costs(policy: str) -> None:
    target, prompts = endless_model(), prompts_of_a_job()
    expected = [result.token_ids for result in job(target, target, prompts)]
    assert [each.token_ids for each in job(target, "suffix", prompts, speculation_policy=policy)] == expected


def test_a_job_says_what_memory_it_takes_without_a_draft() -> None:
    target = endless_model()
    generator = hf_dsde.BatchGenerator(target, tiny_tokenizer(), assistant_model="suffix", cache_budget=1 << 20)
    (device,) = generator.memory_plan().devices
    assert device.draft_bytes == 0
    with_draft = hf_dsde.BatchGenerator(target, tiny_tokenizer(), assistant_model=target, cache_budget=1 << 20)
    assert device.slot_bytes * 2 == with_draft.memory_plan().devices[0].slot_bytes


def identity(drafter: Any) -> str:
    return hf_dsde.BatchGenerator(endless_model(), tiny_tokenizer(), assistant_model=drafter).fingerprint


def test_a_jobs_identity_names_the_drafter_and_its_settings_but_not_what_it_has_seen() -> None:
    drafter = hf_dsde.SuffixDrafter([[5, 6]])
    before = identity(drafter)
    compared(endless_model(), drafter, ragged_batch([3]), "static", max_new_tokens=4)
    assert identity(drafter) == before == identity(hf_dsde.SuffixDrafter([[5, 6]]))
    others = [
        "suffix",
        "sssd",
        hf_dsde.SuffixDrafter([[5, 7]]),
        hf_dsde.SuffixDrafter([[5], [6]]),
        hf_dsde.SuffixDrafter([[5, 6]], min_score=1.0),
        hf_dsde.SSSDDrafter([[5, 6]]),
    ]
    assert len({before, *map(identity, others)}) == 1 + len(others)


def test_what_was_learnt_is_saved_and_read_again(tmp_path: Path) -> None:
    target, inputs = endless_model(), ragged_batch([7, 12, 9])
    drafter = hf_dsde.SuffixDrafter([[5, 6, 7]])
    expected = plain(target, inputs, max_new_tokens=12)
    speculative(target, drafter, inputs, "static", max_new_tokens=12)
    drafter.save_memory(tmp_path / "answers.safetensors")
    again = hf_dsde.SuffixDrafter(tmp_path / "answers.safetensors", share_answers=False)
    assert again.memory.texts == drafter.memory.texts
    assert [text[-12:] for text in again.memory.texts[1:]] == expected[:, -12:].tolist()
    output = speculative(target, again, inputs, "static", max_new_tokens=12)
    assert_same_text(output, expected)
    assert output.speculation_statistics.acceptance_rate > 0.8


def test_the_oldest_answers_are_forgotten() -> None:
    drafter = hf_dsde.SuffixDrafter([[3] * 9], memory_tokens=40)
    for seed in range(4):
        inputs = ragged_batch([2, 3], seed=seed)
        text = compared(endless_model(), drafter, inputs, "static", max_new_tokens=10).sequences
        assert len(drafter.memory) <= 40
    kept = drafter.memory.texts
    assert [row[-10:] for row in kept[-2:]] == text[:, -10:].tolist()
    assert [3] * 9 not in kept


@pytest.mark.parametrize("kind", ["strings", "column", "lists", "arrays", "tensors", "tokens of a data set"])
def test_a_corpus_is_given_in_many_ways(kind: str) -> None:
    tokenizer, texts = tiny_tokenizer(), ["abcdef", "Ghfe"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    corpus: dict[str, Any] = {
        "strings": texts,
        "column": Dataset.from_dict({"text": texts})["text"],
        "lists": ids,
        "arrays": [torch.tensor(text).numpy() for text in ids],
        "tensors": [torch.tensor(text) for text in ids],
        "tokens of a data set": Dataset.from_dict({"ids": ids})["ids"],
    }
    assert hf_dsde.SuffixDrafter(corpus[kind], tokenizer=tokenizer).memory.texts == ids


def file_of(folder: Path, *, texts: bool) -> Path:
    path = folder / "weights.safetensors"
    if texts:
        path.write_text("abc", encoding="utf-8")
    else:
        save_file({"weight": torch.ones(1)}, path)
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: hf_dsde.SuffixDrafter("abc"), r"corpus.*one text \(str\).*list of texts"),
        (lambda _: hf_dsde.SuffixDrafter({"text": ["a"]}), r"corpus.*a mapping.*dataset\['text'\]"),
        (lambda _: hf_dsde.SuffixDrafter(["abc"]), r"corpus: text 0 is a string \('abc'\).*tokenizer="),
        (lambda _: hf_dsde.SuffixDrafter([[1], {"a": 1}]), r"corpus: text 1 .*dict.*dataset\['text'\]"),
        (lambda _: hf_dsde.SuffixDrafter([[1.5]]), r"corpus: text 0"),
        (lambda _: hf_dsde.SuffixDrafter([[3, -1]]), r"corpus: text 0"),
        (lambda _: hf_dsde.SuffixDrafter([[1] * 9], memory_tokens=8), r"corpus.*memory_tokens=8.*Raise"),
        (lambda folder: hf_dsde.SuffixDrafter(file_of(folder, texts=True)), r"corpus.*weights.*save_memory"),
        (lambda folder: hf_dsde.SuffixDrafter(file_of(folder, texts=False)), r"corpus.*weights.*save_memory"),
        (lambda _: hf_dsde.SuffixDrafter(memory_tokens=0), r"memory_tokens.* 0"),
        (lambda _: hf_dsde.SuffixDrafter(per_match=0), r"per_match"),
        (lambda _: hf_dsde.SuffixDrafter(min_probability=1.5), r"min_probability.* 1.5"),
        (lambda _: hf_dsde.SuffixDrafter(min_score=-1), r"min_score.* -1"),
        (lambda _: hf_dsde.SuffixDrafter(share_answers=1), r"share_answers.* 1"),
        (lambda _: hf_dsde.SSSDDrafter(prompt_weight=2), r"prompt_weight.* 2"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[Path], Drafter], words: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make(tmp_path)


def test_tokens_that_the_target_does_not_have_are_refused() -> None:
    drafter = hf_dsde.SuffixDrafter([[3, VOCABULARY]])
    with pytest.raises(ValueError, match=rf"corpus: token {VOCABULARY} .*vocabulary of {VOCABULARY}.*tokenizer"):
        speculative(endless_model(), drafter, ragged_batch([2]), "static", max_new_tokens=4)


def test_an_unknown_name_is_refused() -> None:
    words = r"`assistant_model` is 'org/draft'.*'suffix'.*from_pretrained"
    with pytest.raises(ValueError, match=words):
        speculative(endless_model(), "org/draft", ragged_batch([2]), "static", max_new_tokens=4)
    with pytest.raises(ValueError, match=words):
        hf_dsde.BatchGenerator(endless_model(), tiny_tokenizer(), assistant_model="org/draft")


def test_a_second_call_while_the_first_is_under_way_is_refused() -> None:
    drafter = hf_dsde.SuffixDrafter()
    first = begun(drafter, [[3, 4, 3]])
    begun(drafter, [[3, 4, 3]])
    with pytest.raises(RuntimeError, match="SuffixDrafter serves one call at a time"):
        drafter.propose(first, [4])


class Notes(Drafter):
    """Notes the texts that it is told are over."""

    def __init__(self) -> None:
        self.over: list[list[int]] = []

    def get_candidates(self, sequences: SequenceBatch, plan: Any, monitor: Any) -> Any:
        return hf_dsde.drafting.CandidateBatch.of_lists([[3]] * sequences.rows, sequences.device)

    def begin_texts(self, rows: Sequence[int]) -> None:
        self.over += [self.call.sequences.host_text(row) for row in rows]


def test_a_drafter_is_shown_the_texts_that_are_over() -> None:
    target, prompts, drafter = endless_model(), prompts_of_a_job(), Notes()
    results = job(target, drafter, prompts, rows=2)
    texts = [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]
    assert len(drafter.over) == len(prompts) - 2
    assert all(text in texts for text in drafter.over)


def test_other_texts_than_the_growing_one_are_read_on_the_host() -> None:
    sequences = begun(hf_dsde.SuffixDrafter(), [[3, 4], [5, 6, 7]])
    write(sequences, [[8], [9, 10]])
    assert [sequences.host_text(0, first=n) for n in range(4)] == [[3, 4, 8], [4, 8], [8], []]
    assert isinstance(sequences.host_tokens, Tensor)
    assert sequences.host_text(1, first=3) == [9, 10]
