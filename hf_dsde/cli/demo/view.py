"""How the demo's result looks in a terminal: the answers, a table per dtype, and what the numbers mean."""

from __future__ import annotations

import math

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hf_dsde.cli.demo.run import DemoResult, DtypeResult, MethodResult
from hf_dsde.divergence import Verdict

_PROMPT_LENGTH = 90
_STYLES = {Verdict.EQUAL: "green", Verdict.NEAR_TIE: "yellow", Verdict.DIFFERENT: "bold red"}


def result_view(result: DemoResult) -> RenderableType:
    """The whole result: answers of the first dtype, then the tables."""
    parts: list[RenderableType] = [answers_view(result, result.dtypes[0]), Text()]
    for dtype_result in result.dtypes:
        parts += [measurements_view(result, dtype_result), *_sentences(result, dtype_result), Text()]
    return Group(*parts)


def answers_view(result: DemoResult, dtype_result: DtypeResult) -> RenderableType:
    """Each request with its answer; methods whose answer is the same share it."""
    parts: list[RenderableType] = [Text(f"Answers in {_name(dtype_result.dtype)}", style="bold")]
    for row, (prompt, length) in enumerate(zip(result.options.prompts, result.prompt_lengths, strict=True)):
        first_line = prompt.text.splitlines()[0]
        shown = first_line if len(first_line) <= _PROMPT_LENGTH else first_line[: _PROMPT_LENGTH - 3] + "..."
        parts.append(Text.assemble("\n", (f"{row + 1}. {prompt.kind}", "bold cyan"), f" ({length} tokens): {shown}"))
        for text, names in _shared_texts(dtype_result, row).items():
            parts.append(Padding(Text(", ".join(names), style="dim"), (0, 0, 0, 3)))
            parts.append(Padding(Text(text), (0, 0, 0, 3)))
    return Group(*parts)


def measurements_view(result: DemoResult, dtype_result: DtypeResult) -> Table:
    """Speed, work and equality of every method."""
    options = result.options
    title = (
        f"{_name(dtype_result.dtype)}, batch {len(options.prompts)}, {options.max_new_tokens} new tokens, "
        f"median of {options.repeats} (slowest to fastest)\n{result.device_name}"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("method")
    for heading in ("tokens/s", "speed", "tokens per\ntarget pass", "acceptance"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("output against plain")
    for method in dtype_result.methods:
        slowest, fastest = method.spread
        table.add_row(
            method.name,
            f"{method.tokens_per_second:.1f} ({slowest:.1f} to {fastest:.1f})",
            f"{dtype_result.speedup(method):.2f}x",
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


def _sentences(result: DemoResult, dtype_result: DtypeResult) -> list[RenderableType]:
    """What the table means: the gain or loss of each method with its measured reason, then what differs."""
    sentences: list[RenderableType] = []
    for method in dtype_result.methods:
        statistics = method.statistics
        if statistics is None:
            continue
        sentence = f"{method.name} runs at {dtype_result.speedup(method):.2f} times plain generate's speed."
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
    if result.options.device.type == "cpu":
        sentences.append(
            Text(
                "A CPU's time grows with the tokens in a pass, so checking drafted tokens is not nearly free here, as "
                "it is on a GPU whose passes wait for memory: gains are smaller, and can be losses.",
                style="dim",
            )
        )
    return sentences


def _shared_texts(dtype_result: DtypeResult, row: int) -> dict[str, list[str]]:
    """The different answers to one request, each with the methods that gave it."""
    texts: dict[str, list[str]] = {}
    for method in dtype_result.methods:
        texts.setdefault(method.texts[row], []).append(method.name)
    return texts


def _acceptance(method: MethodResult) -> str:
    rate = math.nan if method.statistics is None else method.statistics.acceptance_rate
    return "-" if math.isnan(rate) else f"{rate:.1%}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
