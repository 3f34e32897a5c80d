"""Products of few tokens with weights of four bits: our kernel against bitsandbytes' own, over rotating weights.

python benchmarks/four_bit_linear.py --sweep --output benchmarks/results/four_bit_products_h200.json
python benchmarks/four_bit_linear.py --sweep --shape "32 4 4 4" --shape "64 1 4 5" --splits 1 --splits 2

As `skinny_linear.py` does: every time is the median over replays of a CUDA graph that holds one launch per set of
weights, as many sets as exceed the L2 cache several times. Weights are nf4 with double quantisation, those of an 8B
model. Without `--sweep` only the planned launch is timed.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from skinny_linear import ROTATED_BYTES, _tried
from torch import Tensor

from hf_dsde.execution.four_bit_modules import four_bits_of
from hf_dsde.kernels.four_bit_plan import FourBitPlan, plan_four_bits
from hf_dsde.kernels.four_bit_weights import FourBits, dequantised
from hf_dsde.kernels.launching import shared_memory
from hf_dsde.measurement import provenance
from hf_dsde.utils.tuning import tuning_of

SIZES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
"""Rows and elements of a row."""
TOKENS = (1, 4, 8, 32, 64)
SHAPES = (
    "16 4 4 4", "16 8 8 3", "32 4 4 3", "32 4 4 5", "32 8 8 3", "32 2 2 5", "64 4 4 3", "64 1 4 5", "128 1 4 5",
)  # fmt: skip
"""Rows per program, slices at once, warps, and stages, of the launches that a sweep tries."""
SPLITS = (1, 2, 4)


def main(
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result there, as JSON.")] = None,
    sweep: Annotated[bool, typer.Option(help="Also try other launches than the planned ones.")] = False,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Numbers of tokens; 1, 4, 8, 32 and 64 unless given.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Shapes of a sweep: rows, slices, warps, stages.")] = None,
    splits: Annotated[
        list[int] | None, typer.Option(help="Parts of the inner dimension; 1, 2, 4 unless given.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of tokens.")] = "bfloat16",
    seconds: Annotated[float, typer.Option(help="No further product is begun after this time.")] = 240.0,
) -> None:
    """Time every product; needs a CUDA device and bitsandbytes."""
    if not torch.cuda.is_available():
        msg = "this measures kernels on a GPU, and torch sees no CUDA device. Run it on a machine that has one."
        raise typer.BadParameter(msg)
    device, began = torch.device("cuda", 0), time.monotonic()
    torch.manual_seed(0)
    console, results = Console(width=130), list[dict[str, Any]]()
    counts = tokens or TOKENS
    asked = [tuple(map(int, each.split())) for each in shape or SHAPES] if sweep else []
    for rows, width in SIZES:
        modules = _modules(rows, width, device, getattr(torch, dtype))
        for count in counts:
            if time.monotonic() - began > seconds:
                console.print(f"not measured, for lack of time: {rows} x {width}, {count} tokens")
                continue
            results.append(_measure(count, modules, asked, splits or SPLITS))
            console.print(_table(results[-1]))
        del modules
    console.print(f"{time.monotonic() - began:.0f} s in all")
    if output is not None:
        settings = {"dtype": dtype, "kind": "nf4", "nested": True, "rotated_bytes": ROTATED_BYTES}
        result = {"provenance": provenance.collect(device), "settings": settings, "results": results}
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _modules(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """At least two, and as many as exceed the cache."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    found = []
    for _ in range(max(2, -(-ROTATED_BYTES // (rows * width // 2)))):
        values = torch.empty(rows, width, dtype=dtype, device=device).normal_(0, width**-0.5)
        module = Linear4bit(width, rows, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta")
        module.weight = Params4bit(values.cpu(), requires_grad=False, quant_type="nf4")
        found.append(module.to(device))
    return found


def _measure(tokens: int, modules: list[Any], asked: list[tuple[int, ...]], splits: list[int] | tuple[int, ...]) -> Any:
    from hf_dsde.kernels.four_bits import launch_four_bits

    first = modules[0]
    device, dtype = first.weight.device, first.compute_dtype
    weights = [weight for module in modules if (weight := four_bits_of(module, dtype)) is not None]
    assert len(weights) == len(modules)
    rows, width = weights[0].rows, weights[0].width
    x = torch.randn(tokens, width, dtype=dtype, device=device)
    planned = plan_four_bits(tokens, rows, width, shared=shared_memory(device), tuning=tuning_of(device))
    plans = [planned, *(FourBitPlan(planned.block_m, *each, parts) for each in asked for parts in splits)]
    expected = [x.float() @ dequantised(weights[0], torch.float32).T]
    read = rows * width // 2
    baseline = _tried([partial(_theirs, x, module) for module in modules], expected, read)
    found = []
    for plan in dict.fromkeys(plans):

        def ours(weight: FourBits, plan: FourBitPlan = plan) -> list[Tensor]:
            return [launch_four_bits(x, weight, None, plan)]

        timed = _tried([partial(ours, weight) for weight in weights], expected, read)
        found.append({**vars(plan), "planned": plan == planned, **timed})
    return {"rows": rows, "width": width, "tokens": tokens, "bitsandbytes": baseline, "launches": found}


def _theirs(x: Tensor, module: Any) -> list[Tensor]:
    with torch.no_grad():
        return [module(x)]


def _table(result: dict[str, Any]) -> Table:
    names = ("block_m", "block_n", "slices", "warps", "stages", "splits")
    title = f"{result['rows']} x {result['width']}, {result['tokens']} tokens"
    table = Table(" ".join(names), "µs", "GB/s", "error", "", title=title, title_justify="left")
    entries = sorted(result["launches"], key=lambda entry: entry.get("microseconds", float("inf")))
    for entry in (
        result["bitsandbytes"],
        *[each for place, each in enumerate(entries) if place < 8 or each["planned"]],
    ):
        name = " ".join(str(entry[each]) for each in names) if "block_m" in entry else "bitsandbytes"
        if "failure" in entry:
            table.add_row(name, "failed", "", "", entry["failure"][:60])
            continue
        numbers = (f"{entry['microseconds']:.2f}", f"{entry['gigabytes_per_second']:.0f}")
        table.add_row(name, *numbers, f"{entry['largest_error']:.4f}", "planned" if entry.get("planned") else "")
    return table


if __name__ == "__main__":
    typer.run(main)
