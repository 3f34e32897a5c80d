"""Tables of where the time goes: rounds, prompts, a user's settings, jobs, weak drafts and packed verification."""

from __future__ import annotations

from statistics import median
from typing import Any

from hf_dsde.bench.results import CaseResult, Cell
from reporting.files import PLAIN, Results
from reporting.markdown import code, middle, rate, rate_spread, ratio, ratio_spread, span, table
from reporting.speed import SMALL, VLLM_JOB, newest, short

ROUND_OVERHEAD = "round_overhead_8B_0edc2f8.json"
PREFILL = "prefill_8B_d34fb29.json"
PROCESSORS = ("processor_rounds_sampled_8B_55993aa.json", "processor_rounds_8B_ddf9b78.json")
LARGE_JOBS = {
    "static:0": "job_256_rows_static0_8B_8955a6c.json",
    "goodput": "job_256_rows_8B_8955a6c.json",
}
SMALL_JOB, TWO_DEVICES = "job_32_rows_8B_9b21df9.json", "two_gpus_8B_93e518c.json"
OTHER_DRAFTS = ("bad_draft_8B_bb3dca9.json", "weak_drafts_8B_0edc2f8.json", "sampled_8B_12efad1.json")
PACKED = ("packed_64_rows_8B_9b21df9.json", "packed_128_rows_8B_12efad1.json")
IMPORT = "import_time.json"


def stages(results: Results) -> str:
    """What a round takes, by stage, and the prompts' share of a call."""

    def row(case: CaseResult, commit: str | None) -> list[str]:
        told = case.statistics
        share = case.prefill_share
        assert told is not None
        seconds, rounds = told["seconds"], told["rounds"]
        parts = (f"{1e3 * seconds[part] / rounds:.2f}" for part in ("draft", "verify", "bookkeeping", "idle"))
        accepted = "" if told["acceptance_rate"] is None else f"{told['acceptance_rate']:.2f}"
        counts = [f"{told['tokens_per_round']:.2f}", f"{told['mean_draft_steps']:.2f}", accepted]
        prompts = "" if share is None else f"{100 * share.median:.0f} %"
        return [str(case.batch), code(case.method), *counts, *parts, prompts, str(commit)]

    rows = []
    for count in (1, 8, 32, 64, 256):
        one = newest(results, count)
        cases = [one.case(method) for method in (PLAIN, "static:2", "goodput")]
        rows += [row(case, results.commit(one.file)) for case in cases if case is not None]
    header = ["rows", "method", "tokens", "draft steps", "accepted", "drafting, ms", "target, ms", "bookkeeping, ms"]
    return table([*header, "outside, ms", "prompts, of the call", "commit"], rows)


def overhead(results: Results) -> str:
    """Rounds over the recorded passes that are replayed in them."""
    found = results.raw(ROUND_OVERHEAD)["milliseconds"]
    names = list(dict.fromkeys(key.split(", ")[0] for key in found))

    def cells(name: str, rows: int) -> list[str]:
        one = found[f"{name}, {rows} rows"]
        spread = middle(call["ratio"] for call in one["calls"])
        return [f"{one['round']:.2f}", f"{one['replays']:.2f}", ratio_spread(spread)]

    rows = [[code(name), *cells(name, 1), *cells(name, 8)] for name in names]
    parts = ["replays, ms", "ratio"]
    return table(["policy", "1 row: round, ms", *parts, "8 rows: round, ms", *parts], rows)


def prompts(results: Results) -> str:
    """How fast prompts are read, against the model's own body over one large pass."""
    models = results.raw(PREFILL)["models"]
    target, draft = models["target"], models["draft"]
    bound = target["bound_tokens"] / median(target["bound_seconds"])
    rows = []
    for count, found in target["rows"].items():
        seconds = middle(found["seconds"])
        speed = found["tokens"] / seconds.median
        milliseconds = f"{1e3 * seconds.median:.1f} [{1e3 * seconds.smallest:.1f}..{1e3 * seconds.largest:.1f}]"
        own_draft = 1e3 * median(draft["rows"][count]["seconds"])
        rows.append([count, rate(found["tokens"]), milliseconds, rate(speed), f"{speed / bound:.2f}", f"{own_draft:.1f}"])
    return table(["rows", "tokens", "target, ms", "tokens/s", "of the bound", "draft, ms"], rows)


