"""Heads on a GPU: recorded and fused passes give the head's own numbers, texts are exact, and a round waits once.

Run with `tests/gpu.sh` on a machine with a CUDA device; elsewhere the file is skipped.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiny_calls import config_of
from tiny_heads import tiny_head
from tiny_models import noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths, ScriptedLengths
from torch import Tensor
from transformers import PreTrainedModel
from waits import noted_waits

import hf_dsde
from hf_dsde.drafting import head as heads
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.cuda_graphs import CudaCapture
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.recorded_chain import DraftedChain
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span
from hf_dsde.heads.head import DraftHead
from hf_dsde.policies import BatchInfo, RoundOutcome, Signal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
CUDA = torch.device("cuda", 0)
NEW_TOKENS = 40
RUNNERS: dict[str, dict[str, Any]] = {"fused": {}, "recorded": {"fused_layers": False}, "eager": {"runner": "eager"}}
HEADS: dict[str, dict[str, Any]] = {
    "llama": {"draft_vocabulary": 60},
    "qwen3, two layers": {"kind": "qwen3", "config": {"num_hidden_layers": 2}, "norm_output": True, "fc_norm": True},
}


@functools.cache
def pair(family: str = "llama", kind: str = "llama") -> tuple[PreTrainedModel, DraftHead]:
    target = tiny_model(family).float()
    target.generation_config.eos_token_id = None
    head = tiny_head(target, **HEADS[kind]).to(CUDA)
    return hf_dsde.enable(target.to(CUDA)), head


def batch(rows: int = 6) -> dict[str, Tensor]:
    return {name: tensor.to(CUDA) for name, tensor in ragged_batch(random_lengths(rows)).items()}


@functools.cache
def plain(family: str = "llama") -> Tensor:
    return pair(family)[0].generate(**batch(), max_new_tokens=NEW_TOKENS, do_sample=False)


def call(
    policy: Any = None, family: str = "llama", kind: str = "llama", settings: dict[str, Any] | None = None, **more: Any
) -> Any:
    target, head = pair(family, kind)
    torch.manual_seed(3)
    draft = more.pop("assistant_model", head)
    arguments = {**batch(), "max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True, **more}
    return target.generate(
        **arguments,
        assistant_model=draft,
        speculation_policy=policy or RandomLengths(5, stop_probability=0.1),
        speculation_config=config_of(**(settings or {})),
    )


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each pass that is recorded."""
    passes: list[int] = []
    original = CudaCapture.__call__
    monkeypatch.setattr(CudaCapture, "__call__", lambda self, *bodies: passes.append(1) or original(self, *bodies))
    return passes


@pytest.mark.parametrize("settings", RUNNERS.values(), ids=RUNNERS)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_text_equals_plain_generate_in_float32(
    family: str, kind: str, settings: dict[str, Any], recorded: list[int]
) -> None:
    for turn in range(2):  # the second call finds every pass recorded
        assert torch.equal(call(None, family, kind, settings).sequences, plain(family))
        assert bool(recorded) == (turn == 0 and "runner" not in settings)
        recorded.clear()


