"""What a recording is warmed up with has one layer for all that launch the same kernels, and launches all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from recorded import NotingCapture
from test_four_bits import Linear4bit
from test_fused_decoder import COUNTS, STORED, Pair, aligned, packed_block
from tiny_heads import tiny_head
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.fused_decoder import FusedDecoder
from hf_dsde.execution.fused_head import FusedHead, fused_decoder
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.token_choice import BestTokens
from hf_dsde.kernels import reference
from hf_dsde.kernels.block import Block

LAYERS, ODD = 7, 3
ENDS = [0, LAYERS - 1]
WITH_ODD = [0, ODD, LAYERS - 1]
EVERYWHERE = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
QUANTISABLE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def model_of(family: str = "llama", **changes: Any) -> PreTrainedModel:
    return tiny_model(family, num_hidden_layers=LAYERS, **changes)


def kept(decoder: FusedDecoder) -> list[int]:
    return [layer.index for layer in decoder.representative()._layers]


def kept_of(model: PreTrainedModel, **named: Any) -> list[int]:
    return kept(FusedDecoder(model, reference, checked=True, **named))


def adapted(*configs: dict[str, Any], active: list[str] | None = None) -> Any:
    """A model with adapters named 0, 1, ..., all of which are active unless `active` says otherwise."""
    peft = pytest.importorskip("peft")
    usual = {"r": 3, "lora_alpha": 6, "target_modules": EVERYWHERE, "init_lora_weights": False}
    first, *others = [peft.LoraConfig(**{**usual, **config}) for config in configs]
    wrapper = peft.get_peft_model(model_of(), first, adapter_name="0")
    for number, config in enumerate(others, start=1):
        wrapper.add_adapter(str(number), config)
    wrapper.base_model.set_adapter(active or [str(number) for number in range(len(configs))])
    return wrapper.eval().get_base_model()


def quantised() -> PreTrainedModel:
    model = model_of(**QUANTISABLE).float()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not name.endswith("lm_head"):
            model.set_submodule(name, Linear4bit(module))
            model.get_submodule(name).weight.module = model.get_submodule(name)  # as bitsandbytes has it
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_of_layers_that_are_alike_the_first_and_the_last_are_left(family: str) -> None:
    assert kept_of(model_of(family)) == ENDS


def test_quantised_layers_that_are_alike_are_too() -> None:
    assert kept_of(quantised()) == ENDS


def test_so_are_adapted_ones() -> None:
    assert kept_of(adapted({}, {"r": 5})) == ENDS


def test_each_window_is_a_kind() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": ODD}
    assert kept_of(model_of("qwen2", **sliding)) == [0, ODD - 1, ODD, LAYERS - 1]


def test_an_adapter_on_one_layer_makes_it_a_kind() -> None:
    assert kept_of(adapted({"layers_to_transform": [ODD]})) == WITH_ODD


def _other_scaling(layer: Any) -> None:
    layer.self_attn.q_proj.scaling["0"] = 0.5


def _merged(layer: Any) -> None:
    layer.mlp.up_proj.merge()


def _switched_off(layer: Any) -> None:
    layer.mlp.up_proj.enable_adapters(False)


def _other_adapter(layer: Any) -> None:
    layer.mlp.down_proj.set_adapter(["1"])


@pytest.mark.parametrize("change", [_other_scaling, _merged, _switched_off, _other_adapter])
def test_what_an_adapter_is_told_makes_a_kind(change: Callable[[Any], None]) -> None:
    model = adapted({}, {}, active=["0"])
    assert kept_of(model) == ENDS
    change(model.model.layers[ODD])
    assert kept_of(model) == WITH_ODD


def _other_blocks(layer: Any) -> None:
    layer.mlp.up_proj.weight.quant_state.state2.blocksize = 64


def _other_numbers(layer: Any) -> None:
    layer.mlp.up_proj.weight.quant_state.quant_type = "fp4"


def _other_scales(layer: Any) -> None:
    state = layer.self_attn.v_proj.weight.quant_state
    state.absmax = state.absmax.half()


def _other_compute_dtype(layer: Any) -> None:
    layer.self_attn.v_proj.compute_dtype = torch.bfloat16


@pytest.mark.parametrize("change", [_other_blocks, _other_numbers, _other_scales, _other_compute_dtype])
def test_what_is_kept_of_a_quantised_weight_makes_a_kind(change: Callable[[Any], None]) -> None:
    model = quantised()
    change(model.model.layers[ODD])
    assert kept_of(model) == WITH_ODD


def _other_dtype(layer: Any) -> None:
    layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data.float()


def _other_stride(layer: Any) -> None:
    layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data.T.contiguous().T


def _other_alignment(layer: Any) -> None:
    norm = layer.input_layernorm
    norm.weight.data = torch.cat([norm.weight.data[:1], norm.weight.data])[1:]


def _a_bias(layer: Any) -> None:
    layer.mlp.gate_proj.bias = nn.Parameter(torch.zeros(64, dtype=torch.float64))


def _another_class(layer: Any) -> None:
    layer.mlp.gate_proj.__class__ = type("Linear", (nn.Linear,), {})


def _a_hook(layer: Any) -> None:
    layer.mlp.gate_proj.register_forward_hook(lambda *_: None)


def _another_forward(layer: Any) -> None:
    layer.mlp.gate_proj.forward = lambda x: x


def _fewer_neurons(layer: Any) -> None:
    mlp = layer.mlp
    for name, narrow in (("gate_proj", True), ("up_proj", True), ("down_proj", False)):
        weight = getattr(mlp, name).weight
        weight.data = (weight.data[:48] if narrow else weight.data[:, :48]).contiguous()


CHANGES = [
    _other_dtype, _other_stride, _other_alignment, _a_bias, _another_class, _a_hook, _another_forward, _fewer_neurons
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_makes_a_layer_launch_other_kernels_makes_a_kind(change: Callable[[Any], None]) -> None:
    model = model_of()
    change(model.model.layers[ODD])
    assert kept_of(model) == WITH_ODD


def test_layers_that_give_hidden_states_are_left() -> None:
    assert kept_of(model_of(), hidden_layers=(LAYERS, 2, 0)) == [0, 2, LAYERS - 1]


def test_it_is_found_once_and_anew_for_a_decoder_that_ends_earlier() -> None:
    decoder = FusedDecoder(model_of(), reference, hidden_layers=(2,))
    assert decoder.representative() is decoder.representative()
    assert kept(decoder.ending_after(5)) == [0, 4]
    assert kept(decoder) == [0, 2, LAYERS - 1]
    assert kept(decoder.ending_after(1)) == [0]


class Signatures(TorchDispatchMode):
    """Notes what an operation's kernel depends on: numbers, and of tensors all but what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add((func, _signature(args), _signature(list((kwargs or {}).items()))))
        return func(*args, **(kwargs or {}))


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.data_ptr() % 16 == 0
    return tuple(map(_signature, value)) if isinstance(value, list | tuple) else str(value)


