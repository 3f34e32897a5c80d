"""Adapters of PEFT: those in a model's layers are exact, those that change its inputs are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_batch import draft, model
from tiny_calls import QUIET
from tiny_models import noisy_copy, ragged_batch
from tiny_text import StopsRowOn, tiny_tokenizer
from transformers import PreTrainedModel, StoppingCriteriaList

import hf_dsde
from hf_dsde import BatchGenerator

peft = pytest.importorskip("peft")

BATCH = ragged_batch((3, 6, 1, 9))
PLAIN: dict[str, Any] = {**BATCH, "do_sample": False, "max_new_tokens": 10}
CALL: dict[str, Any] = {**PLAIN, "speculation_policy": "static", "speculation_config": QUIET}
TASK = {"task_type": "CAUSAL_LM"}
LAYERS = {**TASK, "target_modules": ["q_proj", "v_proj"]}

IN_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {**LAYERS, "r": 2}),
    "DoRA": ("LoraConfig", {**LAYERS, "r": 2, "use_dora": True}),
    "LoRA and a head": ("LoraConfig", {**LAYERS, "r": 2, "modules_to_save": ["lm_head"]}),
    "IA3": ("IA3Config", {**TASK, "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "VeRA": ("VeraConfig", {**TASK, "target_modules": ["q_proj"], "r": 4}),
    "LoKr": ("LoKrConfig", {**LAYERS, "r": 2}),
    "OFT": ("OFTConfig", {**LAYERS, "r": 0, "oft_block_size": 4}),
    "LLaMA-Adapter": ("AdaptionPromptConfig", {**TASK, "adapter_len": 4, "adapter_layers": 2}),
}
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt tuning": ("PromptTuningConfig", {**TASK, "num_virtual_tokens": 2}),
    "prefix tuning": ("PrefixTuningConfig", {**TASK, "num_virtual_tokens": 2}),
    "P-tuning": ("PromptEncoderConfig", {**TASK, "num_virtual_tokens": 2, "encoder_hidden_size": 8}),
    "multitask prompts": ("MultitaskPromptTuningConfig", {**TASK, "num_virtual_tokens": 2, "num_tasks": 2}),
    "CPT": ("CPTConfig", {**TASK, "cpt_token_ids": [5, 6], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 1]}),
}


def adapted(base: PreTrainedModel, method: tuple[str, dict[str, Any]]) -> Any:
    """Wrap a model in an adapter that does something: what is trained gets noise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        wrapper = peft.get_peft_model(base, getattr(peft, method[0])(**method[1])).eval()
    stir(wrapper, seed=3)
    return wrapper


