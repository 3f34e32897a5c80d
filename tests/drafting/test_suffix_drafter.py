"""Drafts out of texts: the text stays the target's own, and comes faster where texts repeat."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from test_drafters import EIGHT, cycling_model, law_p_value
from tiny_calls import assert_same_text, compared, endless_model, plain, speculative
from tiny_models import VOCABULARY, ragged_batch
from tiny_policies import ScriptedLengths
from tiny_text import tiny_tokenizer
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

import hf_dsde
from hf_dsde.decoding.sampling import BlockProcessor
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.drafting import DraftCall, Drafter, RoundPlan
from hf_dsde.drafting.lookup.continuation import Continuation

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

Texts = Sequence[Sequence[int]]
DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "suffix": hf_dsde.SuffixDrafter,
    "sssd": hf_dsde.SSSDDrafter,
}


def begun(drafter: Drafter, prompts: Texts, new_tokens: int = 20) -> SequenceBatch:
    """Let a drafter begin a call with some prompts, without any model."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sequences = SequenceBatch(ids, mask, max_new_tokens=new_tokens, scratch=9, pad_token=0)
    process, config = BlockProcessor(LogitsProcessorList()), hf_dsde.SpeculationConfig()
    drafter.start(DraftCall(sequences, VOCABULARY, process, False, 99, None, config))
    return sequences


def write(sequences: SequenceBatch, tokens: Sequence[Sequence[int]]) -> None:
    """Let rows go on with some tokens each."""
    counts = torch.tensor([len(each) for each in tokens])
    width = int(counts.max())
    padded = torch.tensor([[*each, *[0] * (width - len(each))] for each in tokens])
    sequences.append(padded, counts)
    sequences.synchronise(sequences.generated.tolist(), padded)


def likeliest(own: Sequence[int], store: Texts, weight: float, most: int) -> list[int]:
    """What SSSD proposes, by counting in plain lists."""

    def places(texts: Texts, longest: int) -> list[list[int]]:
        for length in range(min(longest, len(own)), 0, -1):
            context = list(own[-length:])
            found = [
                list(text[end:])
                for text in texts
                for end in range(length, len(text))
                if list(text[end - length : end]) == context
            ]
            if found:
                return found
        return []

    sources = [(places([own], 3), weight, 1), (places(store, 99), 1 - weight, 0)]
    tokens: list[int] = []
    probability = 1.0
    for step in range(min(most, 8)):
        sources = [(going, w, unseen) for going, w, unseen in sources if going and w]
        if not sources:
            break
        likely = dict.fromkeys(range(VOCABULARY), 0.0)
        for going, w, unseen in sources:
            for text in going:
                if len(text) > step:
                    likely[text[step]] += w / (len(going) + unseen) / sum(part[1] for part in sources)
        best = max(likely.values())
        probability *= best
        if probability < 0.1:
            break
        (token,) = [token for token, mass in likely.items() if abs(mass - best) < 1e-9] or [-1]
        tokens.append(token)
        sources = [
            ([text for text in going if len(text) > step and text[step] == token], w, unseen)
            for going, w, unseen in sources
        ]
    return tokens


def test_the_likeliest_by_both_sources_is_what_counting_says() -> None:
    numbers, compared_texts = random.Random(0), 0
    for _ in range(300):
        own, *store = ([numbers.randrange(3, 7) for _ in range(numbers.randrange(2, 14))] for _ in range(3))
        weight = numbers.choice([0.0, 0.35, 0.8, 1.0])
        drafter = hf_dsde.SSSDDrafter(store, prompt_weight=weight)
        sequences = begun(drafter, [own])
        try:
            right = likeliest(own, store, weight, 6)
        except ValueError:
            continue  # two are as likely
        compared_texts += 1
        assert list(drafter.propose(sequences, [6])[0].tokens) == right
    assert compared_texts > 100


def test_of_a_rows_text_and_the_memory_the_better_one_is_proposed() -> None:
    drafter = hf_dsde.SuffixDrafter([[9, 8, 7, 21, 22, 23, 24], [40, 50], [40, 51]])
    prompts = [
        [6, 9, 8, 7],  # three tokens of the memory
        [5, 6, 7, 8, 9, 30, 31, 5, 6, 7, 8, 9],  # five of its own
        [40, 52, 4, 40],  # its own says so always, the memory half of the time
        [60, 61, 62],
    ]
    sequences = begun(drafter, prompts)
    said = drafter.propose(sequences, [9, 9, 9, 9])
    assert [list(each.tokens) for each in said] == [[21, 22, 23], [30, 31, 5, 6, 7], [52], []]
    assert [each.score for each in said] == [3.0, 5.0, 1.0, 0.0]
    assert [each.match for each in said] == [3, 5, 1, 0]
    write(sequences, [[21, 22], [30], [53], [60, 61]])
    said = drafter.propose(sequences, [2, 9, 0, 9])
    assert [list(each.tokens) for each in said] == [[23, 24], [31, 5, 6, 7, 8, 9], [], [62, 60][:2]]


def test_the_score_is_the_expected_number_of_tokens_that_stand() -> None:
    drafter = hf_dsde.SuffixDrafter([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 9], [5, 6, 4, 9]], per_match=2.0)
    sequences = begun(drafter, [[3, 5, 6]])
    assert drafter.propose(sequences, [9]) == [Continuation([7, 9], pytest.approx(3 / 4 + 2 / 4), 2)]
    assert list(drafter.propose(sequences, [1])[0].tokens) == [7]
    choosy = hf_dsde.SuffixDrafter([[5, 6, 7, 8], [5, 6, 7, 9]], per_match=2.0, min_probability=0.6)
    assert list(choosy.propose(begun(choosy, [[3, 5, 6]]), [9])[0].tokens) == [7]
    choosy = hf_dsde.SuffixDrafter([[5, 6, 7, 8], [5, 6, 7, 9]], min_score=1.6)
    assert list(choosy.propose(begun(choosy, [[3, 5, 6]]), [9])[0].tokens) == []


