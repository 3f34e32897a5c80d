"""Tables of speed: this package's methods over one another, and beside other packages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

from hf_dsde.bench.results import Cell
from reporting.files import PLAIN, Measured, Results
from reporting.markdown import code, middle, rate, rate_spread, ratio, ratio_spread, span, table

SMALL, LARGE = "8B/deep-1B-strong", "32B/deep-1B-strong"
GENERATE, COMPILED = "generate", "generate_static"
# Newest first. The first is made by the command at the end of docs/performance.md.
NEWEST = ("policies_8B.json", "large_batches_8B_8955a6c.json", "large_batches_8B_d34fb29.json")
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
SMALL_ROWS, LARGE_ROWS = (1, 8, 32, 64, 128, 256), (1, 8, 32)


def short(pair: str) -> str:
    """The target's name."""
    return pair.split("/")[0]


def mix(pair: str, rows: int) -> Cell:
    """The setting of most tables: prompts of several kinds, greedy."""
    return Cell(pair, "mix", rows, 0.0)


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
            f"{results.commit(one.file)}, {one.repeats()}",
        ]

    header = ["pair", "rows", "`static:0`, tokens/s", "best", "`static:2`", "`goodput`", "`dsde`", "commit, repeats"]
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


def beside_vllm(results: Results) -> str:
    """vLLM and transformers' continuous batching beside this package."""

    def row(rows: int) -> list[str]:
        one = newest(results, rows)
        best = one.best_draft()
        return [
            str(rows),
            rate(other_speed(results, VLLM, rows)),
            ratio(beside(results, VLLM, PLAIN, rows)),
            "" if best is None else f"{code(best)}: {ratio(beside(results, VLLM, best, rows))}",
            rate(other_speed(results, GENERATE_BATCH, rows)),
            ratio(beside(results, GENERATE_BATCH, PLAIN, rows)),
            ratio(beside(results, GENERATE_BATCH, best, rows)),
            str(results.commit(one.file)),
        ]

    header = ["rows", "vLLM, tokens/s", "`static:0` over it", "best over it"]
    header += ["`generate_batch`, tokens/s", "`static:0` over it", "best over it", "commit"]
    return table(header, map(row, SMALL_ROWS))


def over_reference(results: Results, pair: str, rows: int, reference: str) -> Measured | None:
    """The newest measurement that has a decoding mode of transformers beside ours."""
    return results.measured((*LENGTHS, GREEDY), mix(pair, rows), reference, PLAIN, "goodput")


def over_generate(results: Results) -> str:
    """Plain `generate`, and `generate` compiled with a static cache, beside this package."""

    def half(pair: str, rows: int, reference: str) -> list[str]:
        one = over_reference(results, pair, rows, reference)
        if one is None:
            return [""] * 4
        return [
            rate_spread(one.speed(reference)),
            ratio(one.over(PLAIN, reference)),
            ratio_spread(one.over("goodput", reference)),
            str(results.commit(one.file)),
        ]

    cells = [(SMALL, rows) for rows in SMALL_ROWS if rows <= 64] + [(LARGE, rows) for rows in LARGE_ROWS]
    rows = [[short(p), str(n), *half(p, n, GENERATE), *half(p, n, COMPILED)] for p, n in cells]
    parts = ["`static:0` over it", "`goodput` over it", "commit"]
    return table(["pair", "rows", "`generate`, tokens/s", *parts, "compiled, tokens/s", *parts], rows)


def compared(results: Results) -> Iterator[Measured]:
    """Measurements in which policies ran beside fixed lengths, the newest of each setting."""
    for pair, rows in [(SMALL, 1), (SMALL, 8), (SMALL, 32), (SMALL, 64)]:
        found = list(results.all_measured(NEWEST, mix(pair, rows), PLAIN, "goodput"))
        # Files of one setting count next to each other only if they tried different lengths.
        yield from (one for i, one in enumerate(found) if all(one.lengths() != old.lengths() for old in found[:i]))
    for pair in (SMALL, LARGE):
        for rows in (1, 8, 32):
            for workload in ("mix", "news", "code", "math"):
                found_one = results.measured(BY_WORKLOAD, Cell(pair, workload, rows, 0.0), "goodput")
                if found_one is not None:
                    yield found_one


def policies(results: Results) -> str:
    """Policies over the best fixed length that ran beside them."""
    shown = ("goodput", "marginal_goodput", "dsde", "dsde+fill")

    def row(one: Measured) -> list[str]:
        best = one.best_length()
        assert best is not None
        ratios = [ratio_spread(one.over(method, best)) for method in shown]
        lengths = ", ".join(map(str, one.lengths()))
        name = f"{best.removeprefix('static:')}: {rate(one.case(best).tokens_per_second.median)}"  # type: ignore[union-attr]
        cell = one.cell
        where = [short(cell.pair), str(cell.batch), cell.workload, lengths, name]
        return [*where, *ratios, f"{results.commit(one.file)}, {one.repeats()}"]

    header = ["pair", "rows", "prompts", "lengths tried", "best: tokens/s", *map(code, shown), "commit, repeats"]
    return table(header, map(row, compared(results)))


def fixed_lengths(results: Results) -> str:
    """Speed of every fixed length over decoding without drafts."""
    longest = 10
    rows = []
    for pair in (SMALL, LARGE):
        for count in LARGE_ROWS:
            one = results.measured(LENGTHS, mix(pair, count), PLAIN)
            assert one is not None
            best = one.best_length()
            found = [(f"static:{k}", ratio(one.over(f"static:{k}", PLAIN))) for k in range(1, longest + 1)]
            cells = [f"**{text}**" if method == best else text for method, text in found]
            rows.append([short(pair), str(count), *cells, f"{results.commit(one.file)}, {one.repeats()}"])
    return table(["pair", "rows", *map(str, range(1, longest + 1)), "commit, repeats"], rows)


def peers(results: Results) -> str:
    """Other implementations of speculative decoding, as multiples of which this package writes."""
    names = {"assisted": "assisted", "prompt_lookup": "prompt_lookup", "economize": "economize", "flashspec": "flashspec"}
    rows = []
    for pair, counts in ((SMALL, (1, 8, 32, 64)), (LARGE, (1, 8))):
        for count in counts:
            for one in results.all_measured(PEERS, mix(pair, count)):
                best = one.best_draft()
                if best is None:
                    continue
                over = [ratio_spread(one.over(best, name)) for name in names]
                eager = one.over(best, "economize_eager")
                if eager is not None:
                    over[2] = f"{ratio_spread(eager)} (eager)"
                where = [short(pair), str(count), f"{code(best)}: {rate_spread(one.speed(best))}"]
                rows.append([*where, *over, f"{results.commit(one.file)}, {one.repeats()}"])
    return table(["pair", "rows", "ours, tokens/s", *map(code, names), "commit, repeats"], rows)


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


def vllm_job(results: Results) -> str:
    """Tokens per second of vLLM over a job."""
    return rate_spread(middle(results.raw(VLLM_JOB)["job"]["tokens_per_second"]))
