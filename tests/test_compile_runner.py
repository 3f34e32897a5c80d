"""`runner="compile"`: what is recorded is the compiled forward pass, compiled once per shape, and the text is the same.

A CUDA graph replays the kernels that torch.compile has made. Here, on a CPU, a replay runs the compiled function again,
and the backend is one that makes no kernels, so that no compiler of C++ is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from recorded import recording  # noqa: F401 - a fixture
from tiny_models import noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths, ScriptedLengths
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde import runners
from hf_dsde.config import SpeculationConfig
from hf_dsde.policies import StoppingPolicy
from hf_dsde.runners import COMPILED_SHAPES, RunnerWarning, compiled_forward
from hf_dsde.workspaces import workspaces

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
INPUTS = ragged_batch(random_lengths(4))
NEW_TOKENS = 14
FEW_SHAPES = ScriptedLengths([[2, 0, 1, 2]])


class Rerun:
    """Runs the body again. Captures count how often."""

    def __init__(self, body: Callable[[], torch.Tensor]) -> None:
        self._body = body
        self.output = body().clone()

    def __call__(self) -> None:
        self.output.copy_(self._body())


class RerunningCapture:
    bytes = 0

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, body: Callable[[], torch.Tensor]) -> Rerun:
        with torch.no_grad():
            replay = Rerun(body)
        self.recorded += 1
        return replay


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RerunningCapture]]:
    """Compile without making kernels; the list gets what records, one entry per cache that is made."""
    made: list[RerunningCapture] = []

    def capture_on(device: torch.device) -> RerunningCapture:
        made.append(RerunningCapture())
        return made[-1]

    monkeypatch.setattr(runners, "can_record", lambda device: True)
    monkeypatch.setattr(runners, "capture_on", capture_on)
    monkeypatch.setattr(runners, "compiled_forward", partial(compiled_forward, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield made
    torch._dynamo.reset()


def generate(target: PreTrainedModel, draft: PreTrainedModel, policy: StoppingPolicy, **call: Any) -> torch.Tensor:
    """Generate with compiled passes."""
    arguments = {**INPUTS, "max_new_tokens": NEW_TOKENS, "do_sample": False, **call}
    return hf_dsde.enable(target).generate(
        **arguments,
        assistant_model=draft,
        speculation_policy=policy,
        speculation_config=SpeculationConfig(runner="compile"),
    )


def compiled_graphs() -> int:
    assert not counters["graph_break"], dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_text_is_that_of_plain_decoding_and_each_shape_is_compiled_once(
    family: str, captures: list[RerunningCapture]
) -> None:
    target = tiny_model(family, num_hidden_layers=2 if family == "llama" else 1)
    draft = noisy_copy(target, 0.05)
    plain = target.generate(**INPUTS, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(generate(target, draft, FEW_SHAPES), plain)
    recorded = sum(capture.recorded for capture in captures)
    assert len(captures) == 2
    assert compiled_graphs() == recorded > 0
    assert torch.equal(generate(target, draft, FEW_SHAPES), plain)
    assert sum(capture.recorded for capture in captures) == recorded
    assert compiled_graphs() == recorded
    # A new cache of the same shape is recorded, and needs no compilation.
    for model in (target, draft):
        workspaces.release(model)
    assert torch.equal(generate(target, draft, FEW_SHAPES), plain)
    assert len(captures) == 4
    assert compiled_graphs() == recorded


def test_lengths_and_contents_do_not_compile_anew(
    captures: list[RerunningCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other prompts, and drafts that are accepted never in place of always, fill the same shapes.

    What is counted is done before the backend has its turn.
    """
    monkeypatch.setattr(runners, "compiled_forward", partial(compiled_forward, backend="eager"))
    target = tiny_model(num_hidden_layers=1)
    for noise, seed in ((0.0, 0), (1.0, 1)):
        inputs = ragged_batch(random_lengths(4, seed=seed), seed=seed)
        draft = noisy_copy(target, noise)
        plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert torch.equal(generate(target, draft, RandomLengths(3, stop_probability=0.3), **inputs), plain)
    # Passes are recorded per model and cache, and the second draft has shapes that the first one had.
    assert 0 < compiled_graphs() <= sum(capture.recorded for capture in captures)
    assert compiled_graphs() <= 4 + 3


def test_prompts_are_not_compiled(captures: list[RerunningCapture]) -> None:
    """Their shapes come once. A call of one token decodes without drafts: one pass of the target, of one column."""
    generate(tiny_model(), noisy_copy(tiny_model(), 0.05), FEW_SHAPES, max_new_tokens=1)
    assert compiled_graphs() == 1


def test_a_compiler_that_fails_leaves_plain_text_and_a_warning(
    captures: list[RerunningCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        raise NotImplementedError("no kernels today")

    monkeypatch.setattr(runners, "compiled_forward", partial(compiled_forward, backend=broken))
    target = tiny_model()
    draft = noisy_copy(target, 0.05)
    plain = target.generate(**INPUTS, max_new_tokens=NEW_TOKENS, do_sample=False)
    with pytest.warns(RunnerWarning, match="(?s)run eagerly.*no kernels today"):
        assert torch.equal(generate(target, draft, FEW_SHAPES), plain)


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("before", [8, 1000])
def test_the_limit_of_shapes_is_raised_for_a_pass_and_never_lowered(before: int) -> None:
    limits = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        limits.append(torch._dynamo.config.recompile_limit)
        return graph.forward

    with torch._dynamo.config.patch(recompile_limit=before):
        with torch.no_grad():
            compiled_forward(tiny_model(), backend=backend)(torch.tensor([[3, 4]]))
        assert torch._dynamo.config.recompile_limit == before
    assert set(limits) == {max(before, COMPILED_SHAPES)}


@pytest.mark.usefixtures("recording")
def test_other_runners_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nobody asked for torch.compile")

    monkeypatch.setattr(torch, "compile", refuse)
    for runner in (None, "graph", "eager"):
        runners.create_runner(tiny_model(), 2, 16, SpeculationConfig(runner=runner))
