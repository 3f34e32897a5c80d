"""Passes of a draft head, however they are run, give what the head's own forward pass gives of the whole text."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_heads import causal_mask, tiny_head
from tiny_models import VOCABULARY, tiny_model
from torch import Tensor, nn

from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.fused_families import why_not_fused
from hf_dsde.execution.fused_head import FusedHead
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.pass_seconds import pass_seconds
from hf_dsde.execution.recording_key import recording_key
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span
from hf_dsde.heads.eagle3 import Eagle3Head
from hf_dsde.kernels import reference

pytestmark = pytest.mark.usefixtures("recording")
LENGTHS = [9, 1, 14, 5]
RUNNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("eager", {}),
    "eager, not packed": ("eager", {"packed_attention": False}),
    "recorded": ("graph", {"fused_layers": False}),
    "fused": ("graph", {}),
}
SLIDING = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocabulary": 40},
    "normed": {"norm_before_residual": True, "norm_output": True},
    "biases": {"config": {"attention_bias": True, "num_key_value_heads": 4}},
    "two layers": {"config": {"num_hidden_layers": 2}},
    "qwen3": {"kind": "qwen3"},
    "sliding": {"kind": "qwen3", "config": SLIDING},
}
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}


def head_of(name: str = "plain", dtype: torch.dtype = torch.float64) -> Eagle3Head:
    return tiny_head(tiny_model(), **HEADS[name]).to(dtype)


def pairs(head: Eagle3Head) -> tuple[Tensor, Tensor]:
    """Tokens and states of a text for each row, `[rows, longest]` and `[rows, longest, H]`."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    size = (*tokens.shape, head.config.hidden_size)
    return tokens, torch.randn(size, generator=generator, dtype=torch.float64).to(head.dtype)


@torch.no_grad()
def expected(head: Eagle3Head, row: int) -> tuple[Tensor, Tensor]:
    """Logits and states of a row, run alone and without a cache: `[length, dv]` and `[length, H]`."""
    tokens, states = (part[row : row + 1, : LENGTHS[row]] for part in pairs(head))
    kinds = {"full_attention": None, "sliding_attention": getattr(head.config, "sliding_window", None)}
    masks = {kind: causal_mask(tokens.shape[1], window) for kind, window in kinds.items()}
    output = head(tokens, hidden_states=states, attention_mask=masks)
    return output.logits[0], output.hidden_states[0]


def runner_of(head: Eagle3Head, name: str, **more: Any) -> ModelRunner:
    runner, settings = RUNNERS[name]
    return create_runner(head, len(LENGTHS), 32, RuntimeOptions(**{"prefill_chunk": 8, **settings, **more}), runner)


@torch.no_grad()
def store(runner: ModelRunner, head: Eagle3Head, counts: list[int]) -> None:
    tokens, states = pairs(head)
    spans = [Span(row, 0, count) for row, count in enumerate(counts)]
    flat = [torch.cat([part[span.row, : span.count] for span in spans]) for part in (tokens, states)]
    with runner.active():
        assert runner.store(spans, *flat) == ()


@torch.no_grad()
def tail(runner: ModelRunner, head: Eagle3Head, width: int, keep: int | None = None) -> tuple[Tensor, Tensor]:
    """Run the last pairs of each row; logits and states, `[rows, keep or width, ...]`."""
    tokens, states = pairs(head)
    positions = torch.tensor(LENGTHS)[:, None] - width + torch.arange(width)
    places = positions.clamp_min(0)
    block = RowBlock(tokens.gather(1, places), positions, states=states[torch.arange(len(LENGTHS))[:, None], places])
    with runner.active():
        output = runner.forward(block, max(LENGTHS), keep)
    assert output.logits.isfinite().all()
    (given,) = output.hidden
    return output.logits, given


