"""Passes with packed weights compute what the model's own layers do, of the weights that the model has at the time."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from stored import prompts_of, store_texts
from tiny_calls import QUIET, assert_same_text, config_of, speculative
from tiny_heads import fitted_head
from tiny_models import noisy_copy, ragged_batch, tiny_model
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution import packed_weights
from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.eager_runner import EagerRunner
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.packed_weights import PackedWeights, can_pack
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.integration.loop_builder import PACKING_MIN_TOKENS

pytestmark = [
    pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="weights are packed on x86-64 only"),
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
]
LENGTHS = [9, 1, 5]
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "gpt2", "opt", "phi3", "mixtral"]
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}
NEW_TOKENS = PACKING_MIN_TOKENS


class Products:
    """Counts what is packed and multiplied, and knows which copies are alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.packed: list[ref[Tensor]] = []
        self._multiply = torch.ops.mkldnn._linear_pointwise
        self._reorder = torch.ops.mkldnn._reorder_linear_weight
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", self.multiply)
        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", self.reorder)

    def multiply(self, *arguments: Any) -> Tensor:
        self.count += 1
        return self._multiply(*arguments)

    def reorder(self, weight: Tensor, *columns: int) -> Tensor:
        packed = self._reorder(weight, *columns)
        self.packed.append(ref(packed))
        return packed

    @property
    def alive(self) -> int:
        return sum(copy() is not None for copy in self.packed)


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "SMALLEST_WEIGHT", 0)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    return Products(monkeypatch)


def float_model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    model = tiny_model(family, **changes).float()
    model.generation_config.eos_token_id = None
    return hf_dsde.enable(model)


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if type(module) is nn.Linear]


def is_untouched(model: nn.Module) -> bool:
    return not any("forward" in vars(module) for module in model.modules())


def runner_of(model: PreTrainedModel, **options: Any) -> EagerRunner:
    runner = create_runner(model, len(LENGTHS), 32, RuntimeOptions(**options))
    assert isinstance(runner, EagerRunner)
    return runner


def logits_of(runner: ModelRunner, width: int = 1) -> Tensor:
    """Store all texts but for their last `width` tokens, then run those; `[rows, width, vocabulary]` of real tokens."""
    batch = SequenceBatch(**ragged_batch(LENGTHS), max_new_tokens=8, scratch=4, pad_token=0)
    with runner.active(), torch.no_grad():
        store_texts(runner, prompts_of(batch), [max(length - width, 0) for length in LENGTHS])
        tokens, positions = batch.tail(width)
        logits = runner.forward(RowBlock(tokens, positions), longest=max(LENGTHS)).logits
    return logits * (positions >= 0)[..., None]


def reference(model: PreTrainedModel, width: int = 1) -> Tensor:
    """The same in float64, where nothing is packed."""
    return logits_of(runner_of(copy.deepcopy(model).double()), width).float()


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_gives_the_logits_of_the_models_own_layers(family: str, width: int, products: Products) -> None:
    model = float_model(family)
    packed = logits_of(runner_of(model), width)
    assert products.count >= len(linears(model)) > 0
    count = products.count
    torch.testing.assert_close(packed, logits_of(runner_of(model, packed_weights=False), width), **ROUNDING)
    assert products.count == count
    torch.testing.assert_close(packed, reference(model, width), **ROUNDING)


def wrong_copy(weight: Tensor, *_: int, reorder: Callable[..., Tensor]) -> Tensor:
    return reorder(weight.roll(1, 0))


def no_bias(*arguments: Any, multiply: Callable[..., Tensor]) -> Tensor:
    return multiply(*arguments[:2], None, *arguments[3:])


def test_mutants_are_told_from_the_models_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = float_model("qwen2")
    expected = reference(model)
    operations = torch.ops.mkldnn
    wrong = partial(wrong_copy, reorder=operations._reorder_linear_weight)
    without = partial(no_bias, multiply=operations._linear_pointwise)
    for name, mutant in (("_reorder_linear_weight", wrong), ("_linear_pointwise", without)):
        with monkeypatch.context() as patch:
            patch.setattr(operations, name, mutant)
            assert not torch.allclose(logits_of(runner_of(model)), expected, **ROUNDING)
    assert torch.allclose(logits_of(runner_of(model)), expected, **ROUNDING)


