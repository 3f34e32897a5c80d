"""The kernels under Triton's interpreter, on a CPU: `make test-kernels` runs this file in processes that interpret.

The interpreter takes products of bfloat16 matrices for products of integers and cuts where a GPU rounds, so that
attention is tested in float32 and float16 here, and bfloat16 in `test_kernels_gpu.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreting import loops_with_new_numpy  # noqa: F401 - a fixture
from kernel_cases import (
    ATTENTION_CASES,
    DISTRIBUTIONS,
    DIVERGENCES,
    NUCLEI,
    AttentionCase,
    AttentionInput,
    make_attention,
    slow_attention,
    slow_divergence,
    slow_entropy_and_top,
    slow_norm,
    slow_nucleus,
    slow_rotation,
    slow_silu_mul,
)
from tiny_heads import tiny_head
from tiny_models import tiny_model
from tiny_trees import LENGTHS, Trees
from torch import Tensor

from hf_dsde.execution.eager_runner import EagerRunner
from hf_dsde.execution.fused_decoder import FusedDecoder
from hf_dsde.execution.fused_head import FusedHead
from hf_dsde.execution.kv_cache import RaggedCache
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.kernels import attention as attention_kernel
from hf_dsde.kernels import elementwise as kernels
from hf_dsde.kernels import low_rank, reference
from hf_dsde.kernels.attention import launch_attention
from hf_dsde.kernels.attention_plan import LaunchPlan, plan_launch
from hf_dsde.kernels.block import Block

TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3}
SINGLE = {"rtol": 4e-6, "atol": 4e-6}
"""What float32 arithmetic may differ from float64."""


@pytest.fixture(autouse=True)
def _results_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN instead of what happens to lie there."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))


def run(given: AttentionInput, plan: LaunchPlan | None = None) -> Tensor:
    head = (given.q, given.keys, given.values, given.block, given.scaling, given.window)
    return kernels.ragged_attention(*head, given.reach) if plan is None else launch_attention(*head, plan)


def plan_for(given: AttentionInput, block_m: int, block_n: int, splits: int) -> LaunchPlan:
    queries = given.block.max_count * given.q.shape[1] // given.keys.shape[1]
    return LaunchPlan(block_m, block_n, max(1, -(-queries // block_m)), splits, warps=4, stages=2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES.values(), ids=ATTENTION_CASES)
def test_attention_is_that_of_the_definition(case, dtype):
    given = make_attention(case, dtype)
    out = run(given)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), slow_attention(given), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "splits", "heads"),
    [
        ("long and short", 1, 3),
        ("long and short", 8, 3),
        ("window over several blocks", 2, 3),
        ("window over several blocks", 8, 6),
        ("window and padding", 1, 6),
        ("packed", 2, 6),
        ("trees", 2, 3),
        ("trees and padding in front", 1, 6),
        ("trees in a window", 2, 3),
        ("trees in a window over several blocks", 8, 3),
    ],
)
def test_every_launch_gives_the_same(name, splits, heads, monkeypatch):
    """Three heads share a key-value head. Where there is one, programs of a second one would do the same elsewhere."""
    monkeypatch.setattr(attention_kernel, "FEWEST_SLOTS", 32)
    given = make_attention(replace(ATTENTION_CASES[name], heads=heads, kv_heads=heads // 3), torch.float32)
    expected = slow_attention(given)
    for block_m, block_n in ((16, 16), (32, 64)):
        out = run(given, plan_for(given, block_m, block_n, splits))
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("layout", ["packed", "left", "right"])
def test_a_chain_given_as_a_tree_is_a_chain(layout, window):
    given = make_attention(AttentionCase((40, 0, 21), (2, 6, 1), layout, window=window), torch.float32)
    real = given.block.positions >= 0
    places = torch.where(real, given.block.positions - torch.tensor([40, 0, 21])[given.block.rows], 0)
    as_tree = replace(given.block, slots=given.block.positions.clone(), ancestors=(2 << places) - 1)
    torch.testing.assert_close(run(replace(given, block=as_tree)), run(given), rtol=0, atol=2e-6)


@pytest.mark.parametrize("mutant", ["no ancestors", "all that came before"])
@pytest.mark.parametrize("ops", [kernels, reference])
def test_trees_taken_for_something_else_are_noticed(ops, mutant):
    given = make_attention(ATTENTION_CASES["trees"], torch.float32)
    head = (given.q, given.keys, given.values)
    block = given.block
    wrong = {
        "no ancestors": {"ancestors": torch.zeros_like(block.ancestors)},
        "all that came before": {"ancestors": (2 << (block.slots - torch.tensor([40, 0, 7])[block.rows])) - 1},
    }[mutant]
    right = ops.ragged_attention(*head, block, given.scaling, None, 64).double()
    torch.testing.assert_close(right, slow_attention(given), rtol=0, atol=5e-6)
    out = ops.ragged_attention(*head, replace(block, **wrong), given.scaling, None, 64).double()
    assert not torch.allclose(out, slow_attention(given), rtol=0, atol=5e-3)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_fused_pass_over_trees_gives_what_plain_decoding_of_each_path_gives(family, packed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model, trees = tiny_model(family, num_hidden_layers=1, sliding_window=2).float(), Trees.drawn()
    runner = EagerRunner(model, len(LENGTHS), 32, RuntimeOptions(packed_attention=False))
    block = trees.block(24)
    trees.run(runner, RowBlock(block.tokens[:, :1], block.positions[:, :1]))
    if packed:
        flat, places = block.packed()
    else:
        count = torch.full((len(LENGTHS),), block.width)
        flat, places = replace(block, counts=count, size=block.tokens.numel()).packed()
    logits = FusedDecoder(model, kernels)(flat, runner.cache, 64, None).logits
    trees.check(model, PassOutput(logits[places]), 1e-4)


@pytest.mark.parametrize("kept", [3, 1])
def test_a_fused_pass_of_a_head_gives_what_the_head_gives(kept, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    head, rows, width = tiny_head(tiny_model(), kind="qwen3", norm_output=True).float(), 2, 3
    tokens, states = torch.randint(3, 90, (rows, width)), torch.randn(rows, width, head.config.hidden_size)

    def block(columns, positions):
        return Block(
            tokens=tokens[:, columns].flatten(),
            rows=torch.arange(rows).repeat_interleave(len(columns)),
            positions=positions.repeat(rows),
            starts=torch.arange(rows).int() * len(columns),
            counts=torch.full((rows,), len(columns), dtype=torch.int32),
            max_count=len(columns),
            states=states[:, columns].flatten(0, 1),
        )

    columns = torch.arange(width)
    last = None if kept == width else block(columns[-kept:], torch.full((kept,), -1))
    keep = None if kept == width else torch.arange(rows * width).view(rows, width)[:, -kept:].flatten()
    output = FusedHead(head, kernels)(block(columns, columns), RaggedCache(1, 64, rows), 64, keep, last)
    with torch.no_grad():
        expected = head(tokens, hidden_states=states)
    for found, wanted in ((output.logits, expected.logits), (output.hidden[0], expected.hidden_states)):
        torch.testing.assert_close(found.view(rows, kept, -1), wanted[:, -kept:], rtol=1e-4, atol=1e-4)


def test_a_reach_far_beyond_the_texts_changes_nothing():
    given = make_attention(ATTENTION_CASES["long and short"], torch.float32)
    near, far = run(given), run(replace(given, reach=2048))
    torch.testing.assert_close(far, near, rtol=0, atol=2e-6)


def test_queries_may_be_views_and_the_cache_longer_than_the_rows():
    given = make_attention(ATTENTION_CASES["padding in front"], torch.float32, slack=200)
    fused = torch.cat((given.q, torch.full_like(given.q, 7.0)), dim=1)
    strided = replace(given, q=fused[:, : given.q.shape[1]])
    assert not strided.q.is_contiguous()
    torch.testing.assert_close(run(strided), run(given), rtol=0, atol=0)


def test_large_scores_neither_overflow_nor_drown():
    given = make_attention(AttentionCase((300, 10), (3, 2)), torch.float32)
    given = replace(given, q=given.q * 50)
    torch.testing.assert_close(run(given).double(), slow_attention(given), rtol=0, atol=3e-5)


def test_attention_over_no_tokens_is_empty():
    given = make_attention(AttentionCase((4,), (0,)), torch.float32)
    assert run(given).shape == (0, 96)


def test_a_strided_last_dimension_is_refused():
    given = make_attention(ATTENTION_CASES["packed"], torch.float32)
    turned = given.keys.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match=r"the last one has to be 1. Call .contiguous\(\)"):
        run(replace(given, keys=turned))


def test_a_launch_has_a_program_for_every_query_and_few_idle_processors():
    alone = plan_launch(queries=4, groups=8, slots=16384, dim=128, element_size=2, processors=132)
    assert 132 <= 8 * alone.splits <= 8 * 132
    assert plan_launch(4, 1024, 512, 128, 2, 132).splits == 1  # enough programs without dividing rows
    assert plan_launch(4, 8, 100, 128, 2, 132).splits == 1  # too few slots to divide
    assert plan_launch(3, 32, 512, 128, 2, 132).splits == 1  # dividing would save less than a merge costs
    assert plan_launch(3, 32, 4096, 128, 2, 132).splits > 4
    for queries in (1, 4, 18, 39, 52, 65, 300):
        plan = plan_launch(queries, 8, 1024, 128, 2, 132)
        assert plan.query_blocks * plan.block_m >= queries
        assert (plan.query_blocks - 1) * plan.block_m < queries


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_padding_with_many_heads_per_key_value_head(dtype):
    given = make_attention(AttentionCase((5, 3), (3, 1), "left", tail=2, heads=40, kv_heads=1), dtype)
    torch.testing.assert_close(run(given).double(), slow_attention(given), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore:.* encountered in")  # a GPU has no warnings
def test_a_token_that_overflows_does_not_reach_those_before_it():
    keys, values = torch.zeros(2, 1, 1, 64, 16).half()
    rows, slots = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    states = torch.randn(3, 1, 16).half()
    poisoned = states.clone()
    poisoned[2] = torch.tensor([float("inf"), -float("inf"), float("nan"), *[1.0] * 13]).half()
    block = Block(slots, rows, slots, torch.zeros(1).int(), torch.full((1,), 3).int(), 3)
    outs = []
    for v in (states, poisoned):
        q = kernels.rotate_and_store(
            states, states, v, torch.ones(3, 16).half(), torch.zeros(3, 16).half(), keys, values, rows, slots
        )
        outs.append(kernels.ragged_attention(q, keys, values, block, 0.25, None, 64))
    assert torch.equal(outs[0][:2], outs[1][:2])
    assert bool(values[0, 0, 2, :3].tolist() == [65504.0, -65504.0, 0.0])


@pytest.mark.parametrize("dim", [16, 96, 1100])
@pytest.mark.parametrize("rows", [1, 7])
def test_norm_is_that_of_the_definition(rows, dim):
    x, weight = torch.randn(rows, 2 * dim)[:, :dim], torch.randn(dim)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), slow_norm(x, weight, 1e-5), **SINGLE)
    residual = torch.randn(rows, dim)
    normed, summed = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(normed.double(), slow_norm(summed, weight, 1e-5), **SINGLE)


def test_norm_of_small_states_depends_on_epsilon():
    x, weight = torch.full((2, 64), 1e-3), torch.ones(64)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-2).double(), slow_norm(x, weight, 1e-2), **SINGLE)


def test_norm_rounds_before_the_weight_and_the_sum_before_the_norm():
    x, residual, weight = torch.randn(4, 64).half(), torch.randn(4, 64).half(), torch.randn(64).half()
    normed, summed = kernels.add_rms_norm(x, residual, weight, 1e-5)
    single = summed.float()
    unit = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(summed, x + residual)
    # Sums in another order may round one element in a thousand otherwise.
    assert (normed == unit.half() * weight).float().mean() > 0.99


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # a GPU has no warnings
def test_norm_of_states_whose_squares_float16_cannot_hold():
    x, residual, weight = 3e4 * torch.randn(3, 96).clamp(-1, 1), 3e4 * torch.rand(3, 96), torch.randn(96)
    x, residual, weight = x.half(), residual.half(), weight.half()
    normed, summed = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert summed.isfinite().all()
    assert summed.abs().max() > 3e4
    expected = slow_norm(summed, weight, 1e-5)
    torch.testing.assert_close(normed.double(), expected, rtol=2e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # to infinity, as intended; a GPU has no warnings
def test_gated_product_is_that_of_the_definition():
    both = torch.randn(3, 2 * 1100) * 4
    both[0, :3] = torch.tensor([-200.0, 90.0, 0.0])
    gate, up = both.chunk(2, dim=-1)
    torch.testing.assert_close(kernels.silu_mul(gate, up).double(), slow_silu_mul(gate, up), **SINGLE)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), [(6, 2, 16, 16), (5, 5, 24, 40), (40, 10, 64, 64)])
def test_queries_and_keys_are_turned_and_stored_in_their_places(heads, kv_heads, dim, value_dim):
    tokens, slots_per_row = 5, 9
    fused = torch.randn(tokens, (heads + kv_heads) * dim + kv_heads * value_dim)
    q, k, v = fused.split([heads * dim, kv_heads * dim, kv_heads * value_dim], dim=-1)
    q, k, v = q.unflatten(-1, (heads, dim)), k.unflatten(-1, (kv_heads, dim)), v.unflatten(-1, (kv_heads, value_dim))
    cos, sin = torch.randn(2, tokens, dim)  # halves differ, so that a mix-up shows
    keys, values = torch.randn(3, kv_heads, slots_per_row, dim), torch.randn(3, kv_heads, slots_per_row, value_dim)
    rows, slots = torch.tensor([2, 2, 0, 1, 1]), torch.tensor([3, 4, 0, 8, 7])
    expected_keys, expected_values = keys.double(), values.double()
    turned_keys = slow_rotation(k, cos, sin)
    for token, (row, slot) in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
        expected_keys[row, :, slot] = turned_keys[token]
        expected_values[row, :, slot] = v[token].double()
    turned = kernels.rotate_and_store(q, k, v, cos, sin, keys, values, rows, slots)
    torch.testing.assert_close(turned.double(), slow_rotation(q, cos, sin), **SINGLE)
    torch.testing.assert_close(keys.double(), expected_keys, **SINGLE)
    assert torch.equal(values.double(), expected_values)


def test_rotation_rounds_each_product():
    q = torch.randn(2, 4, 16).half()
    k, v = torch.randn(2, 2, 2, 16).half()
    cos, sin = torch.randn(2, 2, 16).half()
    keys, values = torch.zeros(2, 1, 2, 4, 16).half()
    turned = kernels.rotate_and_store(
        q, k, v, cos, sin, keys, values, torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1])
    )
    half_turned = torch.cat((-q[..., 8:], q[..., :8]), dim=-1)
    assert torch.equal(turned, q * cos[:, None] + half_turned * sin[:, None])
    assert torch.equal(values[0, :, :2].transpose(0, 1), v)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gated_product_rounds_where_torch_rounds():
    gate, up = (4 * torch.randn(3, 1100)).half(), torch.randn(3, 1100).half()
    same = kernels.silu_mul(gate, up) == reference.silu_mul(gate, up)
    assert same.float().mean() > 0.99


def test_scores_that_float16_cannot_hold_are_float32():
    given = make_attention(AttentionCase((300, 10), (3, 2)), torch.float16)
    given = replace(given, q=(given.q * 300).half(), keys=(given.keys * 90).half())
    out = run(given)
    assert ((given.q.double() @ given.keys[0, 0].double().T) * given.scaling).abs().max() > 2e5
    torch.testing.assert_close(out.double(), slow_attention(given), rtol=0, atol=TOLERANCE[torch.float16])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_fused_pass_in_float16_is_that_of_plain_torch(family, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model, counts = tiny_model(family, num_hidden_layers=1).half(), (5, 3)
    rows = torch.arange(2).repeat_interleave(torch.tensor(counts))
    positions = torch.cat([torch.arange(count) for count in counts])
    tokens = torch.randint(3, 90, (sum(counts),), generator=torch.Generator().manual_seed(0))
    starts, count = torch.tensor([0, 5]).int(), torch.tensor(counts).int()
    found, wanted = (
        FusedDecoder(model, ops)(Block(tokens, rows, positions, starts, count, 5), RaggedCache(1, 64, 2), 64, None)
        for ops in (kernels, reference)
    )
    assert found.logits.dtype is torch.float16
    torch.testing.assert_close(found.logits, wanted.logits, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("own", [torch.float16, torch.float32], ids=str)
def test_a_fused_pass_with_lora_in_float16_is_that_of_plain_torch(own, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(low_rank, "reference", None)  # nothing is left to plain torch
    torch.manual_seed(0)
    config = peft.LoraConfig(r=5, target_modules="all-linear", init_lora_weights=False)
    wrapper = peft.get_peft_model(tiny_model(num_hidden_layers=1).half(), config)
    model = wrapper.eval().get_base_model()
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(own)
    tokens, places, none = torch.randint(3, 90, (4,)), torch.arange(4), torch.zeros(4, dtype=torch.int64)
    block = Block(tokens, none, places, torch.zeros(1).int(), torch.full((1,), 4).int(), 4)
    found, wanted = (FusedDecoder(model, ops)(block, RaggedCache(1, 64, 1), 64, None) for ops in (kernels, reference))
    torch.testing.assert_close(found.logits, wanted.logits, rtol=2e-2, atol=2e-2)
    with wrapper.disable_adapter():
        bare = FusedDecoder(model, kernels)(block, RaggedCache(1, 64, 1), 64, None)
    assert (bare.logits - wanted.logits).abs().max() > 0.2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_entropy_and_top_of_half_precision_are_those_of_the_same_numbers_in_float32(dtype):
    logits = (30 * torch.randn(3, 5000)).to(dtype)
    logits[0, 7] = float("-inf")
    for found, expected in zip(kernels.entropy_and_top(logits), kernels.entropy_and_top(logits.float()), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("make", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_entropy_and_top_are_those_of_the_definition(make):
    logits = make()
    entropy, top = kernels.entropy_and_top(logits)
    expected_entropy, expected_top = slow_entropy_and_top(logits)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top.double(), expected_top, rtol=2e-5, atol=1e-9)
    assert bool((entropy >= 0).all())


@pytest.mark.parametrize("make", DIVERGENCES.values(), ids=DIVERGENCES)
def test_the_divergence_is_that_of_the_definition(make):
    torch.manual_seed(0)
    target, draft, ids = make()
    found = kernels.kl_divergence(target, draft, ids)
    torch.testing.assert_close(found.double(), slow_divergence(target, draft, ids), rtol=1e-5, atol=3e-6)
    assert bool((found >= 0).all())


@pytest.mark.parametrize("broken", ["target", "draft"])
def test_the_divergence_of_broken_logits_is_no_number(broken):
    target, draft, ids = DIVERGENCES["some tokens"]()
    (target if broken == "target" else draft)[0, 1, ids[5] if broken == "target" else 5] = float("nan")
    found = kernels.kl_divergence(target, draft, ids)
    assert found[0].isnan().tolist() == [False, True, False, False]
    assert bool(found[1].isfinite().all())


@pytest.mark.parametrize(("make", "count", "top_p"), NUCLEI.values(), ids=NUCLEI)
def test_a_nucleus_is_that_of_the_definition(make, count, top_p):
    torch.manual_seed(0)
    scores = make()
    kept = kernels.nucleus(scores, scores.topk(count).values, top_p)
    torch.testing.assert_close(kept, slow_nucleus(scores, count, top_p), rtol=0, atol=0)


def test_nothing_happens_without_tokens():
    none = torch.randn(0, 4, 16)
    keys = torch.ones(1, 4, 3, 16)
    index = torch.zeros(0, dtype=torch.int64)
    assert kernels.rotate_and_store(none, none, none, none[:, 0], none[:, 0], keys, keys, index, index).shape == (
        0,
        4,
        16,
    )
    assert keys.eq(1).all()
    assert kernels.rms_norm(none[:, 0], torch.ones(16), 1e-5).shape == (0, 16)
    assert kernels.silu_mul(none[:, 0], none[:, 0]).shape == (0, 16)
    assert kernels.entropy_and_top(torch.randn(0, 9))[1].shape == (0, 2)
    assert kernels.kl_divergence(torch.randn(3, 0, 9), torch.randn(3, 0, 4), torch.arange(4)).shape == (3, 0)
    assert kernels.nucleus(torch.randn(0, 9), torch.randn(0, 2), 0.5).shape == (0, 9)
