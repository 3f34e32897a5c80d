"""Texts and a model that draft together: exact text and law, who drafts when, and what each is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_drafters import EIGHT, cycling_model, law_p_value
from tiny_calls import QUIET, compared, config_of, endless_model, pair, plain, speculative
from tiny_heads import fitted_head, reference_draft, tiny_head
from tiny_models import VOCABULARY, ragged_batch
from tiny_policies import RandomLengths, ScriptedLengths
from tiny_rounds import Notes
from tiny_text import tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.costs import CostModel
from hf_dsde.decoding import run_ahead
from hf_dsde.decoding.candidates import CandidateBatch, Sampled
from hf_dsde.drafting import hybrid as hybrids
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.drafting.hybrid import HybridDrafter
from hf_dsde.drafting.model import ModelDrafter
from hf_dsde.policies import BatchInfo, RoundOutcome, Signal, StoppingPolicy

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


def priced(draft_step: float, column: float = 0.0) -> hf_dsde.SpeculationConfig:
    """Settings with given costs: a plain step takes 1, a draft step so much, a further column likewise."""
    costs = CostModel.relative(draft_step, [1.0 + column * width for width in range(33)]).to_dict()
    return config_of(QUIET, costs=costs, cost_cap=False, refresh_costs=False)


CHEAP, DEAR = priced(0.001), priced(50.0)
"""Draft steps that are always worth it, and ones that never are where a text knows anything."""


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


def mixed(rounds: Sequence[CandidateBatch]) -> int:
    """Rounds in which both have drafted."""
    return sum(1 for each in rounds if any(each.unjudged) and each.steps)


def half_known(target: PreTrainedModel, inputs: dict[str, Tensor], new_tokens: int = 30) -> hf_dsde.SuffixDrafter:
    """A drafter that knows every other answer, with mistakes."""
    answers = plain(target, inputs, max_new_tokens=new_tokens)[:, inputs["input_ids"].shape[1] :].tolist()
    return hf_dsde.SuffixDrafter([[t if n % 9 else 5 for n, t in enumerate(text)] for text in answers[::2]])


@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.parametrize(("family", "overlapping"), [("llama", True), ("mistral", False), ("gpt2", True)])
def test_the_text_is_the_targets_own(
    family: str, kind: str, overlapping: bool, rounds: list[CandidateBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlapping)
    target, draft = pair(family)
    draft = draft if kind == "model" else tiny_head(target, draft_vocabulary=70)
    inputs = ragged_batch([1, 9, 4, 6])
    for policy in (hf_dsde.StaticPolicy(3), RandomLengths(5, stop_probability=0.2)):
        output = compared(target, [half_known(target, inputs), draft], inputs, policy, CHEAP, max_new_tokens=30)
        assert output.speculation_statistics.accepted > 10
    assert mixed(rounds) > 4


@pytest.mark.parametrize("policy", hf_dsde.available_policies())
def test_every_policy(policy: str, rounds: list[CandidateBatch]) -> None:
    target, draft = pair()
    inputs = ragged_batch([1, 8, 3, 5])
    settings = CHEAP.replace(cost_cap=policy in ("svip", "heuristic"))
    compared(target, [draft, half_known(target, inputs)], inputs, policy, settings, max_new_tokens=30)
    assert mixed(rounds) > 0
    assert any(each.width > each.steps for each in rounds)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_measured_costs_and_rows_that_leave(rows: int) -> None:
    target, draft = pair()
    inputs = ragged_batch([1 + 3 * row % 7 for row in range(rows)])
    ends = [int(plain(target, inputs, max_new_tokens=12)[0, -1])]
    for other in (draft, fitted_head(target)):
        compared(target, ["suffix", other], inputs, "goodput", max_new_tokens=40, eos_token_id=ends)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}], ids=str)
def test_processors_are_shown_the_drafts_of_both(options: dict[str, Any], rounds: list[CandidateBatch]) -> None:
    target, draft = pair()
    inputs = ragged_batch([1, 8, 3, 5])
    answers = plain(target, inputs, max_new_tokens=24, **options).tolist()
    output = compared(
        target, [hf_dsde.SuffixDrafter(answers[::2]), draft], inputs, "static", CHEAP, max_new_tokens=24, **options
    )
    assert output.speculation_statistics.accepted > 20
    assert mixed(rounds) > 1


def test_no_pass_of_a_model_that_is_not_worth_its_steps(rounds: list[CandidateBatch]) -> None:
    """Whose policy wants two tokens: a text that is almost certain is drafted further."""
    target = cycling_model()
    output = compared(target, ["suffix", target], ragged_batch(EIGHT), hf_dsde.StaticPolicy(2), DEAR, max_new_tokens=60)
    knowing = [each for each in rounds if any(each.unjudged)]
    assert len(knowing) > 4
    assert not any(each.steps for each in knowing)
    assert max(each.width for each in knowing) > 8
    assert all(r.draft_steps == 0 for r in output.speculation_statistics.rounds if r.pass_width > 3)


@pytest.mark.parametrize("overlapping", [True, False])
def test_texts_draft_where_the_policy_wants_nothing(overlapping: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlapping)
    target = cycling_model()
    output = compared(target, ["suffix", target], ragged_batch(EIGHT), hf_dsde.StaticPolicy(0), DEAR, max_new_tokens=40)
    assert output.speculation_statistics.block_efficiency > 3
    assert output.speculation_statistics.draft_steps == 0


@pytest.mark.parametrize("overlapping", [True, False])
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_model_that_sat_out_drafts_as_if_it_had_read_all(
    kind: str, overlapping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it proposes, also with a pass that was begun before, is what it proposes after the whole text."""
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlapping)
    target, draft = pair()
    draft = draft if kind == "model" else fitted_head(target)
    inputs = ragged_batch([2, 9, 4, 6])
    seen = 0
    missed = dict.fromkeys(range(4), 0)
    original = HybridDrafter.get_candidates

    def get_candidates(self: HybridDrafter, sequences: Any, *others: Any) -> CandidateBatch:
        nonlocal seen
        candidates = original(self, sequences, *others)
        copied = candidates.unjudged or [False] * 4
        for row, n in enumerate(candidates.lengths.tolist()):
            if copied[row]:
                missed[row] += 1
            elif n:
                text, drafted = sequences.host_text(row), candidates.tokens[row, :n].tolist()
                if kind == "head":
                    expected, _ = reference_draft(target, draft, text, drafted)
                else:
                    ids = torch.tensor([text])
                    expected = draft.generate(ids, max_new_tokens=n, do_sample=False, eos_token_id=None)[
                        0, -n:
                    ].tolist()
                assert drafted == expected
                seen += missed[row] > 0
        return candidates

    monkeypatch.setattr(HybridDrafter, "get_candidates", get_candidates)
    for settings in (CHEAP, priced(0.2)):
        compared(
            target, [half_known(target, inputs), draft], inputs, hf_dsde.StaticPolicy(3), settings, max_new_tokens=40
        )
    assert seen > 10


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


