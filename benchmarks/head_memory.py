"""Hundreds of calls in which a head drafts, on a CPU with tiny models: what they leave in memory.

Prints the bytes of all tensors, the objects that the garbage collector knows and Python's blocks of memory; fails if
the first two grow after the fifth call.

python benchmarks/head_memory.py
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_dsde
from hf_dsde.heads.eagle3 import Eagle3Head, Eagle3Settings

SETTLED = 5
"""Calls after which nothing may grow."""
VOCABULARY = 64

console = Console()


def pair() -> tuple[LlamaForCausalLM, Eagle3Head]:
    """A random target, and a random head of it."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2)).eval()
    head = Eagle3Head(LlamaConfig(**shape, num_hidden_layers=1), Eagle3Settings((0, 1, 2), 32, VOCABULARY // 2))
    return target, head.eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """One word per token."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", padding_side="left")  # noqa: S106


def held() -> tuple[int, int, int]:
    """Bytes of all tensors, objects, and blocks of memory."""
    gc.collect()
    # `isinstance` would ask each object for its class, and some of torch warn then. Subclasses may have no memory.
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    del tensors
    return sum(sizes.values()), len(gc.get_objects()), sys.getallocatedblocks()


def main(
    calls: Annotated[int, typer.Option(min=2 * SETTLED, help="How many of each kind.")] = 300,
    policy: Annotated[str, typer.Option(help="Decides how much is drafted.")] = "goodput",
) -> None:
    """Call `generate` and stream through a `BatchGenerator`, again and again."""
    warnings.simplefilter("ignore", hf_dsde.SpeculationWarning)
    target, head = pair()
    prompts = torch.tensor([[0, 0, 3, 4], [5, 6, 7, 8]])
    arguments = {"attention_mask": (prompts > 0).long(), "max_new_tokens": 6, "do_sample": False}
    generator = hf_dsde.BatchGenerator(
        target, tokenizer(), assistant_model=head, speculation_policy=policy, batch_size=2, max_new_tokens=4
    )
    enabled = hf_dsde.enable(target)
    ways: dict[str, Callable[[], object]] = {
        "generate": lambda: enabled.generate(prompts, assistant_model=head, speculation_policy=policy, **arguments),
        "stream": lambda: list(generator.stream(["w1 w2", "w3", "w4 w5 w6", "w7 w8"])),
    }
    grown = []
    for name, call in ways.items():
        before = None
        for number in range(1, calls + 1):
            call()
            if number in (1, SETTLED, 10, 50, 100, calls):
                found = held()
                console.print(f"{name}, call {number}: {found[0]:,} bytes, {found[1]:,} objects, {found[2]:,} blocks")
                before = found if number == SETTLED else before
        assert before is not None
        if found[0] > before[0] or found[1] - before[1] >= calls - SETTLED:
            grown.append(name)
    if grown:
        raise SystemExit(f"memory grows with each call of {', '.join(grown)}")


if __name__ == "__main__":
    typer.run(main)
