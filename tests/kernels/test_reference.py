"""Each operation of a fused pass, against stock modules where they have it and against loops where they have not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kernel_cases import (
    ATTENTION_CASES,
    DISTRIBUTIONS,
    DIVERGENCES,
    LOW_RANK_CASES,
    NUCLEI,
    make_attention,
    make_low_rank,
    rounded_gated,
    slow_divergence,
    slow_entropy_and_top,
    slow_linear,
    slow_low_rank,
    slow_nucleus,
)
from kernel_cases import slow_attention as slow_attention_of
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from hf_dsde.kernels import reference
from hf_dsde.kernels.block import Block

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def block_of(rows: list[int], positions: list[int]) -> Block:
    count = max(rows) + 1
    counts = [rows.count(row) for row in range(count)]
    starts = [sum(counts[:row]) for row in range(count)]
    return Block(
        tokens=torch.zeros(len(rows), dtype=torch.long),
        rows=torch.tensor(rows),
        positions=torch.tensor(positions),
        starts=torch.tensor(starts, dtype=torch.int32),
        counts=torch.tensor(counts, dtype=torch.int32),
        max_count=max(counts),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_rounds_where_the_stock_module_rounds(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(48, eps=1e-3)
    norm.weight.data = 1 + random(48, seed=1)
    norm = norm.to(dtype)
    x = random(7, 48, dtype=dtype) * 5
    assert torch.equal(reference.rms_norm(x, norm.weight, 1e-3), norm(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_is_rounded_before_it_is_normalised(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(48).to(dtype)
    x, residual = random(7, 48, dtype=dtype), random(7, 48, dtype=dtype, seed=1) * 30
    normed, summed = reference.add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
    assert torch.equal(summed, residual + x)
    assert torch.equal(normed, norm(residual + x))


def test_norm_follows_its_formula() -> None:
    x = random(3, 5)
    for row, normed in zip(x.tolist(), reference.rms_norm(x, torch.arange(5.0), 0.5).tolist(), strict=True):
        scale = 1 / math.sqrt(sum(value * value for value in row) / 5 + 0.5)
        assert normed == pytest.approx([index * value * scale for index, value in enumerate(row)], rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_is_rounded_before_the_product(dtype: torch.dtype) -> None:
    gate, up = random(6, 40, dtype=dtype), random(6, 40, dtype=dtype, seed=1)
    assert torch.equal(reference.silu_mul(gate, up), nn.SiLU()(gate) * up)
    sigmoid = 1 / (1 + torch.exp(-gate.double()))
    expected = gate.double() * sigmoid * up.double()
    tolerance = 8 * max(torch.finfo(dtype).eps, 1e-12)
    torch.testing.assert_close(reference.silu_mul(gate, up).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_linear_modules(dtype: torch.dtype) -> None:
    modules = [nn.Linear(24, rows, bias=biased, dtype=dtype) for rows, biased in ((16, True), (8, False), (3, True))]
    x = random(5, 24, dtype=dtype)
    weights, biases = [module.weight for module in modules], [module.bias for module in modules]
    for result, module in zip(reference.linears(x, weights, biases), modules, strict=True):
        assert torch.equal(result, module(x))
    for result, weight in zip(reference.linears(x.double(), [w.double() for w in weights]), weights, strict=True):
        torch.testing.assert_close(result, slow_linear(x, weight), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_product_is_that_of_the_stock_module(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mlp = LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=4)).to(dtype)
    x = random(5, 24, dtype=dtype) * 4
    gated = reference.gated_linear(x, mlp.gate_proj.weight, mlp.up_proj.weight)
    assert torch.equal(mlp.down_proj(gated), mlp(x))
    exact = [slow_linear(x, module.weight) for module in (mlp.gate_proj, mlp.up_proj)]
    tolerance = 8 * max(torch.finfo(dtype).eps, 1e-12)
    torch.testing.assert_close(gated, rounded_gated(*exact, dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "own"), [*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("name", ["ranks that differ", "two adapters", "some modules with more adapters"])
def test_low_rank_adapters_add_what_the_definition_says(name: str, dtype: torch.dtype, own: torch.dtype) -> None:
    x, bases, adapters = make_low_rank(LOW_RANK_CASES[name], dtype, own)
    before = [base.clone() for base in bases]
    tolerance = 8 * max(torch.finfo(dtype).eps, 1e-12)
    exact = [slow_low_rank(x, base, terms) for base, terms in zip(bases, adapters, strict=True)]
    for result, expected in zip(reference.add_low_rank(x, bases, adapters), exact, strict=True):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    assert all(map(torch.equal, bases, before))
    few = [[term._replace(up=term.up[:9]) for term in terms] for terms in adapters[:2]]
    found = reference.gated_low_rank(x, [base[:, :9] for base in bases[:2]], few)
    gate, up = (each[:, :9].to(dtype) for each in exact[:2])
    torch.testing.assert_close(found, nn.functional.silu(gate) * up, rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_is_that_of_the_stock_module(dtype: torch.dtype) -> None:
    q, k, v = (random(5, heads, 8, dtype=dtype, seed=heads) for heads in (6, 2, 3))
    angles = torch.arange(5)[:, None] * 0.7 ** torch.arange(4)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    keys, values = random(3, 2, 9, 8, dtype=dtype), random(3, 3, 9, 8, dtype=dtype)
    untouched = keys.clone(), values.clone()
    rows, slots = torch.tensor([0, 0, 2, 2, 1]), torch.tensor([3, 4, 0, 8, 8])
    turned = reference.rotate_and_store(q, k, v, cos, sin, keys, values, rows, slots)
    expected_q, expected_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None]
    )
    assert torch.equal(turned, expected_q[0].transpose(0, 1))
    written = torch.zeros(3, 9, dtype=torch.bool)
    for token, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        assert torch.equal(keys[row, :, slot], expected_k[0, :, token])
        assert torch.equal(values[row, :, slot], v[token])
        written[row, slot] = True
    for states, before in zip((keys, values), untouched, strict=True):
        assert torch.equal(states.transpose(1, 2)[~written], before.transpose(1, 2)[~written])


def test_rotation_turns_pairs_of_dimensions_by_the_angle() -> None:
    q = random(1, 1, 6)
    angles = torch.tensor([[0.3, 1.1, 2.0]]).repeat(1, 2).double()
    keys, values = torch.zeros(1, 1, 1, 6).double(), torch.zeros(1, 1, 1, 6).double()
    zero = torch.zeros(1, dtype=torch.long)
    turned = reference.rotate_and_store(q, q, q, angles.cos(), angles.sin(), keys, values, zero, zero)
    pairs = torch.complex(q[0, 0, :3], q[0, 0, 3:]) * torch.exp(1j * angles[0, :3])
    torch.testing.assert_close(turned[0, 0], torch.cat((pairs.real, pairs.imag)))
    assert torch.equal(keys[0, 0, 0], turned[0, 0])


def test_views_into_one_projection_are_taken_as_they_are() -> None:
    together = random(5, 4 + 2 + 2, 8)
    parts = together.split((4, 2, 2), dim=1)
    assert not parts[0].is_contiguous()
    cos, sin = random(5, 8, seed=1), random(5, 8, seed=2)
    rows, slots = torch.tensor([0, 1, 0, 1, 0]), torch.arange(5)
    results = []
    for q, k, v in (parts, [part.contiguous() for part in parts]):
        keys, values = torch.zeros(2, 2, 5, 8).double(), torch.zeros(2, 2, 5, 8).double()
        results.append((reference.rotate_and_store(q, k, v, cos, sin, keys, values, rows, slots), keys, values))
    for strided, contiguous in zip(*results, strict=True):
        assert torch.equal(strided, contiguous)


def slow_attention(q: Tensor, keys: Tensor, values: Tensor, block: Block, scaling: float, window: int | None) -> Tensor:
    """One number at a time: every query head over every slot that it may see."""
    heads, shared = q.shape[1], q.shape[1] // keys.shape[1]
    outputs = []
    for token, (row, position) in enumerate(zip(block.rows.tolist(), block.positions.tolist(), strict=True)):
        last = max(position, 0)
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(heads):
            kept = head // shared
            scores = [
                scaling * float((q[token, head] * keys[row, kept, slot]).sum()) for slot in range(first, last + 1)
            ]
            weights = [math.exp(score - max(scores)) for score in scores]
            mixed = sum(
                weight / sum(weights) * values[row, kept, slot]
                for weight, slot in zip(weights, range(first, last + 1), strict=True)
            )
            outputs.append(mixed)
    return torch.stack(outputs).view(len(q), -1)


ROWS = [0, 0, 0, 1, 1, 3, 3, 3]
POSITIONS = [-1, 7, 8, 0, -1, 4, 5, 6]


@pytest.mark.parametrize("heads", [(6, 2), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_attention_is_that_of_loops(heads: tuple[int, int], window: int | None) -> None:
    q = random(len(ROWS), heads[0], 4)
    keys, values = random(4, heads[1], 11, 4, seed=1), random(4, heads[1], 11, 6, seed=2)
    block = block_of(ROWS, POSITIONS)
    result = reference.ragged_attention(q, keys, values, block, 0.7, window, reach=9)
    assert result.shape == (len(ROWS), heads[0] * 6)
    torch.testing.assert_close(result, slow_attention(q, keys, values, block, 0.7, window), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, case in ATTENTION_CASES.items() if case.tree])
def test_attention_of_trees_is_that_of_the_definition(name: str) -> None:
    given = make_attention(ATTENTION_CASES[name], torch.float64)
    states = given.q, given.keys, given.values
    result = reference.ragged_attention(*states, given.block, given.scaling, given.window, given.reach)
    torch.testing.assert_close(result, slow_attention_of(given), rtol=1e-9, atol=1e-9)


def test_slots_out_of_sight_do_not_matter() -> None:
    q = random(len(ROWS), 4, 8)
    block = block_of(ROWS, POSITIONS)
    results = []
    for poison in (0.0, 1e30):
        keys, values = random(4, 2, 11, 8, seed=1), random(4, 2, 11, 8, seed=2)
        for row, longest in enumerate((9, 1, 0, 7)):
            keys[row, :, longest:], values[row, :, longest:] = poison, poison
        results.append(reference.ragged_attention(q, keys, values, block, 0.4, None, reach=64))
    assert torch.equal(*results)
    assert results[0].isfinite().all()


def test_reach_and_the_number_of_queries_at_once_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    q = random(len(ROWS), 4, 8)
    keys, values = random(4, 2, 70, 8, seed=1), random(4, 2, 70, 8, seed=2)
    block = block_of(ROWS, POSITIONS)
    expected = reference.ragged_attention(q, keys, values, block, 0.4, 5, reach=9)
    monkeypatch.setattr(reference, "QUERIES_AT_ONCE", 3)
    for reach in (9, 64, 128):
        torch.testing.assert_close(reference.ragged_attention(q, keys, values, block, 0.4, 5, reach), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    q, keys, values = (random(*shape, dtype=dtype) for shape in ((8, 4, 8), (4, 2, 11, 8), (4, 2, 11, 8)))
    block = block_of(ROWS, POSITIONS)
    result = reference.ragged_attention(q, keys, values, block, 0.4, None, reach=9)
    exact = reference.ragged_attention(q.double(), keys.double(), values.double(), block, 0.4, None, reach=9)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("make", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_entropy_and_top_are_those_of_the_definition(make: Callable[[], Tensor]) -> None:
    logits = make()
    entropy, top = reference.entropy_and_top(logits)
    expected_entropy, expected_top = slow_entropy_and_top(logits)
    # The logarithm of a probability is rounded at the size of the logits.
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(top.double(), expected_top, rtol=2e-4, atol=1e-9)


@pytest.mark.parametrize("make", DIVERGENCES.values(), ids=DIVERGENCES)
def test_the_divergence_is_that_of_the_definition(
    make: Callable[[], tuple[Tensor, Tensor, Tensor | None]],
) -> None:
    torch.manual_seed(0)
    target, draft, ids = make()
    found = reference.kl_divergence(target, draft, ids)
    torch.testing.assert_close(found.double(), slow_divergence(target, draft, ids), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("make", "count", "top_p"), NUCLEI.values(), ids=NUCLEI)
def test_a_nucleus_is_that_of_the_definition(make: Callable[[], Tensor], count: int, top_p: float) -> None:
    torch.manual_seed(0)
    scores = make().double()
    kept = reference.nucleus(scores, scores.topk(count).values, top_p)
    # Of equal scores, others may be kept.
    torch.testing.assert_close(kept.sort().values, slow_nucleus(scores, count, top_p).sort().values, rtol=0, atol=0)
