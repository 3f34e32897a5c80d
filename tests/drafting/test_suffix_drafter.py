"""Drafts out of texts: the text stays the target's own, and comes faster where texts repeat."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_drafters import EIGHT, cycling_model, law_p_value
from tiny_calls import compared, endless_model, plain, speculative
from tiny_models import VOCABULARY, ragged_batch
from tiny_policies import ScriptedLengths
from transformers import LogitsProcessorList

import hf_dsde
from hf_dsde.costs import BatchCosts, CostCurve
from hf_dsde.decoding.sampling import BlockProcessor
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.drafting import DraftCall, Drafter, RoundPlan
from hf_dsde.drafting.lookup import text_drafter
from hf_dsde.drafting.lookup.continuation import Continuation

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

Texts = Sequence[Sequence[int]]
DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "suffix": hf_dsde.SuffixDrafter,
    "sssd": hf_dsde.SSSDDrafter,
}


def begun(drafter: Drafter, prompts: Texts, new_tokens: int = 20, **settings: Any) -> SequenceBatch:
    """Let a drafter begin a call with some prompts, without any model."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sequences = SequenceBatch(ids, mask, max_new_tokens=new_tokens, scratch=9, pad_token=0)
    process, config = BlockProcessor(LogitsProcessorList()), hf_dsde.SpeculationConfig(**settings)
    target: Any = PackingTarget(len(prompts))
    drafter.start(DraftCall(sequences, VOCABULARY, process, False, 99, None, config, target))
    return sequences


class PackingTarget:
    """What is asked of a target's runner, which runs nothing here."""

    packs = True
    device = torch.device("cpu")

    def __init__(self, rows: int) -> None:
        self.live_rows = range(rows)

    def padded_width(self, width: int) -> int:
        return width


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
        plan = RoundPlan([4] * 3, [True] * 3, torch.device("cpu"))
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


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}], ids=str)
def test_processors_are_shown_the_drafts(options: dict[str, float]) -> None:
    """Whoever drafts: here nobody else writes the drafts after the text."""
    target, inputs = endless_model(), ragged_batch([9, 12, 8])
    drafter = hf_dsde.SuffixDrafter(plain(target, inputs, max_new_tokens=24, **options).tolist())
    output = compared(target, drafter, inputs, "static", max_new_tokens=24, **options)
    assert output.speculation_statistics.accepted > 30


@pytest.mark.parametrize("name", ["suffix", "sssd", "prompt_lookup"])
def test_a_drafter_is_named(name: str) -> None:
    output = compared(cycling_model(), name, ragged_batch(EIGHT), "static", max_new_tokens=40)
    assert output.speculation_statistics.acceptance_rate > 0.5


def test_a_drafter_is_named_to_the_decoding_method_itself() -> None:
    inputs, call = ragged_batch(EIGHT), {"max_new_tokens": 12, "do_sample": False}
    method = functools.partial(hf_dsde.generate, assistant_model="suffix", speculation_policy="static")
    text = cycling_model().generate(**inputs, **call, custom_generate=method)
    assert torch.equal(text, plain(cycling_model(), inputs, max_new_tokens=12))


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


def test_prompts_are_read_at_once_and_later_tokens_of_rows_that_may_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    own = SequenceBatch.host_text

    def noted(self: SequenceBatch, row: int, *, first: int = 0) -> list[int]:
        tokens = own(self, row, first=first)
        read.extend([row] * len(tokens))
        return tokens

    monkeypatch.setattr(SequenceBatch, "host_text", noted)
    drafter = hf_dsde.SuffixDrafter(share_answers=False)
    compared(cycling_model(), drafter, ragged_batch(EIGHT), hf_dsde.StaticPolicy(0), max_new_tokens=8)
    prompts = [row for row, length in enumerate(EIGHT) for _ in range(length)]
    assert read == prompts
    read.clear()
    only_second = ScriptedLengths([[0, 4, *[0] * 6]] * 20)
    compared(cycling_model(), drafter, ragged_batch(EIGHT), only_second, max_new_tokens=8)
    assert read[: len(prompts)] == prompts
    assert set(read[len(prompts) :]) == {1}


COPY = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
"""Its end stood before, and four tokens followed it."""


@pytest.mark.parametrize(
    ("look_up", "column", "drafted"),
    [
        (0.0, 0.0, [4, 0, 4]),  # columns are free
        (0.0, 0.02, [4, 0, 4]),
        (0.0, 1.0, [0, 0, 0]),  # a column takes as long as a step
        (5.0, 0.0, [0, 0, 0]),  # looking texts up takes as long as five steps
        (0.2, 0.0, [4, 0, 4]),
    ],
)
def test_rows_draft_where_that_brings_more_than_it_takes(look_up: float, column: float, drafted: list[int]) -> None:
    drafter = hf_dsde.SuffixDrafter(share_answers=False)
    sequences = begun(drafter, [COPY, [1, 2, 3, 4, 5], [10, *COPY]])
    costs = BatchCosts(CostCurve.line(look_up, 0.0) if look_up else None, CostCurve.line(1.0, column))
    assert drafter.allot([8, 8, 8], [8, 8, 8], costs) == drafted
    plan = RoundPlan(drafted, [True] * 3, torch.device("cpu"))
    if any(drafted):
        candidates = drafter.get_candidates(sequences, plan, None)  # type: ignore[arg-type] # nobody asks it
        assert candidates.host_lengths == drafted
        assert candidates.tokens[0].tolist() == [5, 6, 7, 8]


def test_a_column_that_brings_less_than_it_takes_is_cut_off() -> None:
    drafter = hf_dsde.SuffixDrafter(share_answers=False)
    begun(drafter, [COPY])
    counts = [drafter.allot([8], [8], BatchCosts(None, CostCurve.line(1.0, column)))[0] for column in (0, 0.3, 0.4, 1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 4
    assert 0 < counts[1] < 4 or 0 < counts[2] < 4
    assert counts[-1] == 0


def test_without_a_cap_the_policy_alone_decides() -> None:
    drafter = hf_dsde.SuffixDrafter()
    begun(drafter, [COPY], cost_cap=False)
    assert not drafter.requires
    assert drafter.allot([3], [8], None) == [3]
    begun(drafter, [COPY])
    assert drafter.requires == {hf_dsde.policies.Signal.COSTS}


def test_looks_that_find_nothing_take_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = hf_dsde.SuffixDrafter(share_answers=False)
    sequences = begun(drafter, [COPY])
    looks: list[int] = []
    clock = [0.0]
    original = drafter.propose

    def propose(sequences: SequenceBatch, most: Sequence[int]) -> list[Continuation]:
        looks.append(len(looks))
        clock[0] += 0.1
        return original(sequences, most)

    monkeypatch.setattr(drafter, "propose", propose)
    monkeypatch.setattr(text_drafter.time, "perf_counter", lambda: clock[0])
    dear, cheap = (BatchCosts(None, CostCurve.line(1.0, column)) for column in (1.0, 0.0))
    drafted = [drafter.allot([8], [8], dear)[0] for _ in range(33)]
    assert not any(drafted)
    assert len(looks) == 3, "a look of 0.1 steps is followed by 10 rounds without"
    for _ in range(11):
        drafted = drafter.allot([8], [8], cheap)
    assert drafted == [4]
    drafter.get_candidates(sequences, RoundPlan([4], [True], torch.device("cpu")), None)  # type: ignore[arg-type]
    looks.clear()
    assert [drafter.allot([8], [8], cheap) for _ in range(3)] == [[4]] * 3
    assert len(looks) == 3, "who finds something looks again"
