"""A runner that records each shape of pass once and replays it.

Launching the kernels of an eager pass takes the host longer than the device needs to run them; a replayed graph is one
launch. A shape is rows, width, part of the cache in view and kept columns. Of prompts, only short ones are recorded.
What is recorded is the model's own forward pass or, for models whose structure is known, that of `FusedDecoder`, which
runs the same matrices with fewer kernels and looks back by lengths in place of masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.execution.block_buffers import BlockBuffers
from hf_dsde.execution.cuda_graphs import Capture, CapturedPasses, RecordingCosts, raise_out_of_memory
from hf_dsde.execution.eager_runner import EagerRunner
from hf_dsde.execution.flat_block import flat_block
from hf_dsde.execution.fused_bodies import forward_bodies, store_bodies
from hf_dsde.execution.fused_decoder import FusedDecoder
from hf_dsde.execution.model_runner import next_bucket, next_multiple
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.pass_shapes import PACKED_WIDTHS, Shape, finished_may_stay, shape_to_run
from hf_dsde.execution.recorded_chain import LONGEST_CHAIN, BegunChain, Chain, ChainStep, DraftedChain
from hf_dsde.execution.recording_key import is_compiled
from hf_dsde.execution.row_block import RowBlock, next_row_count
from hf_dsde.execution.spans import Span, portions, total_count
from hf_dsde.execution.token_choice import TokenChoice
from hf_dsde.execution.workspaces import RecordedPass, Workspace, WorkspaceKey, workspaces
from hf_dsde.utils.transfers import upload

MIN_REACH = 512
"""Smallest bound of a row's length that a fused pass is recorded for."""
CAPACITY_STEP = 256
"""Caches hold a multiple of this many slots, so that calls with similar prompts find the same one."""


