"""The command `hf-dsde trace`: arguments in, a recorded trace and its means out. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_dsde import pairs
from hf_dsde.cli.options import DeviceOption, DraftOption, Dtype, ModelOption, named_pair, progress
from hf_dsde.drafting.rounded_copy import rounded_copy
from hf_dsde.trace import TaskSummary, load_trace, read_prompts, record_trace, summarise
from hf_dsde.trace.record import TEMPERATURES
from hf_dsde.trace.writer import FLOAT32_MANTISSA_BITS, MINIMUM_MANTISSA_BITS

PACKAGED_TARGET = "SmolLM2-135M-Instruct"


def trace_command(
    *,
    prompts: Annotated[
        Path,
        typer.Option(
            "--prompts",
            exists=True,
            dir_okay=False,
            help='Prompts: {"task": ..., "prompt": ...} per line in a .jsonl file, else plain lines.',
        ),
    ],
    output: Annotated[Path, typer.Option("--output", file_okay=False, help="Folder of the trace; new or empty.")],
    device: DeviceOption,
    model: ModelOption = None,
    draft: DraftOption = None,
    rounded_draft: Annotated[
        int | None,
        typer.Option("--rounded-draft", min=2, max=8, help="Draft with the target's own copy in so many bits instead."),
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option("--temperature", help="0 or 1; repeat for both.", show_default="both")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Limit of every answer.")] = 200,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts per batch.")] = 8,
    draft_length: Annotated[int, typer.Option("--draft-length", min=1, help="Tokens drafted per round.")] = 8,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Precision of both models.")] = Dtype.FLOAT32,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the sampling.")] = 0,
    tokens: Annotated[bool, typer.Option("--tokens/--no-tokens", help="Whether the trace names tokens.")] = True,
    mantissa_bits: Annotated[
        int,
        typer.Option(
            "--mantissa-bits",
            min=MINIMUM_MANTISSA_BITS,
            max=FLOAT32_MANTISSA_BITS,
            help="Precision of the stored scalars: 11 bits halve the files.",
        ),
    ] = FLOAT32_MANTISSA_BITS,
) -> None:
    """Record what a target and a draft think of every position of the target's own answers."""
    console = Console()
    try:
        requests = read_prompts(prompts)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--prompts") from error
    pair = _load_pair(model, draft, rounded_draft, dtype.torch, torch.device(device))
    temperatures = temperature or list(TEMPERATURES)
    with progress(console) as bar:
        task = bar.add_task("answering", total=len(requests) * len(temperatures))
        try:
            record_trace(
                pair,
                requests,
                output,
                temperatures=temperatures,
                max_new_tokens=max_new_tokens,
                batch_size=batch_size,
                draft_length=draft_length,
                seed=seed,
                tokens=tokens,
                mantissa_bits=mantissa_bits,
                names=_names(model, draft, rounded_draft),
                on_batch=lambda sequences: bar.advance(task, sequences),
            )
        except (FileExistsError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error
    console.print(summary_table(summarise(load_trace(output))))
    console.print(f"trace written to {output}")


def summary_table(summaries: list[TaskSummary]) -> Table:
    """The means per task and temperature as a table."""
    table = Table("task", "temperature", title="Trace")
    for heading in ("answers", "tokens", "agreement", "overlap", "KLD", "reverse KLD", "accepted per round"):
        table.add_column(heading, justify="right")
    for line in summaries:
        numbers = (line.agreement, line.overlap, line.kld, line.reverse_kld, line.accepted_per_round)
        table.add_row(
            line.task,
            f"{line.temperature:g}",
            str(line.sequences),
            str(line.positions),
            *(f"{number:.3f}" for number in numbers),
        )
    return table


def _load_pair(
    model: str | None, draft: str | None, rounded_draft: int | None, dtype: torch.dtype, device: torch.device
) -> pairs.Pair:
    """The pair named, or the packaged one; with a rounded copy in the draft's place where that is asked for."""
    if rounded_draft is not None:
        if draft is not None:
            raise typer.BadParameter("--draft and --rounded-draft both name a draft; give one of them")
        # The target stands in for its draft, which is replaced.
        pair = (
            pairs.load_packaged_pair(dtype, device) if model is None else pairs.load_pair(model, model, dtype, device)
        )
        return pairs.Pair(pair.target, rounded_copy(pair.target, rounded_draft), pair.tokenizer)
    return named_pair(model, draft, dtype, device)


def _names(model: str | None, draft: str | None, rounded_draft: int | None) -> dict[str, str]:
    """What the trace calls the models: a folder by its last part, since the rest is of one machine only."""
    target = PACKAGED_TARGET if model is None else _short(model)
    if rounded_draft is not None:
        return {"target": target, "draft": f"{target}, layers rounded to {rounded_draft} bits in groups of 64"}
    return {"target": target, "draft": pairs.SHIPPED_HEAD if draft is None else _short(draft)}


def _short(name: str) -> str:
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name
