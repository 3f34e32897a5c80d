"""The demo: eight requests in one batch, plain `generate` against speculation, on the packaged pair.

Methods are timed in turn, round by round, so that a machine which gets slower meanwhile slows all of them; each runs
once before the clock starts. This module measures and returns; `demo_view` shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import BatchEncoding

from hf_dsde.cli.demo.prompts import DEMO_PROMPTS, DemoPrompt
from hf_dsde.config import SpeculationConfig
from hf_dsde.divergence import BatchComparison, Verdict, compare_outputs
from hf_dsde.integration.hooks import disable, enable
from hf_dsde.measurement import provenance
from hf_dsde.measurement.statistics import SpeculationStatistics
from hf_dsde.pairs import Pair, answer_lengths, encode, end_tokens, generate_once

PLAIN = "plain generate"
WARM_UP_TOKENS = 4

PairLoader = Callable[[torch.dtype, torch.device], Pair]


@dataclass(frozen=True)
class Method:
    """One way of generating; without a speculation it is plain `generate`."""

    name: str
    speculation: SpeculationConfig | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot equal plain `generate`."""
        if self.speculation is not None and self.speculation.acceptance is not None:
            raise ValueError(
                f"`speculation` accepts tokens by a lossy rule, {self.speculation.acceptance}, but the demo expects "
                "the text of plain `generate`. Use SpeculationConfig(acceptance=None)."
            )


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs.

    Attributes:
        dtypes: Each is loaded and measured for itself.
        methods: Compared with plain `generate`, which always runs.
        max_new_tokens: Limit of every answer.
        repeats: Timed runs of every method.
        device: Where both models run.
        prompts: The batch.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    methods: tuple[Method, ...] = (Method("dsde", SpeculationConfig("dsde")),)
    max_new_tokens: int = 64
    repeats: int = 3
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    prompts: tuple[DemoPrompt, ...] = DEMO_PROMPTS

    @property
    def runs(self) -> int:
        """How many times `generate` is called, warm-up included."""
        return len(self.dtypes) * (1 + len(self.methods)) * (1 + self.repeats)


@dataclass(frozen=True)
class MethodResult:
    """What one method did in one dtype.

    Attributes:
        name: Of the method.
        emitted: Tokens of all answers, up to their ends.
        seconds: Wall time of each timed call, prompts included.
        texts: The answers.
        statistics: Of the last call; None for plain `generate`.
        comparison: With plain `generate`'s tokens; None for itself.
    """

    name: str
    emitted: int
    seconds: tuple[float, ...]
    texts: tuple[str, ...]
    statistics: SpeculationStatistics | None = None
    comparison: BatchComparison | None = None

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second in the median call."""
        return self.emitted / median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Tokens per second of the slowest and of the fastest call."""
        return self.emitted / max(self.seconds), self.emitted / min(self.seconds)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per row and target pass; exactly 1 for plain `generate`."""
        return 1.0 if self.statistics is None else self.statistics.block_efficiency

    def to_dict(self) -> dict[str, Any]:
        """Everything in types that `json.dumps` takes."""
        slowest, fastest = self.spread
        return {
            "method": self.name,
            "emitted": self.emitted,
            "seconds": list(self.seconds),
            "tokens_per_second": {"median": self.tokens_per_second, "slowest": slowest, "fastest": fastest},
            "tokens_per_pass": self.tokens_per_pass,
            "equality": None if self.comparison is None else {v.value: self.comparison.count(v) for v in Verdict},
            "statistics": None if self.statistics is None else self.statistics.to_dict(),
            "texts": list(self.texts),
        }


@dataclass(frozen=True)
class DtypeResult:
    """All methods in one dtype, plain `generate` first."""

    dtype: torch.dtype
    methods: tuple[MethodResult, ...]

    def speedup(self, method: MethodResult) -> float:
        """How many times as fast as plain `generate`."""
        return method.tokens_per_second / self.methods[0].tokens_per_second


@dataclass(frozen=True)
class DemoResult:
    """What `run_demo` measured."""

    options: DemoOptions
    device_name: str
    prompt_lengths: tuple[int, ...]
    dtypes: tuple[DtypeResult, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every method gave plain `generate`'s tokens in every dtype that promises it."""
        return all(
            method.comparison is None or method.comparison.is_exact
            for result in self.dtypes
            if torch.finfo(result.dtype).bits >= torch.finfo(torch.float32).bits
            for method in result.methods
        )

    def to_dict(self) -> dict[str, Any]:
        """Result and provenance in types that `json.dumps` takes."""
        return {
            "schema_version": 1,
            "provenance": provenance.collect(self.options.device),
            "max_new_tokens": self.options.max_new_tokens,
            "repeats": self.options.repeats,
            "prompts": [
                {"kind": prompt.kind, "tokens": length}
                for prompt, length in zip(self.options.prompts, self.prompt_lengths, strict=True)
            ],
            "dtypes": {_name(result.dtype): [method.to_dict() for method in result.methods] for result in self.dtypes},
        }


