"""The example that trains an EAGLE-3 head: unrolled chains, loss and evaluation on a tiny target."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import EOS, VOCABULARY, tiny_model
from transformers import LlamaConfig, Qwen3Config

from hf_dsde.heads.eagle3 import Eagle3Head, Eagle3Settings

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMPTS = ("abc", "fed", "cab", "bad", "face", "dead")
LAYERS = (2, 3, 5)
DRAFT_IDS = (EOS, 4, 7, 9, 11, 12, 20, 21, 22, 30, 35, 40, 41, 47, 50, 58, 60, 61, 70, 77, 80, 90, 94, 95)


@pytest.fixture(scope="module")
def example():
    """The example's modules, by name."""
    sys.path.insert(0, str(EXAMPLES))
    names = ("evaluate", "evaluate_heads", "generate", "heads", "train", "unrolled")
    modules = {name: importlib.import_module(f"distillation.{name}") for name in names}
    yield SimpleNamespace(**modules)
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(autouse=True)
def accelerate_starts_again():
    """A process has one state of Accelerate, which whatever ran before may have settled otherwise."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def target():
    return tiny_model(num_hidden_layers=6)


@pytest.fixture(scope="module")
def small_head(example, target):
    """A head for `target` whose guesses are often right: close to the target's own rows, with a draft vocabulary."""
    torch.manual_seed(1)
    head = example.heads.new_head(target, DRAFT_IDS, example.heads.HeadShape(intermediate_size=48), LAYERS)
    return head.eval()


def random_head(kind, layers, **settings):
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    }  # fmt: skip
    config = (LlamaConfig if kind == "llama" else Qwen3Config)(**{**sizes, **layers})
    torch.manual_seed(0)
    head = Eagle3Head(config, Eagle3Settings(LAYERS, 32, 20, **settings))
    for parameter in head.layers.parameters():
        parameter.data *= 3
    return head.double().eval()


def chain(head, states, input_ids, first, steps):
    """Chain `first` as decoding makes it, step by step over the whole row of pairs: the logits of each step."""
    states, logits = states[:, : first + 1], []
    for step in range(steps):
        output = head(input_ids[:, 1 : first + step + 2], states)
        logits.append(output.logits[:, -1])
        states = torch.cat([states, output.hidden_states[:, -1:]], dim=1)
    return logits


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"fc_norm": True, "layers": {"num_hidden_layers": 1}}),
        ("llama", {"norm_before_residual": True, "layers": {"num_hidden_layers": 2}}),
        ("qwen3", {"norm_output": True, "layers": {"num_hidden_layers": 1, "num_key_value_heads": 4}}),
    ],
)
def test_unrolled_chains_equal_decoding_them_one_at_a_time(example, target, kind, settings):
    head = random_head(kind, **settings)
    input_ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    features, _ = example.unrolled.read_target(target, head, input_ids)
    states = head.project(list(features))
    head.set_attn_implementation(example.unrolled.UNROLLED)
    unrolled = [
        example.unrolled.draft_logits(head, each) for each in example.unrolled.unrolled(head, states, input_ids, 6)
    ]
    head.set_attn_implementation("sdpa")
    for first in range(11):
        steps = min(6, 11 - first)
        for step, logits in enumerate(chain(head, states, input_ids, first, steps)):
            torch.testing.assert_close(unrolled[step][:, first], logits, rtol=0, atol=1e-9)


def test_unrolling_asks_for_its_own_attention(example):
    head = random_head("llama", {"num_hidden_layers": 1})
    with pytest.raises(ValueError, match="set_attn_implementation"):
        next(example.unrolled.unrolled(head, torch.zeros(1, 4, 32), torch.zeros(1, 4, dtype=torch.int64), 1))


