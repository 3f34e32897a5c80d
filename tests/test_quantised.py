"""Models with quantised weights as target, draft or head: exact, recorded where that can be done, refused by name.

What packages do to a model comes in three forms: weights that are tensors of a class of their own, modules of a class
of their own, and modules whose `forward` was replaced. Each is rehearsed with one that this file makes; the packages
themselves are tested where they are installed.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from recorded import NotingCapture
from tiny_calls import QUIET, config_of
from tiny_heads import tiny_head
from tiny_models import noisy_copy, ragged_batch, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from typing_extensions import Self

import hf_dsde
from hf_dsde.divergence import compare_outputs
from hf_dsde.drafting.layer_draft import initialise_draft, save_draft
from hf_dsde.drafting.rounded_copy import rounded_copy
from hf_dsde.execution.cuda_graphs import NoWaiting
from hf_dsde.execution.recording_key import recording_key
from hf_dsde.heads.dense_weights import dense_weight

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.usefixtures("recording"),
]
INPUTS = ragged_batch((3, 8, 1, 5))
PLAIN: dict[str, Any] = {**INPUTS, "do_sample": False, "max_new_tokens": 10}
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit codes of a weight and a scale for each of its rows."""
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    return (weight.detach() / scale).round().to(torch.int8), scale


class CodedWeight(Tensor):
    """A weight in codes and scales that says it is of the dtype that it stands for."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> CodedWeight:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return CodedWeight(func(args[0].codes), func(args[0].scale))
        if func is torch.ops.aten._to_copy.default:  # codes have no dtype to change
            return CodedWeight(args[0].codes, args[0].scale)
        dense = [arg.codes * arg.scale if isinstance(arg, CodedWeight) else arg for arg in args]
        return func(*dense, **(kwargs or {}))


class CodedLinear(nn.Module):
    """A linear map that keeps its codes in buffers and has no weight."""

    __module__ = "gptqmodel.nn_modules"

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        codes, scale = codes_of(linear.weight)
        self.register_buffer("qweight", codes)
        self.register_buffer("scales", scale)
        self.in_features, self.bias = linear.in_features, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.qweight * self.scales, self.bias)


class WaitingLinear(CodedLinear):
    """One that looks at its input on the host, as int8 products with outliers do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if x.abs().max().item() < 1e9 else 2.0)


def replaced_linears(model: PreTrainedModel, make: Callable[[nn.Linear], nn.Module], *, head: bool = False) -> Any:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and (head or "lm_head" not in name):
            model.set_submodule(name, make(module))
    return model


def with_coded_weight(module: Any) -> Any:
    module.weight = nn.Parameter(CodedWeight(*codes_of(module.weight)), requires_grad=False)
    return module


def with_replaced_forward(linear: nn.Linear) -> nn.Linear:
    codes, scale = codes_of(linear.weight)
    linear.weight = nn.Parameter((codes * scale), requires_grad=False)
    old = linear.forward
    linear.forward = lambda x: 1.0 * old(x)  # type: ignore[method-assign]
    return linear


def loaded(base: PreTrainedModel, folder: Path, config: Any) -> PreTrainedModel:
    base.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=base.dtype, quantization_config=config).eval()


def torchao(base: PreTrainedModel, folder: Path, kind: str) -> PreTrainedModel:
    quantization = pytest.importorskip("torchao.quantization")
    configs = {
        "int8": quantization.Int8WeightOnlyConfig,
        "int4": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.granularity.PerGroup(32)
        ),
        "float8": quantization.Float8WeightOnlyConfig,
    }
    quantization.quantize_(base, configs[kind](), lambda module, name: type(module) is nn.Linear and "head" not in name)
    return base


def quanto(base: PreTrainedModel, folder: Path, kind: str) -> PreTrainedModel:
    package = pytest.importorskip("optimum.quanto")
    package.quantize(base, weights=getattr(package, f"q{kind}"), exclude="lm_head")
    package.freeze(base)
    return base


