"""What keeps a model's passes from being fused or recorded, found out once for each state of the model.

Every call asks, and looking at what each module is takes longer than a round of a small batch.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_dsde import compat
from hf_dsde.execution.fused_families import why_not_fused
from hf_dsde.execution.recording_key import RecordingKey, digest
from hf_dsde.execution.training_mode import acts_in_training
from hf_dsde.utils.modules import has_attribute, modules_of, named_modules, parameter_devices

KEPT_STATES = 4
"""States of a model that are remembered: adapters are switched back and forth."""

_lock = threading.RLock()  # collecting garbage may reach a weak dictionary in the middle of another use of it
_known: WeakKeyDictionary[PreTrainedModel, list[tuple[Any, Obstacles]]] = WeakKeyDictionary()
"""States of models, the latest last, with what was found."""


class Obstacles(NamedTuple):
    """Reasons in words, fit to follow a colon; None where nothing known is in the way.

    Attributes:
        fusing: Why `FusedDecoder` cannot stand for the model's own `forward`.
        recording: Why the model's passes cannot be recorded.
    """

    fusing: str | None
    recording: str | None


def obstacles(model: PreTrainedModel, key: RecordingKey | None) -> Obstacles:
    """Return what is in the way of faster passes of a model.

    Args:
        model: As it is now.
        key: Its `recording_key`. None, for a model of which nothing could tell, looks at all modules every time.
    """
    if key is None:
        return Obstacles(why_not_fused(model), why_not_recorded(model))
    state = key, _hooks(model)
    with _lock:
        for known, found in reversed(_known.get(model, [])):
            if known == state:
                return found
    found = Obstacles(why_not_fused(model), why_not_recorded(model))
    with _lock:
        states = _known.setdefault(model, [])
        states.append((state, found))
        del states[:-KEPT_STATES]
    return found


def why_not_recorded(model: PreTrainedModel) -> str | None:
    """Say what keeps this model's passes from being recorded, None if nothing known does."""
    devices, modules = parameter_devices(model), named_modules(model)
    if len(devices) > 1:
        return f"its layers are on several devices ({', '.join(sorted(map(str, devices)))})"
    acting = acts_in_training(model)
    if acting is not None:
        return f"it is in training mode, in which {acting} changes what it computes; call model.eval()"
    hooked = [name for name, module in modules if _has_hooks(module)]
    if hooked:
        return f"hooks run in its forward pass, the first in {hooked[0] or 'the model itself'!r}"
    waiting = [name for name, module in modules if _looks_for_outliers(module)]
    if waiting:
        return (
            f"{waiting[0]!r} looks for outliers in every pass, which waits for the device; load the model with "
            "BitsAndBytesConfig(llm_int8_threshold=0.0) to do without"
        )
    return None


def _hooks(model: PreTrainedModel) -> tuple[Any, ...]:
    """The hooks of forward passes and where they are; a recording's key goes without those that change nothing."""
    return tuple(
        (place, digest(hook, {}))
        for place, module in enumerate(modules_of(model))
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


def _looks_for_outliers(module: torch.nn.Module) -> bool:
    """Whether a module is bitsandbytes' of 8 bits, which computes columns with large numbers apart."""
    if not type(module).__module__.startswith("bitsandbytes."):
        return False
    threshold: float = getattr(getattr(module, "state", None), "threshold", 0.0)
    return threshold > 0


def _has_hooks(module: torch.nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return has_attribute(module, "_hf_hook") or not all(map(compat.leaves_arithmetic_alone, hooks))
