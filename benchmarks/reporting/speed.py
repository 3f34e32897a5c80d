"""Tables of speed: drafts over decoding without them, and beside other packages."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from hf_dsde.bench.results import Cell, Spread
from reporting.files import PLAIN, Measured, Results
from reporting.markdown import code, middle, rate, rate_spread, ratio, ratio_spread, span, table

HEAD, LARGE_HEAD, DRAFT = "8B/eagle3", "32B/eagle3", "8B/deep-1B-strong"
MEASURED = {HEAD: "heads_8B.json", LARGE_HEAD: "heads_32B.json", DRAFT: "draft_8B.json"}
"""The newest file of each pair. The first is made by the command at the end of docs/performance.md."""
SETTINGS = ((HEAD, (1, 8, 32, 64)), (LARGE_HEAD, (1, 8, 32)), (DRAFT, (32, 64)))
ROWS = (1, 8, 32, 64)
TRANSFORMERS = ("one_row_lengths_8B_b5af769.json", "lengths_8B_c605079.json", "greedy_12efad1.json")
"""Files in which transformers' own modes were timed, whose speed depends on the host: the fastest is shown."""
GENERATE, COMPILED = "generate", "generate_static"
VLLM, VLLM_HEAD = "vllm_8B.json", ("vllm_head_8B.json", "vllm_head_8B_later.json", "vllm_head_8B_again.json")
VLLM_JOB, GENERATE_BATCH = "vllm_job_8B.json", "generate_batch_8B.json"
SOURCE = "file with its commit, repeats"


def mix(pair: str, rows: int) -> Cell:
    """The setting of most tables: prompts of several kinds, greedy."""
    return Cell(pair, "mix", rows, 0.0)


def source(results: Results, one: Measured) -> str:
    """The file of a row with its commit, if its name does not say it, and how often each method was timed."""
    name, commit = one.file.removesuffix(".json"), str(results.commit(one.file))
    return f"{code(name)}{'' if commit in name else f' ({commit})'}, {one.repeats()}"


def measured(results: Results, pair: str, rows: int) -> Measured:
    """A setting of the first table."""
    found = results.measured([MEASURED[pair]], mix(pair, rows), PLAIN)
    assert found is not None, f"{MEASURED[pair]} has no {rows} rows of {pair}"
    return found


def settings(results: Results) -> Iterator[Measured]:
    """Every row of the first table."""
    yield from (measured(results, pair, rows) for pair, counts in SETTINGS for rows in counts)


def speeds(results: Results) -> str:
    """Tokens per second without drafts, and what drafting makes of it."""
    methods = ("static:2", "static:3", "static:4", "goodput", "dsde", "dsde+cap")

    def row(one: Measured) -> list[str]:
        best = one.best_draft()
        return [
            code(one.cell.pair),
            str(one.cell.batch),
            rate_spread(one.speed(PLAIN)),
            "" if best is None else f"{ratio(one.over(best, PLAIN))} ({code(best)})",
            *(ratio_spread(one.over(method, PLAIN)) for method in methods),
            source(results, one),
        ]

    header = ["pair", "rows", "`static:0`, tokens/s", "best", *map(code, methods), SOURCE]
    return table(header, map(row, settings(results)))


def capped(results: Results) -> str:
    """Extremes of DSDE with the priced cap over the best fixed length, over the rows of the first table."""
    ratios = []
    for one in settings(results):
        over = one.over("dsde+cap", one.best_length())
        if over is not None:
            ratios.append(over.median)
    return span(ratios)


def served(results: Results, file: str, rows: int) -> float | None:
    """Tokens per second of vLLM or `generate_batch`, in the median."""
    found = [cell for cell in results.raw(file)["cells"] if cell["batch"] == rows]
    return median(found[0]["tokens_per_second"]) if found else None


def vllm_with_head(results: Results, rows: int) -> tuple[float, int] | None:
    """Tokens per second of vLLM with the same head, and the number of draft tokens that gave most."""
    found = [
        (speed, results.raw(file)["settings"]["k"]) for file in VLLM_HEAD if (speed := served(results, file, rows))
    ]
    return max(found, default=None)


