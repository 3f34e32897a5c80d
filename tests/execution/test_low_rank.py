"""LoRA in a fused pass: it is PEFT's own result, and few operations compute it wherever nothing else is asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_fused_decoder import COUNTS, STORED, CountingOps, Pair, _OtherLinear, aligned, packed_block
from tiny_heads import tiny_head
from tiny_models import tiny_model
from torch import Tensor, nn

from hf_dsde.execution.fused_decoder import FusedDecoder
from hf_dsde.execution.fused_head import FusedHead
from hf_dsde.execution.kv_cache import RaggedCache
from hf_dsde.execution.linear_products import gated_product, products
from hf_dsde.kernels import reference
from hf_dsde.kernels.block import Block

pytestmark = pytest.mark.slow  # nothing here depends on the version of transformers

peft = pytest.importorskip("peft")

EVERYWHERE = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
ONE_EACH = [(1, 1, 1), (1,), ("gated", 1, 1), (1,)]
"""Adapters of each module of each call, where all modules of a layer have one."""


class NotingOps(CountingOps):
    """Takes down, too, how many adapters of each module an operation adds."""

    def __init__(self) -> None:
        super().__init__()
        self.adapted: list[tuple[Any, ...]] = []

    def add_low_rank(self, x: Tensor, bases: Any, adapters: Any) -> list[Tensor]:
        self.adapted.append(tuple(map(len, adapters)))
        return reference.add_low_rank(x, bases, adapters)

    def gated_low_rank(self, x: Tensor, bases: Any, adapters: Any) -> Tensor:
        self.adapted.append(("gated", *map(len, adapters)))
        return reference.gated_low_rank(x, bases, adapters)


def config_of(targets: Sequence[str] = EVERYWHERE, **settings: Any) -> Any:
    usual = {"r": 3, "lora_alpha": 5, "target_modules": targets, "init_lora_weights": False}
    return peft.LoraConfig(**{**usual, **settings})


def adapted(*configs: Any, model: Any = None, **options: Any) -> Any:
    """Wrap a model in adapters called 0, 1, ..., all of which are active."""
    base = model if model is not None else tiny_model().double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        wrapper = peft.get_peft_model(base, configs[0], adapter_name="0", **options)
        for name, config in enumerate(configs[1:], start=1):
            wrapper.add_adapter(str(name), config)
    wrapper.base_model.set_adapter([str(name) for name in range(len(configs))])
    return wrapper.eval()


class Passes:
    """A model's fused passes beside its own; modules are looked up once."""

    def __init__(self, wrapper: Any) -> None:
        self.pair = Pair(wrapper.get_base_model(), STORED)
        self.ops = NotingOps()
        self.decoder = FusedDecoder(wrapper.get_base_model(), self.ops)

    def check(self, tolerance: float = 1e-9) -> Tensor:
        """Run the same tokens both ways; return the logits."""
        self.ops.adapted, self.ops.products = [], []
        tokens, positions = aligned(self.pair.texts, STORED, COUNTS, 4, "left")
        expected = self.pair.stock_logits(tokens, positions)[positions >= 0]
        found = self.decoder(packed_block(tokens, positions), self.pair.other.cache, 64, None).logits
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        self.pair.check_caches([begin + count for begin, count in zip(STORED, COUNTS, strict=True)], tolerance)
        return found