def signatures(run: Callable[[], Any]) -> set[Any]:
    with Signatures() as noted:
        run()
    return noted.seen


def passes(block: Block) -> dict[str, Callable[[FusedDecoder, Any], Any]]:
    keep = torch.tensor([1, 3])
    last = Block(
        block.tokens[:2].clone(), torch.tensor([0, 1]), block.positions[:2].clone(),
        torch.tensor([0, 1, 2, 2], dtype=torch.int32), torch.tensor([1, 1, 0, 0], dtype=torch.int32), 1,
    )  # fmt: skip
    return {
        "all tokens": lambda decoder, cache: decoder(block, cache, 64, None),
        "some tokens": lambda decoder, cache: decoder(block, cache, 64, keep),
        "a last layer of some": lambda decoder, cache: decoder(block, cache, 64, keep, last),
        "storing": lambda decoder, cache: decoder.store(block, cache, 64),
    }


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": model_of,
    "qwen3": partial(model_of, "qwen3", attention_bias=True),
    "windows": partial(model_of, "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=ODD),
    "an adapter": lambda: adapted({"layers_to_transform": [ODD]}),
    "an adapter on the last": lambda: adapted({"layers_to_transform": [LAYERS - 1]}),
    "an adapter on the first": lambda: adapted({"layers_to_transform": [0]}),
}


@pytest.mark.parametrize("place", [0, 1, ODD, LAYERS - 2, LAYERS - 1])
@pytest.mark.parametrize("change", [_other_stride, _other_alignment, _a_bias, _fewer_neurons])
def test_it_launches_all_kernels_wherever_the_odd_layer_is(change: Callable[[Any], None], place: int) -> None:
    model = copy.deepcopy(model_of())
    change(model.model.layers[place])
    check_launches(model)


@pytest.mark.parametrize("name", MODELS)
def test_it_launches_all_kernels(name: str) -> None:
    check_launches(MODELS[name]())


