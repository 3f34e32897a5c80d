"""What outlives a call of a model: its cache and the passes recorded over it, and what tells one call's from another's.

A recorded pass knows addresses and nothing else. So it is kept under a key that holds all that it depends on.

Adapters are switched between calls and back again. That moves neither the model's own weights nor the cache, so a
workspace keeps what was recorded with each set of active adapters, all over one cache and in one pool of memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.execution.block_buffers import BlockBuffers
from hf_dsde.execution.cuda_graphs import Capture, CapturedPasses, RecordingCosts, Replay
from hf_dsde.execution.joined_weights import JoinedWeights
from hf_dsde.execution.kv_cache import RaggedCache
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.recorded_chain import ChainStep
from hf_dsde.execution.recording_key import Key, RecordingKey
from hf_dsde.execution.token_choice import TokenChoice
from hf_dsde.execution.torch_modes import lasting
from hf_dsde.kernels.block import Block

MOST_CHOICES = 4
"""Ways to choose a draft's tokens, such as temperatures, that steps are kept of: one that draws keeps memory for a
distribution of every row."""
KEPT_WORKSPACES = 2
"""Workspaces of a model that are kept between calls: a model may be target and draft at once."""


@dataclass
class RecordedPass:
    """A recorded pass and the static tensors that it reads.

    Attributes:
        replay: Runs the pass.
        buffers: Its tokens and positions.
        block: The same, flat, with the rows they belong to, for a fused pass; None for the model's own.
        keep: Indices of the tokens whose logits a fused pass gives, if not all: the replay reads it.
        last: These tokens as a block, if the last layer is run on them alone.
        choice: Number of the choice of rows that a padded `block` holds now.
        chain: What a step of a chain reads and leaves; None for other passes.
    """

    replay: Replay[PassOutput]
    buffers: BlockBuffers
    block: Block | None = None
    keep: Tensor | None = None
    last: Block | None = None
    choice: int = 0
    chain: ChainStep | None = None

    def follow_rows(self, live: Tensor, choice: int) -> None:
        """Let a padded pass run the rows that are in now, `live`, `[rows]`, int64: that choice of them has a number."""
        if self.block is not None and self.choice != choice:
            self.block.place(live)
            if self.last is not None:
                self.last.place(live)
            self.choice = choice


class WorkspaceKey(NamedTuple):
    """What has to be equal for a recorded pass to be used again.

    Attributes:
        rows: Rows of the cache.
        fused: Whether `FusedDecoder` runs the passes.
        options: Fields of `RuntimeOptions` that decide what a pass is.
        model: Of the model without adapters; a cache is for any adapters.
        adapters: Of the adapters.
    """

    rows: int
    fused: bool
    options: tuple[Any, ...]
    model: Key
    adapters: Key


@dataclass
class Workspace:
    """What outlives a call: a cache, and the passes recorded over it. It does not keep the model alive.

    Attributes:
        key: What has to be equal for another call to use what is recorded under `state`.
        cache: Keys and values.
        passes: Recorded passes of all states, under keys that begin with the state's number.
        capture: Records further ones.
        joined: Copies of weights that they read.
        until_training: Whether it goes when the model, or the target that the model drafts for, is trained.
        anchor: Holds the memory that recordings share while there are none, so that it is used again: torch takes that
            of a pool without recordings back only when a device has run out of memory.
        state: Number of the adapters' state that is recorded and replayed now.
        states: Number of each state that something may be recorded of -> `adapters` of its key.
    """

    key: WorkspaceKey | None
    cache: RaggedCache
    passes: CapturedPasses[RecordedPass]
    capture: Capture
    joined: JoinedWeights = field(default_factory=JoinedWeights)
    until_training: bool = False
    anchor: Replay[Tensor] | None = None
    state: int = 0
    states: dict[int, Key] = field(default_factory=dict)
    _numbers: Tensor | None = None

    def __post_init__(self) -> None:
        """Number the first state."""
        if self.key is not None:
            self.states[self.state] = self.key.adapters

    def serves(self, key: WorkspaceKey | None, capacity: int) -> bool:
        """Whether passes of that key can be recorded over this cache, if they are not recorded already."""
        if self.key is None or key is None:
            return self.key is key
        return self.key[:-1] == key[:-1] and self.cache.capacity >= capacity

    def enter(self, key: WorkspaceKey | None) -> None:
        """Go over to the state of a key that this workspace serves."""
        if key is None or key == self.key:
            return
        recorded = {place[0] for place in self.passes.places()}
        self.states = {state: adapters for state, adapters in self.states.items() if state in recorded}
        known = (state for state, adapters in self.states.items() if adapters == key.adapters)
        self.state = next(known, max(self.states, default=-1) + 1)
        self.states[self.state] = key.adapters
        self.key = key

    @property
    def costs(self) -> RecordingCosts:
        """What recording has cost since the workspace was made."""
        return RecordingCosts(self.passes.captures, self.passes.seconds, self.capture.bytes)

    def make_room_for(self, choice: TokenChoice) -> None:
        """Let `choice` be one of the few whose steps are kept: of those used least recently, throw them away."""
        used = dict.fromkeys(entry.chain.choice for entry in reversed(self.passes.entries()) if entry.chain is not None)
        gone = [other for other in used if other != choice][MOST_CHOICES - 1 :]
        self.passes.drop(lambda entry: entry.chain is not None and entry.chain.choice in gone)

    def random_numbers(self, rows: int, of_each: int, device: torch.device) -> Tensor | None:
        """Return where recorded draft steps get random numbers, `[rows, of_each]`, float32; None if they take none.

        Steps run one after another and get new ones each time, so they share this memory.
        """
        if not of_each:
            return None
        if self._numbers is None or self._numbers.numel() < rows * of_each or self._numbers.device != device:
            self._numbers = torch.ones(rows * of_each, device=device)
        return self._numbers[: rows * of_each].view(rows, of_each)

    def start_anew(self) -> None:
        """Forget the last call's text, which of its rows were still in at the end, and what weights were then."""
        self.cache.clear()
        self.joined.start_anew()
        for entry in self.passes.entries():
            entry.choice = -1


