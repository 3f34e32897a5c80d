"""Texts and a model that draft together: exact text and law, who drafts when, and what each is told."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from sampled_law import toy_model
from test_drafters import EIGHT, cycling_model, law_p_value
from tiny_calls import QUIET, compared, config_of, endless_model, pair, plain, speculative
from tiny_heads import fitted_head, reference_draft, tiny_head
from tiny_models import VOCABULARY, ragged_batch
from tiny_policies import RandomLengths
from tiny_rounds import Notes
from tiny_text import tiny_tokenizer
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_dsde
from hf_dsde.costs import CostModel
from hf_dsde.decoding import loop, run_ahead
from hf_dsde.decoding.candidates import CandidateBatch, Sampled
from hf_dsde.decoding.plan import RoundKind, RoundPlan, next_plan
from hf_dsde.decoding.run_ahead import RunAhead
from hf_dsde.decoding.stop_flag import StopFlag
from hf_dsde.drafting import chain
from hf_dsde.drafting import hybrid as hybrids
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.drafting.choice import Choice, Offer
from hf_dsde.drafting.head import HeadDrafter
from hf_dsde.drafting.hybrid import HybridDrafter
from hf_dsde.drafting.lookup.continuation import NOTHING, Continuation
from hf_dsde.drafting.lookup.text_drafter import TextDrafter
from hf_dsde.drafting.model import ModelDrafter
from hf_dsde.measurement.views import numbers
from hf_dsde.policies import BatchInfo, RoundOutcome, Signal, StoppingPolicy

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


def priced(draft_step: float, column: float = 0.0) -> hf_dsde.SpeculationConfig:
    """Settings with given costs: a plain step takes 1, a draft step so much, a further column likewise."""
    costs = CostModel.relative(draft_step, [1.0 + column * width for width in range(33)]).to_dict()
    return config_of(QUIET, costs=costs, cost_cap=False, refresh_costs=False)


CHEAP, DEAR = priced(0.001), priced(50.0)
"""Draft steps that are always worth it, and ones that never are where a text knows anything."""


class Tokens(list[int]):
    """A text as it is."""


class Knowing(TextDrafter[Tokens]):
    """Knows how some texts go on, but for every seventh token, and lets no score be trusted."""

    def __init__(self, *texts: Sequence[int], longest: int = 99) -> None:
        self._known, self._longest = [list(text) for text in texts], longest

    def new_text(self) -> Tokens:
        return Tokens()

    def continuation(self, text: Tokens, most: int) -> Continuation:
        end = len(text)
        known = next((each for each in self._known if each[:end] == list(text)), [])
        tokens = [token if place % 7 else 5 for place, token in enumerate(known)][end : end + min(most, self._longest)]
        return Continuation(tokens, float(len(tokens)), end) if tokens else NOTHING


class Astray(Knowing):
    """Proposes tokens that follow from the text's last one and nothing else."""

    def continuation(self, text: Tokens, most: int) -> Continuation:
        tokens = [(3 * text[-1] + 2 * step) % 5 for step in range(min(most, self._longest))]
        return Continuation(tokens, float(len(tokens)), 1)


