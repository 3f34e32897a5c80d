"""Tables of speed: this package's methods over one another, and beside other packages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from statistics import median

from hf_dsde.bench.results import Cell
from reporting.files import PLAIN, Measured, Results
from reporting.markdown import code, listed, middle, rate, rate_spread, ratio, ratio_spread, span, table

SMALL, LARGE = "8B/deep-1B-strong", "32B/deep-1B-strong"
GENERATE, COMPILED = "generate", "generate_static"
# Newest first. The first is made by the command at the end of docs/performance.md.
NEWEST = (
    "policies_8B.json",
    "policies_8B_1853f90.json",
    "large_batches_8B_8955a6c.json",
    "large_batches_8B_d34fb29.json",
)
LENGTHS = (
    "lengths_8B_c605079.json",
    "lengths_32B_c605079.json",
    "one_row_lengths_8B_b5af769.json",
    "one_row_lengths_32B_b5af769.json",
)
BY_WORKLOAD = (
    "one_row_8B_bb3dca9.json",
    "one_row_32B_bb3dca9.json",
    "rows_32B_bb3dca9.json",
    "one_row_8B_0edc2f8.json",
    "one_row_32B_0edc2f8.json",
    "rows_32B_0edc2f8.json",
    "news_code_8_rows_8B_93e518c.json",
    "news_8_rows_32B_93e518c.json",
    "math_8_rows_8B_9b21df9.json",
)
GREEDY = "greedy_12efad1.json"
VLLM, VLLM_JOB, GENERATE_BATCH = "vllm_8B.json", "vllm_job_8B.json", "generate_batch_8B.json"
PEERS = (
    "peers_8B_12efad1.json",
    "peers_32_rows_8B_c605079.json",
    "peers_64_rows_eager_8B_0edc2f8.json",
    "peers_64_rows_8B_0edc2f8.json",
    "peers_32B_b5af769.json",
)
SOURCE = "file with its commit, repeats"
SMALL_ROWS, LARGE_ROWS = (1, 8, 32, 64, 128, 256), (1, 8, 32)


def short(pair: str) -> str:
    """The target's name."""
    return pair.partition("/")[0]


def mix(pair: str, rows: int) -> Cell:
    """The setting of most tables: prompts of several kinds, greedy."""
    return Cell(pair, "mix", rows, 0.0)


def source(results: Results, one: Measured) -> str:
    """The file of a row with its commit, if its name does not say it, and how often each method was timed."""
    name, commit = one.file.removesuffix(".json"), str(results.commit(one.file))
    return f"{code(name)}{'' if commit in name else f' ({commit})'}, {one.repeats()}"


def commits(results: Results, measured: Iterable[Measured]) -> str:
    """The commits of some measurements, each once."""
    return ", ".join(dict.fromkeys(str(results.commit(one.file)) for one in measured))


def newest(results: Results, rows: int) -> Measured:
    """The newest measurement of the 8B pair."""
    found = results.measured(NEWEST, mix(SMALL, rows), PLAIN)
    assert found is not None, f"no file has {rows} rows of {SMALL}"
    return found


def settings(results: Results) -> Iterator[Measured]:
    """Every row of the first table."""
    yield from (newest(results, rows) for rows in SMALL_ROWS)
    for rows in LARGE_ROWS:
        found = results.measured(LENGTHS, mix(LARGE, rows), PLAIN, "static:2", "goodput")
        if found is not None:
            yield found


def speeds(results: Results) -> str:
    """Tokens per second without drafts, and what drafting makes of it."""

    def row(one: Measured) -> list[str]:
        best = one.best_draft()
        dsde = one.over("dsde", PLAIN)
        filled = one.over("dsde+fill", PLAIN)
        return [
            short(one.cell.pair),
            str(one.cell.batch),
            rate_spread(one.speed(PLAIN)),
            "" if best is None else f"{code(best)}: {ratio_spread(one.over(best, PLAIN))}",
            ratio_spread(one.over("static:2", PLAIN)),
            ratio_spread(one.over("goodput", PLAIN)),
            ratio_spread(dsde) if dsde or not filled else f"{ratio_spread(filled)} (`+fill`)",
            source(results, one),
        ]

    header = ["pair", "rows", "`static:0`, tokens/s", "best", "`static:2`", "`goodput`", "`dsde`", SOURCE]
    return table(header, map(row, settings(results)))


