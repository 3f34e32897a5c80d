"""Which runner a model gets, and what is done when passes of a model cannot be recorded."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable
from functools import partial
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_dsde.execution.cross_runner import CrossRunner, RecordedCrossRunner
from hf_dsde.execution.cuda_graphs import Capture, CudaCapture
from hf_dsde.execution.eager_runner import EagerRunner
from hf_dsde.execution.encoder_states import EncoderStates
from hf_dsde.execution.fused_head import fused_decoder
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.obstacles import obstacles
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.recording_key import recording_key
from hf_dsde.execution.workspaces import workspace_key, workspaces
from hf_dsde.execution.wrappers import innermost
from hf_dsde.kernels.dispatch import ops_for

KEPT_FAILURES = 4
"""States of a model in which recording failed that are remembered."""

_lock = threading.RLock()  # collecting garbage may reach a weak dictionary in the middle of another use of it
_unrecordable: WeakKeyDictionary[PreTrainedModel, dict[Hashable, str]] = WeakKeyDictionary()
"""Why recording failed, for each state of a model in which it did."""
_warned: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()
"""Reasons that were given for a model."""


class RunnerWarning(UserWarning):
    """A model's passes are run eagerly although recording them was wanted, and that is slower."""


def create_runner(
    model: PreTrainedModel,
    rows: int,
    capacity: int,
    options: RuntimeOptions,
    runner: str | None = None,
    recorded_widths: tuple[int, ...] | None = None,
    hidden_layers: tuple[int, ...] = (),
    encoded: EncoderStates | None = None,
) -> ModelRunner:
    """Return a runner for `model`: the one that is named, or else the fastest that works.

    Args:
        model: A decoder-only model in evaluation, or one that reads an encoder's states.
        rows: Number of sequences.
        capacity: Tokens per row the cache holds to begin with.
        options: How passes are run.
        runner: `eager` or `graph`. None takes `graph` on a CUDA device and `eager` elsewhere.
        recorded_widths: Block widths that are recorded, ascending; None for the runner's own, which are fine.
        hidden_layers: Layers whose hidden states passes return, numbered as `PassOutput` says.
        encoded: The states that the model reads; None for models that read none.

    Raises:
        ValueError: If recording was asked for by name and the model is not on a CUDA device, or if the model lacks one
            of the layers, or reads an encoder's states, and then none of its own are handed out.
    """
    eager: Callable[[], ModelRunner] = partial(EagerRunner, model, rows, capacity, options, hidden_layers=hidden_layers)
    if encoded is not None:
        if hidden_layers:
            msg = (
                f"hidden_layers: {hidden_layers} were asked for, but {type(model).__name__} reads an encoder's states."
            )
            raise ValueError(msg)
        eager = partial(CrossRunner, model, rows, capacity, options, encoded)
    wanted = runner or ("graph" if can_record(model.device) else "eager")
    if wanted == "eager":
        return eager()
    if not can_record(model.device):
        msg = (
            f"runner: {wanted!r} replays CUDA graphs, but {type(model).__name__} is on {model.device}. Move it to a "
            "CUDA device, or use SpeculationConfig(runner=None), which chooses what the device can do."
        )
        raise ValueError(msg)
    own_key = recording_key(model)
    in_the_way = obstacles(model, own_key)
    fused = options.fused_layers and in_the_way.fusing is None
    reason = in_the_way.recording
    if reason is None:
        key = workspace_key(own_key, rows, options, fused)
        state = None if key is None else key[1:]
        if fused and _failure(model, state) is not None:  # then its own forward pass may be recorded
            fused = False
            key = workspace_key(own_key, rows, options, fused)
            state = None if key is None else key[1:]
        reason = _failure(model, state)
        if model.training and key is None:
            reason = "it is in training mode, and what modules of other packages do there is not known; call eval()"
    if reason is not None and model.training:
        workspaces.make_room_for_training(model)
    if reason is not None:
        _warn(model, reason)
        return eager()

    def on_failure(failure: Exception) -> None:
        reason = f"recording failed with {type(failure).__name__}: {failure}"
        _remember_failure(model, state, reason)
        _warn(model, reason)

    kind = GraphRunner if encoded is None else partial(RecordedCrossRunner, encoded=encoded)
    return kind(
        model,
        rows,
        capacity,
        options,
        fused=fused_decoder(model, ops_for(model.device), checked=True, hidden_layers=hidden_layers) if fused else None,
        key=key,
        make_capture=partial(capture_on, model.device),
        on_failure=on_failure,
        widths=recorded_widths,
        hidden_layers=hidden_layers,
    )


def release_memory(model: torch.nn.Module) -> None:
    """Free the cache and the recorded passes that calls with `model`, as target or draft, keep for the next one.

    Where recording has failed, the next call tries again.

    Args:
        model: A model of transformers, or a wrapper around one, such as PEFT's or what torch.compile returns.

    Raises:
        TypeError: If there is no model of transformers in it.
    """
    model = innermost("model", model)
    workspaces.release(model)
    with _lock:
        _unrecordable.pop(model, None)


def can_record(device: torch.device) -> bool:
    """Whether passes on this device can be recorded."""
    return device.type == "cuda"


def capture_on(device: torch.device) -> Capture:
    """Return what records passes on a device."""
    return CudaCapture(device)


def _failure(model: PreTrainedModel, state: Hashable) -> str | None:
    """Why recording failed when the model was in that state before."""
    with _lock:
        failures = _unrecordable.get(model)
        return failures.get(state) if failures else None  # making a hash of a state takes a while


def _remember_failure(model: PreTrainedModel, state: Hashable, reason: str) -> None:
    """Keep a reason for as long as the model stays as it is; None is a state that cannot be told from another."""
    if state is None:
        return
    with _lock:
        failures = _unrecordable.setdefault(model, {})
        failures[state] = reason
        while len(failures) > KEPT_FAILURES:
            del failures[next(iter(failures))]


def _warn(model: PreTrainedModel, reason: str) -> None:
    """Warn once of each reason that a model has."""
    with _lock:
        given = _warned.setdefault(model, set())
        if reason in given:
            return
        given.add(reason)
    warnings.warn(
        f"{type(model).__name__} is run eagerly, which is slower: {reason}. "
        "SpeculationConfig(runner='eager') says that this is known.",
        RunnerWarning,
        stacklevel=3,
    )
