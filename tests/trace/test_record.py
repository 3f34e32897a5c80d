"""What a recording says, against plain passes of the models over the same texts."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby

import pytest
import torch
from reference_signals import position_scalars, rejected_law, softmax
from tiny_models import noisy_copy, tiny_model
from tiny_pair import tiny_pair
from tiny_traces import DRAFT_LENGTH, NEW_TOKENS, PROMPTS, record

from hf_dsde.pairs import Pair
from hf_dsde.trace import Prompt, load_trace, record_trace

SEQUENCES = 2 * len(PROMPTS)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("traces") / "tiny")


def assert_scalars(row, target, draft, where):
    for name, value in position_scalars(target, draft, row["token"]).items():
        assert row[name] == pytest.approx(value, rel=2e-5, abs=1e-6), (name, *where)
    residual = row["residual_draft_probability"]
    if row["temperature"] == 0:
        assert residual == row["draft_top1"], where
    else:
        q, law = softmax(draft), rejected_law(target, draft)
        assert min(abs(q[token] - residual) for token, weight in enumerate(law) if weight > 0) < 1e-6, where


def test_committed_rows_are_ordered_and_complete(recorded):
    places = [(row["sequence"], row["position"]) for row in recorded.committed]
    assert places == sorted(places)
    counts = Counter(sequence for sequence, _ in places)
    assert sorted(counts) == list(range(SEQUENCES))
    assert all(position < counts[sequence] for sequence, position in places)
    assert len(set(places)) == len(places)
    for row in recorded.committed:
        assert row["temperature"] == (0 if row["sequence"] < len(PROMPTS) else 1)
        assert row["task"] == PROMPTS[row["sequence"] % len(PROMPTS)].task


def test_committed_scalars_are_those_of_a_plain_pass(recorded):
    for sequence, rows in groupby(recorded.committed, key=lambda row: row["sequence"]):
        prompt, answer = recorded.prompt_tokens(sequence), recorded.answer(sequence)
        target, draft = recorded.logits(prompt + answer)
        for row in rows:
            after = len(prompt) + row["position"] - 1
            assert_scalars(row, target[after], draft[after], (sequence, row["position"]))


def test_drafted_scalars_are_those_of_a_plain_pass_over_the_drafted_block(recorded):
    blocks = groupby(recorded.drafted, key=lambda row: (row["sequence"], row["round"], row["start"]))
    off_path = 0
    for (sequence, number, start), drafted in blocks:
        rows = list(drafted)
        prompt, answer = recorded.prompt_tokens(sequence), recorded.answer(sequence)
        block = [row["token"] for row in rows]
        assert [row["offset"] for row in rows] == list(range(len(block)))
        target, draft = recorded.logits(prompt + answer[:start] + block)
        for row in rows:
            after = len(prompt) + start + row["offset"] - 1
            assert_scalars(row, target[after], draft[after], (sequence, number, row["offset"]))
            off_path += not row["on_path"]
    assert off_path > 100


def test_a_round_starts_where_the_one_before_ended_and_says_what_was_accepted(recorded):
    for sequence in range(SEQUENCES):
        answer = recorded.answer(sequence)
        end = 0
        rows = [row for row in recorded.drafted if row["sequence"] == sequence]
        for number, drafted in groupby(rows, key=lambda row: row["round"]):
            block = list(drafted)
            accepted = sum(row["accepted"] for row in block)
            assert [row["accepted"] for row in block] == [offset < accepted for offset in range(len(block))]
            assert [row["on_path"] for row in block] == [offset <= accepted for offset in range(len(block))]
            start = block[0]["start"]
            assert start == end, (sequence, number)
            assert len(block) == min(DRAFT_LENGTH, NEW_TOKENS - start - 1)
            assert answer[start : start + accepted] == [row["token"] for row in block[:accepted]]
            if rows[0]["temperature"] == 0 and accepted < len(block):
                assert answer[start + accepted] != block[accepted]["token"]
                assert answer[start + accepted] == block[accepted]["target_argmax"]
            end = start + accepted + 1
        # The last token of a full budget needs no draft.
        assert NEW_TOKENS - 1 <= end <= NEW_TOKENS


def test_at_temperature_0_draft_tokens_stand_where_the_target_agrees(recorded):
    rows = [row for row in recorded.drafted if row["temperature"] == 0]
    assert all(row["accepted"] == (row["on_path"] and row["target_agrees"]) for row in rows)
    assert all(row["draft_agrees"] for row in rows)
    assert all(row["target_agrees"] for row in recorded.committed if row["temperature"] == 0)


def test_at_temperature_0_the_text_is_plain_generates(recorded):
    target = recorded.pair.target
    for sequence in range(len(PROMPTS)):
        prompt = torch.tensor([recorded.prompt_tokens(sequence)])
        plain = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        assert recorded.answer(sequence) == plain[0, prompt.shape[1] :].tolist()


def test_at_temperature_1_tokens_follow_the_raw_distribution(tmp_path):
    # A truncation in the generation config would show: it belongs to the model's own `generate`.
    pair = tiny_pair(torch.float32)
    pair.target.generation_config.top_k = 2
    count = 3000
    recorded = record(
        tmp_path / "trace", pair=pair, prompts=[Prompt("one", "abc")] * count, temperatures=[1.0],
        max_new_tokens=1, batch_size=500,
    )  # fmt: skip
    target, _ = recorded.logits(recorded.prompt_tokens(0))
    law = softmax(target[-1])
    found = Counter(row["token"] for row in recorded.committed)
    assert sum(found.values()) == count
    statistic = sum((found[token] - count * p) ** 2 / (count * p) for token, p in enumerate(law) if count * p >= 5)
    cells = sum(count * p >= 5 for p in law)
    assert cells >= 4
    # Mean `cells`, standard deviation sqrt(2 cells): five of them.
    assert statistic < cells + 5 * (2 * cells) ** 0.5


def test_answers_end_with_their_end_tokens_and_blocks_may_go_on(tmp_path):
    pair = tiny_pair(torch.float64)
    free = record(tmp_path / "free", temperatures=[0.0])
    texts = [free.answer(sequence) for sequence in range(len(PROMPTS))]

    def stop(text, end):
        return text.index(end) + 1 if end in text else NEW_TOKENS

    # The token that makes answers of one batch most different in length.
    end = max(set(sum(texts, [])), key=lambda token: len({stop(text, token) for text in texts}))  # noqa: RUF017
    pair.target.generation_config.eos_token_id = end
    recorded = record(tmp_path / "trace", pair=pair, temperatures=[0.0], batch_size=len(PROMPTS))
    answers = [recorded.answer(sequence) for sequence in range(len(PROMPTS))]
    assert answers == [text[: stop(text, end)] for text in texts]
    assert len({len(answer) for answer in answers}) > 2
    assert any(row["start"] + row["offset"] >= len(answers[row["sequence"]]) for row in recorded.drafted)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trace_and_the_callers_draws_go_on(recorded, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    again = record(tmp_path / "again")
    torch.testing.assert_close(torch.rand(3), expected)
    assert again.trace.committed.equals(recorded.trace.committed)
    assert again.trace.drafted.equals(recorded.trace.drafted)
    other = record(tmp_path / "other", seed=4, temperatures=[1.0])
    assert other.answer(0) != recorded.answer(len(PROMPTS))


def test_a_prompt_that_comes_again_is_answered_again(tmp_path):
    recorded = record(tmp_path / "trace", prompts=[Prompt("one", "abc")] * 3, batch_size=1, temperatures=[1.0])
    assert len({tuple(recorded.answer(sequence)) for sequence in range(3)}) == 3
    residual = [row["residual_draft_probability"] for row in recorded.committed if row["position"] == 0]
    assert len(set(residual)) > 1


def test_a_batch_brings_what_it_brings_whatever_comes_before(recorded, tmp_path):
    # Prompts 2 and 3 were the second batch; at temperature 0 nothing else about the call matters.
    alone = record(tmp_path / "alone", prompts=PROMPTS[2:4], temperatures=[0.0])
    assert [alone.answer(0), alone.answer(1)] == [recorded.answer(2), recorded.answer(3)]


@pytest.mark.slow
def test_without_tokens_exactly_the_token_columns_are_missing(recorded, tmp_path):
    bare = record(tmp_path / "bare", tokens=False).trace
    assert recorded.trace.has_tokens
    assert not bare.has_tokens
    for full, short in ((recorded.trace.committed, bare.committed), (recorded.trace.drafted, bare.drafted)):
        kept = [name for name in full.column_names if name not in ("token", "target_argmax", "draft_argmax")]
        assert short.column_names == kept
        assert len(full.column_names) == len(kept) + 3
        assert full.select(kept).equals(short)


def test_the_description_says_how_it_was_made(tmp_path):
    names = {"target": "a target", "draft": "a draft"}
    recorded = record(tmp_path / "trace", names=names, mantissa_bits=11)
    written = json.loads((tmp_path / "trace" / "trace.json").read_text(encoding="utf-8"))
    assert written == recorded.trace.description
    assert written["pair"] == names
    assert written["dtype"] == "float64"
    assert written["prompts"] == {"letters": 2, "pairs": 3}
    assert (written["temperatures"], written["mantissa_bits"], written["draft_length"]) == ([0, 1], 11, DRAFT_LENGTH)
    assert set(written["provenance"]) >= {"command", "commit", "versions", "date"}
    assert len(written["provenance"]["date"]) == len("2026-01-31")
    assert "time" not in written["provenance"]


def test_models_without_a_name_are_named_by_class_and_folders_by_their_last_part(tmp_path):
    pair = tiny_pair(torch.float64)
    pair.draft.config._name_or_path = "/some/where/my-draft"
    recorded = record(tmp_path / "trace", pair=pair, temperatures=[0.0])
    assert recorded.trace.description["pair"] == {"target": "LlamaForCausalLM", "draft": "my-draft"}


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [80, 112])
def test_a_draft_with_another_padding_of_the_vocabulary_can_be_recorded(tmp_path, vocabulary):
    target = tiny_model()
    draft = noisy_copy(tiny_model(vocab_size=vocabulary), 0.05)
    shared = min(vocabulary, 96)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        draft.get_parameter(name).data[:shared] = target.get_parameter(name).data[:shared]
    pair = Pair(target, draft, tiny_pair().tokenizer)
    trace = record(tmp_path / "trace", pair=pair, max_new_tokens=12).trace
    q = [row["draft_probability"] for row in trace.committed.to_pylist() if row["token"] >= vocabulary]
    assert all(value == 0 for value in q)
    assert trace.drafted.num_rows > 50


def test_a_family_with_its_own_attention_can_be_recorded(tmp_path):
    target = tiny_model("gemma2")
    pair = Pair(target, noisy_copy(target, 0.05), tiny_pair().tokenizer)
    recorded = record(tmp_path / "trace", pair=pair, temperatures=[0.0], max_new_tokens=10)
    prompt, answer = recorded.prompt_tokens(2), recorded.answer(2)
    target_logits, draft_logits = recorded.logits(prompt + answer)
    for row in [row for row in recorded.committed if row["sequence"] == 2]:
        after = len(prompt) + row["position"] - 1
        expected = position_scalars(target_logits[after], draft_logits[after], row["token"])
        assert row["kld"] == pytest.approx(expected["kld"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": [0.7]}, "temperatures"),
        ({"temperatures": []}, "temperatures"),
        ({"temperatures": [1.0, 1.0]}, "temperatures"),
        ({"prompts": []}, "prompts"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"draft_length": 0}, "draft_length"),
        ({"batch_size": 0}, "batch_size"),
        ({"mantissa_bits": 24}, "mantissa_bits"),
        ({"max_new_tokens": 500}, "context"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_is_written(tmp_path, changes, message):
    arguments = {"prompts": PROMPTS, **changes}
    with pytest.raises(ValueError, match=message):
        record_trace(tiny_pair(), arguments.pop("prompts"), tmp_path / "trace", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_is_not_overwritten(recorded, tmp_path):
    folder = tmp_path / "trace"
    record(folder, temperatures=[0.0], max_new_tokens=2)
    with pytest.raises(FileExistsError, match="not empty"):
        record(folder)
    assert load_trace(folder).committed.num_rows == 2 * len(PROMPTS)
