"""What tells two recordings of a model's passes apart: all that a pass reads without being given it.

A recorded pass reads weights where they lay, and does what modules and settings said at the time. So what can change
that between two calls is looked at in each: addresses and dtypes of weights, types and attributes of modules, functions
that were replaced on modules, on classes or in modeling files, the configuration, and torch's settings.

What adapters add to a model is kept apart from the rest: they are switched between calls and back again, and what was
recorded with each of them stays right as long as the model around them is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel

from hf_dsde import compat
from hf_dsde.execution.torch_modes import Autocast
from hf_dsde.utils.modules import modules_of

QUANTISERS = frozenset({"bitsandbytes", "compressed_tensors", "gptqmodel", "hqq", "optimum", "torchao"})
"""Packages of modules with quantised weights; `optimum` is that of quanto."""
ADAPTERS = "peft"
"""The package whose modules sit around those of a model."""
KNOWN_PACKAGES = QUANTISERS | {"torch", "transformers", ADAPTERS, "hf_dsde"}
"""Their modules compute what weights, attributes and configuration say. Others may ask whatever they like."""
KNOWN_WRAPPERS = KNOWN_PACKAGES | {"accelerate", "trl"}
"""Their functions may take the place of a module's `forward`, and call only what they were made with."""

BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"} | {compat.CAPTURE_MARK, compat.POSITION_MEMORY}
"""Attributes that every module has, and which are looked at otherwise or say nothing about its arithmetic."""
_NUMBERS_AND_NAMES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)

_ADAPTED = frozenset({"base_layer", "original_module"})
"""Children of an adapter's module that are the model's own."""

Key = tuple[Any, ...]
Place = Callable[[Tensor], Any]


class RecordingKey(NamedTuple):
    """What has to be equal for recordings of a model's passes to be right.

    Attributes:
        model: Of the model as it is without adapters, and of torch's settings.
        adapters: Of what adapters added: which there are, which of them are active, and how.
    """

    model: Key
    adapters: Key


def recording_key(model: PreTrainedModel) -> RecordingKey | None:
    """Return what has to be equal for recordings of a model's passes to be right; None when nothing could tell.

    None is for modules and `forward`s from elsewhere, which may depend on anything. Functions count by identity and are
    not kept alive, nor is the model.
    """
    everything = _modules(model)
    own = _key([module for module, added in everything if not added])
    adapters = _key([module for module, added in everything if added])
    if own is None or adapters is None:
        return None
    return RecordingKey((*own, _settings(model)), adapters)


def _key(modules: Sequence[nn.Module]) -> Key | None:
    """What modules say of themselves; None if one of them may depend on anything."""
    weights: list[Key] = []
    attributes: list[Any] = []
    classes: dict[type, None] = {}
    configurations: dict[int, Any] = {}
    for module in modules:
        own, kind = vars(module), type(module)
        classes[kind] = None
        if "forward" in own and not _only_wraps(own["forward"]):
            return None
        for group in (own["_parameters"], own["_buffers"]):
            for tensor in group.values():
                if tensor is not None:
                    weight = _weight(tensor, configurations)
                    if weight is None:
                        return None
                    weights.append(weight)
        attributes.append(kind)
        for name, value in own.items():
            if name not in BOOKKEEPING:
                attributes += name, value if type(value) in _NUMBERS_AND_NAMES else digest(value, configurations)
    if not {_package(kind.__module__) for kind in classes} <= KNOWN_PACKAGES:
        return None
    return tuple(weights), tuple(attributes), tuple(map(_class_key, classes)), _files_key(classes)


def is_compiled(model: nn.Module) -> bool:
    """Whether the user has had torch.compile compile the model or a part of it."""
    if "torch._dynamo" not in sys.modules:  # then nobody has, and importing it takes seconds
        return False
    return any(
        module._compiled_call_impl is not None
        or isinstance(module, torch._dynamo.OptimizedModule)
        or ("forward" in vars(module) and hasattr(module.forward, "_torchdynamo_orig_callable"))
        for module in modules_of(model)
    )


