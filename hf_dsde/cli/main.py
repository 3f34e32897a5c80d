"""The command line: arguments in, `demo` or `pairs` at work, rich output out. Nothing is computed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hf_dsde import pairs
from hf_dsde.cli.bench import bench_command, bench_prompts_command, bench_show_command
from hf_dsde.cli.demo import run as demo
from hf_dsde.cli.demo import view as demo_view
from hf_dsde.cli.demo.prompts import DemoPrompt
from hf_dsde.cli.export import export_generate_command
from hf_dsde.cli.generate import generate_command
from hf_dsde.cli.options import DeviceOption, Dtype, progress
from hf_dsde.cli.profile import profile_command
from hf_dsde.cli.replay import replay_command
from hf_dsde.cli.trace import trace_command
from hf_dsde.config import SpeculationConfig
from hf_dsde.policies import available_policies

app = typer.Typer(
    help="Batched assisted generation with a draft length per sequence.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _check_policies(names: list[str]) -> list[str]:
    for name in names:
        if name not in available_policies():
            raise typer.BadParameter(f"{name!r} is no policy; take one of {', '.join(available_policies())}")
    return names


NewTokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Limit of every answer.")]
JsonOption = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the result there.")]


@app.command("demo")
def demo_command(
    device: DeviceOption,
    dtype: Annotated[list[Dtype], typer.Option("--dtype", help="Repeat for several.")] = [Dtype.FLOAT32],  # noqa: B006
    max_new_tokens: NewTokensOption = 64,
    policy: Annotated[
        list[str], typer.Option(callback=_check_policies, help="Chooses the draft lengths. Repeat for several.")
    ] = ["auto", "dsde"],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of every method.")] = 3,
    json_path: JsonOption = None,
) -> None:
    """Let a real model answer requests one by one and in one batch, plain and with speculation."""
    console = Console()
    options = demo.DemoOptions(
        dtypes=tuple(d.torch for d in dtype),
        methods=tuple(demo.Method(name, SpeculationConfig(name)) for name in policy),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        device=torch.device(device),
    )
    with progress(console) as bar:
        task = bar.add_task("starting", total=options.steps)

        def on_step(description: str) -> None:
            # Advancing when a step begins would count it before it is done.
            bar.update(task, description=description, advance=int(bar.tasks[0].description != "starting"))
            if not console.is_terminal:
                # A log file shows no moving bar, and minutes of silence look like a hang.
                console.print(description, style="dim")

        def on_answer(prompt: DemoPrompt, text: str) -> None:
            console.print(demo_view.answer_view(prompt, text))

        result = demo.run_demo(options, pairs.load_packaged_pair, on_step, on_answer)
        bar.update(task, description="done", advance=1)
    console.print(demo_view.result_view(result))
    if json_path is not None:
        _write_json(json_path, result.to_dict())
        console.print(f"result written to {json_path}")
    if not result.is_exact:
        console.print("Outputs differ from plain generate's in a precision that promises equality.", style="bold red")
        raise typer.Exit(1)


app.command("bench")(bench_command)
app.command("bench-prompts")(bench_prompts_command)
app.command("bench-show")(bench_show_command)
app.command("export-generate")(export_generate_command)
app.command("generate")(generate_command)
app.command("profile")(profile_command)
app.command("replay")(replay_command)
app.command("trace")(trace_command)


def _write_json(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
