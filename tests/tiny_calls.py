"""Plain and speculative calls of `generate` on tiny models, side by side."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import torch
from tiny_models import AGREEMENT, noisy_copy, tiny_model
from transformers import PreTrainedModel

import hf_dsde

QUIET = hf_dsde.SpeculationConfig(options=hf_dsde.RuntimeOptions(cost_probe=False))
"""Without the probe a call makes the rounds that its policy asks for, and no other."""


def config_of(base: hf_dsde.SpeculationConfig | None = None, **settings: Any) -> hf_dsde.SpeculationConfig:
    """Return a configuration with some fields of its own or of its options changed."""
    base = base or hf_dsde.SpeculationConfig()
    options = {f.name: settings.pop(f.name) for f in fields(hf_dsde.RuntimeOptions) if f.name in settings}
    return base.replace(options=base.options.replace(**options), **settings)


@functools.cache
def endless_model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """Return an enabled target that ends its text only where a call names an end-of-sequence token.

    Lists among the changes are given as tuples, since results are cached by their arguments.
    """
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()}
    model = tiny_model(family, **listed)
    model.generation_config.eos_token_id = None
    return hf_dsde.enable(model)


@functools.cache
def pair(family: str = "llama", agreement: str = "half", **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a target and a draft that agrees with it as named. Calls leave no trace, so pairs are shared."""
    target = endless_model(family, **changes)
    return target, noisy_copy(target, AGREEMENT[agreement])


def plain(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **arguments: Any) -> torch.LongTensor:
    """Return what stock greedy `generate` returns."""
    return model.generate(**inputs, do_sample=False, **arguments)


def speculative(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    policy: str | hf_dsde.StoppingPolicy,
    config: hf_dsde.SpeculationConfig = QUIET,
    **arguments: Any,
) -> hf_dsde.SpeculativeGenerateOutput:
    """Return the whole output of a speculative call, greedy unless `arguments` say otherwise."""
    return model.generate(
        **inputs,
        assistant_model=draft,
        speculation_policy=policy,
        speculation_config=config,
        return_dict_in_generate=True,
        **{"do_sample": False, **arguments},
    )


def compared(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    policy: str | hf_dsde.StoppingPolicy,
    config: hf_dsde.SpeculationConfig = QUIET,
    **arguments: Any,
) -> hf_dsde.SpeculativeGenerateOutput:
    """Return the output of a greedy speculative call, once its text is that of plain decoding."""
    output = speculative(model, draft, inputs, policy, config, **arguments)
    assert_same_text(output, plain(model, inputs, **arguments))
    return output


def end_tokens(model: PreTrainedModel, inputs: dict[str, torch.Tensor], *places: tuple[int, int]) -> list[int]:
    """Return the tokens that plain decoding writes at the given (row, step): end-of-sequence ids that do occur."""
    steps = max(step for _, step in places) + 1
    text = plain(model, inputs, max_new_tokens=steps)[:, -steps:]
    return [int(text[row, step]) for row, step in places]


def assert_same_text(output: hf_dsde.SpeculativeGenerateOutput, expected: torch.LongTensor) -> None:
    """Compare token for token; say where the rows part when they do."""
    shape = output.sequences.shape
    assert shape == expected.shape, f"{tuple(shape)} instead of {tuple(expected.shape)}"
    different = (output.sequences != expected).nonzero().tolist()
    assert not different, f"rows and columns that differ: {different[:10]}"
