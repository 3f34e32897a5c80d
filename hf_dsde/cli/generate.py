"""`hf-dsde generate`: arguments in, a job or a stream of results out. The work is done in `hf_dsde.batch`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.text import Text

from hf_dsde.batch.generator import DEFAULT_POLICY, BatchGenerator, RowError
from hf_dsde.batch.input_rows import STANDARD_INPUT, read_rows
from hf_dsde.batch.job import InputRows, process_state
from hf_dsde.batch.output_files import OutputPaths
from hf_dsde.batch.output_lines import as_line
from hf_dsde.batch.progress import JobProgress
from hf_dsde.cli.generate_models import load_models, own_device
from hf_dsde.cli.generate_rows import input_of
from hf_dsde.cli.generate_view import print_errors, print_template_note, result_view, summary
from hf_dsde.cli.options import DeviceOption, DtypeOption, ModelOption, chosen_dtype, usage_errors
from hf_dsde.config import SpeculationConfig
from hf_dsde.utils.checks import check_number

if TYPE_CHECKING:
    from accelerate import PartialState

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended, as shells have it."""
_PROMPTS, _TEXTS, _BATCH, _RESULTS = "Prompts", "Texts", "Batch and memory", "Results"


class Lines(str, Enum):
    """What the lines of standard input are."""

    JSONL = "jsonl"
    TEXT = "text"


class OnError(str, Enum):
    """What a bad row does to the others."""

    RECORD = "record"
    RAISE = "raise"


