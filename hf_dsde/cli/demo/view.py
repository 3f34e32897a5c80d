"""How the demo looks in a terminal: answers as they come, then tables, and what the numbers mean."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hf_dsde.cli.demo.prompts import DemoPrompt
from hf_dsde.cli.demo.run import DemoResult, MethodResult, ServingResult, name_of
from hf_dsde.divergence import Verdict

_PROMPT_LENGTH = 90
_STYLES = {Verdict.EQUAL: "green", Verdict.NEAR_TIE: "yellow", Verdict.DIFFERENT: "bold red"}


def answer_view(prompt: DemoPrompt, text: str) -> RenderableType:
    """A request with its answer."""
    first_line = prompt.text.splitlines()[0]
    shown = first_line if len(first_line) <= _PROMPT_LENGTH else first_line[: _PROMPT_LENGTH - 3] + "..."
    return Group(
        Text.assemble("\n", (prompt.kind, "bold cyan"), f": {shown}"), Padding(Text(text or "(nothing)"), (0, 0, 0, 3))
    )


def result_view(result: DemoResult) -> RenderableType:
    """A table for each dtype and serving, with what its numbers mean."""
    parts: list[RenderableType] = []
    for serving in result.servings:
        parts += [Text(), measurements_view(result, serving), *_sentences(serving)]
    if result.options.device.type == "cpu":
        parts.append(
            Text(
                "A CPU's time grows with the tokens in a pass. A GPU's passes wait for memory, so that checking drafts "
                "is nearly free there, and gains are larger.",
                style="dim",
            )
        )
    return Group(*parts)


def measurements_view(result: DemoResult, serving: ServingResult) -> Table:
    """Speed, work and equality of every method."""
    options = result.options
    requests = sum(map(len, serving.serving.batches))
    title = (
        f"{requests} requests {serving.serving.name}: {name_of(serving.dtype)}, {options.max_new_tokens} new tokens, "
        f"median of {options.repeats} (slowest to fastest)\n{result.device_name}"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("method")
    for heading in ("tokens/s", "speed", "tokens per\ntarget pass", "acceptance"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("output against plain")
    for method in serving.methods:
        slowest, fastest = method.spread
        table.add_row(
            method.name,
            f"{method.tokens_per_second:.1f} ({slowest:.1f} to {fastest:.1f})",
            f"{serving.speedup(method):.2f}x",
            f"{method.tokens_per_pass:.2f}",
            _acceptance(method),
            equality_text(method),
        )
    return table


def equality_text(method: MethodResult) -> Text:
    """How many rows are equal, near ties or different; a dash for plain `generate` itself."""
    if method.comparison is None:
        return Text("-")
    counts = [(verdict, method.comparison.count(verdict)) for verdict in Verdict]
    parts = [(f"{count} {verdict.value}", _STYLES[verdict]) for verdict, count in counts if count]
    return Text(", ").join(Text(label, style=style) for label, style in parts)


def _sentences(serving: ServingResult) -> list[RenderableType]:
    """What the table means: the gain or loss of each method with its measured reason, then what differs."""
    sentences: list[RenderableType] = []
    for method in serving.methods:
        statistics = method.statistics
        if statistics is None:
            continue
        sentence = f"{method.name} runs at {serving.speedup(method):.2f} times plain generate's speed."
        plain, draft_step = statistics.plain_step_seconds, statistics.draft_step_seconds
        if plain and draft_step is not None:
            sentence += (
                f" Measured: a draft step costs {draft_step / plain:.2f} of a plain target step and a whole round "
                f"{statistics.round_seconds / plain:.2f}, in which the longest row gains "
                f"{statistics.plain_steps / len(statistics.rounds):.2f} tokens."
            )
        sentences.append(Text(sentence))
        if method.comparison is not None and not method.comparison.is_exact:
            sentences.append(method.comparison.__rich__())
    return sentences


def _acceptance(method: MethodResult) -> str:
    rate = math.nan if method.statistics is None else method.statistics.acceptance_rate
    return "-" if math.isnan(rate) else f"{rate:.1%}"
