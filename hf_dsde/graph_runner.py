"""A runner that records each shape of pass once and replays it.

Launching the kernels of an eager pass takes the host longer than the device needs to run them, whatever the model's
size; a replayed graph is one launch. Passes are recorded when their shape is first met, per rows, width, part of the
cache in view and kept columns. Prompts are stored eagerly.

What is recorded is either the model's own forward pass or, for models whose structure is known, `FusedDecoder`'s, which
runs the same matrices with fewer kernels between them and looks back by lengths instead of masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.config import SpeculationConfig
from hf_dsde.fused.block import TokenBlock
from hf_dsde.fused.decoder import FusedDecoder
from hf_dsde.graphs import Body, Capture, CapturedPasses, RecordingCosts, raise_out_of_memory
from hf_dsde.packing import PackedTokens
from hf_dsde.recording_key import Key, is_compiled
from hf_dsde.runner import BlockBuffers, EagerRunner, next_bucket, next_multiple
from hf_dsde.transfers import upload
from hf_dsde.workspaces import RecordedPass, Workspace, workspaces

PACKED_WIDTHS = (4, 8, 16, 32, 64)
"""Bounds on a row's tokens in a packed pass: they size a launch, and each is another pass to record."""
STORED_SIZES = (64, 128, 256, 512)
"""Tokens of passes that only store them, such as the prompts of rows which begin another text; more are stored in
several passes."""
MIN_REACH = 512
"""Smallest bound of a row's length that a fused pass is recorded for ..."""
REACH_FACTOR = 4
"""... and the ratio of two neighbouring bounds. On an H200, passes over 400 slots of 32 rows take 3 to 6 % longer when
they are recorded for 4000 slots instead of 500; those of 8 rows up to 2 %, those of one no longer."""
CAPACITY_STEP = 256
"""Caches hold a multiple of this many slots, so that calls with similar prompts find the same one."""


