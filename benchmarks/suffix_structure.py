"""What the index of texts takes of memory and time, and how many tokens drafts out of texts bring, on known texts.

python benchmarks/suffix_structure.py --output benchmarks/results/suffix_structure.json

Nothing runs a model: a text is played as if a target were writing it, so that a draft stands as far as it agrees. The
texts are modules of Python's standard library, or prompts and answers out of a file. Where the package
`arctic-inference` is installed, its suffix tree is measured beside the index.
"""

from __future__ import annotations

import gc
import json
import random
import sysconfig
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_dsde import PromptLookupDrafter, SpeculationConfig, SSSDDrafter, SuffixDrafter
from hf_dsde.decoding.sampling import BlockProcessor
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.drafting import DraftCall, Drafter
from hf_dsde.drafting.lookup.continuation import Continuation
from hf_dsde.drafting.lookup.index import DEPTH, TextIndex
from hf_dsde.drafting.lookup.text_drafter import TextDrafter
from hf_dsde.drafting.per_row import PerRowDrafter
from hf_dsde.measurement import provenance
from hf_dsde.smollm2 import fetch_smollm2

try:
    from arctic_inference.suffix_decoding import SuffixDecodingCache
except ImportError:
    SuffixDecodingCache = None

SIZES = (1_000, 10_000, 100_000, 1_000_000)
QUERIES = 2_000
CHUNK = 3
"""Tokens that a text grows by at a time, as in a round."""
PROMPT_TOKENS = 200
PEER_DEPTH = 24
"""Tokens of a path in the tree of `arctic-inference`, as vLLM sets it."""
Play = tuple[list[int], list[int]]
"""Prompt and answer."""


