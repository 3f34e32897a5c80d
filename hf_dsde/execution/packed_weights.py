"""Weights of linear layers in the order in which oneDNN reads them, for the float32 passes of one call on a CPU.

torch's own product lets MKL arrange the weight for every product of more than one column, so that a pass over a few
columns takes up to three times as long as one over one column. oneDNN can arrange a weight once. It takes as long as
four or five plain steps, and a copy, so that it pays for long calls; copies belong to one call, since whether a weight
has changed between two calls cannot be told in less time than copying it takes.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dsde import compat
from hf_dsde.execution.memory import available_bytes
from hf_dsde.execution.recording_key import is_compiled
from hf_dsde.execution.torch_modes import version_of
from hf_dsde.utils.modules import modules_of

SMALLEST_WEIGHT = 1 << 16
"""Elements of a weight below which it stays as it is: calling oneDNN takes 10 microseconds longer than calling MKL."""
ARRANGED_FOR = 5
"""Columns that the order of a weight is chosen for. Products of any number are as fast as with another choice."""
MEMORY_MARGIN = 2
"""Times the size of all copies that has to be available: caches and logits need memory, too."""
SAMPLED = 64
"""Elements of a weight by which changes are noticed in the midst of a call."""

_lock = Lock()


class PackedWeights:
    """Packed copies of a model's linear weights.

    Of `torch.nn.Linear` itself only, and where nothing has replaced its `forward`: whoever derives from it or replaces
    it may compute something else. Hooks are called as ever. Encoders, of images too, run once, and are left out.

    Args:
        model: Any model; None for none. Nothing is packed of a compiled one, or where memory is scarce.
    """

    def __init__(self, model: PreTrainedModel | None) -> None:
        layers = [] if model is None or is_compiled(model) else _layers_to_pack(model)
        needed = MEMORY_MARGIN * sum(layer.weight.nbytes for layer in layers)
        if needed and needed > available_bytes():
            layers = []
        self._copies: dict[nn.Linear, _PackedCopy] = {layer: _PackedCopy(layer.weight) for layer in layers}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._copies)

    def follow(self) -> None:
        """Pack again what has been changed, as somebody may who has got a text while others are under way.

        In-place changes through `data` that leave a sample of the weight as it was are not noticed.
        """
        for layer, copy in list(self._copies.items()):
            if not _can_be_packed(layer):
                del self._copies[layer]
            elif copy.is_outdated(layer.weight):
                self._copies[layer] = _PackedCopy(layer.weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model's layers compute with the copies inside of the `with` block, in this thread.

        Where gradients are wanted, they compute as ever.
        """
        if not self._copies or torch.is_grad_enabled():
            yield
            return
        thread = get_ident()
        try:
            with _lock:
                for layer, copy in self._copies.items():
                    forward = vars(layer).setdefault("forward", _Forward(layer))
                    if isinstance(forward, _Forward):
                        forward.weights[thread] = copy.packed
            yield
        finally:
            with _lock:
                for layer in self._copies:
                    forward = vars(layer).get("forward")
                    if isinstance(forward, _Forward):
                        forward.weights.pop(thread, None)
                        if not forward.weights:
                            del vars(layer)["forward"]


class _PackedCopy:
    """A weight in oneDNN's order, `[out, in]`, and what tells later whether it is still that weight."""

    def __init__(self, weight: Tensor) -> None:
        weight = weight.detach()
        self._version, self._sample = version_of(weight), _sample(weight).clone()
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ARRANGED_FOR)

    def is_outdated(self, weight: Tensor) -> bool:
        """Whether the weight of the layer is another now, as far as that can be told."""
        return self._version != version_of(weight) or not torch.equal(self._sample, _sample(weight.detach()))


class _Forward:
    """Stands for a layer's `forward` while any thread is in a pass with packed weights.

    Args:
        layer: Computes as ever for all other threads, and for inputs of another dtype.

    Attributes:
        weights: The packed weight that each thread computes with.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self.weights: dict[int, Tensor] = {}

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - as `nn.Linear` calls it
        weight = self.weights.get(get_ident())
        if weight is None or input.dtype != torch.float32:
            return nn.Linear.forward(self._layer, input)
        return torch.ops.mkldnn._linear_pointwise(input, weight, self._layer.bias, "none", [], "")

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the layer's own method in a copy of the model that another thread makes, or pickles."""
        return getattr, (self._layer, "forward")  # of the copied layer, which has none of its own yet


def can_pack(device: torch.device) -> bool:
    """Whether a device has products with packed weights that are known to be faster: x86-64 processors have."""
    known = device.type == "cpu" and platform.machine().lower() in ("x86_64", "amd64")
    return known and bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


def _layers_to_pack(model: PreTrainedModel) -> list[nn.Linear]:
    encoders = [model.get_encoder()] if model.config.is_encoder_decoder else []
    if compat.takes_images(model):
        encoders.append(model.get_encoder("image"))
    encoding = {module for encoder in encoders if encoder is not model for module in modules_of(encoder)}
    return [module for module in modules_of(model) if _can_be_packed(module) and module not in encoding]


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a plain linear layer of dense float32 weights on the CPU, and large enough."""
    if type(module) is not nn.Linear or not isinstance(vars(module).get("forward"), _Forward | None):
        return False
    own = module._parameters  # what a hook computes before every pass, as `weight_norm` does, is none
    size = module.out_features, module.in_features
    return (
        _is_dense(own.get("weight"), size)
        and (module.bias is None or _is_dense(own.get("bias"), size[:1]))
        and module.weight.numel() >= SMALLEST_WEIGHT
    )


def _is_dense(tensor: Tensor | None, shape: tuple[int, ...]) -> bool:
    return (
        tensor is not None
        and type(tensor) in (nn.Parameter, Tensor)
        and tensor.shape == shape
        and (tensor.dtype, tensor.device.type, tensor.layout) == (torch.float32, "cpu", torch.strided)
        and tensor.is_contiguous()
    )


def _sample(weight: Tensor) -> Tensor:
    return weight.view(-1)[:: max(weight.numel() // SAMPLED, 1)]