def generate_command(
    *,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT",
            help="A .jsonl, .ndjson, .json, .txt, .parquet or .csv file of prompts, or - for standard input. A row is "
            "text, chat messages or token ids, or has one of these in a column: messages, prompt, text or input_ids.",
            show_default=False,
        ),
    ] = None,
    model: ModelOption = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--assistant-model",
            "--draft",
            metavar="TEXT",
            help="Its draft: folder, Hub id, or suffix, sssd or prompt_lookup, which draft out of texts. With one of "
            "each, both draft, each where it brings more.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="Policy that chooses the draft lengths.",
            show_default=f"the config's, or {DEFAULT_POLICY}",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--speculation-config", metavar="FOLDER", help="Folder or Hub id of a saved speculation_config.json."
        ),
    ] = None,
    device: DeviceOption,
    dtype: DtypeOption = None,
    device_map: Annotated[
        str | None,
        typer.Option("--device-map", metavar="MAP", help="Spread the named models over devices, such as auto."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", metavar="TEXT", help="Prompt in place of INPUT. Repeat for several.", rich_help_panel=_PROMPTS
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option("--column", metavar="NAME", help="Column that holds the prompts.", rich_help_panel=_PROMPTS),
    ] = None,
    lines: Annotated[
        Lines,
        typer.Option("--lines", help="What lines of standard input are: JSON or prompts.", rich_help_panel=_PROMPTS),
    ] = Lines.JSONL,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put prompts of plain text into the model's chat template, or hand them over as they stand.",
            show_default="chat, if there is a template",
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option("--max-prompt-tokens", min=1, help="Longer prompts become errors.", rich_help_panel=_PROMPTS),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", min=1, help="Of each text; a column of this name wins.", rich_help_panel=_TEXTS
        ),
    ] = 256,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop", metavar="TEXT", help="Ends a text where it appears. Repeat for several.", rich_help_panel=_TEXTS
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the best token; more samples.", rich_help_panel=_TEXTS)
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Sample from the best tokens of this mass.", rich_help_panel=_TEXTS),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of the sampling. Gives the same texts again under policies that do not weigh costs, such as dsde.",
            rich_help_panel=_TEXTS,
        ),
    ] = 0,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Texts under way at a time.", rich_help_panel=_BATCH)
    ] = 16,
    cache_budget: Annotated[
        float | None,
        typer.Option(
            "--cache-budget",
            metavar="GB",
            help="Memory for both models' caches, per device.",
            show_default="80 % of what is free on a GPU",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Load the models, print what memory the job takes and which prompts fit, and generate nothing.",
            rich_help_panel=_BATCH,
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            dir_okay=False,
            help="A .jsonl, .ndjson or .parquet file. If it holds results of this job, the job goes on.",
            show_default="printed, or JSON Lines into a pipe",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="In the order of the prompts.", rich_help_panel=_RESULTS)
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start the job over.", rich_help_panel=_RESULTS)
    ] = False,
    on_error: Annotated[
        OnError,
        typer.Option(
            "--on-error",
            help="Whether a bad row becomes a result with an error, or ends the command.",
            rich_help_panel=_RESULTS,
        ),
    ] = OnError.RECORD,
    progress: Annotated[
        bool, typer.Option("--progress/--no-progress", help="Bar in a terminal.", rich_help_panel=_RESULTS)
    ] = True,
) -> None:
    """Generate from every prompt of a file, of standard input or of the command line.

    Prompts of plain text go into the model's chat template, if it has one, as what
    a user asks; --no-chat hands them over as they stand. Chat messages and token
    ids are the same either way.

    With --output, results are kept in a file, and a command that was interrupted
    goes on when it is run again. Without, they are printed in a terminal, and
    written as JSON Lines where standard output is none.

    Under accelerate launch, the processes share the prompts out.
    """
    state = process_state()
    with usage_errors():
        _check_input(source, prompt, column, dry_run)
        _check_output(output, overwrite, dry_run, from_stream=source == STANDARD_INPUT, state=state)
        speculation = _speculation(policy, config)
        sampling = _sampling(temperature, top_p)
    place = own_device(device, state)
    models = load_models(model, draft, chosen_dtype(dtype, place), place, device_map, state)
    # Processes that draw the same numbers would answer the same prompt with the same text.
    torch.manual_seed(seed + (0 if state is None else state.process_index))
    is_main = state is None or state.is_main_process
    asks = bool(models.tokenizer.chat_template) if chat is None else chat
    with usage_errors():
        generator = BatchGenerator(
            models.target,
            models.tokenizer,
            assistant_model=models.draft,
            speculation_policy=speculation,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            stop_strings=stop or (),
            max_prompt_tokens=max_prompt_tokens,
            column=column,
            chat=asks,
            cache_budget=None if cache_budget is None else int(cache_budget * 1e9),
            on_error=on_error.value,
            **sampling,
        )
    rows = input_of(source, prompt, column, lines.value, whole=output is not None and not dry_run)
    if is_main and asks and chat is None:
        print_template_note()
    if dry_run:
        if is_main:
            _print_plan(generator, rows)
    elif output is None:
        _stream(generator, rows, column, ordered, progress, speculation.policy)
    else:
        _run_job(generator, rows, output, ordered, overwrite, progress, speculation.policy, state)


def _check_input(source: str | None, prompts: list[str] | None, column: str | None, dry_run: bool) -> None:
    """Find out before the models are loaded that the input can be read."""
    if source is not None and prompts:
        raise typer.BadParameter("INPUT and --prompt both name prompts; give one of them")
    if source is None and not prompts and not dry_run:
        raise typer.BadParameter("there is no prompt; give INPUT (a file, or - for standard input) or --prompt TEXT")
    if source is not None and source != STANDARD_INPUT:
        read_rows(source, column)


def _check_output(
    output: Path | None, overwrite: bool, dry_run: bool, *, from_stream: bool, state: PartialState | None
) -> None:
    if output is not None:
        OutputPaths.of(output)
    elif overwrite:
        raise typer.BadParameter("--overwrite needs --output, the file to start over")
    if state is None:
        return
    if output is None and not dry_run:
        raise typer.BadParameter(f"--output is missing; {state.num_processes} processes join their results in it")
    if from_stream:
        raise typer.BadParameter(
            f"standard input cannot be read by each of {state.num_processes} processes; give a file"
        )


