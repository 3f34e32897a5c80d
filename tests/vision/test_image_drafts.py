"""What drafts of prompts with images are shown: the same images, or the text alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny_calls import QUIET, compared, config_of
from tiny_models import noisy_copy
from tiny_policies import ScriptedLengths
from tiny_vision import END, IMAGE, START, families, image_batch, text_draft, tiny_vlm, vision_pair
from transformers import PreTrainedModel
from two_drafters import CHEAP, Knowing, known

import hf_dsde
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.drafting.lookup.prompt_lookup import PromptLookupDrafter
from hf_dsde.drafting.model import ModelDrafter
from hf_dsde.execution import packed_weights
from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.packed_weights import can_pack
from hf_dsde.execution.prompt_inputs import PromptInputs
from hf_dsde.policies import StaticPolicy

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]

PROMPTS = ([3, 5], [7], [4, 2, 1], [0, 1])


@pytest.mark.parametrize("family", families())
def test_a_draft_that_looks_at_the_images_agrees_as_its_weights_do(family: str) -> None:
    target, draft = vision_pair(family, "full")
    output = compared(target, draft, image_batch(family, PROMPTS), "static", max_new_tokens=12)
    assert output.speculation_statistics.acceptance_rate == 1.0


class NotingDrafter(ModelDrafter):
    """Notes the texts that it continues, and how."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.noted: list[tuple[list[int], list[int]]] = []

    def get_candidates(self, sequences: Any, plan: Any, monitor: Any) -> CandidateBatch:
        texts = [sequences.host_text(row) for row in range(sequences.rows)]
        candidates = super().get_candidates(sequences, plan, monitor)
        drafted = zip(texts, candidates.tokens.tolist(), plan.length_counts, strict=True)
        self.noted += [(text, tokens[:length]) for text, tokens, length in drafted if length]
        return candidates


def written_without_images(draft: PreTrainedModel, text: list[int], count: int) -> list[int]:
    """What a model writes after a text without the tokens between the marks of an image."""
    words: list[int] = []
    for token in text:
        if token != IMAGE or START not in words or words[-1] != START:
            words.append(token)
    written = draft.generate(input_ids=torch.tensor([words]), max_new_tokens=count, do_sample=False)
    tokens: list[int] = written[0, len(words) :].tolist()
    return tokens


@pytest.mark.parametrize(("family", "runner"), [("llava", "eager"), ("qwen2_5_vl", "eager"), ("gemma3", "graph")])
def test_a_text_model_drafts_what_it_would_write_after_the_text_alone(
    family: str, runner: str, request: pytest.FixtureRequest
) -> None:
    if runner == "graph":
        request.getfixturevalue("recording")
    target = vision_pair(family)[0]
    draft = text_draft(target)
    draft.generation_config.eos_token_id = None
    drafter = NotingDrafter(draft)
    config = config_of(QUIET, runner=runner)
    compared(target, drafter, image_batch(family, PROMPTS), StaticPolicy(3), config, max_new_tokens=12)  # type: ignore[arg-type]
    assert any(len(text) - text.index(END) > 8 for text, _ in drafter.noted if END in text)
    for text, proposed in [*drafter.noted[:4], *drafter.noted[-6:]]:
        assert proposed == written_without_images(draft, text, len(proposed))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_a_model_beside_texts_that_run_ahead_of_it_keeps_what_it_saw(family: str) -> None:
    """It is fed many tokens of each row then, and images are no tokens."""
    target, draft = vision_pair(family, "full")
    inputs = image_batch(family, [[3, 5], [2, 1], [4, 2, 1]])
    texts = known(target, inputs, 24)
    drafter = NotingDrafter(draft)
    both: Any = [Knowing(texts[0], longest=6), drafter]
    compared(target, both, inputs, ScriptedLengths([[2, 0, 1]] * 4 + [[2, 2, 2]]), CHEAP, max_new_tokens=24)
    assert len(drafter.noted) > 8
    for text, proposed in drafter.noted:
        begun = [*text, *proposed]
        assert any(whole[: len(begun)] == begun for whole in texts)


class ReadingDrafter(PromptLookupDrafter):
    """Notes what it is told of prompts."""

    hidden_layers = (2, 1)  # type: ignore[assignment]

    def read_states(self, spans: Any, hidden: Any) -> None:
        self.spans, self.hidden = list(spans), hidden


