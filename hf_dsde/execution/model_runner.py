"""One model over its ragged cache: the only place where a model is called, but for the first pass over images.

A block of tokens enters as a `RowBlock`, `[rows, width]`. The runner rounds the width and the part of the cache in view
up to buckets, fills static input buffers of that shape, and executes the model on them. Everything that varies from
call to call is in the buffers' contents; shapes come from a small set, and nothing branches on a tensor: what
`graph_runner` needs to record a pass once and replay it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from hf_dsde import compat
from hf_dsde.execution import attention
from hf_dsde.execution.block_buffers import BlockBuffers, state_size
from hf_dsde.execution.cuda_graphs import RecordingCosts
from hf_dsde.execution.kv_cache import RaggedCache
from hf_dsde.execution.memory import check_cache_fits
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.packed_weights import PackedWeights, can_pack
from hf_dsde.execution.pass_output import PassOutput, checked_layers
from hf_dsde.execution.prompt_inputs import PromptInputs
from hf_dsde.execution.recorded_chain import Chain, DraftedChain
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span, similar_counts
from hf_dsde.execution.torch_modes import Autocast
from hf_dsde.utils.modules import parameter_devices
from hf_dsde.utils.transfers import upload
from hf_dsde.utils.tuning import tuning_of

WIDTH_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
"""Block widths that are executed. Fine where drafts are short: a padded column costs what a token costs."""
PADDED_COLUMNS = 512
"""Columns of a padded pass that stores prompts: its masks have a place for every pair of a column and a slot."""


def next_bucket(size: int, buckets: tuple[int, ...]) -> int:
    """Return the smallest bucket that holds `size`; beyond the last one, the next multiple of it."""
    for bucket in buckets:
        if size <= bucket:
            return bucket
    return -(-size // buckets[-1]) * buckets[-1]


def next_multiple(size: int, step: int) -> int:
    """Return the smallest multiple of `step` that holds `size`."""
    return -(-size // step) * step


def single_device(model: PreTrainedModel) -> torch.device | None:
    """Return the device of all parameters; None when there are several, or weights are offloaded."""
    devices = parameter_devices(model)
    device = devices.pop()
    return None if devices or device.type == "meta" else device


class ModelRunner(ABC):
    """Feeds blocks of tokens to one model and keeps its cache.

    Args:
        model: A decoder-only model in evaluation.
        rows: Number of sequences.
        capacity: Tokens per row the cache holds to begin with.
        options: How passes are run.
        hidden_layers: Layers whose hidden states passes return, numbered as `PassOutput` says.

    Attributes:
        keeps_stored_states: Whether `store` returns hidden states as well; those of long prompts take much memory.

    Raises:
        ValueError: If the model has no such layer.
    """

    keeps_stored_states = True

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        capacity: int,
        options: RuntimeOptions,
        *,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:
        self.model = model
        self.hidden_layers = checked_layers(model, hidden_layers)
        self.state_size = state_size(model)
        self.rows = rows
        self.live_rows = list(range(rows))
        self._live_index: Tensor | None = None
        self.device = model.device
        self.packed = options.packed_attention and attention.reproduces_attention(model)
        text_config = compat.decoder_config(model)
        self.cache = RaggedCache(text_config.num_hidden_layers, capacity, rows)
        if compat.takes_images(model):
            self.cache.shift_rows(self.device)
        heads = text_config.num_attention_heads
        # Masks are packed for this many heads; a layer that shares otherwise packs for itself.
        self._shared_heads = heads // (getattr(text_config, "num_key_value_heads", None) or heads)
        self._options = options
        self._tuning = tuning_of(self.device)
        self._width_buckets: tuple[int, ...] = WIDTH_BUCKETS
        self._kinds = attention.attention_kinds(model)
        self._cache_argument = compat.cache_argument(model)
        self._keeps_last = compat.supports_logits_to_keep(model)
        self._buffers: dict[tuple[int, bool], BlockBuffers] = {}
        self._exits: dict[int, PreTrainedModel] = {}
        self._single_device = single_device(model)
        self._autocast = Autocast.on(self.device)
        packs_weights = options.packed_weights and self._autocast.dtype is None and can_pack(self.device)
        self._weights = PackedWeights(model if packs_weights else None)

    @property
    def recording_costs(self) -> RecordingCosts:
        """What recording passes has cost since this runner was made."""
        return RecordingCosts()

    @property
    def _stored_layers(self) -> tuple[int, ...]:
        return self.hidden_layers if self.keeps_stored_states else ()

    @property
    def packs(self) -> bool:
        """Whether blocks that say so are run packed."""
        return False

    @property
    def replays(self) -> bool:
        """Whether what `stage` returns replays a recorded pass: it takes no memory but for a copy of the result."""
        return False

    @property
    def conditions(self) -> tuple[Hashable, ...]:
        """What decides how long a pass takes, apart from its rows and tokens."""
        how = self.replays, self.packs, self.packed, bool(self._weights)
        return *how, self.model.dtype, self.device, self._autocast

    def recorded(self, width: int, longest: int) -> bool:  # noqa: ARG002 - nothing is, by default
        """Whether a padded block of chains of this width is replayed from a recording that exists already."""
        return False

    def padded_width(self, width: int) -> int:
        """Return the columns that a block of `width` columns is run with."""
        return next_bucket(width, self._width_buckets)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Hold the attention setting that `forward` needs; it is as before when the `with` block ends."""
        self._weights.follow()
        if not self.packed:
            yield
            return
        with attention.packed_attention(self.model):
            yield

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Let the model compute as it did in the first pass, whose dtype the cache has, and with packed weights."""
        with self._autocast.held(), self._weights.in_place():
            yield

    def stage(self, block: RowBlock, longest: int, keep: int | None = None) -> Callable[[], PassOutput]:
        """Get a block ready. The function that is returned runs it and gives what `forward` would have given.

        What comes in between may be the host's waiting for an answer. Of the blocks that end after the same layer, only
        the one staged last can be run.
        """
        return lambda: self._run(block, longest, keep)

    def forward(self, block: RowBlock, longest: int, keep: int | None = None) -> PassOutput:
        """Run a block, storing its keys and values in the slots that it names.

        Args:
            block: A line for each row of the batch.
            longest: A bound, known without asking the device, on the largest slot + 1.
            keep: Return what the last `keep` columns give only; None for all.

        Returns:
            Logits, `[rows, keep or width, vocabulary]`, and hidden states, `[rows, keep or width, H]`, on the model's
            output device. Columns without a token hold anything finite, and so do rows that were left out.
        """
        return self.stage(block, longest, keep)()

    def begin_chain(self, chain: Chain) -> DraftedChain | None:  # noqa: ARG002
        """Run a chain before it is known how long it has to be, if a recording of its step is there.

        The chain that is asked for next may go on with it (`Chain.goes_on`).
        """
        return None

    def chain(self, chain: Chain) -> DraftedChain | None:  # noqa: ARG002
        """Draft without the host in between; None, and nothing done, if it cannot."""
        return None

    def _run(self, block: RowBlock, longest: int, keep: int | None) -> PassOutput:
        """Run a block eagerly, and padded."""
        columns = keep or block.width
        buffers = self._buffers_for(self.padded_width(block.width), block.is_tree)
        self._fill(buffers, block.on(self.device).map(self._of_live_rows), longest)
        return self._shown(self._execute(buffers, columns, block.exit_layer), columns, self._live_index)

    def _shown(self, output: PassOutput, columns: int, live: Tensor | None, *, copied: bool = False) -> PassOutput:
        """Return what the last columns of a pass over the rows `live` gave, for all rows.

        Args:
            output: Of the pass.
            columns: How many.
            live: The rows, `[live]`, int64; None for all.
            copied: Whether the pass will write over its output.
        """
        logits = output.logits[:, -columns:].to(torch.float32, copy=copied)
        hidden = tuple(states[:, -columns:].to(states.dtype, copy=copied) for states in output.hidden)
        return PassOutput(logits, hidden).map(lambda states: self._of_everyone(states, live))

    def _fill(self, buffers: BlockBuffers, block: RowBlock, longest: int, places: Tensor | None = None) -> None:
        """Get a block ready for an eager pass in the cache rows `places`, or in all."""
        view = self._make_room(longest)
        buffers.fill(block)
        self.cache.aim(buffers.slots, view, places)
        self._fill_masks(buffers, view)

    def store(self, spans: Sequence[Span], tokens: Tensor, states: Tensor | None = None) -> tuple[Tensor, ...]:
        """Store tokens whose logits nobody wants, such as prompts: `prefill_chunk` at a time, of all rows together.

        Args:
            spans: Where the tokens belong. Rows of the batch that are still in, each at most once; what a span has in
                front of it is stored already.
            tokens: Tokens of all spans, one span after another, `[sum of counts]`, int64.
            states: What a draft head reads beside them, `[sum of counts, H]`; None for other models.

        Returns:
            Hidden states of these tokens, `[sum of counts, H]` for each layer that was asked for, if they are kept.

        Raises:
            torch.OutOfMemoryError: If the device has no room for the cache; nothing has been done then.
        """
        spans = [span for span in spans if span.count]
        if not spans:
            width = self.model.config.get_text_config(decoder=True).hidden_size
            nothing = torch.empty(0, width, dtype=self.model.dtype, device=self.device)
            return tuple(nothing for _ in self._stored_layers)
        if not self.cache.is_allocated:
            check_cache_fits(self.model, self.rows, self.cache.capacity + 1)
        return self._store(spans, tokens.to(self.device), None if states is None else states.to(self.device))

    def store_prompts(self, prompts: PromptInputs) -> tuple[Tensor, ...]:
        """Store prompts with what they bring along, all of their tokens, by the pass that plain decoding begins with.

        Args:
            prompts: Of all rows of the batch, none of which has left.

        Returns:
            Hidden states, `[rows, width, H]` for each layer that was asked for; anything where prompts are padded.

        Raises:
            torch.OutOfMemoryError: If the device has no room for the cache; nothing has been done then.
        """
        if not self.cache.is_allocated:
            check_cache_fits(self.model, self.rows, self.cache.capacity + 1)
        self._make_room(prompts.width)
        with self._computing():
            return prompts.read(self.model, self.cache, self.hidden_layers)

    def _store(self, spans: Sequence[Span], tokens: Tensor, states: Tensor | None) -> tuple[Tensor, ...]:
        """Store tokens by passes over rows of about the same length, padded to the longest."""
        counts = [span.count for span in spans]
        entries = list(zip(spans, accumulate(counts, initial=0), strict=False))
        if self._options.drop_finished_rows:
            groups = [
                [entries[index] for index in group] for group in similar_counts(counts, self._tuning.split_saving)
            ]
        else:  # what is hooked into a pass may hold a value for each row of the batch
            present = {span.row for span in spans}
            absent = [(Span(row, 0, 0), 0) for row in self.live_rows if row not in present]
            groups = [sorted([*entries, *absent], key=lambda entry: entry[0].row)]
        hidden: list[Tensor] = []
        more = pad(tokens, (0, 1)), None if states is None else pad(states, (0, 0, 0, 1))
        for group in groups:
            self._store_group(group, *more, hidden)
        return tuple(layer[:-1] for layer in hidden)

    def _store_group(
        self, group: Sequence[tuple[Span, int]], tokens: Tensor, states: Tensor | None, hidden: list[Tensor]
    ) -> None:
        """Store spans by passes over their rows.

        Args:
            group: The spans, each with the index of its first token.
            tokens: Of all spans, and another in the place that columns without a token are sent to.
            states: Likewise, if the model reads any.
            hidden: Gets the hidden states of all `tokens`, `[len(tokens), H]` each, if there are none in it yet; those
                of the group are written there.
        """
        place = {row: index for index, row in enumerate(self.live_rows)}
        rows = [place[span.row] for span, _ in group]
        # All rows in their order are the cache as it is; others have to be copied out of it in every layer.
        chosen = None if rows == list(range(len(self.live_rows))) else upload(rows, self.device)
        counts, starts, offsets = torch.tensor([(span.count, span.start, first) for span, first in group]).T[..., None]
        step = max(1, min(PADDED_COLUMNS, self._options.prefill_chunk // len(group)))
        for column in torch.arange(int(counts.max())).split(step):
            real = column < counts
            positions = (starts + column).masked_fill(~real, -1)
            places = (offsets + column).masked_fill(~real, len(tokens) - 1)
            block, slots = upload(torch.stack([places, positions]), self.device)
            buffers = self._new_buffers(len(group), self.padded_width(len(column)))
            given = RowBlock(tokens[block], slots, states=None if states is None else states[block])
            self._fill(buffers, given, int(positions.max()) + 1, chosen)
            output = self._execute(buffers, 0).hidden[: len(self._stored_layers)]  # of a draft head, nobody wants any
            found = [layer[:, -len(column) :] for layer in output]
            hidden += [layer.new_empty(len(tokens), layer.shape[-1]) for layer in found[len(hidden) :]]
            for everything, layer in zip(hidden, found, strict=True):
                everything[block.to(layer.device)] = layer

    def finish(self) -> None:
        """Give back what later calls can use: this one is done."""
        self._weights = PackedWeights(None)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Leave all other rows out from now on: `forward` still takes and returns the whole batch, but runs these.

        Args:
            rows: Rows of the batch, ascending, of those that are still in.
        """
        place = {row: index for index, row in enumerate(self.live_rows)}
        self.cache.select_rows(upload([place[row] for row in rows], self.device))
        self.live_rows = list(rows)
        self._live_index = upload(self.live_rows, self.device)
        self._buffers.clear()

    def _of_live_rows(self, per_row: Tensor) -> Tensor:
        """Bring a tensor with an entry per row of the batch to the model's device, with the rows still in only."""
        per_row = per_row.to(self.device)
        return per_row if self._live_index is None else per_row[self._live_index]

    def _of_everyone(self, per_row: Tensor, live: Tensor | None) -> Tensor:
        """Give the rows that were left out, all but `live`, an entry as well: zeros."""
        if live is None:
            return per_row
        return per_row.new_zeros(self.rows, *per_row.shape[1:]).index_copy_(0, live, per_row)

    def _make_room(self, longest: int) -> int:
        """Let the cache hold rows of a length; return the part of it that is in view then."""
        view = next_multiple(longest, self._options.view_bucket)
        self._reserve(view)
        return view

    def _reserve(self, slots: int) -> bool:
        """Make room in the cache, if there is room for it; return whether its buffers have moved."""
        if slots > self.cache.capacity:
            check_cache_fits(self.model, self.rows, slots)
        return self.cache.reserve(slots)

    def _buffers_for(self, width: int, tree: bool) -> BlockBuffers:
        if (width, tree) not in self._buffers:
            self._buffers[width, tree] = self._new_buffers(len(self.live_rows), width, tree=tree)
        return self._buffers[width, tree]

    def _new_buffers(self, rows: int, width: int, *, tree: bool = False) -> BlockBuffers:
        states = None if self.state_size is None else (self.state_size, self.model.dtype)
        return BlockBuffers(rows, width, self.device, tree=tree, states=states)

    def _fill_masks(self, buffers: BlockBuffers, view: int) -> None:
        """Write what comes of positions; masks keep their storage as long as the view keeps its bucket."""
        buffers.number(self.cache.aimed_shifts)
        for kind in self._kinds:
            visible = attention.visible_slots(buffers.positions, view, kind.window, buffers.slots, buffers.ancestors)
            mask = self._mask(visible)
            held = buffers.masks.get(kind.kind)
            if held is not None and held.shape == mask.shape:
                held.copy_(mask)
            else:
                buffers.masks[kind.kind] = mask

    def _mask(self, visible: Tensor) -> Tensor:
        """Bring a boolean mask into the form that the model's attention takes."""
        if self.packed:
            return attention.packed_mask(visible, self._shared_heads, self.model.dtype)
        if self.model.config._attn_implementation == "eager":
            return attention.additive_mask(visible, self.model.dtype)
        return visible

    @abstractmethod
    def _execute(self, buffers: BlockBuffers, keep: int, exit_layer: int | None = None) -> PassOutput:
        """Run the model on the buffers; return at least the last `keep` columns, logits in its own dtype.

        Hidden states are those of all columns, a draft head's its own; none of a pass that ends after `exit_layer`.
        With `keep` 0 no head is run, where the model can do without.
        """