def _speculation(policy: str | None, config: str | None) -> SpeculationConfig:
    speculation = SpeculationConfig(DEFAULT_POLICY) if config is None else SpeculationConfig.from_pretrained(config)
    return speculation if policy is None else speculation.replace(policy=policy)


def _sampling(temperature: float, top_p: float | None) -> dict[str, Any]:
    """Arguments of `generate`."""
    if temperature == 0.0:
        if top_p is not None:
            raise typer.BadParameter("--top-p has no meaning without sampling; give a --temperature above 0")
        return {"do_sample": False}
    if top_p is not None:
        check_number("top_p", top_p, 0.0, 1.0, open_minimum=True)
    return {"do_sample": True, "temperature": temperature} | ({} if top_p is None else {"top_p": top_p})


def _print_plan(generator: BatchGenerator, rows: Any) -> None:
    console = Console()
    console.print(generator.memory_plan(rows))
    console.print("The models were loaded for their sizes. Nothing was generated.", style="dim")


def _stream(
    generator: BatchGenerator, rows: Any, column: str | None, ordered: bool, progress: bool, policy: str
) -> None:
    """Show results as they come: texts in a terminal, JSON Lines elsewhere."""
    readable = sys.stdout.isatty()
    console = Console(stderr=not readable)
    under_way: dict[int, Any] = {}

    def noted() -> Iterator[Any]:
        for index, row in InputRows(rows, column).share(0, 1, ()):
            if readable:
                under_way[index] = row
            yield row

    started = time.perf_counter()
    results = generator.stream(noted(), ordered=ordered)
    total = len(rows) if isinstance(rows, list) else None
    try:
        # A bar would run through the texts.
        with JobProgress(generator.statistics, total, 0, None if progress and not readable else False) as bar:
            for result in results:
                if readable:
                    console.print(result_view(result, under_way.pop(result.index), column))
                else:
                    typer.echo(as_line(result.to_dict()), nl=False)
                bar.advance(1)
    except KeyboardInterrupt:
        _end("Interrupted. A job with --output keeps what is finished, and goes on when it is run again.", INTERRUPTED)
    except RowError as error:
        _end(f"error: {error}", 1)
    console.print(summary(generator.statistics, time.perf_counter() - started, policy))
    print_errors(console, generator.statistics)


def _run_job(
    generator: BatchGenerator,
    rows: Any,
    output: Path,
    ordered: bool,
    overwrite: bool,
    progress: bool,
    policy: str,
    state: PartialState | None,
) -> None:
    """Write results to a file, and say what came of it."""
    before = generator.statistics
    try:
        report = generator.run(rows, output, ordered=ordered, overwrite=overwrite, progress=None if progress else False)
    except KeyboardInterrupt:
        again = "again without --overwrite" if overwrite else "again"
        _end(f"Interrupted. What is finished is kept; run the same command {again} to go on.", INTERRUPTED)
    except RowError as error:
        _end(f"error: {error}\nWhat is finished is kept; --on-error record goes on after such rows.", 1)
    except (OSError, RuntimeError, ValueError) as error:
        # Counting begins again when the output is open. What fails later is no mistake in the command.
        if generator.statistics is not before:
            raise
        raise typer.BadParameter(str(error)) from error
    if state is not None and not state.is_main_process:
        return
    console = Console()
    if report.rows:
        console.print(summary(report.statistics, report.seconds, policy))
    share = "" if state is None else f" by the first of {state.num_processes} processes"
    earlier = f", {report.skipped} were finished before" if report.skipped else ""
    closing = f"{report.rows} rows finished{share}{earlier}; results in {report.output}"
    console.print(Text(closing), soft_wrap=True)
    print_errors(console, report.statistics)


def _end(message: str, code: int) -> NoReturn:
    Console(stderr=True).print(Text(message), soft_wrap=True)
    raise typer.Exit(code)