def main(
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result there, as JSON.")] = None,
    texts: Annotated[
        Path | None, typer.Option(exists=True, help='Lines of JSON with "prompt" and "answer", in place of modules.')
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Texts played at a time.")] = 32,
    plays: Annotated[int, typer.Option(min=1, help="Texts to play.")] = 96,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer that are played, at most.")] = 256,
    most: Annotated[int, typer.Option(min=1, help="Tokens that a row may draft.")] = 16,
) -> None:
    """Measure the index at several sizes, then play texts with every drafter."""
    tokenizer = AutoTokenizer.from_pretrained(fetch_smollm2())
    modules = _modules(tokenizer)
    stream = [token for module in modules for token in module]
    console = Console()
    sizes = {size: _structure(stream, size, most) for size in SIZES if size + DEPTH + QUERIES <= len(stream)}
    console.print(_size_table("The index", sizes))
    peer_sizes = {size: _peer_structure(stream, size, most) for size in sizes if SuffixDecodingCache is not None}
    if peer_sizes:
        console.print(_size_table("The tree of arctic-inference", peer_sizes))
    played = _read(texts, tokenizer) if texts is not None else _as_plays(modules)
    random.Random(0).shuffle(played)
    played = [(prompt, answer[:answer_tokens]) for prompt, answer in played[:plays]]
    results = {name: _play(make(), played, rows, most) for name, make in _drafters().items()}
    console.print(_play_table(results))
    if output is not None:
        settings = {"rows": rows, "plays": len(played), "answer_tokens": answer_tokens, "most": most}
        result = {
            "provenance": provenance.collect("cpu"),
            "settings": settings | {"texts": "standard library" if texts is None else texts.name},
            "sizes": sizes,
            "arctic_inference_sizes": peer_sizes,
            "plays": results,
        }
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _modules(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokens of modules of the standard library, in a seeded order, somewhat more than the largest size needs."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in folder.rglob("*.py") if not {"site-packages", "test", "tests"} & {*file.parts})
    random.Random(0).shuffle(files)
    modules: list[list[int]] = []
    count = 0
    for file in files:
        if count > SIZES[-1] + 10 * QUERIES:
            break
        ids: list[int] = tokenizer(file.read_text(encoding="utf-8", errors="ignore"), verbose=False)["input_ids"]
        modules.append(ids)
        count += len(ids)
    return modules


def _as_plays(modules: Sequence[Sequence[int]]) -> list[Play]:
    """The beginnings of modules as prompts, and how they go on as answers."""
    return [(list(ids[:PROMPT_TOKENS]), list(ids[PROMPT_TOKENS:])) for ids in modules if len(ids) > PROMPT_TOKENS + 100]


def _read(file: Path, tokenizer: PreTrainedTokenizerBase) -> list[Play]:
    entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [
        (tokenizer(entry["prompt"])["input_ids"], tokenizer(entry["answer"], add_special_tokens=False)["input_ids"])
        for entry in entries
        if entry["prompt"] and entry["answer"]
    ]


def _structure(stream: Sequence[int], size: int, most: int) -> dict[str, float]:
    """Bytes of memory per token, and microseconds per token and per query."""
    known, unknown = list(stream[:size]), stream[size:]
    gc.collect()
    tracemalloc.start()
    index = TextIndex()
    for begin in range(0, size, CHUNK):
        index.extend(known[begin : begin + CHUNK])
    size_of_all, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    seconds = []
    for _ in range(3 if size < SIZES[-1] else 1):
        index = TextIndex()
        begun = time.process_time()
        for begin in range(0, size, CHUNK):
            index.extend(known[begin : begin + CHUNK])
        seconds.append(time.process_time() - begun)
    numbers = random.Random(0)
    ends = [list(unknown[place : place + DEPTH]) for place in numbers.choices(range(len(unknown) - DEPTH), k=QUERIES)]
    begun = time.process_time()
    lengths = [len(index.continuation(end, most).tokens) for end in ends]
    asked = time.process_time() - begun
    return {
        "bytes_per_token": size_of_all / size,
        "microseconds_per_token": 1e6 * min(seconds) / size,
        "microseconds_per_query": 1e6 * asked / QUERIES,
        "tokens_per_query": sum(lengths) / QUERIES,
    }


def _peer_structure(stream: Sequence[int], size: int, most: int) -> dict[str, float]:
    """The same of the tree of `arctic-inference`: its own word for the memory, as nothing else sees it."""
    known, unknown = list(stream[:size]), stream[size:]
    seconds = []
    for _ in range(3 if size < SIZES[-1] else 1):
        cache = SuffixDecodingCache(PEER_DEPTH, 0)
        begun = time.process_time()
        cache.start_request(0, known[:CHUNK])
        for begin in range(CHUNK, size, CHUNK):
            cache.add_active_response(0, known[begin : begin + CHUNK])
        seconds.append(time.process_time() - begun)
    numbers = random.Random(0)
    ends = [
        list(unknown[place : place + PEER_DEPTH]) for place in numbers.choices(range(len(unknown) - DEPTH), k=QUERIES)
    ]
    begun = time.process_time()
    lengths = [len(cache.speculate(0, end, most).token_ids) for end in ends]
    asked = time.process_time() - begun
    return {
        "bytes_per_token": cache._local_trees[0].estimate_memory() / size,
        "microseconds_per_token": 1e6 * min(seconds) / size,
        "microseconds_per_query": 1e6 * asked / QUERIES,
        "tokens_per_query": sum(lengths) / QUERIES,
    }


class PeerText:
    """A text in the trees of `arctic-inference`; its first tokens are the prompt."""

    def __init__(self, cache: Any, name: int) -> None:
        self._cache, self._name = cache, name
        self._tokens: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """As for any text."""
        if not self._tokens:
            self._cache.start_request(self._name, list(tokens))
        elif tokens:
            self._cache.add_active_response(self._name, list(tokens))
        self._tokens.extend(tokens)

    def continuation(self, most: int) -> Continuation:
        """What the trees propose."""
        found = self._cache.speculate(self._name, self._tokens[-PEER_DEPTH:], most)
        return Continuation(list(found.token_ids), found.score)


class PeerDrafter(TextDrafter[PeerText]):
    """Asks the trees of `arctic-inference`, which learn from the answers of other rows while they are written."""

    def __init__(self) -> None:
        self._cache = SuffixDecodingCache(PEER_DEPTH, 10_000)
        self._names = count()

    def new_text(self) -> PeerText:
        """As for any drafter."""
        return PeerText(self._cache, next(self._names))

    def continuation(self, text: PeerText, most: int) -> Continuation:
        """As for any drafter."""
        return text.continuation(most)

    def finish(self) -> None:
        """As for any drafter."""
        for name in list(self._cache.active_requests):
            self._cache.stop_request(name)
        super().finish()


def _drafters() -> dict[str, Callable[[], Drafter]]:
    def transformers_lookup() -> Drafter:
        return PerRowDrafter(lambda _: PromptLookupCandidateGenerator(max_length=1 << 20), owner=None)

    peer = {"arctic-inference": PeerDrafter} if SuffixDecodingCache is not None else {}
    return {
        "prompt lookup, transformers": transformers_lookup,
        "prompt lookup": PromptLookupDrafter,
        "suffix, own text": lambda: SuffixDrafter(share_answers=False),
        "suffix": SuffixDrafter,
        "suffix, score of 1": lambda: SuffixDrafter(min_score=1.0),
        "sssd": SSSDDrafter,
    } | peer


def _play(drafter: Drafter, plays: Sequence[Play], rows: int, most: int) -> dict[str, float]:
    """Let a drafter guess at texts, batch after batch; it knows the answers of earlier batches if it shares them."""
    counts = {"tokens": 0, "passes": 0, "drafted": 0, "accepted": 0, "rounds": 0}
    seconds = score = 0.0
    for first in range(0, len(plays), rows):
        batch = plays[first : first + rows]
        sequences = _begin(drafter, [prompt for prompt, _ in batch], max(len(answer) for _, answer in batch), most)
        left = [list(answer) for _, answer in batch]
        while any(left):
            allowed = [min(most, max(len(answer) - 1, 0)) for answer in left]
            begun = time.process_time()
            drafts = _ask(drafter, sequences, allowed)
            seconds += time.process_time() - begun
            score += sum(expected for _, expected in drafts)
            emitted = []
            for (draft, _), answer in zip(drafts, left, strict=True):
                stands = _agreeing(draft, answer)
                emitted.append(answer[: stands + 1])
                counts["passes"] += bool(answer)
                counts["drafted"] += len(draft)
                counts["accepted"] += stands
            _append(sequences, emitted)
            asked = [row for row, n in enumerate(allowed) if n]
            if isinstance(drafter, PerRowDrafter):
                drafter._asked = asked
                drafter.update_candidate_strategy(sequences, torch.empty(0), [0] * len(batch), [0] * len(batch))
            left = [answer[len(tokens) :] for answer, tokens in zip(left, emitted, strict=True)]
            counts["tokens"] += sum(map(len, emitted))
            counts["rounds"] += 1
        drafter.finish()
    return {
        "tokens_per_pass": counts["tokens"] / counts["passes"],
        "acceptance": counts["accepted"] / max(counts["drafted"], 1),
        "drafted_per_pass": counts["drafted"] / counts["passes"],
        "accepted_per_pass": counts["accepted"] / counts["passes"],
        "expected_per_pass": score / counts["passes"],
        "milliseconds_per_round": 1e3 * seconds / counts["rounds"],
    }


def _begin(drafter: Drafter, prompts: Sequence[Sequence[int]], new_tokens: int, most: int) -> SequenceBatch:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sequences = SequenceBatch(ids, mask, max_new_tokens=new_tokens, scratch=most + 1, pad_token=0)
    process = BlockProcessor(LogitsProcessorList())
    drafter.start(DraftCall(sequences, 1 << 20, process, False, width, None, SpeculationConfig()))
    return sequences


def _ask(drafter: Drafter, sequences: SequenceBatch, allowed: Sequence[int]) -> list[tuple[Sequence[int], float]]:
    if isinstance(drafter, TextDrafter):
        return [(each.tokens, each.score) for each in drafter.propose(sequences, allowed)]
    assert isinstance(drafter, PerRowDrafter)
    return [(drafter._draft(sequences, row, n) if n else [], 0.0) for row, n in enumerate(allowed)]


def _agreeing(draft: Sequence[int], answer: Sequence[int]) -> int:
    return next((n for n, token in enumerate(draft) if token != answer[n]), len(draft))


def _append(sequences: SequenceBatch, emitted: Sequence[Sequence[int]]) -> None:
    counts = torch.tensor([len(tokens) for tokens in emitted])
    width = int(counts.max())
    padded = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in emitted])
    sequences.append(padded, counts)
    sequences.synchronise(sequences.generated.tolist(), padded)


def _size_table(title: str, sizes: dict[int, dict[str, float]]) -> Table:
    table = Table("tokens", "bytes per token", "us per token", "us per query", "tokens drafted", title=title)
    for size, found in sizes.items():
        names = ("bytes_per_token", "microseconds_per_token", "microseconds_per_query", "tokens_per_query")
        table.add_row(f"{size:,}", *(f"{found[name]:.{n}f}" for name, n in zip(names, (0, 1, 1, 1), strict=True)))
    return table


def _play_table(results: dict[str, dict[str, Any]]) -> Table:
    columns = ("tokens a pass", "accepted", "drafted a pass", "expected a pass", "stood", "ms a round")
    table = Table("drafter", *columns, title="Played texts")
    for name, found in results.items():
        table.add_row(
            name,
            f"{found['tokens_per_pass']:.2f}",
            f"{found['acceptance']:.0%}",
            f"{found['drafted_per_pass']:.2f}",
            f"{found['expected_per_pass']:.2f}",
            f"{found['accepted_per_pass']:.2f}",
            f"{found['milliseconds_per_round']:.2f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
