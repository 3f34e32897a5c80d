"""The Triton kernels on a GPU: in every dtype, recorded in CUDA graphs, and where offsets no longer fit 32 bits.

Most of the time goes into compiling, so each size and dtype is met somewhere, but not every one with every other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    ATTENTION_CASES,
    DISTRIBUTIONS,
    DIVERGENCES,
    LOW_RANK_CASES,
    NUCLEI,
    PRODUCT_CASES,
    AttentionCase,
    LowRankCase,
    ProductCase,
    make_attention,
    make_low_rank,
    make_products,
    rounded_gated,
    slow_attention,
    slow_divergence,
    slow_entropy_and_top,
    slow_linear,
    slow_low_rank,
    slow_nucleus,
    without_positions,
)
from stored import store_texts
from tiny_models import tiny_model
from torch.nn import functional

from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.fused_decoder import FusedDecoder
from hf_dsde.execution.kv_cache import RaggedCache
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.kernels import reference
from hf_dsde.kernels.block import Block

pytestmark = pytest.mark.gpu

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BFLOAT16: 2e-2, FLOAT16: 3e-3, FLOAT32: 1e-5}


@pytest.fixture
def kernels():
    pytest.importorskip("triton", reason="Triton is not installed")
    from hf_dsde.kernels import elementwise as kernels

    return kernels


def divided(given, splits):
    """One launch whose programs share rows, whatever is planned for rows so short."""
    from hf_dsde.kernels.attention import launch_attention
    from hf_dsde.kernels.attention_plan import LaunchPlan

    queries = given.block.max_count * given.q.shape[1] // given.keys.shape[1]
    plan = LaunchPlan(16, 32, max(1, -(-queries // 16)), splits, warps=4, stages=2)
    return launch_attention(given.q, given.keys, given.values, given.block, given.scaling, given.window, plan)


def attend(ops, given):
    return ops.ragged_attention(
        given.q, given.keys, given.values, given.block, given.scaling, given.window, given.reach
    )


@pytest.mark.parametrize("make", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_entropy_and_top_are_those_of_the_definition(kernels, make):
    logits = make()
    entropy, top = kernels.entropy_and_top(logits.to("cuda"))
    expected_entropy, expected_top = slow_entropy_and_top(logits)
    torch.testing.assert_close(entropy.double().cpu(), expected_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top.double().cpu(), expected_top, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("make", DIVERGENCES.values(), ids=DIVERGENCES)
def test_the_divergence_is_that_of_the_definition(kernels, make):
    torch.manual_seed(0)
    target, draft, ids = make()
    on_device = (target.to("cuda"), draft.to("cuda"), None if ids is None else ids.to("cuda"))
    found = kernels.kl_divergence(*on_device)
    torch.testing.assert_close(found.double().cpu(), slow_divergence(target, draft, ids), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("count", [32_000, 151_936])
def test_the_divergence_over_a_real_vocabulary_is_that_of_torch(kernels, count):
    target = 5 * torch.randn(8, 5, 151_936, device="cuda")[:, :4]
    ids = torch.randperm(151_936, device="cuda")[:count]
    draft = target[..., ids] + torch.randn(8, 4, count, device="cuda")
    found, expected = (ops.kl_divergence(target, draft, ids) for ops in (kernels, reference))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(("make", "count", "top_p"), NUCLEI.values(), ids=NUCLEI)
def test_a_nucleus_is_that_of_the_definition(kernels, make, count, top_p):
    torch.manual_seed(0)
    scores = make().to("cuda")
    kept = kernels.nucleus(scores, scores.topk(count).values, top_p)
    torch.testing.assert_close(kept.cpu(), slow_nucleus(scores, count, top_p).cpu(), rtol=0, atol=0)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_nucleus_of_a_real_vocabulary_is_that_of_torch(kernels, rounded):
    torch.manual_seed(1)
    scores = 3 * torch.randn(96, 151_936, device="cuda")
    scores = scores.bfloat16().float() if rounded else scores
    best = scores.topk(20).values
    kept, expected = (ops.nucleus(scores, best, 0.8) for ops in (kernels, reference))
    torch.testing.assert_close(kept.sort().values, expected.sort().values, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 40])
def test_entropy_and_top_of_a_real_vocabulary_are_those_of_torch(kernels, rows):
    logits = 5 * torch.randn(rows, 151_936, device="cuda")
    for found, expected in zip(kernels.entropy_and_top(logits), reference.entropy_and_top(logits), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES.values(), ids=ATTENTION_CASES)
def test_attention_is_that_of_the_definition(kernels, case, dtype):
    given = make_attention(case, dtype, "cuda")
    out = attend(kernels, given)
    torch.testing.assert_close(out.double().cpu(), slow_attention(given), rtol=1e-2, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "long and short",
        "window over several blocks",
        "a row of padding only",
        "trees",
        "trees in a window over several blocks",
    ],
)
def test_attention_of_divided_rows_is_that_of_the_definition(kernels, name, dtype):
    given = make_attention(ATTENTION_CASES[name], dtype, "cuda")
    for each in (given, without_positions(given)):
        out = divided(each, splits=4)
        torch.testing.assert_close(out.double().cpu(), slow_attention(each), rtol=1e-2, atol=TOLERANCE[dtype])


LLAMA_8B, DRAFT_1B, SMALL, QWEN_32B = (32, 8, 128), (12, 4, 128), (9, 3, 64), (40, 8, 128)
ALONE, FEW, MANY = (1, 16000), (3, 700), (40, 300)
REAL_SHAPES = [
    *((LLAMA_8B, ALONE, width, BFLOAT16) for width in (1, 6, 13, 200)),
    *((LLAMA_8B, FEW, width, BFLOAT16) for width in (1, 200)),
    *((LLAMA_8B, MANY, width, BFLOAT16) for width in (1, 6)),
    *((DRAFT_1B, rows, 1, dtype) for rows in (ALONE, MANY) for dtype in (BFLOAT16, FLOAT16)),
    *((QWEN_32B, rows, 6, BFLOAT16) for rows in (FEW, MANY)),
    (SMALL, ALONE, 6, BFLOAT16),
    (SMALL, MANY, 1, BFLOAT16),
    (LLAMA_8B, FEW, 1, FLOAT16),
    (SMALL, ALONE, 200, FLOAT16),
    (DRAFT_1B, MANY, 13, FLOAT32),
    (SMALL, FEW, 1, FLOAT32),
    (QWEN_32B, ALONE, 1, FLOAT32),
]


@pytest.mark.parametrize(("sizes", "lengths", "width", "dtype"), REAL_SHAPES, ids=str)
def test_attention_of_real_shapes_is_that_of_plain_torch(kernels, sizes, lengths, width, dtype):
    (heads, kv_heads, dim), (rows, stored) = sizes, lengths
    if width == 200 and rows == 40:
        pytest.skip("plain torch would gather many gigabytes")
    lengths = tuple(stored * (row + 1) // rows for row in range(rows))
    case = AttentionCase(lengths, (width,) * rows, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=dim)
    given = make_attention(case, dtype, "cuda")
    precise = replace(given, q=given.q.double(), keys=given.keys.double(), values=given.values.double())
    if rows * lengths[-1] * kv_heads > 500_000 or width == 200:  # a float64 gather of each token's keys would not fit
        precise = replace(given, q=given.q.float(), keys=given.keys.float(), values=given.values.float())
    out = attend(kernels, given)
    torch.testing.assert_close(out.double(), attend(reference, precise).double(), rtol=1e-2, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
def test_attention_of_a_long_prompt_that_is_alone_is_that_of_plain_torch(kernels, dtype):
    case = AttentionCase((0, 0, 0), (0, 1500, 0), heads=8, kv_heads=2, dim=64, value_dim=64)
    given = make_attention(case, dtype, "cuda")
    alone = replace(given, block=replace(given.block, whole_row=1))
    precise = replace(given, q=given.q.float(), keys=given.keys.float(), values=given.values.float())
    expected = attend(reference, precise).double()
    for each in (given, alone):
        torch.testing.assert_close(attend(kernels, each).double(), expected, rtol=1e-2, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("splits", [None, 4])
def test_a_recorded_launch_follows_the_contents_of_its_tensors(kernels, splits):
    def launch(given):
        return attend(kernels, given) if splits is None else divided(given, splits)

    first = make_attention(ATTENTION_CASES["long and short"], FLOAT32, "cuda", seed=0)
    case = replace(ATTENTION_CASES["long and short"], stored=(100, 500, 30), widths=(3, 0, 2))
    second = make_attention(case, FLOAT32, "cuda", seed=1, slack=first.keys.shape[2] - 501)
    second = replace(second, reach=first.reach)
    torch.cuda.synchronize()  # the inputs are there before another stream reads them
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(first)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(first)
    for given in (first, second, without_positions(second)):
        for name in ("q", "keys", "values"):
            source, target = getattr(given, name), getattr(first, name)
            assert source.shape == target.shape
            if source is not target:
                target.copy_(source)
        for name in ("rows", "positions", "starts", "counts"):
            source, target = getattr(given.block, name), getattr(first.block, name)
            if source is not target:
                target.copy_(source)
        expected = slow_attention(first)
        out.fill_(float("nan"))  # so that what a replay leaves out cannot look right
        graph.replay()
        torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=1e-5)


def test_a_cache_of_more_than_two_to_the_31_elements(kernels):
    rows, kv_heads, slots, dim = 20, 8, 110_000, 128
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of GPU memory")
    keys = torch.zeros(rows, kv_heads, slots, dim, dtype=BFLOAT16, device="cuda")
    values = torch.zeros_like(keys)
    assert keys.numel() > 2**31
    small = make_attention(AttentionCase((300,) * rows, (2,) * rows, heads=32, kv_heads=8, dim=dim, value_dim=dim),
                           BFLOAT16, "cuda")  # fmt: skip
    keys[:, :, : small.keys.shape[2]], values[:, :, : small.keys.shape[2]] = small.keys, small.values
    large = replace(small, keys=keys, values=values)
    assert torch.equal(attend(kernels, large), attend(kernels, small))
    k, v = torch.randn(2, len(small.q), kv_heads, dim, dtype=BFLOAT16, device="cuda")
    cos, sin = torch.ones(len(small.q), dim, dtype=BFLOAT16, device="cuda"), torch.zeros_like(k[:, 0])
    rows_of, slots_of = small.block.rows, small.block.positions + slots - 400
    turned = kernels.rotate_and_store(small.q, k, v, cos, sin, keys, values, rows_of, slots_of)
    assert torch.equal(turned, small.q)
    assert torch.equal(keys.transpose(1, 2)[rows_of, slots_of], k)
    assert torch.equal(values.transpose(1, 2)[rows_of, slots_of], v)


@pytest.mark.parametrize(
    ("rows", "dim", "dtype"),
    [
        (1, 4096, BFLOAT16),
        (7, 5120, BFLOAT16),
        (3, 576, BFLOAT16),
        (2000, 128, BFLOAT16),
        (64, 1536, FLOAT32),
        (7, 5120, FLOAT16),
    ],
    ids=str,
)
def test_norms_and_products_are_those_of_plain_torch(kernels, rows, dim, dtype):
    x, residual = torch.randn(2, rows, dim, dtype=dtype, device="cuda")
    weight = torch.randn(dim, dtype=dtype, device="cuda")
    near = {"rtol": 1.6e-2, "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **near)
    normed, summed = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(normed, reference.rms_norm(summed, weight, 1e-5), **near)
    torch.testing.assert_close(kernels.silu_mul(x, residual), reference.silu_mul(x, residual), **near)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_norms_round_where_plain_torch_rounds(kernels, dtype):
    x, residual = torch.randn(2, 50, 4096, dtype=dtype, device="cuda")
    weight = torch.randn(4096, dtype=dtype, device="cuda")
    normed, _ = kernels.add_rms_norm(x, residual, weight, 1e-5)
    expected, _ = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert (normed == expected).double().mean() > 0.995
    assert (kernels.silu_mul(x, residual) == reference.silu_mul(x, residual)).double().mean() > 0.995


@pytest.mark.parametrize(
    ("sizes", "dtype"), [(LLAMA_8B, BFLOAT16), (SMALL, BFLOAT16), (DRAFT_1B, FLOAT16), (SMALL, FLOAT32)], ids=str
)
def test_rotation_equals_that_of_plain_torch_bit_for_bit(kernels, sizes, dtype):
    (heads, kv_heads, dim), (tokens, rows, slots) = sizes, (24, 5, 90)
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, device="cuda").unflatten(-1, (-1, dim))
    q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = torch.randn(2, tokens, dim, dtype=dtype, device="cuda")
    caches = torch.zeros(2, 2, rows, kv_heads, slots, dim, dtype=dtype, device="cuda")
    row = torch.arange(tokens, device="cuda") % rows
    slot = torch.randperm(slots, device="cuda")[:tokens]
    turned = [
        ops.rotate_and_store(q, k, v, cos, sin, keys, values, row, slot)
        for ops, (keys, values) in zip((kernels, reference), caches, strict=True)
    ]
    assert torch.equal(turned[0], turned[1])
    assert torch.equal(caches[0], caches[1])


ODD_PRODUCTS = [
    ("rows that are no multiple of a block", BFLOAT16),
    ("a width that is no multiple of a block", FLOAT16),
    ("an odd width", BFLOAT16),
    ("one weight", BFLOAT16),
    ("more tokens than a tile has", FLOAT32),
    ("as many tokens as it takes", BFLOAT16),
]


@pytest.mark.parametrize(("name", "dtype"), ODD_PRODUCTS)
def test_products_of_few_tokens_are_those_of_the_definition(kernels, name, dtype):
    x, weights, biases = make_products(PRODUCT_CASES[name], dtype, "cuda")
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": TOLERANCE[dtype] / 4}
    for result, weight, bias in zip(kernels.linears(x, weights, biases), weights, biases, strict=True):
        assert result.dtype is dtype
        torch.testing.assert_close(result.double().cpu(), slow_linear(x, weight, bias), **near)
    gate, up = weights[0], weights[0].flip(0)
    expected = rounded_gated(slow_linear(x, gate), slow_linear(x, up), dtype)
    near = {"rtol": 4 * torch.finfo(dtype).eps, "atol": TOLERANCE[dtype] / 2}
    torch.testing.assert_close(kernels.gated_linear(x, gate, up).cpu(), expected, **near)


def whole_numbers(*size, bound, seed, dtype):
    """Their sums are exact in float32, whatever the order, so that results can be compared bit by bit."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(-bound, bound + 1, size, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 16, 29, 64])