class GraphRunner(EagerRunner):
    """Replays recorded passes.

    Args:
        model: As for any runner.
        rows: As for any runner.
        capacity: As for any runner.
        options: As for any runner.
        fused: Runs the model's layers with fewer kernels, and returns the same hidden states; None to record the
            model's own forward pass.
        key: What has to be equal for what an earlier call has recorded to be used; None to record everything.
        make_capture: Called when there is no workspace to reuse; returns what records passes.
        widths: Block widths that are recorded, ascending; None for those of any runner.
        hidden_layers: As for any runner.
        on_failure: Called with the exception of a pass that could not be recorded; the runner then goes on eagerly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        capacity: int,
        options: RuntimeOptions,
        *,
        fused: FusedDecoder | None,
        key: WorkspaceKey | None,
        make_capture: Callable[[], Capture],
        on_failure: Callable[[Exception], None],
        widths: tuple[int, ...] | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:
        options = options.replace(packed_weights=False)  # a recording reads weights where they are
        super().__init__(model, rows, next_multiple(capacity, CAPACITY_STEP), options, hidden_layers=hidden_layers)
        self._compiles = is_compiled(model)
        self._width_buckets = widths or self._width_buckets
        self._fused = fused
        self._on_failure = on_failure
        self._recording = True
        self._workspace = workspaces.take(model, key, capacity) or Workspace(
            key, self.cache, CapturedPasses(options.max_graphs), make_capture()
        )
        if key is None:
            self._workspace.cache = self.cache
        self._workspace.passes.limit_to(options.max_graphs)
        self._workspace.start_anew()
        self.cache = self._workspace.cache
        self._before = self._workspace.costs
        self._live = torch.arange(rows, device=self.device)
        self._choices = 0
        self._idle_places = 0  # of rows that have finished, in all passes since some have left
        self._begun: BegunChain | None = None

    @property
    def recording_costs(self) -> RecordingCosts:
        """What recording has cost since this runner was made."""
        return self._workspace.costs - self._before

    @property
    def packs(self) -> bool:
        """As for any runner: with the fused decoder."""
        return self._fused is not None and self._recording

    @property
    def replays(self) -> bool:
        """As for any runner."""
        return self._recording

    @contextmanager
    def active(self) -> Iterator[None]:
        """As for any runner."""
        self._workspace.joined.follow()
        with super().active():
            yield

    def recorded(self, width: int, longest: int) -> bool:
        """As for any runner; of passes that keep all logits."""
        return self._is_recorded(self._shape(width, None, tree=False), longest)

    def _is_recorded(self, shape: Shape, longest: int) -> bool:
        """Whether there is a recording that needs no larger cache."""
        if not self._recording or not self.cache.is_allocated or longest > self.cache.capacity:
            return False
        return self._key(self._nearest(shape, r := self._reach(longest), used=False), r) in self._workspace.passes

    def _key(self, shape: Shape, reach: int) -> Shape:
        """What a pass is recorded under."""
        return self._workspace.state, *shape, reach, self.hidden_layers

    def _shape(self, width: int, keep: int | None, *, tree: bool, exit_layer: int | None = None) -> Shape:
        """What tells recorded padded passes apart, apart from the bound on lengths."""
        bucket = self.padded_width(width)
        return "padded", len(self._live), bucket, keep if keep == 1 else bucket, tree, exit_layer

    def _nearest(self, shape: Shape, reach: int, *, used: bool = True) -> Shape:
        """Return the shape that is run for one, as in `shape_to_run`."""
        key = partial(self._key, reach=reach)
        passes, free = self._workspace.passes, self._tuning.free_tokens
        return shape_to_run(shape, passes, key, self._width_buckets, free, used=used)

    def finish(self) -> None:
        """Keep what was recorded for the next call, if calls may keep anything."""
        if self._options.keep_memory is not False and self._recording:
            self._workspace.until_training = self._options.keep_memory is None
            workspaces.give_back(self.model, self._workspace)

    def stage(self, block: RowBlock, longest: int, keep: int | None = None) -> Callable[[], PassOutput]:
        """As for any runner: what is left to do is one launch, and a copy of the result."""
        if block.size is not None and self.packs and self.cache.is_allocated:
            return self._stage_packed(block, block.size, longest)
        shape = self._shape(block.width, keep, tree=block.is_tree, exit_layer=block.exit_layer)
        shape = self._nearest(shape, self._reach(longest))
        entry = self._entry(shape, longest) if self._recording and self.cache.is_allocated else None
        if entry is None:
            return super().stage(block, longest, keep)
        entry.buffers.fill(block.on(self.device).map(self._of_live_rows))
        entry.follow_rows(self._live, self._choices)
        live = self._live_index  # rows may leave before the block is run

        def run() -> PassOutput:
            entry.replay()
            return self._shown(entry.replay.output, keep or block.width, live, copied=True)

        return run

    def begin_chain(self, chain: Chain) -> DraftedChain | None:
        """As for any runner; nothing is recorded for it."""
        return self._drafted(chain, ahead=True)

    def chain(self, chain: Chain) -> DraftedChain | None:
        """As for any runner: a recorded step is replayed as often."""
        return self._drafted(chain, ahead=False)

    def _drafted(self, chain: Chain, *, ahead: bool) -> DraftedChain | None:
        self._begun = self._run_chain(chain, ahead=ahead)
        of_everyone = partial(self._of_everyone, live=self._live_index)
        return None if self._begun is None else self._begun.drafted(chain, of_everyone)

    def _run_chain(self, chain: Chain, *, ahead: bool) -> BegunChain | None:
        shape = ("chain", len(self._live), chain.choice, chain.exit_layer)
        reach, begun = self._reach(chain.longest), self._begun
        if not self._recording or chain.steps >= LONGEST_CHAIN:
            return None
        if begun is None or not chain.goes_on or not begun.may_become(chain, (*shape, reach, self._choices)):
            known = not ahead or self._is_recorded(shape, chain.longest)
            entry = self._entry(shape, chain.longest) if known else None
            if entry is None or entry.chain is None:
                return None
            entry.chain.begin(chain, self._of_live_rows)
            entry.follow_rows(self._live, self._choices)
            begun = BegunChain(entry.replay, entry.chain, (*shape, reach, self._choices))
        begun.run(chain, self._of_live_rows)
        return begun

    def _stage_packed(self, block: RowBlock, size: int, longest: int) -> Callable[[], PassOutput]:
        """Get a block ready for a pass over `size` tokens, without the padding between rows."""
        widest = next_bucket(block.width, PACKED_WIDTHS)
        shape = self._nearest(("packed", size, widest, block.is_tree), self._reach(longest))
        entry = self._entry(shape, longest)
        if entry is None:
            return super().stage(block, longest)
        assert entry.block is not None
        packed, places = replace(block, size=shape[1]).packed_on(self.device)
        entry.block.copy_(packed)

        def run() -> PassOutput:
            entry.replay()
            output = entry.replay.output.map(lambda states: states[places])
            return self._shown(output, block.width, None)._replace(packed_tokens=shape[1])

        return run

    def _store(self, spans: Sequence[Span], tokens: Tensor, states: Tensor | None) -> tuple[Tensor, ...]:
        """As for any runner; by flat passes when the fused decoder runs."""
        parts = portions(spans, self._options.prefill_chunk)
        counts = list(map(total_count, parts))
        hidden = []
        its_states = [None] * len(parts) if states is None else states.split(counts)
        for part in zip(parts, tokens.split(counts), its_states, strict=True):
            hidden.append(self._store_flat(*part) if self.packs else super()._store(*part))  # noqa: PERF401
        return hidden[0] if len(hidden) == 1 else tuple(torch.cat(layers) for layers in zip(*hidden, strict=True))

    def _store_flat(self, spans: Sequence[Span], tokens: Tensor, states: Tensor | None) -> tuple[Tensor, ...]:
        """Store what fits into one pass; a recorded one if launches would take longer than the device."""
        longest = max(span.end for span in spans)
        try:
            if len(tokens) > self._tuning.stored_sizes[-1]:
                return self._store_eagerly(spans, tokens, states, longest)
        except Exception as failure:  # noqa: BLE001 - as where a pass is recorded
            self._give_up(failure)
        size = next_bucket(len(tokens), self._tuning.stored_sizes)
        entry = self._entry(("store", size), longest) if self.packs else None
        if entry is None:
            return super()._store(spans, tokens, states)
        assert entry.block is not None
        entry.block.copy_(flat_block(spans, tokens, states, len(entry.block.tokens), self.rows))
        entry.replay()
        kept = entry.replay.output.hidden[: len(self._stored_layers)]
        return tuple(layer[: len(tokens)].clone() for layer in kept)

    def _store_eagerly(
        self, spans: Sequence[Span], tokens: Tensor, states: Tensor | None, longest: int
    ) -> tuple[Tensor, ...]:
        """Store tokens by the fused layers, launched one by one."""
        self._make_room(longest)
        assert self._fused is not None
        block = flat_block(spans, tokens, states, len(tokens), self.rows)
        hidden = self._fused.store(block, self.cache, min(next_multiple(longest, MIN_REACH), self.cache.capacity))
        return hidden[: len(self._stored_layers)]

    def _allocate(self) -> None:
        """Give the cache its buffers, by a pass over no token: only the model knows what it stores."""
        assert self._fused is not None
        block = self._new_buffers(1, 1).flat(1, self.rows, 1)
        self._fused.store(block, self.cache, MIN_REACH)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """As for any runner, when the fused decoder runs: rows stay where they are in the cache.

        A pass has one of few numbers of rows, so that few shapes are recorded; places that are left over keep rows that
        have finished, as do few rows for a while (`finished_may_stay`). A recorded forward pass of the model's own
        keeps all rows.
        """
        places, now = next_row_count(len(rows), self._tuning.fine_rows), len(self.live_rows)
        if self._fused is None or not self._recording or places >= now:
            return
        self._idle_places += now - places
        if finished_may_stay(now, self._idle_places, self._tuning.free_tokens):
            return
        self._idle_places = 0
        finished = [row for row in self.live_rows if row not in rows]
        self.live_rows = sorted([*rows, *finished[: places - len(rows)]])
        self._live = self._live_index = upload(self.live_rows, self.device)
        self._choices += 1

    def _entry(self, shape: Shape, longest: int) -> RecordedPass | None:
        """Return the recorded pass of a shape, None when it cannot be recorded."""
        self._make_room(longest)
        reach = self._reach(longest)
        try:
            return self._workspace.passes.get(self._key(shape, reach), lambda: self._record(shape, reach))
        except Exception as failure:  # noqa: BLE001 - whatever a model's code or the device has against recording
            self._give_up(failure)
            return None

    def _make_room(self, longest: int) -> int:
        """As for any runner; what was recorded over smaller buffers goes."""
        slots = next_multiple(longest, CAPACITY_STEP)
        if self.cache.limit is not None:
            slots = max(longest, min(slots, self.cache.limit))
        if longest > self.cache.capacity and self._reserve(slots):
            self._workspace.passes.clear()
        return min(next_multiple(longest, self._options.view_bucket), self.cache.capacity)

    def _reach(self, longest: int) -> int:
        """Round a bound on the rows' lengths up, which is no reason for the cache to grow.

        Masks have its width; fused passes only size their launches by it.
        """
        if self._fused is None:
            return min(next_multiple(longest, self._options.view_bucket), self.cache.capacity)
        reach = MIN_REACH
        while reach < longest:
            reach *= self._tuning.reach_factor
        return min(reach, self.cache.capacity)

    def _record(self, shape: Shape, reach: int) -> RecordedPass:
        if self._fused is not None and not self.cache.is_allocated:
            self._allocate()
        kind, size, *_ = shape
        if kind == "store":
            return self._record_store(size, reach)
        if self._fused is not None:
            self._fused.join_weights(self._workspace.joined, size * shape[2] if kind == "padded" else size)
        if kind == "packed":
            return self._record_packed(shape, reach)
        if kind == "chain":
            return self._record_chain(size, shape[2], shape[3], reach)
        _, rows, width, kept, tree, exit_layer = shape
        buffers = self._new_buffers(rows, width, tree=tree)
        if self._fused is None:
            body = self._own_forward(buffers, reach, kept, exit_layer)
            if self._compiles:  # which may wait for the device as often as it likes
                body()
            return RecordedPass(self._workspace.capture(body), buffers)
        block = buffers.flat(rows * width, self.rows, width)
        block.place(self._live)
        columns = torch.arange(rows * width, device=self.device).view(rows, width)
        keep = None if kept == width else columns[:, -kept:].flatten()
        last = None
        if keep is not None and not tree:
            last = self._new_buffers(rows, kept).flat(rows * kept, self.rows, kept)
            last.place(self._live)
        decoder = self._fused.ending_after(exit_layer)
        bodies = forward_bodies(decoder, block, self.cache, reach, (rows, kept), keep, last)
        return RecordedPass(self._workspace.capture(*bodies), buffers, block, keep, last, self._choices)

    def _record_packed(self, shape: Shape, reach: int) -> RecordedPass:
        assert self._fused is not None
        _, size, widest, tree = shape
        buffers = self._new_buffers(1, size, tree=tree)
        block = buffers.flat(size, self.rows, widest)
        bodies = forward_bodies(self._fused, block, self.cache, reach, (size,))
        return RecordedPass(self._workspace.capture(*bodies), buffers, block)

    def _record_store(self, size: int, reach: int) -> RecordedPass:
        assert self._fused is not None
        buffers = self._new_buffers(1, size)
        block = buffers.flat(size, self.rows, size)
        bodies = store_bodies(self._fused, block, self.cache, reach)
        return RecordedPass(self._workspace.capture(*bodies), buffers, block)

    def _record_chain(self, rows: int, choice: TokenChoice, exit_layer: int | None, reach: int) -> RecordedPass:
        buffers = self._new_buffers(rows, 1)
        self._workspace.make_room_for(choice)
        numbers = self._workspace.random_numbers(rows, choice.numbers, self.device)
        step, block = ChainStep(buffers, choice, numbers), None
        if self._fused is None:
            forwards = [self._own_forward(buffers, reach, 1, exit_layer)]
        else:
            block = buffers.flat(rows, self.rows, 1)
            block.place(self._live)
            forwards = forward_bodies(self._fused.ending_after(exit_layer), block, self.cache, reach, (rows, 1))
        bodies = [step.around(forward, self.model) for forward in forwards]
        if self._compiles:
            bodies[0]()
        return RecordedPass(self._workspace.capture(*bodies), buffers, block, choice=self._choices, chain=step)

    def _own_forward(
        self, buffers: BlockBuffers, view: int, kept: int, exit_layer: int | None
    ) -> Callable[[], PassOutput]:
        """Return the model's own forward pass, with the masks that it needs."""

        def body() -> PassOutput:
            # Weights that autocast has cast for whoever called may be gone when this is replayed.
            torch.clear_autocast_cache()
            buffers.masks.clear()
            self.cache.aim(buffers.slots, view)
            self._fill_masks(buffers, view)
            output = self._execute(buffers, kept, exit_layer)
            torch.clear_autocast_cache()
            return output

        return body

    def _give_up(self, failure: Exception) -> None:
        """Go on without recording: bring the cache into the form that an eager pass takes, and say why.

        Raises:
            torch.OutOfMemoryError: If memory ran out: that says nothing about the model.
        """
        raise_out_of_memory(failure)
        self._recording = False
        self._workspace.passes.clear()
        if self._live_index is not None:
            self.cache.select_rows(self._live_index)
        self._on_failure(failure)
