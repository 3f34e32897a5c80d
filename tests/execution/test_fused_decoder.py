"""A fused pass gives the logits and the cache of the stock model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from stored import store_texts
from tiny_models import VOCABULARY, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dsde.drafting.layer_draft import initialise_draft
from hf_dsde.execution.eager_runner import EagerRunner
from hf_dsde.execution.fused_decoder import FusedDecoder
from hf_dsde.execution.kv_cache import RaggedCache
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.kernels import reference
from hf_dsde.kernels.block import Block

STORED = [19, 0, 5, 11]
COUNTS = [4, 2, 0, 3]
CAPACITY = 40
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}

_SLIDING_QWEN = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-group-of-3": (
        "llama",
        {"num_attention_heads": 6, "hidden_size": 48, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    ),
    "llama-group-of-1-biases": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN, "pretraining_tp": 1}),
    "mistral": ("mistral", {}),
    "mistral-wide-heads-full": ("mistral", {"head_dim": 16, "sliding_window": None, "num_hidden_layers": 3}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding-tied": ("qwen2", {**_SLIDING_QWEN, "tie_word_embeddings": True}),
    "qwen3-group-of-3": ("qwen3", {"num_attention_heads": 6, "hidden_size": 48, "attention_bias": True}),
    "qwen3-sliding-wide-heads": ("qwen3", {**_SLIDING_QWEN, "head_dim": 16}),
}


class StockRunner(EagerRunner):
    """Keeps the logits of the last pass in the model's own dtype; `forward` returns float32."""

    def _execute(self, *arguments: Any) -> PassOutput:
        output = super()._execute(*arguments)
        self.raw = output.logits
        return output


