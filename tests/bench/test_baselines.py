"""Every method answers the same request: as many tokens, the same greedy text, and models left as they were."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_pair import PROMPTS, tiny_pair

from hf_dsde.bench import baselines
from hf_dsde.bench.baselines import BASELINES, forget_static_cache, parse_baseline
from hf_dsde.bench.methods import PolicyMethod, Request, names_runner, pad_token, parse_policy
from hf_dsde.config import SpeculationConfig
from hf_dsde.decoding import cost_measurement
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.integration.hooks import enable
from hf_dsde.pairs import encode

TEXTS = [prompt.text for prompt in PROMPTS]
TOKENS = 12


@pytest.fixture
def ending_pair():
    """A pair whose target ends its first text at the third token, if it is let."""
    pair = tiny_pair(torch.float64)
    enable(pair.target)
    inputs = encode(pair.tokenizer, TEXTS[1:2])
    plain = pair.target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    end = int(plain[0, inputs["input_ids"].shape[1] + 2])
    pair.target.generation_config.eos_token_id = end
    pair.draft.generation_config.eos_token_id = end
    return pair


def answer(method, pair, request, texts=TEXTS[1:2], seed=0):
    inputs = encode(pair.tokenizer, texts)
    torch.manual_seed(seed)
    result = method(pair, inputs, request)
    return result, result.sequences[:, inputs["input_ids"].shape[1] :]


METHODS = {**BASELINES, "dsde": parse_policy("dsde"), "static:0": parse_policy("static:0")}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_go_on_after_their_end_until_all_have_as_many_tokens(ending_pair, name, temperature):
    _, ids = answer(METHODS[name], ending_pair, Request(TOKENS, temperature))
    assert ids.shape == (1, TOKENS)
    if temperature == 0:
        assert (ids == ending_pair.target.generation_config.eos_token_id).any()


@pytest.mark.parametrize("name", METHODS)
def test_rows_stop_at_their_end_when_asked_to(ending_pair, name):
    _, ids = answer(METHODS[name], ending_pair, Request(TOKENS, stop_at_eos=True))
    assert ids.shape[1] <= 3
    assert int(ids[0, -1]) == ending_pair.target.generation_config.eos_token_id


@pytest.mark.parametrize("name", METHODS)
def test_greedy_texts_are_those_of_plain_generate(ending_pair, name):
    method = METHODS[name]
    texts = TEXTS[1:2] if method.refusal(3, 0.0) else TEXTS
    _, expected = answer(BASELINES["generate"], ending_pair, Request(TOKENS), texts)
    _, ids = answer(method, ending_pair, Request(TOKENS), texts)
    assert torch.equal(ids, expected)
    assert ids.shape == (len(texts), TOKENS)


@pytest.mark.parametrize("name", METHODS)
def test_a_call_leaves_no_trace_in_the_generation_configs(ending_pair, name):
    before = [copy.deepcopy(model.generation_config.to_dict()) for model in (ending_pair.target, ending_pair.draft)]
    answer(METHODS[name], ending_pair, Request(TOKENS))
    assert [model.generation_config.to_dict() for model in (ending_pair.target, ending_pair.draft)] == before


def test_what_assisted_generation_learns_does_not_reach_the_next_call(ending_pair):
    config = ending_pair.draft.generation_config
    config.num_assistant_tokens_schedule, config.num_assistant_tokens = "heuristic", 3
    answer(BASELINES["assisted"], ending_pair, Request(TOKENS))
    assert ending_pair.draft.generation_config is config
    assert config.num_assistant_tokens == 3


def test_single_row_baselines_say_so_beforehand():
    assert BASELINES["assisted"].refusal(1, 0.0) is None
    assert BASELINES["assisted"].refusal(8, 0.0) == "assisted of transformers takes one row, not 8"
    assert BASELINES["prompt_lookup"].refusal(2, 1.0) is not None
    assert BASELINES["generate_static"].refusal(8, 0.0) is None


def test_what_a_static_cache_leaves_is_forgotten(ending_pair):
    clean = set(ending_pair.target.__dict__)
    answer(BASELINES["generate_static"], ending_pair, Request(TOKENS))
    assert set(ending_pair.target.__dict__) > clean
    forget_static_cache(ending_pair)
    assert set(ending_pair.target.__dict__) == clean


def test_sampling_is_from_the_whole_distribution(ending_pair):
    arguments = Request(TOKENS, 0.7).arguments(ending_pair)
    assert arguments["do_sample"] is True
    assert arguments["temperature"] == 0.7
    assert arguments["top_k"] == 0
    assert Request(TOKENS).arguments(ending_pair)["do_sample"] is False


def test_padding_has_a_token_of_its_own_where_nothing_ends():
    pair = tiny_pair()
    pair.target.generation_config.pad_token_id = None
    assert pad_token(pair) == pair.tokenizer.pad_token_id
    assert "pad_token_id" not in Request(4, stop_at_eos=True).arguments(pair)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("dsde", "dsde", {"policy": "dsde", "policy_arguments": {}}),
        ("static:4", "static:4", {"policy": "static", "policy_arguments": {"num_draft_tokens": 4}}),
        ("static:0", "static:0", {"policy_arguments": {"num_draft_tokens": 0}}),
        ("static:num_draft_tokens=3", "static:num_draft_tokens=3", {"policy_arguments": {"num_draft_tokens": 3}}),
        ("static:2+fill@eager", "static:2+fill@eager", {"fill_to_batch": True, "runner": "eager"}),
        ("dsde:sl_max=8+fill", "dsde:sl_max=8+fill", {"policy_arguments": {"sl_max": 8}, "fill_to_batch": True}),
    ],
)  # fmt: skip
def test_short_forms_of_policies(text, name, expected):
    method = parse_policy(text)
    assert method.name == name
    assert method.settings.items() >= expected.items()


@pytest.mark.parametrize(
    ("text", "name", "drafters", "runner"),
    [
        ("static:8", "static:8", ("draft",), None),
        ("static:8@draft", "static:8", ("draft",), None),
        ("static:8@suffix", "static:8@suffix", ("suffix",), None),
        ("goodput+cap@sssd+draft", "goodput+cap@sssd+draft", ("sssd", "draft"), None),
        ("static:8@early_exit", "static:8@early_exit", ("early_exit",), None),
        ("static:8@suffix+early_exit", "static:8@suffix+early_exit", ("suffix", "early_exit"), None),
        ("static:8@eager@draft+suffix", "static:8@draft+suffix@eager", ("draft", "suffix"), "eager"),
        ("static:2+fill@prompt_lookup@graph", "static:2+fill@prompt_lookup@graph", ("prompt_lookup",), "graph"),
    ],
)
def test_short_forms_name_who_drafts(text, name, drafters, runner):
    method = parse_policy(text)
    assert (method.name, method.drafters, method.config.runner) == (name, drafters, runner)
    assert method.settings["drafters"] == list(drafters)
    assert names_runner(text) == (runner is not None)
    assert parse_policy(text, runner="eager").config.runner == (runner or "eager")


def test_drafts_out_of_texts_are_priced_as_in_any_call() -> None:
    """Without `+cap` policies are not, so that what they want is measured."""
    unpriced = SpeculationConfig(cost_cap=False)
    for drafter in ("suffix", "sssd", "prompt_lookup"):
        assert parse_policy(f"static:8@{drafter}").config.cost_cap is None
        assert parse_policy(f"static:8@{drafter}", unpriced).config.cost_cap is False
        assert parse_policy(f"static:8+cap@{drafter}", unpriced).config.cost_cap is True
    for drafter in ("draft", "suffix+draft", "early_exit"):
        assert parse_policy(f"static:8@{drafter}").config.cost_cap is False


def test_drafters_are_measured_side_by_side(ending_pair):
    """What drafts out of texts makes no draft step, and remembers no answer of an earlier call."""
    spent = {}
    for text in ("static:4", "static:4@suffix", "static:4@suffix+draft"):
        method = parse_policy(text, cost_probe=False)
        first, again = ([*answer(method, ending_pair, Request(TOKENS))] for _ in range(2))
        assert torch.equal(first[0].sequences, again[0].sequences)
        assert first[0].own.acceptance_rate == again[0].own.acceptance_rate or text == "static:4@suffix+draft"
        spent[text] = [first[0].sequences.tolist(), first[0].own.draft_steps]
    assert spent["static:4"][0] == spent["static:4@suffix"][0] == spent["static:4@suffix+draft"][0]
    assert spent["static:4@suffix+draft"][1] <= spent["static:4"][1]


def test_a_runner_given_beside_the_text_becomes_part_of_the_name():
    assert parse_policy("dsde", runner="eager").name == "dsde@eager"
    assert parse_policy("dsde@eager", runner="other").config.runner == "eager"


def test_a_base_configuration_keeps_the_arguments_of_its_own_policy():
    base = SpeculationConfig("static", {"num_draft_tokens": 7}, max_draft_length=9)
    assert parse_policy("static", base).config.policy_arguments == {"num_draft_tokens": 7}
    assert parse_policy("static:2", base).config.policy_arguments == {"num_draft_tokens": 2}
    base = base.replace(options=RuntimeOptions(view_bucket=8))
    other = parse_policy("dsde", base, cost_probe=False).config
    assert other.options == RuntimeOptions(view_bucket=8, cost_probe=False)
    assert (other.policy_arguments, other.max_draft_length, other.options.cost_probe) == ({}, 9, False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dsde@",
        "static:x",
        "nothing",
        "dsde:nothing=1",
        "dsde@nowhere",
        "dsde@suffix@sssd",
        "dsde@suffix+sssd",
        "dsde@early_exit+draft",
        "dsde@draft+draft",
        "dsde@eager@graph",
        "dsde@suffix+sssd+draft",
        "dsde@suffix+",
    ],
)
def test_other_forms_are_refused(text):
    with pytest.raises((TypeError, ValueError)):
        parse_policy(text)


def test_statistics_of_several_calls_are_added_up(ending_pair):
    method = parse_policy("static:3")
    answers = [answer(method, ending_pair, Request(TOKENS), TEXTS)[0] for _ in range(2)]
    single, both = method.summarise(answers[:1], 1.0), method.summarise(answers, 2.0)
    assert both["rounds"] == 2 * single["rounds"]
    assert both["emitted"] == 2 * single["emitted"] == 2 * 3 * TOKENS
    assert both["acceptance_rate"] == single["acceptance_rate"]
    assert single["tokens_per_round"] >= 1
    assert 0 < single["mean_draft_length"] <= 3
    spent = sum(single["seconds"][name] for name in ("draft", "verify", "bookkeeping", "prefill", "idle"))
    assert spent == pytest.approx(1.0)


def test_zero_drafts_are_plain_decoding(ending_pair):
    method = parse_policy("static:0")
    result, _ = answer(method, ending_pair, Request(TOKENS))
    summary = method.summarise([result], 1.0)
    assert (summary["rounds"], summary["mean_draft_length"], summary["tokens_per_round"]) == (TOKENS, 0, 1)
    assert summary["acceptance_rate"] is None


def test_unknown_baselines_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'beam', but one of 'generate', 'generate_static'"):
        parse_baseline("beam")
    assert set(baselines.BASELINES) == {"generate", "generate_static", "assisted", "prompt_lookup"}


def test_of_these_only_the_static_cache_leaves_compiled_code():
    assert not PolicyMethod("dsde", SpeculationConfig()).compiles
    assert BASELINES["generate_static"].compiles
    assert not BASELINES["generate"].compiles


def test_each_method_knows_only_what_its_own_calls_have_cost(monkeypatch):
    timed = []
    monkeypatch.setattr("hf_dsde.decoding.loop.live_costs", cost_measurement.live_costs)
    monkeypatch.setattr(
        cost_measurement, "pass_seconds", lambda runner, width, longest: timed.append(width) or float(width)
    )
    pair = tiny_pair()
    enable(pair.target)
    first, second = (PolicyMethod(name, SpeculationConfig("goodput")) for name in ("first", "second"))

    def measures(method):
        timed.clear()
        answer(method, pair, Request(3))
        return bool(timed)

    assert [measures(method) for method in (first, second, first, second)] == [True, True, False, False]
    first.close()
    assert [measures(method) for method in (first, second)] == [True, False]
