"""Tables of the replay study: every policy over the best fixed length, on recorded traces, without models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from statistics import mean
from typing import Any

from reporting.files import Results
from reporting.markdown import code, span, table

ALL, GOODPUT, PACKED = "replay_policies.json", "replay_goodput.json", "replay_packed.json"
SHORT_CALLS, DRIFT, OVERHEAD = "replay_short_calls.json", "drift.json", "policy_overhead_cpu.json"
TRACES = ("smollm2-distilled", "smollm2-4bit")
ROWS, COSTS = (1, 8, 32), ("c=0.05", "c=0.1", "c=0.3")


def cell_of(results: Results, file: str, trace: str, temperature: int, rows: int, costs: str) -> dict[str, Any]:
    """One cell of a replay."""
    wanted = {"trace": trace, "temperature": temperature, "batch": rows, "costs": costs}
    found = [one for one in results.raw(file)["cells"] if all(one[key] == value for key, value in wanted.items())]
    assert len(found) == 1, f"{file} has {len(found)} cells of {wanted}"
    return dict(found[0])


def gap(results: Results, policy: str, trace: str, temperature: int, rows: int, costs: str) -> float:
    """Percent over the best fixed length. `goodput` is the one of today, which a later file holds."""
    file = GOODPUT if policy.startswith("goodput") else ALL
    cell = cell_of(results, file, trace, temperature, rows, costs)
    found = cell["oracle"] if policy == "oracle" else cell["policies"][policy]
    return float(found["gap_percent"])


def gaps(results: Results, policies: Iterable[str], rows: Iterable[int], temperatures: Iterable[int]) -> list[float]:
    """Those of several policies, in all traces and at all costs."""
    places = [(trace, t, n, costs) for trace in TRACES for t in temperatures for n in rows for costs in COSTS]
    return [gap(results, policy, *place) for policy in policies for place in places]


def names(results: Results) -> list[str]:
    """The policies of the replay, in order, and the oracle."""
    return [*(one["name"] for one in results.raw(ALL)["grid"]["policies"]), "oracle"]


def comparison(results: Results, temperature: int) -> str:
    """All policies at one temperature; in each cell one value per trace."""
    columns = [(rows, costs) for rows in ROWS for costs in COSTS]

    def cell(rows: int, costs: str, value: Callable[[str], str]) -> str:
        return " / ".join(value(trace) for trace in TRACES)

    def best(rows: int, costs: str, trace: str) -> str:
        found = cell_of(results, ALL, trace, temperature, rows, costs)["static_opt"]
        return f"{found['speed']:.2f} ({found['length']})"

    def shown(policy: str, rows: int, costs: str, trace: str) -> str:
        return f"{gap(results, policy, trace, temperature, rows, costs):+.1f}"

    lines = [["best: speed (length)", *(cell(n, c, partial(best, n, c)) for n, c in columns)]]
    for policy in names(results):
        label = policy if policy == "oracle" else code(policy)
        lines.append([label, *(cell(n, c, partial(shown, policy, n, c)) for n, c in columns)])
    heads = [f"{rows}, {costs.removeprefix('c=')}" for rows, costs in columns]
    return table([f"T = {temperature}", *heads], lines)


def packed(results: Results) -> str:
    """Packed passes of many rows that are bound by arithmetic: extremes over traces and temperatures."""
    cells = results.raw(PACKED)["cells"]
    policies = [one["name"] for one in results.raw(PACKED)["grid"]["policies"]]
    rows = results.raw(PACKED)["grid"]["batches"]

    def line(label: str, value: Callable[[dict[str, Any]], float]) -> list[str]:
        return [label, *(span((value(one) for one in cells if one["batch"] == n), "+.1f") for n in rows)]

    lines = [line(code(name), lambda one, name=name: one["policies"][name]["gap_percent"]) for name in policies]
    lines.append(line("one token more in a part of the rows", lambda one: one["fractional"]["gap_percent"]))
    lines.append(line("oracle", lambda one: one["oracle"]["gap_percent"]))
    return table(["packed", *(f"{n} rows" for n in rows)], lines)


def short_calls(results: Results) -> str:
    """One row and short texts: percent over the best fixed length, by draft and temperature."""
    cells = results.raw(SHORT_CALLS)["cells"]
    policies = [one["name"] for one in results.raw(SHORT_CALLS)["grid"]["policies"]]
    short = {"smollm2-distilled": "shipped", "smollm2-4bit": "4-bit"}
    heads = [f"{short[one['trace']]}, T = {one['temperature']}, {one['costs'].removeprefix('c=')}" for one in cells]
    lines = [[code(name), *(f"{one['policies'][name]['gap_percent']:+.1f}" for one in cells)] for name in policies]
    return table(["one row, short", *heads], lines)


def drift(results: Results) -> str:
    """Rounds until a policy gives a useless draft up, and until it is back."""
    runs = results.raw(DRIFT)["runs"]
    lines = []
    for policy in dict.fromkeys(one["policy"] for one in runs):
        for rows in sorted({one["rows"] for one in runs}):
            found = [one for one in runs if one["policy"] == policy and one["rows"] == rows]
            until = [span((one[key] for one in found), ".0f") for key in ("rounds_until_zero", "rounds_until_back")]
            lines.append([code(policy), str(rows), *until, str(len(found))])
    return table(["policy", "rows", "rounds until it drafts nothing", "rounds until it is back", "runs"], lines)


def overhead(results: Results) -> str:
    """What policies take of a round, in three columns of pairs."""
    found = results.raw(OVERHEAD)["policies"]
    shares = sorted(found, key=lambda name: found[name]["policy_overhead"]["median"])
    return ", ".join(f"{code(name)} {100 * found[name]['policy_overhead']['median']:.2f}" for name in shares)


def numbers(results: Results) -> dict[str, str]:
    """What the study's prose says in numbers."""
    rules = ("heuristic", "confidence", "svip", "adaedl", "gammatune", "gammatune_plus", "dsde", "tapout")
    fill = [
        b - a
        for a, b in zip(
            gaps(results, ["dsde"], (8, 32), (0, 1)), gaps(results, ["dsde+fill"], (8, 32), (0, 1)), strict=True
        )
    ]
    deviations = [
        one["gap_deviation"]
        for cell in results.raw(ALL)["cells"]
        for one in cell["policies"].values()
        if one["gap_deviation"] is not None
    ]
    one_row = partial(gaps, results, rows=(1,), temperatures=(0, 1))
    grid, calls = results.raw(ALL)["grid"], results.raw(SHORT_CALLS)["grid"]
    overhead_settings = results.raw(OVERHEAD)["settings"]
    return {
        "greedy_row": span(gaps(results, ["marginal_goodput"], (1,), (0,)), "+.1f"),
        "sampled_row": span(gaps(results, ["marginal_goodput"], (1,), (1,)), "+.1f"),
        "oracle_row": span(gaps(results, ["oracle"], (1,), (0, 1)), "+.1f"),
        "oracle_8": span(gaps(results, ["oracle"], (8,), (0, 1)), "+.1f"),
        "oracle_32": span(gaps(results, ["oracle"], (32,), (0, 1)), "+.1f"),
        "goodput_batch": span(gaps(results, ["goodput"], (8, 32), (0, 1)), "+.1f"),
        "marginal_batch": span(gaps(results, ["marginal_goodput"], (8, 32), (0, 1)), "+.1f"),
        "rules_batch": span(gaps(results, rules, (8, 32), (0, 1)), "+.1f"),
        "fill_wins": span(fill, ".0f"),
        "no_memory": f"{mean(one_row(['goodput:memory_tokens=0'])):+.1f}",
        "memory": f"{mean(one_row(['goodput'])):+.1f}",
        "hold_fill": span(gaps(results, ["dsde:warmup=hold+fill"], (8, 32), (0, 1)), "+.1f"),
        "seeds": str(grid["seeds"]),
        "tokens": f"{grid['tokens']:,}",
        "slope": str(grid["costs"][0]["slope"]),
        "deviation": f"{max(deviations):.1f}",
        "short_tokens": str(calls["tokens"]),
        "short_seeds": str(calls["seeds"]),
        "ridge": str(results.raw(PACKED)["grid"]["costs"][0]["ridge"]),
        "packed_cost": str(results.raw(PACKED)["grid"]["costs"][0]["draft_step"]),
        "overhead_rows": str(overhead_settings["rows"]),
        "overhead_device": results.provenances(OVERHEAD)[0]["device"],
    }
