"""Calls that accept by a lossy rule: their text against a decoder in plain Python, and where they say what they are."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lossy_references import Reference, consultant, expected_end, law_of, typical
from plain_processors import plain_processors
from recorded import NotingCapture
from sampled_law import PROMPT_MASK, PROMPTS, pearson, toy_model
from scipy import stats
from tiny_calls import QUIET, assert_same_text, compared, config_of, pair, plain, speculative
from tiny_heads import tiny_head
from tiny_models import PAD, noisy_copy, ragged_batch
from tiny_pair import tiny_pair
from tiny_policies import RandomLengths
from tiny_text import tiny_tokenizer
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from waits import noted_looks

import hf_dsde
from hf_dsde import Consultant, LossyAcceptance, SpeculationConfig, TypicalAcceptance
from hf_dsde.cli import main as cli
from hf_dsde.cli.demo.run import Method
from hf_dsde.decoding import verification
from hf_dsde.lossy_acceptance import warn_once
from hf_dsde.measurement.statistics import SpeculationStatistics, StatisticsRecorder
from hf_dsde.policies import BatchInfo, RoundOutcome, Signal, StaticPolicy, StoppingPolicy

pytestmark = [
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.filterwarnings("ignore::hf_dsde.LossyAcceptanceWarning"),
]

NEW_TOKENS = 13
DRAFTED = 4
LENGTHS = (3, 7, 1, 5)
STRICT = [
    Consultant(threshold=0.0),
    Consultant(threshold=0.55, decay=0.2),
    TypicalAcceptance(threshold=1.0, alpha=1e9),
    TypicalAcceptance(threshold=0.5, alpha=1e9),
]
"""Rules that let nothing pass but the best token: any other has at most half of the probability."""
LOOSE = [Consultant(threshold=1e6), TypicalAcceptance(threshold=1e-30, alpha=1e-30)]
"""Rules that let everything pass that can be chosen at all."""
BETWEEN: dict[str, tuple[LossyAcceptance, Reference]] = {
    "consultant": (Consultant(2.2, 0.4), lambda laws, tokens: consultant(laws, tokens, 2.2, 0.4)),
    "typical": (TypicalAcceptance(0.2, 4.0), lambda laws, tokens: typical(laws, tokens, 0.2, 4.0)),
}


def by(rule: LossyAcceptance | None, base: SpeculationConfig = QUIET, **changes: Any) -> SpeculationConfig:
    return config_of(base, acceptance=rule, **changes)


# The text, against passes over the whole text and the papers' formulas.


def scores_of(model: PreTrainedModel, processors: LogitsProcessorList, text: list[int], last: int) -> Tensor:
    """Scores that decide the tokens after each of the last prefixes, `[last, vocabulary]`, as `generate` makes them."""
    ids = torch.tensor([text])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, -last:].float()
    prefixes = [ids[:, : len(text) - last + 1 + place] for place in range(last)]
    return torch.cat([processors(prefix, row[None]) for prefix, row in zip(prefixes, logits, strict=True)])


def reference_text(
    models: tuple[PreTrainedModel, PreTrainedModel],
    prompt: list[int],
    reference: Reference,
    new_tokens: int,
    **options: Any,
) -> list[int]:
    """The tokens after a prompt."""
    target, draft = models
    options = {"do_sample": False, "max_new_tokens": new_tokens, **options}
    end, text = len(prompt) + new_tokens, list(prompt)
    begin = torch.tensor([prompt])
    processors = plain_processors(target, begin, torch.ones_like(begin), **options)
    while len(text) < end:
        block: list[int] = []
        for _ in range(min(DRAFTED, end - len(text) - 1)):
            block.append(int(scores_of(draft, processors, text + block, 1)[0].argmax()))
        scores = scores_of(target, processors, text + block, len(block) + 1).double().tolist()
        laws = [law_of(row) for row in scores]
        accepted = expected_end(laws, reference(laws[:-1], block), block, greedy=True)
        assert accepted is not None, "too close to call: take another seed"
        law = laws[accepted]
        for token in [*block[:accepted], law.index(max(law))]:
            text.append(token)
            if token == options.get("eos_token_id"):
                return text[len(prompt) :]
    return text[len(prompt) :]


def texts_of(output: hf_dsde.SpeculativeGenerateOutput, prompt_width: int) -> list[list[int]]:
    rows = output.speculation_statistics.rows
    new = output.sequences[:, prompt_width:].tolist()
    return [text[: row.emitted] for text, row in zip(new, rows, strict=True)]


def prompts(batch: dict[str, Tensor]) -> list[list[int]]:
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in rows]


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    # Whether padding counts as a repetition differs between versions of transformers, so that it is left out.
    "processors": {"repetition_penalty": 1.4, "suppress_tokens": [PAD, 17, 40], "no_repeat_ngram_size": 2},
    "an end": {"eos_token_id": 8},
}


@cache
def expected_texts(name: str, call: str) -> list[list[int]]:
    options = {"pad_token_id": PAD, **CALLS[call]}
    batch = prompts(ragged_batch(LENGTHS, seed=4))
    return [reference_text(pair(), prompt, BETWEEN[name][1], NEW_TOKENS, **options) for prompt in batch]


@pytest.mark.parametrize("runner", ["eager", "graph"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", BETWEEN)
def test_a_ragged_batch_is_what_the_formula_makes_of_each_prompt(
    name: str, call: str, runner: str, recording: list[NotingCapture]
) -> None:
    models, batch, options = pair(), ragged_batch(LENGTHS, seed=4), {"pad_token_id": PAD, **CALLS[call]}
    config = by(BETWEEN[name][0], runner=runner)
    output = speculative(*models, batch, StaticPolicy(DRAFTED), config, max_new_tokens=NEW_TOKENS, **options)
    expected = expected_texts(name, call)
    assert texts_of(output, max(LENGTHS)) == expected
    assert 0.2 < output.speculation_statistics.acceptance_rate < 1.0
    assert output.sequences.tolist() != plain(models[0], batch, max_new_tokens=NEW_TOKENS, **options).tolist()
    assert (runner == "graph") == any(capture.recorded for capture in recording)
    if call == "an end":
        assert any(text[-1] == 8 and len(text) < NEW_TOKENS for text in expected)


@pytest.mark.parametrize("name", BETWEEN)
def test_rows_of_a_job_that_take_turns_get_the_same_text(name: str) -> None:
    rule, reference = BETWEEN[name]
    models, limits = pair(), [9, 3, 13, 6, 11, 5]
    given = prompts(ragged_batch((3, 7, 1, 5, 2, 6), seed=4))
    rows = [{"input_ids": p, "max_new_tokens": limit} for p, limit in zip(given, limits, strict=True)]
    job = hf_dsde.BatchGenerator(
        models[0],
        tiny_tokenizer(),
        assistant_model=models[1],
        speculation_policy=StaticPolicy(DRAFTED),
        speculation_config=by(rule),
        batch_size=2,
        do_sample=False,
    )
    results = list(job.stream(rows, ordered=True))
    assert [result.token_ids for result in results] == [
        reference_text(models, prompt, reference, limit) for prompt, limit in zip(given, limits, strict=True)
    ]
    assert job.statistics.acceptance == f"lossy: {rule}"


@pytest.mark.parametrize("rule", STRICT, ids=str)
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("dsde", {}),
        (RandomLengths(5, stop_probability=0.2), {"repetition_penalty": 1.4, "eos_token_id": 8, "pad_token_id": PAD}),
    ],
)
def test_where_nothing_may_pass_the_text_is_exact_and_takes_no_more_rounds(
    rule: LossyAcceptance, policy: Any, options: dict[str, Any]
) -> None:
    models, batch = pair(), ragged_batch(LENGTHS, seed=4)
    strict = compared(*models, batch, policy, by(rule), max_new_tokens=NEW_TOKENS, **options)
    exact = compared(*models, batch, policy, max_new_tokens=NEW_TOKENS, **options)
    assert strict.speculation_statistics.rows == exact.speculation_statistics.rows


@pytest.mark.parametrize("rule", STRICT, ids=str)
def test_where_nothing_may_pass_a_generator_asked_row_by_row_is_exact(rule: LossyAcceptance) -> None:
    model, batch = pair()[0], ragged_batch((6, 9), seed=2)
    arguments = {"max_new_tokens": NEW_TOKENS, "prompt_lookup_num_tokens": 3}
    output = speculative(model, None, batch, "static", by(rule), **arguments)
    assert_same_text(output, plain(model, batch, max_new_tokens=NEW_TOKENS))


@pytest.mark.parametrize(("rule", "share"), [(STRICT[1], None), (STRICT[3], None), (LOOSE[0], 1.0), (LOOSE[1], 1.0)])
def test_a_head_reads_on_after_whatever_stood(rule: LossyAcceptance, share: float | None) -> None:
    """Its states are those of the tokens that stand; exact where nothing lossy does."""
    model, batch = pair()[0], ragged_batch((3, 7, 2), seed=4)
    check = compared if share is None else speculative
    output = check(model, tiny_head(model), batch, RandomLengths(4), by(rule), max_new_tokens=NEW_TOKENS)
    assert share in (None, output.speculation_statistics.acceptance_rate)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rule", LOOSE, ids=str)
def test_where_everything_may_pass_all_that_is_drafted_stands(rule: LossyAcceptance, do_sample: bool) -> None:
    models = pair(agreement="never")
    torch.manual_seed(0)
    output = speculative(
        *models,
        ragged_batch(LENGTHS, seed=4),
        RandomLengths(5),
        by(rule),
        max_new_tokens=NEW_TOKENS,
        do_sample=do_sample,
        **({"top_k": 0} if do_sample else {}),  # else the target would exclude what it finds unlikely
    )
    statistics = output.speculation_statistics
    assert statistics.drafted > 20
    assert statistics.accepted == statistics.drafted


@pytest.mark.parametrize("do_sample", [False, True])
def test_what_processors_exclude_does_not_pass_either(do_sample: bool) -> None:
    """A user's processor forbids, to the target alone, what the draft likes best."""
    models, batch = pair(agreement="never"), ragged_batch(LENGTHS, seed=4)
    torch.manual_seed(0)
    first = speculative(*models, batch, "static", by(LOOSE[0]), max_new_tokens=NEW_TOKENS, do_sample=do_sample)
    banned = texts_of(first, max(LENGTHS))[0][:6]
    torch.manual_seed(0)
    output = speculative(
        *models,
        batch,
        "static",
        by(LOOSE[0]),
        max_new_tokens=NEW_TOKENS,
        do_sample=do_sample,
        bad_words_ids=[[token] for token in banned],
    )
    assert not set(banned) & {token for text in texts_of(output, max(LENGTHS)) for token in text}


