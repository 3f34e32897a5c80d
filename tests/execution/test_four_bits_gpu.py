"""On a GPU: our product with weights of four bits against bitsandbytes' own modules, and texts of such models."""

# ruff: noqa: F811 - a fixture is imported

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_other_weights_gpu import CUDA, SHAPE, check, recorded, text  # noqa: F401 - one is a fixture
from tiny_models import noisy_copy, tiny_model
from torch import Tensor, nn

from hf_dsde.execution.four_bit_modules import four_bits_of
from hf_dsde.kernels.four_bit_plan import FourBitPlan
from hf_dsde.kernels.four_bit_weights import FourBits, dequantised
from hf_dsde.utils.tuning import tuning_of

bnb = pytest.importorskip("bitsandbytes")
pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
NEAR = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
PLANS = [
    FourBitPlan(16, 16, 4, 4, 3, 1),
    FourBitPlan(16, 64, 8, 8, 2, 2),
    FourBitPlan(16, 32, 2, 2, 4, 1),
    FourBitPlan(64, 32, 4, 4, 2, 3),
    FourBitPlan(64, 64, 1, 4, 3, 1),
    FourBitPlan(64, 128, 1, 4, 4, 2),
]


def quantised(linear: nn.Linear, kind: str, *, nested: bool, blocksize: int = 64) -> Any:
    """A module of bitsandbytes with four bits in place of a linear one."""
    weight, dtype = linear.weight.detach(), linear.weight.dtype
    module = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=dtype, quant_type=kind
    )
    module.weight = bnb.nn.Params4bit(
        weight.cpu(), requires_grad=False, quant_type=kind, compress_statistics=nested, blocksize=blocksize
    )
    if linear.bias is not None:
        module.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    return module.to(CUDA)