TAKEN: dict[str, tuple[list[Any], list[tuple[Any, ...]]]] = {
    "everywhere": ([config_of()], ONE_EACH),
    "two of three": ([config_of(["q_proj", "v_proj"])], [(1, 1)]),
    "down": ([config_of(["down_proj"])], [(1,)]),
    "up alone": ([config_of(["up_proj"])], [(1,)]),
    "ranks and scalings of their own": (
        [config_of(rank_pattern={"q_proj": 5, "down_proj": 1}, alpha_pattern={"v_proj": 1}, use_rslora=True)],
        ONE_EACH,
    ),
    "dropout outside of training": ([config_of(lora_dropout=0.5)], ONE_EACH),
    "two": ([config_of(), config_of(r=6)], [(2, 2, 2), (2,), ("gated", 2, 2), (2,)]),
    "two, each elsewhere": (
        [config_of(["q_proj", "v_proj"]), config_of(["k_proj", "q_proj", "up_proj"], r=7)],
        [(2, 1, 1), (1,)],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("configs", "expected"), TAKEN.values(), ids=TAKEN)
def test_plain_lora_is_few_operations(configs: list[Any], expected: list[tuple[Any, ...]], dtype: torch.dtype) -> None:
    bare = FusedDecoder(tiny_model().to(dtype), reference)
    passes = Passes(adapted(*configs, model=tiny_model().to(dtype)))
    logits = passes.check(1e-9 if dtype == torch.float64 else 2e-4)
    assert passes.ops.adapted == expected * 2
    assert passes.ops.products == [3, 1, 2, 1] * 2, "bases were not taken over"
    block = packed_block(*aligned(passes.pair.texts, STORED, COUNTS, 4, "left"))
    assert (logits - bare(block, passes.pair.other.cache, 64, None).logits).abs().max() > 0.01


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_biases_and_norms_of_heads_stay_where_they_are(family: str) -> None:
    biased = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    passes = Passes(adapted(config_of(), model=tiny_model(family, **biased).double()))
    passes.check()
    assert passes.ops.adapted == ONE_EACH * 2


def _hooked(module: Any) -> None:
    module.register_forward_hook(lambda module, arguments, output: output * 1.5)


def _trained(module: Any) -> None:
    module.lora_dropout["0"] = nn.Dropout(1.0)
    module.lora_dropout["0"].train()


def _tensor_scaling(module: Any) -> None:
    module.scaling["0"] = torch.tensor(0.7, dtype=torch.float64)


class _OtherLora(peft.tuners.lora.layer.Linear):
    """What somebody derives from PEFT's class."""

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return super().forward(x, *arguments, **named) * 1.5


NOT_TAKEN: dict[str, Callable[[Any], Any]] = {
    "hook": _hooked,
    "pre-hook": lambda module: module.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 1.5,)),
    "hook at A": lambda module: _hooked(module.lora_A["0"]),
    "hook at B": lambda module: _hooked(module.lora_B["0"]),
    "hook at the dropout": lambda module: _hooked(module.lora_dropout["0"]),
    "forward": lambda module: setattr(module, "forward", lambda x: module.base_layer(x) * 1.5),
    "class": lambda module: setattr(module, "__class__", _OtherLora),
    "dropout in training": _trained,
    "another dropout": lambda module: module.lora_dropout.__setitem__("0", nn.Hardtanh(-0.1, 0.1)),
    "a tensor as scaling": _tensor_scaling,
    "another A": lambda module: setattr(module.lora_A["0"], "__class__", _OtherLinear),
    "dtype": lambda module: module.lora_A["0"].half() and module.lora_B["0"].half(),
}


@pytest.mark.parametrize("change", NOT_TAKEN.values(), ids=NOT_TAKEN)
def test_whatever_else_there_is_to_a_module_is_called(change: Callable[[Any], Any]) -> None:
    for name, expected in (
        ("self_attn.k_proj", [(1, 1), (1,), ("gated", 1, 1), (1,)]),
        ("self_attn.o_proj", [(1, 1, 1), ("gated", 1, 1), (1,)]),
        ("mlp.up_proj", [(1, 1, 1), (1,), (1,), (1,)]),
        ("mlp.down_proj", [(1, 1, 1), (1,), ("gated", 1, 1)]),
    ):
        wrapper = adapted(config_of())
        change(wrapper.get_base_model().model.layers[1].get_submodule(name))
        passes = Passes(wrapper)
        passes.check()
        assert passes.ops.adapted == ONE_EACH + expected


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_variants_are_called(settings: dict[str, Any]) -> None:
    passes = Passes(adapted(config_of(**settings)))
    passes.check()
    assert passes.ops.adapted == []


def test_one_variant_among_active_adapters_has_the_module_called() -> None:
    passes = Passes(adapted(config_of(), config_of(["q_proj"], use_dora=True)))
    passes.check()
    assert passes.ops.adapted == [(1, 1), *ONE_EACH[1:]] * 2


