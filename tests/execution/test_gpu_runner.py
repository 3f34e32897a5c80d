"""Recorded passes on a GPU: eager ones' logits, one wait for the device per round, and what cannot be recorded."""

from __future__ import annotations

import functools
import warnings
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from stored import store_texts
from tiny_models import VOCABULARY, noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_text import tiny_tokenizer
from tiny_trees import LENGTHS, Trees
from transformers import PreTrainedModel
from waits import RecordsRows, noted_waits

import hf_dsde
from hf_dsde.config import SpeculationConfig
from hf_dsde.execution import pass_shapes
from hf_dsde.execution.create_runner import RunnerWarning, create_runner
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.pass_shapes import packed_bucket
from hf_dsde.execution.row_block import RowBlock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    # Said once per process when the mode is switched on.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
CUDA = torch.device("cuda", 0)
NEW_TOKENS = 48

EACH_ROUND = "utils/transfers.py::wait"
"""Where the host learns how a round ended."""
EACH_DRAFT_STEP = "decoding/stop_flag.py::nobody_drafts"
"""Where it learns whether rows draft on, when a policy decides that on the device."""
PACKING = "decoding/target_pass.py::stage"
"""Where it learns how long drafts became that a policy ended on the device, if packing a pass over them may pay."""
AFTERWARDS = "measurement/clock.py::seconds_until"
"""Reads marks in front of what the round has waited for: they have passed."""
GENERATE = ("integration/hooks.py::_generate", "elsewhere")
"""`generate` itself, before and after the rounds."""
SETTING_UP = {
    "integration/generation.py::_scalar",
    "decoding/loop.py::_begin",
    "decoding/prefill.py::store_prompts",
    "decoding/prefill.py::_record",
    "decoding/lengths.py::start",
    "decoding/lengths.py::first",
    "policies/acceptance_model.py::__init__",
    "integration/images.py::counts_positions",
    "decoding/sequences.py::__init__",
    "decoding/sequences.py::text",
}
"""Where a call may wait a few times, however long its text gets."""
MOST_SETTING_UP = 16