# Sampling: the law of the first two tokens, by enumeration.

VOCABULARY = 5
TOYS = toy_model(VOCABULARY), noisy_copy(toy_model(VOCABULARY), 0.5)
SAMPLED: dict[str, tuple[LossyAcceptance, Reference]] = {
    "consultant": (Consultant(1.5, 0.5), lambda laws, tokens: consultant(laws, tokens, 1.5, 0.5)),
    "typical": (TypicalAcceptance(0.25, 0.9), lambda laws, tokens: typical(laws, tokens, 0.25, 0.9)),
}
Laws = dict[tuple[int, ...], list[float]]


@cache
def laws_after(which: int, prompt: int, options: tuple[tuple[str, Any], ...]) -> Laws:
    """A model's law after every text of up to two tokens, each computed from the whole text."""
    begin, mask = PROMPTS[prompt][None], PROMPT_MASK[prompt][None]
    processors = plain_processors(TOYS[0], begin, mask, do_sample=True, **dict(options))
    laws = {}
    for depth in range(3):
        for text in itertools.product(range(VOCABULARY), repeat=depth):
            ids = torch.cat([begin, torch.tensor([text], dtype=torch.long)], dim=1)
            real = ids[:, int((mask == 0).sum()) :]
            with torch.no_grad():
                logits = TOYS[which](input_ids=real).logits[:, -1].float()
            laws[text] = law_of(processors(ids, logits)[0].double().tolist())
    return laws


