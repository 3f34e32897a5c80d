"""What is recorded of a fused decoder, each with a shorter body that launches the same kernels, to warm up with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from hf_dsde.execution.fused_decoder import FusedDecoder
from hf_dsde.execution.kv_cache import RaggedCache
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.kernels.block import Block

Bodies = list[Callable[[], PassOutput]]
"""What is recorded, and what may be run in its place to warm up, if that is not the same."""


def forward_bodies(
    decoder: FusedDecoder,
    block: Block,
    cache: RaggedCache,
    reach: int,
    shape: tuple[int, ...],
    keep: Tensor | None = None,
    last: Block | None = None,
) -> Bodies:
    """Return a pass over a block; what it gives begins with `shape`, and the other arguments are those of a call."""

    def body(decoder: FusedDecoder) -> PassOutput:
        return decoder(block, cache, reach, keep, last).map(lambda states: states.view(*shape, -1))

    return _with_shorter(decoder, body)


def store_bodies(decoder: FusedDecoder, block: Block, cache: RaggedCache, reach: int) -> Bodies:
    """Return what stores a block and gives hidden states only; arguments are those of `FusedDecoder.store`."""

    def body(decoder: FusedDecoder) -> PassOutput:
        return PassOutput(block.tokens[:0], decoder.store(block, cache, reach))

    return _with_shorter(decoder, body)


def _with_shorter(decoder: FusedDecoder, body: Callable[[FusedDecoder], PassOutput]) -> Bodies:
    return [partial(body, decoder), partial(body, decoder.representative())]
