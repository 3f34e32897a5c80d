"""What only a GPU can show: equality on its kernels, models on different devices, near-ties in half precision, memory.

Run with `tests/gpu.sh` on a machine with a CUDA device; elsewhere the file is skipped. `test_gpu_runner.py` looks at
the runner itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_calls import config_of
from tiny_models import FAMILIES, PAD, noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.divergence import Verdict, compare_outputs
from hf_dsde.execution.create_runner import RunnerWarning, create_runner
from hf_dsde.execution.cuda_graphs import CudaCapture
from hf_dsde.execution.fused_families import why_not_fused
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.memory import cache_bytes
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.workspaces import workspaces
from hf_dsde.integration import generation
from hf_dsde.utils import tuning

pytestmark = [
    pytest.mark.gpu,
    # Tiny models lose time by speculation; that is no finding here.
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
]
CUDA = torch.device("cuda", 0)
NEW_TOKENS = 32
RECORDED = [family for family in FAMILIES if family != "mixtral"]
"""The experts of the other one depend on the tokens: `test_gpu_runner.py` looks at that."""
FUSED = [family for family in RECORDED if why_not_fused(tiny_model(family)) is None]


def batch_on(device: torch.device, rows: int = 6) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in ragged_batch(random_lengths(rows)).items()}


@functools.cache
def pair(family: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a target and a draft that agrees with it about half of the time, in float32 on the GPU."""
    target = tiny_model(family).float()
    return target.to(CUDA), noisy_copy(tiny_model(family).float(), 0.05).to(CUDA)


@functools.cache
def plain(family: str = "llama") -> torch.Tensor:
    """Return what stock greedy `generate` returns."""
    target, _ = pair(family)
    return target.generate(**batch_on(CUDA), max_new_tokens=NEW_TOKENS, do_sample=False)


def speculative(family: str = "llama", policy: Any = None, **settings: Any) -> torch.Tensor:
    """Generate greedily with the given settings of `SpeculationConfig`."""
    target, draft = pair(family)
    return hf_dsde.enable(target).generate(
        **batch_on(CUDA),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        assistant_model=draft,
        speculation_policy=policy or RandomLengths(stop_probability=0.1),
        speculation_config=config_of(**settings),
    )


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each pass that is recorded."""
    passes: list[int] = []
    original = CudaCapture.__call__
    monkeypatch.setattr(CudaCapture, "__call__", lambda self, *bodies: passes.append(1) or original(self, *bodies))
    return passes


@pytest.fixture(scope="module", autouse=True)
def released() -> Iterator[None]:
    """Keep no recorded passes for other files."""
    yield
    for model in list(workspaces._idle):
        workspaces.release(model)
    pair.cache_clear()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, {}) for family in RECORDED),
        *((family, {"fused_layers": False}) for family in FUSED),
        *((family, {"runner": "eager"}) for family in FAMILIES),
    ],
    ids=str,
)
def test_greedy_text_equals_plain_generate_in_float32(
    family: str, settings: dict[str, Any], recorded: list[int]
) -> None:
    """The second call finds every pass recorded. A model that is not recorded warns, and that is an error here."""
    expected = plain(family)
    assert torch.equal(speculative(family, **settings), expected)
    records = settings.get("runner") != "eager"
    assert bool(recorded) == records
    recorded.clear()
    assert torch.equal(speculative(family, **settings), expected)
    assert not recorded


@pytest.mark.parametrize("family", FUSED)
def test_packed_passes_are_really_packed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = GraphRunner._stage_packed
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, free_tokens=0))
    monkeypatch.setattr(
        GraphRunner, "_stage_packed", lambda self, *block: sizes.append(block[1]) or original(self, *block)
    )
    for _ in range(2):  # the second call finds every pass recorded
        assert torch.equal(speculative(family), plain(family))
        assert sizes
        sizes.clear()


@pytest.mark.parametrize("policy", ["static", "goodput", "auto"])
@pytest.mark.parametrize("name", ["suffix", "sssd", "prompt_lookup"])
def test_drafts_out_of_texts(name: str, policy: str) -> None:
    target, _ = pair()
    call = {"speculation_policy": policy, "speculation_config": config_of(cost_probe=False)}
    drafters: list[Any] = [name]
    if name == "suffix":
        drafters += [hf_dsde.SuffixDrafter(plain().tolist())] * 2  # which knows the answers, also those of its own call
    for drafter in drafters:
        text = hf_dsde.enable(target).generate(
            **batch_on(CUDA), max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=drafter, **call
        )
        assert torch.equal(text, plain())


@pytest.mark.parametrize("agreement", [0.0, 1.0], ids=["full", "never"])
def test_drafts_that_always_or_never_agree(agreement: float) -> None:
    target, _ = pair()
    draft = noisy_copy(tiny_model().float(), agreement).to(CUDA)
    text = hf_dsde.enable(target).generate(
        **batch_on(CUDA), max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=draft, speculation_policy="static"
    )
    assert torch.equal(text, plain())


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("target_device", "draft_device"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_draft_and_target_may_live_on_different_devices(target_device: str, draft_device: str, do_sample: bool) -> None:
    """Of the policies those that hear of every draft step, and one that compares the two models' logits."""
    target = tiny_model().float().to(target_device)
    draft = noisy_copy(tiny_model().float(), 0.05).to(draft_device)
    inputs = batch_on(target.device)
    options = {"max_new_tokens": 24, "repetition_penalty": 1.2, "min_new_tokens": 5, "do_sample": do_sample}
    if do_sample:
        options |= {"temperature": 0.7, "top_p": 0.9}
    expected = target.generate(**inputs, **options)
    hf_dsde.enable(target)
    for policy in ("dsde", "svip", "confidence", "marginal_goodput"):
        text = target.generate(**inputs, **options, assistant_model=draft, speculation_policy=policy)
        assert text.device == target.device
        if not do_sample:
            assert torch.equal(text, expected)