def check_launches(model: PreTrainedModel, hidden_layers: tuple[int, ...] = (LAYERS, 2)) -> None:
    """Whatever a pass over all layers asks torch for, that over the few asks for too, and gives as much."""
    pair = Pair(model, STORED)
    block = packed_block(*aligned(pair.texts, STORED, COUNTS, 4, "left"))
    whole = FusedDecoder(model, reference, checked=True, hidden_layers=hidden_layers)
    for decoder in (whole, whole.ending_after(5), FusedDecoder(model, reference, checked=True)):
        for name, run in passes(block).items():
            assert signatures(lambda: run(decoder, pair.other.cache)) == signatures(  # noqa: B023
                lambda: run(decoder.representative(), pair.other.cache)  # noqa: B023
            ), name
            outputs = [run(each, pair.other.cache) for each in (decoder, decoder.representative())]
            shapes = [
                [tensor.shape for tensor in (output if name == "storing" else output.hidden)] for output in outputs
            ]
            assert shapes[0] == shapes[1]


def test_a_head_of_several_layers_keeps_its_first() -> None:
    """It alone reads an embedding beside a state."""
    head = tiny_head(tiny_model(num_hidden_layers=3), config={"num_hidden_layers": 6})
    decoder = fused_decoder(head, reference, checked=True)
    assert isinstance(decoder, FusedHead)
    assert kept(decoder) == [0, 1, 5]


class Rehearsal:
    """Layers that were run to warm up, and then to record, of each recording."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list[tuple[int, int]] = []
        self.allocated: list[bool] = []
        self.runner: GraphRunner | None = None
        self._run = 0
        capture, project = NotingCapture.__call__, FusedDecoder._project

        def counting(decoder: FusedDecoder, *arguments: Any) -> Tensor:
            self._run += 1
            return project(decoder, *arguments)

        def noting(own: NotingCapture, body: Callable[[], Any], warm_up: Callable[[], Any] | None = None) -> Any:
            assert self.runner is not None
            self.allocated.append(self.runner.cache.is_allocated)
            runs = [0]

            def counted(part: Callable[[], Any]) -> Any:
                self._run = 0
                output = part()
                runs.append(self._run)
                return output

            replay = capture(own, partial(counted, body), partial(counted, warm_up or body))
            self.layers.append((runs[1], runs[2]))
            return replay

        monkeypatch.setattr(FusedDecoder, "_project", counting)
        monkeypatch.setattr(NotingCapture, "__call__", noting)

    def of(self, model: PreTrainedModel, **settings: Any) -> GraphRunner:
        runner = create_runner(model, 4, 64, RuntimeOptions(**settings), "graph")
        assert isinstance(runner, GraphRunner)
        self.runner = runner
        return runner


@pytest.fixture
def rehearsal(recording: list[NotingCapture], monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    return Rehearsal(monkeypatch)


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        (("padded", 4, 3, 3, False, None), (2, LAYERS)),
        (("padded", 4, 3, 1, False, None), (2, LAYERS)),
        (("padded", 4, 1, 1, False, 4), (2, 4)),
        (("packed", 16, 4, False), (2, LAYERS)),
        (("store", 64), (2, LAYERS)),
        (("chain", 4, BestTokens(96), None), (2, LAYERS)),
        (("chain", 4, BestTokens(96), 5), (2, 5)),
    ],
    ids=str,
)
def test_every_fused_pass_is_warmed_up_with_few_layers_over_a_cache_that_has_its_buffers(
    shape: tuple[Any, ...], layers: tuple[int, int], rehearsal: Rehearsal
) -> None:
    runner = rehearsal.of(model_of())
    with runner.active(), torch.no_grad():
        runner._record(shape, 64)
    assert rehearsal.layers == [layers]
    assert rehearsal.allocated == [True]


def test_a_models_own_pass_is_warmed_up_whole(rehearsal: Rehearsal) -> None:
    model = model_of()
    calls: list[int] = []
    runner = rehearsal.of(model, fused_layers=False)
    original = runner._execute
    runner._execute = lambda *arguments: calls.append(1) or original(*arguments)  # type: ignore[method-assign,func-returns-value]
    with runner.active(), torch.no_grad():
        for width in (1, 2):
            runner.forward(
                RowBlock(torch.zeros(4, width, dtype=torch.long), torch.zeros(4, width, dtype=torch.long)), 1
            )
    assert rehearsal.layers == [(0, 0)]
    assert len(calls) == 3, "one to make buffers, two to record"