@pytest.mark.parametrize("signals", [NUMBERS, (*NUMBERS, Signal.LOGITS)], ids=["on the host", "with logits"])
@pytest.mark.parametrize("settings", [CHEAP, DEAR], ids=["both", "texts alone"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_policy_is_shown_the_models_drafts_alone(
    signals: tuple[Signal, ...], settings: hf_dsde.SpeculationConfig, do_sample: bool, rounds: list[CandidateBatch]
) -> None:
    target, draft = pair()
    inputs = ragged_batch([1, 8, 3, 5])
    policy, notes = Watching(3, *signals), Notes(*signals)
    texts = half_known(target, inputs)
    config = settings.replace(policy="static")
    target.generate(
        **inputs,
        assistant_model=[texts, draft],
        speculation_policy=policy,
        speculation_config=config,
        speculation_listeners=[notes],
        max_new_tokens=30,
        do_sample=do_sample,
    )
    assert any(any(each.unjudged) for each in rounds)
    drafting = [outcome for outcome, record in zip(policy.outcomes, notes.events, strict=True) if any(record.drafted)]
    records = [record for record in notes.events if any(record.drafted)]
    for candidates, outcome, record in zip(rounds, drafting, records, strict=True):
        copied = list(candidates.unjudged) or [False] * 4
        for shown in (outcome, record.outcome):
            assert shown.drafted.tolist() == [0 if c else n for c, n in zip(copied, record.drafted, strict=True)]
            assert shown.accepted.tolist() == [0 if c else n for c, n in zip(copied, record.accepted, strict=True)]
            width = int(shown.drafted.max())
            for name in ("kld", "reverse_kld", "entropy", "confidence", "acceptance"):
                assert getattr(shown, name).shape == (4, width)
            assert bool(shown.kld[shown.positions].isfinite().all())
            assert bool((shown.entropy[shown.positions] > 0).all())
            assert shown.next_probability.shape == (4,)
            if Signal.LOGITS in signals:
                assert shown.draft_logits.shape == shown.target_logits.shape == (4, width, VOCABULARY)


def test_the_divergences_are_those_of_the_models_rows() -> None:
    """A draft that is the target diverges nowhere, whatever other rows were drafted for."""
    target, inputs = endless_model(), ragged_batch([1, 8, 3, 5])
    policy = Watching(3, *NUMBERS)
    speculative(target, [half_known(target, inputs), target], inputs, policy, CHEAP, max_new_tokens=24)
    counted = 0
    for outcome in policy.outcomes:
        kld, acceptance = outcome.kld[outcome.positions], outcome.acceptance[outcome.positions]
        assert bool((kld.abs() < 1e-9).all())
        assert bool((acceptance == 1).all())
        assert outcome.accepted.tolist() == outcome.drafted.tolist()
        counted += len(kld)
    assert counted > 10


def test_the_last_tokens_probability_is_known_of_all_rows() -> None:
    target, draft = pair()
    inputs = ragged_batch([4, 4])
    policy, notes = Watching(2, Signal.NEXT_TOKEN), Notes(Signal.NEXT_TOKEN)
    output = speculative(
        target,
        [half_known(target, inputs), draft],
        inputs,
        policy,
        CHEAP,
        max_new_tokens=24,
        speculation_listeners=[notes],
    )
    probs = target(output.sequences).logits.softmax(dim=-1)
    ends = [4, 4]
    for record, outcome in zip(notes.events, policy.outcomes, strict=True):
        for row in range(2):
            if record.emitted[row] != record.accepted[row] + 1:
                continue
            ends[row] += record.emitted[row]
            token = output.sequences[row, ends[row] - 1]
            assert float(outcome.next_probability[row]) == pytest.approx(
                float(probs[row, ends[row] - 2, token]), abs=1e-5
            )


LEADING_ASTRAY = [[3, 1, 2, 2, 4, 0], [1, 3, 3, 1, 4], [3, 1, 1, 1]]


def sampled_p_value(rows: int = 2048, **options: Any) -> float:
    """The law of a batch in which both draft, out of texts that know nothing."""
    from sampled_law import toy_model

    draft = toy_model(5, seed=1)
    text = hf_dsde.SuffixDrafter(LEADING_ASTRAY, share_answers=False, min_probability=0.01)
    return law_p_value([text, draft], rows=rows, speculation_config=CHEAP, **options)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 3, "repetition_penalty": 2.0}], ids=str)
