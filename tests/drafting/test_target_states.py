"""What a drafter that reads the target's hidden states is given, and transformers' multi-token prediction on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_calls import compared, endless_model, plain
from tiny_models import ragged_batch
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

import hf_dsde
from hf_dsde.decoding.verification import VerifiedBlock
from hf_dsde.drafting import CandidateBatch, DraftCall, Drafter, DraftMonitor, RoundPlan, SequenceBatch
from hf_dsde.execution.spans import Span

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


class Reading(Drafter):
    """Proposes what the text had at its start, and keeps the hidden states of everything that stands."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = layers

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self._layers

    def start(self, call: DraftCall) -> None:
        super().start(call)
        self.states: list[list[Tensor]] = [[] for _ in range(call.sequences.rows)]

    def read_states(self, spans: Sequence[Span], hidden: tuple[Tensor, ...]) -> None:
        places = torch.tensor([span.count for span in spans]).cumsum(0)[:-1]
        for span, *parts in zip(spans, *(states.tensor_split(places) for states in hidden), strict=True):
            self.states[span.row].append(torch.stack(parts, 1))

    def accept(self, verified: VerifiedBlock, hidden: tuple[Tensor, ...]) -> None:
        for row, accepted in enumerate(verified.accepted.tolist()):
            self.states[row].append(torch.stack([states[row, : accepted + 1] for states in hidden], 1))

    def get_candidates(self, sequences: SequenceBatch, plan: RoundPlan, monitor: DraftMonitor) -> CandidateBatch:
        drafts = [sequences.host_text(row)[-1:] * most for row, most in enumerate(plan.length_counts)]
        return CandidateBatch.of_lists(drafts, sequences.device)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral"])
def test_a_drafter_gets_the_hidden_states_of_every_token_that_stands(family: str) -> None:
    target, inputs = endless_model(family), ragged_batch([1, 6, 3])
    drafter = Reading((0, 1, 2))
    output = compared(target, drafter, inputs, hf_dsde.StaticPolicy(2), max_new_tokens=12)
    width = inputs["input_ids"].shape[1]
    for row, text in enumerate(output.sequences):
        tokens = text[width - int(inputs["attention_mask"][row].sum()) :][None]
        with torch.no_grad():
            expected = torch.stack(target(tokens, output_hidden_states=True).hidden_states, 2)[0]
        found = torch.cat(drafter.states[row])
        known = len(expected) - 1  # nothing follows from the last token
        tolerance = 1e-9 if target.dtype == torch.float64 else 1e-4
        torch.testing.assert_close(found[:known], expected[:known], rtol=tolerance, atol=tolerance)


def mtp_model(layers: int) -> PreTrainedModel:
    """A random target whose configuration names layers for multi-token prediction."""
    config = Glm4MoeConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=layers,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return hf_dsde.enable(model)


@pytest.mark.parametrize("layers", [1, 2])
def test_multi_token_prediction_of_transformers_serves_a_batch(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row drafts what transformers drafts for it at batch size 1."""
    target = mtp_model(layers)
    torch.manual_seed(1)
    predictor = MtpModel(target, layers).eval()
    for name, weight in predictor.named_parameters():
        if "experts" in name:  # which are read from a file, and hold what was in memory before
            nn.init.normal_(weight, std=0.3)
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *_, **__: predictor)
    drafted: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    forward = MtpModel.forward

    def noted(self: MtpModel, **arguments: Any) -> Any:
        result = forward(self, **arguments)
        drafted.append((tuple(arguments["full_input_ids"][0].tolist()), tuple(result[0][0].tolist())))
        return result

    monkeypatch.setattr(MtpModel, "forward", noted)
    inputs = ragged_batch([2, 6, 4])
    inputs["input_ids"] %= 24
    call = {"use_mtp": True, "do_sample": False, "max_new_tokens": 10}
    expected = plain(target, inputs, max_new_tokens=10)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        text = inputs["input_ids"][row, mask][None]
        target.generate(text, attention_mask=torch.ones_like(text), **call)  # one of its tokens is that of padding
    alone = dict(drafted)
    drafted.clear()
    output = target.generate(**inputs, **call, speculation_policy=hf_dsde.StaticPolicy(layers))
    assert output.tolist() == expected.tolist()
    assert drafted
    common = [(text, tokens) for text, tokens in drafted if text in alone]
    assert len(common) > len(drafted) / 2
    assert all(alone[text] == tokens for text, tokens in common)