@pytest.mark.parametrize("policy", hf_dsde.available_policies())
def test_a_round_waits_for_the_device_once(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call(policy)  # records what it needs, and waits for that
    with noted_waits(monkeypatch) as waits:
        output = call(policy)
    assert torch.equal(output.sequences, plain())
    rounds = len(output.speculation_statistics.rounds)
    assert waits.pop("utils/transfers.py::wait") == rounds
    found = {place: count for place, count in waits.items() if place.startswith(("drafting", "execution"))}
    assert not found
    inside = waits.pop("decoding/stop_flag.py::nobody_drafts", 0)
    assert inside <= output.speculation_statistics.draft_steps


class WatchedLengths(ScriptedLengths):
    """Looks at the divergence of what it lets rows draft."""

    requires = frozenset({Signal.KLD})

    def start(self, batch: BatchInfo) -> None:
        super().start(batch)
        assert batch.device.type == "cpu"
        self.seen = 0.0

    def observe(self, outcome: RoundOutcome) -> None:
        assert outcome.kld is not None
        self.seen += float(torch.where(outcome.positions, outcome.kld, 0.0).sum())


@pytest.mark.parametrize("kind", [*HEADS, "model"])
def test_chains_keep_what_they_chose_from_for_a_policy_on_the_host(kind: str) -> None:
    more = {"assistant_model": noisy_copy(pair()[0], 0.05)} if kind == "model" else {"kind": kind}
    script = [[3, 0, 5, 1, 2, 4], [0, 4, 1, 5, 0, 2], [2, 2, 2, 2, 2, 2], [1, 1, 1, 6, 1, 1]] * 9
    seen = []
    for runner in ({"runner": "eager"}, {}):
        policy = WatchedLengths(script)
        assert torch.equal(call(policy, settings=runner, **more).sequences, plain())
        seen.append(policy.seen)
    assert seen[0] > 1
    assert seen[1] == pytest.approx(seen[0], rel=0.02)  # single precision may decide a tie differently


@pytest.mark.parametrize("settings", [{}, {"fused_layers": False}], ids=["fused", "recorded"])
@pytest.mark.parametrize("kind", [*HEADS, "model"])
def test_chains_of_replays_draft_what_single_passes_draft(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[tuple[int, ...], list[int]]] = []
    chains: list[int] = []
    original, chain = ChainDrafter.get_candidates, GraphRunner.chain

    def get_candidates(self: ChainDrafter, sequences: Any, plan: Any, monitor: Any) -> Any:
        candidates = original(self, sequences, plan, monitor)
        for row, length in enumerate(candidates.lengths.tolist()):
            if length:
                found[-1][tuple(sequences.host_text(row))] = candidates.tokens[row, :length].tolist()
        return candidates

    def counted(self: GraphRunner, given: Any) -> DraftedChain | None:
        chains.append(given.steps)
        return chain(self, given)

    monkeypatch.setattr(ChainDrafter, "get_candidates", get_candidates)
    monkeypatch.setattr(GraphRunner, "chain", counted)
    more = {"assistant_model": noisy_copy(pair()[0], 0.05)} if kind == "model" else {"kind": kind}
    script = [[3, 0, 5, 1, 2, 4], [0, 4, 1, 5, 0, 2], [2, 2, 2, 2, 2, 2], [0, 0, 0, 6, 1, 1]] * 9
    for runner in ({"runner": "eager"}, settings, settings):  # the last call finds what was recorded
        found.append({})
        assert torch.equal(call(ScriptedLengths(script), settings=runner, **more).sequences, plain())
        assert bool(chains) == ("runner" not in runner)
    expected = found.pop(0)
    for drafts in found:
        pairs = [zip(drafts[text], expected[text], strict=False) for text in drafts.keys() & expected.keys()]
        equal = [a == b for row in pairs for a, b in row]
        assert len(equal) > 40
        assert sum(equal) >= 0.97 * len(equal)  # single precision may decide a tie differently


def test_plain_streaks_longer_than_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "SMALLEST_RING", 8)
    script = [[2] * 6, *[[0] * 6] * 12, [0, 3, 0, 0, 1, 0]] * 3
    output = call(ScriptedLengths(script), settings={"max_draft_length": 3})
    assert torch.equal(output.sequences, plain())


@pytest.mark.parametrize("policy", ["static", "dsde", "svip"])
@pytest.mark.parametrize(("target_device", "head_device"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_head_and_target_may_live_on_different_devices(target_device: str, head_device: str, policy: str) -> None:
    target = tiny_model().float()
    head = tiny_head(target, draft_vocabulary=60).to(head_device)
    target = hf_dsde.enable(target.to(target_device))
    inputs = {name: tensor.to(target_device) for name, tensor in batch().items()}
    expected = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    options = {"max_new_tokens": 24, "do_sample": False, "assistant_model": head, "speculation_policy": policy}
    assert torch.equal(target.generate(**inputs, **options), expected)
    options["do_sample"] = True
    assert target.generate(**inputs, **options).shape[0] == len(expected)


@torch.no_grad()
def passes_of(
    head: DraftHead, tokens: Tensor, states: Tensor, settings: dict[str, Any], keep: int | None
) -> tuple[Tensor, Tensor]:
    """Store all but the last four pairs of each row, and run those: logits and states."""
    rows, width = tokens.shape
    options = RuntimeOptions(**{name: value for name, value in settings.items() if name != "runner"})
    runner = create_runner(head, rows, 256, options, settings.get("runner"))
    spans = [Span(row, 0, width - 4) for row in range(rows)]
    with runner.active():
        runner.store(spans, tokens[:, :-4].flatten(), states[:, :-4].flatten(0, 1))
        positions = torch.arange(width - 4, width, device=CUDA).expand(rows, 4)
        block = RowBlock(tokens[:, -4:], positions, states=states[:, -4:])
        for _ in range(2):
            output = runner.forward(block, width, keep)
    return output.logits, output.hidden[0]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.15), (torch.float16, 0.03)], ids=str
)
@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("settings", RUNNERS.values(), ids=RUNNERS)
@pytest.mark.parametrize("kind", HEADS)
def test_passes_give_what_the_head_gives(
    kind: str, settings: dict[str, Any], keep: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    head = tiny_head(tiny_model(), **HEADS[kind]).to(CUDA, dtype)
    tokens = torch.randint(3, 90, (5, 150), device=CUDA)
    states = torch.randn(5, 150, head.config.hidden_size, device=CUDA, dtype=dtype)
    exact = tiny_head(tiny_model(), **HEADS[kind]).to(dtype).to(CUDA, torch.float64)
    with torch.no_grad():
        expected = exact(tokens, hidden_states=states.double())
    logits, given = passes_of(head, tokens, states, settings, keep)
    last = keep or 4
    for found, wanted in ((logits, expected.logits), (given, expected.hidden_states)):
        difference = (found.double() - wanted[:, -last:]).square().mean().sqrt()
        assert difference < tolerance * wanted[:, -last:].square().mean().sqrt()
