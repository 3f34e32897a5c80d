"""`hf-dsde bench`, `bench-show` and `bench-prompts`: arguments in, a sweep at work, a file and tables out."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hf_dsde import pairs as known_pairs
from hf_dsde.bench import pairs as bench_pairs
from hf_dsde.bench import provenance, workloads
from hf_dsde.bench.baselines import BASELINES, parse_baseline
from hf_dsde.bench.methods import Method, names_runner, parse_policy
from hf_dsde.bench.results import OURS, BenchResults
from hf_dsde.bench.sweep import Sweep, SweepOptions
from hf_dsde.bench.view import results_view
from hf_dsde.cli.options import DeviceOption, Dtype, chosen_dtype, progress
from hf_dsde.config import SpeculationConfig
from hf_dsde.pairs import Pair

LOG_WIDTH = 160
BROKEN_OFF = "the run that measured it was broken off"

FileOption = Annotated[Path, typer.Option("--output", dir_okay=False, help="Results file; written after every call.")]


def bench_command(
    *,
    output: FileOption,
    device: DeviceOption,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            "--pair", help=f"One of {', '.join(bench_pairs.PAIRS)}. Repeat for several.", show_default="small"
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Another target: folder or Hub id.")] = None,
    assistant: Annotated[str | None, typer.Option("--assistant-model", help="Its draft: folder or Hub id.")] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            help=f"One of {', '.join(workloads.WORKLOADS)}, or a task of --prompts. Repeat for several.",
            show_default="mix",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            exists=True,
            dir_okay=False,
            help='Prompts as lines of {"prompt": ..., "task": ...}, task optional.',
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", min=1, help="Rows. Repeat for several.", show_default="1, 8")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", min=0.0, help="0 is greedy. Repeat for several.", show_default="0"),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="NAME, static:4, NAME:ARGUMENT=VALUE,..., with +cap after it to draft nothing that costs more than it "
            "brings, +fill to draft as many in every row as in the longest, @suffix, @sssd or @prompt_lookup to draft "
            "out of texts, @suffix+draft to do so beside the pair's draft, and @RUNNER for a runner of its own. Repeat "
            "for several.",
            show_default="dsde",
        ),
    ] = None,
    runner: Annotated[
        list[str] | None,
        typer.Option("--runner", help="Of policies that name none. Repeat for several.", show_default="automatic"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", exists=True, file_okay=False, help="Folder with the speculation_config.json of policies."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="FIELD=VALUE of SpeculationConfig or RuntimeOptions. Repeat for several."),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            help=f"One of {', '.join(BASELINES)}, or another package. Repeat for several.",
            show_default="generate",
        ),
    ] = None,
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Compare policies with each other only.")] = False,
    reference: Annotated[
        list[str] | None,
        typer.Option("--reference", help="Methods to give ratios to.", show_default="all baselines, and static:0"),
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Of every row.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of every method.")] = 3,
    prompt_batches: Annotated[
        int, typer.Option("--prompt-batches", min=1, help="Different batches of prompts that repeats go through.")
    ] = 1,
    warmup_tokens: Annotated[
        int | None, typer.Option("--warmup-tokens", min=1, help="Of untimed calls.", show_default="as timed ones")
    ] = None,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let rows end at their end token, instead of all at --new-tokens.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts' order and of the sampling.")] = 0,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            "--dtype",
            help="Of both models.",
            show_default="bfloat16, float16 on a GPU without bfloat16, float32 on a CPU",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget-seconds", min=0.0, help="No call begins after it; what is left is skipped."),
    ] = None,
    append: Annotated[bool, typer.Option("--append", help="Add to the results file instead of refusing it.")] = False,
    commit: Annotated[
        str | None, typer.Option("--commit", envvar=provenance.COMMIT_VARIABLE, help="Commit of a copy without git.")
    ] = None,
) -> None:
    """Time policies and baselines in turn, over pairs of models, workloads, batch sizes and temperatures."""
    console = _console()
    torch_device = torch.device(device)
    on_cpu = Dtype.FLOAT32 if torch_device.type == "cpu" else None
    torch_dtype = chosen_dtype(dtype or on_cpu, torch_device)
    try:
        methods = _methods(policy, runner, config, setting, _baselines(baseline, none=no_baseline))
        options = SweepOptions(
            methods=methods,
            batches=tuple(batch or (1, 8)),
            temperatures=tuple(temperature or (0.0,)),
            new_tokens=new_tokens,
            repeats=repeats,
            prompt_batches=prompt_batches,
            warmup_tokens=warmup_tokens,
            seed=seed,
            stop_at_eos=stop_at_eos,
            budget_seconds=budget,
        )
        loaders = _loaders(pair, model, assistant, torch_dtype, torch_device)
        chosen = _workloads(workload, prompts, seed)
        results = _results(output, append=append)
    except (ImportError, TypeError, ValueError) as mistake:
        raise typer.BadParameter(str(mistake)) from mistake
    results.references = tuple(dict.fromkeys((*(reference or _references(methods)), *results.references)))
    prompt_counts = {load.name: len(load.texts) for load in chosen}
    results.runs.append(
        {
            "provenance": provenance.collect(torch_device, torch_dtype, commit),
            "settings": options.to_dict() | {"pairs": list(loaders), "prompts": prompt_counts},
        }
    )
    with progress(console) as bar:
        task = bar.add_task("starting", total=None)

        def on_step(what: str) -> None:
            bar.update(task, description=what, advance=1)
            if not console.is_terminal:
                # A log file shows no moving bar, and hours of silence look like a hang.
                console.print(what, style="dim")

        sweep = Sweep(
            options,
            loaders,
            chosen,
            results,
            save=lambda: results.save(output),
            on_step=on_step,
        )
        bar.update(task, total=sweep.steps)
        sweep.run()
    console.print(results_view(results))
    console.print(f"results written to {output}")


def bench_show_command(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Results of `hf-dsde bench`.")],
) -> None:
    """Show a results file of `hf-dsde bench` as tables."""
    try:
        results = BenchResults.load(file)
    except ValueError as mistake:
        raise typer.BadParameter(str(mistake)) from mistake
    _console().print(results_view(results))


def bench_prompts_command(
    output: Annotated[Path, typer.Option("--output", dir_okay=False, help="File of lines of JSON.")],
) -> None:
    """Write all workloads to a file, for `hf-dsde bench --prompts` on a machine without the packages they are from."""
    try:
        prompts = workloads.collect_prompts()
    except ImportError as missing:
        raise typer.BadParameter(str(missing)) from missing
    workloads.save_prompts(prompts, output)
    Console().print(f"{len(prompts)} prompts written to {output}")


def _console() -> Console:
    """A console that is wide enough for the tables where nothing else says how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, LOG_WIDTH))


