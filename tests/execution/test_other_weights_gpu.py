"""On a GPU: quantised weights and adapters in recorded passes, and a kernel that the device cannot run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_calls import config_of
from tiny_models import PAD, noisy_copy, ragged_batch, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.divergence import Verdict, compare_outputs
from hf_dsde.execution.cuda_graphs import CudaCapture
from hf_dsde.execution.workspaces import workspaces
from hf_dsde.kernels import fitting
from hf_dsde.kernels.fitting import KernelWarning

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
CUDA = torch.device("cuda", 0)
INPUTS = (
    {name: tensor.to(CUDA) for name, tensor in ragged_batch((3, 9, 1, 6)).items()} if torch.cuda.is_available() else {}
)
PLAIN: dict[str, Any] = {**INPUTS, "do_sample": False, "max_new_tokens": 24}
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An entry for each pass that is recorded."""
    passes: list[int] = []
    original = CudaCapture.__call__
    monkeypatch.setattr(CudaCapture, "__call__", lambda self, *bodies: passes.append(1) or original(self, *bodies))
    yield passes
    for model in list(workspaces._idle):
        workspaces.release(model)


def text(target: Any, drafter: Any, **settings: Any) -> Tensor:
    call = {"assistant_model": drafter, "speculation_policy": "static", "speculation_config": config_of(**settings)}
    return hf_dsde.enable(target).generate(**PLAIN, **call)


def check(target: PreTrainedModel, found: Tensor) -> None:
    """Equal to plain text but for near-ties; of wide weights as a tiny model's, eight ulps are near."""
    expected = target.generate(**PLAIN)
    comparison = compare_outputs(target, *INPUTS.values(), expected, found, pad_token_id=PAD, tolerance_ulps=8)
    assert all(row.verdict is not Verdict.DIFFERENT for row in comparison.rows), str(comparison)


class EightBit(nn.Module):
    """Codes and scales in buffers, as modules of GPTQ have them."""

    __module__ = "gptqmodel.nn_modules"

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scales", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.qweight * self.scales)


class FourBit(nn.Module):
    """torch's own products with four bits a weight, in groups of 32; bfloat16."""

    __module__ = "gptqmodel.nn_modules"
    group = 32

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        rows, width = linear.weight.shape
        groups = linear.weight.detach().float().view(rows, -1, self.group)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = (high - low).clamp_min(1e-6) / 15
        codes = ((groups - low) / scale).round().clamp(0, 15).to(torch.uint8).view(rows, width)
        packed = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
        self.register_buffer("qweight", torch.ops.aten._convert_weight_to_int4pack(packed, 2))
        pairs = torch.stack([scale, low + 8 * scale], dim=-1).squeeze(2)
        self.register_buffer("scales", pairs.transpose(0, 1).contiguous().to(linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.ops.aten._weight_int4pack_mm(x.flatten(0, -2), self.qweight, self.group, self.scales)
        return flat.unflatten(0, x.shape[:-1])


@pytest.mark.parametrize(
    ("form", "dtype"), [(EightBit, torch.float16), (EightBit, torch.float32), (FourBit, torch.bfloat16)], ids=str
)
def test_quantised_modules_are_recorded_once(
    form: Callable[[nn.Linear], nn.Module], dtype: torch.dtype, recorded: list[int]
) -> None:
    target = tiny_model(**SHAPE).to(CUDA, dtype)
    draft = noisy_copy(target, 0.05)
    for name, module in list(target.named_modules()):
        if type(module) is nn.Linear and "lm_head" not in name:
            target.set_submodule(name, form(module))
    found = text(target, draft)
    check(target, found)
    before = len(recorded)
    assert before
    assert torch.equal(text(target, draft), found)
    assert len(recorded) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_adapters_that_are_switched_to_and_fro_are_recorded_once_each(dtype: torch.dtype, recorded: list[int]) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model(**SHAPE).to(CUDA, dtype)
    draft = noisy_copy(base, 0.05)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        target = peft.get_peft_model(base, lora, adapter_name="first")
        target.add_adapter("second", lora)
    target.eval()
    counts, texts = [], {}
    for name in ("first", "second", "first", "second"):
        target.set_adapter(name)
        before = len(recorded)
        found = text(target, draft)
        check(base, found)
        assert torch.equal(texts.setdefault(name, found), found)
        counts.append(len(recorded) - before)
    assert min(counts[:2]) > 0
    assert counts[2:] == [0, 0]
    assert not torch.equal(*texts.values())


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_recorded_lora_gives_what_the_eager_model_gives(
    count: int, own: torch.dtype, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters everywhere, of the model's dtype or, as PEFT makes them, of float32."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("triton")
    from hf_dsde.kernels import low_rank

    launches: list[bool] = []
    original = low_rank.suits
    monkeypatch.setattr(low_rank, "suits", lambda *given: launches.append(original(*given)) or launches[-1])
    base = tiny_model(**SHAPE).to(CUDA, torch.bfloat16)
    draft = noisy_copy(base, 0.05)
    ranks = {str(place): 8 + 12 * place for place in range(count)}
    configs = {
        name: peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
        for name, rank in ranks.items()
    }
    with torch.random.fork_rng():
        torch.manual_seed(4)
        target = peft.get_peft_model(base, configs.pop("0"), adapter_name="0")
        for name, config in configs.items():
            target.add_adapter(name, config)
    for name, weight in target.named_parameters():
        if "lora_" in name:
            weight.data = 0.3 * weight.data.to(own)
    target.base_model.set_adapter(list(ranks))
    target.eval()
    check(base, text(target, draft))
    assert recorded
    assert launches
    assert all(launches), "plain torch computed"


@pytest.mark.parametrize("name", ["silu_mul", "add_rms_norm", "ragged_attention"])
def test_a_kernel_that_does_not_fit_is_replaced_alone(
    name: str, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from triton.runtime.errors import OutOfResources

    from hf_dsde.kernels import elementwise

    def broken(*_: Any, **__: Any) -> None:
        raise OutOfResources(147456, 101376, "shared memory")

    monkeypatch.setattr(elementwise, name, broken)
    from hf_dsde.kernels import dispatch

    dispatch.ops_for.cache_clear()
    monkeypatch.setattr(fitting, "_left_out", set())
    monkeypatch.setattr(fitting, "_warned", set())
    target = tiny_model(**SHAPE).to(CUDA, torch.float32)
    draft = noisy_copy(target, 0.05)
    try:
        with pytest.warns(KernelWarning, match=f"cuda:0 cannot run the kernel {name} for torch.float32") as told:
            found = text(target, draft)
        assert len([each for each in told if each.category is KernelWarning]) == 1
        assert torch.equal(found, target.generate(**PLAIN))
        before = len(recorded)
        assert before
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(text(target, draft), found)
        assert len(recorded) == before
    finally:
        dispatch.ops_for.cache_clear()
