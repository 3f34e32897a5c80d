"""The Triton kernels on a GPU: in every dtype, recorded in CUDA graphs, and where offsets no longer fit 32 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import ATTENTION_CASES, AttentionCase, make_attention, slow_attention, without_positions

from hf_dsde.fused import reference

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


@pytest.fixture
def kernels():
    pytest.importorskip("triton", reason="Triton is not installed")
    from hf_dsde.fused import kernels

    return kernels


def attend(ops, given):
    return ops.ragged_attention(
        given.q, given.keys, given.values, given.block, given.scaling, given.window, given.reach
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES.values(), ids=ATTENTION_CASES)
def test_attention_is_that_of_the_definition(kernels, case, dtype):
    given = make_attention(case, dtype, "cuda")
    out = attend(kernels, given)
    torch.testing.assert_close(out.double().cpu(), slow_attention(given), rtol=1e-2, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 6, 13, 200])
@pytest.mark.parametrize(("rows", "stored"), [(1, 16000), (3, 700), (40, 300)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (12, 4, 128), (9, 3, 64), (40, 8, 128)])
def test_attention_of_real_shapes_is_that_of_plain_torch(kernels, heads, kv_heads, dim, rows, stored, width, dtype):
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


def test_a_recorded_launch_follows_the_contents_of_its_tensors(kernels):
    first = make_attention(ATTENTION_CASES["long and short"], torch.float32, "cuda", seed=0)
    case = replace(ATTENTION_CASES["long and short"], stored=(100, 500, 30), widths=(3, 0, 2))
    second = make_attention(case, torch.float32, "cuda", seed=1, slack=first.keys.shape[2] - 501)
    second = replace(second, reach=first.reach)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(kernels, first)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(kernels, first)
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
    keys = torch.zeros(rows, kv_heads, slots, dim, dtype=torch.bfloat16, device="cuda")
    values = torch.zeros_like(keys)
    assert keys.numel() > 2**31
    small = make_attention(AttentionCase((300,) * rows, (2,) * rows, heads=32, kv_heads=8, dim=dim, value_dim=dim),
                           torch.bfloat16, "cuda")  # fmt: skip
    keys[:, :, : small.keys.shape[2]], values[:, :, : small.keys.shape[2]] = small.keys, small.values
    large = replace(small, keys=keys, values=values)
    assert torch.equal(attend(kernels, large), attend(kernels, small))
    k, v = torch.randn(2, len(small.q), kv_heads, dim, dtype=torch.bfloat16, device="cuda")
    cos, sin = torch.ones(len(small.q), dim, dtype=torch.bfloat16, device="cuda"), torch.zeros_like(k[:, 0])
    rows_of, slots_of = small.block.rows, small.block.positions + slots - 400
    turned = kernels.rotate_and_store(small.q, k, v, cos, sin, keys, values, rows_of, slots_of)
    assert torch.equal(turned, small.q)
    assert torch.equal(keys.transpose(1, 2)[rows_of, slots_of], k)
    assert torch.equal(values.transpose(1, 2)[rows_of, slots_of], v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), [(1, 4096), (64, 1536), (7, 5120), (3, 576), (2000, 128), (40, 64)])
def test_norms_and_products_are_those_of_plain_torch(kernels, rows, dim, dtype):
    x, residual = torch.randn(2, rows, dim, dtype=dtype, device="cuda")
    weight = torch.randn(dim, dtype=dtype, device="cuda")
    near = {"rtol": 1.6e-2, "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **near)
    normed, summed = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(normed, reference.rms_norm(summed, weight, 1e-5), **near)
    torch.testing.assert_close(kernels.silu_mul(x, residual), reference.silu_mul(x, residual), **near)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_round_where_plain_torch_rounds(kernels, dtype):
    x, residual = torch.randn(2, 50, 4096, dtype=dtype, device="cuda")
    weight = torch.randn(4096, dtype=dtype, device="cuda")
    normed, _ = kernels.add_rms_norm(x, residual, weight, 1e-5)
    expected, _ = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert (normed == expected).double().mean() > 0.995
    assert (kernels.silu_mul(x, residual) == reference.silu_mul(x, residual)).double().mean() > 0.995


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (12, 4, 128), (9, 3, 64)])
def test_rotation_equals_that_of_plain_torch_bit_for_bit(kernels, heads, kv_heads, dim, dtype):
    tokens, rows, slots = 24, 5, 90
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
