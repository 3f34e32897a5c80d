"""Models inside wrappers, with hooks, and with methods of somebody else's: exact, or refused before a model runs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from small_batch import ARGUMENTS, BATCH, draft, model, plain_text
from tiny_calls import QUIET
from tiny_models import tiny_model
from tiny_text import StopsRowOn, tiny_tokenizer
from transformers import LlamaForCausalLM, PreTrainedModel, StoppingCriteriaList

import hf_dsde
from hf_dsde import BatchGenerator, compat

CALL: dict[str, Any] = {**ARGUMENTS, "speculation_policy": "static", "speculation_config": QUIET}


def compiled(inner: PreTrainedModel) -> Any:
    return torch.compile(inner, backend="eager")


WRAPPERS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "compiled": compiled,
    "data parallel": torch.nn.DataParallel,
    "both": lambda inner: compiled(torch.nn.DataParallel(inner)),
}

# Wrappers


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_draft_drafts_as_the_model_inside_it(wrapper: str) -> None:
    target = hf_dsde.enable(model())
    bare, ours = (
        target.generate(**CALL, assistant_model=assistant, return_dict_in_generate=True)
        for assistant in (draft(), WRAPPERS[wrapper](copy.deepcopy(draft())))
    )
    assert ours.sequences.tolist() == plain_text()
    assert ours.speculation_statistics.accepted == bare.speculation_statistics.accepted
    method = functools.partial(hf_dsde.generate, assistant_model=WRAPPERS[wrapper](draft()))
    assert model().generate(**ARGUMENTS, custom_generate=method).tolist() == plain_text()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_batch_generator_takes_wrapped_models(wrapper: str) -> None:
    prompts = [row[mask == 1].tolist() for row, mask in zip(BATCH["input_ids"], BATCH["attention_mask"], strict=True)]
    texts = []
    for wrap in (lambda inner: inner, WRAPPERS[wrapper]):
        generator = BatchGenerator(
            wrap(model()), tiny_tokenizer(), assistant_model=wrap(draft()), batch_size=2, max_new_tokens=6
        )
        texts.append([result.token_ids for result in generator.stream(prompts, ordered=True)])
    assert texts[0] == texts[1]
    assert all(texts[0])


def test_enabling_a_compiled_model_enables_the_model_whose_generate_it_lends() -> None:
    inner = model()
    wrapper = compiled(inner)
    assert hf_dsde.enable(hf_dsde.enable(wrapper)) is wrapper
    assert wrapper.generate(**CALL, assistant_model=draft()).tolist() == plain_text()
    assert hf_dsde.disable(wrapper) is wrapper
    assert type(inner) is LlamaForCausalLM


def test_a_wrapper_without_generate_says_what_to_pass() -> None:
    with pytest.raises(TypeError, match="model: DataParallel has no transformers `generate`; pass its `module`"):
        hf_dsde.enable(torch.nn.DataParallel(model()))  # type: ignore[arg-type]


class ValueHead(torch.nn.Module):
    """A wrapper that is nobody's in particular."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.pretrained_model = inner
        self.config = inner.config


@pytest.mark.parametrize("assistant", [ValueHead(tiny_model()), torch.nn.Linear(2, 2)], ids=["value head", "layer"])
def test_what_is_no_model_is_refused_when_it_is_handed_over(assistant: Any) -> None:
    expected = f"assistant_model: expected a causal language model of transformers, got {type(assistant).__name__}"
    with pytest.raises(TypeError, match=expected):
        hf_dsde.enable(model()).generate(**CALL, assistant_model=assistant)
    with pytest.raises(TypeError, match=expected):
        BatchGenerator(model(), tiny_tokenizer(), assistant_model=assistant)
    with pytest.raises(TypeError, match="model: expected a causal language model"):
        BatchGenerator(assistant, tiny_tokenizer(), assistant_model=draft())


def test_a_name_that_is_no_drafters_is_refused_with_those_that_are() -> None:
    for generate in (
        lambda: hf_dsde.enable(model()).generate(**CALL, assistant_model="gpt2"),
        lambda: BatchGenerator(model(), tiny_tokenizer(), assistant_model="gpt2"),
    ):
        with pytest.raises(ValueError, match=r"`assistant_model` is 'gpt2'.*'suffix'.*load_draft"):
            generate()
    with pytest.raises(TypeError, match="model: expected a causal language model"):
        BatchGenerator("gpt2", tiny_tokenizer(), assistant_model=draft())


# Methods that make inputs