class Pair:
    """A model run the stock way and fused, each over a cache of its own; both caches were filled the stock way."""

    def __init__(self, model: PreTrainedModel, stored: list[int]) -> None:
        self.stock, self.other = (
            StockRunner(model, len(stored), CAPACITY, RuntimeOptions(view_bucket=4)) for _ in range(2)
        )
        self.decoder = FusedDecoder(model, reference)
        self.texts = torch.randint(3, VOCABULARY, (len(stored), CAPACITY), generator=torch.Generator().manual_seed(5))
        for runner in (self.stock, self.other):
            with runner.active(), torch.no_grad():
                store_texts(runner, self.texts, stored)

    def stock_logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """`[rows, width, vocabulary]` in the model's dtype."""
        with self.stock.active(), torch.no_grad():
            self.stock.forward(RowBlock(tokens, positions), longest=max(int(positions.max()) + 1, 1))
        return self.stock.raw[:, -tokens.shape[1] :]

    def fused_logits(self, block: Block, keep: Tensor | None = None) -> Tensor:
        return self.decoder(block, self.other.cache, reach=64, keep=keep).logits

    def check_caches(self, lengths: list[int], tolerance: float) -> None:
        """Both caches hold the same in every slot that holds a token."""
        for stock, fused in zip(self.stock.cache.ragged_layers, self.other.cache.ragged_layers, strict=True):
            for name in ("keys", "values"):
                for row, length in enumerate(lengths):
                    expected, found = (getattr(layer, name)[row, :, :length] for layer in (stock, fused))
                    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def model_of(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    family, changes = MODELS[name]
    return tiny_model(family, **changes).to(dtype)


def aligned(texts: Tensor, begins: list[int], counts: list[int], width: int, side: str) -> tuple[Tensor, Tensor]:
    """Tokens and positions `[rows, width]` of the next `counts` tokens of each row; padding on the other side."""
    tokens, positions = torch.full((len(counts), width), VOCABULARY - 1), torch.full((len(counts), width), -1)
    for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        place = slice(0, count) if side == "left" else slice(width - count, width)
        tokens[row, place] = texts[row, begin : begin + count]
        positions[row, place] = torch.arange(begin, begin + count)
    return tokens, positions


def padded_block(tokens: Tensor, positions: Tensor) -> Block:
    rows, width = tokens.shape
    return Block(
        tokens=tokens.flatten(),
        rows=torch.arange(rows).repeat_interleave(width),
        positions=positions.flatten(),
        starts=torch.arange(rows, dtype=torch.int32) * width,
        counts=torch.full((rows,), width, dtype=torch.int32),
        max_count=width,
    )


def packed_block(tokens: Tensor, positions: Tensor) -> Block:
    real = positions >= 0
    counts = real.sum(1)
    return Block(
        tokens=tokens[real],
        rows=torch.arange(len(tokens)).repeat_interleave(counts),
        positions=positions[real],
        starts=(counts.cumsum(0) - counts).int(),
        counts=counts.int(),
        max_count=int(counts.max()),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ["left", "right", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_cache_are_those_of_the_stock_model(name: str, shape: str, dtype: torch.dtype) -> None:
    pair = Pair(model_of(name, dtype), STORED)
    side = "right" if shape == "right" else "left"
    tokens, positions = aligned(pair.texts, STORED, COUNTS, 5, side)
    expected = pair.stock_logits(tokens, positions)[positions >= 0]
    if shape == "packed":
        logits = pair.fused_logits(packed_block(tokens, positions))
    else:
        everything = pair.fused_logits(padded_block(tokens, positions))
        assert everything.isfinite().all()
        logits = everything[positions.flatten() >= 0]
    assert logits.dtype == dtype
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    after = [begin + count for begin, count in zip(STORED, COUNTS, strict=True)]
    pair.check_caches(after, TOLERANCES[dtype])


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_as_near_to_the_exact_logits_as_the_stock_model(name: str) -> None:
    rounded = model_of(name, torch.bfloat16)
    pair, truth = Pair(rounded, STORED), Pair(copy.deepcopy(rounded).double(), STORED)
    tokens, positions = aligned(pair.texts, STORED, COUNTS, 4, "left")
    expected = truth.stock_logits(tokens, positions)[positions >= 0]
    stock = (pair.stock_logits(tokens, positions)[positions >= 0] - expected).square().mean()
    fused = (pair.fused_logits(packed_block(tokens, positions)) - expected).square().mean()
    assert 0 < fused < 1.5 * stock


def test_a_pass_records_no_gradients() -> None:
    pair = Pair(tiny_model(), STORED)
    with torch.enable_grad():
        logits = pair.fused_logits(packed_block(*aligned(pair.texts, STORED, COUNTS, 4, "left")))
    assert not logits.requires_grad
    assert not pair.other.cache.ragged_layers[0].keys.requires_grad


@pytest.mark.parametrize("name", MODELS)
def test_passes_in_sequence_give_the_logits_of_the_whole_text(name: str) -> None:
    """The second pass writes over rejected tokens of the first, and the cache grows before the third."""
    model = model_of(name)
    pair = Pair(model, STORED)
    begins, logits = list(STORED), [[] for _ in STORED]
    for counts, rejected in (([3, 1, 0, 2], [2, 0, 0, 1]), ([4, 3, 1, 0], [0, 1, 0, 0]), ([2, 2, 2, 2], [0, 0, 0, 0])):
        tokens, positions = aligned(pair.texts, begins, counts, 4, "right")
        wrong = positions >= (torch.tensor(begins) + torch.tensor(counts) - torch.tensor(rejected))[:, None]
        tokens = tokens.masked_fill(wrong, 7)
        if counts == [2, 2, 2, 2]:
            pair.other.cache.reserve(CAPACITY + 9)
        found = pair.fused_logits(padded_block(tokens, positions)).view(len(begins), 4, -1)
        for row, count in enumerate(counts):
            kept = count - rejected[row]
            logits[row].extend(found[row, 4 - count : 4 - count + kept])
            begins[row] += kept
    with torch.no_grad():
        for row, begin in enumerate(begins):
            expected = model(pair.texts[row : row + 1, :begin]).logits[0, STORED[row] :]
            torch.testing.assert_close(torch.stack(logits[row]), expected, rtol=1e-9, atol=1e-9)


def test_kept_rows_are_those_asked_for_in_their_order() -> None:
    pair = Pair(model_of("qwen3-group-of-3"), STORED)
    block = packed_block(*aligned(pair.texts, STORED, COUNTS, 4, "left"))
    everything = pair.fused_logits(block)
    for keep in ([3], [8, 0, 5], [1, 1], []):
        kept = pair.fused_logits(block, torch.tensor(keep, dtype=torch.long))
        torch.testing.assert_close(kept, everything[keep], rtol=1e-12, atol=1e-12)


def test_head_runs_on_kept_rows_only() -> None:
    model = tiny_model()
    pair = Pair(model, STORED)
    seen: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    pair.fused_logits(packed_block(*aligned(pair.texts, STORED, COUNTS, 4, "left")), torch.tensor([2, 3]))
    assert seen == [2]


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("name", ["mistral", "qwen3-sliding-wide-heads"])
def test_the_last_layer_of_kept_tokens_alone_gives_the_same(name: str, kept: int) -> None:
    model = model_of(name)
    pair = Pair(model, STORED)
    block = padded_block(*aligned(pair.texts, STORED, COUNTS, 4, "right"))
    keep = torch.arange(16).view(4, 4)[:, -kept:].flatten()
    expected = pair.fused_logits(block, keep)
    seen: list[int] = []
    model.model.layers[-1].mlp.down_proj.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    nowhere = torch.full((4, kept), -1)
    last = padded_block(torch.zeros_like(nowhere), nowhere)
    found = pair.decoder(block, pair.other.cache, 64, keep, last).logits
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert seen == [len(keep)]
    pair.stock_logits(*aligned(pair.texts, STORED, COUNTS, 4, "right"))
    pair.check_caches([begin + count for begin, count in zip(STORED, COUNTS, strict=True)], 1e-9)


def test_a_block_of_padding_leaves_the_cache_alone() -> None:
    pair = Pair(model_of("mistral"), STORED)
    tokens = torch.full((len(STORED), 3), VOCABULARY - 1)
    logits = pair.fused_logits(padded_block(tokens, torch.full_like(tokens, -1)))
    assert logits.isfinite().all()
    pair.check_caches(STORED, 0)


def test_padding_goes_to_the_discard_slot_of_a_cache_that_has_grown() -> None:
    pair = Pair(tiny_model(), STORED)
    cache = pair.other.cache
    cache.reserve(CAPACITY + 1)
    before = [layer.keys.clone() for layer in cache.ragged_layers]
    tokens = torch.full((len(STORED), 3), VOCABULARY - 1)
    pair.fused_logits(padded_block(tokens, torch.full_like(tokens, -1)))
    for layer, keys in zip(cache.ragged_layers, before, strict=True):
        changed = (layer.keys != keys).any(-1).all(1).all(0)
        assert changed.nonzero().flatten().tolist() == [cache.capacity]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3-group-of-3"])
def test_scaling_is_that_of_the_attention_module(name: str) -> None:
    model = model_of(name)
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.11
    check_packed_pass(model)


def check_packed_pass(model: PreTrainedModel) -> None:
    pair = Pair(model, STORED)
    tokens, positions = aligned(pair.texts, STORED, COUNTS, 4, "left")
    expected = pair.stock_logits(tokens, positions)[positions >= 0]
    logits = pair.fused_logits(packed_block(tokens, positions))
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    pair.check_caches([begin + count for begin, count in zip(STORED, COUNTS, strict=True)], 1e-9)


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding-tied"])
def test_a_draft_made_of_a_targets_layers_is_run(name: str) -> None:
    check_packed_pass(initialise_draft(model_of(name), [1]))


def test_cache_layer_is_the_one_that_the_attention_module_names() -> None:
    model = tiny_model()
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = 1 - index
    check_packed_pass(model)


def test_layers_beyond_the_configured_number_are_not_run() -> None:
    model = tiny_model("mistral", num_hidden_layers=3)
    model.config.num_hidden_layers = 2
    model.model.layers[2].register_forward_hook(lambda *_: None)
    check_packed_pass(model)


def test_a_cache_without_buffers_is_refused() -> None:
    pair = Pair(tiny_model(), STORED)
    block = packed_block(*aligned(pair.texts, STORED, COUNTS, 4, "left"))
    with pytest.raises(RuntimeError, match="layer 0 has no buffers"):
        pair.decoder(block, RaggedCache(2, CAPACITY), 64, None)


class LowRankAdapter(nn.Module):
    """A tuner's wrapper around a linear module."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(seed)
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator, dtype=torch.float64) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=generator, dtype=torch.float64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def test_adapters_around_linear_modules_are_run() -> None:
    plain = tiny_model("qwen2")
    model = copy.deepcopy(plain)
    for index, layer in enumerate(model.model.layers):
        for part, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
            for name in names:
                setattr(part, f"{name}_proj", LowRankAdapter(getattr(part, f"{name}_proj"), index))
    model.lm_head = LowRankAdapter(model.lm_head, 9)
    check_packed_pass(model)
    pairs = Pair(plain, STORED), Pair(model, STORED)
    block = packed_block(*aligned(pairs[0].texts, STORED, COUNTS, 4, "left"))
    bare, adapted = (pair.fused_logits(block) for pair in pairs)
    assert (adapted - bare).abs().max() > 0.1


def test_hooks_on_modules_that_are_called_are_run() -> None:
    model = tiny_model()
    model.model.embed_tokens.register_forward_hook(lambda module, arguments, output: output * 1.5)
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, arguments, output: output - 0.1)
    model.model.layers[0].self_attn.v_proj.register_forward_pre_hook(lambda module, arguments: (arguments[0] + 1,))
    add_hook_to_module(model.lm_head, ModelHook())
    check_packed_pass(model)


class CountingOps:
    """The reference, which takes over products of plain modules or does not, and takes down which."""

    def __init__(self, *, taken: bool = True) -> None:
        self.taken = taken
        self.asked: list[tuple[Any, ...]] = []
        self.products: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def pays(self, *sizes: Any) -> bool:
        self.asked.append(sizes)
        return self.taken

    def linears(self, x: Tensor, weights: Any, biases: Any) -> list[Tensor]:
        self.products.append(len(weights))
        return reference.linears(x, weights, biases)

    def gated_linear(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        self.products.append(2)
        return reference.gated_linear(x, gate, up)


def check_products(model: PreTrainedModel, products: list[int], ops: CountingOps | None = None) -> CountingOps:
    """A packed pass has the stock model's logits, and its ops take over so many weights at once, in this order."""
    pair, ops = Pair(model, STORED), ops or CountingOps()
    tokens, positions = aligned(pair.texts, STORED, COUNTS, 4, "left")
    expected = pair.stock_logits(tokens, positions)[positions >= 0]
    logits = FusedDecoder(model, ops)(packed_block(tokens, positions), pair.other.cache, 64, None).logits
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    assert ops.products == products
    return ops


@pytest.mark.parametrize("name", MODELS)
def test_products_of_plain_modules_are_taken_over_where_that_pays(name: str) -> None:
    model = model_of(name)
    gated = [] if getattr(model.config, "mlp_bias", False) else [2]
    check_products(model, [3, 1, *gated, 1] * model.config.num_hidden_layers)
    check_products(model, [], CountingOps(taken=False))


def test_whether_it_pays_is_asked_with_the_sizes_of_all_weights_together() -> None:
    ops = check_products(tiny_model(), [3, 1, 2, 1] * 2)
    tokens = sum(COUNTS)
    layer = [(tokens, 3, 64, 32), (tokens, 1, 32, 32), (tokens, 2, 128, 32), (tokens, 1, 32, 64)]
    assert ops.asked == [(*sizes, torch.float64, torch.device("cpu")) for sizes in layer * 2]


class _OtherLinear(nn.Linear):
    """What a quantiser derives from a linear module."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class _OtherParameter(nn.Parameter):
    """What a quantiser derives from a parameter."""


def _transposed(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.detach().T.contiguous().T)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.register_forward_hook(lambda module, arguments, output: output * 1.5),
        lambda module: module.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 1.5,)),
        lambda module: add_hook_to_module(module, ModelHook()),
        lambda module: setattr(module, "forward", lambda x: nn.functional.linear(x, module.weight) * 1.5),
        lambda module: setattr(module, "__class__", _OtherLinear),
        lambda module: setattr(module, "weight", _OtherParameter(module.weight.detach())),
        _transposed,
    ],
    ids=["hook", "pre-hook", "accelerate", "forward", "class", "parameter", "strides"],
)
def test_modules_that_are_not_plain_are_called(change: Any) -> None:
    for name, layer in (
        ("self_attn.k_proj", [1, 2, 1]),
        ("self_attn.o_proj", [3, 2, 1]),
        ("mlp.up_proj", [3, 1, 1]),
        ("mlp.down_proj", [3, 1, 2]),
    ):
        model = tiny_model()
        change(model.model.layers[1].get_submodule(name))
        check_products(model, [3, 1, 2, 1, *layer])


def test_a_hook_that_comes_after_the_decoder_is_run() -> None:
    model = tiny_model()
    pair = Pair(model, STORED)
    block = packed_block(*aligned(pair.texts, STORED, COUNTS, 4, "left"))
    plain = pair.fused_logits(block)
    handle = model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: torch.ones(9, 64).double())
    assert (pair.fused_logits(block) - plain).abs().max() > 1e-3
    handle.remove()
    assert torch.equal(pair.fused_logits(block), plain)
