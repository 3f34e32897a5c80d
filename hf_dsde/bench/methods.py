"""What a method is, and the methods of this package by their short form on the command line.

    NAME[:ARGUMENT=VALUE,...][+cap][+fill][@DRAFTER][@RUNNER]

For example `dsde`, `dsde:sl_max=8`, `static:4` (short for `static:num_draft_tokens=4`), `static:0` (this package's
decoding without drafts), `dsde+cap` (under a `CostCap`, which no policy is without the word), `dsde+fill` (every row
drafts as many tokens as the batch's longest), `dsde@graph` (with the runner `graph`). A drafter in place of the pair's
draft is named by what `assistant_model` calls it: `static:8@suffix` drafts out of texts alone, `static:8@suffix+draft`
out of texts or with the pair's draft, whichever brings more.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import mean
from types import MappingProxyType
from typing import Any

from torch import Tensor
from transformers import BatchEncoding

from hf_dsde.bench.results import OURS, without_nan
from hf_dsde.config import RUNNERS, SpeculationConfig
from hf_dsde.decoding.cost_measurement import CostMemory, remembering_in
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.integration.drafters import EARLY_EXIT, NAMED_DRAFTERS
from hf_dsde.lossy_acceptance import described
from hf_dsde.measurement.statistics import SpeculationStatistics
from hf_dsde.pairs import Pair, end_tokens
from hf_dsde.replay.specs import PolicySpec

PAIRS_DRAFT = "draft"
"""What a method calls the draft of the pair, among the names of drafters."""


@dataclass(frozen=True)
class Request:
    """What every method of a cell is asked.

    Attributes:
        new_tokens: Tokens per row: exactly so many, or at most where texts may end.
        temperature: 0 takes the best token; more samples from the whole distribution at this temperature.
        stop_at_eos: Whether a row ends at its end token. Otherwise it goes on, so that every method emits as much.
    """

    new_tokens: int
    temperature: float = 0.0
    stop_at_eos: bool = False

    def arguments(self, pair: Pair) -> dict[str, Any]:
        """The arguments of `generate` that say so."""
        arguments: dict[str, Any] = {"max_new_tokens": self.new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            # Without these, `generate` samples among the 50 best tokens.
            arguments |= {"temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        if not self.stop_at_eos:
            # A minimum length would do the same through a logits processor, at a cost. Without an end token, `generate`
            # has no padding token to fall back on.
            arguments |= {"eos_token_id": None, "pad_token_id": pad_token(pair)}
        return arguments


@dataclass(frozen=True)
class Answer:
    """What a call gave.

    Attributes:
        sequences: Prompts and what was generated, shape `[rows, width + new tokens]`, int64, on any device.
        statistics: What `CaseResult.statistics` says of this call, as far as the method tells; `settings` in it are
            those of the method.
        prefill_seconds: What the prompts took, where known.
        own: What this package counted, where it made the call.
    """

    sequences: Tensor
    statistics: dict[str, Any] | None = None
    prefill_seconds: float | None = None
    own: SpeculationStatistics | None = None


class Method(ABC):
    """One way of generating.

    Attributes:
        name: What results call it, unique among those compared.
        kind: `OURS`, `BASELINE` or `PEER`.
        settings: What defines the method, as JSON holds it.
        compiles: Whether it may leave compiled code behind.
    """

    name: str
    kind: str
    settings: Mapping[str, Any] = MappingProxyType({})
    compiles: bool = False

    def refusal(self, rows: int, temperature: float) -> str | None:  # noqa: ARG002 - for those who refuse
        """Why it cannot answer such a batch; None when it can, as far as is known beforehand."""
        return None

    @abstractmethod
    def __call__(self, pair: Pair, inputs: BatchEncoding, request: Request) -> Answer:
        """Answer a batch.

        Args:
            pair: Target, enabled, and draft.
            inputs: `input_ids` and `attention_mask`, `[rows, width]`, int64, padded left, on the target's device.
            request: What to generate.
        """

    def summarise(self, answers: Sequence[Answer], seconds: float) -> dict[str, Any] | None:  # noqa: ARG002
        """What `CaseResult.statistics` says of calls that took so many seconds together; None when nothing is known."""
        return None

    def close(self) -> None:  # noqa: B027 - most keep nothing
        """Let go of what was kept between calls. A later call sets it up again."""


class PolicyMethod(Method):
    """Speculation by this package.

    Args:
        name: What results call it.
        config: How to speculate.
        drafters: Who drafts: names of drafters, `draft` for the pair's draft. Named ones are made again for each call,
            and so remember no answer of the one before.
    """

    kind = OURS

    def __init__(self, name: str, config: SpeculationConfig, drafters: Sequence[str] = (PAIRS_DRAFT,)) -> None:
        # A name that says nothing of it would pass for exact.
        self.name = name if config.acceptance is None else f"{name}, {described(config.acceptance)}"
        self.config, self.drafters = config, tuple(drafters)
        self.settings = config.to_dict() | asdict(config.options) | {"drafters": list(drafters)}
        self._costs = CostMemory()

    def __call__(self, pair: Pair, inputs: BatchEncoding, request: Request) -> Answer:
        """Answer a batch; see `Method`. What passes cost, it knows from its own calls only."""
        target: Any = pair.target
        drafters = [pair.draft if name == PAIRS_DRAFT else name for name in self.drafters]
        with remembering_in(self._costs):
            output = target.generate(
                **inputs,
                **request.arguments(pair),
                assistant_model=drafters if len(drafters) > 1 else drafters[0],
                speculation_policy=self.config,
                return_dict_in_generate=True,
            )
        own: SpeculationStatistics = output.speculation_statistics
        return Answer(output.sequences, prefill_seconds=own.prefill_seconds, own=own)

    def close(self) -> None:
        """Forget what passes cost."""
        self._costs = CostMemory()

    def summarise(self, answers: Sequence[Answer], seconds: float) -> dict[str, Any] | None:
        """Counts, ratios and seconds of this package's statistics."""
        parts = [answer.own for answer in answers if answer.own is not None]
        statistics = SpeculationStatistics.merge(parts)
        rounds, drafted = statistics.rounds, statistics.drafted + statistics.past_end
        summary: dict[str, Any] = {
            "rounds": len(rounds),
            "emitted": statistics.emitted,
            "tokens_per_round": statistics.block_efficiency,
            "acceptance_rate": statistics.acceptance_rate,
            "text_drafted": statistics.text_drafted,
            "text_accepted": statistics.text_accepted,
            "acceptance_by_position": list(statistics.acceptance_by_position),
            "drafted_by_position": list(statistics.drafted_by_position),
            "accepted_by_position": list(statistics.accepted_by_position),
            "mean_draft_length": drafted / statistics.row_rounds if statistics.row_rounds else None,
            "mean_draft_steps": mean(r.draft_steps for r in rounds) if rounds else None,
            "mean_pass_width": mean(r.pass_width for r in rounds) if rounds else None,
            "predicted_speedup": statistics.predicted_speedup,
            "plain_step_seconds": statistics.plain_step_seconds,
            "draft_step_seconds": statistics.draft_step_seconds,
            "recorded_passes": statistics.recorded_passes,
            "recording_bytes": statistics.recording_bytes,
            "seconds": {
                "draft": statistics.draft_seconds,
                "verify": statistics.verify_seconds,
                "bookkeeping": statistics.bookkeeping_seconds,
                "policy": statistics.policy_seconds,
                "prefill": statistics.prefill_seconds,
                "idle": seconds - statistics.total_seconds,
                "recording": statistics.recording_seconds,
            },
        }
        # Ratios without a denominator would be null in the file, so they are here.
        return {name: without_nan(value) for name, value in summary.items()}