@pytest.mark.parametrize(
    ("rows", "width"), [((1536, 512, 512), 1536), ((6144, 6144), 1536), ((1536,), 6144), ((4096, 1024, 1024), 4096)]
)
def test_products_of_real_shapes_equal_those_of_plain_torch_bit_for_bit(kernels, rows, width, tokens, dtype):
    x = whole_numbers(tokens, width, bound=50, seed=0, dtype=dtype)
    weights = [
        whole_numbers(count, width, bound=3, seed=place, dtype=dtype) for place, count in enumerate(rows, start=1)
    ]
    biases = [weight[:, 5].clone() if place % 2 else None for place, weight in enumerate(weights)]
    for result, weight, bias in zip(kernels.linears(x, weights, biases), weights, biases, strict=True):
        exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert (exact.to(dtype) != exact).any()
        assert torch.equal(result, exact.to(dtype))
    gates, ups = weights[0] / 64, weights[-1][: len(weights[0])]
    if len(gates) == len(ups):
        exact = [functional.linear(x.double(), weight.double()).cpu() for weight in (gates, ups)]
        same = kernels.gated_linear(x, gates, ups).cpu() == rounded_gated(*exact, dtype)
        assert same.double().mean() > 0.995  # exponentials may differ in their last bit


def test_a_recorded_product_follows_the_contents_of_its_tensors(kernels):
    first, weights, biases = make_products(ProductCase(8, 256, (48, 16, 16), (True, False, True)), BFLOAT16, "cuda")
    second = first.flip(0)
    torch.cuda.synchronize()  # the inputs are there before another stream reads them
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kernels.linears(first, weights, biases)
        kernels.gated_linear(first, weights[0], weights[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = [*kernels.linears(first, weights, biases), kernels.gated_linear(first, weights[0], weights[0])]
    for x in (first.clone(), second):
        first.copy_(x)
        for result in recorded:
            result.fill_(float("nan"))  # so that what a replay leaves out cannot look right
        graph.replay()
        expected = [*kernels.linears(x, weights, biases), kernels.gated_linear(x, weights[0], weights[0])]
        for found, right in zip(recorded, expected, strict=True):
            assert torch.equal(found, right)


HALVES_AND_SINGLE = [(BFLOAT16, None), (FLOAT16, None), (FLOAT32, None), (BFLOAT16, FLOAT32), (FLOAT16, FLOAT32)]


@pytest.mark.parametrize(("dtype", "own"), HALVES_AND_SINGLE, ids=str)
@pytest.mark.parametrize("name", LOW_RANK_CASES)
def test_low_rank_adapters_add_what_the_definition_says(kernels, name, dtype, own):
    x, bases, adapters = make_low_rank(LOW_RANK_CASES[name], dtype, own, "cuda")
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": TOLERANCE[dtype]}
    for result, base, terms in zip(kernels.add_low_rank(x, bases, adapters), bases, adapters, strict=True):
        assert result.dtype is dtype
        torch.testing.assert_close(result.double().cpu(), slow_low_rank(x, base, terms), **near)


@pytest.mark.parametrize(("dtype", "own"), HALVES_AND_SINGLE, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 32, 64, 200, 1000])
@pytest.mark.parametrize(
    ("width", "rows", "ranks"),
    [
        (4096, (4096, 1024, 1024), ((16,), (16,), (16,))),
        (12288, (4096,), ((64,),)),
        (4096, (12288, 12288), ((8,), (256,))),
        (2048, (2048, 512), ((8, 32), (8,))),
    ],
    ids=str,
)
def test_low_rank_adapters_of_real_shapes_are_those_of_plain_torch(kernels, width, rows, ranks, tokens, dtype, own):
    from hf_dsde.kernels import low_rank

    x, bases, adapters = make_low_rank(LowRankCase(tokens, width, rows, ranks), dtype, own, "cuda")
    assert low_rank.suits(x, adapters)
    found, expected = (ops.add_low_rank(x, bases, adapters) for ops in (kernels, reference))
    for result, right in zip(found, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=1.6e-2, atol=4 * TOLERANCE[dtype])
        assert dtype is FLOAT32 or (result == right).double().mean() > 0.75
    if len(bases) == 2 and rows[0] == rows[1]:
        found, right = (ops.gated_low_rank(x, bases, adapters) for ops in (kernels, reference))
        torch.testing.assert_close(found, right, rtol=3e-2, atol=4 * TOLERANCE[dtype])


def test_recorded_adapters_follow_the_contents_of_their_tensors(kernels):
    x, bases, adapters = make_low_rank(LowRankCase(8, 4096, (512, 512), ((16,), (16,))), BFLOAT16, None, "cuda")
    fresh = x.clone()

    def launch(states):
        return [*kernels.add_low_rank(states, bases, adapters), kernels.gated_low_rank(states, bases, adapters)]

    torch.cuda.synchronize()  # the inputs are there before another stream reads them
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = launch(x)
    for states in (fresh, fresh.flip(0)):
        x.copy_(states)
        for result in recorded:
            result.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, recorded, launch(states)))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_adapters_of_float32_lose_nothing_beside_states_of_half_precision(dtype):
    """What A makes of them has the bits of float32; with A rounded to TensorFloat-32 it would not."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from hf_dsde.kernels import low_rank

    x, _, [[term]] = make_low_rank(LowRankCase(40, 4096, (32,), ((16,),)), dtype, FLOAT32, "cuda")
    sums = low_rank._room(x, [term])
    low_rank._multiply_down(x, [term], sums)
    exact = slow_linear(x, term.down)
    rounded = slow_linear(x, ((term.down.view(torch.int32) + 4096) & -8192).view(FLOAT32))
    torch.testing.assert_close(sums.view(-1, 40, 16).double().sum(0).cpu(), exact, rtol=0, atol=2e-5)
    assert (rounded - exact).abs().max() > 1e-4


@pytest.mark.parametrize(("dtype", "own"), [(BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32), (FLOAT32, FLOAT32)], ids=str)
@pytest.mark.parametrize("adapters", [1, 2])
@pytest.mark.parametrize("tokens", [1, 8, 32, 128])
def test_a_recorded_pass_with_adapters_is_the_eager_one(kernels, tokens, adapters, dtype, own, monkeypatch):
    """Products with A are branches of it. So small a model's own products end before them, and nothing may be early."""
    peft = pytest.importorskip("peft")
    from hf_dsde.kernels import branches
    from hf_dsde.kernels.dispatch import ops_for

    made, original = [], branches._branching
    monkeypatch.setattr(branches, "_branching", lambda states: made.append(original(states)) or made[-1])
    model = tiny_model(hidden_size=128, intermediate_size=256, head_dim=32, num_hidden_layers=2).to("cuda", dtype)
    wrapper = adapted_everywhere(peft, model, adapters, own)
    device, rows = torch.device("cuda", 0), min(tokens, 8)
    decoder, cache = FusedDecoder(wrapper.get_base_model(), ops_for(device)), RaggedCache(2, 64, rows)
    block = block_of_rows(rows, tokens // rows, device)

    def run():
        return decoder(block, cache, 64, None).logits

    torch.cuda.synchronize()  # the inputs are there before another stream reads them
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    assert not any(made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run()
    assert sum(made) >= 4 * 2, "no branch was made"
    texts = torch.randint(3, 90, (5, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for text in texts:
        block.tokens.copy_(text)
        recorded.fill_(float("nan"))
        graph.replay()
        found.append(recorded.clone())
    for text, logits in zip(texts, found, strict=True):
        block.tokens.copy_(text)
        largest = float(logits.abs().max())
        near = (6e-2 if dtype is BFLOAT16 else 1e-4) * largest
        torch.testing.assert_close(logits, run(), rtol=0, atol=near / 10)
        with torch.no_grad():
            stock = wrapper(text.view(rows, -1)).logits.flatten(0, 1)
            torch.testing.assert_close(logits, stock, rtol=0, atol=near)
            with wrapper.disable_adapter():
                assert (wrapper(text.view(rows, -1)).logits.flatten(0, 1) - logits).abs().max() > 0.1 * largest


def adapted_everywhere(peft, model, adapters, own):
    """A model with adapters around all linear maps of its layers, all of them active and of one dtype."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        names = [str(place) for place in range(adapters)]
        everywhere = peft.LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
        wrapper = peft.get_peft_model(model, everywhere, adapter_name=names[0])
        for name in names[1:]:
            wrapper.add_adapter(name, everywhere)
    wrapper.base_model.set_adapter(names)
    for name, weight in wrapper.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(own)
    return wrapper.eval()


def block_of_rows(rows, width, device):
    """The first `width` tokens of each row."""
    return Block(
        tokens=torch.full((rows * width,), 5, device=device),
        rows=torch.arange(rows, device=device).repeat_interleave(width),
        positions=torch.arange(width, device=device).repeat(rows),
        starts=torch.arange(rows, dtype=torch.int32, device=device) * width,
        counts=torch.full((rows,), width, dtype=torch.int32, device=device),
        max_count=width,
    )


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("width", [1, 3])
def test_kernels_that_are_set_up_early_give_what_others_give(kernels, width, adapted, monkeypatch):
    """The same arithmetic, bit for bit, in a chain of kernels which all read what the one in front wrote."""
    from hf_dsde.kernels import attention as attention_kernel
    from hf_dsde.kernels import chaining, low_rank
    from hf_dsde.kernels import linear as skinny_linear

    device = torch.device("cuda", 0)
    if not chaining.chaining(device)["chained"]:
        pytest.skip("needs compute capability 9.0")
    model = tiny_model(hidden_size=128, intermediate_size=256, head_dim=32).to(device, BFLOAT16)
    if adapted:
        peft = pytest.importorskip("peft")
        everywhere = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, everywhere, autocast_adapter_dtype=False).eval().get_base_model()
    rows, lengths = 6, torch.tensor([40, 7, 33, 1, 20, 12])

    def logits(chained):
        for module in (kernels, skinny_linear, attention_kernel, low_rank):
            arguments = chaining.chaining(device) if chained else {"chained": False}
            monkeypatch.setattr(module, "chaining", lambda _, arguments=arguments: arguments)
        generator = torch.Generator().manual_seed(0)
        runner = create_runner(model, rows, 256, RuntimeOptions())
        seen = []
        with torch.no_grad(), runner.active():
            prompts = torch.randint(3, 90, (rows, 40), generator=generator)
            store_texts(runner, prompts.to(device), lengths)
            for step in range(60):
                tokens = torch.randint(3, 90, (rows, width), generator=generator)
                positions = lengths[:, None] + step * width + torch.arange(width)
                seen.append(runner.forward(RowBlock(tokens.to(device), positions.to(device)), 40 + 60 * width).logits)
        assert runner.recording_costs.passes == 2, "one for the prompts, one for the blocks"
        return torch.stack(seen)

    assert torch.equal(logits(chained=True), logits(chained=False))