def rounds_after(p: Laws, q: Laws, text: tuple[int, ...], drafted: int, reference: Reference) -> Iterator[Any]:
    """Every way in which a round of `drafted` tokens continues a text, with its probability."""
    for block in itertools.product(range(VOCABULARY), repeat=drafted):
        chance = 1.0
        for place, token in enumerate(block):
            chance *= q[text + block[:place]][token]
        if chance == 0:
            continue
        laws = [p[text + block[:place]] for place in range(drafted)]
        accepted = expected_end(laws, reference(laws, block), list(block), greedy=False)
        assert accepted is not None
        kept = block[:accepted]
        if len(text) + accepted == 2:
            yield text + kept, chance
            continue
        for token, mass in enumerate(p[text + kept]):
            yield (*text, *kept, token), chance * mass


def exact_law(prompt: int, options: tuple[tuple[str, Any], ...], reference: Reference) -> Tensor:
    """The law of the first two tokens where every round drafts two; of one after a token only the first matters."""
    p, q = (laws_after(which, prompt, options) for which in range(2))
    law = torch.zeros(VOCABULARY**2, dtype=torch.float64)
    for text, chance in rounds_after(p, q, (), 2, reference):
        longer = [(text, 1.0)] if len(text) == 2 else rounds_after(p, q, text, 1, reference)
        for both, mass in longer:
            law[both[0] * VOCABULARY + both[1]] += chance * mass
    return law


