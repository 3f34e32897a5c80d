"""What linear modules that share an input make of it in a fused pass.

Modules are called as they are, unless the ops take over what they compute: the products of plain ones, those with
weights of four bits, and what LoRA adapters of PEFT add to a module, which as modules of their own would be four small
kernels each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_dsde.execution.four_bit_modules import four_bits_of
from hf_dsde.execution.joined_weights import JoinedLinear
from hf_dsde.kernels.reference import LowRank

if TYPE_CHECKING:
    from hf_dsde.execution.fused_decoder import FusedOps

_KEEP_NOTHING = frozenset({"torch", "transformers", "peft"})
"""Packages whose modules share no memory with each other while they run."""
_LORA_FILES = {"peft.tuners.lora.layer": "Linear", "peft.tuners.lora.bnb": "Linear4bit"}
"""File of PEFT's modules -> the class there that adds LoRA to a linear module, the latter to one of four bits."""
_Adapters = tuple[LowRank, ...] | None


def products(ops: FusedOps, modules: Sequence[Any], x: Tensor, joined: JoinedLinear | None = None) -> list[Tensor]:
    """Return what each of one to three linear modules makes of `x`.

    Args:
        ops: May take over what modules compute.
        modules: Linear modules, or whatever is in their place.
        x: `[T, H]`.
        joined: The modules without adapters as one, for where they are plain ones.

    Returns:
        `[T, N_i]` for each; elements of a row are contiguous.
    """
    adapters = [adapters_of(module, x.dtype) for module in modules]
    bases = _bases(modules, adapters)

    @cache
    def results() -> list[Tensor]:
        plain = all(_is_plain(base, x.dtype) for base in bases)
        if plain and _paid(ops, bases, len(x)):
            return _linears(ops, bases, x)
        return joined(x) if plain and joined is not None and joined.stands_for(bases) else _called(ops, bases, x)

    return _adapted(ops, results, adapters, x)


def to_join(ops: FusedOps, modules: Sequence[Any], tokens: int, dtype: torch.dtype) -> Sequence[nn.Linear] | None:
    """Return the modules, without their adapters, if they can be one product, and one of so many tokens is of use."""
    bases = _bases(modules, [adapters_of(module, dtype) for module in modules])
    if not all(_is_plain(base, dtype) for base in bases) or len({base.bias is None for base in bases}) > 1:
        return None
    return None if _paid(ops, bases, tokens) else bases


def gated_product(ops: FusedOps, gate: Any, up: Any, x: Tensor) -> Tensor:
    """Return silu of what `gate` makes of `x`, times what `up` makes of it: `[T, H]` to `[T, I]`."""
    adapters = [adapters_of(module, x.dtype) for module in (gate, up)]
    bases = gate, up = _bases((gate, up), adapters)
    taken = _taken_over(ops, bases, x)
    if not any(adapters):
        if taken and gate.bias is None and up.bias is None:
            return ops.gated_linear(x, gate.weight, up.weight)
        return ops.silu_mul(*_one_by_one(ops, bases, x))

    @cache
    def results() -> list[Tensor]:
        return _linears(ops, bases, x) if taken else _one_by_one(ops, bases, x)

    complete = [each for each in adapters if each]
    if len(complete) == len(adapters):
        return ops.gated_low_rank(x, _WhenAsked(results, (0, 1)), complete)
    return ops.silu_mul(*_adapted(ops, results, adapters, x))


def _taken_over(ops: FusedOps, modules: Sequence[Any], x: Tensor) -> bool:
    """Whether the ops compute what these modules would. Looked up again each time: hooks come and go."""
    return all(_is_plain(module, x.dtype) for module in modules) and _paid(ops, modules, len(x))


def _paid(ops: FusedOps, modules: Sequence[nn.Linear], tokens: int) -> bool:
    """Whether the ops compute what these plain modules make of so many tokens in less time than the modules."""
    weight, rows = modules[0].weight, sum(len(module.weight) for module in modules)
    return ops.pays(tokens, len(modules), rows, weight.shape[1], weight.dtype, weight.device)


def _called(ops: FusedOps, modules: Sequence[Any], x: Tensor) -> list[Tensor]:
    """What modules make of `x`, side by side where they may be."""
    calls = [_call(ops, module, x) for module in modules]
    beside = all(not isinstance(call, nn.Module) or _may_run_beside(call) for call in calls)
    return ops.side_by_side(calls, x) if beside else [call(x) for call in calls]


def _one_by_one(ops: FusedOps, modules: Sequence[Any], x: Tensor) -> list[Tensor]:
    """What modules make of `x`, each of which occupies the device by itself."""
    return [_call(ops, module, x)(x) for module in modules]