def test_a_drafter_reads_the_states_of_all_tokens_of_a_prompt_but_the_last() -> None:
    target, _ = vision_pair("llava")
    inputs, drafter = image_batch("llava", PROMPTS), ReadingDrafter()
    compared(target, drafter, inputs, StaticPolicy(3), max_new_tokens=6)  # type: ignore[arg-type]
    lengths = inputs["attention_mask"].sum(1).tolist()
    assert [(span.row, span.start, span.count) for span in drafter.spans] == [
        (row, 0, length - 1) for row, length in enumerate(lengths)
    ]
    before_last = inputs["attention_mask"].bool()
    before_last[:, -1] = False
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        expected = target(**inputs, position_ids=positions, output_hidden_states=True).hidden_states
    for layer, states in zip((2, 1), drafter.hidden, strict=True):
        torch.testing.assert_close(states, expected[layer][before_last], rtol=1e-9, atol=1e-9)


def test_a_text_model_that_lacks_the_tokens_of_images() -> None:
    target, _ = vision_pair("llava")
    small = text_draft(target)
    small.resize_token_embeddings(IMAGE)
    output = compared(target, small, image_batch("llava", PROMPTS), "static", max_new_tokens=12)
    assert output.speculation_statistics.acceptance_rate > 0


@pytest.mark.parametrize("other", ["idefics3", "qwen2_vl"])
def test_a_draft_that_cannot_look_at_these_images_reads_the_text_alone(other: str) -> None:
    target, _ = vision_pair("llava")
    drafter = NotingDrafter(vision_pair(other)[0])
    compared(target, drafter, image_batch("llava", PROMPTS), StaticPolicy(3), max_new_tokens=8)  # type: ignore[arg-type]
    text, proposed = drafter.noted[0]
    assert proposed == written_without_images(drafter.model, text, 3)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "idefics3"])
def test_hidden_states_of_prompts_are_the_models_own(family: str) -> None:
    """Heads read them: those of layers, in the order in which they were asked for."""
    model = tiny_vlm(family)
    inputs = image_batch(family, PROMPTS)
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    beside = {name: value for name, value in inputs.items() if name != "input_ids"}
    beside["position_ids"] = model._prepare_position_ids_for_generation(tokens, dict(inputs))
    layers = (2, 0, 1)
    runner = create_runner(model, len(PROMPTS), 64, RuntimeOptions(), "eager", hidden_layers=layers)
    with torch.no_grad(), runner.active():
        found = runner.store_prompts(PromptInputs(tokens, mask, beside, model.config, tokens == IMAGE))
    with torch.no_grad():
        expected = model(input_ids=tokens, **beside, output_hidden_states=True).hidden_states
    for layer, states in zip(layers, found, strict=True):
        torch.testing.assert_close(states[mask.bool()], expected[layer][mask.bool()], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_models_that_are_not_enabled(family: str) -> None:
    target = tiny_vlm(family)
    inputs = image_batch(family, PROMPTS)
    expected = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    for draft in (text_draft(target), noisy_copy(target, 0.05)):
        decode = partial(hf_dsde.generate, assistant_model=draft, speculation_policy="static")
        output = target.generate(**inputs, custom_generate=decode, do_sample=False, max_new_tokens=12)
        assert torch.equal(output, expected)


@pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="weights are packed on x86-64 only")
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "idefics3"])
def test_packed_weights_of_float32_models(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of layers that read tokens; what reads images is run once."""
    monkeypatch.setattr(packed_weights, "SMALLEST_WEIGHT", 0)
    target = hf_dsde.enable(tiny_vlm(family).float())
    inputs = image_batch(family, PROMPTS)
    inputs = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    passes: dict[str, set[bool]] = {}

    def note(name: str, module: torch.nn.Module, *_: object) -> None:
        passes.setdefault(name, set()).add("forward" in vars(module))

    for name, layer in target.named_modules():
        if type(layer) is torch.nn.Linear:
            layer.register_forward_hook(partial(note, name))
    expected = target.generate(**inputs, do_sample=False, max_new_tokens=40)
    passes.clear()
    found = target.generate(
        **inputs, assistant_model="suffix", speculation_policy="static", do_sample=False, max_new_tokens=40
    )
    assert torch.equal(found, expected)
    assert {"lm_head"} < {name for name, packed in passes.items() if packed == {True}}
    looking = {name for name in passes if "vision" in name or "visual" in name}
    assert all(passes[name] == {False} for name in looking)
    assert looking