def _methods(
    policies: list[str] | None,
    runners: list[str] | None,
    config: Path | None,
    settings: list[str] | None,
    baselines: list[str],
) -> tuple[Method, ...]:
    """Baselines first, then every policy with every runner; a policy that names its runner comes once."""
    base = None if config is None else SpeculationConfig.from_pretrained(config)
    changes = dict(_setting(text) for text in settings or [])
    ours = [
        parse_policy(text, base, runner, **changes)
        for text in (policies if policies is not None else ["dsde"])
        for runner in (runners if runners and not names_runner(text) else [None])
    ]
    return (*(parse_baseline(name) for name in baselines), *ours)


def _baselines(names: list[str] | None, *, none: bool) -> list[str]:
    if none and names:
        raise ValueError(f"`--no-baseline` forbids what `--baseline` asks for: {', '.join(names)}")
    return [] if none else names or ["generate"]


def _setting(text: str) -> tuple[str, Any]:
    """A field of `SpeculationConfig` or its options and the value, as JSON if it is any."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"`--set` is {text!r}, but FIELD=VALUE is needed: for example 'packed_attention=false'.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _loaders(
    names: list[str] | None, model: str | None, assistant: str | None, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], Pair]]:
    """What loads each pair, by its name."""
    if (model is None) != (assistant is None):
        missing, other = ("--model", "--assistant-model") if model is None else ("--assistant-model", "--model")
        raise ValueError(f"{missing} is missing; {other} needs it, since a draft belongs to its target")
    loaders: dict[str, Callable[[], Pair]] = {}
    for name in names or ([] if model is not None else ["small"]):
        loaders[bench_pairs.check_name(name)] = partial(bench_pairs.load_named_pair, name, dtype, device)
    if model is not None and assistant is not None:
        name = bench_pairs.name_of(model, assistant)
        loaders[name] = partial(known_pairs.load_pair, model, assistant, dtype, device)
    return loaders


def _workloads(names: list[str] | None, prompts: Path | None, seed: int) -> list[workloads.Workload]:
    given = None if prompts is None else workloads.read_prompt_file(prompts)
    return [
        workloads.Workload(name, workloads.prompts_of(name) if given is None else given, seed)
        for name in dict.fromkeys(names or [workloads.MIX])
    ]


def _results(output: Path, *, append: bool) -> BenchResults:
    """New results, or those of the file with its unfinished cases marked."""
    if not output.exists():
        return BenchResults(references=())
    if not append:
        raise ValueError(f"`--output` is {str(output)!r}, which exists: pass --append to add to it, or another name.")
    results = BenchResults.load(output)
    for case in results.cases:
        wanted = results.runs[case.run]["settings"]["repeats"]
        if len(case.repeats) < wanted and case.error is None and case.skipped is None:
            case.skipped = BROKEN_OFF
    return results


def _references(methods: tuple[Method, ...]) -> list[str]:
    """What ratios are given to unless something else is asked for: all that is not ours, and ours without drafts."""
    return [m.name for m in methods if m.kind != OURS or m.name.partition("@")[0] == "static:0"]
