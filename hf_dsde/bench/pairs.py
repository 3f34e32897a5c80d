"""The pairs of models that are measured, by name.

Names are `TARGET/DRAFT-QUALITY`, for example `8B/deep-1B-strong`. The packaged pair is embedded in the shapes TARGET
and DRAFT (see `hf_dsde.bench.inflate`), and QUALITY says how well the draft agrees with its target:

| quality | draft |
| --- | --- |
| `strong` | the target's own weights in 4 bits (groups of 64) |
| `weak` | the draft that this package ships, 4 layers distilled from the target |
| `bad` | the target's own weights in 3 bits (groups of 576) |

`TARGET/eagle3` has the EAGLE-3 head that this package ships, in the width of the target (`hf_dsde.bench.inflate_head`).
`small` is the packaged target with the 4-layer draft as they are, for a CPU, and `small/eagle3` that with the head.
Models of another kind are named by folder or Hub id.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_dsde.bench.inflate import Shape, inflate
from hf_dsde.bench.inflate_head import inflate_head
from hf_dsde.drafting.rounded_copy import rounded_copy
from hf_dsde.heads.eagle3 import Eagle3Head
from hf_dsde.pairs import SHIPPED_DRAFT, SHIPPED_HEAD, Pair, load_packaged_pair
from hf_dsde.utils.checks import check_choice

SMALL = {"small": SHIPPED_DRAFT, "small/eagle3": SHIPPED_HEAD}
"""Pairs that stay as small as they are, by the draft that comes with this package."""
ROUNDING: dict[str, tuple[int, int]] = {"strong": (4, 64), "bad": (3, 576)}
"""Bits and group size of a draft that is the target's rounded copy."""
WEAK = "weak"
EAGLE3 = "eagle3"


@dataclass(frozen=True)
class PairRecipe:
    """How a pair is made from the packaged one.

    Attributes:
        target: Shape of the target, or its name.
        draft: Shape of the draft, or its name; a head has the width of its target, and None.
        quality: A key of `ROUNDING`, `WEAK`, or `EAGLE3` for the head.
    """

    target: Shape | str
    draft: Shape | str | None
    quality: str

    def __post_init__(self) -> None:
        """Check the quality; shapes are checked against the models."""
        check_choice("quality", self.quality, (*ROUNDING, WEAK, EAGLE3))


RECIPES: dict[str, PairRecipe] = {
    f"{target}/{draft}-{quality}": PairRecipe(target, draft, quality)
    for target in ("8B", "32B")
    for draft, quality in (("deep-1B", "strong"), ("1B", WEAK), ("shallow", WEAK), ("deep-1B", "bad"))
} | {f"{target}/{EAGLE3}": PairRecipe(target, None, EAGLE3) for target in ("8B", "32B")}
PAIRS = (*RECIPES, *SMALL)


def make_pair(recipe: PairRecipe, source: Pair, dtype: torch.dtype, device: torch.device | str) -> Pair:
    """Make a pair of the recipe's shapes.

    Args:
        recipe: What to make.
        source: A small pair, best in float32, so that weights are rounded to `dtype` once; its draft is a head where
            the recipe names one. It is left as it is.
        dtype: Of both models made.
        device: Of both models made.
    """
    small_draft = source.draft
    if recipe.quality in ROUNDING:
        bits, group_size = ROUNDING[recipe.quality]
        small_draft = rounded_copy(source.target, bits, group_size)
    # Different seeds: equal noise in both would be a coincidence that no real pair has.
    target = inflate(source.target, recipe.target, seed=0, dtype=dtype, device=device)
    if recipe.draft is None:
        assert isinstance(source.draft, Eagle3Head)
        return Pair(target, inflate_head(source.draft, target, seed=1), source.tokenizer)
    draft: PreTrainedModel = inflate(small_draft, recipe.draft, seed=1, dtype=dtype, device=device)
    return Pair(target, draft, source.tokenizer)


def load_named_pair(name: str, dtype: torch.dtype, device: torch.device | str) -> Pair:
    """A pair out of `PAIRS`.

    Raises:
        ValueError: There is no such pair.
    """
    if check_name(name) in SMALL:
        return load_packaged_pair(dtype, device, draft=SMALL[name])
    recipe = RECIPES[name]
    draft = SHIPPED_HEAD if recipe.quality == EAGLE3 else SHIPPED_DRAFT
    return make_pair(recipe, load_packaged_pair(torch.float32, "cpu", draft=draft), dtype, device)


def check_name(name: str) -> str:
    """The name, if there is such a pair; a ValueError otherwise."""
    return check_choice("pair", name, PAIRS, way_out="Other models are named with --model and --assistant-model.")


def name_of(model: str, assistant: str) -> str:
    """What results call a pair of other models: a folder by its last part, since the rest is of one machine only."""
    return f"{_short(model)} + {_short(assistant)}"


def _short(name: str) -> str:
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name