def test_sampled_text_has_the_targets_law(options: dict[str, Any], rounds: list[CandidateBatch]) -> None:
    assert sampled_p_value(**options) > 1e-4
    assert mixed(rounds) > 0
    assert all(isinstance(each.law, Sampled) for each in rounds if each.steps)


def test_a_wrong_law_of_texts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the texts' tokens had been drawn from what the model says."""
    monkeypatch.setattr(
        hybrids._Union,
        "_law",
        lambda self, law: Sampled(hybrids._widened(law.probs, max(law.probs.shape[1], self._texts.width))),
    )
    assert sampled_p_value() < 1e-6


def test_a_job_of_both_gives_what_each_prompt_gives_alone(rounds: list[CandidateBatch]) -> None:
    target, draft = pair()
    tokenizer = tiny_tokenizer()
    prompts = [{"input_ids": row.tolist()} for row in torch.randint(3, VOCABULARY, (9, 5))]
    answers = [
        plain(target, {"input_ids": torch.tensor([p["input_ids"]])}, max_new_tokens=16, pad_token_id=0)[0, 5:].tolist()
        for p in prompts
    ]
    for other in (draft, fitted_head(target)):
        generator = hf_dsde.BatchGenerator(
            target,
            tokenizer,
            assistant_model=[other, hf_dsde.SuffixDrafter(answers[::2])],
            speculation_policy="static",
            speculation_config=CHEAP,
            batch_size=3,
            max_new_tokens=16,
        )
        assert [result.token_ids for result in generator.stream(prompts, ordered=True)] == answers
    assert mixed(rounds) > 0


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
    tokenizer = tiny_tokenizer()
    plans = [
        hf_dsde.BatchGenerator(target, tokenizer, assistant_model=drafter, cache_budget=10**7).memory_plan()
        for drafter in (draft, ["suffix", draft], ModelDrafter(draft))
    ]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize(
    ("drafters", "names"),
    [
        (["suffix", "sssd"], r"\[suffix, sssd\]"),
        (["suffix"], r"\[suffix\]"),
        ([], r"\[\]"),
        (["suffix", "model", "model"], "suffix, .*, "),
        (["model", "model"], "For"),
    ],
)
def test_two_that_do_not_draft_together_are_refused(drafters: list[str], names: str) -> None:
    target, draft = pair()
    chosen = [draft if name == "model" else name for name in drafters]
    with pytest.raises(ValueError, match=rf"assistant_model={names}.*one of them drafts out of texts"):
        speculative(target, chosen, ragged_batch([2]), "static", max_new_tokens=2)
    with pytest.raises(ValueError, match="one of them drafts out of texts"):
        hf_dsde.BatchGenerator(target, tiny_tokenizer(), assistant_model=chosen)