def known(target: Any, inputs: dict[str, Tensor], new_tokens: int, **options: Any) -> list[list[int]]:
    """What a target makes of prompts, without padding."""
    text = plain(target, inputs, max_new_tokens=new_tokens, **options)
    first = inputs["attention_mask"].argmax(dim=1).tolist()
    return [row[begin:] for row, begin in zip(text.tolist(), first, strict=True)]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[CandidateBatch]:
    """What hybrids propose, round by round."""
    seen: list[CandidateBatch] = []
    original = HybridDrafter.get_candidates

    def get_candidates(self: HybridDrafter, *arguments: Any) -> CandidateBatch:
        seen.append(original(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(HybridDrafter, "get_candidates", get_candidates)
    return seen


@pytest.fixture
def chosen_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who drafts is a matter of chance: what is decided well or badly may change no text."""
    numbers = random.Random(0)

    def choose(model: Sequence[Offer], texts: Sequence[Offer], costs: Any) -> Choice:
        offering = [row for row, text in enumerate(texts) if text.tokens]
        return Choice(frozenset(row for row in offering if numbers.random() < 0.6), numbers.random() < 0.8)

    monkeypatch.setattr(hybrids, "choose", choose)


def mixed(rounds: Sequence[CandidateBatch]) -> int:
    """Rounds in which both have drafted."""
    return sum(1 for each in rounds if any(each.unjudged) and each.steps)


def kinds(rounds: Sequence[CandidateBatch]) -> set[tuple[bool, bool]]:
    """Whether texts and the model have drafted, in any round."""
    return {(any(each.unjudged), each.steps > 0) for each in rounds}


ALL_KINDS = {(True, True), (True, False), (False, True)}
LENGTHS = [1, 9, 4, 6]


@pytest.mark.usefixtures("chosen_at_random")
@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.parametrize(("family", "overlapping"), [("llama", True), ("mistral", False), ("gpt2", True)])
def test_the_text_is_the_targets_own(
    family: str, kind: str, overlapping: bool, rounds: list[CandidateBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlapping)
    target, draft = pair(family)
    draft = draft if kind == "model" else tiny_head(target, draft_vocabulary=70)
    inputs = ragged_batch(LENGTHS)
    text = Knowing(*known(target, inputs, 40)[:3])
    for policy in (hf_dsde.StaticPolicy(3), RandomLengths(5, stop_probability=0.2)):
        output = compared(target, [text, draft], inputs, policy, CHEAP, max_new_tokens=40)
        assert output.speculation_statistics.accepted > 20
    assert kinds(rounds) == ALL_KINDS


@pytest.mark.usefixtures("chosen_at_random")
@pytest.mark.parametrize("policy", hf_dsde.available_policies())
def test_every_policy(policy: str, rounds: list[CandidateBatch], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    both = [draft, Knowing(*known(target, inputs, 40)[::2])]
    for overlapping, capped in ((False, False), (True, True)):
        monkeypatch.setattr(run_ahead, "overlaps", lambda device, answer=overlapping: answer)
        compared(target, both, inputs, policy, CHEAP.replace(cost_cap=capped), max_new_tokens=40)
    assert kinds(rounds) >= {(True, True), (True, False)}


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_measured_costs_and_rows_that_leave(rows: int) -> None:
    target, draft = pair()
    inputs = ragged_batch([1 + 3 * row % 7 for row in range(rows)])
    ends = [int(plain(target, inputs, max_new_tokens=12)[0, -1])]
    for other in (draft, fitted_head(target)):
        compared(target, ["suffix", other], inputs, "goodput", max_new_tokens=40, eos_token_id=ends)


@pytest.mark.usefixtures("chosen_at_random")
@pytest.mark.parametrize("options", [{"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}], ids=str)
def test_processors_are_shown_the_drafts_of_both(options: dict[str, Any], rounds: list[CandidateBatch]) -> None:
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    text = Knowing(*known(target, inputs, 40, **options)[::2])
    output = compared(target, [text, draft], inputs, "static", CHEAP, max_new_tokens=40, **options)
    assert output.speculation_statistics.accepted > 20
    assert kinds(rounds) == ALL_KINDS


class EndsByRow(StoppingCriteria):
    """Ends each row a few tokens after the one before it."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.shape[1] - max(LENGTHS) >= 8 + 5 * torch.arange(len(input_ids))


@pytest.mark.usefixtures("chosen_at_random")
def test_rows_that_a_criterion_ends_draft_no_more() -> None:
    """That is known only after their next drafts were chosen."""
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    both = [Knowing(*known(target, inputs, 40)), draft]
    criteria = StoppingCriteriaList([EndsByRow()])
    compared(target, both, inputs, "static", CHEAP, max_new_tokens=40, stopping_criteria=criteria, pad_token_id=0)


def test_no_pass_of_a_model_that_is_not_worth_its_steps(rounds: list[CandidateBatch]) -> None:
    """Whose policy wants two tokens: a text that is almost certain is drafted further."""
    target = cycling_model()
    output = compared(target, ["suffix", target], ragged_batch(EIGHT), hf_dsde.StaticPolicy(2), DEAR, max_new_tokens=60)
    assert {each.steps for each in rounds if any(each.unjudged)} == {0}
    assert max(each.width for each in rounds) > 8
    counts = output.speculation_statistics.rounds
    assert sum(r.draft_steps == 0 and r.pass_width > 3 for r in counts) > 2
    assert all(r.draft_steps == 0 for r in counts if r.pass_width > 3)


def test_a_model_that_is_worth_its_steps_drafts_beside_texts(rounds: list[CandidateBatch]) -> None:
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    text = Knowing(*known(target, inputs, 40)[:2])
    output = compared(target, [text, draft], inputs, hf_dsde.StaticPolicy(2), CHEAP, max_new_tokens=40)
    assert {tuple(each.unjudged) for each in rounds if each.steps} >= {(True, True, False, False)}
    assert not any(any(each.unjudged[2:]) for each in rounds)
    counts = output.speculation_statistics
    copied = [[n * taken for n, taken in zip(each.host_lengths, each.unjudged)] for each in rounds]  # noqa: B905
    assert counts.text_drafted == sum(map(sum, copied)) > 20
    assert 20 < counts.text_accepted <= sum(row.accepted for row in counts.rows[:2])
    assert counts.accepted - counts.text_accepted >= sum(row.accepted for row in counts.rows[2:]) > 0
    assert f"{counts.text_drafted}, {counts.text_accepted} of them accepted" in dict(numbers(counts)).values()


def test_texts_that_promise_too_much_are_trusted_less(rounds: list[CandidateBatch]) -> None:
    target, inputs = endless_model(), ragged_batch(LENGTHS)
    compared(target, [Astray(longest=8), target], inputs, hf_dsde.StaticPolicy(3), CHEAP, max_new_tokens=40)
    believed = [any(each.unjudged) for each in rounds]
    assert believed[0]
    assert not any(believed[4:])


@pytest.mark.parametrize("overlapping", [True, False])
def test_texts_draft_where_the_policy_wants_nothing(overlapping: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlapping)
    target = cycling_model()
    output = compared(target, ["suffix", target], ragged_batch(EIGHT), hf_dsde.StaticPolicy(0), DEAR, max_new_tokens=40)
    assert output.speculation_statistics.block_efficiency > 3
    assert output.speculation_statistics.draft_steps == 0


@pytest.mark.usefixtures("recording")
def test_what_was_overtaken_is_asked_again(rounds: list[CandidateBatch], monkeypatch: pytest.MonkeyPatch) -> None:
    """After rounds without drafts a plain step has begun when a text has something to offer: it comes a round later,
    and what the policy wants is still nothing."""
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    turns = itertools.cycle([False, False, False, True, True])

    def choose(model: Sequence[Offer], texts: Sequence[Offer], costs: Any) -> Choice:
        asked.append(max(offer.tokens for offer in model))
        offering = [row for row, text in enumerate(texts) if text.tokens] if next(turns) else []
        return Choice(frozenset(offering[:2]), True)

    def planned(*arguments: Any, **flags: Any) -> RoundPlan:
        plans.append(next_plan(*arguments, **flags))
        return plans[-1]

    asked: list[int] = []
    plans: list[RoundPlan] = []
    monkeypatch.setattr(hybrids, "choose", choose)
    monkeypatch.setattr(loop, "next_plan", planned)
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    text = Knowing(*known(target, inputs, 60), longest=3)
    output = compared(target, [text, draft], inputs, hf_dsde.StaticPolicy(0), CHEAP, max_new_tokens=60)
    assert len(rounds) > 3
    assert sum(plan.kind is RoundKind.OVERTAKEN for plan in plans) > 3
    assert set(asked) == {0}
    assert output.speculation_statistics.draft_steps == 0


def test_a_draft_out_of_texts_has_a_longest_length(rounds: list[CandidateBatch]) -> None:
    target = cycling_model()
    settings = DEAR.replace(max_draft_length=5)
    compared(target, ["suffix", target], ragged_batch(EIGHT), hf_dsde.StaticPolicy(2), settings, max_new_tokens=40)
    assert max(each.width for each in rounds) == 5


@pytest.mark.usefixtures("chosen_at_random")
@pytest.mark.parametrize(("overlapping", "large"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_model_that_sat_out_drafts_as_if_it_had_read_all(
    kind: str, overlapping: bool, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it proposes, also with a pass that was begun before, is what it proposes after the whole text.

    Large batches take in apart what would make the first pass wide.
    """
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlapping)
    if large:
        tuning = replace(chain.tuning_of(torch.device("cpu")), wide_pass_tokens=1, long_gap=2)
        monkeypatch.setattr(chain, "tuning_of", lambda device: tuning)
    target, draft = pair()
    draft = draft if kind == "model" else fitted_head(target)
    inputs = ragged_batch([2, 9, 4, 6])
    sat_out = [0] * 4
    proposed: list[tuple[list[int], list[int], int]] = []
    stored: list[Sequence[int]] = []
    kind_of_drafter = HeadDrafter if kind == "head" else ModelDrafter
    store = kind_of_drafter._store_missing

    def store_missing(self: Any, rows: Sequence[int]) -> bool:
        if any(self._cached[row] > 0 for row in rows):
            stored.append(rows)
        return store(self, rows)

    monkeypatch.setattr(kind_of_drafter, "_store_missing", store_missing)
    original = HybridDrafter.get_candidates

    def get_candidates(self: HybridDrafter, sequences: Any, *others: Any) -> CandidateBatch:
        candidates = original(self, sequences, *others)
        copied = candidates.unjudged or [False] * 4
        for row, n in enumerate(candidates.lengths.tolist()):
            sat_out[row] += copied[row]
            if n and not copied[row]:
                proposed.append((sequences.host_text(row), candidates.tokens[row, :n].tolist(), sat_out[row]))
        return candidates

    monkeypatch.setattr(HybridDrafter, "get_candidates", get_candidates)
    text = Knowing(*known(target, inputs, 40)[:3])
    compared(target, [text, draft], inputs, hf_dsde.StaticPolicy(3), CHEAP, max_new_tokens=40)
    assert sum(missed > 0 for _, _, missed in proposed) > 5
    assert bool(stored) == large
    for known_text, drafted, _ in proposed:
        if kind == "head":
            expected, _ = reference_draft(target, draft, known_text, drafted)
        else:
            ids, n = torch.tensor([known_text]), len(drafted)
            expected = draft.generate(ids, max_new_tokens=n, do_sample=False, eos_token_id=None)[0, -n:].tolist()
        assert drafted == expected


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_pass_that_was_begun_is_used_where_texts_drafted_little(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read as many tokens as the rows have of others."""
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)

    def choose(model: Sequence[Offer], texts: Sequence[Offer], costs: Any) -> Choice:
        return Choice(frozenset(row for row, text in enumerate(texts) if row < 2 and text.tokens), True)

    monkeypatch.setattr(hybrids, "choose", choose)
    target, draft = pair()
    draft = draft if kind == "model" else fitted_head(target)
    inputs = ragged_batch([5, 8, 6, 7])
    used: list[bool] = []
    original = ChainDrafter._catch_up

    def catch_up(self: ChainDrafter, *arguments: Any) -> Any:
        begun = self._prepared
        output = original(self, *arguments)
        used.append(begun is not None and output is begun[0])
        return output

    monkeypatch.setattr(ChainDrafter, "_catch_up", catch_up)
    text = Knowing(*known(target, inputs, 40), longest=6)
    compared(target, [text, draft], inputs, hf_dsde.StaticPolicy(2), CHEAP, max_new_tokens=20)
    assert len(used) > 3
    assert used == [False] + [True] * (len(used) - 1)


@pytest.mark.usefixtures("chosen_at_random")
def test_the_pass_that_is_made_ready_is_over_the_drafts_of_both(
    rounds: list[CandidateBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the host waits to hear whether the model drafts on, the target's pass is made ready for all rows."""
    expected: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(StopFlag, "answered", False)
    monkeypatch.setattr(RunAhead, "expect", lambda _, tokens, lengths, plan: expected.append((tokens, lengths)))
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    policy = RandomLengths(5, stop_probability=0.7)
    compared(target, [Knowing(*known(target, inputs, 40)[:2]), draft], inputs, policy, CHEAP, max_new_tokens=40)
    ready = [
        (lengths.tolist(), candidates.lengths.tolist())
        for candidates in rounds
        for tokens, lengths in expected
        if tokens is candidates.tokens and any(candidates.unjudged)
    ]
    assert len(ready) > 2
    assert all(lengths == proposed for lengths, proposed in ready)


class Watching(StoppingPolicy):
    """Drafts a fixed number of tokens, and keeps what it is told."""

    name = "watching"

    def __init__(self, length: int, *signals: Signal) -> None:
        self._length = length
        self.requires = frozenset(signals)
        self.outcomes: list[RoundOutcome] = []

    def start(self, batch: BatchInfo) -> None:
        self._lengths = torch.full((batch.rows,), self._length, device=batch.device)

    def draft_lengths(self) -> Tensor:
        return self._lengths

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)


NUMBERS = (Signal.KLD, Signal.REVERSE_KLD, Signal.ENTROPY, Signal.CONFIDENCE, Signal.ACCEPTANCE, Signal.NEXT_TOKEN)


@pytest.mark.usefixtures("chosen_at_random")
@pytest.mark.parametrize("signals", [NUMBERS, (*NUMBERS, Signal.LOGITS)], ids=["on the host", "with logits"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_policy_is_shown_the_models_drafts_alone(
    signals: tuple[Signal, ...], do_sample: bool, rounds: list[CandidateBatch]
) -> None:
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    policy, notes = Watching(3, *signals), Notes(*signals)
    speculative(
        target,
        [hf_dsde.SuffixDrafter(known(target, inputs, 40)), draft],
        inputs,
        policy,
        CHEAP,
        speculation_listeners=[notes],
        max_new_tokens=40,
        do_sample=do_sample,
    )
    assert kinds(rounds) == ALL_KINDS
    heard = [pair for pair in zip(policy.outcomes, notes.events, strict=True) if any(pair[1].drafted)]
    for candidates, (outcome, record) in zip(rounds, heard, strict=True):
        copied = list(candidates.unjudged) or [False] * 4
        for shown in (outcome, record.outcome):
            assert shown.drafted.tolist() == [0 if c else n for c, n in zip(copied, record.drafted, strict=True)]
            assert shown.accepted.tolist() == [0 if c else n for c, n in zip(copied, record.accepted, strict=True)]
            width = int(shown.drafted.max())
            for name in ("kld", "reverse_kld", "entropy", "confidence", "acceptance"):
                assert getattr(shown, name).shape == (4, width)
            assert bool(shown.kld[shown.positions].isfinite().all())
            assert bool((shown.entropy[shown.positions] > 0).all())
            if Signal.LOGITS in signals:
                assert shown.draft_logits.shape == shown.target_logits.shape == (4, width, VOCABULARY)


@pytest.mark.usefixtures("chosen_at_random")
def test_the_divergences_are_those_of_the_models_rows(rounds: list[CandidateBatch]) -> None:
    """A draft that is the target diverges nowhere, whatever other rows were drafted for."""
    target, inputs = endless_model(), ragged_batch(LENGTHS)
    policy = Watching(3, *NUMBERS)
    text = Knowing(*known(target, inputs, 40))
    speculative(target, [text, target], inputs, policy, CHEAP, max_new_tokens=40)
    assert mixed(rounds) > 2
    for outcome in policy.outcomes:
        kld, acceptance = outcome.kld[outcome.positions], outcome.acceptance[outcome.positions]
        assert bool((kld.abs() < 1e-9).all())
        assert bool((acceptance == 1).all())
        assert outcome.accepted.tolist() == outcome.drafted.tolist()


@pytest.mark.usefixtures("chosen_at_random")
@torch.no_grad()
def test_the_last_tokens_probability_is_known_of_all_rows() -> None:
    target, draft = pair()
    inputs = ragged_batch([4, 4])
    policy, notes = Watching(2, Signal.NEXT_TOKEN), Notes(Signal.NEXT_TOKEN)
    both = [Knowing(*known(target, inputs, 24)), draft]
    output = speculative(target, both, inputs, policy, CHEAP, max_new_tokens=24, speculation_listeners=[notes])
    probs = target(output.sequences).logits.softmax(dim=-1)
    ends = [4, 4]
    for record, outcome in zip(notes.events, policy.outcomes, strict=True):
        for row in range(2):
            ends[row] += record.emitted[row]
            if record.emitted[row] == record.accepted[row] + 1:
                expected = probs[row, ends[row] - 2, output.sequences[row, ends[row] - 1]]
                assert float(outcome.next_probability[row]) == pytest.approx(float(expected), abs=1e-5)


def sampled_p_value(**options: Any) -> float:
    """The law of a batch in which both draft, out of texts that know nothing."""
    return law_p_value([Astray(longest=4), toy_model(5, seed=1)], rows=2048, **options)


@pytest.mark.usefixtures("chosen_at_random")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 3, "repetition_penalty": 2.0}], ids=str)
def test_sampled_text_has_the_targets_law(options: dict[str, Any], rounds: list[CandidateBatch]) -> None:
    assert sampled_p_value(**options) > 1e-4
    assert mixed(rounds) > 0
    assert all(isinstance(each.law, Sampled) for each in rounds if each.steps)


@pytest.mark.usefixtures("chosen_at_random")
def test_a_wrong_law_of_texts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the texts' tokens had been drawn evenly from all."""
    right = hybrids._Union._law

    def law(self: Any, law: Any) -> Sampled:
        probs = right(self, law).probs
        return Sampled(torch.where(self._copied[:, None, None], torch.full_like(probs, 0.2), probs))

    monkeypatch.setattr(hybrids._Union, "_law", law)
    assert sampled_p_value() < 1e-6


def input_rows(prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [{"input_ids": list(prompt)} for prompt in prompts]


@pytest.mark.usefixtures("chosen_at_random")
@pytest.mark.parametrize("overlapping", [True, False])
def test_a_job_of_both_gives_what_each_prompt_gives_alone(
    overlapping: bool, rounds: list[CandidateBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlapping)
    target, draft = pair()
    prompts = torch.randint(3, VOCABULARY, (9, 5), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [plain(target, {"input_ids": torch.tensor([p])}, max_new_tokens=16)[0].tolist() for p in prompts]
    notes = Notes()
    for other in (draft, fitted_head(target)):
        generator = hf_dsde.BatchGenerator(
            target,
            tiny_tokenizer(),
            assistant_model=[other, Knowing(*texts)],
            speculation_policy="goodput",
            speculation_config=CHEAP,
            speculation_listeners=[notes],
            batch_size=3,
            max_new_tokens=16,
        )
        results = list(generator.stream(input_rows(prompts), ordered=True))
        assert [result.token_ids for result in results] == [text[5:] for text in texts]
    assert mixed(rounds) > 0
    copied = [zip(record.accepted, record.out_of_texts, strict=True) for record in notes.events if record.out_of_texts]
    tokens = sum(accepted for each in copied for accepted, taken in each if taken)
    assert tokens > 110, "rows that began another text know how it goes on"


def test_a_job_is_known_by_both() -> None:
    target, draft = pair()
    head, tokenizer = fitted_head(target), tiny_tokenizer()

    def job(*drafters: Any) -> str:
        return hf_dsde.BatchGenerator(target, tokenizer, assistant_model=list(drafters)).fingerprint

    assert job("suffix", draft) == job(draft, "suffix")
    others = [job("suffix", head), job("sssd", draft), job(hf_dsde.SuffixDrafter(min_score=1.0), draft)]
    assert len({job("suffix", draft), *others}) == 4


def test_its_model_takes_memory() -> None:
    target, draft = pair()
    plans = [
        hf_dsde.BatchGenerator(target, tiny_tokenizer(), assistant_model=drafter, cache_budget=10**7).memory_plan()
        for drafter in (draft, ["suffix", draft], ModelDrafter(draft))
    ]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize(
    "make",
    [lambda _: ["suffix", "sssd"], lambda _: ["suffix"], lambda _: [], lambda m: ["suffix", m, m], lambda m: (m, m)],
)
def test_two_that_do_not_draft_together_are_refused(make: Callable[[Any], Sequence[Any]]) -> None:
    target, draft = pair()
    wrong = r"assistant_model=\[.*\]: two draft together if one of them drafts out of texts \('prompt_lookup'"
    with pytest.raises(ValueError, match=wrong):
        speculative(target, make(draft), ragged_batch([2]), "static", max_new_tokens=2)
    with pytest.raises(ValueError, match=wrong):
        hf_dsde.BatchGenerator(target, tiny_tokenizer(), assistant_model=make(draft))


def test_a_head_of_another_target_is_refused() -> None:
    target, foreign = endless_model(), tiny_head(endless_model(hidden_size=64))
    for draft in (["suffix", foreign], (hf_dsde.SuffixDrafter(), HeadDrafter(foreign)), HeadDrafter(foreign)):
        with pytest.raises(ValueError, match="made for another model"):
            speculative(target, draft, ragged_batch([2]), "static", max_new_tokens=2)
        with pytest.raises(ValueError, match="made for another model"):
            hf_dsde.BatchGenerator(target, tiny_tokenizer(), assistant_model=draft)


def test_a_tuple_of_objects_serves_many_calls() -> None:
    target, draft = pair()
    both = (hf_dsde.SuffixDrafter(), ModelDrafter(draft))
    inputs = ragged_batch([1, 8, 3])
    efficiency = [
        compared(target, both, inputs, "static", CHEAP, max_new_tokens=24).speculation_statistics.block_efficiency
        for _ in range(3)
    ]
    assert efficiency[-1] > 1.5 * efficiency[0], "later calls know the answers of the first"