def test_loss_equals_that_of_chains_decoded_one_at_a_time(example, target, small_head):
    steps, decay, hard = 3, 0.8, 0.5
    input_ids, weights = example.train.collate([(torch.tensor([4, 5, 7, 9, 11, 4, 20, 21, 30, 2]), 4)], 0.3)
    settings = example.heads.HeadLossSettings(steps, decay, hard, chunk_tokens=64)
    loss = float(example.heads.HeadLoss(small_head, target, settings)(input_ids, weights).detach())

    small_head.set_attn_implementation("sdpa")
    row, length = input_ids[:, :10], 10
    with torch.no_grad():
        laws = target(row).logits[0][:, list(DRAFT_IDS)].softmax(-1)
        features, _ = example.unrolled.read_target(target, small_head, row)
        states = small_head.project(list(features))
        sums, counts = [0.0] * steps, [0.0] * steps
        for first in range(length - 2):
            for step, logits in enumerate(chain(small_head, states, row, first, min(steps, length - 2 - first))):
                guessed = first + step + 2
                if not all(int(row[0, index]) in DRAFT_IDS for index in range(first + 2, guessed + 1)):
                    continue
                weight = 1.0 if guessed >= 4 else 0.3
                law, draft = laws[guessed - 1], logits[0].log_softmax(-1)
                sums[step] += weight * float(-(law * draft).sum() - hard * draft[law.argmax()])
                counts[step] += weight
    parts = [decay**step * sums[step] / counts[step] for step in range(steps)]
    expected = sum(parts) / sum(decay**step for step in range(steps))
    assert loss == pytest.approx(expected, rel=1e-5)


def test_neither_chunks_nor_padding_change_the_loss(example, target, small_head):
    rows = [(torch.tensor([4, 7, 9, 11, 4, 20, 21, 30, 40, 41, 4, 7]), 3), (torch.tensor([9, 9, 11, 12, 2]), 2)]
    input_ids, weights = example.train.collate(rows, 0.3)
    losses = []
    for chunk, width in ((5, 64), (16, 12), (64, 64)):
        settings = example.heads.HeadLossSettings(chunk_tokens=chunk)
        loss = example.heads.HeadLoss(small_head, target, settings)
        losses.append(loss(input_ids[:, :width], weights[:, :width]))
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2])


@pytest.mark.parametrize("product", [True, False])
def test_gradients_made_at_once_are_those_of_the_loss(example, target, monkeypatch, product):
    rows = [(torch.tensor([4, 7, 9, 11, 4, 20, 21, 30, 40, 41, 4, 7]), 3), (torch.tensor([9, 9, 11, 12, 2]), 2)]
    input_ids, weights = example.train.collate(rows, 0.3)
    gradients = []
    for _ in range(2):
        torch.manual_seed(1)
        shape = example.heads.HeadShape(intermediate_size=48)
        head = example.heads.new_head(target, DRAFT_IDS, shape, LAYERS, train_product=product)
        loss = example.heads.HeadLoss(head, target, example.heads.HeadLossSettings(chunk_tokens=5))
        (3 * loss(input_ids, weights)).backward()
        gradients.append({name: each.grad for name, each in head.named_parameters() if each.grad is not None})
        plain = SimpleNamespace(apply=lambda function, first, second, states, *_: function(first, second, states))
        monkeypatch.setattr(example.heads, "GradientAtOnce", plain)
    assert ("lm_head.weight" in gradients[0]) == product
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
# Said by the compiler itself when it looks at what a function is given.
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:TensorFloat32 tensor cores"
)
def test_compiled_parts_of_training_give_the_gradients_of_plain_ones(example, target):
    shape, settings = example.heads.HeadShape(intermediate_size=48), example.heads.HeadLossSettings(chunk_tokens=64)
    text = torch.Generator().manual_seed(0)
    for width in (30, 70, 150):
        rows = [(torch.randint(3, VOCABULARY, (width - 9 * row,), generator=text), 4) for row in range(3)]
        batch = example.train.collate(rows, 0.3)
        found = []
        for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
            teacher = copy.deepcopy(target).to(device, dtype)
            torch.manual_seed(1)
            head = example.heads.new_head(target, DRAFT_IDS, shape, LAYERS).to(device, dtype).train()
            loss = example.heads.HeadLoss(head, teacher, settings, compile_loss=device == "cuda")
            value = loss(*(part.to(device) for part in batch))
            value.backward()
            gradients = {name: each.grad for name, each in head.named_parameters() if each.grad is not None}
            found.append({"loss": value.detach(), **gradients})
        plain, compiled = ({name: each.double().cpu() for name, each in part.items()} for part in found)
        torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-5)