def prompt_bound(results: Results) -> str:
    """Tokens per second of the model's own body over the pass that is the bound."""
    target = results.raw(PREFILL)["models"]["target"]
    return rate(target["bound_tokens"] / median(target["bound_seconds"]))


def prompt_bound_tokens(results: Results) -> str:
    """Tokens in that pass."""
    return rate(results.raw(PREFILL)["models"]["target"]["bound_tokens"])


def processors(results: Results) -> str:
    """Rounds with a user's settings over greedy rounds, and what drafting is worth with them."""
    names = {
        "repetition_penalty 1.1": "`repetition_penalty=1.1`",
        "no_repeat_ngram_size 3": "`no_repeat_ngram_size=3`",
        "min_new_tokens": "`min_new_tokens`",
        "the same with penalty 1.1": "temperature 0.7, top-p 0.8, top-k 20, penalty 1.1",
        "stop strings": "stop strings",
    }
    rows = []
    for name, shown in names.items():
        file = next(file for file in PROCESSORS if f"{name}, 8 rows" in results.raw(file)["results"])
        cells = []
        for count in (8, 32):
            found = results.raw(file)["results"].get(f"{name}, {count} rows")
            keys = ("round_over_greedy", "plain_round_over_greedy", "speedup", "greedy_speedup")
            cells += ["" if found is None else ratio(found[key]) for key in keys]
        rows.append([shown, *cells, str(results.commit(file))])
    parts = ["none", "`goodput`", "greedily"]
    return table(["setting", "8 rows: two drafts", *parts, "32 rows: two drafts", *parts, "commit"], rows)


def processor_settings(results: Results, key: str) -> str:
    """A setting that both files share."""
    found = {str(results.raw(file)["settings"][key]) for file in PROCESSORS}
    assert len(found) == 1, f"the files differ in {key}"
    return found.pop()


def jobs(results: Results) -> str:
    """A job of answers of different lengths: vLLM, rows refilled, one batch after the other, and through `map`."""
    rows = []
    for policy, file in (*LARGE_JOBS.items(), ("goodput", SMALL_JOB)):
        found: Any = results.raw(file)
        speeds = {name: middle(values) for name, values in found["speeds"].items()}
        size = found["settings"]["batch_size"]
        other = median(results.raw(VLLM_JOB)["job"]["tokens_per_second"]) if file in LARGE_JOBS.values() else None
        over = "" if other is None else ratio(speeds["refill"].median / other)
        one = [str(size), code(policy), *map(rate_spread, speeds.values()), ratio(found["ratios"]["refill"]), over]
        rows.append([*one, f"{results.commit(file)}, {len(found['speeds']['refill'])}"])
    header = ["rows at once", "policy", "refilled, tokens/s", "batch by batch", "through `map`"]
    return table([*header, "refilled over batch by batch", "refilled over vLLM", "commit, repeats"], rows)


def job_size(results: Results) -> dict[str, str]:
    """What the jobs are."""
    found = [results.raw(file) for file in (*LARGE_JOBS.values(), SMALL_JOB)]
    tokens = {one["details"]["refill"]["new_tokens"] for one in found}
    texts = {one["details"]["refill"]["texts"] for one in found}
    assert len(tokens) == len(texts) == 1, "the jobs differ"
    return {
        "job_texts": str(texts.pop()),
        "job_tokens": f"{tokens.pop():,}",
        "job_longest": str(max(found[0]["settings"]["limits"])),
        "job_shortest": str(min(found[0]["settings"]["limits"])),
    }


