"""The products of one layer with few tokens: our kernels against the vendor's library, over rotating weights.

python benchmarks/skinny_linear.py --sweep --output benchmarks/results/skinny_linear_h100.json

Every time is the median over replays of a CUDA graph that holds one launch per set of weights, as many sets as exceed
the L2 cache several times, so that weights come from memory as they do in a pass. `qkv` is three products of one input,
`gated` is two and `silu_mul`, `o` and `down` are one each. Without `--sweep` only the planned launch is timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

from hf_dsde.measurement import provenance
from hf_dsde.utils.tuning import tuning_of

ROTATED_BYTES = 256 << 20
"""Sets of weights take turns until they come to this, several times the L2 cache."""
GRAPH_BYTES = 4 << 30
"""About what a graph reads: more than a millisecond, against which starting it is little."""
MODELS = {
    "deep-1B": (1536, 12, 4, 128, 6144),
    "1B": (2048, 32, 8, 64, 8192),
    "8B": (4096, 32, 8, 128, 14336),
    "32B": (5120, 40, 8, 128, 27648),
}
"""Name -> hidden size, heads, key-value heads, size of a head, channels of the MLP."""
TOKENS = (1, 8, 16)
LINEARS_BLOCKS = ((8, 256, 4, 6), (8, 512, 8, 4), (16, 256, 4, 5), (16, 512, 4, 4), (32, 256, 4, 4), (64, 128, 4, 5))
"""Rows of weights per program, elements at once, warps, and stages, of the launches that a sweep tries."""
WIDE_BLOCKS = ((16, 128, 4, 5), (16, 256, 4, 3), (32, 128, 4, 4), (32, 64, 2, 5), (64, 64, 4, 5), (64, 128, 8, 4))
"""More of them for more than 16 tokens, which leave less room for what is read ahead."""
GATED_BLOCKS = ((8, 256, 4, 5), (8, 512, 8, 4), (16, 256, 4, 4), (16, 128, 2, 6), (32, 128, 4, 5), (32, 256, 4, 3))
Launch = Callable[[], Any]


@dataclass(frozen=True)
class Product:
    """One launch: which matrices, and with what."""

    model: str
    kind: str
    rows: tuple[int, ...]
    width: int

    @property
    def bytes(self) -> int:
        """Of all its weights, in a two-byte dtype."""
        return 2 * sum(self.rows) * self.width


def products() -> list[Product]:
    """Everything that is measured, for each number of tokens."""
    found = []
    for name, (hidden, heads, kv_heads, dim, channels) in MODELS.items():
        found += [
            Product(name, "qkv", (heads * dim, kv_heads * dim, kv_heads * dim), hidden),
            Product(name, "gated", (channels, channels), hidden),
            Product(name, "o", (hidden,), heads * dim),
            Product(name, "down", (hidden,), channels),
        ]
    return found


def main(
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result there, as JSON.")] = None,
    sweep: Annotated[bool, typer.Option(help="Also try other launches than the planned ones.")] = False,
    tokens: Annotated[list[int] | None, typer.Option(help="Numbers of tokens; 1, 8 and 16 unless given.")] = None,
    models: Annotated[list[str] | None, typer.Option(help="Some of the models; all unless given.")] = None,
    seconds: Annotated[float, typer.Option(help="No further product is begun after this time.")] = 90.0,
) -> None:
    """Time every product; needs a CUDA device."""
    if not torch.cuda.is_available():
        msg = "this measures kernels on a GPU, and torch sees no CUDA device. Run it on a machine that has one."
        raise typer.BadParameter(msg)
    device, began = torch.device("cuda"), time.monotonic()
    torch.manual_seed(0)
    console, results = Console(width=150), list[dict[str, Any]]()
    counts = tokens or TOKENS
    for product in products():
        if models and product.model not in models:
            continue
        if time.monotonic() - began > seconds:
            console.print(f"not measured, for lack of time: {product.model} {product.kind}")
            continue
        weights = _sets_of_weights(product, device)
        results += [_measure(product, count, weights, sweep=sweep) for count in counts]
        console.print(_table(product, results[-len(counts) :]))
        del weights
    console.print(f"{time.monotonic() - began:.0f} s in all")
    if output is not None:
        result = {
            "provenance": provenance.collect(device),
            "settings": {"dtype": "bfloat16", "rotated_bytes": ROTATED_BYTES},
            "results": results,
        }
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _sets_of_weights(product: Product, device: torch.device) -> list[list[Tensor]]:
    """At least two sets; views of one drawn matrix would share lines of the cache, so each has memory of its own."""
    count = max(2, -(-ROTATED_BYTES // product.bytes))
    scale = product.width**-0.5
    return [
        [
            torch.empty(rows, product.width, dtype=torch.bfloat16, device=device).normal_(0, scale)
            for rows in product.rows
        ]
        for _ in range(count)
    ]


def _measure(product: Product, tokens: int, weights: list[list[Tensor]], *, sweep: bool) -> dict[str, Any]:
    from hf_dsde.kernels import linear as skinny_linear

    gated = product.kind == "gated"
    device = weights[0][0].device
    x = torch.randn(tokens, product.width, dtype=torch.bfloat16, device=device)
    rows, tuning = sum(product.rows), tuning_of(device)
    planned = skinny_linear.plan_product(tokens, rows, product.width, 2, gated=gated, tuning=tuning)
    plans = [planned]
    if sweep:
        blocks = GATED_BLOCKS if gated else LINEARS_BLOCKS
        for block_n, block_k, warps, stages in (*blocks, *(WIDE_BLOCKS if tokens > 16 else ())):
            if block_n >= 64 and rows < 8192:  # fewer programs than processors
                continue
            if block_n == 8 and rows > 16384:
                continue
            shape = skinny_linear.SkinnyPlan(planned.block_m, block_n, block_k, warps, stages)
            plans.append(skinny_linear.fitted(shape, product.width))
    expected = _expected(x, weights[0], gated=gated)
    baseline = _tried([partial(_library, x, given, gated=gated) for given in weights], expected, product.bytes)
    found = [
        {
            **vars(plan),
            "planned": plan == planned,
            **_tried([partial(_ours, x, given, plan, gated=gated) for given in weights], expected, product.bytes),
        }
        for plan in dict.fromkeys(plans)
    ]
    for entry in found:
        if "microseconds" in entry and "microseconds" in baseline:
            entry["ratio_to_library"] = entry["microseconds"] / baseline["microseconds"]
    pays = skinny_linear.pays(tokens, len(product.rows), rows, product.width, torch.bfloat16, device)
    return {**vars(product), "tokens": tokens, "pays": pays, "library": baseline, "launches": found}


def _library(x: Tensor, weights: list[Tensor], *, gated: bool) -> list[Tensor]:
    from hf_dsde.kernels.elementwise import silu_mul

    results = [linear(x, weight) for weight in weights]
    return [silu_mul(*results)] if gated else results


def _ours(x: Tensor, weights: list[Tensor], plan: Any, *, gated: bool) -> list[Tensor]:
    from hf_dsde.kernels.linear import launch_gated, launch_linears

    return [launch_gated(x, *weights, plan)] if gated else launch_linears(x, weights, None, plan)


def _expected(x: Tensor, weights: list[Tensor], *, gated: bool) -> list[Tensor]:
    results = [x.float() @ weight.float().T for weight in weights]
    return [torch.nn.functional.silu(results[0]) * results[1]] if gated else results


def _tried(launches: list[Launch], expected: list[Tensor], read: int) -> dict[str, Any]:
    """Time and error of a launch, or why it failed; one that fails must not stop the others."""
    try:
        error = max(
            float((found.float() - right).abs().max()) for found, right in zip(launches[0](), expected, strict=True)
        )
        microseconds = _graph_microseconds(launches, max(1, round(GRAPH_BYTES / (read * len(launches)))))
    except Exception as failure:  # noqa: BLE001 - any failure is a result here
        torch.cuda.synchronize()
        return {"failure": f"{type(failure).__name__}: {failure}"[:1000]}
    return {"microseconds": microseconds, "gigabytes_per_second": 1e-3 * read / microseconds, "largest_error": error}


def _graph_microseconds(launches: list[Launch], rounds: int, replays: int = 5) -> float:
    """Median microseconds of a launch, over replays of one graph that has every launch `rounds` times."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    times = []
    for _ in range(replays + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * median(times[1:]) / (rounds * len(launches))


def _table(product: Product, results: list[dict[str, Any]]) -> Table:
    title = f"{product.model} {product.kind}: {product.rows} x {product.width}, {product.bytes / 1e6:.1f} MB"
    table = Table("tokens", "launch", "µs", "GB/s", "of library", "error", "", title=title, title_justify="left")
    for result in results:
        library = {**result["library"], "ratio_to_library": 1.0}
        rows = [("library", library)]
        for entry in sorted(result["launches"], key=lambda entry: entry.get("microseconds", float("inf"))):
            sizes = (entry[name] for name in ("block_m", "block_n", "block_k", "warps", "stages"))
            rows.append((" ".join(map(str, sizes)), entry))
        for name, entry in rows:
            if "failure" in entry:
                table.add_row(str(result["tokens"]), name, "failed", entry["failure"][:60])
                continue
            numbers = (f"{entry['microseconds']:.2f}", f"{entry['gigabytes_per_second']:.0f}")
            ratio, error = f"{entry.get('ratio_to_library', float('nan')):.2f}", f"{entry['largest_error']:.4f}"
            mark = ("planned, " + ("used" if result["pays"] else "not used")) if entry.get("planned") else ""
            table.add_row(str(result["tokens"]), name, *numbers, ratio, error, mark)
        table.add_section()
    return table


if __name__ == "__main__":
    typer.run(main)