def test_guesses_beyond_the_draft_vocabulary_do_not_count(example):
    settings = example.heads.HeadLossSettings(steps=3, step_decay=1.0)
    drafted = torch.tensor([False, True, True, False])
    input_ids = torch.tensor([[1, 1, 2, 3, 1, 2, 1, 0]])
    weights = torch.tensor([[0.3, 0.3, 1, 1, 1, 1, 1, 0]])
    by_step = example.heads.step_weights(input_ids, weights, drafted, settings)[:, 0]
    # Position t guesses token t + 2; token 3 cannot be drafted, and the text ends with token 6.
    counted = torch.tensor([[1, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0]])
    assert torch.equal(by_step > 0, counted.bool())
    torch.testing.assert_close(by_step.sum(dim=1), torch.full((3,), 1 / 3))
    torch.testing.assert_close(by_step[0, 0] / by_step[0, 2], torch.tensor(0.3))


def follow(head, states, row, prompt_length, candidates):
    """Target calls for an answer, by decoding with the head's own greedy guesses."""
    calls, position = 0, prompt_length
    while position < len(row):
        calls += 1
        drafts, known = [], position - 1  # pairs of true features
        tokens, fed = row[None, 1:position], states[:, :known]
        while known and len(drafts) < candidates:
            output = head(tokens, fed)
            drafts.append(DRAFT_IDS[int(output.logits[0, -1].argmax())])
            fed = torch.cat([fed, output.hidden_states[:, -1:]], dim=1)
            tokens = torch.cat([tokens, torch.tensor([drafts[-1:]])], dim=1)
        run = 0
        while run < len(drafts) and position + run < len(row) and drafts[run] == int(row[position + run]):
            run += 1
        position += run + 1
    return calls


@torch.no_grad()
def test_evaluation_equals_decoding_with_the_head(example, target, small_head):
    text = torch.Generator().manual_seed(3)
    rows = []
    small_head.set_attn_implementation("sdpa")
    for prompt_length, length in ((1, 9), (2, 14), (5, 12), (4, 5)):
        row = torch.randint(3, VOCABULARY, (length,), generator=text)
        # Every other stretch is what the head itself goes on with, so that drafts are accepted and refused.
        for index in range(max(2, prompt_length), length):
            if index % 5:
                features, _ = example.unrolled.read_target(target, small_head, row[None, :index])
                first = index - 2 - (index % 5 - 1) if index % 5 > 1 else index - 2
                states = small_head.project(list(features))
                if first >= 0:
                    logits = chain(small_head, states, row[None, :index], first, index - 1 - first)[-1]
                    row[index] = DRAFT_IDS[int(logits[0].argmax())]
        rows.append((row, prompt_length))
    settings = example.evaluate.EvaluationSettings(candidates=4, score_rows=3)
    measured = example.evaluate_heads.measure_head(small_head, target, rows, "code", 0.0, settings)
    assert small_head.config._attn_implementation == "sdpa"
    answers = sum(len(row) - prompt_length for row, prompt_length in rows)
    for candidates in range(1, 5):
        calls = 0
        for row, prompt_length in rows:
            features, _ = example.unrolled.read_target(target, small_head, row[None])
            calls += follow(small_head, small_head.project(list(features)), row, prompt_length, candidates)
        assert measured.tokens_per_call[candidates - 1] == pytest.approx(answers / calls)
    assert measured.tokens_per_call[3] > measured.tokens_per_call[0] > 1
    assert measured.positions == answers


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overlap_and_acceptance_by_depth(example, target, small_head, temperature):
    rows = [(torch.tensor([5, 6, 4, 7, 9, 20, 3, 21, 30]), 3), (torch.tensor([4, 7, 9, 20, 22, 30]), 4)]
    settings = example.evaluate.EvaluationSettings(candidates=2)
    measured = example.evaluate_heads.measure_head(small_head, target, rows, "code", temperature, settings)
    overlaps, right, inside = [], [], 0
    for row, prompt_length in rows:
        laws = target(row[None]).logits[0].float().softmax(-1)
        features, _ = example.unrolled.read_target(target, small_head, row[None])
        states = small_head.project(list(features))
        for index in range(prompt_length, len(row)):
            logits = chain(small_head, states, row[None], index - 2, 1)[0][0].float()
            draft = torch.zeros(VOCABULARY).index_copy(0, torch.tensor(DRAFT_IDS), logits.softmax(-1))
            overlaps.append(float(torch.minimum(laws[index - 1], draft).sum()))
            right.append(DRAFT_IDS[int(logits.argmax())] == int(row[index]))
            inside += int(row[index]) in DRAFT_IDS
    assert measured.overlap[0] == pytest.approx(sum(overlaps) / len(overlaps), rel=1e-5)
    assert measured.coverage == pytest.approx(inside / len(overlaps))
    if temperature == 0:
        assert measured.accepted[0] == pytest.approx(sum(right) / len(right))


