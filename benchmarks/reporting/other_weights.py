"""The table of targets with other weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reporting.files import PLAIN, Results
from reporting.markdown import code, ratio, table

OTHER_WEIGHTS = ("lora_8B.json", "nf4_8B.json")
WEIGHTS = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int4": "4 bits, torch's own product",
    "bitsandbytes-nf4": "4 bits, bitsandbytes nf4",
    "lora": "bfloat16 with LoRA",
}


def other_weights(results: Results) -> str:
    """Targets by their weights: a round without drafts and with them, and what drafting brings."""

    def lines() -> Iterator[list[str]]:
        for file in OTHER_WEIGHTS:
            for kind, found in results.raw(file)["kinds"].items():
                for rows, methods in found["rows"].items():
                    yield line(kind, rows, methods)

    def line(kind: str, rows: str, methods: dict[str, Any]) -> list[str]:
        plain = methods[PLAIN]
        best = max((m for m in methods if m != PLAIN), key=lambda m: methods[m]["tokens_per_second"])
        speed = methods[best]["tokens_per_second"]
        return [
            WEIGHTS[kind],
            rows,
            f"{plain['milliseconds_per_round']:.2f}",
            f"{methods[best]['milliseconds_per_round']:.2f}",
            f"{speed:,.0f}",
            f"{ratio(speed / plain['tokens_per_second'])} ({code(best)})",
        ]

    header = ["target", "rows", "plain step, ms", "round with drafts, ms", "tokens/s", "over no drafts"]
    return table(header, lines())
