"""One product in place of three: of the weights that the model has at the time, which stay where they are."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from tiny_calls import QUIET, compared, config_of, plain
from tiny_heads import tiny_head
from tiny_models import VOCABULARY, noisy_copy, ragged_batch, tiny_model
from tiny_policies import ScriptedLengths
from tiny_text import tiny_tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.execution import joined_weights
from hf_dsde.execution.joined_weights import JoinedLinear, JoinedWeights
from hf_dsde.kernels import reference

pytestmark = [pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"), pytest.mark.usefixtures("recording")]
LENGTHS = [5, 1, 7]
GRAPH = config_of(QUIET, runner="graph")
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
SOME = [[3, 1, 2], [2, 2, 2], [0, 3, 1]] * 20
"""Drafts of different lengths, so that passes are packed as well as padded."""


def fresh_model(family: str = "llama") -> PreTrainedModel:
    """An enabled model that nothing has been recorded of, and that writes on for ever."""
    model = tiny_model(family)
    model.generation_config.eos_token_id = None
    return hf_dsde.enable(model)


class Products:
    """Joined maps that were called, and copies of their weights that are alive."""

    def __init__(self) -> None:
        self.called = 0
        self._made: list[ref[JoinedLinear]] = []

    def note(self, made: JoinedLinear) -> None:
        self._made.append(ref(made))

    @property
    def alive(self) -> int:
        return sum(each() is not None for each in self._made)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    """No kernel of this package's own makes the products of a fused pass, and joined ones are counted."""
    found = Products()
    make, call = JoinedLinear.__init__, JoinedLinear.__call__

    def noted(self: JoinedLinear, modules: Any) -> None:
        make(self, modules)
        found.note(self)

    def counted(self: JoinedLinear, x: Tensor) -> list[Tensor]:
        found.called += 1
        return call(self, x)

    monkeypatch.setattr(reference, "pays", lambda *sizes: False)
    monkeypatch.setattr(JoinedLinear, "__init__", noted)
    monkeypatch.setattr(JoinedLinear, "__call__", counted)
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_is_what_three_are_by_definition(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    modules = [nn.Linear(6, size, bias=bias, dtype=torch.float64) for size in (4, 3, 2)]
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    joined = JoinedLinear(modules)
    joined.follow()
    for module, found in zip(modules, joined(x), strict=True):
        weights, shifts = module.weight.tolist(), module.bias.tolist() if bias else [0.0] * len(module.weight)
        for token, given in zip(x.tolist(), found.tolist(), strict=True):
            for result, row, shift in zip(given, weights, shifts, strict=True):
                assert result == pytest.approx(sum(a * b for a, b in zip(token, row, strict=True)) + shift, abs=1e-12)


@pytest.mark.parametrize("drafter", ["model", "head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_the_targets_own(family: str, drafter: str, products: Products) -> None:
    target = fresh_model(family)
    draft = noisy_copy(target, 0.05) if drafter == "model" else tiny_head(target, draft_vocabulary=60)
    for _ in range(2):  # the second call replays what the first one has recorded
        compared(target, draft, ragged_batch(LENGTHS), ScriptedLengths(SOME), GRAPH, max_new_tokens=30)
    assert products.called > 0
    assert products.alive == target.config.num_hidden_layers + draft.config.num_hidden_layers


def in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(-1)


def through_data(weight: Tensor) -> None:
    weight.data.mul_(-1)


def replaced(weight: Tensor) -> None:
    weight.data = -weight.data


CHANGES: dict[str, Callable[[Tensor], None]] = {"in place": in_place, "data": through_data, "replaced": replaced}


def change(model: PreTrainedModel, how: Callable[[Tensor], None]) -> None:
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "v_proj" in name:
            how(parameter)


@pytest.mark.parametrize("how", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_call_computes_with_the_weights_of_its_time(
    family: str, how: Callable[[Tensor], None], products: Products
) -> None:
    target = fresh_model(family)
    draft, inputs = noisy_copy(target, 0.05), ragged_batch(LENGTHS)
    before = plain(target, inputs, max_new_tokens=20)
    rates = []
    for changed in (False, True, False):
        if changed or rates:
            change(target, how)
            change(draft, how)
        output = compared(target, draft, inputs, "static", GRAPH, max_new_tokens=20)
        assert torch.equal(output.sequences, before) != changed
        rates.append(output.speculation_statistics.accepted)
    assert products.called > 0
    assert rates[0] == rates[2], "the draft has its old weights again"


def test_weights_that_change_between_two_texts_of_a_stream_are_copied_again(
    products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = torch.randint(3, VOCABULARY, (6, 5), generator=torch.Generator().manual_seed(0)).tolist()
    texts = []
    for joined in (True, False):
        if not joined:
            monkeypatch.setattr(joined_weights, "free_bytes", lambda device: 0)
            assert products.called > 0
            products.called = 0
        target = fresh_model()
        generator = hf_dsde.BatchGenerator(
            target,
            tiny_tokenizer(),
            assistant_model=noisy_copy(target, 0.05),
            speculation_policy=hf_dsde.StaticPolicy(2),
            speculation_config=GRAPH,
            batch_size=2,
        )
        rows = [{"input_ids": prompt, "max_new_tokens": 9 + 4 * n} for n, prompt in enumerate(prompts)]
        texts.append([])
        for result in generator.stream(rows, ordered=True):
            texts[-1].append(result.token_ids)
            if len(texts[-1]) in {1, 3}:
                change(target, in_place)
    assert products.called == 0
    assert texts[0] == texts[1]
    assert texts[0][1:] != [own_text(fresh_model(), row) for row in rows][1:], "the change has made a difference"


def own_text(model: PreTrainedModel, row: dict[str, Any]) -> list[int]:
    """What a model writes alone."""
    prompt = torch.tensor([row["input_ids"]])
    text = plain(model, {"input_ids": prompt}, max_new_tokens=row["max_new_tokens"])
    return text[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("order", ["inference plain no_grad", "plain inference plain"])
def test_calls_in_any_mode_follow_calls_in_any_other(order: str, products: Products) -> None:
    modes = {"inference": torch.inference_mode, "plain": torch.enable_grad, "no_grad": torch.no_grad}
    target = fresh_model()
    draft = noisy_copy(target, 0.05)
    for mode in order.split():
        change(target, in_place)
        with modes[mode]():
            compared(target, draft, ragged_batch(LENGTHS), "static", GRAPH, max_new_tokens=9)
    assert products.called > 0


def test_a_model_in_inference_tensors_has_no_versions(products: Products) -> None:
    with torch.inference_mode():
        target = fresh_model()
        draft = noisy_copy(target, 0.05)
        for _ in range(2):
            compared(target, draft, ragged_batch(LENGTHS), "static", GRAPH, max_new_tokens=9)
    assert products.called > 0


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_adapters_that_are_switched_to_and_fro_are_of_their_own_time(name: str, products: Products) -> None:
    peft = pytest.importorskip("peft")
    base, inputs = fresh_model(), ragged_batch(LENGTHS)
    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        wrapper = peft.get_peft_model(base, peft.LoraConfig(**settings), adapter_name="first").eval()
        wrapper.add_adapter("second", peft.LoraConfig(**settings, use_dora=name == "dora"))
    draft = noisy_copy(fresh_model(), 0.05)
    for adapter in ("first", "second", "first", "second"):
        wrapper.set_adapter(adapter)
        compared(wrapper, draft, inputs, "static", GRAPH, max_new_tokens=12)
    assert products.called > 0


def test_a_module_that_is_no_longer_plain_is_called(products: Products) -> None:
    target = fresh_model()
    draft, inputs = noisy_copy(target, 0.05), ragged_batch(LENGTHS)
    before = compared(target, draft, inputs, "static", GRAPH, max_new_tokens=12)
    layer = target.model.layers[0].self_attn
    layer.q_proj = Doubled(layer.q_proj)
    after = compared(target, draft, inputs, "static", GRAPH, max_new_tokens=12)
    assert not torch.equal(before.sequences, after.sequences)
    assert products.called > 0


class Doubled(nn.Linear):
    """Computes something else than its weight says."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__(module.in_features, module.out_features, bias=False, dtype=module.weight.dtype)
        self.weight = module.weight

    def forward(self, x: Tensor) -> Tensor:
        return -2 * super().forward(x)


def test_the_models_weights_stay_where_they_are(products: Products) -> None:
    target = fresh_model()
    places = {name: parameter.data_ptr() for name, parameter in target.named_parameters()}
    weights = copy.deepcopy(target.state_dict())
    draft = noisy_copy(target, 0.05)
    compared(target, draft, ragged_batch(LENGTHS), "static", GRAPH, max_new_tokens=9)
    assert products.called > 0
    assert {name: parameter.data_ptr() for name, parameter in target.named_parameters()} == places
    assert all(torch.equal(weight, weights[name]) for name, weight in target.state_dict().items())


@pytest.mark.parametrize("room", [0, 1])
def test_copies_are_made_where_memory_is_plenty(room: int, products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    target = fresh_model()
    draft = noisy_copy(target, 0.05)
    copied = [getattr(layer.self_attn, f"{name}_proj").weight for layer in target.model.layers for name in "qkv"]
    needed = joined_weights.MEMORY_MARGIN * sum(weight.nbytes for weight in copied)
    monkeypatch.setattr(joined_weights, "free_bytes", lambda device: needed - 1 + room)
    compared(target, draft, ragged_batch(LENGTHS), "static", GRAPH, max_new_tokens=9)
    assert (products.called > 0) == bool(room)


@pytest.mark.parametrize("how", ["release", "gone"])
def test_copies_go_with_what_was_recorded(how: str, products: Products) -> None:
    target = fresh_model()
    draft = noisy_copy(target, 0.05)
    compared(target, draft, ragged_batch(LENGTHS), "static", GRAPH, max_new_tokens=9)
    assert products.alive
    if how == "release":
        for model in (target, draft):
            hf_dsde.release_memory(model)
    else:
        del target, draft
    gc.collect()
    assert products.alive == 0


def test_nothing_is_copied_for_passes_that_kernels_of_this_package_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(JoinedWeights, "make", lambda self, layers: made.append(layers))
    target = fresh_model()
    compared(target, noisy_copy(target, 0.05), ragged_batch(LENGTHS), "static", GRAPH, max_new_tokens=9)
    assert made == []
