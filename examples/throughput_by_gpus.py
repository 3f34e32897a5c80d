"""One batch job on one GPU and on several: new tokens per second, and whether they are as many times more.

    python examples/throughput_by_gpus.py compare --pair 8B/deep-1B-strong --prompts prompts.jsonl --gpus 2
    python examples/throughput_by_gpus.py spread --pair 8B/deep-1B-strong --prompts prompts.jsonl

`compare` launches the job with one process and with one per GPU. Every process loads the pair on its own GPU and warms
up; then all begin at the same time, and what counts are the tokens of all of them over the seconds of the slowest.

`spread` puts one pair on two GPUs, the draft on the second one or the target on both, and compares texts with those of
one GPU. On a machine without GPUs `compare` runs on the CPU.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_dsde import BatchGenerator
from hf_dsde.batch.input_rows import read_rows
from hf_dsde.batch.job import process_state
from hf_dsde.batch.output import read_results
from hf_dsde.bench.pairs import load_named_pair
from hf_dsde.pairs import Pair, load_pair

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

PairName = Annotated[str | None, typer.Option("--pair", help="A pair of `hf_dsde.bench.pairs`.")]
Model = Annotated[str | None, typer.Option(help="Target: a folder or a Hub id, instead of a pair.")]
AssistantModel = Annotated[str | None, typer.Option(help="Its draft.")]
Prompts = Annotated[Path, typer.Option(help="File of prompts.", exists=True)]
Rows = Annotated[int | None, typer.Option(min=1, help="Rows of the job; prompts are repeated or left out.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows of each process's batch.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="The most tokens behind each prompt.")]
Policy = Annotated[str, typer.Option(help="How many tokens each row drafts.")]
DType = Annotated[str, typer.Option(help="Of both models.")]


@dataclass(frozen=True)
class Share:
    """What one process did in one timed run.

    Attributes:
        tokens: New tokens.
        seconds: From the common start to its last text.
        acceptance_rate: Accepted per drafted token.
        idle_share: Share of row-rounds without anything to generate.
    """

    tokens: int
    seconds: float
    acceptance_rate: float
    idle_share: float


def make_pair(pair: str | None, model: str | None, assistant_model: str | None, dtype: str, device: str) -> Pair:
    """Load a named pair, or a target and a draft."""
    if pair is not None:
        return load_named_pair(pair, getattr(torch, dtype), device)
    if model is None or assistant_model is None:
        raise typer.BadParameter("name a --pair, or both a --model and an --assistant-model")
    return load_pair(model, assistant_model, getattr(torch, dtype), device)


def make_rows(prompts: Path, rows: int | None) -> list[Any]:
    """The rows of the job, in memory: reading is not what is measured."""
    read = list(read_rows(prompts))
    return list(islice(cycle(read), rows or len(read)))


def make_generator(
    pair: Pair, batch_size: int, max_new_tokens: int, policy: str, target: Any = None, draft: Any = None
) -> BatchGenerator:
    """A greedy generator of the pair, or of models in place of its own."""
    return BatchGenerator(
        target or pair.target,
        pair.tokenizer,
        assistant_model=draft or pair.draft,
        speculation_policy=policy,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )


@app.command(hidden=True)
def process(
    *,
    folder: Annotated[Path, typer.Option(help="Where outputs and measurements go.")],
    prompts: Prompts,
    pair: PairName = None,
    model: Model = None,
    assistant_model: AssistantModel = None,
    rows: Rows = None,
    batch_size: BatchSize = 32,
    max_new_tokens: MaxNewTokens = 256,
    policy: Policy = "auto",
    dtype: DType = "bfloat16",
    repeats: int = 1,
) -> None:
    """Be one process of a launch."""
    state = process_state()
    rank, local_rank = (0, 0) if state is None else (state.process_index, state.local_process_index)
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    data = make_rows(prompts, rows)
    generator = make_generator(
        make_pair(pair, model, assistant_model, dtype, device), batch_size, max_new_tokens, policy
    )
    # Costs are measured and passes recorded by then. The longest prompts make caches that none of the others outgrows.
    longest = sorted(data, key=lambda row: len(str(row)), reverse=True)[: 2 * batch_size]
    for _ in generator.stream(longest):
        pass
    shares = []
    for repeat in range(repeats):
        if state is not None:
            state.wait_for_everyone()
        report = generator.run(data, folder / f"out-{repeat}.jsonl", progress=False)
        counts = report.statistics
        shares.append(Share(counts.new_tokens, report.seconds, counts.acceptance_rate, counts.idle_share))
    (folder / f"process-{rank}.json").write_text(json.dumps([asdict(share) for share in shares]))
    if state is not None:
        state.destroy_process_group()


def launch(processes: int, folder: Path, arguments: Sequence[str]) -> list[list[Share]]:
    """Run `process` in some processes; returns the shares of each, by repeat."""
    folder.mkdir()
    several = ["--multi_gpu", "--main_process_port=0"] if processes > 1 else []
    launcher = ["-m", "accelerate.commands.launch", f"--num_processes={processes}", *several]
    settings = ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    own = [__file__, "process", f"--folder={folder}", *arguments]
    subprocess.run([sys.executable, *launcher, *settings, *own], check=True)
    files = [folder / f"process-{rank}.json" for rank in range(processes)]
    return [[Share(**share) for share in json.loads(file.read_text())] for file in files]


def tokens_per_second(shares: Sequence[Sequence[Share]]) -> float:
    """Tokens of all processes over the seconds of the slowest; the median over repeats."""
    runs = zip(*shares, strict=True)
    return median(sum(share.tokens for share in run) / max(share.seconds for share in run) for run in runs)


@app.command()
def compare(
    *,
    prompts: Prompts,
    gpus: Annotated[int, typer.Option(min=2, help="Processes of the second launch.")] = 2,
    pair: PairName = None,
    model: Model = None,
    assistant_model: AssistantModel = None,
    rows: Rows = None,
    batch_size: BatchSize = 32,
    max_new_tokens: MaxNewTokens = 256,
    policy: Policy = "auto",
    dtype: DType = "bfloat16",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each launch; the median counts.")] = 1,
    output: Annotated[Path | None, typer.Option(help="JSON file for the measurements.")] = None,
) -> None:
    """Measure one process, and one per GPU."""
    options: dict[str, Any] = {
        "--prompts": prompts.absolute(),
        "--pair": pair,
        "--model": model,
        "--assistant-model": assistant_model,
        "--rows": rows,
        "--batch-size": batch_size,
        "--max-new-tokens": max_new_tokens,
        "--policy": policy,
        "--dtype": dtype,
        "--repeats": repeats,
    }
    arguments = [f"{name}={value}" for name, value in options.items() if value is not None]
    with tempfile.TemporaryDirectory() as folder:
        shares = {count: launch(count, Path(folder, str(count)), arguments) for count in (1, gpus)}
        texts = [
            {result.index: result.token_ids for result in read_results(Path(folder, str(count), "out-0.jsonl"))}
            for count in shares
        ]
    alone = tokens_per_second(shares[1])
    table = Table("processes", "tokens", "seconds of the slowest", "tokens/s", "ratio", "acceptance", "idle rows")
    for count, of_processes in shares.items():
        last = [share[-1] for share in of_processes]
        rate = tokens_per_second(of_processes)
        table.add_row(
            str(count),
            str(sum(share.tokens for share in last)),
            f"{max(share.seconds for share in last):.2f}",
            f"{rate:.0f}",
            f"{rate / alone:.2f}",
            f"{median(share.acceptance_rate for share in last):.1%}",
            f"{max(share.idle_share for share in last):.1%}",
        )
    console = Console()
    console.print(table)
    console.print(f"{sum(texts[1].get(i) == tokens for i, tokens in texts[0].items())} of {len(texts[0])} texts equal")
    if output is not None:
        measured = {
            "options": {name: str(value) for name, value in options.items() if value is not None},
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "tokens_per_second": {count: tokens_per_second(of) for count, of in shares.items()},
            "shares": {count: [[asdict(s) for s in one] for one in of] for count, of in shares.items()},
        }
        output.write_text(json.dumps(measured, indent=2) + "\n")


@app.command()
def spread(
    *,
    prompts: Prompts,
    devices: Annotated[tuple[str, str], typer.Option(help="Both devices.")] = ("cuda:0", "cuda:1"),
    pair: PairName = None,
    model: Model = None,
    assistant_model: AssistantModel = None,
    rows: Rows = 64,
    batch_size: BatchSize = 16,
    max_new_tokens: MaxNewTokens = 64,
    policy: Policy = "auto",
    dtype: DType = "float32",
) -> None:
    """Compare the texts of a pair on one device with those of a pair on two."""
    made = make_pair(pair, model, assistant_model, dtype, devices[0])
    data = make_rows(prompts, rows)
    settings = (batch_size, max_new_tokens, policy)
    expected = _texts(make_generator(made, *settings), data)
    differing = 0
    # A copy, since a draft of layers only shares embeddings with its target.
    draft: Any = torch.nn.Module.to(copy.deepcopy(made.draft), devices[1])
    differing += _report(
        "draft on the second device", expected, _texts(make_generator(made, *settings, draft=draft), data)
    )
    if torch.device(devices[1]).index is None:
        Console().print("target over both devices: left out, since it needs two devices with numbers")
    else:
        target = _over_both(made.target, devices)
        generator = make_generator(made, *settings, target=target, draft=draft)
        differing += _report("target over both devices", expected, _texts(generator, data))
    raise typer.Exit(int(differing > 0))


def _texts(generator: BatchGenerator, rows: Sequence[Any]) -> list[list[int] | None]:
    return [result.token_ids for result in generator.stream(rows, ordered=True)]


def _report(what: str, expected: Sequence[Any], texts: Sequence[Any]) -> int:
    different = sum(text != other for text, other in zip(expected, texts, strict=True))
    Console().print(f"{what}: {len(texts) - different} of {len(texts)} texts equal")
    return different


def _over_both(target: Any, devices: tuple[str, str]) -> Any:
    """Put the first half of the layers on one device and the rest on the other, as a `device_map` does."""
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    indices = [torch.device(device).index for device in devices]
    whole = target._no_split_modules
    free = get_balanced_memory(target, dict.fromkeys(indices, "1000GB"), no_split_module_classes=whole)
    return dispatch_model(target, infer_auto_device_map(target, free, no_split_module_classes=whole))


if __name__ == "__main__":
    app()