def test_a_forward_that_was_replaced_on_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = peft.tuners.lora.layer.Linear
    wrapper, own = adapted(config_of()), kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x, *arguments: own(self, x, *arguments) * 1.1)
    passes = Passes(wrapper)
    passes.check()
    assert passes.ops.adapted == []


def test_a_base_that_is_no_plain_module_is_called_and_adapted() -> None:
    wrapper = adapted(config_of())
    layers = wrapper.get_base_model().model.layers
    for name in ("self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"):
        _hooked(layers[1].get_submodule(name).base_layer)
    passes = Passes(wrapper)
    passes.check()
    assert passes.ops.adapted == ONE_EACH * 2
    assert passes.ops.products == [3, 1, 2, 1, 1]


@pytest.mark.parametrize("targets", [EVERYWHERE, ["k_proj", "up_proj", "down_proj"]], ids=len)
@pytest.mark.parametrize("taken", [False, True])
def test_modules_are_called_once_and_not_before_their_results_are_asked_for(targets: list[str], taken: bool) -> None:
    """So that the ops may launch what needs the input alone before anything that takes longer."""

    class AskingLate(NotingOps):
        def add_low_rank(self, x: Tensor, bases: Any, adapters: Any) -> list[Tensor]:
            return self._asked(super().add_low_rank, x, bases, adapters)

        def gated_low_rank(self, x: Tensor, bases: Any, adapters: Any) -> Tensor:
            return self._asked(super().gated_low_rank, x, bases, adapters)

        def _asked(self, operation: Any, x: Tensor, bases: Any, adapters: Any) -> Any:
            assert len(bases) == len(adapters)
            before = called.copy(), self.products.copy()
            assert before == ([], []), "a module has been called"
            return operation(x, list(bases), adapters)

    wrapper = adapted(config_of(targets))
    ops, called = AskingLate(), list[str]()
    ops.taken = taken
    layer = wrapper.get_base_model().model.layers[0]
    own, mlp = layer.self_attn, layer.mlp
    calls: list[tuple[list[Any], Callable[[Tensor], Any]]] = [
        ([own.q_proj, own.k_proj, own.v_proj], lambda x: products(ops, [own.q_proj, own.k_proj, own.v_proj], x)),
        ([mlp.gate_proj, mlp.up_proj], lambda x: [gated_product(ops, mlp.gate_proj, mlp.up_proj, x)]),
        ([mlp.down_proj], lambda x: products(ops, [mlp.down_proj], x)),
    ]
    for modules, call in calls:
        x = torch.randn(3, modules[0].in_features, dtype=torch.float64)
        with torch.no_grad():
            right = [module(x) for module in modules]
            if len(modules) == 2:
                right = [nn.functional.silu(right[0]) * right[1]]
            bases = [getattr(module, "base_layer", module) for module in modules]
            noting = [
                base.register_forward_hook(lambda *_, place=place: called.append(str(place)))
                for place, base in enumerate(bases)
                if not taken
            ]
            found = call(x)
        for hook in noting:
            hook.remove()
        for each, expected in zip(found, right, strict=True):
            torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-9)
        assert sorted(called) == ([] if taken else [str(place) for place in range(len(modules))])
        assert ops.products == ([len(modules)] if taken else [])
        called.clear()
        ops.products.clear()
    assert len(ops.adapted) == 3


def test_adapters_that_are_switched_between_passes_are_seen() -> None:
    """By the same decoder. Disabled and merged ones cost nothing."""
    wrapper = adapted(config_of(), config_of(["q_proj", "down_proj"], r=9))
    passes, seen = Passes(wrapper), []
    layer = wrapper.get_base_model().model.layers[0].self_attn.q_proj

    def check(expected: list[tuple[Any, ...]]) -> None:
        seen.append(passes.check())
        assert passes.ops.adapted == expected * 2
        assert passes.ops.products == [3, 1, 2, 1] * 2

    both = [(2, 1, 1), (1,), ("gated", 1, 1), (2,)]
    check(both)
    wrapper.set_adapter("1")
    check([(1,), (1,)])
    wrapper.set_adapter("0")
    check(ONE_EACH)
    layer.scaling["0"] *= -3
    check(ONE_EACH)
    with wrapper.disable_adapter():
        check([])
    check(ONE_EACH)
    wrapper.merge_adapter()
    check([])
    wrapper.unmerge_adapter()
    check(ONE_EACH)
    wrapper.delete_adapter("1")
    layer.lora_B["0"].weight.data.mul_(2.0)
    check(ONE_EACH)
    for place, (one, other) in enumerate(pairwise(seen)):
        nearly = 1e-6 if place in (5, 6) else 1e-3  # merging changes nothing
        assert ((one - other).abs().max() > nearly) == (place not in (5, 6))


