"""What tells two recordings of a model apart, asked directly; `test_recordings_between_calls.py` looks at the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import ragged_batch, tiny_model
from transformers import PreTrainedModel
from typing_extensions import Self

import hf_dsde
from hf_dsde.execution import create_runner as runners
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.recording_key import is_compiled, recording_key


def last_mlp(model: PreTrainedModel) -> torch.nn.Module:
    return model.model.layers[-1].mlp


@pytest.mark.parametrize("setting", ["double", "deterministic", "eager attention"])
def test_settings_that_choose_other_kernels_are_told_apart(setting: str) -> None:
    model = tiny_model()
    before = recording_key(model)
    assert before == recording_key(model)
    try:
        if setting == "double":
            torch.set_default_dtype(torch.float64)
        elif setting == "deterministic":
            torch.use_deterministic_algorithms(True)
        else:
            model.set_attn_implementation("eager")
        assert recording_key(model) != before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_weights_of_another_dtype_at_the_same_address_are_told_apart() -> None:
    model = tiny_model().half()
    before = recording_key(model)
    for weight in model.parameters():
        weight.data = weight.data.view(torch.bfloat16)
    assert recording_key(model) != before


class Halves(torch.Tensor):
    """A weight in two tensors, as quantised ones are: it has no address of its own."""

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype, device=high.device)

    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        self.high, self.low = high, low

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Halves:
        return cls(inner["high"], inner["low"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Halves(args[0].high, args[0].low)
        whole = [arg.high + arg.low if isinstance(arg, Halves) else arg for arg in args]
        return func(*whole, **(kwargs or {}))


def test_weights_in_tensors_that_only_wrap_others_are_told_apart() -> None:
    model = tiny_model()
    linear = last_mlp(model).down_proj
    weight = linear.weight.detach().clone()
    keys = []
    for scale in (0.5, 0.5, -3.0):
        held = Halves(scale * weight, 0.5 * weight)
        linear.weight = torch.nn.Parameter(held, requires_grad=False)
        keys += [recording_key(model), recording_key(model)]
    assert None not in keys
    assert keys[0] == keys[1]
    assert keys[2] == keys[3]
    assert keys[2] != keys[4]


class Opaque(torch.nn.Parameter):
    """A weight that is more than its numbers."""


def test_weights_of_unknown_kinds_are_not_kept() -> None:
    model = tiny_model()
    linear = last_mlp(model).down_proj
    linear.weight = Opaque(linear.weight.detach(), requires_grad=False)
    assert recording_key(model) is None


COMPILED: dict[str, Callable[[PreTrainedModel], Any]] = {
    "in place": lambda model: model.compile(backend="eager"),
    "a part": lambda model: setattr(
        model.model.layers[0], "mlp", torch.compile(model.model.layers[0].mlp, backend="eager")
    ),
    "forward": lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
}


@pytest.mark.parametrize("how", COMPILED.values(), ids=COMPILED)
def test_what_the_user_has_compiled_is_found_and_told_apart(how: Callable[[PreTrainedModel], Any]) -> None:
    model = tiny_model()
    before = recording_key(model)
    assert not is_compiled(model)
    how(model)
    assert is_compiled(model)
    assert recording_key(model) == recording_key(model) != before
    assert recording_key(model) is not None


class _Rerun:
    """Runs the body again, as a replay runs the kernels again."""

    def __init__(self, body: Callable[[], PassOutput]) -> None:
        self._body, self.output = body, body().map(torch.clone)

    def __call__(self) -> None:
        self.output.logits.copy_(self._body().logits)


class _TellingCapture:
    """Tells when it records, which is when nothing may be compiled."""

    bytes = 0

    def __init__(self) -> None:
        self.records, self.recorded = False, 0

    def __call__(self, body: Callable[[], PassOutput], warm_up: object = None) -> _Rerun:
        self.records, self.recorded = True, self.recorded + 1
        with torch.no_grad():
            replay = _Rerun(body)
        self.records = False
        return replay


@pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")
def test_what_the_user_has_compiled_is_compiled_before_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    capture, compiled_while_recording = _TellingCapture(), list[bool]()
    monkeypatch.setattr(runners, "can_record", lambda device: True)
    monkeypatch.setattr(runners, "capture_on", lambda device: capture)

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled_while_recording.append(capture.records)
        return graph.forward

    target, draft = tiny_model("gpt2", num_hidden_layers=1), tiny_model("gpt2", num_hidden_layers=1)
    inputs = ragged_batch([3, 5])
    expected = target.generate(**inputs, max_new_tokens=6, do_sample=False)
    target.compile(backend=backend, dynamic=False)
    hf_dsde.enable(target)
    torch._dynamo.reset()
    output = target.generate(
        **inputs, max_new_tokens=6, do_sample=False, assistant_model=draft, speculation_policy="static"
    )
    torch._dynamo.reset()
    assert torch.equal(output, expected)
    assert capture.recorded
    assert compiled_while_recording
    assert not any(compiled_while_recording)
