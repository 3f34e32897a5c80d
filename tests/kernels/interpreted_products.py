"""The kernels for few tokens under Triton's interpreter, run as `interpreted_kernels.py` is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from interpreting import guarded_results, loops_with_new_numpy  # noqa: F401 - fixtures
from kernel_cases import (
    LOW_RANK_CASES,
    PRODUCT_CASES,
    LowRankCase,
    ProductCase,
    make_low_rank,
    make_products,
    rounded_gated,
    slow_linear,
    slow_low_rank,
)

from hf_dsde.kernels import branches, low_rank, reference
from hf_dsde.kernels import elementwise as kernels
from hf_dsde.kernels.linear import MOST_TOKENS, SkinnyPlan, launch_gated, launch_linears, pays, plan_product
from hf_dsde.kernels.low_rank_plan import plan_low_rank, turns_of
from hf_dsde.kernels.reference import LowRank
from hf_dsde.utils import tuning
from hf_dsde.utils.tuning import HOPPER, SAFE

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def something_is_computed(guarded_results):  # noqa: F811 - the imported fixture
    yield
    assert guarded_results


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
    x, bases, adapters = make_low_rank(LOW_RANK_CASES["rank one"], torch.float32)
    assert [each.shape for each in kernels.add_low_rank(x[:0], [base[:0] for base in bases], adapters)] == [
        (0, 33),
        (0, 20),
    ]


ADAPTED = [(torch.float32, None), (torch.float16, None), (torch.float16, torch.float32)]
"""Dtypes of states and of adapters, if it is another."""


@pytest.fixture
def kernels_alone(monkeypatch):
    """Plain torch takes nothing over."""
    monkeypatch.setattr(low_rank, "reference", None)


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize(("dtype", "own"), ADAPTED, ids=str)
@pytest.mark.parametrize("case", LOW_RANK_CASES.values(), ids=LOW_RANK_CASES)
def test_low_rank_adapters_add_what_the_definition_says(case, dtype, own):
    x, bases, adapters = make_low_rank(case, dtype, own)
    before = [base.clone() for base in bases]
    results = kernels.add_low_rank(x, bases, adapters)
    for result, base, terms, rows in zip(results, bases, adapters, case.rows, strict=True):
        assert (result.dtype, result.shape, result.is_contiguous()) == (dtype, (case.tokens, rows), True)
        near = {"rtol": TOLERANCE[dtype], "atol": 2 * TOLERANCE[dtype]}
        torch.testing.assert_close(result.double(), slow_low_rank(x, base, terms), **near)
    assert all(map(torch.equal, bases, before)), "who else reads a module's result got another"


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("rows", [(72, 72, 24), (20, 20, 24)], ids=str)  # whose reads are vectors, and are not
def test_adapters_add_to_parts_of_one_product(rows):
    x, bases, adapters = make_low_rank(LowRankCase(5, 96, rows, ((4,), (8, 3), (16,))), torch.float32)
    parts = torch.cat([torch.full((5, 8), torch.nan), *bases, torch.full((5, 8), torch.nan)], dim=1)
    parts = parts.split([8, *rows, 8], dim=1)[1:-1]
    for result, right in zip(
        kernels.add_low_rank(x, parts, adapters), kernels.add_low_rank(x, bases, adapters), strict=True
    ):
        assert torch.equal(result, right)
        assert result.is_contiguous()
    gated = [kernels.gated_low_rank(x, each[:2], adapters[:2]) for each in (parts, bases)]
    assert torch.equal(*gated)


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize(("dtype", "own"), ADAPTED, ids=str)
@pytest.mark.parametrize("ranks", [((4,), (16,)), ((80,), (4,)), ((2, 3), (4,)), ((2,), (3, 16))], ids=str)
def test_the_gated_product_of_adapted_results_is_that_of_the_definition(ranks, dtype, own):
    x, bases, adapters = make_low_rank(LowRankCase(5, 96, (72, 72), ranks), dtype, own)
    exact = [slow_low_rank(x, base, terms) for base, terms in zip(bases, adapters, strict=True)]
    result = kernels.gated_low_rank(x, bases, adapters)
    assert (result.dtype, result.is_contiguous()) == (dtype, True)
    torch.testing.assert_close(
        result, rounded_gated(*exact, dtype), rtol=2 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype]
    )


@pytest.mark.usefixtures("kernels_alone")
def test_low_rank_products_round_where_four_operations_round():
    # Whole numbers, so that sums are exact in any order, and large ones, so that float16 has no place for many of them.
    generator = torch.Generator().manual_seed(0)

    def whole(bound, *size):
        return torch.randint(-bound, bound + 1, size, generator=generator).half()

    x, downs, ups = whole(30, 8, 300), whole(9, 2, 16, 300), whole(3, 2, 64, 16) / 64
    bases, scaling = list(whole(2000, 2, 8, 64)), 1.7
    adapters = [[LowRank(down, up, scaling)] for down, up in zip(downs, ups, strict=True)]
    for result, base, [term] in zip(kernels.add_low_rank(x, bases, adapters), bases, adapters, strict=True):
        assert torch.equal(result.double(), slow_low_rank(x, base, [term]))
        inner = slow_linear(x, term.down)
        exact = slow_linear(inner, term.up)
        other = (
            base.double() + (slow_linear(inner.half(), term.up) * scaling),
            base.double() + (exact.half().double() * scaling).half().double(),
            base.double() + (slow_linear(inner.half(), term.up).half().double() * scaling),
        )
        assert all((each.half() != result).any() for each in other)


@pytest.mark.usefixtures("kernels_alone")
def test_a_token_gets_the_same_from_adapters_among_others():
    x, bases, adapters = make_low_rank(LowRankCase(40, 700, (24, 40), ((4,), (16,))), torch.float32)
    together = kernels.add_low_rank(x, bases, adapters)
    alone = kernels.add_low_rank(x[5:6], [base[5:6] for base in bases], adapters)
    for all_tokens, one in zip(together, alone, strict=True):
        torch.testing.assert_close(all_tokens[5:6], one, rtol=0, atol=0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("width", [16, 64, 896, 4096, 5120, 12288, 14336, 777])
def test_the_parts_of_the_inner_dimension_cover_it_and_none_is_empty(width, size):
    for tokens in (1, 16, 17, 64, 65, 300, 1024):
        for rank in (1, 8, 16, 65, 256):
            plan = plan_low_rank(tokens, width, rank, size)
            part = plan.steps * plan.block_k
            assert (plan.splits - 1) * part < width <= plan.splits * part
            assert plan.splits <= 16
            assert plan.together >= 1
            for power in (plan.block_m, plan.block_n, plan.block_k, plan.block_r, plan.together):
                assert power & (power - 1) == 0
    torch.empty((1, 1)).zero_()


@pytest.mark.parametrize(("dtype", "own"), ADAPTED, ids=str)
def test_what_a_launch_adds_to_is_of_one_dtype(dtype, own):
    _, _, adapters = make_low_rank(LOW_RANK_CASES["some modules with more adapters"], dtype, own)
    kinds, added = [dtype] * 3, [[], [], []]
    turns = turns_of(adapters, dtype, gated=False)
    for places, terms, kind in turns:
        assert len({kinds[place] for place in places}) == 1
        for place, term in zip(places, terms, strict=True):
            kinds[place] = kind
            added[place].append(id(term))
    assert added == [list(map(id, terms)) for terms in adapters]
    assert kinds == [dtype] * 3
    assert len(turns) == (4 if own == torch.float32 else 3)
    assert [turn.places for turn in turns_of(adapters[:2], dtype, gated=True)] == [[1], [1], [0, 1]]
    torch.empty((1, 1)).zero_()


@pytest.mark.parametrize("wrong", ["scaling", "swapped", "only the first", "base"])
def test_adapters_that_are_mixed_up_are_noticed(wrong):
    x, bases, adapters = make_low_rank(LowRankCase(4, 64, (24, 24), ((4, 4), (4, 4))), torch.float32)
    right = [slow_low_rank(x, base, terms) for base, terms in zip(bases, adapters, strict=True)]
    mutants = {
        "scaling": [[term._replace(scaling=1.0) for term in terms] for terms in adapters],
        "swapped": adapters[::-1],
        "only the first": [terms[:1] for terms in adapters],
        "base": adapters,
    }
    states = [torch.zeros_like(base) for base in bases] if wrong == "base" else bases
    for found, expected in zip(kernels.add_low_rank(x, states, mutants[wrong]), right, strict=True):
        assert not torch.allclose(found.double(), expected, rtol=0, atol=1e-2)


def test_what_the_low_rank_kernels_do_not_take_plain_torch_computes(monkeypatch):
    x, bases, adapters = make_low_rank(LowRankCase(4, 64, (24, 16), ((4,), (2,))), torch.float32)
    wide = [[LowRank(a.double(), b.double(), s) for a, b, s in terms] for terms in adapters]
    half = [[LowRank(a.half(), b.half(), s) for a, b, s in terms] for terms in adapters]
    cases = [
        (x.double(), [base.double() for base in bases], wide),
        (x, [base.double() for base in bases], adapters),
        (x, [bases[0], bases[1].double()], adapters),
        (x, bases, [adapters[0], half[1]]),
        (x, bases, half),
    ]
    for states, results, terms in cases:
        assert low_rank.suits(states, terms) == (terms is adapters)
        found, expected = (ops.add_low_rank(states, results, terms) for ops in (kernels, reference))
        assert all(map(torch.equal, found, expected))
        gates, factors = results[0][:, :16], results[1]
        few = [[term._replace(up=term.up[:16]) for term in each] for each in terms]
        found, right = (ops.gated_low_rank(states, [gates, factors], few) for ops in (kernels, reference))
        assert torch.equal(found, right)
    assert not low_rank.suits(x[:1].expand(low_rank.MOST_TOKENS + 1, -1), adapters)
    assert low_rank.suits(x, adapters)
    with pytest.raises(ValueError, match="takes 1 to 3"):
        kernels.add_low_rank(x, [], [])
    torch.empty((1, 1)).zero_()


class FakeDevice:
    """Streams on which whatever is called takes place at once, and takes down what it comes after.

    Attributes:
        after: What has happened, each with what is in front of it in its own stream, or in one that this waited for.
        open: Streams that went their own way and have not been waited for.
    """

    def __init__(self):
        self.after, self.open, self.current, self.seen = {}, set(), "main", {}

    def streams(self, _):
        return "one", "another", FakeStream(self, "branch")

    def note(self, name):
        before = self.seen.setdefault(self.current, set())
        self.after[name] = set(before)
        before.add(name)

    @contextmanager
    def stream(self, stream):
        outer, self.current = self.current, stream.name
        yield
        self.current = outer


class FakeStream:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def wait_stream(self, other):
        self.device.seen.setdefault(self.name, set()).update(self.device.seen.get(other.name, ()))
        self.device.open.add(self.name)
        self.device.open.discard(other.name)


class ComputedWhenAsked(Sequence):
    def __init__(self, results, compute):
        self.results, self.compute = results, compute

    def __len__(self):
        return len(self.results)

    def __getitem__(self, index):
        self.compute()
        return self.results[index]


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("ranks", [((4,), (16,)), ((2, 3), (4,))], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_products_with_a_run_beside_the_modules_in_a_recorded_pass(gated, ranks, recording, monkeypatch):
    device = FakeDevice()

    def noted(name, own):
        def launch(*given, **named):
            device.note(f"{name} {sum(each.startswith(name) for each in device.after)}")
            return own(*given, **named)

        return launch

    for name in ("_multiply_down", "_add_up"):
        monkeypatch.setattr(low_rank, name, noted(name, getattr(low_rank, name)))
    monkeypatch.setattr(branches, "_branching", lambda _: recording)
    monkeypatch.setattr(branches, "_streams", device.streams)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: FakeStream(device, device.current))
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    x, bases, adapters = make_low_rank(LowRankCase(5, 96, (72, 72), ranks), torch.float32)
    device.note("input")
    once = cache(partial(device.note, "base"))
    operation = "gated_low_rank" if gated else "add_low_rank"
    found = getattr(kernels, operation)(x, ComputedWhenAsked(bases, once), adapters)
    device.note("what follows")
    turns = max(map(len, ranks))
    downs, ups = ({f"{name} {turn}" for turn in range(turns)} for name in ("_multiply_down", "_add_up"))
    assert set(device.after) == {"input", "base", "what follows"} | downs | ups
    for down in downs:
        assert "input" in device.after[down]
        assert "base" not in device.after[down]
        assert (down in device.after["base"]) == (not recording)
    for up in ups:
        assert device.after[up] >= {"input", "base"} | downs
    assert device.after["what follows"] == set(device.after) - {"what follows"}
    assert device.open <= {"main"}, "a stream is left that nothing waits for"
    expected = getattr(reference, operation)(x, bases, adapters)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_branches_are_made_while_few_tokens_are_recorded(monkeypatch):
    states = torch.zeros(HOPPER.branch_tokens + 1, 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not branches._branching(states[1:])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert branches._branching(states[1:])
    assert not branches._branching(states)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not branches._branching(states[1:])
    torch.empty((1, 1)).zero_()


def test_adapters_of_float32_lose_nothing_beside_states_of_half_precision():
    """What A makes of them has the bits of float32; with A rounded to TensorFloat-32 it would not."""
    x, _, [[term]] = make_low_rank(LowRankCase(5, 700, (32,), ((16,),)), torch.float16, torch.float32)
    sums = low_rank._room(x, [term])
    low_rank._multiply_down(x, [term], sums)
    exact = slow_linear(x, term.down)
    rounded = slow_linear(x, ((term.down.view(torch.int32) + 4096) & -8192).view(torch.float32))
    torch.testing.assert_close(sums.view(-1, 5, 16).double().sum(0), exact, rtol=0, atol=2e-6)
    assert (rounded - exact).abs().max() > 1e-4
