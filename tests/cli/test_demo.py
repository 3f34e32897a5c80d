"""The demo measures what it says, and shows it."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console
from tiny_pair import SERVINGS, tiny_pair

from hf_dsde import pairs
from hf_dsde.cli.demo import run as demo
from hf_dsde.cli.demo import view as demo_view
from hf_dsde.cli.demo.prompts import DEMO_PROMPTS, DemoPrompt
from hf_dsde.cli.demo.prompts import SERVINGS as DEMO_SERVINGS
from hf_dsde.config import SpeculationConfig
from hf_dsde.divergence import BatchComparison, RowComparison, Verdict

OPTIONS = demo.DemoOptions(
    methods=(
        demo.Method("dsde", SpeculationConfig("dsde")),
        demo.Method("static, 2 tokens", SpeculationConfig("static", {"num_draft_tokens": 2})),
    ),
    max_new_tokens=10,
    repeats=2,
    servings=SERVINGS,
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
    alone, together = DEMO_SERVINGS
    assert together.batches == (DEMO_PROMPTS,)
    assert len(alone.batches) == 3
    assert {prompt for batch in alone.batches for prompt in batch} < set(DEMO_PROMPTS)


def test_every_method_gives_the_tokens_of_plain_generate_in_float32(result):
    assert result.is_exact
    assert [len(serving.methods[0].texts) for serving in result.servings] == [2, 3]
    for serving in result.servings:
        assert serving.dtype is torch.float32
        assert [method.name for method in serving.methods] == [demo.PLAIN, "dsde", "static, 2 tokens"]
        assert len({method.texts for method in serving.methods}) == 1


def test_counts_agree_with_the_statistics(result):
    for serving in result.servings:
        for method in serving.methods[1:]:
            assert method.statistics.emitted == method.emitted
            assert method.tokens_per_pass == method.statistics.block_efficiency > 1.0
        assert serving.methods[0].tokens_per_pass == 1.0


def test_speed_is_the_median_and_the_spread_its_ends():
    method = demo.MethodResult("m", emitted=12, seconds=(2.0, 6.0, 3.0), texts=())
    assert method.tokens_per_second == 4.0
    assert method.spread == (2.0, 6.0)


def test_each_method_is_timed_once_per_repeat_and_in_turn():
    steps = []
    result = demo.run_demo(OPTIONS, tiny_pair, steps.append)
    methods = [method for serving in result.servings for method in serving.methods]
    assert all(len(method.seconds) == OPTIONS.repeats for method in methods)
    assert len(steps) == OPTIONS.steps
    timed = [step for step in steps if ", run " in step]
    assert [step.split(": ")[1].rsplit(", run", 1)[0] for step in timed[:3]] == [demo.PLAIN, "dsde", "static, 2 tokens"]


def test_each_answer_is_shown_once_and_before_the_next_step():
    told = []

    def on_answer(prompt, text):
        told.append((prompt, text))

    result = demo.run_demo(OPTIONS, tiny_pair, told.append, on_answer)
    answers = [entry for entry in told if isinstance(entry, tuple)]
    assert [prompt.kind for prompt, _ in answers] == ["medium", "long", "short"]
    assert [text for _, text in answers[:2]] == list(result.servings[0].methods[0].texts)
    first = told.index(answers[0])
    assert told[first - 1].endswith(f"{demo.PLAIN}, run 1 of 2")


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
    dsde = restored["servings"][1]["methods"][1]
    assert dsde["equality"] == {"equal": 3, "near tie": 0, "different": 0}
    assert dsde["tokens_per_second"]["slowest"] <= dsde["tokens_per_second"]["median"]
    assert dsde["statistics"]["counts"]["emitted"] == dsde["emitted"]


def test_the_view_shows_answers_numbers_and_equality(result):
    text = shown(demo_view.result_view(result))
    assert "2 requests alone: float32" in text
    assert "3 requests together: float32" in text
    assert "3 equal" in text
    answer = shown(demo_view.answer_view(DemoPrompt("fact", "Which?\nTell me."), "None."))
    assert answer.split() == ["fact:", "Which?", "None."]
    assert "times plain generate's speed" in text
    assert "CPU" in text


def test_differences_are_told_apart(result):
    rows = (
        RowComparison(0, Verdict.EQUAL),
        RowComparison(1, Verdict.NEAR_TIE, 3, 7, 8, 0, 1, gap=0.125, ulp=0.125),
        RowComparison(2, Verdict.DIFFERENT, 4, 7, 8, 0, 5, gap=9.0, ulp=0.125),
    )
    together = result.servings[1]
    odd = dataclasses.replace(together.methods[1], comparison=BatchComparison(rows, torch.float32, 2.0))
    changed = dataclasses.replace(result, servings=(dataclasses.replace(together, methods=(together.methods[0], odd)),))
    assert not changed.is_exact
    text = shown(demo_view.result_view(changed))
    assert "1 equal, 1 near tie, 1 different" in text


def test_bfloat16_does_not_promise_equal_tokens(result):
    rows = (RowComparison(0, Verdict.DIFFERENT, 4, 7, 8, 0, 5, gap=9.0, ulp=0.125),)
    odd = dataclasses.replace(result.servings[1].methods[1], comparison=BatchComparison(rows, torch.bfloat16, 2.0))
    bfloat16 = demo.ServingResult(torch.bfloat16, SERVINGS[1], (odd,))
    assert dataclasses.replace(result, servings=(bfloat16,)).is_exact


def test_a_missing_draft_says_where_it_was_looked_for():
    with pytest.raises(FileNotFoundError, match=r"no-such-draft.*model_cards.*distill_draft"):
        pairs.shipped_draft_folder("no-such-draft")
