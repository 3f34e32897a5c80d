"""Logits processors that remember earlier calls are found out before a text is wrong; those that do not are served."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import EOS, VOCABULARY, noisy_copy, ragged_batch, tiny_model
from tiny_rounds import Notes
from tiny_text import tiny_tokenizer
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process

import hf_dsde
from hf_dsde import BatchGenerator
from hf_dsde.batch.row_processors import RowProcessors
from hf_dsde.decoding.processing.state import RemembersCallsError, StateWatch, refuse_known
from hf_dsde.decoding.sampling import BlockProcessor
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.policies.base import Signal

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

INPUTS = ragged_batch([3, 5, 2], seed=1)
NEW_TOKENS = 12
FEW = list(range(3, 43))
"""Tokens that grammars here are made of."""


def allowing(scores: Tensor, row: int, tokens: Any) -> None:
    mask = torch.ones_like(scores[row], dtype=torch.bool)
    mask[torch.as_tensor(tokens)] = False
    scores[row] = scores[row].masked_fill(mask, float("-inf"))


class CountsCalls(LogitsProcessor):
    """Forbids other tokens in each call; what it forbids in the first ones is not likely anyway."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores if self.calls < 6 else scores.index_fill(1, torch.tensor(FEW[:20]), -1e9)


class Moves(LogitsProcessor):
    """A matcher that takes in the last token in every call but its first: like those of grammar packages."""

    def __init__(self) -> None:
        self.states: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.states:
            self.states = [0] * len(input_ids)
        else:
            for row, token in enumerate(input_ids[:, -1].tolist()):
                assert token in self.allowed(row), "the grammar does not allow this token"
                self.states[row] += token
        for row in range(len(scores)):
            allowing(scores, row, self.allowed(row))
        return scores

    def allowed(self, row: int) -> list[int]:
        return [token for token in FEW if (token + self.states[row]) % 3]


class TakesInWhatIsNew(LogitsProcessor):
    """A matcher that takes in what a text has beyond the one before: asked the same again, it answers the same."""

    def __init__(self) -> None:
        self.length, self.sum = 0, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.sum += int(input_ids[:, self.length :].sum())
        self.length = input_ids.shape[1]
        return scores + torch.nn.functional.one_hot(torch.tensor(self.sum % VOCABULARY), VOCABULARY) * 5.0


class DrawsNumbers(LogitsProcessor):
    """Forbids tokens at random."""

    def __init__(self) -> None:
        self.numbers = random.Random(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([self.numbers.randrange(VOCABULARY)]), float("-inf"))


class CountsOutOfSight(LogitsProcessor):
    """Counts where nobody can look."""

    def __init__(self) -> None:
        self.calls = itertools.count()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([next(self.calls) % VOCABULARY]), float("-inf"))


def counting_constraint() -> Callable[[int, Tensor], list[int]]:
    calls = 0

    def allowed(row: int, text: Tensor) -> list[int]:
        nonlocal calls
        calls += 1
        return FEW[calls % 7 :: 2]

    return allowed


def own(make: Callable[[], LogitsProcessor]) -> Callable[[], dict[str, Any]]:
    return lambda: {"logits_processor": LogitsProcessorList([make()])}


REMEMBERING: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "counts its calls": (own(CountsCalls), "CountsCalls"),
    "moves on in every call": (own(Moves), "Moves"),
    "takes in what is new": (own(TakesInWhatIsNew), "TakesInWhatIsNew"),
    "counts out of sight": (own(CountsOutOfSight), "CountsOutOfSight"),
    "draws numbers": (own(DrawsNumbers), "DrawsNumbers"),
    "a constraint that counts": (
        lambda: {"prefix_allowed_tokens_fn": counting_constraint()},
        "PrefixConstrainedLogitsProcessor",
    ),
}


class Memoises(LogitsProcessor):
    """Remembers answers by text, as caches do."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answers = []
        for row in input_ids:
            key = tuple(row.tolist())
            if key not in self.known:
                self.known[key] = torch.zeros(VOCABULARY).index_fill(0, torch.tensor(FEW[sum(key) % 5 :: 2]), -3.0)
            answers.append(self.known[key])
        return scores + torch.stack(answers)


class MakesItsMaskLater(LogitsProcessor):
    """Makes a tensor in its first call, and notes what it was shown last."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.isin(torch.arange(scores.shape[1]), torch.tensor(FEW[::2]))
        self.last = input_ids
        return torch.where(self.mask, scores - 2.0, scores)


