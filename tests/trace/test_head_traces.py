"""What a recording with a head says, against passes of target and head over each text alone."""

from __future__ import annotations

import copy
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_signals import position_scalars
from tiny_calls import endless_model
from tiny_heads import guessed_ids, head_pass, other_head, reference_draft, states_of, tiny_head
from tiny_text import tiny_tokenizer
from tiny_traces import Recorded, record
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.heads.head import DraftHead
from hf_dsde.pairs import Pair
from hf_dsde.signals import UNKNOWN_TOKEN_LOGIT
from hf_dsde.trace import Prompt

PROMPTS = (Prompt("letters", "a"), Prompt("letters", "ab"), Prompt("more", "fedcba"), Prompt("more", "fedacb" * 2))


def head_of(kind: str) -> tuple[PreTrainedModel, DraftHead]:
    target = endless_model()
    if kind == "eagle3":
        return target, tiny_head(target, draft_vocabulary=60)
    head = other_head(target, kind)
    head.lm_head.weight.data *= 0.004  # its logits come without a norm, and float32 has digits enough for small ones
    return target, head


def recorded_with(head: DraftHead, target: PreTrainedModel, folder: Path) -> Recorded:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    settings = {"max_new_tokens": 10, "draft_length": 4, "temperatures": [1.0]}
    return record(folder, pair=Pair(target, head, tokenizer), prompts=PROMPTS, **settings)


def over_vocabulary(head: DraftHead, logits: Tensor) -> list[float]:
    everything = torch.full((head.config.vocab_size,), UNKNOWN_TOKEN_LOGIT, dtype=logits.dtype)
    everything[guessed_ids(head)] = logits
    return everything.tolist()


def target_logits(target: PreTrainedModel, text: list[int]) -> list[float]:
    with torch.no_grad():
        return target(torch.tensor([text])).logits[0, -1].tolist()


def assert_scalars(row: dict[str, Any], target: list[float], draft: list[float]) -> None:
    for name, value in position_scalars(target, draft, row["token"]).items():
        assert row[name] == pytest.approx(value, rel=2e-5, abs=1e-6), (name, row["sequence"])


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_scalars_are_those_of_passes_over_each_text(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_dsde.trace.scoring.POSITIONS_AT_ONCE", 8)  # several chunks
    target, head = head_of(kind)
    recorded = recorded_with(head, target, tmp_path / "trace")
    first = 0
    for sequence, rows in groupby(recorded.committed, key=lambda row: row["sequence"]):
        prompt, answer = recorded.prompt_tokens(sequence), recorded.answer(sequence)
        for row in rows:
            text = prompt + answer[: row["position"]]
            if len(text) == 1:  # no pair
                first += 1
                draft = [0.0] * head.config.vocab_size
            else:
                logits, _ = head_pass(head, states_of(target, head, text), torch.tensor([text[1:]]))
                draft = over_vocabulary(head, logits)
            assert_scalars(row, target_logits(target, text), draft)
    assert first == 1, "one of the prompts has one token"
    blocks = groupby(recorded.drafted, key=lambda row: (row["sequence"], row["start"]))
    for (sequence, start), rows in blocks:
        drafted = list(rows)
        tokens = [row["token"] for row in drafted]
        text = recorded.prompt_tokens(sequence) + recorded.answer(sequence)[:start]
        _, logits = reference_draft(target, head, text, tokens)
        for row in drafted:
            before = text + tokens[: row["offset"]]
            assert_scalars(row, target_logits(target, before), over_vocabulary(head, logits[row["offset"]]))
