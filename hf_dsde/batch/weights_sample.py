"""A hash of a few values of every weight of a model, whatever kind of tensor a weight is."""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
import weakref
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SAMPLED = 16
"""Values of each tensor, evenly spaced, first and last included."""
_HASH_DIGITS = 16

_unreadable: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
"""Stand-ins for the samples of models whose weights cannot be read, as long as these models live."""


def weights_sample(model: torch.nn.Module, *, named: bool) -> str | None:
    """A hash of shapes, dtypes and a few values of all weights; their order, not their names, tells them apart.

    Args:
        model: The model.
        named: Whether something else tells what the model is. Weights that cannot be read, such as those on no device,
            then give None. Without a name they give a random stand-in that no other object and no other process has.
    """
    digest = hashlib.sha256()
    try:
        for weight in _weights(model):
            for part in _parts(weight):
                digest.update(part)
    except Exception:  # noqa: BLE001  a tensor class of somebody's own may raise anything when it is looked into
        return None if named else _unreadable.setdefault(model, uuid.uuid4().hex)
    return digest.hexdigest()[:_HASH_DIGITS]


def _weights(model: torch.nn.Module) -> Iterator[Tensor]:
    """Parameters, and the buffers that are saved with them, where some quantisations keep their weights."""
    yield from model.parameters()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Buffers that are not saved are computed, perhaps on another device with another rounding.
            if name not in module._non_persistent_buffers_set:
                yield buffer


@torch.no_grad()
def _parts(weight: Tensor) -> Iterator[bytes]:
    """What a weight is and a sample of what it holds, down to the plain tensors that it is made of."""
    yield f"{tuple(weight.shape)} {weight.dtype};".encode()
    if is_traceable_wrapper_subclass(weight):
        names, context = weight.__tensor_flatten__()
        yield f"{type(weight).__qualname__} {_described(context)};".encode()
        for name in names:
            yield from _parts(getattr(weight, name))
        return
    held = _made_of(weight)
    if held is None:
        yield _sampled_bytes(weight)
    else:
        for tensor in held:
            yield from _parts(tensor)
    # bitsandbytes keeps four bits of each value in the parameter, and the scales in an attribute of it.
    state = getattr(weight, "quant_state", None)
    for part in [] if state is None else [vars(state)[name] for name in sorted(vars(state))]:
        if isinstance(part, Tensor):
            yield from _parts(part)


def _made_of(weight: Tensor) -> list[Tensor] | None:
    """The tensors that another layout than the strided one consists of; None for the strided one."""
    if weight.is_quantized:
        if weight.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scales = [torch.tensor([weight.q_scale(), weight.q_zero_point()])]
        else:
            scales = [weight.q_per_channel_scales(), weight.q_per_channel_zero_points()]
        return [weight.int_repr(), *scales]
    if weight.layout == torch.sparse_coo:
        return [weight._indices(), weight._values()]
    if weight.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [weight.crow_indices(), weight.col_indices(), weight.values()]
    if weight.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [weight.ccol_indices(), weight.row_indices(), weight.values()]
    return None if weight.layout == torch.strided else [weight.to_dense()]


def _sampled_bytes(weight: Tensor) -> bytes:
    """The bytes of up to `SAMPLED` values at evenly spaced places, the first and the last among them."""
    with torch._C.DisableTorchFunctionSubclass():
        weight = weight.detach()
        if weight.element_size() == 1 and weight.dtype not in (torch.bool, torch.int8, torch.uint8):
            weight = weight.view(torch.uint8)  # not every type of a byte or less can be indexed
        count = weight.numel()
        places = torch.tensor(sorted({i * (count - 1) // (SAMPLED - 1) for i in range(SAMPLED)} if count else ()))
        # By coordinates, since flattening would copy a weight that is not contiguous.
        where = torch.unravel_index(places.long().to(weight.device), weight.shape) if weight.dim() else (...,)
        values = weight[where].cpu().reshape(-1).contiguous()
        return values.view(torch.uint8).numpy().tobytes()


def _described(value: Any) -> Any:
    """What a tensor class says of itself beside its tensors, without what differs between processes or devices."""
    if value is None or isinstance(value, (str, bool, int, float, torch.dtype)):
        return value
    if isinstance(value, Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return sorted((str(key), _described(part)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return [_described(part) for part in value]
    return type(value).__qualname__
