"""Inputs for the fused kernels, and slow float64 loops that say what should come out of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_dsde.kernels.block import Block
from hf_dsde.kernels.reference import LowRank

POISON = 300.0
"""Lies in every slot that no token may see: large enough to spoil a result, small enough for every dtype."""


@dataclass(frozen=True)
class AttentionCase:
    """One row per entry: tokens already stored, and tokens of the block.

    `layout`: "packed"; or padded to the widest row, with the padding "left" or "right" of the tokens, and counted.
    `tail`: tokens without a position after all rows, counted by none. `tree`: each token but a row's first has an
    earlier one as its parent, drawn at random, so that branches are interleaved and several have one depth.
    """

    stored: tuple[int, ...]
    widths: tuple[int, ...]
    layout: str = "packed"
    tail: int = 0
    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    window: int | None = None
    tree: bool = False


ATTENTION_CASES = {
    "packed": AttentionCase((40, 0, 7), (3, 1, 5)),
    "a row without tokens": AttentionCase((40, 9, 70), (2, 0, 3)),
    "padding in front": AttentionCase((40, 0, 21), (2, 4, 1), "left"),
    "padding after": AttentionCase((40, 0, 21), (2, 4, 1), "right"),
    "a row of padding only": AttentionCase((40, 30, 21), (2, 0, 1), "left"),
    "a tail that no row counts": AttentionCase((12, 33), (2, 3), tail=4),
    "nothing but padding": AttentionCase((12, 33), (0, 0), tail=3),
    "more queries than a program takes": AttentionCase((20, 3), (50, 3), heads=10),
    "more padding than a program takes": AttentionCase((5, 3, 4, 2), (20, 0, 1, 0), "left", tail=5, heads=2),
    "one head per key-value head": AttentionCase((20, 3), (2, 3), heads=2),
    "odd sizes of heads": AttentionCase((50, 3), (2, 3), dim=24, value_dim=40),
    "window": AttentionCase((60, 5, 20), (4, 3, 1), window=7),
    "window of one": AttentionCase((60, 5), (4, 3), window=1),
    "window wider than the text": AttentionCase((60, 5), (4, 3), window=150),
    "window and padding": AttentionCase((100, 90, 20), (2, 4, 0), "left", tail=2, window=7),
    "window over several blocks": AttentionCase((400, 150), (2, 5), "right", window=150),
    "long and short": AttentionCase((530, 2, 260), (2, 3, 1), "left"),
    "trees": AttentionCase((40, 0, 7), (9, 5, 1), tree=True),
    "trees and padding in front": AttentionCase((40, 0, 21, 3), (6, 4, 1, 0), "left", tail=2, tree=True),
    "trees and padding after": AttentionCase((40, 0, 21), (6, 4, 1), "right", tree=True),
    "trees in a window": AttentionCase((40, 0, 21), (16, 9, 2), "left", window=3, tree=True),
    "trees in a window over several blocks": AttentionCase((300, 60), (18, 5), window=150, tree=True),
    "as many tokens as a tree may have": AttentionCase((20, 3), (64, 64), heads=2, tree=True),
}


@dataclass(frozen=True)
class AttentionInput:
    q: Tensor
    keys: Tensor
    values: Tensor
    block: Block
    scaling: float
    window: int | None
    reach: int


def make_attention(
    case: AttentionCase, dtype: torch.dtype, device: str = "cpu", seed: int = 0, slack: int = 3
) -> AttentionInput:
    """Draw the tensors of a case; the cache has `slack` slots more than the longest row, and a discard slot."""
    generator = torch.Generator().manual_seed(seed)
    widest = max(case.widths)
    draws = random.Random(seed)
    rows, starts, counts = [], [], []
    cells: list[tuple[int, int, int]] = []  # position, slot, ancestors
    for row, (stored, width) in enumerate(zip(case.stored, case.widths, strict=True)):
        padding = [] if case.layout == "packed" else [(-1, -1, 0)] * (widest - width)
        real = [(place, place, 0) for place in range(stored, stored + width)]
        real = tree_of(stored, width, draws) if case.tree else real
        line = padding + real if case.layout == "left" else real + padding
        starts.append(len(cells))
        counts.append(len(line))
        rows += [row] * len(line)
        cells += line
    rows += [len(starts) - 1] * case.tail
    cells += [(-1, -1, 0)] * case.tail
    positions, cell_slots, ancestors = (torch.tensor(cells).view(-1, 3)[:, column].to(device) for column in range(3))
    total, longest = len(positions), max(s + w for s, w in zip(case.stored, case.widths, strict=True))
    slots = longest + slack + 1
    q = torch.randn(total, case.heads, case.dim, generator=generator)
    keys = torch.randn(len(starts), case.kv_heads, slots, case.dim, generator=generator)
    values = torch.randn(len(starts), case.kv_heads, slots, case.value_dim, generator=generator)
    for row, (stored, width) in enumerate(zip(case.stored, case.widths, strict=True)):
        hidden = max(1, stored + width)
        keys[row, :, hidden:] = values[row, :, hidden:] = POISON
    block = Block(
        tokens=torch.zeros(total, dtype=torch.int64, device=device),
        rows=torch.tensor(rows, device=device),
        positions=positions.contiguous(),
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        counts=torch.tensor(counts, dtype=torch.int32, device=device),
        max_count=max(counts),
        slots=cell_slots.contiguous() if case.tree else None,
        ancestors=ancestors.contiguous() if case.tree else None,
    )
    q, keys, values = (states.to(device, dtype) for states in (q, keys, values))
    reach = max(64, math.ceil(longest / 64) * 64)
    return AttentionInput(q, keys, values, block, case.dim**-0.5, case.window, reach)


def tree_of(stored: int, width: int, draws: random.Random) -> list[tuple[int, int, int]]:
    """Position, slot and ancestors of the tokens of a random tree."""
    tokens: list[tuple[int, int, int]] = []
    for place in range(width):
        depth, _, above = tokens[draws.randrange(place)] if place else (stored - 1, 0, 0)
        seen = above | 1 << place
        tokens.append((depth + 1, stored + place, seen - (1 << 64) if seen >> 63 else seen))
    return tokens


def seen_slots(given: AttentionInput, token: int) -> list[int]:
    """The slots that a token sees, from the definition."""
    block, window = given.block, given.window
    position = int(block.positions[token])
    if position < 0:
        return [0]
    if block.ancestors is None:
        return list(range(0 if window is None else max(0, position + 1 - window), position + 1))
    own = [
        index
        for index in range(len(block.rows))
        if block.rows[index] == block.rows[token] and block.positions[index] >= 0
    ]
    places = {slot: slot for slot in range(int(block.slots[own[0]]))}
    for bit, index in enumerate(own):
        if int(block.ancestors[token]) >> bit & 1:
            places[int(block.slots[index])] = int(block.positions[index])
    return [slot for slot, place in places.items() if window is None or place > position - window]


def slow_attention(given: AttentionInput) -> Tensor:
    """`[T, Hq * Dv]`, float64, from the definition."""
    q, keys, values = (states.double().cpu() for states in (given.q, given.keys, given.values))
    shared = q.shape[1] // keys.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], values.shape[-1], dtype=torch.float64)
    for token, row in enumerate(given.block.rows.tolist()):
        seen = seen_slots(given, token)
        for head in range(q.shape[1]):
            scores = [given.scaling * float(q[token, head] @ key) for key in keys[row, head // shared, seen]]
            largest = max(scores)
            weights = torch.tensor([math.exp(score - largest) for score in scores], dtype=torch.float64)
            out[token, head] = weights @ values[row, head // shared, seen] / weights.sum()
    return out.flatten(1)


def without_positions(given: AttentionInput) -> AttentionInput:
    """The same input with every token taken away."""
    nowhere = torch.full_like(given.block.positions, -1)
    return replace(given, block=replace(given.block, positions=nowhere, slots=nowhere))


def slow_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm in float64, one vector at a time, unrounded before the weight."""
    vectors = []
    for vector in x.double():
        root = math.sqrt(sum(element * element for element in vector.tolist()) / len(vector) + eps)
        vectors.append(vector / root * weight.double())
    return torch.stack(vectors)