def test_scores_are_compared_with_what_stands() -> None:
    target, inputs = endless_model(), ragged_batch([7, 12, 9])
    answers = plain(target, inputs, max_new_tokens=24).tolist()
    right, wrong = hf_dsde.SuffixDrafter(answers), hf_dsde.SuffixDrafter([[*row[:-24], *[7] * 24] for row in answers])
    assert right.trust == wrong.trust == 0.5
    for _ in range(3):
        compared(target, right, inputs, "static", max_new_tokens=24)
    assert right.trust > 0.9
    sequences = begun(wrong, [[row[-25]] for row in answers])
    for _ in range(60):
        plan = RoundPlan(torch.full((3,), 4), [4] * 3, torch.ones(3).bool(), [True] * 3)
        drafted = wrong.get_candidates(sequences, plan, hf_dsde.drafting.DraftMonitor(None, frozenset(), "cpu", print))
        wrong.update_candidate_strategy(sequences, torch.empty(0), [0] * 3, drafted.host_lengths or [])
    assert wrong.trust < 0.1


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma3"])
@pytest.mark.parametrize("policy", ["static", "goodput", "auto"])
def test_the_text_is_the_targets_own(family: str, policy: str) -> None:
    """Of a corpus that knows half of the answers, with mistakes."""
    target, inputs = endless_model(family), ragged_batch([1, 9, 4, 6])
    answers = plain(target, inputs, max_new_tokens=24)[:, 6:].tolist()
    wrong = [[token if place % 7 else 5 for place, token in enumerate(text)] for text in answers[::2]]
    for make in DRAFTERS.values():
        drafter = make(wrong, share_answers=policy != "goodput")
        output = compared(target, drafter, inputs, policy, max_new_tokens=24)
        assert policy != "static" or output.speculation_statistics.accepted > 10


@pytest.mark.usefixtures("recording")
def test_the_text_is_the_targets_own_by_recorded_passes() -> None:
    """Between which the host takes in the answers that are over."""
    target, drafter = endless_model(), hf_dsde.SuffixDrafter()
    for _ in range(2):
        output = compared(target, drafter, ragged_batch([1, 9, 4, 6]), "static", max_new_tokens=24)
    assert output.speculation_statistics.accepted > 40
    prompts = prompts_of_a_job()
    expected = [result.token_ids for result in job(target, target, prompts)]
    assert [result.token_ids for result in job(target, drafter, prompts)] == expected


@pytest.mark.parametrize("name", ["suffix", "sssd", "prompt_lookup"])
def test_a_drafter_is_named(name: str) -> None:
    output = compared(cycling_model(), name, ragged_batch(EIGHT), "static", max_new_tokens=40)
    assert output.speculation_statistics.acceptance_rate > 0.5


def test_rows_that_sit_out_or_draft_little() -> None:
    target, inputs = cycling_model(), ragged_batch(EIGHT)
    turns = ScriptedLengths([[(row + turn) % 4 if turn % 3 else 0 for row in range(8)] for turn in range(40)])
    output = compared(target, "suffix", inputs, turns, max_new_tokens=24)
    assert output.speculation_statistics.acceptance_rate > 0.5


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_text_has_the_targets_law(name: str) -> None:
    """The memory holds answers of the very call, and a corpus that leads astray."""
    drafter = DRAFTERS[name]([[3, 1, 2, 2, 4, 0], [1, 3, 3, 1, 4]])
    for _ in range(2):
        assert law_p_value(drafter, rows=1024) > 1e-4


def test_who_looks_at_distributions_refuses_it() -> None:
    with pytest.raises(ValueError, match=r"speculation_policy='dsde'.*SuffixDrafter has none.*'static'"):
        speculative(cycling_model(), "suffix", ragged_batch([2]), "dsde", max_new_tokens=4)


def test_rounds_in_which_nobody_may_draft_read_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    own = SequenceBatch.host_text

    def noted(self: SequenceBatch, row: int, *, first: int = 0) -> list[int]:
        read.append(row)
        return own(self, row, first=first)

    monkeypatch.setattr(SequenceBatch, "host_text", noted)
    drafter = hf_dsde.SuffixDrafter(share_answers=False)
    compared(cycling_model(), drafter, ragged_batch(EIGHT), hf_dsde.StaticPolicy(0), max_new_tokens=8)
    assert not read
    only_second = ScriptedLengths([[0, 4, *[0] * 6]] * 20)
    compared(cycling_model(), drafter, ragged_batch(EIGHT), only_second, max_new_tokens=8)
    assert set(read) == {1}


def test_answers_of_earlier_calls_are_known_where_they_are_shared() -> None:
    target, inputs = endless_model(), ragged_batch([7, 12, 9])
    accepted = {}
    for shares in (True, False):
        drafter = hf_dsde.SuffixDrafter(share_answers=shares)
        outputs = [compared(target, drafter, inputs, "static", max_new_tokens=24) for _ in range(2)]
        accepted[shares] = [output.speculation_statistics.accepted for output in outputs]
    assert accepted[False][0] == accepted[False][1]
    assert accepted[True][1] > 40 > accepted[True][0]


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
        results = job(target, hf_dsde.SuffixDrafter(share_answers=shares), rows, refill=refill)
        assert [result.token_ids for result in results] == expected
        accepted[shares] = sum(result.statistics.accepted for result in results)
    assert accepted[True] > accepted[False]


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
