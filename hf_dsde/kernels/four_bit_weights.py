"""Weights of four bits, as bitsandbytes stores them.

A weight `[N, K]` is a row of N * K codes, two a byte, the first of them in the high half. A code stands for one of 16
numbers between -1 and 1, and consecutive codes share a scale, the largest absolute value of their block. Scales are
numbers, or bytes that stand for numbers between -1 and 1 with scales of their own ("double quantisation").
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(sign * eighth / 12 for sign in (1, -1) for eighth in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}  # fmt: skip
"""Kind -> what its codes stand for, float32. nf4: Dettmers et al., "QLoRA", 2023, appendix E. fp4: a sign, two bits of
an exponent and one of a mantissa, divided by the largest."""


class NestedScales(NamedTuple):
    """What bytes in the place of scales stand for: numbers[byte] * absmax[place // blocksize] + offset.

    Attributes:
        numbers: `[256]`, float32.
        absmax: `[ceil(scales / blocksize)]`, float32.
        offset: One float32, `[]`.
        blocksize: Bytes that share an absmax.
    """

    numbers: Tensor
    absmax: Tensor
    offset: Tensor
    blocksize: int


class FourBits(NamedTuple):
    """A weight of four bits.

    Attributes:
        codes: N * K / 2 bytes, uint8, contiguous, in any shape.
        absmax: `[ceil(N * K / blocksize)]`, float32; uint8 if nested.
        kind: One of `NUMBERS`.
        blocksize: Codes that share a scale.
        rows: N.
        width: K.
        nested: What the bytes of `absmax` stand for.
    """

    codes: Tensor
    absmax: Tensor
    kind: str
    blocksize: int
    rows: int
    width: int
    nested: NestedScales | None = None


def dequantised(weight: FourBits, dtype: torch.dtype) -> Tensor:
    """Return what a weight stands for, `[N, K]`: numbers times scales in float32, rounded once to `dtype`."""
    codes = weight.codes.reshape(-1)
    numbers = torch.tensor(NUMBERS[weight.kind], device=codes.device)
    values = numbers[torch.stack([codes >> 4, codes & 15], dim=1).flatten().long()]
    scales = _scales(weight).repeat_interleave(weight.blocksize)[: len(values)]
    return (values * scales).view(weight.rows, weight.width).to(dtype)


def _scales(weight: FourBits) -> Tensor:
    """The scales of all blocks, float32."""
    if weight.nested is None:
        return weight.absmax
    numbers, absmax, offset, blocksize = weight.nested
    places = torch.arange(len(weight.absmax), device=absmax.device) // blocksize
    return numbers[weight.absmax.long()] * absmax[places] + offset