def stir(wrapper: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in wrapper.parameters():
            if weight.requires_grad and weight.is_floating_point():
                weight.add_(0.2 * torch.randn(weight.shape, generator=generator).to(weight.dtype))


@pytest.mark.parametrize("method", IN_LAYERS)
def test_adapters_in_layers_are_exact_in_target_and_draft(method: str) -> None:
    bare = model()
    without = bare.generate(**PLAIN).tolist()
    target = hf_dsde.enable(adapted(bare, IN_LAYERS[method]))
    plain = target.generate(**PLAIN).tolist()
    assert plain != without
    assert target.generate(**CALL, assistant_model=draft()).tolist() == plain
    output = target.generate(**CALL, assistant_model=target, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain
    statistics = output.speculation_statistics
    assert statistics.accepted == statistics.drafted, "the draft ran without its adapter"


def test_an_adapter_that_is_switched_off_or_over_is_so_in_drafts_too() -> None:
    target = hf_dsde.enable(adapted(model(), IN_LAYERS["LoRA"]))
    target.add_adapter("other", peft.LoraConfig(**LAYERS, r=2, init_lora_weights=False))
    texts = []
    for enter in ("default", "other", None):
        if enter is not None:
            target.set_adapter(enter)
            texts.append(target.generate(**PLAIN).tolist())
            ours = [target.generate(**CALL, assistant_model=one).tolist() for one in (draft(), target)]
        else:
            with target.disable_adapter():
                texts.append(target.generate(**PLAIN).tolist())
                ours = [target.generate(**CALL, assistant_model=one).tolist() for one in (draft(), target)]
        assert ours == [texts[-1]] * 2
    assert texts[0] != texts[1] != texts[2] != texts[0]
    assert texts[2] == model().generate(**PLAIN).tolist()


def test_a_batch_generator_takes_adapted_models() -> None:
    target, assistant = adapted(model(), IN_LAYERS["LoRA"]), adapted(noisy_copy(model(), 0.05), IN_LAYERS["IA3"])
    generator = BatchGenerator(target, tiny_tokenizer(), assistant_model=assistant, batch_size=2, max_new_tokens=8)
    prompts = [row[mask == 1] for row, mask in zip(BATCH["input_ids"], BATCH["attention_mask"], strict=True)]
    results = generator.stream([prompt.tolist() for prompt in prompts], ordered=True)
    for prompt, result in zip(prompts, results, strict=True):
        plain = target.generate(input_ids=prompt[None], do_sample=False, max_new_tokens=8)[0, len(prompt) :].tolist()
        assert result.token_ids == plain


def test_adapters_by_row_follow_their_rows() -> None:
    """Rows end at different times, and each has an adapter of its own or none."""
    target = hf_dsde.enable(adapted(model(), IN_LAYERS["LoRA"]))
    target.add_adapter("other", peft.LoraConfig(**LAYERS, r=2, init_lora_weights=False))
    rows = {**PLAIN, "adapter_names": ["default", "other", "__base__", "other"]}
    free = target.generate(**rows)
    width = BATCH["input_ids"].shape[1]
    rows["stopping_criteria"] = StoppingCriteriaList([StopsRowOn(int(free[0, width + 2]), int(free[1, width + 6]))])
    plain = target.generate(**rows).tolist()
    alone = [
        target.generate(**{**rows, "adapter_names": [name] * 4}).tolist() for name in ("default", "other", "__base__")
    ]
    assert plain not in alone
    ours = target.generate(
        **rows, speculation_policy="static", speculation_config=QUIET, assistant_model=draft()
    ).tolist()
    assert ours == plain


def test_tasks_by_row_follow_their_rows() -> None:
    method = ("PolyConfig", {**LAYERS, "r": 2, "n_tasks": 3, "n_skills": 2})
    target = hf_dsde.enable(adapted(model(), method))
    tasks = {"task_ids": torch.tensor([0, 1, 2, 1])}
    free = target.generate(**PLAIN, **tasks)
    stops = {"stopping_criteria": StoppingCriteriaList([StopsRowOn(int(free[0, BATCH["input_ids"].shape[1] + 2]))])}
    plain = target.generate(**PLAIN, **tasks, **stops).tolist()
    assert target.generate(**CALL, **tasks, **stops, assistant_model=draft()).tolist() == plain
    with pytest.raises(ValueError, match=r"assistant_model \(PeftModelForCausalLM\) with POLY"):
        hf_dsde.enable(model()).generate(**CALL, assistant_model=target)


@pytest.mark.parametrize("method", PROMPTS)
def test_prompt_learning_is_refused_by_name(method: str) -> None:
    target = hf_dsde.enable(adapted(model(), PROMPTS[method]))
    foreign = r"model \(LlamaForCausalLM\) with prepare_inputs_for_generation of PeftModelForCausalLM"
    with pytest.raises(ValueError, match=foreign):
        target.generate(**CALL, assistant_model=draft())
    learnt = r"\(PeftModelForCausalLM\) with prompt learning"
    with pytest.raises(ValueError, match=rf"assistant_model {learnt}.*Use an adapter that sits in the model's layers"):
        hf_dsde.enable(model()).generate(**CALL, assistant_model=target)
    with pytest.raises(ValueError, match=f"model {learnt}"):
        BatchGenerator(target, tiny_tokenizer(), assistant_model=draft())
    with target.disable_adapter():
        plain = target.generate(**PLAIN).tolist()
        assert target.generate(**CALL, assistant_model=target).tolist() == plain


def test_adapters_that_begin_at_a_token_are_refused_by_name() -> None:
    method = ("LoraConfig", {**LAYERS, "r": 2, "alora_invocation_tokens": [int(BATCH["input_ids"][1, -2])]})
    target = hf_dsde.enable(adapted(model(), method))
    with pytest.raises(ValueError, match=r"with the hook peft\.tuners\.lora.*Leave out `speculation_policy`"):
        target.generate(**CALL, assistant_model=draft())
    with pytest.raises(ValueError, match=r"assistant_model \(PeftModelForCausalLM\) with activated LoRA"):
        hf_dsde.enable(model()).generate(**CALL, assistant_model=target)
