"""Linear modules of bitsandbytes whose weights have four bits, read for a product of this package's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_dsde.kernels.four_bit_weights import NUMBERS, FourBits, NestedScales

_FILE = "bitsandbytes.nn.modules"
_CLASSES = frozenset({"Linear4bit", "LinearNF4", "LinearFP4"})


def four_bits_of(module: nn.Module, dtype: torch.dtype) -> FourBits | None:
    """Return the weight of a linear module of bitsandbytes with four bits. Looked up again each time.

    Scales lie in an object of their own, which is exchanged when a model is moved or quantised again.

    Args:
        module: Any module.
        dtype: Of its input.

    Returns:
        Tensors of the module, none of which is copied. None if the module computes in another dtype, is of another
        class, or stores its weight otherwise: not yet quantised, in other elements than bytes, or packed for a CPU.
    """
    kind = type(module)
    if kind.__module__ != _FILE or kind.__name__ not in _CLASSES or kind.forward.__module__ != _FILE:
        return None
    linear: Any = module
    weight, state = linear.weight, getattr(linear.weight, "quant_state", None)
    if state is None or linear.compute_dtype not in (None, dtype) or getattr(state, "packing_format_for_cpu", False):
        return None
    if state.quant_type not in NUMBERS or len(state.shape) != 2 or weight.dtype != torch.uint8:
        return None
    rows, width = state.shape
    if (rows, width) != (linear.out_features, linear.in_features) or 2 * weight.numel() != rows * width:
        return None
    scales = _scales_of(state)
    if scales is None or not weight.is_contiguous() or (linear.bias is not None and linear.bias.dtype != dtype):
        return None
    absmax, nested = scales
    return FourBits(weight, absmax, state.quant_type, state.blocksize, rows, width, nested)


def _scales_of(state: Any) -> tuple[torch.Tensor, NestedScales | None] | None:
    """What a state of quantisation keeps in place of scales, and what that stands for; None if it is unknown."""
    if not state.nested:
        return (state.absmax, None) if state.absmax.dtype == torch.float32 else None
    inner = state.state2
    nested = NestedScales(inner.code, inner.absmax, state.offset, inner.blocksize)
    single = all(getattr(tensor, "dtype", None) == torch.float32 for tensor in nested[:3])
    return (
        (state.absmax, nested) if single and state.absmax.dtype == torch.uint8 and len(nested.numbers) == 256 else None
    )