def p_value(name: str, options: dict[str, Any], rows: int = 1024) -> float:
    rule, reference = SAMPLED[name]
    options = {"top_k": 0, "max_new_tokens": 5, **options}
    torch.manual_seed(0)
    output = speculative(
        *TOYS,
        {"input_ids": PROMPTS.repeat(rows // 2, 1), "attention_mask": PROMPT_MASK.repeat(rows // 2, 1)},
        StaticPolicy(2),
        by(rule, view_bucket=8),
        do_sample=True,
        **options,
    )
    assert 0.1 < output.speculation_statistics.acceptance_rate < 0.97
    new = output.sequences[:, PROMPTS.shape[1] :]
    statistic, freedom = 0.0, 0
    for prompt in range(2):
        observed = (new[prompt::2, 0] * VOCABULARY + new[prompt::2, 1]).bincount(minlength=VOCABULARY**2).double()
        law = exact_law(prompt, tuple(options.items()), reference)
        assert float(law.sum()) == pytest.approx(1.0)
        part, more = pearson(observed, law * observed.sum())
        statistic, freedom = statistic + part, freedom + more
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize(("name", "options"), [("consultant", {"temperature": 0.8, "top_k": 4}), ("typical", {})])
def test_sampled_text_has_the_law_that_follows_from_the_formula(name: str, options: dict[str, Any]) -> None:
    assert p_value(name, options) > 1e-4


def accept_exactly(scores: Tensor, tokens: Tensor, lengths: Tensor, *_: Any, **__: Any) -> verification.VerifiedBlock:
    """The exact rule in place of the lossy one."""
    return verification.sample_and_match(scores.softmax(-1), tokens, lengths)


def best(weights: Tensor) -> Tensor:
    """The best token where one is to be drawn."""
    return weights.argmax(dim=-1)


@pytest.mark.parametrize(("function", "mutant"), [("lossy", accept_exactly), ("draw", best)])
def test_wrong_decoders_are_found_out(function: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, function, mutant)
    assert p_value("typical", {}) < 1e-6


# What policies and listeners see, and when.


class Hears(StaticPolicy):
    """A fixed length, and what it is told of acceptance."""

    requires = frozenset({Signal.ACCEPTANCE})

    def start(self, batch: BatchInfo) -> None:
        super().start(batch)
        self.heard: list[RoundOutcome] = []

    def observe(self, outcome: RoundOutcome) -> None:
        self.heard.append(outcome)


@pytest.mark.parametrize("do_sample", [False, True])
def test_policies_hear_what_stood(do_sample: bool) -> None:
    policy: StoppingPolicy = Hears(DRAFTED)
    torch.manual_seed(0)
    output = speculative(
        *pair(),
        ragged_batch(LENGTHS, seed=4),
        policy,
        by(BETWEEN["typical"][0]),
        max_new_tokens=NEW_TOKENS,
        do_sample=do_sample,
    )
    assert isinstance(policy, Hears)
    accepted = sum(int(outcome.accepted.sum()) for outcome in policy.heard)
    assert accepted >= output.speculation_statistics.accepted > 0
    for outcome in policy.heard:
        assert outcome.acceptance is not None
        stood = torch.arange(outcome.acceptance.shape[1]) < outcome.accepted[:, None]
        assert torch.equal(outcome.acceptance, stood.float())


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", BETWEEN)
def test_a_round_still_looks_at_the_device_once(name: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    for rule in (None, BETWEEN[name][0]):
        with noted_looks(monkeypatch) as looks:
            output = speculative(
                *pair(),
                ragged_batch(LENGTHS, seed=4),
                StaticPolicy(DRAFTED),
                by(rule),
                max_new_tokens=NEW_TOKENS,
                do_sample=do_sample,
            )
        noted = dict(looks)
        assert noted.pop("utils/transfers.py::wait") == len(output.speculation_statistics.rounds)
        places.append(noted)
    assert places[1] == places[0]


# Whatever comes out of it says so.


def call(rule: LossyAcceptance | None) -> hf_dsde.SpeculativeGenerateOutput:
    return speculative(*pair(), ragged_batch(LENGTHS, seed=4), "static", by(rule), max_new_tokens=3)


def test_statistics_name_the_rule() -> None:
    lossy, exact = (call(rule).speculation_statistics for rule in (Consultant(1.5), None))
    said = "lossy: consultant(threshold=1.5, decay=0.2)"
    assert lossy.acceptance == lossy.to_dict()["acceptance"] == said
    assert exact.acceptance == exact.to_dict()["acceptance"] == "exact"
    assert said in str(lossy)
    assert said in lossy._repr_html_()
    assert "lossy" not in str(exact) + exact._repr_html_()
    assert SpeculationStatistics.merge([lossy, lossy]).acceptance == said
    with pytest.raises(ValueError, match=r"2 rules of acceptance .*'exact', 'lossy: consultant"):
        SpeculationStatistics.merge([lossy, exact])


def test_a_recorder_that_is_told_nothing_counts_exact_acceptance() -> None:
    assert StatisticsRecorder(1, "static").finish([0]).acceptance == "exact"


def test_a_rule_is_warned_of_once_at_the_callers_line() -> None:
    rule = Consultant(threshold=1.23456)
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(rule)
        call(rule)
        call(None)
    of_rules = [warning for warning in caught if issubclass(warning.category, hf_dsde.LossyAcceptanceWarning)]
    assert len(of_rules) == 1
    assert "consultant(threshold=1.23456" in str(of_rules[0].message)
    assert Path(of_rules[0].filename).name == "tiny_calls.py"


def job(rule: LossyAcceptance | None, **changes: Any) -> hf_dsde.BatchGenerator:
    tiny = tiny_pair(torch.float64)
    settings = {"speculation_policy": "static", "batch_size": 2, "max_new_tokens": 4, "do_sample": False, **changes}
    return hf_dsde.BatchGenerator(
        tiny.target, tiny.tokenizer, assistant_model=tiny.draft, speculation_config=by(rule), **settings
    )


def test_a_job_says_so_and_does_not_go_on_under_another_rule(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    rows = ["abc", "fedcba", "d"]
    report = job(Consultant()).run(rows, path)
    assert report.statistics.acceptance == "lossy: consultant(threshold=2, decay=0.2)"
    written = json.loads(path.with_name("out.jsonl.job.json").read_text(encoding="utf-8"))
    assert written["job"]["generator"]["speculation"]["acceptance"] == Consultant().to_dict()
    assert job(Consultant()).run(rows, path).skipped == len(rows)
    for other in (None, Consultant(threshold=1.0), TypicalAcceptance()):
        with pytest.raises(ValueError, match=r"another `job`.*speculation\.acceptance"):
            job(other).run(rows, path)


def test_a_job_of_exact_acceptance_is_known_as_it_was_before_there_were_rules() -> None:
    assert "acceptance" not in job(None).identity["speculation"]


@pytest.mark.parametrize(("rule", "counts"), [(Consultant(), True), (None, False)])
def test_costs_that_decide_a_lossy_text_are_part_of_a_job(rule: LossyAcceptance | None, counts: bool) -> None:
    costs = {"4": {"draft_step": 0.1, "verify": {"1": 1.0, "5": 1.1}}}
    identity = job(None, speculation_policy=None).identity
    assert "costs" not in identity["speculation"]
    config = by(rule, costs=costs, refresh_costs=False)
    tiny = tiny_pair(torch.float64)
    made = hf_dsde.BatchGenerator(
        tiny.target, tiny.tokenizer, assistant_model=tiny.draft, speculation_config=config, do_sample=False
    )
    assert ("costs" in made.identity["speculation"]) is counts


def test_the_command_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from hf_dsde import pairs

    monkeypatch.setattr(pairs, "load_packaged_pair", lambda *arguments: tiny_pair(arguments[-2]))
    monkeypatch.setenv("COLUMNS", "200")
    SpeculationConfig("static", acceptance=TypicalAcceptance()).save_pretrained(tmp_path)
    arguments = ["generate", "--device", "cpu", "--dtype", "float32", "--max-new-tokens", "3", "--prompt", "abc"]
    said = CliRunner().invoke(cli.app, [*arguments, "--speculation-config", str(tmp_path)])
    assert said.exit_code == 0, said.output
    assert "lossy: typical(threshold=0.09, alpha=0.3)" in said.output


def test_benchmarks_and_the_demo_do_not_take_it_for_exact() -> None:
    from hf_dsde.bench.methods import PolicyMethod

    config = SpeculationConfig("static", acceptance=Consultant())
    assert PolicyMethod("static", config).name == "static, lossy: consultant(threshold=2, decay=0.2)"
    assert PolicyMethod("static", SpeculationConfig("static")).name == "static"
    with pytest.raises(ValueError, match=r"lossy rule, consultant.*acceptance=None"):
        Method("static", config)


# Settings.


@pytest.mark.parametrize("rule", [Consultant(1.5, 0.4), TypicalAcceptance(0.2, 0.5), None], ids=str)
def test_a_configuration_keeps_its_rule(rule: LossyAcceptance | None, tmp_path: Path) -> None:
    config = SpeculationConfig("static", acceptance=rule)
    config.save_pretrained(tmp_path)
    for read in (
        SpeculationConfig.from_pretrained(tmp_path),
        SpeculationConfig.from_dict(config.to_dict()),
        config.replace(policy="dsde").replace(policy="static"),
        SpeculationConfig("static", acceptance=None if rule is None else rule.to_dict()),  # type: ignore[arg-type]
    ):
        assert read == config
        assert hash(read) == hash(config)
    assert SpeculationConfig().acceptance is None


BAD: Sequence[tuple[Any, type[Exception], str]] = [
    ("consultant", TypeError, r"`acceptance` is 'consultant'.*Consultant\(\) or TypicalAcceptance\(\).*None for exact"),
    (True, TypeError, r"`acceptance` is True"),
    ({"name": "exact"}, ValueError, r"has the name 'exact'.*'consultant', 'typical'"),
    ({"threshold": 2.0}, ValueError, r"has the name None"),
    ({"name": "typical", "decay": 0.2}, TypeError, r"'typical' does not take.*decay"),
    ({"name": "consultant", "threshold": -1}, ValueError, r"`threshold` is -1"),
]


@pytest.mark.parametrize(("value", "error", "says"), BAD)
def test_what_is_no_rule_is_refused(value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        SpeculationConfig(acceptance=value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Consultant(threshold=-0.1), "threshold.*at least 0"),
        (lambda: Consultant(threshold=float("inf")), "threshold"),
        (lambda: Consultant(decay=-0.1), "decay.*at least 0"),
        (lambda: Consultant(decay=1.0), "decay.*below 1"),
        (lambda: TypicalAcceptance(threshold=0.0), "threshold.*greater than 0"),
        (lambda: TypicalAcceptance(threshold=1.1), "threshold.*at most 1"),
        (lambda: TypicalAcceptance(alpha=0.0), "alpha.*greater than 0"),
    ],
)
def test_settings_out_of_bounds_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_a_rule_of_ones_own_is_what_the_documentation_says() -> None:
    """It lets pass what is among the target's best tokens: all of a draft's, or none but the best."""
    page = (Path(hf_dsde.__file__).parents[1] / "docs" / "acceptance.md").read_text(encoding="utf-8")
    code = page.partition("## Write your own rule")[2].partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": "documented"}
    exec(compile(code, "acceptance.md", "exec", dont_inherit=True), names)  # noqa: S102 - the point of this test
    rule, models, batch = names["AmongTheBest"], pair(), ragged_batch(LENGTHS, seed=4)
    best = compared(*models, batch, "static", by(rule(1)), max_new_tokens=NEW_TOKENS)
    every = speculative(*models, batch, "static", by(rule(10_000)), max_new_tokens=NEW_TOKENS)
    assert best.speculation_statistics.acceptance == "lossy: among_the_best(count=1)"
    assert every.speculation_statistics.accepted == every.speculation_statistics.drafted
    with pytest.raises(ValueError, match="has the name 'among_the_best'"):
        SpeculationConfig.from_dict(SpeculationConfig(acceptance=rule()).to_dict())


def test_names_say_that_rules_are_lossy_or_whose_they_are() -> None:
    for rule in (Consultant(), TypicalAcceptance()):
        assert isinstance(rule, hf_dsde.LossyAcceptance)
        assert "exact" not in rule.name
        assert all(f.default is not None for f in fields(rule))