def test_heads_are_packed(products: Products) -> None:
    target = float_model()
    head = fitted_head(tiny_model()).float()
    inputs = ragged_batch(LENGTHS)
    expected = target.generate(**inputs, max_new_tokens=NEW_TOKENS)
    assert_same_text(speculative(target, head, inputs, "static", max_new_tokens=NEW_TOKENS), expected)
    assert len(products.packed) == len(linears(target)) + len(linears(head))


@pytest.mark.parametrize("policy", ["static", "dsde", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_plain_decoding(family: str, policy: str, products: Products) -> None:
    model = float_model(family)
    draft = noisy_copy(model, 0.05)
    inputs = ragged_batch([3, 7, 1, 5])
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    output = speculative(model, draft, inputs, policy, max_new_tokens=40)
    assert_same_text(output, expected)
    assert output.speculation_statistics.accepted
    assert products.count > len(linears(model)) + len(linears(draft))


def add_to_weights(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for layer in linears(model):
            layer.weight.add_(0.05 * torch.randn(layer.weight.shape))


def add_to_data(model: PreTrainedModel) -> None:
    for layer in linears(model):
        layer.weight.data += 0.05 * torch.randn(layer.weight.shape)


def replace_weights(model: PreTrainedModel) -> None:
    for layer in linears(model):
        layer.weight = nn.Parameter(torch.randn(layer.weight.shape) * 0.2)


def optimise(model: PreTrainedModel) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    inputs = ragged_batch([8, 8])["input_ids"]
    model(inputs, labels=inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


CHANGES = [add_to_weights, add_to_data, replace_weights, optimise]


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_call_sees_changed_weights(change: Callable[[PreTrainedModel], None], products: Products) -> None:
    model = float_model()
    draft = noisy_copy(model, 0.05)
    call = partial(speculative, model, draft, ragged_batch(LENGTHS), "static", max_new_tokens=NEW_TOKENS)
    before = call().sequences
    change(model)
    expected = model.generate(**ragged_batch(LENGTHS), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert not torch.equal(before, expected)
    assert_same_text(call(), expected)
    assert products.count


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_between_two_texts_of_a_stream_are_packed_again(
    change: Callable[[PreTrainedModel], None], products: Products
) -> None:
    model = float_model()
    runner = runner_of(model)
    before = logits_of(runner)
    assert len(products.packed) == len(linears(model))
    torch.testing.assert_close(logits_of(runner), before)
    assert len(products.packed) == len(linears(model)), "nothing has changed, and nothing is packed again"
    change(model)
    after = logits_of(runner)
    assert not torch.allclose(after, before, **ROUNDING)
    torch.testing.assert_close(after, reference(model), **ROUNDING)
    assert products.alive == len(linears(model))


def test_a_layer_that_is_no_longer_plain_computes_by_itself(products: Products) -> None:
    model = float_model()
    runner = runner_of(model)
    logits_of(runner)
    replaced = linears(model)[0]
    replaced.forward = lambda states: nn.Linear.forward(replaced, states) * 2
    count = products.count
    doubled = logits_of(runner)
    assert "forward" in vars(replaced)
    assert 0 < products.count - count < count
    torch.testing.assert_close(doubled, logits_of(runner_of(model, packed_weights=False)), **ROUNDING)


def test_nothing_is_left_after_a_call(products: Products) -> None:
    model = float_model()
    draft = noisy_copy(model, 0.05)
    gc.collect()
    gc.disable()
    try:
        output = speculative(model, draft, ragged_batch(LENGTHS), "static", max_new_tokens=NEW_TOKENS)
        assert products.packed
        assert products.alive == 0, "copies wait for the garbage collector"
    finally:
        gc.enable()
    assert output.speculation_statistics.rounds
    assert is_untouched(model)
    assert is_untouched(draft)


class NoPassError(Exception):
    """What a hook raises."""


def test_nothing_is_left_after_a_pass_that_raises(products: Products) -> None:
    model = float_model()
    draft = noisy_copy(model, 0.05)
    passes = iter(range(100))

    def fail(*_: Any) -> None:
        if next(passes) == 3:
            raise NoPassError

    linears(model)[-1].register_forward_hook(fail)
    with pytest.raises(NoPassError):
        speculative(model, draft, ragged_batch(LENGTHS), "static", max_new_tokens=NEW_TOKENS)
    assert products.count
    gc.collect()
    assert products.alive == 0
    assert is_untouched(model)
    assert is_untouched(draft)


def test_a_layer_is_replaced_in_passes_only_and_its_hooks_run(products: Products) -> None:
    model = float_model()
    runner = runner_of(model)
    seen = []
    for layer in linears(model):
        layer.register_forward_hook(lambda module, *_: seen.append("forward" in vars(module)))
        layer.register_forward_pre_hook(lambda module, *_: seen.append("forward" in vars(module)))
    with runner.active():
        assert is_untouched(model)
    logits_of(runner)
    assert len(seen) == 2 * products.count > 0
    assert all(seen)
    assert is_untouched(model)


def test_what_a_hook_returns_counts() -> None:
    model = float_model()
    linears(model)[-1].register_forward_hook(lambda _, __, output: -output)
    packed = logits_of(runner_of(model))
    torch.testing.assert_close(packed, reference(model), **ROUNDING)


def test_adapters_of_peft(products: Products) -> None:
    peft = pytest.importorskip("peft")
    base = float_model()
    draft = noisy_copy(base, 0.05)
    modules = ["q_proj", "v_proj", "down_proj"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
        wrapper = peft.get_peft_model(base, config).eval()
    inputs = ragged_batch(LENGTHS)
    without = base.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    for step in (
        lambda: None,
        wrapper.merge_adapter,
        wrapper.unmerge_adapter,
        wrapper.base_model.disable_adapter_layers,
    ):
        step()
        expected = wrapper.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        count = products.count
        assert_same_text(speculative(wrapper, draft, inputs, "static", max_new_tokens=NEW_TOKENS), expected)
        assert products.count > count
    assert not torch.equal(without, expected)


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    model.to(dtype)
    logits_of(runner_of(model))


def under_autocast(model: PreTrainedModel) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits_of(runner_of(model))


def autocast_after_the_runner_was_made(model: PreTrainedModel) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        runner = runner_of(model)
    logits_of(runner)


def with_gradients(model: PreTrainedModel) -> None:
    runner = runner_of(model)
    with torch.enable_grad(), runner.active():
        runner.forward(RowBlock(torch.ones(3, 1, dtype=torch.long), torch.zeros(3, 1, dtype=torch.long)), longest=1)


def switched_off(model: PreTrainedModel) -> None:
    logits_of(runner_of(model, packed_weights=False))


def with_other_layers(model: PreTrainedModel) -> None:
    for layer in linears(model):
        layer.__class__ = type("Linear", (nn.Linear,), {})
    logits_of(runner_of(model))


def with_replaced_layers(model: PreTrainedModel) -> None:
    for layer in linears(model):
        layer.forward = partial(nn.Linear.forward, layer)
    logits_of(runner_of(model))


def with_computed_weights(model: PreTrainedModel) -> None:
    for layer in linears(model):
        prune.identity(layer, "weight")
    logits_of(runner_of(model))


def without_onednn(model: PreTrainedModel) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        logits_of(runner_of(model))


@pytest.mark.parametrize(
    "passes",
    [
        partial(in_dtype, dtype=torch.float64),
        partial(in_dtype, dtype=torch.bfloat16),
        under_autocast,
        autocast_after_the_runner_was_made,
        with_gradients,
        switched_off,
        with_other_layers,
        with_replaced_layers,
        with_computed_weights,
        without_onednn,
    ],
    ids=lambda passes: getattr(passes, "__name__", None) or str(passes.keywords["dtype"]),
)
def test_where_the_layers_compute_by_themselves(passes: Callable[[PreTrainedModel], None], products: Products) -> None:
    passes(float_model())
    assert not products.count


@pytest.mark.parametrize(("available", "packed"), [(0.9, False), (1.1, True)])
def test_scarce_memory(available: float, packed: bool, products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    model = float_model()
    twice = 2 * sum(layer.weight.nbytes for layer in linears(model))
    monkeypatch.setattr(packed_weights, "available_bytes", lambda: available * twice)
    logits_of(runner_of(model))
    assert bool(products.count) is packed


def test_small_weights_stay(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    model = float_model()
    monkeypatch.setattr(packed_weights, "SMALLEST_WEIGHT", 1 + max(layer.weight.numel() for layer in linears(model)))
    logits_of(runner_of(model))
    assert not products.packed


def test_compiled_models_stay(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "is_compiled", lambda model: True)
    logits_of(runner_of(float_model()))
    assert not products.packed


@pytest.mark.usefixtures("recording")
def test_recorded_passes_read_weights_where_they_are(products: Products) -> None:
    model = float_model()
    output = speculative(
        model,
        noisy_copy(model, 0.05),
        ragged_batch(LENGTHS),
        "static",
        config_of(QUIET, runner="graph"),
        max_new_tokens=NEW_TOKENS,
    )
    assert output.speculation_statistics.rounds
    assert not products.packed


@pytest.mark.parametrize(("new_tokens", "packed"), [(NEW_TOKENS - 1, False), (NEW_TOKENS, True)])
def test_short_calls_pack_nothing(new_tokens: int, packed: bool, products: Products) -> None:
    model = float_model()
    speculative(model, noisy_copy(model, 0.05), ragged_batch(LENGTHS), "static", max_new_tokens=new_tokens)
    assert bool(products.packed) is packed


@pytest.mark.parametrize(
    ("requests", "settings", "jobs_packs"),
    [(9, {}, 1), (9, {"refill": False}, 0), (3, {}, 0), (9, {"max_new_tokens": NEW_TOKENS}, 1)],
    ids=["many", "not refilled", "few", "long"],
)
def test_a_job_packs_once_if_its_rows_write_enough(
    requests: int, settings: dict[str, Any], jobs_packs: int, products: Products
) -> None:
    from tiny_text import tiny_tokenizer

    model = float_model(eos_token_id=None)
    draft = noisy_copy(model, 0.05)
    prompts = [{"input_ids": row[-3:].tolist()} for row in ragged_batch([3] * requests)["input_ids"]]
    arguments = {"speculation_policy": "static", "batch_size": 4, "max_new_tokens": 4, **settings}
    generator = hf_dsde.BatchGenerator(model, tiny_tokenizer(), assistant_model=draft, **arguments)
    results = list(generator.stream(prompts, ordered=True))
    for prompt, result in zip(prompts, results, strict=True):
        tokens = torch.tensor([prompt["input_ids"]])
        expected = model.generate(tokens, max_new_tokens=arguments["max_new_tokens"], do_sample=False)
        assert result.token_ids == expected[0, 3:].tolist()
    assert len(products.packed) == jobs_packs * (len(linears(model)) + len(linears(draft)))
    assert products.alive == 0


def test_costs_of_passes_with_packed_weights_are_remembered_apart() -> None:
    model = float_model()
    assert runner_of(model).conditions == runner_of(model).conditions
    assert runner_of(model).conditions != runner_of(model, packed_weights=False).conditions


def test_threads_generate_with_one_model(products: Products) -> None:
    model = float_model()
    draft = noisy_copy(model, 0.05)
    prompts = [ragged_batch(LENGTHS, seed=seed) for seed in range(4)]
    expected = [model.generate(**inputs, max_new_tokens=40, do_sample=False) for inputs in prompts]
    found: dict[int, Tensor] = {}

    def generate(number: int) -> None:
        found[number] = speculative(model, draft, prompts[number], "static", max_new_tokens=40).sequences

    threads = [threading.Thread(target=generate, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, text in enumerate(expected):
        assert torch.equal(found[number], text)
    assert is_untouched(model)
    assert is_untouched(draft)
    assert products.alive == 0


@pytest.fixture
def in_a_pass() -> Iterator[PreTrainedModel]:
    """A model in the midst of another thread's pass, whose copies are of weights that it no longer has."""
    model = float_model()
    weights = PackedWeights(model)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with torch.no_grad(), weights.in_place():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    add_to_data(model)
    yield model
    leave.set()
    thread.join()
    assert is_untouched(model)


def test_another_threads_pass_is_its_own(in_a_pass: PreTrainedModel, products: Products) -> None:
    assert not is_untouched(in_a_pass)
    tokens = ragged_batch([6])["input_ids"]
    expected = copy.deepcopy(in_a_pass).double()(tokens).logits.float()
    torch.testing.assert_close(in_a_pass(tokens).logits, expected, **ROUNDING)
    assert not products.count
    torch.testing.assert_close(logits_of(runner_of(in_a_pass)), reference(in_a_pass), **ROUNDING)
    assert products.count
    assert not is_untouched(in_a_pass), "the other pass goes on"


def pickled(layer: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(layer))  # noqa: S301 - what was written here


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_that_is_made_during_a_pass_is_a_plain_layer(
    in_a_pass: PreTrainedModel, copied: Callable[[nn.Module], nn.Module], products: Products
) -> None:
    layer = linears(in_a_pass)[0]
    twin = copied(layer)
    states = torch.randn(2, layer.in_features)
    torch.testing.assert_close(twin(states), nn.functional.linear(states, layer.weight, layer.bias))
    with torch.no_grad():
        twin.weight.zero_()
    assert not twin(states).any(), "it computes with weights of its own"
    assert not products.count