def run_demo(options: DemoOptions, load: PairLoader, on_step: Callable[[str], None] = lambda _: None) -> DemoResult:
    """Load, generate, time and compare.

    Args:
        options: What to run.
        load: Gives the pair for a dtype and a device.
        on_step: Told what comes next, before every loading and every call of `generate`.
    """
    results = []
    lengths: tuple[int, ...] = ()
    for dtype in options.dtypes:
        on_step(f"loading the models in {_name(dtype)}")
        pair = load(dtype, options.device)
        inputs = encode(pair.tokenizer, [prompt.text for prompt in options.prompts]).to(options.device)
        lengths = tuple(inputs["attention_mask"].sum(-1).tolist())
        enable(pair.target)
        try:
            methods = _measure(pair, inputs, options, on_step)
        finally:
            disable(pair.target)
        results.append(DtypeResult(dtype, methods))
    return DemoResult(options, provenance.describe_device(options.device), lengths, tuple(results))


def _measure(
    pair: Pair, inputs: BatchEncoding, options: DemoOptions, on_step: Callable[[str], None]
) -> tuple[MethodResult, ...]:
    """Warm every method up, time all of them in turn, and compare each with plain `generate`."""
    methods = (Method(PLAIN), *options.methods)
    dtype = _name(pair.target.dtype)
    warm_up = _warm_up_inputs(inputs)
    for method in methods:
        on_step(f"{dtype}: {method.name}, warm-up")
        generate_once(pair, warm_up, method.speculation, max_new_tokens=WARM_UP_TOKENS, do_sample=False)
    seconds: dict[str, list[float]] = {method.name: [] for method in methods}
    outputs: dict[str, Any] = {}
    for repeat in range(options.repeats):
        for method in methods:
            on_step(f"{dtype}: {method.name}, run {repeat + 1} of {options.repeats}")
            outputs[method.name], elapsed = generate_once(
                pair, inputs, method.speculation, max_new_tokens=options.max_new_tokens, do_sample=False
            )
            seconds[method.name].append(elapsed)
    expected = outputs[PLAIN].sequences
    return tuple(
        _result(pair, inputs, method, outputs[method.name], seconds[method.name], expected) for method in methods
    )


def _warm_up_inputs(inputs: BatchEncoding) -> BatchEncoding:
    """The batch itself on a GPU, where kernels are chosen by shape; a cheap part of it on a CPU, where prompts cost."""
    lengths = inputs["attention_mask"].sum(-1)
    if lengths.device.type != "cpu":
        return inputs
    rows = lengths.argsort()[:2]
    width = int(lengths[rows].max())
    return BatchEncoding({name: tensor[rows, -width:] for name, tensor in inputs.items()})


def _result(
    pair: Pair,
    inputs: BatchEncoding,
    method: Method,
    output: Any,
    seconds: list[float],
    expected: Tensor,
) -> MethodResult:
    """What `method` did, from its last output and all its times."""
    width = inputs["input_ids"].shape[1]
    ends = end_tokens(pair)
    texts = pair.tokenizer.batch_decode(output.sequences[:, width:], skip_special_tokens=True)
    comparison = None
    if method.speculation is not None:
        comparison = compare_outputs(
            pair.target, inputs["input_ids"], inputs["attention_mask"], expected, output.sequences, eos_token_id=ends
        )
    return MethodResult(
        name=method.name,
        emitted=int(answer_lengths(output.sequences, width, ends).sum()),
        seconds=tuple(seconds),
        texts=tuple(text.strip() for text in texts),
        statistics=getattr(output, "speculation_statistics", None),
        comparison=comparison,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