def test_sampled_drafts_are_accepted_as_often_as_the_laws_overlap(example, target, small_head):
    torch.manual_seed(0)
    row = torch.randint(3, VOCABULARY, (400, 3))
    while row.shape[1] < 12:
        row = torch.cat([row, target(row).logits[:, -1].detach().softmax(-1).multinomial(1)], dim=1)
    rows = [(each, 3) for each in row]
    settings = example.evaluate.EvaluationSettings(candidates=2, score_rows=200)
    measured = example.evaluate_heads.measure_head(small_head, target, rows, "code", 1.0, settings)
    assert measured.accepted[0] == pytest.approx(measured.overlap[0], abs=0.02)


@pytest.mark.parametrize(
    ("accepted", "candidates", "calls"),
    [
        ([], 2, 0),
        ([[False, True]], 2, 1),
        ([[True, True], [True, True], [False, False], [True, True]], 2, 2),
        ([[True, True], [True, True], [False, False], [True, True]], 1, 3),
        ([[True, False], [True, True], [True, True], [False, True], [True, True]], 2, 2),
    ],
)
def test_calls_are_counted_as_decoding_makes_them(example, accepted, candidates, calls):
    assert example.evaluate_heads.count_rounds(accepted, candidates) == calls


def test_draft_vocabulary_is_what_answers_are_made_of(example):
    rows = [(torch.tensor([8, 8, 8, 5, 5, 4]), 3), (torch.tensor([8, 5, 6, 6]), 1)]
    choose = example.heads.choose_draft_vocabulary
    assert choose(rows, 3, 10, [2]) == [2, 5, 6]
    assert choose(rows, 6, 10, [9]) == [0, 1, 4, 5, 6, 9]
    assert example.heads.coverage(rows, [5, 6]) == pytest.approx(5 / 6)


@pytest.mark.parametrize(("largest", "dtype"), [(65_535, torch.uint16), (65_536, torch.int32)])
def test_rows_are_stored_in_two_bytes_a_token_where_they_fit(example, tmp_path, largest, dtype):
    from safetensors.torch import load_file

    rows = [(torch.tensor([1, largest, 3]), 2), (torch.tensor([largest - 1]), 0)]
    example.generate.write_shard(rows, tmp_path / "shard-0.safetensors")
    assert load_file(tmp_path / "shard-0.safetensors")["tokens"].dtype == dtype
    read = example.generate.read_shards(tmp_path)
    assert [(row.tolist(), length) for row, length in read] == [(row.tolist(), length) for row, length in rows]