def bitsandbytes(base: PreTrainedModel, folder: Path, kind: str) -> PreTrainedModel:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    settings = {"bnb_4bit_compute_dtype": base.dtype, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": True}
    return loaded(base, folder, BitsAndBytesConfig(load_in_4bit=True, **settings))


OURS: dict[str, Callable[[PreTrainedModel, Path], Any]] = {
    "tensors": lambda base, _: replaced_linears(base, with_coded_weight),
    "modules": lambda base, _: replaced_linears(base, CodedLinear),
    "replaced forward": lambda base, _: replaced_linears(base, with_replaced_forward),
}
PACKAGES: dict[str, Callable[[PreTrainedModel, Path], Any]] = {
    **{f"torchao {kind}": functools.partial(torchao, kind=kind) for kind in ("int8", "int4", "float8")},
    **{f"quanto {kind}": functools.partial(quanto, kind=kind) for kind in ("int8", "int4")},
    **{f"bitsandbytes {kind}": functools.partial(bitsandbytes, kind=kind) for kind in ("nf4",)},
}
KINDS = {**OURS, **PACKAGES}


def quantised(kind: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A quantised model. float32, where 8-bit weights leave equality a fair demand."""
    base = tiny_model(seed=seed, **SHAPE).to(dtype)
    base.generation_config.eos_token_id = None
    return KINDS[kind](base, folder)


def drafters(target: PreTrainedModel, kind: str, folder: Path) -> dict[str, Any]:
    draft = quantised(kind, folder)
    with torch.no_grad():
        draft(torch.tensor([[5]]))  # bitsandbytes packs weights for a CPU in their first pass
    return {
        "draft": noisy_copy(tiny_model(**SHAPE).float(), 0.05),
        "quantised draft": draft,
        "itself": target,
        "head": tiny_head(target),
        "suffix": hf_dsde.SuffixDrafter(),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_plain_generate_whatever_drafts(
    kind: str, tmp_path: Path, recording: list[NotingCapture]
) -> None:
    target = hf_dsde.enable(quantised(kind, tmp_path))
    expected = target.generate(**PLAIN)
    assert not torch.equal(expected, tiny_model(**SHAPE).float().generate(**PLAIN)), "quantising changed nothing"
    for name, drafter in drafters(target, kind, tmp_path / "draft").items():
        call = {**PLAIN, "assistant_model": drafter, "speculation_policy": "static", "speculation_config": QUIET}
        before = sum(capture.recorded for capture in recording)
        output = target.generate(**call, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected), name
        if name in ("quantised draft", "itself"):
            assert output.speculation_statistics.accepted == output.speculation_statistics.drafted
        between = sum(capture.recorded for capture in recording)
        if name == "quantised draft":
            assert between > before, "nothing was recorded"
            target.generate(**call)
            again = sum(capture.recorded for capture in recording) - between
            assert (again == 0) == (kind != "replaced forward"), "what is known is recorded once"
    eager = target.generate(**{**call, "speculation_config": config_of(QUIET, runner="eager")})
    assert torch.equal(eager, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_were_quantised_again_are_told_apart(kind: str, tmp_path: Path) -> None:
    one, other = (quantised(kind, tmp_path / str(seed), seed) for seed in (0, 1))
    keys = [recording_key(model) for model in (one, one, other)]
    if kind == "replaced forward":
        assert keys == [None] * 3
    else:
        assert keys[0] == keys[1] != keys[2]
        assert keys[0] is not None


class ScaleState:
    """Where a quantiser keeps scales, apart from modules and weights."""

    __module__ = "bitsandbytes.functional"

    def __init__(self, absmax: Tensor) -> None:
        self.absmax, self.nested = absmax, {"offset": [torch.zeros(1)]}


@pytest.mark.parametrize("place", ["module", "weight"])
def test_scales_that_a_quantiser_keeps_elsewhere_are_looked_at(place: str) -> None:
    class Codes(nn.Parameter):
        __module__ = "bitsandbytes.nn.modules"

    model = replaced_linears(tiny_model(**SHAPE).float(), CodedLinear)
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight = Codes(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    state = ScaleState(torch.ones(4))
    (projection if place == "module" else projection.weight).quant_state = state
    before = recording_key(model)
    assert before is not None
    assert before == recording_key(model)
    state.absmax = torch.full((4,), 2.0)
    after = recording_key(model)
    assert after != before
    state.nested["offset"][0] = torch.ones(1)
    assert recording_key(model) != after


def test_a_weight_whose_operations_wait_for_the_device_is_noticed() -> None:
    class Peeking(CodedWeight):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for weight in args:
                if isinstance(weight, Peeking):
                    weight.codes.max().item()
            return super().__torch_dispatch__(func, types, args, kwargs)

    weight = Peeking(*codes_of(torch.randn(4, 8)))
    with torch.no_grad(), NoWaiting():
        nn.functional.linear(torch.ones(2, 8), CodedWeight(weight.codes, weight.scale))
        with pytest.raises(RuntimeError, match="waits for the device"):
            nn.functional.linear(torch.ones(2, 8), weight)


class SharedScratch(CodedLinear):
    """One whose kernels put what is in between into a place that all of them share."""

    running: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        assert not self.running, "another one is using it"
        return super().forward(x)


def test_modules_that_may_share_memory_do_not_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_dsde.kernels import reference

    def side_by_side(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> list[Tensor]:
        SharedScratch.running.extend(range(len(products) - 1))
        try:
            return [product(x) for product in products]
        finally:
            SharedScratch.running.clear()

    monkeypatch.setattr(reference, "side_by_side", side_by_side)
    monkeypatch.setattr(reference, "pays", lambda *_: False)
    target = hf_dsde.enable(replaced_linears(tiny_model(**SHAPE).float(), SharedScratch))
    draft = noisy_copy(tiny_model(**SHAPE).float(), 0.05)
    expected = target.generate(**PLAIN)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf_dsde.RunnerWarning)
        assert torch.equal(target.generate(**PLAIN, assistant_model=draft, speculation_policy="static"), expected)


def test_a_quantised_model_that_waits_for_the_device_is_run_eagerly_and_says_so_once() -> None:
    target = hf_dsde.enable(replaced_linears(tiny_model(**SHAPE).float(), WaitingLinear))
    call = {**PLAIN, "assistant_model": noisy_copy(tiny_model(**SHAPE).float(), 0.05), "speculation_policy": "static"}
    expected = target.generate(**PLAIN)
    with pytest.warns(hf_dsde.RunnerWarning, match="LlamaForCausalLM is run eagerly.*local_scalar_dense") as told:
        assert torch.equal(target.generate(**call), expected)
    assert len([each for each in told if each.category is hf_dsde.RunnerWarning]) <= 2, "fused, and the model's own"
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf_dsde.RunnerWarning)
        assert torch.equal(target.generate(**call), expected)


class OutlierLinear(CodedLinear):
    """As 8-bit layers of bitsandbytes say of themselves."""

    __module__ = "bitsandbytes.nn.modules"

    def __init__(self, linear: nn.Linear, threshold: float) -> None:
        super().__init__(linear)
        self.state = SimpleNamespace(threshold=threshold)


def test_layers_that_look_for_outliers_are_not_recorded_and_the_way_out_is_named(
    recording: list[NotingCapture],
) -> None:
    for threshold in (6.0, 0.0):
        target = replaced_linears(tiny_model(**SHAPE).float(), lambda linear: OutlierLinear(linear, threshold))  # noqa: B023
        call = {**PLAIN, "assistant_model": target, "speculation_policy": "static"}
        expected = hf_dsde.enable(target).generate(**PLAIN)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", hf_dsde.RunnerWarning)
            assert torch.equal(target.generate(**call), expected)
        words = [str(each.message) for each in told if each.category is hf_dsde.RunnerWarning]
        assert [("llm_int8_threshold=0.0" in each) for each in words] == [True] * (threshold > 0)
        assert bool(sum(capture.recorded for capture in recording)) == (threshold == 0)


TABLES: dict[str, Callable[[Any], Any]] = {
    "tensors": with_coded_weight,
    "modules": lambda module: CodedLinear(module) if isinstance(module, nn.Linear) else with_coded_weight(module),
}


@pytest.mark.parametrize("form", TABLES)
@pytest.mark.parametrize("draft_vocabulary", [None, 40])
def test_a_head_takes_the_numbers_of_quantised_tables(form: str, draft_vocabulary: int | None) -> None:
    target = tiny_model(**SHAPE).float()
    head = tiny_head(target, draft_vocabulary=draft_vocabulary, config={"hidden_size": SHAPE["hidden_size"]})
    tables = {name: codes_of(target.get_submodule(name).weight) for name in ("model.embed_tokens", "lm_head")}
    target.set_submodule("model.embed_tokens", TABLES[form](target.model.embed_tokens))
    target.set_submodule("lm_head", TABLES[form](target.lm_head))
    head.share_with(target, lm_head=True)
    embedding, product = (codes * scale for codes, scale in tables.values())
    torch.testing.assert_close(head.embed_tokens.weight.data, embedding, rtol=1e-6, atol=0)
    kept = product if head.draft_ids is None else product[head.draft_ids]
    torch.testing.assert_close(head.lm_head.weight.data, kept, rtol=1e-6, atol=0)
    assert {type(head.embed_tokens.weight), type(head.lm_head.weight)} == {nn.Parameter}
    assert head.shares("embed_tokens")
    expected = target.generate(**PLAIN)
    text = hf_dsde.enable(target).generate(**PLAIN, assistant_model=head, speculation_policy="static")
    assert torch.equal(text, expected)


def test_a_saved_head_is_loaded_for_a_target_with_quantised_tables(tmp_path: Path) -> None:
    target = tiny_model(**SHAPE).half()
    head = tiny_head(target, layers=(0, 1), config={"hidden_size": SHAPE["hidden_size"]})
    head.share_with(target)
    hf_dsde.save_head(head, tmp_path, target_name="a target", shared_weights=False)
    target.set_submodule("model.embed_tokens", with_coded_weight(target.model.embed_tokens))
    head = hf_dsde.load_head(tmp_path, target)
    assert {weight.dtype for weight in head.parameters()} == {torch.float16}
    expected = target.model.embed_tokens(torch.arange(96))
    assert torch.equal(head.embed_tokens.weight, expected)


def test_tables_that_are_plain_are_shared_and_not_copied() -> None:
    target = tiny_model().float()
    assert dense_weight(target.lm_head, torch.float32).data_ptr() == target.lm_head.weight.data_ptr()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "replaced forward"])
def test_a_trained_draft_is_loaded_on_a_quantised_target_and_its_layers_are_plain(kind: str, tmp_path: Path) -> None:
    source = tiny_model(**SHAPE).float()
    save_draft(initialise_draft(source, [0, 1]), tmp_path / "draft", dtype=torch.float32)
    target = quantised(kind, tmp_path / "target")
    draft = hf_dsde.load_draft(tmp_path / "draft", target)
    assert draft.get_input_embeddings().weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert {type(weight) for weight in draft.model.layers.parameters()} == {nn.Parameter}
    assert not any(weight.is_meta for weight in (*draft.parameters(), *draft.buffers()))
    assert not hasattr(draft.config, "quantization_config")
    expected = target.generate(**PLAIN)
    output = hf_dsde.enable(target).generate(
        **PLAIN, assistant_model=draft, speculation_policy="static", return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, expected)
    assert output.speculation_statistics.accepted > 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "replaced forward"])
def test_copies_of_quantised_layers_are_refused_with_the_way_out(kind: str, tmp_path: Path) -> None:
    target = quantised(kind, tmp_path)
    with pytest.raises(ValueError, match=r"target has quantised layers.*_proj.* is a .*load_draft"):
        initialise_draft(target, [0])
    with pytest.raises(ValueError, match=r"target has quantised layers.*_proj.* is a .*load it unquantised"):
        rounded_copy(target)


@pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="quanto is not installed")
def test_outputs_of_a_model_that_cannot_run_in_inference_mode_are_compared(tmp_path: Path) -> None:
    target = quantised("quanto int4", tmp_path, dtype=torch.bfloat16)
    text = target.generate(**PLAIN)
    other = text.clone()
    other[:, -1] = (other[:, -1] + 1) % 90
    compare_outputs(target, *INPUTS.values(), text, other, pad_token_id=0)
