"""Adapters of other packages: what they ask of a package, what they make of its answer, and the packages themselves.

The fakes have the interfaces of economize 0.3.2 and flashspec 0.3.1 as far as the adapters use them, and decode with
plain `generate`. Where a package is installed, it is run as well.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_models import EOS, PAD, ragged_batch
from tiny_pair import tiny_pair

from hf_dsde.bench.baselines import BASELINES, Request
from hf_dsde.bench.peer_methods import PEERS, PeerBuilder
from hf_dsde.bench.peers import EconomizePeer, FlashSpecPeer, PeerOutput
from hf_dsde.pairs import Pair

NEW_TOKENS = 12
ACCEPTANCE = [(3, 3), (3, 0), (3, 1)]


def plain(target, prompt, new_tokens, end):
    """Greedy tokens of one prompt, the end token included and nothing behind it."""
    ids = target.generate(
        prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=new_tokens, do_sample=False,
        eos_token_id=list(end) or None, pad_token_id=PAD,
    )  # fmt: skip
    return ids[0, len(prompt) :]


@dataclass
class FakeEconomize:
    """The package, which writes down how it was used."""

    has_graphs: bool = False
    drafts: list[dict] = field(default_factory=list)
    calls: list[dict] = field(default_factory=list)
    detached: int = 0

    def decode_config(self, cycle_length=4, cuda_graphs=False, verifier=None):
        return SimpleNamespace(cycle_length=cycle_length, cuda_graphs=cuda_graphs, verifier=verifier)

    def apply(self, target, config):
        self.drafts.append({"folder": config.model, "files": {path.name for path in Path(config.model).iterdir()}})
        return SimpleNamespace(
            detach=self.detach,
            decoder=lambda decoding: SimpleNamespace(graphs=object() if self.has_graphs else None),
            decode_batch=lambda prompts, new_tokens, **how: self.decode(target, prompts, new_tokens, **how),
        )

    def detach(self):
        self.detached += 1

    def decode(self, target, prompts, new_tokens, *, stop, decoding, selector=None):
        self.calls.append({"prompts": prompts, "stop": stop, "decoding": decoding, "selector": selector})
        rows = [plain(target, prompt, new_tokens, stop or ()) for prompt in prompts]
        return [SimpleNamespace(tokens=row, acceptance=ACCEPTANCE) for row in rows]


@dataclass
class FakeFlashSpec:
    configs: list[SimpleNamespace] = field(default_factory=list)
    calls: list[dict] = field(default_factory=list)

    def engine(self, config, drafters, target):
        self.configs.append(config)
        (drafter,) = drafters
        strategy = getattr(config, "drafter_strategy", "auto")
        gamma = getattr(config.sampling, "gamma", 4)
        model_only = SimpleNamespace(gamma=gamma, fallback=None, step_gamma=lambda fallback: gamma)
        mixture = SimpleNamespace(gamma=6, fallback=0, step_gamma=lambda fallback: 2 if fallback else 6)

        def generate(input_ids, max_new_tokens, eos_token_ids):
            self.calls.append({"prompt": input_ids, "drafter_at": drafter.temperature, "config": config})
            row = plain(target.model, input_ids[0], max_new_tokens, eos_token_ids)
            filled = torch.cat([row, row.new_full((max_new_tokens - len(row),), -1)])
            steps = [SimpleNamespace(proposed=d, accepted=a) for d, a in ACCEPTANCE]
            return SimpleNamespace(output_ids=filled[None], n_tokens_generated=len(row), arm_steps=steps)

        return SimpleNamespace(
            arms=[mixture if strategy == "auto" else model_only],
            compiled=config.compile and config.device.startswith("cuda"),
            drafter_strategy="composite" if strategy == "auto" else strategy,
            generate=generate,
        )


class Wrapper:
    def __init__(self, name, device, dtype, model):
        self.model, self.temperature = model, None

    def set_temperature(self, temperature):
        self.temperature = temperature


def module(name, **attributes):
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


@pytest.fixture
def economize(monkeypatch):
    fake = FakeEconomize()
    names = {"apply": fake.apply, "DecodeConfig": fake.decode_config, "TopPSampler": SimpleNamespace}
    monkeypatch.setitem(sys.modules, "economize", module("economize", **names))
    monkeypatch.setitem(sys.modules, "economize.techniques", module("economize.techniques"))
    draft_model = module("draft_model", DraftModelConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "economize.techniques.draft_model", draft_model)
    return fake


@pytest.fixture
def flashspec(monkeypatch):
    fake = FakeFlashSpec()
    configs = dict.fromkeys(("FlashSpecConfig", "SamplingConfig", "BanditConfig"), SimpleNamespace)
    monkeypatch.setitem(sys.modules, "flashspec", module("flashspec", SpeculativeEngine=fake.engine, **configs))
    monkeypatch.setitem(sys.modules, "flashspec.engine", module("flashspec.engine"))
    monkeypatch.setitem(sys.modules, "flashspec.engine.verifier", module("verifier", TargetModel=Wrapper))
    monkeypatch.setitem(sys.modules, "flashspec.engine.hf_drafter", module("hf_drafter", HuggingFaceDrafter=Wrapper))
    return fake


@pytest.fixture
def pair():
    return tiny_pair(torch.float64)


@pytest.fixture(autouse=True)
def fresh_peers():
    yield
    for builder in PEERS.values():
        builder._built.clear()


def generated(pair, inputs, request):
    """What plain `generate` answers, prompts included."""
    return BASELINES["generate"](pair, inputs, request).sequences


def ending_early(pair):
    """Let texts end: a token that greedy text of the ragged batch has soon becomes the end token."""
    inputs = ragged_batch([3, 7])
    row = generated(pair, inputs, Request(NEW_TOKENS))[0, 7:]
    pair.target.generation_config.eos_token_id = [EOS, int(row[4])]
    return inputs


@pytest.mark.parametrize("stop_at_eos", [False, True])
def test_an_answer_is_prompts_and_generated_rows_padded_behind_their_ends(economize, pair, stop_at_eos):
    inputs = ending_early(pair)
    request = Request(NEW_TOKENS, stop_at_eos=stop_at_eos)
    answer = PEERS["economize"](pair, inputs, request)
    assert torch.equal(answer.sequences, generated(pair, inputs, request))
    ended = answer.statistics["emitted"] < 2 * NEW_TOKENS
    assert ended == stop_at_eos


def test_a_package_gets_prompts_without_their_padding(economize, pair):
    inputs = ragged_batch([3, 1, 7])
    PEERS["economize"](pair, inputs, Request(NEW_TOKENS))
    (call,) = economize.calls
    assert [len(prompt) for prompt in call["prompts"]] == [3, 1, 7]
    assert torch.equal(call["prompts"][0], inputs["input_ids"][0, 4:])


def test_economize_reads_the_draft_from_a_folder_that_is_gone_afterwards(economize, pair):
    PEERS["economize"].build(pair)
    (draft,) = economize.drafts
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= draft["files"]
    assert not Path(draft["folder"]).exists()


def test_economize_keeps_its_own_draft_length_unless_told_otherwise(economize, pair):
    assert PeerBuilder(EconomizePeer).build(pair).settings["draft_length"] == 3
    peer = PeerBuilder(EconomizePeer, draft_length=6).build(pair)
    assert peer.settings["draft_length"] == 6
    peer.generate(**ragged_batch([2]), new_tokens=2, temperature=0.0)
    assert economize.calls[-1]["decoding"].cycle_length == 7


@pytest.mark.parametrize(("compiled", "asked"), [(None, True), (False, False), (True, True)])
def test_economize_uses_graphs_unless_told_otherwise(economize, pair, compiled, asked):
    economize.has_graphs = asked
    peer = PeerBuilder(EconomizePeer, compiled=compiled).build(pair)
    peer.generate(**ragged_batch([2]), new_tokens=2, temperature=0.0)
    assert economize.calls[-1]["decoding"].cuda_graphs is asked
    assert peer.settings["compiled"] is asked


def test_the_first_call_of_a_kind_is_made_three_times_where_graphs_are_recorded(economize, pair):
    economize.has_graphs = True
    peer = PEERS["economize"].build(pair)
    counts = []
    for lengths, temperature in (([2, 5], 0.0), ([2, 5], 0.0), ([2, 5, 3], 0.0), ([2, 5], 0.5), ([2, 5], 0.5)):
        before = len(economize.calls)
        output = peer.generate(**ragged_batch(lengths), new_tokens=3, temperature=temperature)
        counts.append(len(economize.calls) - before)
        assert output.tokens == 3 * len(lengths), "rehearsals are not counted"
    assert counts == [3, 1, 3, 3, 1]


def test_economize_samples_with_the_rejection_verifier_and_a_seed_of_torchs(economize, pair):
    peer, seeds = PEERS["economize"].build(pair), []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        peer.generate(**ragged_batch([2]), new_tokens=2, temperature=0.7)
        call = economize.calls[-1]
        seeds.append(call["selector"].seed)
        assert call["selector"].temperature == 0.7
        assert call["decoding"].verifier == "rejection"
    assert seeds[0] == seeds[2] != seeds[1]
    peer.generate(**ragged_batch([2]), new_tokens=2, temperature=0.0)
    assert economize.calls[-1]["selector"] is None
    assert economize.calls[-1]["decoding"].verifier is None


def test_flashspec_is_cut_to_what_it_generated(flashspec, pair):
    ending_early(pair)
    inputs = {name: tensor[:1, 4:] for name, tensor in ragged_batch([3, 7]).items()}
    request = Request(NEW_TOKENS, stop_at_eos=True)
    answer = PEERS["flashspec"](pair, inputs, request)
    assert torch.equal(answer.sequences, generated(pair, inputs, request))
    assert answer.statistics["emitted"] == answer.sequences.shape[1] - 3 < NEW_TOKENS


def test_flashspec_has_an_engine_for_each_temperature_on_shared_models(flashspec, pair):
    peer = PEERS["flashspec"].build(pair)
    for temperature in (0.7, 0.0, 0.7):
        peer.generate(**ragged_batch([2]), new_tokens=2, temperature=temperature)
        call = flashspec.calls[-1]
        assert call["config"].sampling.temperature == call["drafter_at"] == temperature
    assert len(flashspec.configs) == 2


def test_flashspec_runs_uncompiled_with_its_own_mixture_unless_told_otherwise(flashspec, pair):
    settings = PEERS["flashspec"].build(pair).settings
    assert flashspec.configs[0].compile is False
    assert (settings["strategy"], settings["lookup_length"], settings["draft_length"]) == ("composite", 6, 2)
    settings = PeerBuilder(FlashSpecPeer, draft_length=5).build(pair).settings
    assert (settings["strategy"], settings["lookup_length"], settings["draft_length"]) == ("bandit", None, 5)


def test_compiled_code_that_the_package_does_not_have_is_refused(flashspec, pair):
    with pytest.raises(ValueError, match="`compiled` is True, but flashspec compiles nothing on cpu"):
        PEERS["flashspec_compiled"].build(pair)
    assert flashspec.configs[0].compile is True


def test_flashspec_says_why_it_takes_one_row_only(flashspec, pair):
    assert PEERS["flashspec"].refusal(1, 0.5) is None
    assert "one row, not 2" in PEERS["flashspec"].refusal(2, 0.0)
    with pytest.raises(ValueError, match="one row, not 2"):
        PEERS["flashspec"](pair, ragged_batch([2, 3]), Request(4))
    with pytest.raises(ValueError, match="one row, not 2"):
        FlashSpecPeer(*vars(pair).values(), draft_length=None, compiled=None).generate(
            **ragged_batch([2, 3]), new_tokens=4, temperature=0.0
        )
    assert flashspec.calls == []


def test_economize_takes_any_number_of_rows(economize):
    assert PEERS["economize"].refusal(64, 1.0) is None


def test_statistics_count_positions_as_a_slow_count_does():
    rounds = [(3, 3), (3, 0), (6, 4), (2, 1), (1, 1)]
    output = PeerOutput((torch.zeros(9), torch.zeros(5)), rounds)
    drafted, accepted = [0] * 6, [0] * 6
    for most, kept in rounds:
        for place in range(6):
            drafted[place] += place < most
            accepted[place] += place < kept
    statistics = output.statistics()
    assert statistics["drafted_by_position"] == drafted == [5, 4, 3, 1, 1, 1]
    assert statistics["accepted_by_position"] == accepted == [4, 2, 2, 1, 0, 0]
    assert statistics["acceptance_by_position"] == [a / d for a, d in zip(accepted, drafted, strict=True)]
    assert statistics["acceptance_rate"] == pytest.approx(9 / 15)
    assert statistics["mean_draft_length"] == 3
    assert statistics["tokens_per_round"] == pytest.approx((9 + 5) / 5)
    assert statistics["emitted"] == 14


def test_without_drafts_only_the_tokens_are_known():
    assert PeerOutput((torch.zeros(2),), []).statistics() == {"emitted": 2}


def test_a_peer_is_built_once_for_a_pair_and_anew_after_closing(economize, pair):
    builder = PEERS["economize"]
    first = builder.build(pair)
    assert builder.build(Pair(pair.target, pair.draft, pair.tokenizer)) is first
    builder.close()
    assert economize.detached == 1
    builder.close()
    first.close()
    assert economize.detached == 1, "closing twice does nothing"
    assert builder.build(pair) is not first


def test_a_pair_that_nobody_has_any_longer_is_let_go_without_closing(flashspec):
    pair = tiny_pair()
    target = weakref.ref(pair.target)
    PEERS["flashspec"].build(pair)
    flashspec.configs.clear()
    del pair
    gc.collect()
    assert target() is None


@pytest.mark.parametrize("name", PEERS)
def test_a_missing_package_is_named_with_what_to_install(name, pair, monkeypatch):
    package = PEERS[name].peer.package
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install {package}==0\.3\.\d"):
        PEERS[name](pair, ragged_batch([2]), Request(4))


@pytest.mark.parametrize("bad", [{"new_tokens": 0}, {"temperature": -0.5}])
def test_arguments_are_checked(economize, pair, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        PEERS["economize"].build(pair).generate(**ragged_batch([2]), **{"new_tokens": 2, "temperature": 0.0, **bad})
    with pytest.raises(ValueError, match="draft_length"):
        PeerBuilder(EconomizePeer, draft_length=0)


REAL = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}"))
    for name in ("economize", "flashspec")
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("draft_length", [None, 3])
@pytest.mark.parametrize("stop_at_eos", [False, True])
@pytest.mark.parametrize("name", REAL)
def test_greedy_tokens_of_the_package_are_those_of_generate(name, stop_at_eos, draft_length):
    # In float32, which is the widest that both packages compute in.
    pair = tiny_pair(torch.float32)
    inputs = ending_early(pair)
    if name == "flashspec":
        inputs = {key: tensor[:1, 4:] for key, tensor in inputs.items()}
    request = Request(NEW_TOKENS, stop_at_eos=stop_at_eos)
    builder = PeerBuilder(PEERS[name].peer, draft_length=draft_length)
    answer = builder(pair, inputs, request)
    assert torch.equal(answer.sequences, generated(pair, inputs, request))
    assert 0 < answer.statistics["acceptance_rate"] < 1
    assert answer.statistics["settings"]["version"] == PEERS[name].peer.tested_version
    if draft_length is not None:
        assert answer.statistics["mean_draft_length"] == draft_length


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", REAL)
def test_sampling_of_the_package_follows_torchs_seed_and_closing_leaves_the_models(name):
    pair = tiny_pair(torch.float32)
    inputs, answers = ragged_batch([5]), []
    before = generated(pair, inputs, Request(NEW_TOKENS))
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        answers.append(PEERS[name](pair, inputs, Request(NEW_TOKENS, temperature=1.0)).sequences)
    assert torch.equal(answers[0], answers[2])
    assert not torch.equal(answers[0], answers[1])
    PEERS[name].close()
    assert torch.equal(generated(pair, inputs, Request(NEW_TOKENS)), before)