class AddsToken(LlamaForCausalLM):
    """Feeds another first token."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**inputs, "input_ids": (inputs["input_ids"] + 1) % 90}


class CountsSteps(LlamaForCausalLM):
    """Keeps something from step to step."""

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super()._update_model_kwargs_for_generation(*args, **kwargs)}


def of_class(kind: type[PreTrainedModel]) -> PreTrainedModel:
    own = kind(model().config).double().eval()
    own.load_state_dict(model().state_dict())
    return own


def patched() -> PreTrainedModel:
    """A model with a method of its own, as prompt learning of PEFT leaves it during a call."""
    own = model()
    made = own.prepare_inputs_for_generation

    def prepare_inputs_for_generation(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = made(*args, **kwargs)
        return {**inputs, "input_ids": (inputs["input_ids"] + 1) % 90}

    own.prepare_inputs_for_generation = prepare_inputs_for_generation
    return own


def partly_patched() -> PreTrainedModel:
    own = patched()
    own.prepare_inputs_for_generation = functools.partial(own.prepare_inputs_for_generation)
    return own


FOREIGN: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "class": (lambda: of_class(AddsToken), "prepare_inputs_for_generation of AddsToken.prepare_inputs_for_generation"),
    "class, between steps": (lambda: of_class(CountsSteps), "_update_model_kwargs_for_generation of CountsSteps"),
    "object": (patched, "prepare_inputs_for_generation of patched"),
    "partial": (partly_patched, "prepare_inputs_for_generation of patched"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_method_that_makes_inputs_otherwise_is_refused_by_name(case: str) -> None:
    make, part = FOREIGN[case]
    with pytest.raises(ValueError, match=rf"model \(\w+\) with {part}.*Leave out `speculation_policy`"):
        hf_dsde.enable(make()).generate(**CALL, assistant_model=draft())
    with pytest.raises(ValueError, match=rf"assistant_model \(\w+\) with {part}"):
        hf_dsde.enable(model()).generate(**CALL, assistant_model=make())
    with pytest.raises(ValueError, match=rf"model \(\w+\) with {part}"):
        BatchGenerator(make(), tiny_tokenizer(), assistant_model=draft())


def test_the_models_own_method_put_on_the_object_again_changes_nothing() -> None:
    """As PEFT leaves a model after a call."""
    own = model()
    own.prepare_inputs_for_generation = own.prepare_inputs_for_generation
    assert hf_dsde.enable(own).generate(**CALL, assistant_model=draft()).tolist() == plain_text()


def test_a_subclass_that_leaves_inputs_alone_is_served() -> None:
    class Named(LlamaForCausalLM):
        pass

    assert hf_dsde.enable(of_class(Named)).generate(**CALL, assistant_model=of_class(Named)).tolist() == plain_text()


class TakesAnything(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_forward_without_a_cache_argument_is_refused_when_the_object_is_made() -> None:
    with pytest.raises(ValueError, match=r"assistant_model \(TakesAnything\).*takes none of"):
        BatchGenerator(model(), tiny_tokenizer(), assistant_model=of_class(TakesAnything))


# Hooks


@contextmanager
def steered(target: PreTrainedModel, vectors: torch.Tensor) -> Iterator[None]:
    """Add a vector per row to what leaves the first layer, as steering does."""

    def add(module: torch.nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        assert len(first) == len(vectors), f"{len(vectors)} vectors and {len(first)} rows"
        moved = first + vectors[:, None]
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    handle = target.model.layers[0].register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("hooked", ["target", "draft", "both"])
def test_what_is_hooked_for_each_row_meets_its_row_also_after_others_have_ended(hooked: str) -> None:
    target, assistant = hf_dsde.enable(model()), copy.deepcopy(draft())
    vectors = torch.randn(len(BATCH["input_ids"]), 32, generator=torch.Generator().manual_seed(4)).double()
    models = {"target": [target], "draft": [assistant], "both": [target, assistant]}[hooked]

    def texts(**arguments: Any) -> list[list[int]]:
        return target.generate(**{**ARGUMENTS, "max_new_tokens": 30}, **arguments).tolist()

    with steered(models[0], vectors):
        free = texts()
        width = BATCH["input_ids"].shape[1]
        ends = StoppingCriteriaList([StopsRowOn(free[0][width + 3], free[1][width + 8])])
        with steered(models[1], vectors) if hooked == "both" else nullcontext():
            plain = texts(stopping_criteria=ends)
            ours = texts(
                stopping_criteria=ends, assistant_model=assistant, speculation_policy="static", speculation_config=QUIET
            )
    assert ours == plain


def test_gradient_checkpointing_that_drops_the_cache_is_refused_for_either_model() -> None:
    """GPT-2's own forward goes by the mode alone, in every version of transformers."""
    batch = {**ARGUMENTS, "speculation_policy": "static", "speculation_config": QUIET}
    target, assistant = hf_dsde.enable(tiny_model("gpt2")), tiny_model("gpt2")
    for argument, one in (("model", target), ("assistant_model", assistant)):
        one.gradient_checkpointing_enable()
        target.generate(**batch, assistant_model=assistant)
        one.train()
        expected = rf"used with {argument} \(\w+\) in training mode with gradient checkpointing.*eval\(\)"
        with pytest.raises(ValueError, match=expected):
            target.generate(**batch, assistant_model=assistant)
        with pytest.raises(ValueError, match=expected):
            BatchGenerator(target, tiny_tokenizer(), assistant_model=assistant)
        one.gradient_checkpointing_disable()
        target.generate(**batch, assistant_model=assistant)
        one.eval()


def test_a_generator_refuses_what_its_models_have_become_since() -> None:
    target = tiny_model("gpt2")
    generator = BatchGenerator(target, tiny_tokenizer(), assistant_model=tiny_model("gpt2"), max_new_tokens=2)
    target.gradient_checkpointing_enable()
    target.train()
    with pytest.raises(ValueError, match="in training mode with gradient checkpointing"):
        next(iter(generator.stream([[5, 6]])))


def test_checkpointing_that_keeps_the_cache_works_in_training_mode() -> None:
    target, assistant = hf_dsde.enable(tiny_model("llama")), copy.deepcopy(draft())
    for one in (target, assistant):
        one.gradient_checkpointing_enable()
        one.train()
    if compat.gives_up_cache(target.modules()):  # versions of transformers whose layers go by the mode alone
        with pytest.raises(ValueError, match="gradient checkpointing"):
            target.generate(**CALL, assistant_model=assistant)
    else:
        assert target.generate(**CALL, assistant_model=assistant).tolist() == plain_text()