def check(head: Eagle3Head, found: tuple[Tensor, Tensor], rows: list[int] | None = None) -> None:
    tolerance = TOLERANCES[head.dtype]
    for row in range(len(LENGTHS)) if rows is None else rows:
        logits, states = expected(head, row)
        count = min(found[0].shape[1], len(logits))
        single = max(tolerance, 1e-5)  # logits come as float32
        torch.testing.assert_close(found[0][row, -count:], logits[-count:].float(), rtol=single, atol=single)
        torch.testing.assert_close(found[1][row, -count:], states[-count:], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "runner", "dtype"),
    [(name, runner, torch.float64) for name in HEADS for runner in RUNNERS]
    + [(name, "fused", torch.float32) for name in HEADS],
    ids=str,
)
def test_passes_give_what_the_head_gives(name: str, runner: str, dtype: torch.dtype) -> None:
    head = head_of(name, dtype)
    run = runner_of(head, runner)
    store(run, head, [max(length - 2, 0) for length in LENGTHS])
    for keep in (None, 1):
        check(head, tail(run, head, 3, keep))
    assert run.replays == (RUNNERS[runner][0] == "graph")
    assert run.packs == (runner == "fused")


@pytest.mark.parametrize("runner", RUNNERS)
def test_rows_that_left_and_long_spans(runner: str) -> None:
    head = head_of()
    run = runner_of(head, runner, prefill_chunk=3)
    store(run, head, [length - 1 for length in LENGTHS])
    check(head, tail(run, head, 2, 1))
    run.keep_rows([0, 3])
    for keep in (None, 1):
        check(head, tail(run, head, 2, keep), [0, 3])


def test_fused_passes_are_run_where_they_can_be() -> None:
    assert why_not_fused(head_of()) is None
    assert why_not_fused(head_of("qwen3")) is None
    ran: list[int] = []
    original = FusedHead._entered

    def entered(self: FusedHead, *arguments: Any) -> Any:
        ran.append(1)
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedHead, "_entered", entered)
        head = head_of("two layers")
        run = runner_of(head, "fused")
        store(run, head, LENGTHS)
        assert ran
        ran.clear()
        tail(run, head, 2)
    assert ran


ATTACHED = ("", "layers.0", "layers.0.hidden_norm", "layers.0.self_attn", "layers.0.self_attn.q_norm", "norm")


@pytest.mark.parametrize("name", ATTACHED)
@pytest.mark.parametrize(
    "attach",
    [
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: setattr(module, "forward", lambda *_, **__: None),
    ],
    ids=["hook", "forward"],
)
def test_what_is_attached_to_a_head_keeps_it_from_being_fused(name: str, attach: Callable[[nn.Module], object]) -> None:
    head = head_of("qwen3")
    attach(head.get_submodule(name))
    assert (name or "the model") in str(why_not_fused(head))


def test_heads_of_other_classes_are_not_fused() -> None:
    class Derived(Eagle3Head):
        pass

    head = head_of()
    head.__class__ = Derived
    assert "its class is" in str(why_not_fused(head))


def test_a_pass_of_a_head_leaves_its_recordings_valid() -> None:
    head = head_of()
    before = recording_key(head)
    tail(runner_of(head, "eager"), head, 2)
    assert before is not None
    assert recording_key(head) == before
    assert recording_key(copy.deepcopy(head)) != before


def test_half_precision_is_as_near_to_the_exact_logits_as_the_heads_own_pass() -> None:
    rounded = head_of("plain", torch.bfloat16)
    exact = [expected(copy.deepcopy(rounded).double(), row)[0][-1] for row in range(len(LENGTHS))]
    errors = []
    for name in ("eager", "fused"):
        run = runner_of(rounded, name)
        store(run, rounded, [length - 1 for length in LENGTHS])
        found = tail(run, rounded, 1)[0][:, -1]
        errors.append((found - torch.stack(exact)).square().mean())
    assert 0 < errors[1] < 2 * errors[0]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_step_can_be_timed(runner: str) -> None:
    head = head_of()
    run = runner_of(head, runner)
    store(run, head, LENGTHS)
    with run.active(), torch.no_grad():
        assert pass_seconds(run, 1, max(LENGTHS)) > 0


def test_models_of_no_known_family_are_refused() -> None:
    with pytest.raises(ValueError, match="no fused pass is known"):
        FusedHead(tiny_model("gpt2"), reference)