class Workspaces:
    """Idle workspaces by model. Taking one removes it, so that calls in several threads never share one."""

    def __init__(self) -> None:
        self._idle: WeakKeyDictionary[PreTrainedModel, list[Workspace]] = WeakKeyDictionary()
        self._drafts: WeakKeyDictionary[PreTrainedModel, WeakSet[PreTrainedModel]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def take(self, model: PreTrainedModel, key: WorkspaceKey | None, capacity: int) -> Workspace | None:
        """Return a workspace for that key, of at least that capacity; if there is none, free the idle ones.

        One that was used with the same adapters last comes first. Of no key, the workspace that is returned has neither
        a cache that is large enough nor anything recorded.
        """
        with self._lock:
            idle = self._idle.get(model, [])
            fitting = [workspace for workspace in idle if workspace.serves(key, capacity)]
            if not fitting:
                self._idle.pop(model, None)
                return None
            taken = next((workspace for workspace in fitting if workspace.key == key), fitting[0])
            self._idle[model] = [workspace for workspace in idle if workspace is not taken]
            taken.enter(key)
            return taken

    def give_back(self, model: PreTrainedModel, workspace: Workspace) -> None:
        """Keep a workspace for later calls; of one without a key, the memory for what they record."""
        if workspace.key is None:
            if workspace.anchor is None:
                device = model.device
                with lasting():
                    workspace.anchor = workspace.capture(lambda: torch.zeros(1, device=device))
            workspace.passes.clear()
            workspace.joined = JoinedWeights()
            workspace.cache = RaggedCache(len(workspace.cache.ragged_layers), 0)
        with self._lock:
            idle = self._idle.setdefault(model, [])
            idle.append(workspace)
            del idle[:-KEPT_WORKSPACES]

    def release(self, model: PreTrainedModel) -> None:
        """Free all idle workspaces of a model."""
        with self._lock:
            self._idle.pop(model, None)

    def join(self, target: PreTrainedModel, draft: PreTrainedModel) -> None:
        """Let what the draft keeps until training go with what the target does."""
        with self._lock:
            self._drafts.setdefault(target, WeakSet()).add(draft)

    def make_room_for_training(self, model: PreTrainedModel) -> None:
        """Free what a model, and drafts that serve it, keep only until it is trained."""
        with self._lock:
            for each in (model, *self._drafts.pop(model, ())):
                kept = [workspace for workspace in self._idle.pop(each, []) if not workspace.until_training]
                if kept:
                    self._idle[each] = kept


workspaces = Workspaces()


def workspace_key(key: RecordingKey | None, rows: int, options: RuntimeOptions, fused: bool) -> WorkspaceKey | None:
    """Return what has to be equal for a workspace to be used again; None when nothing could tell.

    Args:
        key: The model's `recording_key`.
        rows: Rows of the cache.
        options: How passes are run.
        fused: Whether `FusedDecoder` runs them.
    """
    return None if key is None else WorkspaceKey(rows, fused, (options.view_bucket, options.packed_attention), *key)