def _call(ops: FusedOps, module: Any, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The module, or what computes the same in its place if its weight has four bits."""
    weight = four_bits_of(module, x.dtype) if _as_made(module) else None
    if weight is None or not ops.reads_four_bits(len(x), weight, x.dtype):
        call: Callable[[Tensor], Tensor] = module
        return call
    return partial(ops.four_bit_linear, weight=weight, bias=module.bias)


def adapters_of(module: nn.Module, dtype: torch.dtype) -> _Adapters:
    """Return what a module of PEFT adds to its base layer, if that is plain LoRA. Looked up again each time.

    Args:
        module: Any module.
        dtype: Of its input.

    Returns:
        Active adapters in their order; none where they are disabled or merged. None if the module has to be called:
        another class, a variant such as DoRA, dropout while training, a bias, a hook, or other dtypes.
    """
    lora: Any = module
    kind: Any = type(module)
    file = kind.__module__
    known = file in _LORA_FILES and kind is getattr(sys.modules[file], _LORA_FILES[file], None)
    if not known or kind.forward.__module__ != file or not _as_made(module):
        return None
    if lora.disable_adapters or lora.merged:
        return None if lora.disable_adapters and lora.merged else ()  # its own forward would take weights apart again
    terms = []
    for name in lora.active_adapters:
        if name in lora.lora_A:
            term = _term(lora, name, dtype)
            if term is None:
                return None
            terms.append(term)
    return tuple(terms)


def _term(lora: Any, name: str, dtype: torch.dtype) -> LowRank | None:
    """What one adapter adds; None if it is more than two products and a factor."""
    down, up, dropout, scaling = lora.lora_A[name], lora.lora_B[name], lora.lora_dropout[name], lora.scaling[name]
    variant = name in getattr(lora, "lora_variant", ()) or getattr(lora, "use_dora", {}).get(name)
    if variant or type(down) is not nn.Linear or type(scaling) not in (int, float) or not _hands_on(dropout):
        return None
    own = down.weight.dtype
    # Unless told not to, PEFT keeps adapters of half-precision models in float32, and casts states to that.
    cast = own == torch.float32 and dtype.itemsize < own.itemsize and getattr(lora, "cast_input_dtype_enabled", True)
    plain = all(_is_plain(part, own) and part.bias is None for part in (down, up))
    return LowRank(down.weight, up.weight, float(scaling)) if plain and (cast or own == dtype) else None


def _hands_on(dropout: nn.Module) -> bool:
    """Whether a module in a dropout's place hands on what it gets."""
    drops = type(dropout) is nn.Dropout and dropout.training and dropout.p > 0
    return type(dropout) in (nn.Identity, nn.Dropout) and not drops and _as_made(dropout)


def _bases(modules: Sequence[Any], adapters: Sequence[_Adapters]) -> list[Any]:
    """The modules without the adapters that are known."""
    return [module if terms is None else module.base_layer for module, terms in zip(modules, adapters, strict=True)]


def _linears(ops: FusedOps, modules: Sequence[Any], x: Tensor) -> list[Tensor]:
    return ops.linears(x, [module.weight for module in modules], [module.bias for module in modules])


class _WhenAsked(Sequence[Tensor]):
    """Some of the results of modules, none of which is called before the first of them is asked for.

    So what the ops launch before they ask does not have to wait for it.
    """

    def __init__(self, results: Callable[[], list[Tensor]], places: Sequence[int]) -> None:
        self._results, self._places = results, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        return self._results()[self._places[index]]


def _adapted(
    ops: FusedOps, results: Callable[[], list[Tensor]], adapters: Sequence[_Adapters], x: Tensor
) -> list[Tensor]:
    """The results with what adapters add to some of them."""
    added = {place: terms for place, terms in enumerate(adapters) if terms}
    if not added:
        return results()
    sums = ops.add_low_rank(x, _WhenAsked(results, list(added)), list(added.values()))
    complete = list(results())
    for place, result in zip(added, sums, strict=True):
        complete[place] = result
    return complete


def _may_run_beside(module: nn.Module) -> bool:
    """Whether a module can run while others do: quantisers' kernels may share a place for what is in between."""
    return all(type(part).__module__.partition(".")[0] in _KEEP_NOTHING for part in module.modules())


def _is_plain(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module is a linear one and nothing else: no subclass, hook, or weight that is more than numbers."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter  # quantisers and parallelism put subclasses there
        and module.weight.dtype == dtype
        and (module.bias is None or module.bias.dtype == dtype)
        and module.weight.is_contiguous()
        and _as_made(module)
    )


def _as_made(module: nn.Module) -> bool:
    """Whether calling a module runs what its class says and nothing else."""
    replaced = "forward" in module.__dict__ or hasattr(module, "_hf_hook")
    return not (module._forward_hooks or module._forward_pre_hooks or replaced)