def other_speed(results: Results, file: str, rows: int) -> float | None:
    """Tokens per second of vLLM or `generate_batch`, in the median."""
    found = [cell for cell in results.raw(file)["cells"] if cell["batch"] == rows]
    return median(found[0]["tokens_per_second"]) if found else None


def beside(results: Results, file: str, method: str | None, rows: int) -> float | None:
    """A method's speed over that of vLLM or `generate_batch`, of medians, since they ran in other processes."""
    other = other_speed(results, file, rows)
    own = None if method is None else newest(results, rows).speed(method)
    return None if own is None or other is None else own.median / other


def over_reference(results: Results, pair: str, rows: int, reference: str) -> Measured | None:
    """The newest measurement that has a decoding mode of transformers beside ours."""
    return results.measured((*LENGTHS, GREEDY), mix(pair, rows), reference, PLAIN, "goodput")


def beside_others(results: Results) -> str:
    """vLLM, and three ways of transformers, beside this package."""

    def served(pair: str, rows: int) -> list[str]:
        if pair != SMALL:
            return [""] * 5
        best = newest(results, rows).best_draft()
        own = [ratio(beside(results, VLLM, method, rows)) for method in (PLAIN, best)]
        batch = ratio(beside(results, GENERATE_BATCH, PLAIN, rows))
        return [rate(other_speed(results, VLLM, rows)), *own, rate(other_speed(results, GENERATE_BATCH, rows)), batch]

    def generated(pair: str, rows: int, reference: str) -> list[str]:
        one = over_reference(results, pair, rows, reference)
        if one is None:
            return [""] * 2
        commit = results.commit(one.file)
        return [f"{rate(one.speed(reference))} ({commit})", ratio_spread(one.over("goodput", reference))]

    cells = [(SMALL, rows) for rows in SMALL_ROWS] + [(LARGE, rows) for rows in LARGE_ROWS]
    rows = [[short(p), str(n), *served(p, n), *generated(p, n, GENERATE), *generated(p, n, COMPILED)] for p, n in cells]
    header = ["pair", "rows", "vLLM", "`static:0` over it", "best over it", "`generate_batch`", "`static:0` over it"]
    header += ["`generate`", "`goodput` over it", "compiled `generate`", "`goodput` over it"]
    return table(header, rows)


def compared(results: Results, cell: Cell) -> list[Measured]:
    """Measurements in which `goodput` ran beside fixed lengths: the newest, and older ones that tried other lengths."""
    found: list[Measured] = []
    for names in (NEWEST, BY_WORKLOAD):
        for one in results.all_measured(names, cell, "goodput"):
            if all(one.lengths() != other.lengths() for other in found):
                found.append(one)
            if names is BY_WORKLOAD:
                break
    return found


def policies(results: Results) -> str:
    """Policies over the best fixed length that ran beside them: `goodput` by kind of prompts, others over all kinds."""
    workloads = ("mix", "news", "code", "math")

    def goodput(one: Measured) -> str:
        best = one.best_length()
        assert best is not None
        return f"{ratio_spread(one.over('goodput', best))} of {best.removeprefix('static:')}"

    rows = []
    for pair, counts in ((SMALL, (1, 8, 32, 64)), (LARGE, LARGE_ROWS)):
        for count in counts:
            found = {workload: compared(results, Cell(pair, workload, count, 0.0)) for workload in workloads}
            every = [one for ones in found.values() for one in ones]
            line = [short(pair), str(count), *("; ".join(map(goodput, found[workload])) for workload in workloads)]
            for method in ("marginal_goodput", "dsde", "dsde+fill"):
                ratios = [over.median for one in every if (over := one.over(method, one.best_length())) is not None]
                line.append(span(ratios) if ratios else "")
            rows.append([*line, commits(results, every)])
    return table(["pair", "rows", *workloads, "`marginal_goodput`", "`dsde`", "`dsde+fill`", "commits"], rows)


