"""Concatenated copies of the weights of queries, keys and values, so that one product makes all three (fused QKV).

Three products of one input, even side by side, take longer than one with all their rows: rounds of 32 rows of an 8B
model with a head get 3 % shorter by one, those of 8, 16 and 64 rows 1 % (H200, calls of both states in turn). The
copies take as much memory as these weights, a tenth of such a model. The weights themselves stay where they are: others
may know their addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_dsde.execution.memory import free_bytes
from hf_dsde.execution.torch_modes import lasting, version_of

MEMORY_MARGIN = 10
"""Times the size of all copies that has to be free: a job's caches may take four fifths of it, recordings need some."""


class JoinedLinear:
    """Linear maps of one input as one.

    Args:
        modules: Plain ones, `[N_i, H]` each, all with a bias or none. Nothing is copied yet.
    """

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        weight, bias = modules[0].weight, modules[0].bias
        self._modules = modules
        self._sizes = [len(module.weight) for module in modules]
        self._weight = weight.new_empty(sum(self._sizes), weight.shape[1])
        self._bias = None if bias is None else bias.new_empty(sum(self._sizes))
        self._copied: list[tuple[int, int | None]] | None = None  # addresses and versions

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Return what each map makes of `[T, H]`: views, `[T, N_i]`."""
        return list(functional.linear(x, self._weight, self._bias).split(self._sizes, dim=-1))

    def stands_for(self, modules: Sequence[nn.Linear]) -> bool:
        """Whether it has the weights of these modules."""
        pairs = zip(self._modules, modules, strict=True)
        return all(own.weight is other.weight and own.bias is other.bias for own, other in pairs)

    def follow(self) -> None:
        """Copy weights that have changed, as far as their versions tell."""
        weights, biases = ([getattr(module, name) for module in self._modules] for name in ("weight", "bias"))
        found = [(part.data_ptr(), version_of(part)) for part in (*weights, *biases) if part is not None]
        if found != self._copied:
            torch.cat([weight.detach() for weight in weights], out=self._weight)
            if self._bias is not None:
                torch.cat([bias.detach() for bias in biases], out=self._bias)
            self._copied = found

    def forget(self) -> None:
        """Take the copies for outdated."""
        self._copied = None


class JoinedWeights:
    """The copies of one model, which stay where they are as long as anything is recorded that reads them.

    Attributes:
        settled: Whether they have been made, or there was no memory for them.
    """

    def __init__(self) -> None:
        self._layers: dict[int, JoinedLinear] = {}
        self.settled = False

    def of(self, layer: int) -> JoinedLinear | None:
        """Return a layer's joined maps; None where they are not joined."""
        return self._layers.get(layer)

    def make(self, layers: Mapping[int, Sequence[nn.Linear]]) -> None:
        """Copy the weights of layers, if there is memory to spare.

        Args:
            layers: What to join, at least one, by number of the layer.
        """
        self.settled = True
        modules = [module for each in layers.values() for module in each]
        free = free_bytes(modules[0].weight.device)
        if free is None or MEMORY_MARGIN * sum(module.weight.nbytes for module in modules) <= free:
            with lasting():
                self._layers = {layer: JoinedLinear(each) for layer, each in layers.items()}
            self.follow()

    def follow(self) -> None:
        """Copy weights again that have changed in the midst of a call, as far as their versions tell."""
        with lasting():
            for joined in self._layers.values():
                joined.follow()

    def start_anew(self) -> None:
        """Copy all weights again: between two calls, nothing tells for certain whether they have changed."""
        for joined in self._layers.values():
            joined.forget()
        self.follow()
