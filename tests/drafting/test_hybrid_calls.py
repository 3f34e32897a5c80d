"""Texts and a model that draft together: what policies see, exact law, jobs, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from sampled_law import toy_model
from test_drafters import law_p_value
from tiny_calls import compared, endless_model, pair, plain, speculative
from tiny_heads import fitted_head, tiny_head
from tiny_models import VOCABULARY, ragged_batch
from tiny_rounds import Notes
from tiny_text import tiny_tokenizer
from torch import Tensor
from two_drafters import ALL_KINDS, CHEAP, LENGTHS, Astray, Knowing, kinds, known, mixed

import hf_dsde
from hf_dsde.decoding import run_ahead
from hf_dsde.decoding.candidates import CandidateBatch, Sampled
from hf_dsde.drafting import hybrid as hybrids
from hf_dsde.drafting.head import HeadDrafter
from hf_dsde.drafting.model import ModelDrafter
from hf_dsde.policies import BatchInfo, RoundOutcome, Signal, StoppingPolicy

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


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
    torch.manual_seed(0)
    speculative(
        target,
        [hf_dsde.SuffixDrafter(known(target, inputs, 80)), draft],
        inputs,
        policy,
        CHEAP,
        speculation_listeners=[notes],
        max_new_tokens=80,
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