class HalvesInPlace(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, : scores.shape[1] // 2] *= 0.5
        return scores


class Halves(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return HalvesInPlace()(input_ids, scores.clone())


class Cached(LogitsProcessor):
    """Asks a cached function of its own."""

    def __init__(self) -> None:
        self.token = functools.cache(lambda last: (last * 7) % VOCABULARY)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = torch.tensor([self.token(int(row[-1])) for row in input_ids])
        return scores.scatter_add(1, tokens[:, None], torch.full((len(scores), 1), 3.0, dtype=scores.dtype))


FORGETTING = [Memoises, MakesItsMaskLater, HalvesInPlace, Cached]


@functools.cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = hf_dsde.enable(tiny_model("llama"))
    target.generation_config.pad_token_id = 0
    return target, noisy_copy(target, 0.05)


def speculative(policy: Any = "static", **options: Any) -> Tensor:
    target, draft = pair()
    text: Tensor = target.generate(
        **INPUTS, max_new_tokens=NEW_TOKENS, assistant_model=draft, speculation_policy=policy, **options
    )
    return text


def job(policy: Any = "static", **options: Any) -> tuple[list[list[int]], BatchGenerator]:
    target, draft = pair()
    generator = BatchGenerator(
        target,
        tiny_tokenizer(),
        assistant_model=draft,
        speculation_policy=policy,
        batch_size=2,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        **options,
    )
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*INPUTS.values(), strict=True)]
    results = list(generator.stream([{"input_ids": prompt} for prompt in prompts]))
    assert not any(result.error for result in results), results
    return [list(result.token_ids) for result in sorted(results, key=lambda result: result.index)], generator


@pytest.mark.parametrize(
    "policy", [hf_dsde.StaticPolicy(3), hf_dsde.StaticPolicy(0), "svip"], ids=["three drafts", "no drafts", "svip"]
)
@pytest.mark.parametrize("name", REMEMBERING)
def test_a_processor_that_remembers_its_calls_is_refused(name: str, policy: Any) -> None:
    options, named = REMEMBERING[name]
    with pytest.raises(ValueError, match=f"{named}.*several positions at once.*Leave out `speculation_policy`"):
        speculative(policy, do_sample=False, **options())


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_job_refuses_it_too(name: str) -> None:
    options, named = REMEMBERING[name]
    with pytest.raises(ValueError, match=f"{named}.*several positions at once.*Leave out `speculation_policy`"):
        job(**options())


