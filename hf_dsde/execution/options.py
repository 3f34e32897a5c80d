"""What a machine is to do with passes, apart from what is drafted: memory, recordings and escapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hf_dsde.utils.checks import check_flag, check_integer


@dataclass(frozen=True)
class RuntimeOptions:
    """How passes are run on this machine: what they take in time and memory. The law of a text is the same with any.

    They are given as `SpeculationConfig(options=RuntimeOptions(...))` and stay with the process: `save_pretrained`
    does not write them, and an interrupted job may go on with others.

    Attributes:
        fused_layers: Whether a recorded pass of a model of a known structure uses this package's kernels between the
            model's matrix products. Without, the model's own forward pass is recorded.
        max_graphs: The most recorded passes a model keeps. Each takes memory on the device.
        keep_memory: Whether caches and recorded passes stay on the device for the next call. None: as long as the
            target is in evaluation; `train()` of an enabled model frees them, its draft's too, and a call in training
            mode leaves nothing. True: also while it trains; passes that were recorded once serve all rollouts, since
            optimizers write to weights in place. False: never. Whatever is freed is made again by the next call.
            There is no half of it: recorded passes know the addresses of their cache, and are worth nothing without.
        prefill_chunk: Prompt tokens of all rows together in a pass that stores them. Fewer take less memory.
        view_bucket: Where the model's own forward pass runs, it sees a multiple of this many slots of the cache. More
            mean fewer passes to record for long texts, and more slots that are read without need.
        packed_attention: Whether query heads that share a key-value head are folded into the query length. Off, the
            model's own attention runs.
        packed_weights: Whether float32 models on a CPU compute with copies of their linear weights that are arranged
            for it, as long as a call lasts. The copies take as much memory as the weights. None are made where less
            than twice of that is available, or for calls of few tokens; off, for whoever needs the memory otherwise.
        drop_finished_rows: Whether rows that have ended leave the models' passes, once a quarter of those in them have.
            Off where a model holds something for each row. Hooks are noticed, and there all rows stay in any case.
        cost_probe: Whether one round of a long call runs without drafts, to measure what a plain step costs.
    """

    fused_layers: bool = True
    max_graphs: int = 256
    keep_memory: bool | None = None
    prefill_chunk: int = 8192
    view_bucket: int = 64
    packed_attention: bool = True
    packed_weights: bool = True
    drop_finished_rows: bool = True
    cost_probe: bool = True

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("fused_layers", "packed_attention", "packed_weights", "drop_finished_rows", "cost_probe"):
            check_flag(name, getattr(self, name))
        if self.keep_memory is not None:
            check_flag("keep_memory", self.keep_memory)
        for name in ("max_graphs", "prefill_chunk", "view_bucket"):
            check_integer(name, getattr(self, name), 1)

    def replace(self, **changes: Any) -> RuntimeOptions:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)
