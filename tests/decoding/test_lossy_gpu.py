"""Lossy rules on a GPU: recorded passes, one wait a round, and the limits between exact and everything."""

from __future__ import annotations

import functools

import pytest
import torch
from tiny_calls import QUIET, config_of
from tiny_models import noisy_copy, ragged_batch, random_lengths, tiny_model
from transformers import PreTrainedModel
from waits import noted_waits

import hf_dsde
from hf_dsde import Consultant, LossyAcceptance, TypicalAcceptance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.filterwarnings("ignore::hf_dsde.LossyAcceptanceWarning"),
    # Said once per process when the mode is switched on.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
CUDA = torch.device("cuda", 0)
NEW_TOKENS = 32


@functools.cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny_model().float()
    target.generation_config.eos_token_id = None
    return hf_dsde.enable(target.to(CUDA)), noisy_copy(tiny_model().float(), 0.05).to(CUDA)


def batch() -> dict[str, torch.Tensor]:
    return {name: tensor.to(CUDA) for name, tensor in ragged_batch(random_lengths(6)).items()}


def call(rule: LossyAcceptance | None, *, do_sample: bool = False) -> hf_dsde.SpeculativeGenerateOutput:
    target, draft = pair()
    torch.manual_seed(3)
    return target.generate(
        **batch(),
        max_new_tokens=NEW_TOKENS,
        do_sample=do_sample,
        top_k=0 if do_sample else None,
        assistant_model=draft,
        speculation_policy=hf_dsde.StaticPolicy(4),
        speculation_config=config_of(QUIET, acceptance=rule),
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize("rule", [Consultant(threshold=0.0), TypicalAcceptance(threshold=1.0, alpha=1e9)], ids=str)
def test_where_nothing_may_pass_the_text_is_exact(rule: LossyAcceptance) -> None:
    target, _ = pair()
    expected = target.generate(**batch(), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(call(rule).sequences, expected)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rule", [Consultant(threshold=1e6), TypicalAcceptance(1e-30, 1e-30)], ids=str)
def test_where_everything_may_pass_all_that_is_drafted_stands(rule: LossyAcceptance, do_sample: bool) -> None:
    statistics = call(rule, do_sample=do_sample).speculation_statistics
    assert statistics.accepted == statistics.drafted > 0


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rule", [Consultant(), TypicalAcceptance()], ids=str)
def test_a_lossy_round_waits_no_more_often_than_an_exact_one(
    rule: LossyAcceptance, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []
    for acceptance in (None, rule):
        call(acceptance, do_sample=do_sample)  # records what it needs, and waits for that
        with noted_waits(monkeypatch) as waits:
            output = call(acceptance, do_sample=do_sample)
        assert waits["utils/transfers.py::wait"] == len(output.speculation_statistics.rounds)
        places.append({place for place in waits if not place.startswith("execution/")})
    assert places[1] <= places[0]
