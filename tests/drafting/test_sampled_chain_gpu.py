"""Chains that draw their tokens on a GPU: each replay draws anew, from what it hands over, and nobody waits for it.

Run with `tests/gpu.sh` on a machine with a CUDA device; elsewhere the file is skipped.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from drawn_tokens import Draws
from sampled_law import PROMPT_MASK, PROMPTS, exact_law, pearson, toy_model
from tiny_calls import QUIET, config_of
from tiny_heads import tiny_head
from tiny_models import noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import ScriptedLengths
from transformers import PreTrainedModel
from waits import noted_waits

import hf_dsde
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.execution.cuda_graphs import CudaCapture
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.recorded_chain import DraftedChain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
CUDA = torch.device("cuda", 0)
RUNNERS: dict[str, dict[str, Any]] = {"fused": {}, "recorded": {"fused_layers": False}}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9},
    "top-k and top-p": {"top_p": 0.9, "top_k": 30, "temperature": 1.3},
    "min-p": {"min_p": 0.01},
    "epsilon": {"epsilon_cutoff": 1e-3},
}
SCRIPT = [[3, 0, 5, 1, 2, 4], [0, 4, 1, 5, 0, 2], [2, 2, 2, 2, 2, 2], [3, 3, 6, 6, 1, 1]] * 20


@functools.cache
def pair(kind: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny_model().float()
    target.generation_config.eos_token_id = None
    target = hf_dsde.enable(target.to(CUDA))
    if kind == "model":
        return target, noisy_copy(target, 0.05)
    size = 60 if kind == "head" else None
    return target, tiny_head(tiny_model().float(), draft_vocabulary=size).to(CUDA)


def call(kind: str, settings: dict[str, Any], rows: int = 6, policy: Any = None, **options: Any) -> Any:
    target, draft = pair(kind)
    inputs = {name: tensor.to(CUDA) for name, tensor in ragged_batch(random_lengths(rows)).items()}
    return target.generate(
        **inputs,
        assistant_model=draft,
        speculation_policy=policy or ScriptedLengths(SCRIPT),
        speculation_config=config_of(QUIET, **settings),
        return_dict_in_generate=True,
        **{"do_sample": True, "top_k": 0, "max_new_tokens": 40, **options},
    )


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a text is decides which passes are recorded."""
    torch.manual_seed(0)


class Seen:
    chains = 0
    begun = 0
    by_step = 0
    recorded = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    noted = Seen()
    chain, begin, step_by_step = GraphRunner.chain, GraphRunner.begin_chain, ChainDrafter._step_by_step
    record = CudaCapture.__call__

    def counted_chain(self: GraphRunner, given: Any) -> DraftedChain | None:
        drafted = chain(self, given)
        noted.chains += drafted is not None
        return drafted

    def counted_begin(self: GraphRunner, given: Any) -> DraftedChain | None:
        drafted = begin(self, given)
        noted.begun += drafted is not None
        noted.chains += drafted is not None
        return drafted

    def counted_steps(self: ChainDrafter, *arguments: Any) -> Any:
        noted.by_step += 1
        return step_by_step(self, *arguments)

    def counted_record(self: CudaCapture, *bodies: Any) -> Any:
        noted.recorded += 1
        return record(self, *bodies)

    monkeypatch.setattr(GraphRunner, "chain", counted_chain)
    monkeypatch.setattr(GraphRunner, "begin_chain", counted_begin)
    monkeypatch.setattr(ChainDrafter, "_step_by_step", counted_steps)
    monkeypatch.setattr(CudaCapture, "__call__", counted_record)
    return noted


@pytest.mark.parametrize("settings", RUNNERS.values(), ids=RUNNERS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["head", "whole vocabulary", "model"])
def test_chains_are_recorded_once_and_a_round_waits_once(
    kind: str, options: dict[str, Any], settings: dict[str, Any], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # the text of another seed may need another shape
        torch.manual_seed(3)
        call(kind, settings, **options)
    assert seen.by_step == 0
    assert seen.begun > 4
    seen.recorded = seen.chains = 0
    torch.manual_seed(3)
    with noted_waits(monkeypatch) as waits:
        output = call(kind, settings, **options)
    assert seen.by_step == seen.recorded == 0
    assert seen.chains > 4
    assert waits.pop("utils/transfers.py::wait") == len(output.speculation_statistics.rounds)
    assert not {place for place in waits if place.startswith(("drafting", "execution"))}


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"suppress_tokens": [5]}], ids=str)
def test_steps_are_taken_where_more_than_scores_decides(options: dict[str, Any], seen: Seen) -> None:
    call("head", {}, **options)
    assert seen.by_step > 2
    assert not seen.chains


