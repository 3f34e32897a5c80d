"""The demo measures what it says, and shows it."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console
from tiny_pair import PROMPTS, tiny_pair

from hf_dsde import pairs
from hf_dsde.cli.demo import run as demo
from hf_dsde.cli.demo import view as demo_view
from hf_dsde.cli.demo.prompts import DEMO_PROMPTS
from hf_dsde.config import SpeculationConfig
from hf_dsde.divergence import BatchComparison, RowComparison, Verdict

OPTIONS = demo.DemoOptions(
    dtypes=(torch.float32,),
    methods=(
        demo.Method("dsde", SpeculationConfig("dsde")),
        demo.Method("static, 2 tokens", SpeculationConfig("static", {"num_draft_tokens": 2})),
    ),
    max_new_tokens=10,
    repeats=2,
    prompts=PROMPTS,
)


@pytest.fixture(scope="module")
def result() -> demo.DemoResult:
    return demo.run_demo(OPTIONS, tiny_pair)


def shown(renderable, width=140):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()


def test_the_batch_is_eight_prompts_of_different_kinds_and_lengths():
    assert len({prompt.kind for prompt in DEMO_PROMPTS}) == 8
    lengths = [len(prompt.text) for prompt in DEMO_PROMPTS]
    assert max(lengths) > 15 * min(lengths)


def test_every_method_gives_the_tokens_of_plain_generate_in_float32(result):
    (float32,) = result.dtypes
    assert [method.name for method in float32.methods] == [demo.PLAIN, "dsde", "static, 2 tokens"]
    assert result.is_exact
    assert len({method.texts for method in float32.methods}) == 1


def test_counts_agree_with_the_statistics(result):
    for method in result.dtypes[0].methods[1:]:
        assert method.statistics.emitted == method.emitted
        assert method.tokens_per_pass == method.statistics.block_efficiency > 1.0
    assert result.dtypes[0].methods[0].tokens_per_pass == 1.0


def test_speed_is_the_median_and_the_spread_its_ends():
    method = demo.MethodResult("m", emitted=12, seconds=(2.0, 6.0, 3.0), texts=())
    assert method.tokens_per_second == 4.0
    assert method.spread == (2.0, 6.0)


def test_each_method_is_timed_once_per_repeat_and_in_turn():
    steps = []
    result = demo.run_demo(OPTIONS, tiny_pair, steps.append)
    assert all(len(method.seconds) == OPTIONS.repeats for method in result.dtypes[0].methods)
    assert len(steps) == OPTIONS.runs + len(OPTIONS.dtypes)
    timed = [step for step in steps if ", run " in step]
    assert [step.split(": ")[1].rsplit(", run", 1)[0] for step in timed[:3]] == [demo.PLAIN, "dsde", "static, 2 tokens"]


def test_leaves_the_target_as_it_was():
    pair = tiny_pair()
    kind = type(pair.target)
    demo.run_demo(dataclasses.replace(OPTIONS, repeats=1), lambda dtype, device: pair)
    assert type(pair.target) is kind


def test_answers_end_with_their_first_end_token():
    sequences = torch.tensor([[9, 9, 5, 2, 2, 2], [9, 9, 5, 6, 7, 8], [9, 9, 2, 2, 2, 2], [9, 2, 5, 6, 3, 0]])
    assert pairs.answer_lengths(sequences, 2, [2, 3]).tolist() == [2, 4, 1, 3]


def test_requests_go_through_the_chat_template_and_pad_on_the_left():
    tokenizer = tiny_pair().tokenizer
    batch = pairs.encode(tokenizer, ["c", "cde"])
    assert tokenizer.batch_decode(batch["input_ids"]) == ["<pad><pad>abcf", "abcdef"]
    assert batch["attention_mask"].tolist()[0] == [0, 0, 1, 1, 1, 1]


def test_requests_are_taken_as_they_are_without_a_chat_template():
    tokenizer = tiny_pair().tokenizer
    tokenizer.chat_template = None
    assert tokenizer.batch_decode(pairs.encode(tokenizer, ["cd"])["input_ids"]) == ["cd"]


def test_the_result_survives_json(result):
    restored = json.loads(json.dumps(result.to_dict()))
    assert restored["provenance"]["versions"]["torch"]
    assert {"command", "commit", "device"} <= restored["provenance"].keys()
    dsde = restored["dtypes"]["float32"][1]
    assert dsde["equality"] == {"equal": 3, "near tie": 0, "different": 0}
    assert dsde["tokens_per_second"]["slowest"] <= dsde["tokens_per_second"]["median"]
    assert dsde["statistics"]["counts"]["emitted"] == dsde["emitted"]


def test_the_view_shows_answers_numbers_and_equality(result):
    text = shown(demo_view.result_view(result))
    assert "1. short" in text
    assert "plain generate, dsde, static, 2 tokens" in text
    assert "3 equal" in text
    assert "times plain generate's speed" in text
    assert "CPU" in text


def test_differences_are_told_apart(result):
    rows = (
        RowComparison(0, Verdict.EQUAL),
        RowComparison(1, Verdict.NEAR_TIE, 3, 7, 8, 0, 1, gap=0.125, ulp=0.125),
        RowComparison(2, Verdict.DIFFERENT, 4, 7, 8, 0, 5, gap=9.0, ulp=0.125),
    )
    (float32,) = result.dtypes
    odd = dataclasses.replace(
        float32.methods[1], comparison=BatchComparison(rows, torch.float32, 2.0), texts=("x", "y", "z")
    )
    changed = dataclasses.replace(result, dtypes=(demo.DtypeResult(torch.float32, (float32.methods[0], odd)),))
    assert not changed.is_exact
    text = shown(demo_view.result_view(changed))
    assert "1 equal, 1 near tie, 1 different" in text


def test_bfloat16_does_not_promise_equal_tokens(result):
    rows = (RowComparison(0, Verdict.DIFFERENT, 4, 7, 8, 0, 5, gap=9.0, ulp=0.125),)
    odd = dataclasses.replace(result.dtypes[0].methods[1], comparison=BatchComparison(rows, torch.bfloat16, 2.0))
    assert dataclasses.replace(result, dtypes=(demo.DtypeResult(torch.bfloat16, (odd,)),)).is_exact


def test_a_missing_draft_says_where_it_was_looked_for():
    with pytest.raises(FileNotFoundError, match=r"no-such-draft.*model_cards.*distill_draft"):
        pairs.shipped_draft_folder("no-such-draft")