def parse_policy(
    text: str, base: SpeculationConfig | None = None, runner: str | None = None, **changes: Any
) -> PolicyMethod:
    """The method of a policy's short form.

    Args:
        text: See this module's description.
        base: What is not said otherwise; the defaults when None. Its policy's arguments hold for that policy alone.
        runner: Where the text names none; the configuration's own when None. It becomes part of the name.
        changes: Further fields of `SpeculationConfig`, and fields of its `RuntimeOptions`.

    Raises:
        TypeError: An argument or field has the wrong type.
        ValueError: The text has another form, or names what does not exist.
    """
    body, *named = text.split("@")
    drafters, own_runner = _drafters_and_runner(text, named)
    runner = own_runner or runner
    spec = PolicySpec.parse(re.sub(r"^static:(\d+)(?=$|\+)", r"static:num_draft_tokens=\1", body))
    base = base or SpeculationConfig()
    filled = spec.fill_to_batch or base.fill_to_batch
    # `+cap` is about policies; whether texts alone are priced is the configuration's, as in any call.
    from_texts = set(drafters) <= {*NAMED_DRAFTERS} - {EARLY_EXIT}
    capped = spec.cost_cap or (base.cost_cap if from_texts else False)
    values: dict[str, Any] = {"policy": spec.policy, "cost_cap": capped, "fill_to_batch": filled}
    if spec.arguments or spec.policy != base.policy:
        values["policy_arguments"] = spec.arguments
    if runner is not None:
        values["runner"] = runner
    options = {f.name: changes.pop(f.name) for f in fields(RuntimeOptions) if f.name in changes}
    if options:
        values["options"] = base.options.replace(**options)
    name = body + ("" if drafters == (PAIRS_DRAFT,) else f"@{'+'.join(drafters)}") + (f"@{runner}" if runner else "")
    return PolicyMethod(name, base.replace(**values | changes), drafters)


def names_runner(text: str) -> bool:
    """Whether a policy's short form names a runner of its own.

    Raises:
        ValueError: It has another form.
    """
    return _drafters_and_runner(text, text.split("@")[1:])[1] is not None


def _drafters_and_runner(text: str, named: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """What stands after the @ of a short form, at most one of each; the pair's draft where no drafter is named."""
    drafters = [tuple(name.split("+")) for name in named if set(name.split("+")) <= {PAIRS_DRAFT, *NAMED_DRAFTERS}]
    runners = [name for name in named if name in RUNNERS]
    # A drafter out of texts, and one that is none.
    both = len(drafters) == 1 and len(drafters[0]) == 2 and len({*drafters[0]} - {PAIRS_DRAFT, EARLY_EXIT}) == 1
    both = both and len({*drafters[0]}) == 2
    if (
        len(drafters) + len(runners) < len(named)
        or max(len(drafters), len(runners)) > 1
        or not (both or all(len(names) == 1 for names in drafters))
    ):
        texts = ", ".join(NAMED_DRAFTERS)
        raise ValueError(
            f"`policy` is {text!r}, but what stands after an @ is a runner ({', '.join(RUNNERS)}) or a drafter: one of "
            f"{texts}, with +{PAIRS_DRAFT} after it to draft with the pair's draft as well. 'static:8@suffix' and "
            f"'static:8@suffix+{PAIRS_DRAFT}@graph' are such forms."
        )
    return drafters[0] if drafters else (PAIRS_DRAFT,), runners[0] if runners else None


def pad_token(pair: Pair) -> int:
    """The token that padding is written in; 0 where neither model nor tokenizer names one."""
    config: Any = pair.target.generation_config
    named = (config.pad_token_id, pair.tokenizer.pad_token_id, *end_tokens(pair))
    return next((token for token in named if token is not None), 0)
