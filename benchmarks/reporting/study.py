"""Tables of the replay study: every policy over the best fixed length, on recorded traces, without models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from statistics import mean
from typing import Any

from hf_dsde.policies import MarginalGoodputPolicy
from reporting.files import Results
from reporting.markdown import code, span, table

ALL, GOODPUT, PACKED = "replay_policies.json", "replay_goodput.json", "replay_packed.json"
SHORT_CALLS, DRIFT, OVERHEAD = "replay_short_calls.json", "drift.json", "policy_overhead_cpu.json"
TRACES = ("smollm2-distilled", "smollm2-4bit")
ROWS, COSTS = (1, 8, 32), ("c=0.05", "c=0.1", "c=0.3")


def signed(value: float) -> str:
    """Percent, without the sign of a zero."""
    text = f"{value:+.1f}"
    return "0.0" if float(text) == 0 else text


def signed_span(values: Iterable[float]) -> str:
    """The extremes of some values in percent."""
    numbers = list(values)
    low, high = signed(min(numbers)), signed(max(numbers))
    return low if low == high else f"{low} to {high}"


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


def gaps(
    results: Results,
    policies: Iterable[str],
    rows: Iterable[int],
    temperatures: Iterable[int],
    costs: Iterable[str] = COSTS,
) -> list[float]:
    """Those of several policies, in all traces."""
    places = [(trace, t, n, cost) for trace in TRACES for t in temperatures for n in rows for cost in costs]
    return [gap(results, policy, *place) for policy in policies for place in places]


def names(results: Results) -> list[str]:
    """The policies of the replay, in order, and the oracle."""
    return [*(one["name"] for one in results.raw(ALL)["grid"]["policies"]), "oracle"]


def comparison(results: Results, temperature: int) -> str:
    """All policies at one temperature; in each cell one value per trace."""
    columns = [(rows, costs) for rows in ROWS for costs in COSTS]

    def cell(value: Callable[[str], str]) -> str:
        return " / ".join(map(value, TRACES))

    def best(rows: int, costs: str, trace: str) -> str:
        found = cell_of(results, ALL, trace, temperature, rows, costs)["static_opt"]
        return f"{found['speed']:.2f} ({found['length']})"

    def shown(policy: str, rows: int, costs: str, trace: str) -> str:
        return signed(gap(results, policy, trace, temperature, rows, costs))

    lines = [["best: speed (length)", *(cell(partial(best, n, c)) for n, c in columns)]]
    for policy in names(results):
        label = policy if policy == "oracle" else code(policy)
        lines.append([label, *(cell(partial(shown, policy, n, c)) for n, c in columns)])
    heads = [f"{rows}, {costs.removeprefix('c=')}" for rows, costs in columns]
    return table([f"T = {temperature}", *heads], lines)


def packed(results: Results) -> str:
    """Packed passes of many rows that are bound by arithmetic: extremes over traces and temperatures."""
    cells = results.raw(PACKED)["cells"]
    policies = [one["name"] for one in results.raw(PACKED)["grid"]["policies"]]
    rows = results.raw(PACKED)["grid"]["batches"]

    def line(label: str, value: Callable[[dict[str, Any]], float]) -> list[str]:
        return [label, *(signed_span(value(one) for one in cells if one["batch"] == n) for n in rows)]

    def policy_gap(one: dict[str, Any], name: str) -> float:
        return float(one["policies"][name]["gap_percent"])

    lines = [line(code(name), partial(policy_gap, name=name)) for name in policies]
    lines.append(line("one token more in a part of the rows", lambda one: one["fractional"]["gap_percent"]))
    lines.append(line("oracle", lambda one: one["oracle"]["gap_percent"]))
    return table(["packed", *(f"{n} rows" for n in rows)], lines)


def short_calls(results: Results) -> str:
    """One row and short texts: percent over the best fixed length, by draft and temperature."""
    cells = results.raw(SHORT_CALLS)["cells"]
    policies = [one["name"] for one in results.raw(SHORT_CALLS)["grid"]["policies"]]
    short = {"smollm2-distilled": "shipped", "smollm2-4bit": "4-bit"}
    heads = [f"{short[one['trace']]}, T = {one['temperature']}, {one['costs'].removeprefix('c=')}" for one in cells]
    lines = [[code(name), *(signed(one["policies"][name]["gap_percent"]) for one in cells)] for name in policies]
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
    """What policies take of a round, in percent, the least first."""
    found = results.raw(OVERHEAD)["policies"]
    shares = sorted(found, key=lambda name: found[name]["policy_overhead"]["median"])
    return ", ".join(f"{code(name)} {100 * found[name]['policy_overhead']['median']:.2f}" for name in shares)


def sources(results: Results) -> str:
    """The files of the study with their commits."""
    files = (ALL, GOODPUT, PACKED, SHORT_CALLS, DRIFT, OVERHEAD)
    named = []
    for name in files:
        commit = str(results.provenances(name)[0]["commit"])
        stated = commit[:7] + ("+" if commit.endswith("+") else "")
        named.append(f"[{name}](../benchmarks/results/{name}) ({stated})")
    return f"{', '.join(named[:-1])} and {named[-1]}"


def numbers(results: Results) -> dict[str, str]:
    """What the study's prose says in numbers."""
    _, some, many = ROWS
    rules = ("heuristic", "confidence", "svip", "adaedl", "gammatune", "gammatune_plus", "dsde", "tapout")
    fill = [
        b - a
        for a, b in zip(
            gaps(results, ["dsde"], (some, many), (0, 1)),
            gaps(results, ["dsde+fill"], (some, many), (0, 1)),
            strict=True,
        )
    ]
    deviations = [
        one["gap_deviation"]
        for cell in results.raw(ALL)["cells"]
        for one in cell["policies"].values()
        if one["gap_deviation"] is not None
    ]
    one_row = partial(gaps, results, rows=(1,), temperatures=(0, 1))
    cheap, dear = COSTS[0], COSTS[-1]
    grid, calls = results.raw(ALL)["grid"], results.raw(SHORT_CALLS)["grid"]
    overhead_settings = results.raw(OVERHEAD)["settings"]
    return {
        "greedy_row": signed_span(gaps(results, ["marginal_goodput"], (1,), (0,))),
        "sampled_row": signed_span(gaps(results, ["marginal_goodput"], (1,), (1,))),
        "oracle_row": signed_span(gaps(results, ["oracle"], (1,), (0, 1))),
        "oracle_some": signed_span(gaps(results, ["oracle"], (some,), (0, 1))),
        "oracle_many": signed_span(gaps(results, ["oracle"], (many,), (0, 1))),
        "goodput_batch": signed_span(gaps(results, ["goodput"], (some, many), (0, 1))),
        "marginal_batch": signed_span(gaps(results, ["marginal_goodput"], (some, many), (0, 1))),
        "rules_batch": signed_span(gaps(results, rules, (some, many), (0, 1))),
        "fill_wins": span(fill, ".0f"),
        "no_memory": signed(mean(one_row(["goodput:memory_tokens=0"]))),
        "memory": signed(mean(one_row(["goodput"]))),
        "hold_fill": signed_span(gaps(results, ["dsde:warmup=hold+fill"], (some, many), (0, 1))),
        "cheap": cheap.removeprefix("c="),
        "dear": dear.removeprefix("c="),
        "stops_cheap": signed_span(one_row(["adaedl", "svip"], costs=(cheap,))),
        "stops_dear": signed_span(one_row(["adaedl", "svip"], costs=(dear,))),
        "budget_cheap": signed_span(one_row(["token_budget"], costs=(cheap,))),
        "budget_dear": signed_span(one_row(["token_budget"], costs=(dear,))),
        "some": str(some),
        "many": str(many),
        "warmup": str(signature(MarginalGoodputPolicy).parameters["warmup_tokens"].default),
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