@pytest.mark.parametrize(
    ("settings", "free_tokens"), [({}, 128), ({}, 0), ({"runner": "eager"}, 128)], ids=["padded", "packed", "eager"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_differs_from_plain_generate_at_near_ties_only(
    dtype: torch.dtype, settings: dict[str, Any], free_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights as wide as a tiny model's make its logits noisy: eager passes of another shape move them by six ulps."""
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, free_tokens=free_tokens))
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    target = tiny_model(**shape).to(CUDA, dtype)
    draft = noisy_copy(tiny_model(**shape).to(dtype), 0.05).to(CUDA)
    inputs = batch_on(CUDA, rows=16)
    expected = target.generate(**inputs, max_new_tokens=64, do_sample=False)
    text = hf_dsde.enable(target).generate(
        **inputs,
        max_new_tokens=64,
        do_sample=False,
        assistant_model=draft,
        speculation_policy="dsde",
        speculation_config=config_of(**settings),
    )
    prompts = (inputs["input_ids"], inputs["attention_mask"])
    comparison = compare_outputs(target, *prompts, expected, text, pad_token_id=PAD, tolerance_ulps=8)
    assert all(row.verdict is not Verdict.DIFFERENT for row in comparison.rows), str(comparison)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("split", ["target", "draft"])
def test_a_model_spread_over_two_devices_is_run_eagerly_and_says_so(split: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    places |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    models = {"target": tiny_model().float(), "draft": noisy_copy(tiny_model().float(), 0.05)}
    for name, model in models.items():
        models[name] = accelerate.dispatch_model(model, places) if name == split else model.to(CUDA)
    target, draft = models["target"], models["draft"]
    expected = target.generate(**batch_on(CUDA), max_new_tokens=NEW_TOKENS, do_sample=False)
    hf_dsde.enable(target)
    options = {**batch_on(CUDA), "max_new_tokens": NEW_TOKENS, "do_sample": False, "assistant_model": draft}
    with pytest.warns(RunnerWarning, match="several devices"):
        text = target.generate(**options, speculation_policy="dsde")
    assert torch.equal(text, expected)
    # A second warning for the same model would be an error.
    assert torch.equal(target.generate(**options, speculation_policy="svip"), expected)


def test_a_text_that_cannot_fit_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are made for the whole text here; otherwise they begin with room for a part of it and grow."""
    monkeypatch.setattr(generation, "RESERVED_NEW_TOKENS", 10**12)
    wide = {"head_dim": 256, "num_key_value_heads": 4}
    target = tiny_model(**wide).float().to(CUDA)
    draft = noisy_copy(tiny_model(**wide).float(), 0.05).to(CUDA)
    inputs = batch_on(CUDA, rows=4)
    expected = target.generate(**inputs, max_new_tokens=8, do_sample=False)
    hf_dsde.enable(target)
    options = {**inputs, "do_sample": False, "assistant_model": draft, "speculation_policy": "static"}
    absurd = 2 * torch.cuda.get_device_properties(CUDA).total_memory // cache_bytes(target, 4, 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match=r"for 4 rows of \d+ tokens.*Lower the batch size.*max_new_tokens"):
        target.generate(**options, max_new_tokens=absurd)
    assert torch.cuda.max_memory_allocated() - before < 2**30, "only the tokens themselves were allocated"
    assert torch.equal(target.generate(**options, max_new_tokens=8), expected)


def fresh_pair(dtype: torch.dtype = torch.float32, device: torch.device = CUDA) -> tuple[PreTrainedModel, Any]:
    """Return a target of the test's own and what it generates with, given further arguments of the call."""
    target = tiny_model().to(dtype)
    draft = noisy_copy(target, 0.05).to(device)
    hf_dsde.enable(target.to(device))

    def text(policy: Any = "static", **settings: Any) -> torch.Tensor:
        return target.generate(
            **batch_on(device),
            max_new_tokens=12,
            do_sample=False,
            assistant_model=draft,
            speculation_policy=policy,
            speculation_config=config_of(**settings),
        )

    return target, text


def plain_text(target: PreTrainedModel) -> torch.Tensor:
    return target.generate(**batch_on(target.device), max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("policy", ["goodput", "marginal_goodput", "dsde", "svip"])
def test_calls_in_inference_mode_and_out_of_it_follow_each_other(policy: str) -> None:
    target, text = fresh_pair()
    expected = plain_text(target)
    for round_, mode in enumerate((torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode)):
        with mode():
            assert torch.equal(text(policy), expected)
        if round_ == 1:
            hf_dsde.release_memory(target)
    assert torch.equal(text(policy), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [False, True], ids=["plain first", "autocast first"])
def test_autocast_comes_and_goes(dtype: torch.dtype, first: bool) -> None:
    """Each call gives what the same call gives on models that no call was made with before."""

    def in_mode(text: Any, enabled: bool) -> torch.Tensor:
        with torch.autocast("cuda", dtype, enabled=enabled):
            return text("dsde")

    expected = {enabled: in_mode(fresh_pair()[1], enabled) for enabled in (False, True)}
    target, text = fresh_pair()
    for enabled in (first, not first, first, not first):
        assert torch.equal(in_mode(text, enabled), expected[enabled])
    if first:
        with torch.autocast("cuda", dtype):
            target(**batch_on(CUDA))  # its casts of the weights are gone with the block
            assert torch.equal(in_mode(text, True), expected[True])
        assert torch.equal(in_mode(text, True), expected[True])


def test_a_model_that_accelerate_has_prepared_in_between() -> None:
    accelerate = pytest.importorskip("accelerate")
    target, text = fresh_pair()
    bare = text()
    accelerate.Accelerator(mixed_precision="bf16").prepare(target)
    prepared = text()
    assert torch.equal(text(), prepared)
    accelerate.utils.extract_model_from_parallel(target, keep_fp32_wrapper=False)
    assert torch.equal(text(), bare)


@pytest.mark.filterwarnings("ignore::hf_dsde.RunnerWarning")
@pytest.mark.parametrize("reason", ["train", "hook", "memory"])
def test_a_reason_that_passes_leaves_nothing_behind(
    reason: str, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, text = fresh_pair()
    expected = plain_text(target)
    if reason == "memory":

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        with monkeypatch.context() as patch:
            patch.setattr("hf_dsde.execution.cuda_graphs._warm_up", full)
            with pytest.raises(torch.OutOfMemoryError):
                text()
    else:
        handle = target.lm_head.register_forward_hook(lambda *_: None)
        if reason == "train":
            handle.remove()
            target.train()
        assert torch.equal(text(), expected)
        handle.remove()
        target.eval()
    recorded.clear()
    assert torch.equal(text(), expected)
    assert isinstance(create_runner(target, 6, 64, RuntimeOptions()), GraphRunner)
    assert recorded


@pytest.mark.parametrize("fused", [True, False])
def test_replaced_arithmetic_is_seen_and_takes_no_more_memory_each_time(fused: bool) -> None:
    target, text = fresh_pair()
    text(fused_layers=fused)
    mlp = target.model.layers[-1].mlp
    original = mlp.forward
    reserved = []
    for factor in (-3.0, 2.0, -1.0, 0.5):
        mlp.forward = lambda x, factor=factor: factor * original(x)
        assert torch.equal(text(fused_layers=fused), plain_text(target))
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] - reserved[1] < 2**23, "memory of recordings that are not kept is used again"


def test_float64_is_computed_in_float64() -> None:
    target, text = fresh_pair(torch.float64)
    assert "torch.float64" in str(why_not_fused(target))
    for _ in range(2):
        assert torch.equal(text("dsde"), plain_text(target))


def test_other_threads_may_wait_for_the_device_while_passes_are_recorded(recorded: list[int]) -> None:
    target, text = fresh_pair()
    expected = plain_text(target)
    failures: list[Exception] = []
    done = threading.Event()

    def wait_often() -> None:
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                while not done.is_set():
                    torch.ones(1, device=CUDA).item()
        except Exception as failure:  # noqa: BLE001 - whatever it is, the test fails
            failures.append(failure)

    thread = threading.Thread(target=wait_often)
    thread.start()
    try:
        assert torch.equal(text("goodput"), expected)
    finally:
        done.set()
        thread.join()
    assert not failures
    assert recorded


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("settings", [{}, {"runner": "eager"}], ids=str)
def test_both_models_may_live_on_a_device_that_is_not_the_current_one(settings: dict[str, Any]) -> None:
    device = torch.device("cuda", 1)
    target, text = fresh_pair(device=device)
    expected = plain_text(target)
    assert torch.cuda.current_device() == 0
    for policy in ("svip", "adaedl", "gammatune_plus", "tapout", "marginal_goodput", "goodput", "dsde"):
        assert torch.equal(text(policy, **settings), expected)