@pytest.mark.parametrize("processor", FORGETTING)
def test_a_processor_that_answers_by_text_alone_is_served(processor: type[LogitsProcessor]) -> None:
    target, _ = pair()
    plain = target.generate(**INPUTS, max_new_tokens=NEW_TOKENS, do_sample=False, **own(processor)())
    bare = target.generate(**INPUTS, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert plain.shape != bare.shape or not torch.equal(plain, bare), "the processor makes no difference here"
    assert torch.equal(speculative(do_sample=False, **own(processor)()), plain)


@pytest.mark.parametrize("processor", FORGETTING)
def test_a_job_serves_it_too(processor: type[LogitsProcessor]) -> None:
    target, _ = pair()
    texts, _ = job(**own(processor)())
    for row, (ids, mask) in enumerate(zip(*INPUTS.values(), strict=True)):
        prompt = ids[mask.bool()][None]
        plain = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            **own(processor)(),
        )
        assert texts[row] == plain[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("kind", [BlockProcessor, lambda chain: RowProcessors([chain] * 3)], ids=["batch", "rows"])
def test_raw_logits_are_not_written_to(kind: Callable[[LogitsProcessorList], Any]) -> None:
    sequences = SequenceBatch(**INPUTS, max_new_tokens=4, scratch=3, pad_token=0)
    logits = torch.randn(3, 2, VOCABULARY)
    before = logits.clone()
    kind(LogitsProcessorList([HalvesInPlace()]))(logits, sequences, [2, 2, 1])
    assert torch.equal(logits, before)


def test_signals_come_from_raw_logits_whatever_a_processor_writes_into() -> None:
    by_processor = []
    for processor in (Halves, HalvesInPlace):
        notes = Notes(Signal.ENTROPY, Signal.KLD)
        texts, generator = job(hf_dsde.StaticPolicy(3), speculation_listeners=[notes], **own(processor)())
        assert [record.index for record in notes.events] == list(range(generator.statistics.rounds))
        by_processor.append((texts, [(record.outcome.entropy, record.outcome.kld) for record in notes.events]))
    (texts, seen), (same_texts, same) = by_processor
    assert texts == same_texts
    assert len(seen) == len(same) > 2
    for one, other in zip(seen, same, strict=True):
        torch.testing.assert_close(one, other)


def test_each_position_is_asked_about_once_after_the_first_two_texts() -> None:
    asked = []

    class Notes(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            asked.append(input_ids.shape[1])
            return scores

    processor = Notes()
    watch = StateWatch(processor)
    for length in (3, 4, 4, 5, 6):
        watch(processor, torch.zeros(1, length).long(), torch.zeros(1, 5))
    assert asked == [3, 3, 4, 3, 4, 4, 5, 6]


def test_what_fails_at_once_fails_as_it_would_in_plain_generate() -> None:
    class Fails(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            raise KeyError("of its own")

    with pytest.raises(KeyError, match="of its own"):
        speculative(**own(Fails)())


def test_processors_of_transformers_with_state_are_known() -> None:
    with pytest.raises(RemembersCallsError, match=r"SynthIDTextWatermarkLogitsProcessor.*remembers its last call"):
        refuse_known(logits_process.SynthIDTextWatermarkLogitsProcessor(5, [3, 4], 16, 0, 8, torch.device("cpu")))


# Grammar packages, where they are installed.


def test_xgrammar_is_refused_before_anything_runs() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor as GrammarProcessor

    tokenizer = tiny_tokenizer()
    info = xgrammar.TokenizerInfo(tokenizer.convert_ids_to_tokens(range(VOCABULARY)), stop_token_ids=[EOS])
    grammar = xgrammar.GrammarCompiler(info).compile_regex("[a-f]+")
    refuses_at_once(lambda: GrammarProcessor(grammar))


def test_outlines_is_refused_before_anything_runs() -> None:
    core = pytest.importorskip("outlines_core")
    backend = pytest.importorskip("outlines.backends.outlines_core")
    tokens = {token: [index] for token, index in tiny_tokenizer().get_vocab().items() if index > EOS}
    index = core.Index("[a-f]+", core.Vocabulary(EOS, tokens))
    refuses_at_once(lambda: backend.OutlinesCoreLogitsProcessor(index, "torch"))


def refuses_at_once(make: Callable[[], Any]) -> None:
    """By its class; and the same processor under another name is found out."""
    with pytest.raises(ValueError, match="remembers its last call"):
        speculative(logits_processor=LogitsProcessorList([make()]))
    target, draft = pair()
    with pytest.raises(ValueError, match="remembers its last call"):
        BatchGenerator(target, tiny_tokenizer(), assistant_model=draft, logits_processor=LogitsProcessorList([make()]))

    class Wrapped(LogitsProcessor):
        def __init__(self) -> None:
            self.inner = make()

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return self.inner(input_ids, scores)

    with pytest.raises(ValueError, match=r"Wrapped.*several positions"):
        speculative(**own(Wrapped)(), do_sample=False)


def test_lm_format_enforcer_gives_plain_text() -> None:
    enforcer = pytest.importorskip("lmformatenforcer")
    from lmformatenforcer.tokenenforcer import TokenEnforcer, TokenEnforcerTokenizerData

    tokenizer = tiny_tokenizer()
    regular = [(index, token, False) for token, index in tokenizer.get_vocab().items() if index > EOS]
    data = TokenEnforcerTokenizerData(
        regular, lambda ids: "".join(tokenizer.convert_ids_to_tokens(ids)), EOS, False, VOCABULARY
    )

    def options() -> dict[str, Any]:
        enforce = TokenEnforcer(data, enforcer.RegexParser("[a-fG-K]([a-z]|[G-Z])+"))

        def allowed(row: int, text: Tensor) -> list[int]:
            tokens: list[int] = enforce.get_allowed_tokens(text.tolist()).allowed_tokens
            return tokens

        return {"prefix_allowed_tokens_fn": allowed, "do_sample": False}

    target, _ = pair()
    plain = target.generate(**INPUTS, max_new_tokens=NEW_TOKENS, **options())
    assert torch.equal(speculative(**options()), plain)