def slow_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in float64, element by element."""
    pairs = zip(gate.double().flatten().tolist(), up.double().flatten().tolist(), strict=True)
    flat = [g / (1 + math.exp(-g)) * u if g > -700 else 0.0 for g, u in pairs]
    return torch.tensor(flat, dtype=torch.float64).view(gate.shape)


def slow_rotation(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every head of `[T, heads, D]` turned in float64, pair by pair."""
    states, cos, sin = states.double(), cos.double(), sin.double()
    half = states.shape[-1] // 2
    out = torch.empty_like(states)
    for i in range(half):
        left, right = states[..., i], states[..., i + half]
        out[..., i] = left * cos[:, None, i] - right * sin[:, None, i]
        out[..., i + half] = right * cos[:, None, i + half] + left * sin[:, None, i + half]
    return out


def slow_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[T, N]`, float64, unrounded: one dot product at a time."""
    x, weight = x.detach().double().cpu(), weight.detach().double().cpu()
    out = torch.tensor([[float(token @ row) for row in weight] for token in x], dtype=torch.float64)
    return out if bias is None else out + bias.double().cpu()


def rounded_gated(gates: Tensor, ups: Tensor, dtype: torch.dtype) -> Tensor:
    """The gated product of two exact products, rounded as four operations in a row round it."""
    # In float32 exponentials overflow, so that what is far below 0 becomes 0.
    gates = gates.to(dtype).to(torch.promote_types(dtype, torch.float32))
    activated = (gates / (1 + torch.exp(-gates))).to(dtype)
    return (activated.double() * ups.to(dtype).double()).to(dtype)


DISTRIBUTIONS = {
    "few tokens": lambda: torch.randn(3, 50),
    "flat": lambda: torch.zeros(2, 4097),
    "peaked": lambda: 300 * torch.randn(2, 700),
    "large and alike": lambda: 1e4 + torch.randn(2, 300),
    "the two largest one after another": lambda: torch.arange(5000.0)[None] / 100,
    "the two largest in one lane": lambda: torch.full((1, 9000), -3.0).index_fill_(1, torch.tensor([7, 7 + 4096]), 2.0),
    "excluded tokens": lambda: torch.randn(4, 1000).masked_fill(torch.rand(4, 1000) < 0.7, -math.inf),
    "one token is left": lambda: torch.full((2, 90), -math.inf).index_fill_(1, torch.tensor([33]), 5.0),
    "rows out of wider ones": lambda: torch.randn(3, 5, 80)[:, 2, :70],
    "columns apart": lambda: torch.randn(70, 3).T,
}
"""Logits by what is special about them."""


def slow_entropy_and_top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Entropies and the two largest probabilities, float64, token by token."""
    entropies, tops = [], []
    for row in logits.double().cpu().tolist():
        largest = max(row)
        weights = [math.exp(value - largest) for value in row]
        total = math.fsum(weights)
        probabilities = [weight / total for weight in weights]
        entropies.append(-math.fsum(p * math.log(p) for p in probabilities if p > 0))
        tops.append(sorted(probabilities)[-1:-3:-1])
    return torch.tensor(entropies, dtype=torch.float64), torch.tensor(tops, dtype=torch.float64)


def _apart(vocabulary: int, count: int) -> Tensor:
    return torch.randperm(vocabulary)[:count].sort().values


DIVERGENCES = {
    "few tokens": lambda: (torch.randn(3, 2, 50), torch.randn(3, 2, 50), None),
    "nearly the same": lambda: ((x := 3 * torch.randn(2, 3, 5000)), x + 1e-3 * torch.randn(2, 3, 5000), None),
    "peaked and wrong": lambda: (300 * torch.randn(2, 1, 700), 300 * torch.randn(2, 1, 700), None),
    "some tokens": lambda: (3 * torch.randn(2, 4, 9000), 3 * torch.randn(2, 4, 4200), _apart(9000, 4200)),
    "some tokens, in any order": lambda: (
        3 * torch.randn(2, 4, 900),
        torch.randn(2, 4, 300),
        torch.randperm(900)[:300],
    ),
    "all tokens, in any order": lambda: (3 * torch.randn(2, 2, 5000), torch.randn(2, 2, 5000), torch.randperm(5000)),
    "the first tokens": lambda: (3 * torch.randn(2, 4, 900), torch.randn(2, 4, 800), None),
    "one token": lambda: (torch.randn(2, 2, 40), torch.randn(2, 2, 1), torch.tensor([17])),
    "the target excludes tokens": lambda: (
        torch.randn(2, 3, 900).masked_fill(torch.rand(2, 3, 900) < 0.7, -math.inf),
        torch.randn(2, 3, 200),
        _apart(900, 200),
    ),
    "the draft excludes tokens": lambda: (
        torch.randn(2, 3, 900),
        torch.randn(2, 3, 900).masked_fill(torch.rand(2, 3, 900) < 0.7, -math.inf),
        None,
    ),
    "columns and tokens out of more": lambda: (torch.randn(3, 5, 80)[:, :2], torch.randn(3, 2, 70)[..., :60], None),
    "tokens apart": lambda: (torch.randn(2, 80, 3).mT, torch.randn(2, 60, 3).mT, _apart(80, 60)),
}
"""The target's logits, the draft's and its tokens, by what is special about them."""


def slow_divergence(target: Tensor, draft: Tensor, ids: Tensor | None, floor: float = 1e-8) -> Tensor:
    """KL(target || draft), float64, token by token; a token that the draft does not know has the floor."""

    def law(logits: list[float]) -> list[float]:
        largest = max(logits)
        weights = [math.exp(value - largest) for value in logits]
        total = math.fsum(weights)
        return [weight / total for weight in weights]

    tokens = list(range(draft.shape[-1])) if ids is None else ids.tolist()
    result = []
    for p_logits, q_logits in zip(target.flatten(0, 1).tolist(), draft.flatten(0, 1).tolist(), strict=True):
        likely = dict(zip(tokens, law(q_logits), strict=True))
        terms = [p * math.log(p / max(likely.get(x, 0.0), floor)) for x, p in enumerate(law(p_logits)) if p > 0]
        result.append(max(math.fsum(terms), 0.0))
    return torch.tensor(result, dtype=torch.float64).view(target.shape[:2])


NUCLEI = {
    "few tokens": (lambda: torch.randn(3, 50), 7, 0.8),
    "one of the best": (lambda: torch.randn(2, 50), 1, 0.5),
    "more best than tokens": (lambda: torch.randn(2, 9), 9, 0.6),
    "all of the best": (lambda: torch.randn(3, 5000), 20, 1.0),
    "the first alone": (lambda: torch.randn(3, 5000), 20, 0.0),
    "real numbers": (lambda: 3 * torch.randn(5, 9000), 20, 0.8),
    "many of the best": (lambda: torch.randn(2, 9000), 600, 0.85),
    "rounded to bfloat16": (lambda: (4 + torch.randn(6, 9000)).bfloat16().float(), 20, 0.77),
    "coarse": (lambda: torch.randn(6, 9000).round(), 20, 0.77),
    "a tie at the end of the best": (lambda: torch.zeros(2, 5000).index_fill_(1, torch.arange(3), 1.0), 5, 0.4),
    "a tie in front of the end": (lambda: -torch.arange(5000.0).div(4).floor()[None].expand(2, -1) / 9, 18, 0.7),
    "flat": (lambda: torch.zeros(2, 4097), 3, 0.3),
    "flat but for the end": (lambda: torch.zeros(2, 8200).index_fill_(1, torch.arange(8190, 8200), 2.0), 10, 0.55),
    "excluded tokens": (lambda: torch.randn(4, 1000).masked_fill(torch.rand(4, 1000) < 0.7, -math.inf), 20, 0.9),
    "fewer left than the best": (
        lambda: torch.full((2, 900), -math.inf).index_copy_(1, torch.arange(4), torch.randn(2, 4)),
        20,
        0.9,
    ),
    "one token is left": (lambda: torch.full((2, 90), -math.inf).index_fill_(1, torch.tensor([33]), 5.0), 8, 0.9),
    "large and apart": (lambda: 1e4 * torch.randn(3, 300), 6, 0.9),
    "rows out of wider ones": (lambda: torch.randn(3, 5, 80)[:, 2, :70], 11, 0.8),
    "columns apart": (lambda: torch.randn(70, 3).T, 11, 0.8),
}
"""Scores, how many are best, and the probability that the nucleus has, by what is special about them."""


def slow_nucleus(scores: Tensor, count: int, top_p: float) -> Tensor:
    """What `nucleus` keeps, decided token by token in float64; of equal scores those of the smallest ids."""
    kept = torch.full_like(scores, -math.inf)
    for row, values in enumerate(scores.double().cpu().tolist()):
        last = sorted(values)[-count]
        best = sorted((-value, token) for token, value in enumerate(values) if value >= last and value > -math.inf)
        weights = [math.exp(best[0][0] - negative) for negative, _ in best]
        mass = math.fsum(weights)
        before = 0.0
        for place, ((_, token), weight) in enumerate(zip(best, weights, strict=True)):
            if place == 0 or before < top_p * mass * (1 - 1e-12):
                kept[row, token] = scores[row, token]
            before += weight
    return kept


@dataclass(frozen=True)
class ProductCase:
    """Sizes of a launch: tokens, width, rows of each weight, and which of them has a bias."""

    tokens: int
    width: int
    rows: tuple[int, ...]
    biased: tuple[bool, ...] = (False, False, False)


PRODUCT_CASES = {
    "one token": ProductCase(1, 64, (48, 16, 16)),
    "rows that are no multiple of a block": ProductCase(5, 64, (41, 7, 3), (True, False, True)),
    "a width that is no multiple of a block": ProductCase(8, 112, (20, 36), (False, True)),
    "an odd width": ProductCase(3, 77, (9, 33, 20), (False, True, False)),
    "one weight": ProductCase(16, 128, (50,), (True,)),
    "one weight without bias": ProductCase(2, 272, (16,)),
    "more tokens than a tile has": ProductCase(17, 96, (32, 8, 24), (True, True, True)),
    "as many tokens as it takes": ProductCase(64, 256, (16, 24), (True, False)),
    "a short width": ProductCase(4, 16, (16, 16, 16)),
}


def make_products(
    case: ProductCase, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """Draw x, which is a view into wider rows, weights, and biases."""
    generator = torch.Generator().manual_seed(1)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    wide = draw(case.tokens, case.width + 16)
    wide[:, case.width :] = float("nan")
    weights = [draw(rows, case.width) / case.width**0.5 for rows in case.rows]
    biases = [draw(rows) if biased else None for rows, biased in zip(case.rows, case.biased, strict=False)]
    return wide[:, : case.width], weights, biases


@dataclass(frozen=True)
class LowRankCase:
    """Sizes of a call: tokens, width, rows of each module, and the ranks of its adapters in their order."""

    tokens: int
    width: int
    rows: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]


LOW_RANK_CASES = {
    "one token": LowRankCase(1, 64, (48, 16, 16), ((16,), (16,), (16,))),
    "one module": LowRankCase(5, 96, (80,), ((16,),)),
    "rank one": LowRankCase(3, 64, (33, 20), ((1,), (1,))),
    "ranks that differ": LowRankCase(4, 80, (70, 9, 64), ((3,), (16,), (40,))),
    "a rank of more than is multiplied at once": LowRankCase(2, 64, (20, 16), ((150,), (4,))),
    "several parts of an odd width": LowRankCase(6, 777, (40, 16, 8), ((8,), (8,), (8,))),
    "several reads for each part": LowRankCase(3, 4400, (16,), ((2,),)),
    "more parts of a large rank than are read at once": LowRankCase(3, 3000, (20,), ((100,),)),
    "more tokens than a tile has": LowRankCase(37, 300, (70, 16), ((4,), (20,))),
    "so many tokens that parts are longer": LowRankCase(70, 1300, (16,), ((4,),)),
    "two adapters": LowRankCase(4, 64, (40, 16, 24), ((4, 8), (4, 8), (4, 8))),
    "some modules with more adapters": LowRankCase(4, 64, (40, 16, 24), ((4,), (2, 16, 3), (5, 6))),
}


def make_low_rank(
    case: LowRankCase, dtype: torch.dtype, adapters: torch.dtype | None = None, device: str = "cpu"
) -> tuple[Tensor, list[Tensor], list[list[LowRank]]]:
    """Draw x, a view into wider rows, results of modules, and their adapters, which may be of another dtype."""
    generator = torch.Generator().manual_seed(3)

    def draw(*size: int, kind: torch.dtype | None = None) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, kind or dtype)

    def adapter(rows: int, rank: int) -> LowRank:
        down, up = draw(rank, case.width, kind=adapters) / case.width**0.5, draw(rows, rank, kind=adapters) / rank**0.5
        return LowRank(down, up, float(0.3 + torch.rand((), generator=generator)))

    wide = draw(case.tokens, case.width + 16)
    wide[:, case.width :] = float("nan")
    bases = [draw(case.tokens, rows) for rows in case.rows]
    terms = [[adapter(rows, rank) for rank in ranks] for rows, ranks in zip(case.rows, case.ranks, strict=True)]
    return wide[:, : case.width], bases, terms


def slow_low_rank(x: Tensor, base: Tensor, terms: list[LowRank]) -> Tensor:
    """What adapters add to one result, `[T, N]`, float64, rounded after each of the operations of PEFT's modules."""
    result = base.double().cpu()
    larger = base.dtype
    for down, up, scaling in terms:
        dtype = down.dtype
        larger = torch.promote_types(larger, dtype)
        inner = slow_linear(x, down).to(dtype)
        product = slow_linear(inner, up).to(dtype)
        scaled = (product.double() * scaling).to(dtype)
        result = (result + scaled.double()).to(larger).double()
    return result.to(base.dtype).double()