def _modules(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """A model's modules, each once, and whether adapters added it.

    Walking them with the model's own iterators takes several times as long.
    """
    found: dict[int, tuple[nn.Module, bool]] = {}
    waiting = [(model, False)]
    while waiting:
        module, added = waiting.pop()
        if id(module) in found:
            continue
        adapter = _package(type(module).__module__) == ADAPTERS
        found[id(module)] = module, added or adapter
        for name, child in module._modules.items():
            if child is not None:
                waiting.append((child, name not in _ADAPTED if adapter else added))
    return list(found.values())


def _package(module_name: str) -> str:
    return module_name.partition(".")[0]


def _weight(tensor: Tensor, seen: dict[int, Any], place: Place = Tensor.data_ptr) -> Key | None:
    """Where a weight lies and how it is read; None if it is of a kind that is more than its numbers."""
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        parts = [_weight(getattr(tensor, name), seen, place) for name in names]
        return None if None in parts else (type(tensor), digest(context, {}, place), *parts)
    found = place(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    if type(tensor) in (Tensor, nn.Parameter):
        return found
    if _package(type(tensor).__module__) in QUANTISERS:  # scales are in attributes of it
        return type(tensor), *found, digest(vars(tensor), seen, place)
    return None


def digest(value: Any, seen: dict[int, Any], place: Place = Tensor.data_ptr) -> Any:
    """What is compared in place of a value: numbers and names, and what holds them, by value; the rest by identity.

    Args:
        value: An attribute of a module, say.
        seen: By `id`, what is compared in place of objects that several values refer to; gets further ones.
        place: Gives what counts of where a tensor lies.
    """
    kind = type(value)
    if kind in _NUMBERS_AND_NAMES or id(value) in seen:
        return seen.get(id(value), value)
    if isinstance(value, dict):
        return kind, tuple((digest(k, seen, place), digest(v, seen, place)) for k, v in value.items())
    if isinstance(value, Tensor):
        return _weight(value, seen, place) or _identity(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        entries = (digest(entry, seen, place) for entry in value)
        return kind, tuple(entries) if isinstance(value, (list, tuple)) else frozenset(entries)
    if isinstance(value, PretrainedConfig) or _holds_scales(value):  # all modules share one configuration
        seen[id(value)] = None  # may be part of itself
        seen[id(value)] = kind, digest(vars(value), seen, place)
        return seen[id(value)]
    return _identity(value)


def _holds_scales(value: Any) -> bool:
    """Whether a value is an object that a quantiser keeps numbers in."""
    kind = type(value)
    known = _package(kind.__module__) in QUANTISERS and hasattr(value, "__dict__")
    return known and not isinstance(value, (nn.Module, type, Enum)) and not callable(value)


def _identity(value: Any) -> Any:
    """Compares equal for the very same object, as long as it lives, and does not keep it alive."""
    if isinstance(value, MethodType):
        return _identity(value.__func__), _identity(value.__self__)
    if isinstance(value, RemovableHandle):  # of a hook, which is looked at itself
        return RemovableHandle
    try:
        return _Same(value)
    except TypeError:
        return type(value), id(value)


class _Same:
    """A weak reference that compares by identity."""

    __slots__ = ("_ref",)

    def __init__(self, value: Any) -> None:
        self._ref = ref(value)

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return isinstance(other, _Same) and mine is not None and mine is other._ref()

    def __hash__(self) -> int:
        return hash(_Same)


def _only_wraps(function: Any) -> bool:
    """Whether a function that was put in a `forward`'s place is a known package's, and so is all that it calls."""
    waiting, seen = [function], set[int]()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, MethodType):
            waiting.append(found.__func__)
        elif isinstance(found, FunctionType):
            if _package(found.__globals__["__name__"]) not in KNOWN_WRAPPERS:
                return False
            waiting += [value for value in _captured(found) if _is_called(value)]
        elif not isinstance(found, (BuiltinFunctionType, nn.Module)):
            if _package(type(found).__module__) not in KNOWN_WRAPPERS:
                return False
            waiting += [value for name, value in vars(found).items() if name != "__wrapped__" and _is_called(value)]
    return True


def _captured(function: FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]  # an empty one has none


def _is_called(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _class_key(kind: type) -> Key:
    """The functions of a class and those that it inherits, up to torch's base of all modules."""
    functions = []
    for base in kind.__mro__:
        if base is nn.Module:
            break
        functions += [(name, _Same(value)) for name, value in vars(base).items() if isinstance(value, FunctionType)]
    return kind, tuple(functions)


def _files_key(classes: Mapping[type, Any]) -> Key:
    """The functions of the modeling files, which other packages replace too."""
    names = sorted({kind.__module__ for kind in classes if _package(kind.__module__) == "transformers"})
    files: list[Any] = []
    for name in names:
        for function, value in vars(sys.modules[name]).items():
            if isinstance(value, (FunctionType, type)):
                files.append((function, _Same(value)))
    return tuple(files)


def _settings(model: PreTrainedModel) -> Key:
    """What torch is told about arithmetic, and whether it casts."""
    attention: tuple[Callable[[], bool], ...] = (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.cudnn_sdp_enabled,
    )
    products = torch.backends.cuda.matmul
    # Where torch has the newer setting, asking for the older one may raise.
    precision = getattr(products, "fp32_precision", None) or torch.get_float32_matmul_precision()
    return (
        Autocast.on(model.device),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        precision,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        tuple(setting() for setting in attention),
    )
