"""The kernels for few tokens under Triton's interpreter, run as `interpreted_kernels.py` is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreting import loops_with_new_numpy  # noqa: F401 - a fixture
from kernel_cases import PRODUCT_CASES, ProductCase, make_products, rounded_gated, slow_linear

from hf_dsde.kernels import elementwise as kernels
from hf_dsde.kernels.linear import MOST_TOKENS, SkinnyPlan, launch_gated, launch_linears, pays, plan_product
from hf_dsde.utils import tuning
from hf_dsde.utils.tuning import HOPPER, SAFE

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}
GUARD = 512
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch):
    """Results start as NaN, and so does what lies around them, where it has to stay."""
    empty, whole = torch.empty, []

    def guarded_empty(size, **options):
        count = size[0] * size[1]
        whole.append((empty(count + 2 * GUARD, **options).fill_(float("nan")), count))
        return whole[-1][0][GUARD : GUARD + count].view(size)

    monkeypatch.setattr(torch, "empty", guarded_empty)
    yield
    assert whole
    for buffer, count in whole:
        assert buffer[:GUARD].isnan().all()
        assert not buffer[GUARD : GUARD + count].isnan().any()
        assert buffer[GUARD + count :].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", PRODUCT_CASES.values(), ids=PRODUCT_CASES)
def test_products_with_several_weights_are_those_of_the_definition(case, dtype):
    x, weights, biases = make_products(case, dtype)
    results = kernels.linears(x, weights, biases)
    for result, weight, bias in zip(results, weights, biases, strict=True):
        assert (result.dtype, result.shape, result.is_contiguous()) == (dtype, (case.tokens, len(weight)), True)
        expected = slow_linear(x, weight, bias)
        torch.testing.assert_close(result.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", PRODUCT_CASES.values(), ids=PRODUCT_CASES)
def test_gated_products_are_those_of_the_definition(case, dtype):
    x, (gate, *_), _ = make_products(case, dtype)
    up = torch.randn(gate.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = rounded_gated(slow_linear(x, 3 * gate), slow_linear(x, up), dtype)
    result = kernels.gated_linear(x, 3 * gate, up)
    torch.testing.assert_close(result, expected, rtol=2 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


PLANS = [SkinnyPlan(16, 8, 16, 2, 3), SkinnyPlan(32, 16, 64, 4, 4), SkinnyPlan(16, 32, 256, 4, 2)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_launch_gives_the_same(plan):
    x, weights, biases = make_products(ProductCase(6, 160, (40, 24, 17), (True, False, True)), torch.float32)
    results = launch_linears(x, weights, biases, plan)
    for result, weight, bias in zip(results, weights, biases, strict=True):
        torch.testing.assert_close(result.double(), slow_linear(x, weight, bias), rtol=3e-6, atol=3e-6)
    gate, up = weights[0], weights[0].flip(0)
    expected = rounded_gated(slow_linear(x, gate), slow_linear(x, up), torch.float32)
    torch.testing.assert_close(launch_gated(x, gate, up, plan), expected, rtol=5e-6, atol=5e-6)


def test_a_token_gets_the_same_among_others():
    x, weights, biases = make_products(ProductCase(16, 160, (24, 40), (True, False)), torch.float32)
    together, alone = kernels.linears(x, weights, biases), kernels.linears(x[5:6], weights, biases)
    for all_tokens, one in zip(together, alone, strict=True):
        assert torch.equal(all_tokens[5:6], one)


def test_gated_products_round_where_four_operations_round():
    # Integers, so that the sums are exact, and large ones, so that float16 has no place for many of them.
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-99, 100, (8, 64), generator=generator).half()
    gate, up = torch.randint(-9, 10, (2, 40, 64), generator=generator).half()
    gate /= 512
    gates, ups = slow_linear(x, gate), slow_linear(x, up)
    rounded = rounded_gated(gates, ups, torch.float16)
    once = (gates / (1 + torch.exp(-gates)) * ups).half()
    result = kernels.gated_linear(x, gate, up)
    assert (rounded != once).double().mean() > 0.2
    assert (result == rounded).double().mean() > 0.98  # numpy's exponential is not always the nearest float32


def test_biases_are_added_before_rounding():
    x, weight = torch.full((1, 16), 1.0).half(), torch.full((8, 16), 128.0).half()
    weight[:, 0] += 1  # the sum is 2049, which float16 has no place for
    bias = torch.full((8,), 0.5).half()
    assert torch.equal(kernels.linears(x, [weight], [bias])[0], torch.full((1, 8), 2050.0).half())
    assert torch.equal(kernels.linears(x, [weight])[0], torch.full((1, 8), 2048.0).half())


@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 33, 64])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("row", [HOPPER, SAFE], ids=["Hopper", "safe"])
def test_planned_launches_fit_the_device(row, gated, tokens):
    for rows in (8, 1536, *HOPPER.gated_plans, *HOPPER.linears_plans):
        for width in (64, 576, 896, 1536, 5120, 100):
            for size in (2, 4):
                plan = plan_product(tokens, min(rows, 10**6), width, size, gated=gated, tuning=row)
                assert plan.block_m >= tokens
                assert width % plan.block_k == 0 or width % 64
                buffers = plan.stages * plan.block_k * size * (plan.block_m + (1 + gated) * plan.block_n)
                assert buffers <= 227 * 1024
    torch.empty((1, 1)).zero_()  # for the fixture, which wants a result


@pytest.mark.parametrize("shared", [64, 99, 163, 227])
@pytest.mark.parametrize("gated", [False, True])
def test_launches_are_planned_within_the_shared_memory_of_the_device(gated, shared):
    changed = set()
    for tokens in (1, 16, 17, 64):
        for rows in (8, *HOPPER.gated_plans, *HOPPER.linears_plans):
            for size in (2, 4):
                shape = (tokens, min(rows, 10**6), 4096, size)
                plan = plan_product(*shape, gated=gated, shared=shared << 10)
                read = plan.block_k * size * (plan.block_m + (1 + gated) * plan.block_n)
                assert (plan.stages - 1) * read <= shared << 10
                assert plan.block_m >= tokens
                assert plan.stages >= 2
                assert plan.block_k >= 64
                changed.add(plan != plan_product(*shape, gated=gated))
    assert (True in changed) == (shared == 64)  # the plans suit all devices that the kernels run on
    torch.empty((1, 1)).zero_()


def test_products_are_left_to_the_library_of_a_device_of_no_known_class(monkeypatch):
    monkeypatch.setattr(tuning, "HOPPER", SAFE)
    assert not any(pays(8, matrices, 64, 64, torch.bfloat16, CPU) for matrices in (1, 2, 3))
    case = next(iter(PRODUCT_CASES.values()))
    x, weights, biases = make_products(case, torch.float32)
    for result, weight, bias in zip(kernels.linears(x, weights, biases), weights, biases, strict=True):
        torch.testing.assert_close(result.double(), slow_linear(x, weight, bias), rtol=3e-6, atol=3e-6)


def test_what_pays_is_few_tokens_of_half_precision_with_weights_that_are_not_large():
    assert pays(8, 3, 2560, 1536, torch.bfloat16, CPU)
    assert pays(16, 2, 2 * 6144, 1536, torch.float16, CPU)
    assert not pays(17, 2, 2 * 6144, 1536, torch.float16, CPU)
    assert pays(16, 3, 6144, 4096, torch.bfloat16, CPU)
    assert not pays(17, 3, 6144, 4096, torch.bfloat16, CPU)
    assert pays(64, 3, 2560, 1536, torch.bfloat16, CPU)
    assert not pays(65, 3, 2560, 1536, torch.bfloat16, CPU)
    assert max(tokens for bounds in HOPPER.paying.values() for tokens, _ in bounds) <= MOST_TOKENS
    assert not pays(8, 3, 2560, 1536, torch.float32, CPU)
    assert not pays(8, 2, 2 * 27648, 5120, torch.bfloat16, CPU)
    assert not pays(8, 3, 2560, 1001, torch.bfloat16, CPU)
    assert pays(8, 3, 7168, 5120, torch.bfloat16, CPU)
    assert not pays(8, 1, 7168, 5120, torch.bfloat16, CPU)
    torch.empty((1, 1)).zero_()


def test_inputs_that_do_not_fit_are_refused():
    x, weights, _ = make_products(ProductCase(4, 64, (16, 8)), torch.float32)
    for bad, words in (
        ([x, weights * 2], "takes 1 to 3"),
        ([x, []], "takes 1 to 3"),
        ([torch.ones(MOST_TOKENS + 1, 64), weights], "up to 64 tokens"),
        ([x.T.contiguous().T, weights], "strides"),
        ([x[0], weights], "are needed"),
        ([x[:, :32], weights], r"\[N, 32\]"),
        ([x.half(), weights], "float16"),
        ([x, [weights[0].T.contiguous().T]], "contiguous matrix"),
    ):
        with pytest.raises(ValueError, match=words):
            kernels.linears(*bad)
    with pytest.raises(ValueError, match="of gate is needed"):
        kernels.gated_linear(x, *weights)
    with pytest.raises(ValueError, match="strides"):
        launch_linears(torch.ones(17, 64), weights, None, replace(PLANS[0], block_m=16))
    torch.empty((1, 1)).zero_()


def test_nothing_happens_without_tokens():
    x, weights, _ = make_products(ProductCase(1, 64, (16, 8)), torch.float32)
    assert [result.shape for result in kernels.linears(x[:0], weights)] == [(0, 16), (0, 8)]
    assert kernels.gated_linear(x[:0], weights[0], weights[0]).shape == (0, 16)
