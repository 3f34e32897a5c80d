"""Which runner a model gets, and what is done when passes of a model cannot be recorded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from hf_dsde import compat
from hf_dsde.config import SpeculationConfig
from hf_dsde.fused.decoder import FusedDecoder, why_not_fused
from hf_dsde.fused.dispatch import ops_for
from hf_dsde.graph_runner import GraphRunner
from hf_dsde.graphs import Capture, CudaCapture
from hf_dsde.runner import EagerRunner, ModelRunner
from hf_dsde.workspaces import workspaces

COMPILED_SHAPES = 64
"""Shapes of a model's pass that torch.compile may keep; its own limit is lower than the number of shapes in a text."""

_unrecordable: WeakSet[PreTrainedModel] = WeakSet()
"""Models that could not be recorded; each has been warned about."""


class RunnerWarning(UserWarning):
    """A model's passes are run eagerly although recording them was wanted, and that is slower."""


def create_runner(
    model: PreTrainedModel,
    rows: int,
    capacity: int,
    config: SpeculationConfig,
    recorded_widths: tuple[int, ...] | None = None,
) -> ModelRunner:
    """Return a runner for `model`: the one that `config.runner` names, or else the fastest that works.

    Args:
        model: A decoder-only model in evaluation.
        rows: Number of sequences.
        capacity: Tokens per row the cache shall hold to begin with.
        config: Names the runner. None takes `graph` on a CUDA device and `eager` elsewhere.
        recorded_widths: Block widths that are recorded, ascending, where `config` names none; None for the runner's
            own, which are fine.

    Raises:
        ValueError: If recording was asked for by name and the model is not on a CUDA device.
    """
    wanted = config.runner or ("graph" if can_record(model.device) else "eager")
    if wanted == "eager":
        return EagerRunner(model, rows, capacity, config)
    if not can_record(model.device):
        msg = (
            f"runner: {wanted!r} replays CUDA graphs, but {type(model).__name__} is on {model.device}. Move it to a "
            "CUDA device, or use SpeculationConfig(runner=None), which chooses what the device can do."
        )
        raise ValueError(msg)
    if model in _unrecordable:
        return EagerRunner(model, rows, capacity, config)
    reason = why_not_recorded(model)
    if reason is not None:
        _fall_back(model, reason)
        return EagerRunner(model, rows, capacity, config)
    fused = wanted == "graph" and config.fused_layers and why_not_fused(model) is None
    return GraphRunner(
        model,
        rows,
        capacity,
        config,
        fused=FusedDecoder(model, ops_for(model.device), checked=True) if fused else None,
        make_capture=partial(capture_on, model.device),
        on_failure=lambda failure: _fall_back(model, f"recording failed with {type(failure).__name__}: {failure}"),
        forward=compiled_forward(model) if wanted == "compile" else None,
        widths=config.width_buckets or recorded_widths,
    )


def release_memory(model: PreTrainedModel) -> None:
    """Free the cache and the recorded passes that calls with `model`, as target or draft, keep for the next one."""
    workspaces.release(model)


def can_record(device: torch.device) -> bool:
    """Whether passes on this device can be recorded."""
    return device.type == "cuda"


def capture_on(device: torch.device) -> Capture:
    """Return what records passes on a device."""
    return CudaCapture(device)


def why_not_recorded(model: PreTrainedModel) -> str | None:
    """Say what keeps this model's passes from being recorded, None if nothing known does."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"its layers are on several devices ({', '.join(sorted(map(str, devices)))})"
    if model.training:
        return "it is in training mode; call model.eval()"
    hooked = [name for name, module in model.named_modules() if _has_hooks(module)]
    if hooked:
        return f"hooks run in its forward pass, the first in {hooked[0] or 'the model itself'!r}"
    return None


def compiled_forward(model: PreTrainedModel, backend: str = "inductor") -> Callable[..., Any]:
    """Return the model's forward pass through torch.compile, which fuses kernels at the first call of each shape.

    Args:
        model: In evaluation.
        backend: As torch.compile takes it.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_SHAPES)
    compiled: Callable[..., Any] = torch.compile(model.forward, dynamic=False, backend=backend)
    return compiled


def _has_hooks(module: torch.nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return hasattr(module, "_hf_hook") or not all(map(compat.only_records_outputs, hooks))


def _fall_back(model: PreTrainedModel, reason: str) -> None:
    """Warn once per model."""
    if model in _unrecordable:
        return
    _unrecordable.add(model)
    warnings.warn(
        f"{type(model).__name__} is run eagerly, which is slower: {reason}. "
        "SpeculationConfig(runner='eager') says that this is known.",
        RunnerWarning,
        stacklevel=2,
    )