def best_lengths(results: Results) -> str:
    """The fastest fixed length of each setting in which all were tried, and its speed over decoding without drafts."""
    texts = []
    for pair in (SMALL, LARGE):
        found = [results.measured(LENGTHS, mix(pair, count), PLAIN) for count in LARGE_ROWS]
        bests = [(one, best) for one in found if one is not None and (best := one.best_length()) is not None]
        named = [f"{best.removeprefix('static:')} ({ratio_spread(one.over(best, PLAIN))})" for one, best in bests]
        texts.append(f"{listed(named)} with {short(pair)} ({commits(results, [one for one, _ in bests])})")
    return "; ".join(texts)


def tried_lengths(results: Results) -> str:
    """The fixed lengths that were tried in every such setting."""
    tried = {(one.lengths()[0], one.lengths()[-1]) for one in _length_settings(results)}
    assert len(tried) == 1, "the files differ in their lengths"
    first, last = tried.pop()
    return f"{first} to {last}"


def _length_settings(results: Results) -> list[Measured]:
    cells = [mix(pair, count) for pair in (SMALL, LARGE) for count in LARGE_ROWS]
    return [one for cell in cells if (one := results.measured(LENGTHS, cell, PLAIN)) is not None]


def peers(results: Results) -> str:
    """Other implementations of speculative decoding: the best of ours over each, by pair and rows."""
    texts, used = [], []
    for name in ("assisted", "prompt_lookup", "flashspec", "economize", "economize_eager"):
        found = []
        for pair, counts in ((SMALL, (1, 8, 32, 64)), (LARGE, (1, 8))):
            for count in counts:
                one = results.measured(PEERS, mix(pair, count), name)
                over = None if one is None else one.over(one.best_draft(), name)
                if one is not None and over is not None:
                    used.append(one)
                    found.append(f"{ratio_spread(over)} ({short(pair)}, {count})")
        texts.append(f"{code(name)} {listed(found)}")
    return f"{'; '.join(texts)} (commits {commits(results, used)})"


def readme_speeds(results: Results) -> str:
    """What the package brings, by rows of the batch."""

    def row(rows: int) -> list[str]:
        best = newest(results, rows).best_draft()
        one = over_reference(results, SMALL, rows, GENERATE)
        return [
            str(rows),
            ratio(None if one is None else one.over("goodput", GENERATE)),
            ratio(beside(results, VLLM, PLAIN, rows)),
            "" if best is None else f"{ratio(newest(results, rows).over(best, PLAIN))} ({code(best)})",
            ratio(beside(results, VLLM, best, rows)),
        ]

    header = ["rows", "drafts (`goodput`) over `generate`", "no drafts (`static:0`) over vLLM"]
    header += ["best drafts over no drafts", "best drafts over vLLM"]
    return table(header, map(row, SMALL_ROWS))


def vllm_plain_span(results: Results) -> str:
    """Extremes of `static:0` over vLLM."""
    return span(value for rows in SMALL_ROWS if (value := beside(results, VLLM, PLAIN, rows)) is not None)


def generate_spread(results: Results) -> str:
    """The widest spread of `generate` within a setting, largest over smallest."""
    cells = [mix(SMALL, rows) for rows in (1, 8, 32, 64)] + [mix(LARGE, rows) for rows in LARGE_ROWS]
    found = map(partial(results.measured, (*LENGTHS, GREEDY)), cells, [GENERATE] * len(cells))
    speeds = [one.speed(GENERATE) for one in found if one is not None]
    return f"{max(s.largest / s.smallest for s in speeds if s is not None):.2f}"


def served_spread(results: Results) -> str:
    """The widest spread of vLLM and `generate_batch` within a setting, largest over smallest."""
    cells = [cell["tokens_per_second"] for file in (VLLM, GENERATE_BATCH) for cell in results.raw(file)["cells"]]
    return ratio(max(max(speeds) / min(speeds) for speeds in cells))


def vllm_job(results: Results) -> str:
    """Tokens per second of vLLM over a job."""
    return rate_spread(middle(results.raw(VLLM_JOB)["job"]["tokens_per_second"]))