def test_disabling_merged_adapters_takes_them_apart_again() -> None:
    wrapper = adapted(config_of())
    passes = Passes(wrapper)
    expected = passes.check()
    wrapper.merge_adapter()
    wrapper.base_model.disable_adapter_layers()
    bare = passes.decoder(
        packed_block(*aligned(passes.pair.texts, STORED, COUNTS, 4, "left")), passes.pair.other.cache, 64, None
    ).logits
    assert not any(getattr(part, "merged", False) for part in wrapper.modules())
    assert (bare - expected).abs().max() > 1e-3
    torch.testing.assert_close(passes.check(), bare, rtol=1e-9, atol=1e-9)


HALF = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("dtype", "own"), HALF, ids=str)
def test_half_precision_is_rounded_where_peft_rounds(dtype: torch.dtype, own: torch.dtype, count: int) -> None:
    """Adapters of float32 around half precision are what PEFT makes unless it is told not to."""
    configs = [config_of(r=2 + place) for place in range(count)]
    wrapper = adapted(*configs, model=tiny_model().to(dtype), autocast_adapter_dtype=own == torch.float32)
    for name, weight in wrapper.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(own)  # `add_adapter` casts as well
    layer = wrapper.get_base_model().model.layers[0]
    modules = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    assert modules[0].lora_A["0"].weight.dtype == own
    x, ops = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(dtype), NotingOps()
    with torch.no_grad():
        for module, found in zip(modules, products(ops, modules, x), strict=True):
            assert found.dtype == dtype
            assert torch.equal(found, module(x))
        gate, up = layer.mlp.gate_proj, layer.mlp.up_proj
        assert torch.equal(gated_product(ops, gate, up, x), nn.functional.silu(gate(x)) * up(x))
    assert ops.adapted == [(count,) * 3, ("gated", count, count)]


def test_states_that_are_not_cast_have_the_module_called() -> None:
    wrapper = adapted(config_of(), model=tiny_model().bfloat16())
    module = wrapper.get_base_model().model.layers[0].self_attn.q_proj
    assert module.lora_A["0"].weight.dtype == torch.float32
    module.cast_input_dtype_enabled = False
    ops = NotingOps()
    with pytest.raises(RuntimeError, match="dtype"):
        products(ops, [module], torch.randn(2, 32).bfloat16())
    assert ops.adapted == []


def test_a_head_with_lora_is_few_operations() -> None:
    head = tiny_head(tiny_model(), kind="llama").double()
    alone = copy.deepcopy(head)
    wrapper, ops = adapted(config_of(), model=head), NotingOps()
    tokens, states = torch.randint(3, 90, (1, 4)), torch.randn(1, 4, head.config.hidden_size, dtype=torch.float64)
    block = Block(
        tokens=tokens[0],
        rows=torch.zeros(4, dtype=torch.int64),
        positions=torch.arange(4),
        starts=torch.zeros(1, dtype=torch.int32),
        counts=torch.full((1,), 4, dtype=torch.int32),
        max_count=4,
        states=states[0],
    )
    found = FusedHead(wrapper.get_base_model(), ops)(block, RaggedCache(1, 64, 1), 64, None)
    with torch.no_grad():
        expected, bare = (each(tokens, hidden_states=states).logits[0] for each in (wrapper.get_base_model(), alone))
    torch.testing.assert_close(found.logits, expected, rtol=1e-9, atol=1e-9)
    assert (expected - bare).abs().max() > 1e-3
    assert ops.adapted == ONE_EACH
