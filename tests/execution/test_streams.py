"""The draft's next pass may be under way before the host knows how the round ended: nothing about the text changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import AGREEMENT, EOS, fresh_pair, noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths, ScriptedLengths
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.decoding import loop, run_ahead
from hf_dsde.decoding.run_ahead import RunAhead
from hf_dsde.drafting.model import ModelDrafter
from hf_dsde.policies import StoppingPolicy

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
POLICIES: dict[str, Any] = {
    "random": RandomLengths,
    "stopping inside": lambda: RandomLengths(stop_probability=0.3),
    "plain rounds in between": lambda: ScriptedLengths([[3] * 6, [2, 0, 5, 1, 0, 3], [0] * 6, [0] * 6, [1] * 6] * 9),
    "dsde": lambda: "dsde",
}


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let the loop work as on a GPU; the list says of every proposal whether its first pass was under way."""
    used: list[bool] = []
    original = ModelDrafter._catch_up

    def catch_up(self: ModelDrafter, *arguments: Any) -> torch.Tensor:
        used.append(self._prepared is not None)
        return original(self, *arguments)

    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    monkeypatch.setattr(ModelDrafter, "_catch_up", catch_up)
    return used


def generate(target: PreTrainedModel, draft: PreTrainedModel, policy: str | StoppingPolicy, **call: Any) -> Any:
    hf_dsde.enable(target)
    inputs = ragged_batch(random_lengths(6))
    return target.generate(
        **inputs, **{"max_new_tokens": 40, "do_sample": False} | call, assistant_model=draft, speculation_policy=policy
    )


@pytest.mark.parametrize(
    ("policy", "family", "agreement"),
    [
        (policy, family, list(AGREEMENT)[(turn + place) % len(AGREEMENT)])
        for turn, policy in enumerate(POLICIES)
        for place, family in enumerate(("llama", "gemma3", "gpt2"))
    ],
)
def test_greedy_text_is_that_of_plain_decoding(policy: str, family: str, agreement: str, under_way: list[bool]) -> None:
    target = tiny_model(family)
    draft = noisy_copy(target, AGREEMENT[agreement])
    plain = target.generate(**ragged_batch(random_lengths(6)), max_new_tokens=40, do_sample=False)
    assert torch.equal(generate(target, draft, POLICIES[policy]()), plain)
    assert not under_way[0], "nothing can be under way before the first round"
    assert any(under_way)


@pytest.mark.parametrize("policy", ["random", "plain rounds in between"])
def test_sampled_text_is_the_same_as_without(policy: str, under_way: list[bool], monkeypatch: Any) -> None:
    target, draft = fresh_pair()

    def sampled() -> torch.Tensor:
        torch.manual_seed(5)
        return generate(target, draft, POLICIES[policy](), do_sample=True, temperature=0.9)

    text = sampled()
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: False)
    assert torch.equal(sampled(), text)


def test_nothing_runs_in_front_of_the_round_that_measures_a_plain_step(
    under_way: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    original = RunAhead.begin_draft

    def begin(self: RunAhead) -> None:
        begun.append(len(under_way))
        original(self)

    monkeypatch.setattr(RunAhead, "begin_draft", begin)
    target = tiny_model()
    call = {"max_new_tokens": loop.COST_PROBE_MIN_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    output = generate(target, noisy_copy(target, 0.05), "static", **call, return_dict_in_generate=True)
    rounds = output.speculation_statistics.rounds
    (probe,) = [place for place, counts in enumerate(rounds) if counts.draft_steps == 0]
    assert probe == loop.COST_PROBE_ROUND
    # By then there has been a proposal in each round but that one; after the third, nothing is begun.
    assert begun == list(range(1, len(rounds)))
    assert under_way == [False, *[True] * (probe - 1), False, *[True] * (len(rounds) - probe - 2)]


def test_a_row_that_ends_does_not_keep_the_others_from_it(under_way: list[bool]) -> None:
    target = tiny_model()
    ends = torch.randint(3, 90, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    output = generate(target, noisy_copy(target, 0.05), "static", eos_token_id=[EOS, *ends], pad_token_id=0)
    lengths = (output[:, 12:] != 0).sum(1)
    assert len(set(lengths.tolist())) > 1
    assert all(under_way[1:])


def test_a_draft_at_the_end_of_its_context_is_not_fed_beyond_it(under_way: list[bool]) -> None:
    target = tiny_model("gpt2")
    draft = noisy_copy(tiny_model("gpt2", max_position_embeddings=24), 0.0)
    plain = target.generate(**ragged_batch(random_lengths(6)), max_new_tokens=40, do_sample=False)
    assert torch.equal(generate(target, draft, "static"), plain)