def made(rows: int, width: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    linear = nn.Linear(width, rows, bias=bias, device=CUDA, dtype=dtype)
    with torch.no_grad():
        # Scales of neighbouring blocks differ, so that one cannot stand in for another.
        linear.weight *= torch.rand(rows, width // 64, 1, device=CUDA).expand(-1, -1, 64).reshape(rows, width).to(dtype)
    return linear.requires_grad_(False)


def distance(found: Tensor, x: Tensor, weight: FourBits, bias: Tensor | None) -> float:
    """How far a product is from the one with the weight in float32, as a part of what errors of terms can come to."""
    exact = dequantised(weight, torch.float32).double()
    right = x.double() @ exact.T + (0 if bias is None else bias.double())
    # Terms are off by one rounding each, in either direction, and the result by another.
    terms = (x.double().square() @ exact.square().T).sqrt()
    return float(((found.double() - right).abs() / (NEAR[x.dtype] * (2 * terms + right.abs()))).max())


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("kind", "blocksize"), [("nf4", 64), ("fp4", 64), ("nf4", 128)])
def test_products_are_those_of_the_modules(kind: str, blocksize: int, nested: bool, dtype: torch.dtype) -> None:
    from hf_dsde.kernels.four_bits import four_bit_linear

    for rows, width in ((4096, 4096), (1000, 640), (37, 384)):  # else bitsandbytes warns of a slow product
        module = quantised(made(rows, width, dtype, bias=True), kind, nested=nested, blocksize=blocksize)
        weight = four_bits_of(module, dtype)
        assert weight is not None
        stored = bnb.functional.dequantize_4bit(module.weight, module.weight.quant_state).float()
        torch.testing.assert_close(dequantised(weight, torch.float32), stored, rtol=2 * NEAR[dtype], atol=1e-6)
        for tokens in (1, 2, 5, 16, 17, 33, 64):
            x = torch.randn(tokens, width, device=CUDA, dtype=dtype)
            found = four_bit_linear(x, weight, module.bias)
            assert (found.dtype, found.shape) == (dtype, (tokens, rows))
            assert distance(found, x, weight, module.bias) < 1
            # bitsandbytes rounds the weight, and with few tokens whatever its kernels do.
            torch.testing.assert_close(found, module(x), rtol=8 * NEAR[dtype], atol=16 * NEAR[dtype])
        for wrong in (
            weight._replace(codes=(module.weight.data << 4) | (module.weight.data >> 4)),
            weight._replace(absmax=weight.absmax.roll(1)),
        ):
            assert distance(four_bit_linear(x, wrong, module.bias), x, weight, module.bias) > 1


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_every_launch_gives_the_same(dtype: torch.dtype, plan: FourBitPlan) -> None:
    from hf_dsde.kernels.four_bits import launch_four_bits

    module = quantised(made(1000, 4096 + 64, dtype, bias=True), "nf4", nested=True)
    weight = four_bits_of(module, dtype)
    assert weight is not None
    x = torch.randn(13, weight.width, device=CUDA, dtype=dtype)
    found = launch_four_bits(x, weight, module.bias, plan)
    assert distance(found, x, weight, module.bias) < 1
    assert torch.equal(launch_four_bits(x, weight, module.bias, plan), found)


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each launch of ours."""
    if not tuning_of(CUDA).four_bit_tokens:
        pytest.skip("this device leaves such products to bitsandbytes")
    from hf_dsde.kernels import four_bits

    tokens: list[int] = []
    original = four_bits.plan_four_bits
    monkeypatch.setattr(
        four_bits, "plan_four_bits", lambda *given, **named: tokens.append(given[0]) or original(*given, **named)
    )
    return tokens


def four_bit_model(dtype: torch.dtype, kind: str = "nf4") -> tuple[Any, Any]:
    """A tiny model whose layers have four bits, and a draft."""
    target = tiny_model(**SHAPE).to(CUDA, dtype)
    draft = noisy_copy(target, 0.05)
    for name, module in list(target.named_modules()):
        if type(module) is nn.Linear and "lm_head" not in name:
            target.set_submodule(name, quantised(module, kind, nested=True))
    return target, draft


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_text_is_that_of_plain_generate_and_passes_are_recorded_once(
    kind: str,
    dtype: torch.dtype,
    recorded: list[int],
    multiplied: list[int],
) -> None:
    target, draft = four_bit_model(dtype, kind)
    found = text(target, draft)
    check(target, found)
    assert multiplied
    before = len(recorded)
    assert before
    assert torch.equal(text(target, draft), found)
    assert len(recorded) == before


def test_weights_that_were_moved_or_quantised_again_are_recorded_again(
    recorded: list[int],
    multiplied: list[int],
) -> None:
    target, draft = four_bit_model(torch.bfloat16)
    text(target, draft)
    before = len(recorded)
    # Kept, so that what is moved back cannot lie where it lay.
    weights = [module.weight for module in target.modules() if hasattr(module, "quant_state")]
    kept = [(weight.data, weight.quant_state.absmax) for weight in weights]
    target.to("cpu")
    target.to(CUDA)
    found = text(target, draft)
    check(target, found)
    moved = len(recorded)
    assert moved > before
    for layer in target.model.layers:
        plain = made(*layer.mlp.down_proj.weight.quant_state.shape, torch.bfloat16)
        layer.mlp.down_proj = quantised(plain, "nf4", nested=True)
    changed = text(target, draft)
    check(target, changed)
    assert len(recorded) > moved
    assert not torch.equal(changed, found)
    assert kept


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=str)
def test_lora_over_four_bits_gives_what_the_eager_model_gives(
    own: torch.dtype,
    recorded: list[int],
    multiplied: list[int],
) -> None:
    peft = pytest.importorskip("peft")
    base, draft = four_bit_model(torch.bfloat16)
    base.is_loaded_in_4bit = True  # as `from_pretrained` says of a quantised model
    with torch.random.fork_rng():
        torch.manual_seed(4)
        config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        target = peft.get_peft_model(base, config).eval()
    assert type(base.model.layers[0].mlp.up_proj).__module__ == "peft.tuners.lora.bnb"
    for name, weight in target.named_parameters():
        if "lora_" in name:
            weight.data = 0.3 * weight.data.to(own)
    found = text(target, draft)
    check(base, found)
    assert recorded
    assert multiplied
