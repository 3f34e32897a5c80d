"""Weights of four bits in a fused pass: which modules are taken over, and that nothing else becomes of them.

Modules are as bitsandbytes makes them, where it is not installed too.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest
import torch
from test_fused_decoder import COUNTS, STORED, CountingOps, Pair, aligned, packed_block
from tiny_models import tiny_model
from torch import Tensor, nn

from hf_dsde.execution.four_bit_modules import four_bits_of
from hf_dsde.execution.fused_decoder import FusedDecoder
from hf_dsde.execution.linear_products import gated_product, products
from hf_dsde.execution.recording_key import recording_key
from hf_dsde.kernels import reference
from hf_dsde.kernels.four_bit_weights import NUMBERS, FourBits, dequantised

FILE = "bitsandbytes.nn.modules"


class QuantState:
    """What bitsandbytes keeps of a weight beside its codes."""

    __module__ = "bitsandbytes.functional"

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= {"nested": False, "offset": None, "state2": None, **attributes}


class Params4bit(nn.Parameter):
    __module__ = FILE
    quant_state: Any


def quantised(values: Tensor, kind: str, *, nested: bool) -> Params4bit:
    """Codes of the nearest numbers, in blocks of 64; of nested scales, bytes in blocks of 256."""
    blocks = values.detach().float().reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    numbers = torch.tensor(NUMBERS[kind])
    codes = ((blocks / absmax[:, None])[..., None] - numbers).abs().argmin(-1).flatten().to(torch.uint8)
    weight = Params4bit((codes[::2] << 4 | codes[1::2])[:, None], requires_grad=False)
    named = {"shape": values.shape, "code": numbers, "blocksize": 64, "quant_type": kind, "dtype": values.dtype}
    if nested:
        inner, offset = torch.linspace(-1, 1, 256), absmax.mean()
        largest = (absmax - offset).abs().amax()
        state2 = QuantState(absmax=largest[None].clone(), code=inner, blocksize=256)
        absmax = (((absmax - offset) / largest)[:, None] - inner).abs().argmin(-1).to(torch.uint8)
        named |= {"nested": True, "offset": offset, "state2": state2}
    weight.quant_state = QuantState(absmax=absmax, **named)
    return weight


class Linear4bit(nn.Linear):
    __module__ = FILE

    def __init__(self, linear: nn.Linear, kind: str = "nf4", *, nested: bool = True) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype)
        self.weight, self.bias = quantised(linear.weight, kind, nested=nested), linear.bias
        self.compute_dtype, self.quant_state, self.calls = linear.weight.dtype, self.weight.quant_state, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        weight = four_bits_of(self, self.compute_dtype)
        assert weight is not None
        return nn.functional.linear(x.to(self.compute_dtype), dequantised(weight, self.compute_dtype), self.bias)


assert isinstance(Linear4bit.forward, FunctionType)
Linear4bit.forward.__module__ = FILE


class FourBitOps(CountingOps):
    """Takes up to `most` tokens."""

    def __init__(self, most: int = 64) -> None:
        super().__init__()
        self.most, self.multiplied, self.beside = most, list[tuple[int, int]](), list[int]()

    def reads_four_bits(self, tokens: int, weight: FourBits, dtype: torch.dtype) -> bool:
        return tokens <= self.most

    def four_bit_linear(self, x: Tensor, weight: FourBits, bias: Tensor | None) -> Tensor:
        self.multiplied.append((len(x), weight.rows))
        return reference.four_bit_linear(x, weight, bias)

    def side_by_side(self, products: Any, x: Tensor) -> list[Tensor]:
        self.beside.append(len(products))
        return reference.side_by_side(products, x)


def made(rows: int = 24, width: int = 128, *, bias: bool = True, **named: Any) -> Linear4bit:
    return Linear4bit(nn.Linear(width, rows, bias=bias, dtype=torch.float16).requires_grad_(False), **named)


def tokens(count: int = 3, width: int = 128) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0)).half()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_module_is_taken_over_with_all_that_it_holds(kind: str, nested: bool) -> None:
    modules, ops, x = [made(kind=kind, nested=nested), made(16, kind=kind, bias=False)], FourBitOps(), tokens()
    expected = [module(x) for module in modules]
    for module in modules:
        module.calls = 0
    assert all(map(torch.equal, products(ops, modules, x), expected))
    assert torch.equal(gated_product(ops, modules[0], modules[0], x), reference.silu_mul(expected[0], expected[0]))
    assert [module.calls for module in modules] == [0, 0]
    assert ops.multiplied == [(3, 24), (3, 16), (3, 24), (3, 24)]
    assert ops.beside == [2], "nothing is shared between launches of ours"


def test_more_tokens_are_the_modules_own_one_after_another() -> None:
    modules, ops, x = [made(), made()], FourBitOps(most=2), tokens()
    products(ops, modules, x)
    gated_product(ops, *modules, x)
    assert [module.calls for module in modules] == [2, 2]
    assert not ops.multiplied
    assert not ops.beside


def spoilt(name: str) -> tuple[Linear4bit, torch.dtype]:
    module, dtype = made(), torch.float16
    state = module.weight.quant_state
    if name == "no state":
        module.weight.quant_state = None
    elif name == "packed for a CPU":
        state.packing_format_for_cpu = True
    elif name == "another compute dtype":
        module.compute_dtype = torch.float32
    elif name == "another dtype of states":
        dtype = torch.bfloat16
    elif name == "a transposed weight":
        state.shape = torch.Size(reversed(state.shape))
    elif name == "other elements":
        module.weight = Params4bit(module.weight.data.view(-1, 2).view(torch.float16), requires_grad=False)
        module.weight.quant_state = state
    elif name == "another kind":
        state.quant_type = "af4"
    elif name == "half scales":
        state.state2.absmax = state.state2.absmax.half()
    elif name == "scales that are neither":
        state.absmax = state.absmax.int()
    elif name == "a bias of another dtype":
        module.bias = nn.Parameter(torch.zeros(24), requires_grad=False)
    elif name == "a class of its own":
        module.__class__ = type("Linear4bit", (Linear4bit,), {"__module__": "somewhere"})
    return module, dtype


@pytest.mark.parametrize(
    "name",
    [
        "no state",
        "packed for a CPU",
        "another compute dtype",
        "another dtype of states",
        "a transposed weight",
        "other elements",
        "another kind",
        "half scales",
        "scales that are neither",
        "a bias of another dtype",
        "a class of its own",
    ],
)
def test_a_module_that_is_not_as_expected_is_called(name: str) -> None:
    assert four_bits_of(made(), torch.float16) is not None
    module, dtype = spoilt(name)
    assert four_bits_of(module, dtype) is None


def test_a_hook_or_another_forward_is_not_passed_over() -> None:
    x, seen = tokens(), list[int]()
    module = made()
    handle = module.register_forward_hook(lambda *_: seen.append(1))
    for expected in ([1], [1]):
        ops = FourBitOps()
        products(ops, [module], x)
        assert seen == expected
        assert bool(ops.multiplied) == (module.calls == 1 and not module._forward_hooks)
        handle.remove()
    own = module.forward
    module.forward = lambda x: 2 * own(x)  # type: ignore[method-assign]
    ops = FourBitOps()
    assert torch.equal(products(ops, [module], x)[0], 2 * own(x))
    assert not ops.multiplied


@pytest.mark.parametrize("others", [(), ("q_proj", "up_proj")], ids=["all", "some"])
def test_a_pass_is_that_of_the_model(others: tuple[str, ...]) -> None:
    model = tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).float()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not name.endswith(("lm_head", *others)):
            model.set_submodule(name, Linear4bit(module))
    pair, ops = Pair(model, STORED), FourBitOps()
    pair.decoder = FusedDecoder(model, ops)
    tokens, positions = aligned(pair.texts, STORED, COUNTS, 4, "left")
    expected = pair.stock_logits(tokens, positions)[positions >= 0]
    calls = [module.calls for module in model.modules() if isinstance(module, Linear4bit)]
    found = pair.fused_logits(packed_block(tokens, positions))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert calls == [module.calls for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(ops.multiplied) == len(calls)


@pytest.mark.parametrize("place", ["absmax", "offset", "code", "state2.absmax", "state2.code"])
def test_scales_that_were_moved_are_recorded_again(place: str) -> None:
    model = tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).half()
    module = Linear4bit(model.model.layers[0].self_attn.q_proj)
    model.model.layers[0].self_attn.q_proj = module
    before = recording_key(model)
    assert before is not None
    assert recording_key(model) == before
    holder, _, name = place.rpartition(".")
    state = module.weight.quant_state
    state = getattr(state, holder) if holder else state
    setattr(state, name, getattr(state, name).clone())
    assert recording_key(model) != before


@pytest.mark.parametrize("own", [torch.float32, torch.float16], ids=str)
def test_lora_over_four_bits_is_added_by_the_ops(own: torch.dtype) -> None:
    peft, package = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    from peft.tuners.lora import bnb

    base = package.nn.Linear4bit(128, 24, bias=False, compute_dtype=torch.float16, quant_type="nf4").to("cpu")
    module = bnb.Linear4bit(base, "a", peft.LoraConfig(r=4, init_lora_weights=False), r=4).eval()
    for part in (module.lora_A, module.lora_B):
        part.to(own)
    ops, x = FourBitOps(), tokens()
    with torch.no_grad():
        expected = module(x)
        found = products(ops, [module], x)[0]
        assert four_bits_of(base, torch.float16) is not None
        assert ops.multiplied == [(3, 24)]
        # PEFT rounds what is added before the sum, too.
        torch.testing.assert_close(found, expected, rtol=2**-9, atol=2**-9)
        assert not torch.allclose(found, base(x), atol=1e-2)
        module.enable_adapters(False)
        torch.testing.assert_close(products(ops, [module], x)[0], base(x), rtol=0, atol=0)
