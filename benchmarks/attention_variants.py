"""One layer's attention of a decode pass in several implementations, on caches whose rows have different lengths.

python benchmarks/attention_variants.py --output benchmarks/results/attention_variants_h100.json
python benchmarks/attention_variants.py --short --sweep

Every time is the median over replays of a CUDA graph that holds many launches, which take turns over caches that
together exceed the L2 cache. Masks and packed copies are made beforehand, as one pass makes them for all its layers.
The floor is what reading the keys and values of the true lengths takes at the bandwidth of a copy.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from hf_dsde.execution import attention
from hf_dsde.execution.graph_runner import MIN_REACH
from hf_dsde.kernels.attention_plan import LaunchPlan, plan_launch
from hf_dsde.kernels.block import Block
from hf_dsde.measurement import provenance
from hf_dsde.utils.tuning import tuning_of

ROTATED_BYTES = 192 << 20
"""Caches take turns until they come to this, several times the L2 cache."""
SHORT_CONTEXT = 330
"""A question and the middle of its answer: so little to read that the start of a launch decides."""
Launch = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of one measurement; lengths of rows are uniform between half the context and all of it, or `equal`."""

    rows: int
    context: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    equal: bool = False

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def view(self) -> int:
        """The context, rounded up as runners round it."""
        return -(-self.context // 64) * 64

    @property
    def reach(self) -> int:
        """The bound on lengths that a recorded pass knows; it doubles."""
        return max(MIN_REACH, 1 << (self.context - 1).bit_length())

    @property
    def cache_bytes(self) -> int:
        """Bytes of one layer's keys and values."""
        return 2 * 2 * self.rows * self.kv_heads * self.view * self.dim


SHORT_SHAPES = [
    Shape(rows, SHORT_CONTEXT, width, heads, kv_heads, 128, equal=True)
    for heads, kv_heads, width in ((12, 4, 1), (40, 8, 1), (40, 8, 7))
    for rows in (8, 32)
]
"""Drafting with a small model, and verifying with a large one."""


class Batch:
    """What all layers of one pass share: lengths, masks, and the flat block."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        shortest = shape.context if shape.equal else shape.context // 2
        self.lengths = torch.randint(shortest, shape.context + 1, (shape.rows,), device=device)
        self.positions = self.lengths[:, None] - shape.width + torch.arange(shape.width, device=device)
        self.visible = attention.visible_slots(self.positions, shape.view)
        self.packed_mask = attention.packed_mask(self.visible, shape.group, torch.bfloat16)
        self.mask = attention.additive_mask(self.visible, torch.bfloat16)
        row = torch.arange(shape.rows, device=device)
        self.block = Block(
            tokens=torch.zeros(shape.rows * shape.width, dtype=torch.int64, device=device),
            rows=row.repeat_interleave(shape.width),
            positions=self.positions.flatten(),
            starts=(row * shape.width).int(),
            counts=torch.full_like(row, shape.width).int(),
            max_count=shape.width,
        )

    @cached_property
    def compiled_flex(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """`flex_attention`, compiled for this shape alone, with the block mask of this batch."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        positions, shape = self.positions, self.shape

        def visible(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:  # noqa: ARG001 - torch's signature
            return slot <= positions[row, query]

        mask = create_block_mask(visible, shape.rows, None, shape.width, shape.view, device=self.device.type)
        torch.compiler.reset()  # else the shapes together would exceed the limit of compilations
        return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask, enable_gqa=True)


class Inputs:
    """Queries and one layer's cache, in bfloat16."""

    def __init__(self, batch: Batch) -> None:
        self.batch, shape = batch, batch.shape
        size = (shape.rows, shape.kv_heads, shape.view + 1, shape.dim)  # and a discard slot
        query_size = (shape.rows, shape.width, shape.heads, shape.dim)
        self.q, self.keys, self.values = (
            torch.randn(s, dtype=torch.bfloat16, device=batch.device) for s in (query_size, size, size)
        )
        self.views = (self.q.transpose(1, 2), self.keys[:, :, : shape.view], self.values[:, :, : shape.view])

    def precise(self, row: int) -> Tensor:
        """One row's result in float32, `[width, heads, dim]`."""
        query, key, value = (states[row].float() for states in self.views)
        key, value = (states.repeat_interleave(self.batch.shape.group, 0) for states in (key, value))
        scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(~self.batch.visible[row], float("-inf")).softmax(-1)
        return (weights @ value).transpose(0, 1)


def packed_sdpa(inputs: Inputs) -> Launch:
    """`hf_dsde.execution.attention.packed_gqa_attention`, what the eager runner uses."""
    query, keys, values = inputs.views
    module, mask = nn.Identity(), inputs.batch.packed_mask
    return lambda: attention.packed_gqa_attention(module, query, keys, values, mask)[0]


def stock_sdpa(inputs: Inputs) -> Launch:
    """PyTorch's attention with `enable_gqa` and an added mask."""
    query, keys, values = inputs.views
    call = partial(nn.functional.scaled_dot_product_attention, attn_mask=inputs.batch.mask, enable_gqa=True)
    return lambda: call(query, keys, values).transpose(1, 2)


def flex(inputs: Inputs) -> Launch:
    """Compiled `flex_attention` with a block mask."""
    query, keys, values = inputs.views
    call = inputs.batch.compiled_flex
    return lambda: call(query, keys, values).transpose(1, 2)


def varlen(inputs: Inputs) -> Launch:
    """`varlen_attn`, over keys and values that were packed without gaps beforehand, at no charge."""
    from torch.nn.attention.varlen import varlen_attn

    batch = inputs.batch

    def pack(states: Tensor) -> Tensor:
        rows = [row[:, :length] for row, length in zip(states, batch.lengths.tolist(), strict=True)]
        return torch.cat(rows, dim=1).transpose(0, 1).contiguous()

    keys, values, query = pack(inputs.keys), pack(inputs.values), inputs.q.flatten(0, 1)
    width = batch.shape.width
    ends = nn.functional.pad(batch.lengths.cumsum(0), (1, 0)).int()
    starts = torch.arange(0, len(query) + 1, width, device=query.device, dtype=torch.int32)
    # Causality was a flag before it became a window.
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    call = partial(varlen_attn, max_q=width, max_k=batch.shape.view, **options)
    return lambda: call(query, keys, values, cu_seq_q=starts, cu_seq_k=ends).view(inputs.q.shape)


def ragged(inputs: Inputs, plan: LaunchPlan | None = None) -> Launch:
    """`hf_dsde.kernels.elementwise.ragged_attention`; in a launch of a given shape, if one is given."""
    from hf_dsde.kernels.attention import launch_attention, ragged_attention

    shape, size = inputs.batch.shape, inputs.q.shape
    common = (inputs.q.flatten(0, 1), inputs.keys, inputs.values, inputs.batch.block, shape.dim**-0.5, None)
    if plan is None:
        return lambda: ragged_attention(*common, shape.reach).view(size)
    return lambda: launch_attention(*common, plan).view(size)


VARIANTS: dict[str, Callable[[Inputs], Launch]] = {
    "packed_sdpa": packed_sdpa,
    "stock_sdpa": stock_sdpa,
    "flex": flex,
    "varlen_prepacked": varlen,
    "ragged_kernel": ragged,
}


def main(
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result there, as JSON.")] = None,
    flex_attention: Annotated[bool, typer.Option(help="Also compile flex_attention, up to context 4096.")] = True,
    sweep: Annotated[bool, typer.Option(help="Also try other launch shapes of our kernel.")] = False,
    quick: Annotated[bool, typer.Option(help="Only width 1 and context 512.")] = False,
    short: Annotated[bool, typer.Option(help="Only 330 slots a row, and of others only what the runners use.")] = False,
    seed: Annotated[int, typer.Option(help="Of lengths and contents.")] = 0,
) -> None:
    """Time every implementation on every shape; needs a CUDA device."""
    if not torch.cuda.is_available():
        msg = "this measures kernels on a GPU, and torch sees no CUDA device. Run it on a machine that has one."
        raise typer.BadParameter(msg)
    device = torch.device("cuda")
    torch.manual_seed(seed)
    bandwidth = copy_bandwidth(device)
    results = []
    shapes = SHORT_SHAPES if short else _shapes(quick=quick)
    for shape in track(shapes, "Measuring", console=Console(stderr=True)):
        compiled = flex_attention and shape.context <= 4096 and not shape.equal
        names = [name for name in VARIANTS if name != "flex" or compiled]
        names = ["packed_sdpa", "ragged_kernel"] if short else names
        results.append(_measure(shape, names, bandwidth, device, sweep=sweep))
        torch.cuda.empty_cache()
    console = Console(width=160)
    console.print(_table(results))
    if sweep:
        for result in results:
            console.print(_sweep_table(result))
    if output is not None:
        result = {
            "provenance": provenance.collect(device),
            "settings": {"dtype": "bfloat16", "seed": seed, "copy_bytes_per_second": bandwidth},
            "note": "varlen_prepacked is the kernel alone, over keys and values that were packed beforehand",
            "results": results,
        }
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _shapes(*, quick: bool) -> list[Shape]:
    """Short texts first, then those that grow with `contexts`."""
    contexts, widths = ((512,), (1,)) if quick else ((512, 4096, 16384), (1, 6))
    large = [Shape(r, c, w, 32, 8, 128) for c in contexts for r in (1, 8, 32) for w in widths]
    small = [Shape(r, 512, w, 12, 4, 128) for r in (1, 8, 32) for w in widths]
    return [*SHORT_SHAPES, *large, *small]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy of 1 GiB, the best of ten."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [_seconds(lambda: target.copy_(source)) for _ in range(10)]
    return 2 * source.numel() / min(seconds)


def _seconds(work: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end)


def _measure(shape: Shape, names: list[str], bandwidth: float, device: torch.device, *, sweep: bool) -> dict[str, Any]:
    batch = Batch(shape, device)
    caches = max(1, min(96, -(-ROTATED_BYTES // shape.cache_bytes)))
    inputs = [Inputs(batch) for _ in range(caches)]
    read = 2 * 2 * int(batch.lengths.sum()) * shape.kv_heads * shape.dim
    result: dict[str, Any] = {**vars(shape), "caches": caches, "floor_microseconds": 1e6 * read / bandwidth}
    result["variants"] = {name: _tried(VARIANTS[name], inputs) for name in names}
    if sweep:
        result["sweep"] = [
            {**vars(plan), **_tried(partial(ragged, plan=plan), inputs)} for plan in _neighbours(shape, device)
        ]
    return result


def _tried(variant: Callable[[Inputs], Launch], inputs: list[Inputs]) -> dict[str, Any]:
    """Time and error of a variant, or why it failed; one that fails must not stop the others."""
    try:
        launches = [variant(given) for given in inputs]
        error = max(
            float((launches[0]()[row].float() - inputs[0].precise(row)).abs().max())
            for row in range(min(4, inputs[0].batch.shape.rows))
        )
        return {"microseconds": _graph_microseconds(launches), "largest_error": error}
    except Exception as failure:  # noqa: BLE001 - any failure is a result here
        torch.cuda.synchronize()
        return {"failure": f"{type(failure).__name__}: {failure}"[:2000]}


def _graph_microseconds(launches: list[Launch], replays: int = 9) -> float:
    """Median microseconds of a launch, over replays of one graph that takes about 5 ms."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in (*launches[:3], launches[0]):
            launch()
    stream.synchronize()
    once = _seconds(launches[0])
    rounds = max(1, min(max(4, int(5e-3 / once)), 192) // len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    graph.replay()
    times = [_seconds(graph.replay) for _ in range(replays)]
    return 1e6 * median(times) / (rounds * len(launches))


def _neighbours(shape: Shape, device: torch.device) -> list[LaunchPlan]:
    """Launch shapes that differ from the chosen one in one respect; of short texts, also without a merge."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    sizes = (shape.width * shape.group, shape.rows * shape.kv_heads, shape.reach, shape.dim, 2, processors)
    chosen = plan_launch(*sizes, times=tuning_of(device).attention)
    if shape.context <= SHORT_CONTEXT:  # few, since each is another compilation
        plans = [chosen, *(replace(chosen, splits=splits) for splits in (1, 2, 4))]
        whole = replace(chosen, splits=1)
        plans += [replace(whole, block_n=32), replace(whole, block_n=128, stages=2), replace(whole, stages=4)]
        plans += [replace(whole, warps=2 if shape.width == 1 else 8)]
        return list(dict.fromkeys(plans))
    plans = [replace(chosen, splits=1 << power) for power in range(7) if shape.view >> power >= 64]
    plans += [replace(chosen, block_n=size) for size in (32, 64, 128)]
    plans += [replace(chosen, warps=warps) for warps in (2, 4, 8)]
    plans += [replace(chosen, stages=stages) for stages in (2, 3, 4)]
    return list(dict.fromkeys(plans))


def _sweep_table(result: dict[str, Any]) -> Table:
    """The launches that were tried for one shape, the fastest first."""
    heads = f"{result['heads']}/{result['kv_heads']}/{result['dim']}"
    title = f"{result['rows']} rows of up to {result['context']}, width {result['width']}, heads {heads}"
    names = ("splits", "block_m", "block_n", "warps", "stages")
    table = Table(*names, "µs", "error", title=title, title_justify="left")
    for entry in sorted(result["sweep"], key=lambda entry: entry.get("microseconds", float("inf"))):
        time = f"{entry['microseconds']:.2f}" if "microseconds" in entry else "failed"
        error = f"{entry.get('largest_error', float('nan')):.4f}"
        table.add_row(*(str(entry[name]) for name in names), time, error)
    return table


def _table(results: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for result in results for name in result["variants"]))
    table = Table("rows", "context", "width", "heads", "floor, µs", *(f"{name}, µs" for name in names), "error of ours")
    for result in results:
        variants = result["variants"]
        cells = [
            f"{variants[name]['microseconds']:.1f}" if "microseconds" in variants.get(name, {}) else
            ("failed" if name in variants else "-")
            for name in names
        ]  # fmt: skip
        heads = f"{result['heads']}/{result['kv_heads']}/{result['dim']}"
        error = variants["ragged_kernel"].get("largest_error", float("nan"))
        sizes = (str(result[key]) for key in ("rows", "context", "width"))
        table.add_row(*sizes, heads, f"{result['floor_microseconds']:.1f}", *cells, f"{error:.4f}")
    return table


if __name__ == "__main__":
    typer.run(main)