@functools.cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return an enabled target that ends its text only where a call says so, and a draft, in float32 on the GPU."""
    target = tiny_model().float()
    target.generation_config.eos_token_id = None
    return hf_dsde.enable(target.to(CUDA)), noisy_copy(tiny_model().float(), 0.05).to(CUDA)


def batch(rows: int = 8) -> dict[str, torch.Tensor]:
    return {name: tensor.to(CUDA) for name, tensor in ragged_batch(random_lengths(rows)).items()}


@functools.cache
def plain_and_ends() -> tuple[torch.Tensor, list[int] | None]:
    """Return greedy text, and end-of-sequence tokens that end some of its rows early."""
    target, _ = pair()
    endless = target.generate(**batch(), max_new_tokens=NEW_TOKENS, do_sample=False)
    ends = sorted({int(endless[row, step - NEW_TOKENS]) for row, step in ((1, 9), (4, 20), (6, 31))})
    text = target.generate(**batch(), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=ends, pad_token_id=0)
    return text, ends


def call(
    policy: str | hf_dsde.StoppingPolicy, do_sample: bool, ends: list[int] | None, **arguments: Any
) -> hf_dsde.SpeculativeGenerateOutput:
    """Generate; the same draws in every call."""
    target, draft = pair()
    torch.manual_seed(11)
    return target.generate(
        **batch(),
        max_new_tokens=NEW_TOKENS,
        do_sample=do_sample,
        eos_token_id=ends,
        pad_token_id=0,
        assistant_model=draft,
        speculation_policy=policy,
        return_dict_in_generate=True,
        **arguments,
    )


def test_waiting_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the counts below would show nothing."""
    flags = torch.tensor([1, 0, 2], device=CUDA)
    event = torch.cuda.Event()
    event.record()
    with noted_waits(monkeypatch) as waits:
        flags.tolist()
        bool(flags.any())
        flags[flags > 0]
        torch.tensor([1, 2], device=CUDA)
        event.synchronize()
    assert waits == {"elsewhere": 5}


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", hf_dsde.available_policies())
def test_a_round_waits_for_the_device_once(policy: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, ends = plain_and_ends()
    if do_sample:
        ends = None  # drawn early in every row, they would leave too few rounds
    call(policy, do_sample, ends)  # records what it needs, and waits for that
    with noted_waits(monkeypatch) as waits:
        output = call(policy, do_sample, ends)
    if not do_sample:
        assert torch.equal(output.sequences, expected)
    statistics = output.speculation_statistics
    rounds = len(statistics.rounds)
    assert rounds > MOST_SETTING_UP / 2, "too few rounds to tell them from setting up"
    assert waits.pop(EACH_ROUND) == rounds
    inside = waits.pop(EACH_DRAFT_STEP, 0)
    assert inside <= statistics.draft_steps
    assert waits.pop(PACKING, 0) <= (rounds if inside else 0)
    assert waits.pop(AFTERWARDS, 0) <= 3 * rounds
    for place in GENERATE:
        waits.pop(place, None)
    assert set(waits) <= SETTING_UP, waits
    assert sum(waits.values()) <= MOST_SETTING_UP, waits


@functools.cache
def plain_with_stop_strings() -> tuple[torch.Tensor, list[str]]:
    """Return greedy text, and stop strings that end some of its rows early: one within a token, one across two."""
    text, ends = plain_and_ends()
    new = text[:, -NEW_TOKENS:].tolist()
    tokenizer = tiny_tokenizer()
    longest, shorter = sorted(new, key=lambda row: row.count(0))[:2]
    before, last = tokenizer.convert_ids_to_tokens(longest[24:26])
    strings = [tokenizer.convert_ids_to_tokens(shorter[12]), before[-1] + last[0]]
    target, _ = pair()
    arguments = {"eos_token_id": ends, "pad_token_id": 0, "stop_strings": strings, "tokenizer": tokenizer}
    text = target.generate(**batch(), max_new_tokens=NEW_TOKENS, do_sample=False, **arguments)
    return text, strings


@pytest.mark.parametrize("policy", ["dsde", "static", "no drafts"])
def test_streams_and_stop_strings_wait_for_nothing_more(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, strings = plain_with_stop_strings()
    _, ends = plain_and_ends()
    chosen = hf_dsde.StaticPolicy(0) if policy == "no drafts" else policy
    arguments = {"stop_strings": strings, "tokenizer": tiny_tokenizer()}
    call(chosen, False, ends, **arguments)
    streamer = RecordsRows()
    with noted_waits(monkeypatch) as waits:
        output = call(chosen, False, ends, streamer=streamer, **arguments)
    assert torch.equal(output.sequences, expected)
    width = expected.shape[1] - batch()["input_ids"].shape[1]
    assert [row + [0] * (width - len(row)) for row in streamer.rows] == expected[:, -width:].tolist()
    assert waits.pop(EACH_ROUND) == len(output.speculation_statistics.rounds)
    assert waits.pop(AFTERWARDS, 0) <= 3 * len(output.speculation_statistics.rounds)
    for place in GENERATE:
        waits.pop(place, None)
    assert set(waits) <= SETTING_UP, waits
    assert sum(waits.values()) <= MOST_SETTING_UP, waits


PROCESSORS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.2, "encoder_repetition_penalty": 1.1},
    "n-grams": {"no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 4},
    "words": {"bad_words_ids": [[20], [21, 22], [5, 6, 7]], "sequence_bias": [[[7, 8], 2.0]], "suppress_tokens": [9]},
    "lengths": {
        "min_new_tokens": 8,
        "forced_eos_token_id": 2,
        "begin_suppress_tokens": [11, 12],
        "exponential_decay_length_penalty": (12, 1.05),
        "eos_token_id": [2, 3],
    },
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
    "more sampling": {
        "do_sample": True,
        "top_h": 0.9,
        "min_p": 0.01,
        "typical_p": 0.95,
        "epsilon_cutoff": 1e-4,
        "eta_cutoff": 1e-4,
        "remove_invalid_values": True,
        "renormalize_logits": True,
    },
}


@pytest.mark.parametrize("policy", ["static", "goodput", "svip"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors_are_no_reason_to_wait(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"do_sample": False, "ends": None, **PROCESSORS[name]}
    options["ends"] = options.pop("eos_token_id", None)
    call(policy, **options)
    with noted_waits(monkeypatch) as waits:
        output = call(policy, **options)
    statistics = output.speculation_statistics
    rounds = len(statistics.rounds)
    assert rounds > 8
    assert waits.pop(EACH_ROUND) == rounds
    inside = waits.pop(EACH_DRAFT_STEP, 0)
    assert inside <= statistics.draft_steps
    assert waits.pop(PACKING, 0) <= (rounds if inside else 0)
    assert waits.pop(AFTERWARDS, 0) <= 3 * rounds
    for place in GENERATE:
        waits.pop(place, None)
    made = {place: times for place, times in waits.items() if place.startswith("decoding/processing/")}
    # What serves a whole call is made at its first block: masks of tokens, biased sequences.
    assert all(place.endswith(("::_make", "::_make_rows", "::token_mask", "::_forced_tokens")) for place in made), made
    assert sum(made.values()) <= MOST_SETTING_UP, made
    assert set(waits) - set(made) <= SETTING_UP, waits


@pytest.mark.parametrize("name", ["penalties", "n-grams", "words", "lengths"])
def test_logits_processors_on_a_gpu_give_plain_text(name: str) -> None:
    target, _ = pair()
    options = {"eos_token_id": None, **PROCESSORS[name]}
    plain = target.generate(**batch(), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **options)
    ends = options.pop("eos_token_id")
    assert torch.equal(call("static", False, ends, **options).sequences, plain)


def test_only_policies_that_stop_inside_a_round_wait_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ends = plain_and_ends()
    for policy, stops in (("static", False), ("dsde", False), ("svip", True)):
        call(policy, False, ends)
        with noted_waits(monkeypatch) as waits:
            call(policy, False, ends)
        assert (waits[EACH_DRAFT_STEP] > 0) == stops


@torch.no_grad()
def compare_runners(model: PreTrainedModel, rounds: int, **settings: Any) -> GraphRunner:
    """Run the same random blocks through recorded and eager passes while rows leave; return the recording runner."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(CUDA)

    lengths = torch.tensor(random_lengths(12), device=CUDA)
    rows, longest = len(lengths), int(lengths.max())
    eager = create_runner(model, rows, 64, RuntimeOptions(), "eager")
    recorded = create_runner(model, rows, 64, RuntimeOptions(**settings), "graph")
    assert isinstance(recorded, GraphRunner)
    prompts = draw(3, VOCABULARY, rows, longest)
    active = torch.ones(rows, dtype=torch.bool, device=CUDA)
    with ExitStack() as held:
        for runner in (eager, recorded):
            held.enter_context(runner.active())
            store_texts(runner, prompts, lengths)
        for number in range(rounds):
            width = int(draw(1, 8, 1))
            counts = torch.where(active, draw(1, width + 1, rows), 0)
            tokens = draw(3, VOCABULARY, rows, width)
            column = torch.arange(width, device=CUDA)
            positions = (lengths[:, None] + column).masked_fill(column >= counts[:, None], -1)
            real, bound = positions >= 0, int(lengths.max()) + width
            expected = eager.forward(RowBlock(tokens, positions), bound).logits[real]
            logits = [recorded.forward(RowBlock(tokens, positions), bound).logits]
            if recorded.packs:
                size = packed_bucket(int(counts.sum()))
                logits.append(recorded.forward(RowBlock(tokens, positions, counts=counts, size=size), bound).logits)
            for result in logits:
                torch.testing.assert_close(result[real], expected, rtol=1e-4, atol=1e-4)
            # What is not accepted is written again in the next round.
            lengths = lengths + torch.minimum(draw(0, 8, rows), counts)
            if number % 7 == 6:
                active[int(active.nonzero()[number % int(active.sum())])] = False
                active[int(active.nonzero()[0])] = False
                for runner in (eager, recorded):
                    runner.keep_rows(active.nonzero()[:, 0].tolist())
    return recorded


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("mistral", {}),
        ("llama", {"fused_layers": False}),
        ("gemma3", {}),
        ("gemma2", {}),
        ("gpt2", {}),
    ],
    ids=str,
)
def test_recorded_passes_give_the_logits_of_eager_ones_while_rows_leave(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_shapes, "IDLE_PLACES", 0)
    recorded = compare_runners(tiny_model(family).float().to(CUDA), rounds=30, **settings)
    assert recorded.recording_costs.passes > 1
    fused = family in ("llama", "qwen3", "mistral") and not settings
    assert len(recorded.live_rows) == (4 if fused else 12), "12 rows, of which 4 are left"


@pytest.mark.parametrize(
    ("family", "settings"), [("llama", {}), ("mistral", {}), ("llama", {"fused_layers": False}), ("gpt2", {})], ids=str
)
@torch.no_grad()
def test_recorded_passes_give_the_hidden_states_of_transformers(family: str, settings: dict[str, Any]) -> None:
    model, layers = tiny_model(family).float().to(CUDA), (2, 0, 1)
    texts = ragged_batch([40, 40, 40], seed=4)["input_ids"].to(CUDA)
    lengths = [31, 9, 18]
    expected = model(input_ids=texts, output_hidden_states=True).hidden_states
    runner = create_runner(model, 3, 64, RuntimeOptions(**settings), "graph", hidden_layers=layers)
    positions = torch.tensor(lengths, device=CUDA)[:, None] + torch.arange(5, device=CUDA)
    with runner.active():
        stored = store_texts(runner, texts, lengths)
        passes = [runner.forward(RowBlock(texts.gather(1, positions), positions), 40).hidden for _ in range(2)]
    assert isinstance(runner, GraphRunner)
    for place, layer in enumerate(layers):
        prompts = torch.cat([expected[layer][row, :length] for row, length in enumerate(lengths)])
        torch.testing.assert_close(stored[place], prompts, rtol=1e-4, atol=1e-4)
        wanted = expected[layer].gather(1, positions[..., None].expand(-1, -1, expected[layer].shape[-1]))
        for hidden in passes:
            torch.testing.assert_close(hidden[place], wanted, rtol=1e-4, atol=1e-4)
    assert runner.recording_costs.passes > 0


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(
    ("kind", "settings", "size"),
    [("graph", {}, None), ("graph", {}, 32), ("graph", {"fused_layers": False}, None), ("eager", {}, None)],
    ids=str,
)
def test_every_token_of_a_tree_gets_what_its_path_gives(
    family: str, kind: str, settings: dict[str, Any], size: int | None
) -> None:
    model, trees = tiny_model(family).float().to(CUDA), Trees.drawn()
    runner = create_runner(model, len(LENGTHS), 32, RuntimeOptions(**settings), kind, hidden_layers=(1, 2))
    for _ in range(2):  # the second time, everything is recorded
        trees.check(model, trees.run(runner, trees.block(size)), 1e-4, (1, 2))
    assert isinstance(runner, GraphRunner) == (kind == "graph")


def test_recorded_passes_survive_a_cache_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_dsde.execution.graph_runner.CAPACITY_STEP", 16)
    monkeypatch.setattr("hf_dsde.execution.graph_runner.MIN_REACH", 16)
    for settings in ({}, {"fused_layers": False, "view_bucket": 16}):
        recorded = compare_runners(tiny_model().float().to(CUDA), rounds=20, **settings)
        assert recorded.cache.capacity > 80


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler would use them, which float32 is not
def test_passes_that_the_user_has_compiled_are_recorded_and_keep_the_text() -> None:
    target, draft = (model.to(CUDA) for model in (tiny_model().float(), noisy_copy(tiny_model().float(), 0.05)))
    expected = target.generate(**batch(), max_new_tokens=24, do_sample=False)
    hf_dsde.enable(target)
    for model in (target, draft):
        model.compile(dynamic=False)
    config = SpeculationConfig(options=RuntimeOptions(fused_layers=False))
    for recorded_now in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RunnerWarning)  # it would be run eagerly
            output = target.generate(
                **batch(),
                max_new_tokens=24,
                do_sample=False,
                assistant_model=draft,
                speculation_policy="static",
                speculation_config=config,
                return_dict_in_generate=True,
            )
        assert torch.equal(output.sequences, expected)
        assert (output.speculation_statistics.recorded_passes > 0) == recorded_now


def test_a_model_that_cannot_be_recorded_is_run_eagerly_and_the_device_goes_on_working() -> None:
    """The experts of this one are chosen on the host. Last in its file, as it could break the device for others."""
    target = tiny_model("mixtral").float().to(CUDA)
    draft = noisy_copy(tiny_model("mixtral").float(), 0.05).to(CUDA)
    inputs = batch()
    expected = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    options = {**inputs, "max_new_tokens": 20, "assistant_model": draft, "speculation_policy": "dsde"}
    hf_dsde.enable(target)
    with pytest.warns(RunnerWarning, match="MixtralForCausalLM is run eagerly.*recording failed") as caught:
        assert torch.equal(target.generate(**options, do_sample=False), expected)
    assert len([w for w in caught if w.category is RunnerWarning]) == 2, "target and draft, once each"
    # Nobody is warned again, numbers can still be drawn, and other models are recorded.
    torch.manual_seed(2)
    sampled = target.generate(**options, do_sample=True)
    torch.manual_seed(2)
    assert torch.equal(target.generate(**options, do_sample=True), sampled)
    compare_runners(tiny_model().float().to(CUDA), rounds=5)
