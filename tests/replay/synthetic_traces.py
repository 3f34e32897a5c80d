"""Traces of a pair of toy models that can be enumerated: the columns are what the two distributions say, exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hf_dsde.replay import TraceTable
from hf_dsde.trace.schema import table_schema

VOCABULARY = 6
BLOCK = 8
CONTEXTS = 41


class ToyPair:
    """Two models whose next token depends on the last one and on a counter."""

    def __init__(self, seed: int, noise: float) -> None:
        generator = np.random.default_rng(seed)
        shape = (CONTEXTS, VOCABULARY, VOCABULARY)
        target = 1.6 * generator.normal(size=shape)
        draft = target + noise * generator.normal(size=shape)
        self.target, self.draft = (self._softmax(logits) for logits in (target, draft))

    @staticmethod
    def _softmax(logits: np.ndarray) -> np.ndarray:
        weights = np.exp(logits)
        return weights / weights.sum(-1, keepdims=True)

    def distributions(self, context: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        return self.target[context % CONTEXTS, last], self.draft[context % CONTEXTS, last]


def columns_at(p: np.ndarray, q: np.ndarray, token: int, temperature: int, generator: np.random.Generator) -> dict:
    rest = np.maximum(q - p, 0)
    total = rest.sum()
    residual = generator.choice(VOCABULARY, p=rest / total) if total > 0 else int(q.argmax())
    ordered_p, ordered_q = np.sort(p)[::-1], np.sort(q)[::-1]
    return {
        "target_agrees": bool(p.argmax() == token),
        "draft_agrees": bool(q.argmax() == token),
        "target_probability": p[token],
        "draft_probability": q[token],
        "acceptance": np.minimum(p, q).sum(),
        "kld": (p * np.log(p / q)).sum(),
        "reverse_kld": (q * np.log(q / p)).sum(),
        "target_entropy": -(p * np.log(p)).sum(),
        "draft_entropy": -(q * np.log(q)).sum(),
        "target_top1": ordered_p[0],
        "target_top2": ordered_p[1],
        "draft_top1": ordered_q[0],
        "draft_top2": ordered_q[1],
        "residual_draft_probability": ordered_q[0] if temperature == 0 else q[residual],
    }


def _choose(probs: np.ndarray, temperature: int, generator: np.random.Generator) -> int:
    return int(probs.argmax()) if temperature == 0 else int(generator.choice(VOCABULARY, p=probs))


def _sequence(
    pair: ToyPair, key: dict[str, Any], length: int, text: np.random.Generator, rest: np.random.Generator
) -> Iterator[dict[str, Any]]:
    last, shift = int(text.integers(VOCABULARY)), int(text.integers(CONTEXTS))
    for position in range(length):
        p, q = pair.distributions(shift + position, last)
        token = _choose(p, key["temperature"], text)
        yield key | {"position": position} | columns_at(p, q, token, key["temperature"], rest)
        last = token


def _rounds(pair: ToyPair, key: dict[str, Any], length: int, generator: np.random.Generator) -> Iterator[dict]:
    """Real speculative decoding in rounds of eight drafts, with every drafted position written down."""
    last, shift = int(generator.integers(VOCABULARY)), int(generator.integers(CONTEXTS))
    start, number, temperature = 0, 0, key["temperature"]
    while start < length:
        prefix, on_path, kept, following = last, True, 0, last
        for offset in range(BLOCK):
            p, q = pair.distributions(shift + start + offset, prefix)
            token = _choose(q, temperature, generator)
            matches = token == p.argmax() if temperature == 0 else generator.random() < p[token] / q[token]
            accepted = on_path and bool(matches)
            where = {"round": number, "start": start, "offset": offset, "on_path": on_path, "accepted": accepted}
            yield key | where | columns_at(p, q, token, temperature, generator)
            if on_path and not accepted:
                rest = np.maximum(p - q, 0)
                following = (
                    int(p.argmax()) if temperature == 0 else int(generator.choice(VOCABULARY, p=rest / rest.sum()))
                )
            if accepted:
                kept, following = kept + 1, token
            on_path, prefix = accepted, token
        if kept == BLOCK:
            p, _ = pair.distributions(shift + start + BLOCK, following)
            following = _choose(p, temperature, generator)
        start, number, last = start + kept + 1, number + 1, following


def toy_rows(
    seed: int = 0,
    *,
    noise: float = 1.0,
    tasks: tuple[str, ...] = ("code", "news"),
    sequences: int = 6,
    length: int = 40,
    temperatures: tuple[int, ...] = (0, 1),
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Committed and drafted rows. Lengths of sequences vary around `length`; tasks differ in how good the draft is."""
    committed: list[dict[str, Any]] = []
    drafted: list[dict[str, Any]] = []
    for temperature in temperatures:
        for number, task in enumerate(tasks):
            pair = ToyPair(seed + number, noise * (1 + number))
            for sequence in range(sequences):
                key = {"task": task, "temperature": temperature, "sequence": sequence}
                # The text depends on the target alone, so that traces with different noise hold the same texts.
                text, rest = (np.random.default_rng([seed, temperature, number, sequence, use]) for use in (0, 1))
                tokens = int(text.integers(length // 2, length * 3 // 2))
                committed += _sequence(pair, key, tokens, text, rest)
                drafted += _rounds(pair, key, tokens, rest)
    return committed, drafted


@lru_cache
def toy_table(temperature: int, **arguments: Any) -> TraceTable:
    committed, drafted = toy_rows(temperatures=(temperature,), **arguments)
    return TraceTable.from_arrow(
        pa.Table.from_pylist(committed), pa.Table.from_pylist(drafted), temperature, name="toy"
    )


def write_trace(folder: Path, **arguments: Any) -> Path:
    """A folder as a recorder leaves it."""
    folder.mkdir(parents=True)
    rows = {}
    for name, values in zip(("committed", "drafted"), toy_rows(**arguments), strict=True):
        pq.write_table(
            pa.Table.from_pylist(values, schema=table_schema(name, tokens=False)), folder / f"{name}.parquet"
        )
        rows[name] = len(values)
    description = {"format": "hf_dsde.trace", "version": 1, "tokens": False, "rows": rows}
    (folder / "trace.json").write_text(json.dumps(description), encoding="utf-8")
    return folder