def test_a_head_of_another_target_is_refused() -> None:
    target = endless_model()
    foreign = tiny_head(endless_model(hidden_size=64))
    with pytest.raises(ValueError, match="made for another model"):
        speculative(target, ["suffix", foreign], ragged_batch([2]), "static", max_new_tokens=2)


def test_a_tuple_of_objects_serves_many_calls(rounds: list[CandidateBatch]) -> None:
    target, draft = pair()
    both = (hf_dsde.SuffixDrafter(), ModelDrafter(draft))
    inputs = ragged_batch([1, 8, 3])
    for _ in range(2):
        output = compared(target, both, inputs, "static", CHEAP, max_new_tokens=20)
    assert any(any(each.unjudged) for each in rounds)
    assert output.speculation_statistics.block_efficiency > 4, "the second call knows the answers of the first"


def test_a_pass_that_was_begun_is_used_where_texts_drafted_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens that texts brought, the pass that ran ahead has read as many as the model may miss."""
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    target, draft = pair()
    inputs = ragged_batch([5, 8, 6, 7])
    answers = plain(target, inputs, max_new_tokens=30)[:, 8:].tolist()
    used: list[bool] = []
    original = ChainDrafter._catch_up

    def catch_up(self: ChainDrafter, *arguments: Any) -> Any:
        begun = self._prepared
        output = original(self, *arguments)
        used.append(begun is not None and output is begun[0])
        return output

    monkeypatch.setattr(ChainDrafter, "_catch_up", catch_up)
    text = hf_dsde.SuffixDrafter(answers[:2], per_match=4.0, share_answers=False)
    lengths = ScriptedLengths([[3] * 4])
    compared(target, [text, draft], inputs, lengths, CHEAP.replace(max_draft_length=4), max_new_tokens=30)
    assert sum(used) >= len(used) - 1 > 3