@pytest.mark.parametrize("settings", RUNNERS.values(), ids=RUNNERS)
@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_seed_gives_one_text_whatever_was_recorded_before(
    kind: str, settings: dict[str, Any], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_dsde.release_memory(pair(kind)[1])
    texts, states = [], []
    for turn in range(3):  # the first call records, the last one begins no chain early
        if turn == 2:
            assert seen.begun > 4
            monkeypatch.setattr(GraphRunner, "begin_chain", lambda self, chain: None)
        torch.manual_seed(5)
        texts.append(call(kind, settings, temperature=0.9, eos_token_id=[4, 11, 40]).sequences)
        states.append(torch.cuda.get_rng_state())
    assert seen.by_step == 0
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(states[0], states[1]), "recording draws nothing"
    another = call(kind, settings, temperature=0.9, eos_token_id=[4, 11, 40]).sequences
    assert another.shape != texts[0].shape or not torch.equal(another, texts[0])


@pytest.mark.parametrize("settings", RUNNERS.values(), ids=RUNNERS)
@pytest.mark.parametrize("options", [{}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.8}], ids=str)
@pytest.mark.parametrize("kind", ["head", "model"])
def test_each_token_is_a_draw_from_what_is_handed_over(
    kind: str, options: dict[str, Any], settings: dict[str, Any], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    draws = Draws(monkeypatch)
    script = [[4] * 96, [2, 4, 5] * 32]
    call(kind, settings, 96, ScriptedLengths(script * 20), max_new_tokens=60, temperature=1.1, **options)
    assert seen.by_step == 0
    assert draws.failures() == []


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8}], ids=str)
@pytest.mark.parametrize("kind", ["head", "model"])
def test_sampled_text_has_the_targets_law(kind: str, options: dict[str, Any], seen: Seen) -> None:
    """Chi-squared against exact enumeration, of a target of five tokens."""
    whole = toy_model(5)
    draft = tiny_head(whole, layers=(0, 1), draft_vocabulary=4) if kind == "head" else noisy_copy(whole, 0.5)
    target, draft = hf_dsde.enable(toy_model(5).to(CUDA)), draft.to(CUDA)
    repeats, depth = 2048, 3
    lengths = torch.randint(0, 4, (8, 2 * repeats), generator=torch.Generator().manual_seed(0)).tolist()
    arguments = {"do_sample": True, "max_new_tokens": 6, "top_k": 0, **options}
    torch.manual_seed(0)
    output = target.generate(
        input_ids=PROMPTS.repeat(repeats, 1).to(CUDA),
        attention_mask=PROMPT_MASK.repeat(repeats, 1).to(CUDA),
        assistant_model=draft,
        speculation_policy=ScriptedLengths(lengths),
        speculation_config=config_of(QUIET, view_bucket=8, max_draft_length=3, fused_layers=False),
        **arguments,
    ).cpu()
    assert seen.by_step == 0
    assert seen.chains > 2
    digits = output[:, PROMPTS.shape[1] :][:, :depth]
    outcomes = (digits * 5 ** torch.arange(depth - 1, -1, -1)).sum(dim=1)
    statistic, freedom = 0.0, 0
    for prompt in range(len(PROMPTS)):
        observed = outcomes[prompt :: len(PROMPTS)].bincount(minlength=5**depth).double()
        part, more = pearson(observed, exact_law(toy_model(5), prompt, depth, arguments) * observed.sum())
        statistic, freedom = statistic + part, freedom + more
    assert p_value(statistic, freedom) > 1e-4


def p_value(statistic: float, freedom: int) -> float:
    """The probability of a larger chi-squared value."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2.0).double()))