def drafting_begins(results: Results) -> str:
    """The most rows with which the policy of the large job drafts."""
    rounds = results.raw(LARGE_JOBS["goodput"])["rounds"]
    return str(int(max(one["active"] for one in rounds if one["drafted_by_row"] > 0)))


def two_devices(results: Results) -> dict[str, str]:
    """One job by one process and by two."""
    found = results.raw(TWO_DEVICES)
    one, two = (found["tokens_per_second"][count] for count in ("1", "2"))
    return {
        "two_rows": f"{int(found['options']['--rows']):,}",
        "two_one": rate(one),
        "two_two": rate(two),
        "two_ratio": ratio(two / one),
        "two_repeats": found["options"]["--repeats"],
    }


def other_drafts(results: Results) -> str:
    """Sampling, and drafts of which little is accepted, over decoding without drafts."""
    shown = ("static:1", "static:2", "static:3", "goodput", "auto", "dsde+fill")
    cells = [
        Cell(SMALL, "mix", 8, 1.0),
        Cell("8B/deep-1B-bad", "mix", 32, 1.0),
        Cell("8B/1B-weak", "mix", 8, 0.0),
        Cell("8B/shallow-weak", "mix", 8, 0.0),
    ]
    rows = []
    for cell in cells:
        one = results.measured(OTHER_DRAFTS, cell, PLAIN)
        assert one is not None
        ratios = [ratio_spread(one.over(method, PLAIN)) for method in shown]
        where = [code(cell.pair), str(cell.batch), f"{cell.temperature:.0f}"]
        rows.append([*where, *ratios, f"{results.commit(one.file)}, {one.repeats()}"])
    return table(["pair", "rows", "temperature", *map(code, shown), "commit, repeats"], rows)


def packed(results: Results) -> str:
    """Packed verification over padded verification, and the default over no drafts."""
    rows = []
    for file in PACKED:
        for cell in results.bench(file).cells():
            one = results.measured([file], cell)
            assert one is not None
            for policy in ("dsde", "goodput"):
                over = ratio_spread(one.over(f"{policy} packed", f"{policy} padded"))
                auto = ratio_spread(one.over(f"{policy} auto", PLAIN))
                told = [one.case(f"{policy} {way}") for way in ("padded", "packed")]
                passes = [_verify(case) for case in told if case is not None]
                where = [short(cell.pair), str(cell.batch), code(policy)]
                rows.append([*where, over, " / ".join(passes), auto, f"{results.commit(file)}, {one.repeats()}"])
    header = ["pair", "rows", "policy", "packed over padded", "target, ms: padded / packed"]
    return table([*header, "`auto` over `static:0`", "commit, repeats"], rows)


def _verify(case: CaseResult) -> str:
    assert case.statistics is not None
    return f"{1e3 * case.statistics['seconds']['verify'] / case.statistics['rounds']:.1f}"


def import_seconds(results: Results) -> dict[str, str]:
    """What the package adds to importing torch and transformers."""
    found = results.raw(IMPORT)["seconds"]
    base = found["torch and transformers"]["median"]
    enabled = found["and hf_dsde.enable"]["median"]
    return {"import_base": f"{base:.1f}", "import_ours": f"{enabled - base:.1f}"}


def draft_step_share(results: Results, names: tuple[str, ...], cell: Cell) -> str:
    """A draft step over a plain step, as policies that weigh costs see it."""
    one = results.measured(names, cell, "goodput")
    case = None if one is None else one.case("goodput")
    assert case is not None
    assert case.statistics is not None
    return f"{case.statistics['draft_step_seconds'] / case.statistics['plain_step_seconds']:.2f}"


def stage_span(results: Results) -> str:
    """Extremes of the prompts' share, over rows, without drafts."""
    shares = [case.prefill_share for case in (newest(results, rows).case(PLAIN) for rows in (1, 256)) if case]
    return span((100 * share.median for share in shares if share is not None), ".0f")
