"""The kernel for weights of four bits under Triton's interpreter, run as `interpreted_kernels.py` is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton.language as tl
from four_bit_cases import (
    FOUR_BIT_CASES,
    FourBitCase,
    FourBitProduct,
    make_four_bits,
    slow_four_bit_linear,
    slow_numbers,
)
from interpreting import guarded_results, loops_with_new_numpy  # noqa: F401 - fixtures
from triton.runtime import interpreter

from hf_dsde.kernels.elementwise import four_bit_linear
from hf_dsde.kernels.four_bit_plan import FourBitPlan
from hf_dsde.kernels.four_bits import launch_four_bits

DTYPES = {torch.bfloat16: 2**-7, torch.float16: 2**-11}
"""Dtype -> how far a result may be from the sum that it stands for: half a unit of the last place of a number just
above one; a whole one of bfloat16, which the interpreter cuts off instead of rounding."""
PLANS = [
    FourBitPlan(16, 16, 4, 4, 3, 1),
    FourBitPlan(16, 32, 2, 2, 2, 3),
    FourBitPlan(32, 16, 1, 4, 4, 2),
    FourBitPlan(64, 64, 1, 4, 3, 4),
    FourBitPlan(16, 16, 8, 8, 2, 2),
]


def rounded_numbers(kind: str, dtype: torch.dtype) -> list[float]:
    return torch.tensor(slow_numbers(kind)).to(dtype).tolist()


def expected(product: FourBitProduct) -> torch.Tensor:
    """What comes out, but for the order of sums in float32 and one rounding."""
    return slow_four_bit_linear(product, rounded_numbers(product.weight.kind, product.x.dtype))


def is_right(found: torch.Tensor, product: FourBitProduct) -> bool:
    right, dtype = expected(product), product.x.dtype
    # Sums are of numbers much larger than themselves where those cancel.
    near = 2**-20 * float(right.abs().max())
    return bool(((found.double() - right).abs() <= DTYPES[dtype] * right.abs() + near).all())


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has the bits of bfloat16 as integers, and multiplies those."""
    original = interpreter.InterpreterBuilder.create_dot

    def numbers(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.view(np.uint16).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: original(self, numbers(a), numbers(b), *rest),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FOUR_BIT_CASES.values(), ids=FOUR_BIT_CASES)
def test_products_are_those_of_the_format(case, dtype):
    product = make_four_bits(case, dtype)
    found = four_bit_linear(*product)
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, (case.tokens, case.rows), True)
    assert is_right(found, product)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_launch_gives_the_same(plan, dtype):
    product = make_four_bits(FourBitCase(9, 1088, 75, inner=256, bias=True), dtype)
    assert is_right(launch_four_bits(*product, plan), product)


def test_a_wrong_reading_of_the_format_is_not_taken_for_right():
    product = make_four_bits(FourBitCase(6, 256, 40, inner=256, bias=True), torch.float16)
    weight, nested = product.weight, product.weight.nested
    wrong = {
        "halves of bytes swapped": weight._replace(codes=(weight.codes << 4) | (weight.codes >> 4)),
        "the neighbour's scale": weight._replace(absmax=weight.absmax.roll(1)),
        "the other kind": weight._replace(kind="fp4"),
        "no offset": weight._replace(nested=nested._replace(offset=torch.tensor(0.0))),
        "larger blocks": weight._replace(blocksize=128),
        "half of the neighbour's inner scale": weight._replace(nested=nested._replace(absmax=0.5 * nested.absmax)),
    }
    assert is_right(four_bit_linear(*product), product)
    for name, other in wrong.items():
        assert not is_right(four_bit_linear(product.x, other, product.bias), product), name
    assert not is_right(four_bit_linear(product.x, weight), product), "no bias"


def test_a_token_gets_the_same_among_others():
    x, weight, bias = make_four_bits(FourBitCase(16, 320, 40, inner=256, bias=True), torch.bfloat16)
    assert torch.equal(four_bit_linear(x, weight, bias)[5:6], four_bit_linear(x[5:6], weight, bias))


def test_tokens_may_lie_apart_or_at_odd_places():
    product = make_four_bits(FourBitCase(4, 128, 24), torch.float16)
    wide = torch.full((4, 131), float("nan")).half()
    for begin in (0, 1, 2):
        wide[:, begin : begin + 128] = product.x
        assert torch.equal(four_bit_linear(wide[:, begin : begin + 128], product.weight), four_bit_linear(*product))
    across = product.x.T.contiguous().T
    assert torch.equal(four_bit_linear(across, product.weight), four_bit_linear(*product))


def test_inputs_that_do_not_fit_are_refused():
    x, weight, _ = make_four_bits(FourBitCase(4, 128, 24), torch.float16)
    for bad, words in (
        ((torch.ones(65, 128).half(), weight), "up to 64 tokens of 128"),
        ((x[:, :64], weight), "of 128 elements"),
        ((x.float(), weight), "torch.float32"),
        ((x[0], weight), "are needed"),
        ((x, weight._replace(blocksize=32)), "blocks of 32"),
        ((x, weight._replace(codes=weight.codes[1:])), "1535 bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            four_bit_linear(*bad)
    with pytest.raises(ValueError, match="up to 16 tokens"):
        launch_four_bits(torch.ones(17, 128).half(), weight, None, replace(PLANS[0], block_m=16))


def test_nothing_happens_without_tokens():
    x, weight, bias = make_four_bits(FourBitCase(1, 128, 24, bias=True), torch.float16)
    assert four_bit_linear(x[:0], weight, bias).shape == (0, 24)
