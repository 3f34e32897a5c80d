"""What a head brings over targets with other weights: half precisions, four and eight bits, adapters.

Each kind of target decodes plainly and with drafts, both recorded, in turn on the same prompts. The ratio of their
tokens per second is that of one kind with itself; plain milliseconds per round compare kinds.

python benchmarks/quantised.py --prompts prompts.jsonl --output four_bits.json --kind bfloat16 --kind int4
python benchmarks/quantised.py --prompts prompts.jsonl --output float16.json --kind bfloat16 --kind float16
python benchmarks/quantised.py --prompts prompts.jsonl --output lora.json --kind bfloat16 --kind lora --switching
"""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dsde import SpeculationWarning, enable, release_memory
from hf_dsde.bench.methods import Request, parse_policy
from hf_dsde.bench.pairs import load_named_pair
from hf_dsde.bench.provenance import collect
from hf_dsde.bench.workloads import Workload, read_prompt_file
from hf_dsde.pairs import Pair, encode

GROUP = 128
"""Weights that share a scale in four bits."""

console = Console(width=120)


class FourBitLinear(nn.Module):
    """A linear map without bias by torch's own product with four bits a weight: bfloat16, on CUDA from Ampere on."""

    # Of a package that nobody knows, modules are recorded again in each call.
    __module__ = "torchao.four_bits"

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        rows, width = linear.weight.shape
        groups = linear.weight.detach().float().view(rows, -1, GROUP)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = (high - low).clamp_min(1e-6) / 15
        codes = ((groups - low) / scale).round().clamp(0, 15).to(torch.uint8).view(rows, width)
        packed = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
        self.register_buffer("qweight", torch.ops.aten._convert_weight_to_int4pack(packed, 8))
        # The product takes (code - 8) * scale + zero.
        pairs = torch.cat([scale, low + 8 * scale], dim=-1)
        self.register_buffer("scales", pairs.transpose(0, 1).contiguous().to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; any number of leading dimensions."""
        flat = torch.ops.aten._weight_int4pack_mm(x.flatten(0, -2), self.qweight, GROUP, self.scales)
        return flat.unflatten(0, x.shape[:-1])


def four_bits(target: PreTrainedModel) -> PreTrainedModel:
    """Replace the linear maps of the layers, one by one."""
    for name, module in list(target.named_modules()):
        if type(module) is nn.Linear and "lm_head" not in name:
            target.set_submodule(name, FourBitLinear(module))
    return target


def torchao(target: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Quantise weights by torchao."""
    from torchao import quantization

    config = {
        "torchao-int8": quantization.Int8WeightOnlyConfig,
        "torchao-int4": lambda: quantization.Int4WeightOnlyConfig(group_size=GROUP),
        "torchao-float8": quantization.Float8WeightOnlyConfig,
    }[kind]()
    quantization.quantize_(target, config, lambda module, name: type(module) is nn.Linear and "lm_head" not in name)
    return target


def bitsandbytes(target: PreTrainedModel) -> PreTrainedModel:
    """Replace the linear maps of the layers by four bits of bitsandbytes."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in list(target.named_modules()):
        if type(module) is nn.Linear and "lm_head" not in name:
            device, dtype = module.weight.device, module.weight.dtype
            new = Linear4bit(module.in_features, module.out_features, bias=False, compute_dtype=dtype, quant_type="nf4")
            new.weight = Params4bit(module.weight.detach().cpu(), requires_grad=False, quant_type="nf4")
            target.set_submodule(name, new.to(device))
    return target


def lora(target: PreTrainedModel) -> Any:
    """Put two random adapters of rank 16 around all linear maps of the layers."""
    import peft

    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=16, target_modules=modules)
    adapted = peft.get_peft_model(target, config, adapter_name="first")
    adapted.add_adapter("second", config)  # what is trained begins as nothing, so that drafts are accepted as before
    return adapted.eval()


KINDS: dict[str, tuple[torch.dtype, Callable[[PreTrainedModel], Any]]] = {
    "bfloat16": (torch.bfloat16, lambda target: target),
    "float16": (torch.float16, lambda target: target),
    "int4": (torch.bfloat16, four_bits),
    "torchao-int8": (torch.bfloat16, lambda target: torchao(target, "torchao-int8")),
    "torchao-int4": (torch.bfloat16, lambda target: torchao(target, "torchao-int4")),
    "torchao-float8": (torch.bfloat16, lambda target: torchao(target, "torchao-float8")),
    "bitsandbytes-nf4": (torch.bfloat16, bitsandbytes),
    "lora": (torch.bfloat16, lora),
}
"""Dtype and what is done to the target; `int4` needs nothing but torch, the others the package of their name."""


def timed(pair: Pair, inputs: Any, policy: str, request: Request, repeats: int, switch: Callable[[int], Any]) -> Any:
    """Medians of a policy's calls, after one for each adapter that warms up."""
    method, calls = parse_policy(policy), []
    for call in range(-2, repeats):
        switch(call)
        answer = method(pair, inputs, request)
        own = answer.own
        assert own is not None
        if call < 0:
            continue
        spent = own.draft_seconds + own.verify_seconds + own.bookkeeping_seconds
        calls.append(
            {
                "tokens_per_second": own.tokens_per_second,
                "milliseconds_per_round": 1000 * spent / len(own.rounds),
                "accepted_per_drafted": own.accepted / max(own.drafted, 1),
                "tokens_per_row_and_round": own.block_efficiency,
            }
        )
    return {name: median(call[name] for call in calls) for name in calls[0]} | {"calls": calls}


def switched(adapted: Any, call: int) -> None:
    """Use the two adapters in turn."""
    adapted.set_adapter(("first", "second")[call % 2])


def unswitched(call: int) -> None:
    """Leave the target as it is."""


def shown(numbers: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """A line of the table."""
    speed, columns = numbers["tokens_per_second"], ("accepted_per_drafted", "tokens_per_row_and_round")
    return [
        f"{speed:.0f}",
        f"{speed / plain['tokens_per_second']:.2f}",
        f"{numbers['milliseconds_per_round']:.2f}",
        *(f"{numbers[column]:.2f}" for column in columns),
    ]


def main(
    output: Annotated[Path, typer.Option(help="JSON file.")],
    prompts: Annotated[Path, typer.Option(help="Prompts, as `hf-dsde bench-prompts` writes them.")],
    pair: Annotated[str, typer.Option(help="A pair that `hf-dsde bench` knows.")] = "8B/eagle3",
    workload: Annotated[str, typer.Option(help="Which of the prompts.")] = "mix",
    kind: Annotated[list[str], typer.Option(help=f"Of the target: {', '.join(KINDS)}.")] = ["bfloat16", "int4"],  # noqa: B006 - typer copies it
    rows: Annotated[list[int], typer.Option(help="Rows.")] = [1, 8, 32],  # noqa: B006
    policy: Annotated[list[str], typer.Option(help="As in `hf-dsde bench`.")] = ["dsde", "static:3"],  # noqa: B006
    new_tokens: Annotated[int, typer.Option(help="Tokens per row.")] = 128,
    repeats: Annotated[int, typer.Option(help="Timed calls.")] = 3,
    switching: Annotated[
        bool, typer.Option(help="Switch between the two adapters of `lora` before each call.")
    ] = False,
    device: Annotated[str, typer.Option(help="Of both models.")] = "cuda",
) -> None:
    """Measure, print and write."""
    warnings.simplefilter("ignore", SpeculationWarning)
    unknown = [name for name in kind if name not in KINDS]
    if unknown:
        raise typer.BadParameter(f"--kind {unknown[0]!r} is none of {', '.join(KINDS)}")
    chosen, request = Workload(workload, read_prompt_file(prompts)), Request(new_tokens)
    results: dict[str, Any] = {"provenance": collect(device, torch.bfloat16), "pair": pair, "kinds": {}}
    table = Table("target", "rows", "policy", "tokens/s", "over plain", "ms/round", "accepted", "per round", title=pair)
    for name in kind:
        dtype, change = KINDS[name]
        models = load_named_pair(pair, dtype, device)
        target = change(models.target)
        models = Pair(enable(target), models.draft, models.tokenizer)
        switch = partial(switched, target) if switching and name == "lora" else unswitched
        found = results["kinds"][name] = {"bytes": models.target.get_memory_footprint(), "rows": {}}
        for count in rows:
            inputs = encode(models.tokenizer, list(chosen.batch(count, 0))).to(device)
            given = {each: timed(models, inputs, each, request, repeats, switch) for each in ("static:0", *policy)}
            found["rows"][count] = given
            for each, numbers in given.items():
                table.add_row(name, str(count), each, *shown(numbers, given["static:0"]))
            output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        for model in (models.target, models.draft):
            release_memory(model)
        del models, target, switch
        gc.collect()
        torch.cuda.empty_cache()
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
