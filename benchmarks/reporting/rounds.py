"""Tables of where the time goes: rounds, a user's settings, jobs."""

from __future__ import annotations

from statistics import median
from typing import Any

from hf_dsde.bench.results import CaseResult
from reporting.files import PLAIN, Results
from reporting.markdown import code, middle, rate_spread, ratio, table
from reporting.speed import HEAD, ROWS, SOURCE, VLLM_JOB, measured

PROCESSORS = ("processor_rounds_sampled_8B_55993aa.json", "processor_rounds_8B_ddf9b78.json")
LARGE_JOBS = {
    "static:0": "job_256_rows_static0_8B_8955a6c.json",
    "goodput": "job_256_rows_8B_8955a6c.json",
}
SMALL_JOB, TWO_DEVICES = "job_32_rows_8B_9b21df9.json", "two_gpus_8B_93e518c.json"
IMPORT = "import_time.json"


def stages(results: Results) -> str:
    """What a round takes, by stage, without drafts / with `goodput`."""

    def cells(case: CaseResult) -> list[str]:
        told, share = case.statistics, case.prefill_share
        assert told is not None
        seconds, rounds = told["seconds"], told["rounds"]
        parts = (f"{1e3 * seconds[part] / rounds:.2f}" for part in ("draft", "verify", "bookkeeping", "idle"))
        accepted = "" if told["acceptance_rate"] is None else f"{told['acceptance_rate']:.2f}"
        counts = [f"{told['tokens_per_round']:.2f}", f"{told['mean_draft_steps']:.2f}", accepted]
        return [*counts, *parts, "" if share is None else f"{100 * share.median:.0f} %"]

    rows = []
    for count in ROWS:
        one = measured(results, HEAD, count)
        cases = [cells(case) for case in (one.case(PLAIN), one.case("goodput")) if case is not None]
        rows.append([str(count), *(" / ".join(filter(None, pair)) for pair in zip(*cases, strict=True))])
    header = ["rows", "tokens", "draft steps", "accepted", "drafting, ms", "target, ms", "bookkeeping, ms"]
    return table([*header, "outside, ms", "prompts, of the call"], rows)


def processors(results: Results) -> str:
    """Rounds with a user's settings over greedy rounds, and what drafting is worth with them."""
    names = {
        "repetition_penalty 1.1": "`repetition_penalty=1.1`",
        "no_repeat_ngram_size 3": "`no_repeat_ngram_size=3`",
        "min_new_tokens": "`min_new_tokens`",
        "the same with penalty 1.1": "T 0.7, top-p 0.8, top-k 20, penalty 1.1",
        "stop strings": "stop strings",
    }
    rows = []
    for name, shown in names.items():
        line, commits = [shown], []
        for count in (8, 32):
            key = f"{name}, {count} rows"
            file = next(file for file in PROCESSORS if key in results.raw(file)["results"])
            found = results.raw(file)["results"][key]
            columns = ("round_over_greedy", "plain_round_over_greedy", "speedup", "greedy_speedup")
            line += [ratio(found[column]) for column in columns]
            commits.append(str(results.commit(file)))
        rows.append([*line, ", ".join(dict.fromkeys(commits))])
    parts = ["none", "`goodput`", "greedily"]
    return table(["setting", "8 rows: two drafts", *parts, "32 rows: two drafts", *parts, "commit"], rows)


def processor_spread(results: Results) -> str:
    """The widest spread of a setting's rounds of two drafts or none, largest over smallest."""
    settings = [one for file in PROCESSORS for one in results.raw(file)["results"].values()]
    turns = [one["turns"][name] for one in settings for name in ("static:2", PLAIN)]
    seconds = [middle(turn["round_seconds"] for turn in found) for found in turns]
    return ratio(max(one.largest / one.smallest for one in seconds))


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
        rows.append([*one, f"{code(file.removesuffix('.json'))}, {len(found['speeds']['refill'])}"])
    header = ["rows at once", "policy", "refilled, tokens/s", "batch by batch", "through `map`"]
    return table([*header, "refilled over batch by batch", "refilled over vLLM", SOURCE], rows)


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
    """The most rows of the large job of which at least half draft; before, there are probes."""
    rounds = results.raw(LARGE_JOBS["goodput"])["rounds"]
    return str(int(max(one["active"] for one in rounds if one["drafted_by_row"] > 0.5)))


def two_devices(results: Results) -> dict[str, str]:
    """One job by one process and by two."""
    found = results.raw(TWO_DEVICES)
    one, two = (found["tokens_per_second"][count] for count in ("1", "2"))
    return {
        "two_rows": f"{int(found['options']['--rows']):,}",
        "two_ratio": ratio(two / one),
        "two_repeats": found["options"]["--repeats"],
    }


def import_seconds(results: Results) -> dict[str, str]:
    """What the package adds to importing torch and transformers."""
    found = results.raw(IMPORT)["seconds"]
    base = found["torch and transformers"]["median"]
    enabled = found["and hf_dsde.enable"]["median"]
    return {"import_base": f"{base:.1f}", "import_ours": f"{enabled - base:.1f}"}
