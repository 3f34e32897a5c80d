"""Tables of work that is not a batch of prompts: requests that texts help with, and rollouts of a training loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reporting.files import PLAIN, Results
from reporting.markdown import code, middle, rate, rate_spread, ratio, ratio_spread, table

TEXT_JOBS = tuple(f"text_jobs_{rows}_8B.json" for rows in ("1_row", "8_rows", "32_rows", "128_rows"))
TASKS = {"edit": "rename in a function", "quote": "quote an article", "math": "word problems", "open": "open questions"}
ROLLOUTS = "rollouts_1B.json"


def text_jobs(results: Results) -> str:
    """Drafts out of texts, of the head, and of both, over none, by kind of request."""

    def lines() -> Iterator[list[str]]:
        for file in TEXT_JOBS:
            found: dict[tuple[int, str], list[dict[str, Any]]] = {}
            for cell in results.raw(file)["cells"]:
                found.setdefault((cell["rows"], cell["task"]), []).append(cell)
            for (rows, task), (plain, *others) in found.items():
                assert plain["method"] == PLAIN
                ratios = [f"{ratio_spread(middle(one['ratios']))} ({code(one['method'])})" for one in others]
                own = [str(rows), str(plain["requests"]), TASKS[task], rate_spread(middle(plain["speeds"]))]
                yield [*own, *ratios, str(results.commit(file))]

    header = ["rows", "requests", "kind", "`static:0`, tokens/s", "out of texts", "the head", "both", "commit"]
    return table(header, lines())


def rollouts(results: Results) -> str:
    """Rollouts of a training loop, over plain `generate` compiled with a static cache."""
    found = {(one["rows"], one["method"]): one for one in results.raw(ROLLOUTS)["results"]}

    def line(rows: int) -> list[str]:
        compiled, ours = found[rows, "generate_static"], found[rows, "speculation_kept"]
        speeds = [one["tokens_per_second"] for one in (compiled, ours)]
        accepted = ours["acceptance_rate"]
        return [str(rows), *map(rate, speeds), ratio(speeds[1] / speeds[0]), f"{accepted:.2f}"]

    header = ["rows", "compiled `generate`, tokens/s", "with drafts, tokens/s", "ratio", "accepted"]
    return table(header, map(line, sorted({rows for rows, _ in found})))
