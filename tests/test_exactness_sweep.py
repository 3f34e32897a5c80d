"""Every pair of family, agreement, policy and ends in the text or none, at batch sizes 1 to 9.

`test_exactness.py` looks at the corners one by one; this looks at everything once, and so takes half a minute.
Batches with an assistant are what transformers refuses (transformers #32165, #29769).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_models import AGREEMENT, FAMILIES, PAD, noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths

import hf_dsde
from hf_dsde import StoppingPolicy

NEW_TOKENS = 40
BATCH_SIZES = range(1, 10)


def policies(seed: int) -> dict[str, str | StoppingPolicy]:
    named: dict[str, str | StoppingPolicy] = {name: name for name in hf_dsde.available_policies()}
    return {
        **named,
        "dsde, reference": hf_dsde.DSDEStoppingPolicy(variant="reference"),
        "random": RandomLengths(seed=seed),
        "random, with stops": RandomLengths(seed=seed, stop_probability=0.3),
    }


def ends_in(text: torch.Tensor, seed: int) -> list[int]:
    """Tokens of every other row's text, from somewhere inside it, that are to end texts."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(3, NEW_TOKENS - 2, (len(text),), generator=generator)
    return sorted({int(row[place]) for row, place in zip(text[::2], places, strict=False)})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_policy_gives_plain_text_whatever_the_draft(family: str) -> None:
    """A batch size a family; together the families go through all of 1 to 9.

    Of the combinations of policy, agreement and ends a family has every sixth, and the next families the others: each
    policy meets each family, and each of these combinations comes once or twice.
    """
    number = list(FAMILIES).index(family)
    rows = BATCH_SIZES[number % len(BATCH_SIZES)]
    target = tiny_model(family, seed=number)
    target.generation_config.eos_token_id = None
    inputs = ragged_batch(random_lengths(rows, seed=number), seed=number)
    arguments = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": PAD}
    endless = target.generate(**arguments)
    ends = ends_in(endless[:, inputs["input_ids"].shape[1] :], number)
    ending = target.generate(**arguments, eos_token_id=ends)
    hf_dsde.enable(target)
    cases = itertools.product(((None, endless), (ends, ending)), AGREEMENT.items())
    for place, ((eos, plain), (agreement, noise)) in enumerate(cases):
        if eos is not None:
            arguments["eos_token_id"] = eos
        draft = noisy_copy(target, noise, seed=number + 1)
        for turn, (name, policy) in enumerate(policies(number).items()):
            if (turn + place + number) % 6 == 0:
                text = target.generate(**arguments, assistant_model=draft, speculation_policy=policy)
                assert torch.equal(text, plain), f"rows {rows}, {agreement} agreement, {name}, ends {eos}"