def generated(results: Results, reference: str, rows: int) -> Spread | None:
    """Tokens per second of a decoding mode of transformers, where it was fastest."""
    found = results.all_measured(TRANSFORMERS, mix(DRAFT, rows), reference)
    speeds = [speed for one in found if (speed := one.speed(reference)) is not None]
    return max(speeds, key=lambda speed: speed.median, default=None)


def best_speed(results: Results, rows: int) -> float:
    """Tokens per second of the best method that drafts with the head."""
    one = measured(results, HEAD, rows)
    best = one.best_draft()
    speed = None if best is None else one.speed(best)
    assert speed is not None
    return speed.median


def over(own: float, other: float | Spread | None) -> str:
    """A speed over another's, of medians, since they were measured in other processes."""
    other = other.median if isinstance(other, Spread) else other
    return "" if other is None else ratio(own / other)


def beside_others(results: Results) -> str:
    """vLLM, and three ways of transformers, beside this package."""

    def row(rows: int) -> list[str]:
        plain = measured(results, HEAD, rows).speed(PLAIN)
        assert plain is not None
        best, vllm, head = best_speed(results, rows), served(results, VLLM, rows), vllm_with_head(results, rows)
        batch = served(results, GENERATE_BATCH, rows)
        own = [rate(vllm), over(plain.median, vllm), over(best, vllm)]
        own += [f"{rate(head[0])} (k = {head[1]})" if head else "", over(best, head[0] if head else None)]
        own += [rate(batch), over(best, batch)]
        for reference in (GENERATE, COMPILED):
            speed = generated(results, reference, rows)
            own += [rate(speed), over(best, speed)]
        return [str(rows), *own]

    header = ["rows", "vLLM", "`static:0` over it", "best over it", "vLLM, same head", "best over it"]
    header += ["`generate_batch`", "best over it", "`generate`", "best over it", "compiled `generate`", "best over it"]
    return table(header, map(row, ROWS))


def readme_speeds(results: Results) -> str:
    """What the package brings, by rows of the batch."""

    def row(rows: int) -> list[str]:
        one = measured(results, HEAD, rows)
        best, speed = one.best_draft(), best_speed(results, rows)
        head = vllm_with_head(results, rows)
        return [
            str(rows),
            over(speed, generated(results, GENERATE, rows)),
            over(speed, generated(results, COMPILED, rows)),
            f"{ratio(one.over(best, PLAIN))} ({code(str(best))})",
            ratio(one.over("dsde+cap", PLAIN)),
            over(speed, served(results, VLLM, rows)),
            over(speed, head[0] if head else None),
        ]

    header = [
        "rows",
        "best drafts over `generate`",
        "over compiled `generate`",
        "over no drafts",
        "`dsde+cap` over no drafts",
    ]
    header += ["best drafts over vLLM", "over vLLM with the same head"]
    return table(header, map(row, ROWS))


def vllm_plain_span(results: Results) -> str:
    """Extremes of `static:0` over vLLM."""
    found = []
    for rows in ROWS:
        plain, other = measured(results, HEAD, rows).speed(PLAIN), served(results, VLLM, rows)
        if plain is not None and other is not None:
            found.append(plain.median / other)
    return span(found)


def generate_spread(results: Results) -> str:
    """The widest spread of `generate` within a setting, largest over smallest."""
    speeds = [generated(results, GENERATE, rows) for rows in ROWS]
    return f"{max(s.largest / s.smallest for s in speeds if s is not None):.2f}"


def served_spread(results: Results) -> str:
    """The widest spread of vLLM and `generate_batch` within a setting, largest over smallest."""
    files = (VLLM, *VLLM_HEAD, GENERATE_BATCH)
    cells = [cell["tokens_per_second"] for file in files for cell in results.raw(file)["cells"]]
    return ratio(max(max(speeds) / min(speeds) for speeds in cells))


def vllm_job(results: Results) -> str:
    """Tokens per second of vLLM over a job."""
    return rate_spread(middle(results.raw(VLLM_JOB)["job"]["tokens_per_second"]))