class GraphRunner(EagerRunner):
    """Replays recorded passes.

    Args:
        model: As for any runner.
        rows: As for any runner.
        capacity: As for any runner.
        config: As for any runner.
        fused: Runs the model's layers with fewer kernels; None to record the model's own forward pass.
        key: What has to be equal for what an earlier call has recorded to be used; None to record everything.
        make_capture: Called when there is no workspace to reuse; returns what records passes.
        forward: Stands in for the model when its own forward pass is recorded, such as a compiled one.
        widths: Block widths that are recorded, ascending; None for those of any runner.
        on_failure: Called with the exception of a pass that could not be recorded; the runner then goes on eagerly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        capacity: int,
        config: SpeculationConfig,
        *,
        fused: FusedDecoder | None,
        key: Key | None,
        make_capture: Callable[[], Capture],
        on_failure: Callable[[Exception], None],
        forward: Callable[..., Any] | None = None,
        widths: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(model, rows, next_multiple(capacity, CAPACITY_STEP), config)
        self._forward = forward
        self._compiles = forward is not None or is_compiled(model)
        self._width_buckets = widths or self._width_buckets
        self._fused = fused
        self._on_failure = on_failure
        self._recording = True
        self._workspace = workspaces.take(model, key, capacity) or Workspace(
            key, self.cache, CapturedPasses(config.max_graphs), make_capture()
        )
        if key is None:
            self._workspace.cache = self.cache
        self._workspace.passes.limit_to(config.max_graphs)
        self._workspace.start_anew()
        self.cache = self._workspace.cache
        self._before = self._workspace.costs
        self._live = torch.arange(rows, device=self.device)
        self._choices = 0

    @property
    def recording_costs(self) -> RecordingCosts:
        """What recording has cost since this runner was made."""
        return self._workspace.costs - self._before

    @property
    def packs(self) -> bool:
        """Whether `forward_packed` can be called."""
        return self._fused is not None and self._recording

    @property
    def replays(self) -> bool:
        """As for any runner."""
        return self._recording

    def recorded(self, width: int, longest: int) -> bool:
        """As for any runner; of passes that keep all logits."""
        possible = self._recording and self.cache.is_allocated and longest <= self.cache.capacity
        return possible and (*self._shape(width, None), self._reach(longest)) in self._workspace.passes

    def _shape(self, width: int, keep: int | None) -> tuple[Any, ...]:
        """What tells recorded padded passes apart, beside the bound on lengths."""
        bucket = self.padded_width(width)
        return "padded", len(self._live), bucket, keep if keep == 1 else bucket

    def finish(self) -> None:
        """Keep what was recorded for the next call, if calls may keep anything."""
        if self._config.keep_memory and self._recording:
            workspaces.give_back(self.model, self._workspace)

    def stage(self, tokens: Tensor, positions: Tensor, longest: int, keep: int | None = None) -> Callable[[], Tensor]:
        """As for any runner: what is left to do is one launch, and a copy of the result."""
        width = tokens.shape[1]
        shape = self._shape(width, keep)
        entry = self._entry(shape, longest) if self._recording and self.cache.is_allocated else None
        if entry is None:
            return super().stage(tokens, positions, longest, keep)
        entry.buffers.fill(self._of_live_rows(tokens), self._of_live_rows(positions))
        if entry.block is not None and entry.choice != self._choices:
            self._place(entry.block)
            entry.choice = self._choices
        live = self._live_index  # rows may leave before the block is run

        def run() -> Tensor:
            entry.replay()
            logits = entry.replay.output[:, -(keep or width) :]
            return self._of_everyone(logits.to(torch.float32, copy=True), live)

        return run

    def forward_packed(self, tokens: Tensor, positions: Tensor, counts: Tensor, size: int, longest: int) -> Tensor:
        """As for any runner; `packs` says whether it can."""
        if not self.packs:
            return super().forward_packed(tokens, positions, counts, size, longest)
        packed = PackedTokens.of(tokens.to(self.device), positions.to(self.device), counts.to(self.device), size)
        widest = next_bucket(tokens.shape[1], PACKED_WIDTHS)
        entry = self._entry(("packed", size, widest), longest)
        if entry is None:
            return self.forward(tokens, positions, longest)
        assert entry.block is not None
        for name in ("tokens", "rows", "positions", "starts", "counts"):
            getattr(entry.block, name).copy_(getattr(packed, name))
        entry.replay()
        return entry.replay.output[packed.unpacked].float()

    def prefill(self, tokens: Tensor, lengths: Tensor, longest: int) -> None:
        """As for any runner; eagerly."""
        recording, self._recording = self._recording, False
        super().prefill(tokens, lengths, longest)
        self._recording = recording

    def replace_rows(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """As for any runner; recorded when the fused decoder runs, the texts behind each other in few sizes of pass."""
        if not (self.packs and self.cache.is_allocated):
            super().replace_rows(rows, texts)
            return
        places = [(row, position) for row, text in zip(rows, texts, strict=True) for position in range(len(text))]
        if not self.store(places, upload([token for text in texts for token in text], self.device)):
            super().replace_rows(rows, texts)  # from the start: storing again what is stored changes nothing

    def store(self, places: Sequence[tuple[int, int]], tokens: Tensor) -> bool:
        """As for any runner; when the fused decoder runs."""
        if not (self.packs and self.cache.is_allocated):
            return False
        parts = [slice(start, start + STORED_SIZES[-1]) for start in range(0, len(places), STORED_SIZES[-1])]
        return all(self._store(places[part], tokens[part]) for part in parts)

    def _store(self, places: Sequence[tuple[int, int]], tokens: Tensor) -> bool:
        """Store what fits into one pass; return whether that was recorded."""
        size = next_bucket(len(places), STORED_SIZES)
        entry = self._entry(("store", size), max(position for _, position in places) + 1)
        if entry is None:
            return False
        assert entry.block is not None
        padded = [*places, *[(places[0][0], -1)] * (size - len(places))]
        block = upload([value for column in zip(*padded, strict=True) for value in column], self.device)
        for name, values in zip(("rows", "positions"), block.view(2, size), strict=True):
            getattr(entry.block, name).copy_(values)
        entry.block.tokens[: len(places)].copy_(tokens)
        starts, counts = [0] * self.rows, [0] * self.rows
        for place, (row, _) in reversed(list(enumerate(places))):
            starts[row] = place
            counts[row] += 1
        entry.block.starts.copy_(upload(starts, self.device))
        entry.block.counts.copy_(upload(counts, self.device))
        entry.replay()
        return True

    def keep_rows(self, rows: Sequence[int]) -> None:
        """As for any runner, when the fused decoder runs: rows stay where they are in the cache.

        The number of rows in a pass is halved at most, so that few shapes are recorded; places that are left over keep
        rows that have finished. A recorded forward pass of the model's own keeps all rows.
        """
        if self._fused is None or not self._recording:
            return
        places = 1 << (len(rows) - 1).bit_length()
        if places >= len(self.live_rows):
            return
        finished = [row for row in self.live_rows if row not in rows]
        self.live_rows = sorted([*rows, *finished[: places - len(rows)]])
        self._live = self._live_index = upload(self.live_rows, self.device)
        self._choices += 1

    def _entry(self, shape: tuple[Any, ...], longest: int) -> RecordedPass | None:
        """Return the recorded pass of a shape, None when it cannot be recorded."""
        reach = self._reach(longest)
        if self._reserve(reach):
            self._workspace.passes.clear()
        try:
            return self._workspace.passes.get((*shape, reach), lambda: self._record(shape, reach))
        except Exception as failure:  # noqa: BLE001 - whatever a model's code or the device has against recording
            self._give_up(failure)
            return None

    def _reach(self, longest: int) -> int:
        """Round a bound on the rows' lengths up: masks have its width, fused passes only size their launches by it."""
        if self._fused is None:
            return next_multiple(longest, self._config.view_bucket)
        reach = MIN_REACH
        while reach < longest:
            reach *= REACH_FACTOR
        # A bound is no reason to grow the cache, only a length is.
        return min(reach, self.cache.capacity) if longest <= self.cache.capacity else reach

    def _record(self, shape: tuple[Any, ...], reach: int) -> RecordedPass:
        if shape[0] == "packed":
            return self._record_packed(shape[1], shape[2], reach)
        if shape[0] == "store":
            first = torch.zeros(1, dtype=torch.long, device=self.device)
            return self._record_packed(shape[1], shape[1], reach, keep=first)
        _, rows, width, kept = shape
        buffers = BlockBuffers(rows, width, self.device)
        if self._fused is None:
            body = self._own_forward(buffers, reach, kept)
            if self._compiles:  # which may wait for the device as often as it likes
                body()
            return RecordedPass(self._workspace.capture(body), buffers)
        block = self._fused_block(rows * width, width, buffers)
        self._place(block)
        columns = torch.arange(rows * width, device=self.device).view(rows, width)
        keep = None if kept == width else columns[:, -kept:].flatten()
        forward = self._fused_forward(block, reach, keep)
        replay = self._workspace.capture(lambda: forward().view(rows, kept, -1))
        return RecordedPass(replay, buffers, block, keep, self._choices)

    def _record_packed(self, size: int, widest: int, reach: int, keep: Tensor | None = None) -> RecordedPass:
        buffers = BlockBuffers(1, size, self.device)
        block = self._fused_block(size, widest, buffers)
        replay = self._workspace.capture(self._fused_forward(block, reach, keep))
        return RecordedPass(replay, buffers, block, keep)

    def _fused_block(self, size: int, widest: int, buffers: BlockBuffers) -> TokenBlock:
        return TokenBlock(
            tokens=buffers.tokens.view(-1),
            rows=torch.zeros(size, dtype=torch.long, device=self.device),
            positions=buffers.positions.view(-1),
            starts=torch.zeros(self.rows, dtype=torch.int32, device=self.device),
            counts=torch.zeros(self.rows, dtype=torch.int32, device=self.device),
            max_count=widest,
        )

    def _own_forward(self, buffers: BlockBuffers, view: int, kept: int) -> Body:
        """Return the model's own forward pass, with the masks that it needs."""

        def body() -> Tensor:
            # Weights that autocast has cast for whoever called may be gone when this is replayed.
            torch.clear_autocast_cache()
            buffers.masks.clear()
            self._fill_masks(buffers, view)
            self.cache.aim(buffers.positions, view)
            logits = self._execute(buffers, kept, self._forward)
            torch.clear_autocast_cache()
            return logits

        return body

    def _fused_forward(self, block: TokenBlock, reach: int, keep: Tensor | None) -> Body:
        fused, cache = self._fused, self.cache
        assert fused is not None
        return lambda: fused(block, cache, reach, keep)

    def _place(self, block: TokenBlock) -> None:
        """Write into a padded block where the rows that are still in have their tokens."""
        width = block.max_count
        block.rows.copy_(self._live.repeat_interleave(width))
        first = torch.arange(0, len(self._live) * width, width, dtype=torch.int32, device=self.device)
        block.starts.zero_().index_copy_(0, self._live, first)
        block.counts.zero_().index_fill_(0, self._live, width)

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
