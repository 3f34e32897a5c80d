"""A results file as tables for the terminal: one for each pair, workload and temperature.

Numbers are medians over the repeats, with the smallest and the largest after them; of ratios to further references,
only the median. `prompts` is the share of the time that they took.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_dsde.bench.results import BenchResults, CaseResult, Spread

HEADINGS = ("tok/s", "prompts", "acceptance", "tok/round", "warm-up")


def results_view(results: BenchResults) -> RenderableType:
    """All tables of a file, and below them why cases are missing and what methods warned of."""
    groups: dict[tuple[str, str, float], list[CaseResult]] = {}
    for case in results.cases:
        groups.setdefault((case.pair, case.workload, case.temperature), []).append(case)
    parts: list[RenderableType] = [_table(results, *key, cases) for key, cases in groups.items()]
    notes = [note for case in results.cases for note in _notes(case)]
    return Group(*parts, *(Text(note, style="dim") for note in notes))


def _table(
    results: BenchResults, pair: str, workload: str, temperature: float, cases: Sequence[CaseResult]
) -> RenderableType:
    present = {case.method for case in cases}
    references = [name for name in results.references if name in present]
    table = Table("batch", title=f"{pair}, {workload}, temperature {temperature:g}")
    table.add_column("method", no_wrap=True)
    for heading in (HEADINGS[0], *(f"x {name}" for name in references), *HEADINGS[1:]):
        table.add_column(heading, justify="right")
    batches = dict.fromkeys(case.batch for case in cases)
    for batch in batches:
        # Methods side by side within a batch, in the order in which they were asked for.
        for case in (case for case in cases if case.batch == batch):
            table.add_row(str(batch), case.method, *_cells(results, case, references))
        table.add_section()
    return table


def _cells(results: BenchResults, case: CaseResult, references: Sequence[str]) -> list[str]:
    statistics = case.statistics or {}
    ratios = [None if name == case.method else results.ratio(case, name) for name in references]
    speed = _written(case.tokens_per_second, 1)
    if case.error is not None or case.skipped is not None:
        why = "failed" if case.error is not None else "skipped"
        speed = f"{speed} {why}".strip()
    return [
        speed,
        *(_written(ratio, 2) for ratio in ratios[:1]),
        *(_number(None if ratio is None else ratio.median, 2) for ratio in ratios[1:]),
        "" if case.prefill_share is None else f"{case.prefill_share.median:.0%}",
        _number(statistics.get("acceptance_rate"), 2),
        _number(statistics.get("tokens_per_round"), 2),
        "" if case.warmup_seconds is None else f"{case.warmup_seconds:.1f} s",
    ]


def _notes(case: CaseResult) -> list[str]:
    """Why a case is missing or broke off, and what its method warned of, each in one line."""
    where = f"{case.pair}, {case.workload}, batch {case.batch}, T={case.temperature:g}, {case.method}"
    reasons = {"failed": case.error, "skipped": case.skipped}
    notes = [f"{where} {what}: {reason}" for what, reason in reasons.items() if reason is not None]
    return [" ".join(note.split()) for note in (*notes, *(f"{where} warned: {text}" for text in case.warnings))]


def _written(spread: Spread | None, digits: int) -> str:
    """`median [smallest..largest]`, or nothing."""
    if spread is None:
        return ""
    return f"{spread.median:.{digits}f} [{spread.smallest:.{digits}f}..{spread.largest:.{digits}f}]"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
