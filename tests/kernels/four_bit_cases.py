"""Weights of four bits, made number by number, and slow float64 loops over what their format says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dsde.kernels.four_bit_weights import FourBits, NestedScales

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_MAGNITUDES = (0.0, 0.0625 / 12, 8 / 12, 12 / 12, 4 / 12, 6 / 12, 2 / 12, 3 / 12)


@dataclass(frozen=True)
class FourBitCase:
    """Sizes of a product, and how its weight is stored; `inner` is the size of blocks of nested scales, 0 for none."""

    tokens: int
    width: int
    rows: int
    kind: str = "nf4"
    blocksize: int = 64
    inner: int = 0
    bias: bool = False


FOUR_BIT_CASES = {
    "one token": FourBitCase(1, 256, 32),
    "fp4": FourBitCase(4, 256, 40, kind="fp4"),
    "nested": FourBitCase(3, 320, 37, inner=256),
    "nested fp4 with a bias": FourBitCase(5, 192, 19, kind="fp4", inner=256, bias=True),
    "blocks of 128": FourBitCase(2, 256, 33, blocksize=128, bias=True),
    "blocks of 128 across rows": FourBitCase(2, 192, 33, blocksize=128, inner=256),
    "blocks of 4096 across rows": FourBitCase(7, 320, 50, blocksize=4096),
    "small blocks of nested scales": FourBitCase(16, 576, 21, inner=8, bias=True),
    "seventeen tokens": FourBitCase(17, 320, 35, inner=256, bias=True),
    "thirty-three tokens": FourBitCase(33, 448, 70, inner=256, bias=True),
    "sixty-four tokens": FourBitCase(64, 320, 33, kind="fp4", blocksize=128),
    "one row, one slice": FourBitCase(1, 64, 1, bias=True),
    "a long row": FourBitCase(2, 4096 + 64, 17, inner=256),
}


class FourBitProduct(NamedTuple):
    """What is multiplied."""

    x: Tensor
    weight: FourBits
    bias: Tensor | None


def make_four_bits(case: FourBitCase, dtype: torch.dtype) -> FourBitProduct:
    """Codes and scales drawn at random; neighbouring scales differ much, and so do the two codes of a byte."""
    generator = torch.Generator().manual_seed(case.tokens + case.width)
    count = case.rows * case.width
    codes = torch.randint(0, 256, (count // 2, 1), generator=generator).to(torch.uint8)
    scales = -(-count // case.blocksize)
    nested = None
    absmax = torch.rand(scales, generator=generator) + 0.05
    if case.inner:
        absmax = torch.randint(0, 256, (scales,), generator=generator).to(torch.uint8)
        inner = torch.rand(-(-scales // case.inner), generator=generator) + 0.05
        numbers = torch.rand(256, generator=generator) * 2 - 1
        nested = NestedScales(numbers, inner, torch.tensor(0.7), case.inner)
    x = torch.randn(case.tokens, case.width, generator=generator).to(dtype)
    bias = torch.randn(case.rows, generator=generator).to(dtype) if case.bias else None
    return FourBitProduct(x, FourBits(codes, absmax, case.kind, case.blocksize, case.rows, case.width, nested), bias)


def slow_numbers(kind: str) -> list[float]:
    """What the codes 0 to 15 stand for."""
    return list(NF4) if kind == "nf4" else [sign * size + 0.0 for sign in (1.0, -1.0) for size in FP4_MAGNITUDES]


def slow_weight(weight: FourBits, numbers: list[float] | None = None) -> Tensor:
    """What a weight stands for, float64, one number after another."""
    numbers = numbers or slow_numbers(weight.kind)
    packed, stored = weight.codes.flatten().tolist(), weight.absmax.tolist()
    values = []
    for place in range(weight.rows * weight.width):
        byte = packed[place // 2]
        code = byte // 16 if place % 2 == 0 else byte % 16
        block = place // weight.blocksize
        scale = stored[block]
        if weight.nested is not None:
            nested = weight.nested
            inner = float(nested.absmax[block // nested.blocksize])
            scale = float(nested.numbers[stored[block]]) * inner + float(nested.offset)
        values.append(numbers[code] * scale)
    return torch.tensor(values, dtype=torch.float64).view(weight.rows, weight.width)


def slow_four_bit_linear(product: FourBitProduct, numbers: list[float] | None = None) -> Tensor:
    """The product in float64."""
    result = product.x.double() @ slow_weight(product.weight, numbers).T
    return result if product.bias is None else result + product.bias.double()
