"""The Triton kernels without a GPU, compiled for one that is not there. `interpreted_*.py` run them interpreted."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace

import pytest
import torch
from four_bit_cases import FourBitCase, make_four_bits

from hf_dsde.kernels.four_bit_plan import plan_four_bits

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a CUDA device the kernels are tested as they are"),
]


def _compile(kernel, types, constants, warps, stages=3, capability=90, **more):
    """Compile for a compute capability, an H100's if none is given, with pointers and strides in multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name not in constants | types]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages, **more}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize(
    ("queries", "divided", "window", "tree"),
    [(4, True, 0, 0), (24, False, 4096, 0), (64, False, 0, 0), (64, True, 0, 64), (24, False, 4096, 16)],
)
def test_attention_compiles_to_tensor_cores_fed_by_asynchronous_copies(
    tmp_path, monkeypatch, queries, divided, window, tree
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from hf_dsde.kernels.attention_plan import plan_launch

    plan = plan_launch(queries, 64, 4096, 128, 2, 132)
    compiled = _compile_attention(plan, divided=divided, window=window, tree=tree)
    code = compiled.asm["ptx"]
    assert "mma" in code
    assert "cp.async" in code
    assert compiled.metadata.shared <= 113 * 1024  # two programs per multiprocessor


def _compile_attention(plan, dim=128, divided=False, window=0, capability=90, tree=0, dtype="bf16"):
    from hf_dsde.kernels import attention as attention_kernel

    pointers = dict.fromkeys(("q", "keys", "values"), f"*{dtype}") | dict.fromkeys(
        ("rows", "positions", "slots", "ancestors"), "*i64"
    )
    types = pointers | {
        "starts": "*i32",
        "counts": "*i32",
        "total": "i32",
        "query_blocks": "i32",
        "splits": "i32",
        "log_scale": "fp32",
    }
    types |= dict.fromkeys(("out", "logsums"), "*fp32" if divided else f"*{dtype}")
    sizes = {"group": 4, "window": window, "dim": dim, "value_dim": dim, "block_dim": dim, "block_value": dim}
    blocks = {"block_m": plan.block_m, "block_n": plan.block_n, "divided": divided, "fewest": 128, "precision": "tf32"}
    kernel = attention_kernel._attention_kernel
    blocks |= {"chained": capability >= 90, "tree_columns": tree}
    return _compile(kernel, types, sizes | blocks, plan.warps, plan.stages, capability)


@pytest.mark.parametrize(
    ("capability", "shared", "dtype"), [(80, 163, "bf16"), (86, 99, "fp16"), (89, 99, "bf16"), (90, 227, "fp16")]
)
def test_planned_attention_gets_the_shared_memory_that_it_needs(tmp_path, monkeypatch, capability, shared, dtype):
    """Of A100; A10 and 3090; L4 and 4090; H100. Heads of 256 with many queries need the most."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from hf_dsde.kernels.attention_plan import plan_launch

    for queries, dim in ((4, 128), (128, 128), (128, 256)):
        plan = plan_launch(queries, 64, 4096, dim, 2, 100, shared << 10)
        compiled = _compile_attention(plan, dim=dim, capability=capability, dtype=dtype)
        assert compiled.metadata.shared <= shared << 10
        assert f"f32.{dtype.replace('fp', 'f')}." in compiled.asm["ptx"], "no tensor cores"
        if queries == 4:
            assert plan == plan_launch(queries, 64, 4096, dim, 2, 100)


@pytest.mark.parametrize(("capability", "shared"), [(70, 96), (75, 64)])
def test_before_ampere_attention_would_fit_and_have_no_tensor_cores(tmp_path, monkeypatch, capability, shared):
    """Of V100; T4. That is why there `why_no_kernels` leaves passes to the model's own modules."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from hf_dsde.kernels.attention_plan import plan_launch

    plan = plan_launch(128, 64, 4096, 256, 2, 40, shared << 10)
    compiled = _compile_attention(plan, dim=256, capability=capability, dtype="fp16")
    assert compiled.metadata.shared <= shared << 10
    assert "mma" not in compiled.asm["ptx"]
    assert "cp.async" not in compiled.asm["ptx"]


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    import contextlib

    from hf_dsde.kernels import attention as attention_kernel
    from hf_dsde.kernels import distribution as distribution_kernel
    from hf_dsde.kernels import divergence as divergence_kernel
    from hf_dsde.kernels import elementwise as kernels
    from hf_dsde.kernels import four_bits, launching, low_rank
    from hf_dsde.kernels import linear as skinny_linear
    from hf_dsde.kernels.block import Block
    from hf_dsde.kernels.reference import LowRank

    current, launched = [], []

    @contextlib.contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    class Noting:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *values, **named: launched.append((self.name, any(current[-1] is value for value in values)))

    monkeypatch.setattr(launching.torch.cuda, "device_of", device_of)
    names = set()
    modules = kernels, attention_kernel, distribution_kernel, divergence_kernel, skinny_linear, low_rank, four_bits
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel") and name.startswith("_")]:
            monkeypatch.setattr(module, name, Noting(name))
            names.add(name)
    states, cache, index = torch.zeros(3, 4, 16), torch.zeros(1, 2, 4096, 16), torch.zeros(3, dtype=torch.int64)
    matrix = torch.zeros(3, 16)
    kernels.rms_norm(matrix, matrix[0], 1e-5)
    kernels.add_rms_norm(matrix, matrix, matrix[0], 1e-5)
    kernels.silu_mul(matrix, matrix)
    kernels.rotate_and_store(states, states[:, :2], states[:, :2], matrix, matrix, cache, cache, index, index)
    kernels.entropy_and_top(matrix)
    kernels.kl_divergence(matrix[None], matrix[None, :, :7], torch.arange(7))
    kernels.linears(matrix, [torch.zeros(8, 16)])
    kernels.gated_linear(matrix, torch.zeros(8, 16), torch.zeros(8, 16))
    kernels.add_low_rank(matrix, [matrix], [[LowRank(matrix, torch.zeros(16, 3), 1.0)]])
    product = make_four_bits(FourBitCase(1, 4096, 32), torch.float16)
    four_bits.launch_four_bits(*product, replace(plan_four_bits(1, 32, 4096), splits=2))
    block = Block(index, index, index, torch.zeros(1).int(), torch.zeros(1).int(), 1)
    kernels.ragged_attention(states, cache, cache, block, 1.0, None, 4096)
    assert {name for name, _ in launched} == names
    # Merging is launched after attention has been, by the same function.
    assert all(guarded for name, guarded in launched if name != "_merge_kernel")


def test_the_other_kernels_compile(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from hf_dsde.kernels import attention as attention_kernel
    from hf_dsde.kernels import distribution as distribution_kernel
    from hf_dsde.kernels import divergence as divergence_kernel
    from hf_dsde.kernels import elementwise as kernels
    from hf_dsde.kernels import nucleus as nucleus_kernel

    half = dict.fromkeys(("x", "residual", "weight", "normed", "summed"), "*bf16") | {"total": "i32", "eps": "fp32"}
    for add, tile, dim in ((True, 1, 5120), (False, 8, 128)):
        block = {"dim": dim, "block": max(128, 8192 if dim > 4096 else dim), "tile": tile, "add": add}
        assert _compile(kernels._norm_kernel, half, block, 8).metadata.num_warps == 8
    gated = dict.fromkeys(("gate", "up", "out"), "*bf16")
    assert "ld.global.v4" in _compile(kernels._silu_mul_kernel, gated, {"dim": 8960, "block": 1024}, 4).asm["ptx"]
    asked = dict.fromkeys(("logits", "entropy", "top"), "*fp32")
    code = _compile(distribution_kernel._entropy_and_top_kernel, asked, {"block": distribution_kernel.BLOCK}, 16).asm[
        "ptx"
    ]
    assert "ld.global.v4" in code
    asked = dict.fromkeys(("target", "draft", "divergence"), "*fp32") | {"ids": "*i64", "log_floor": "fp32"}
    sizes = {"mapped": True, "block": divergence_kernel.BLOCK}
    assert "ld.global.v4" in _compile(divergence_kernel._kl_divergence_kernel, asked, sizes, 16).asm["ptx"]
    asked = dict.fromkeys(("scores", "best", "kept"), "*fp32") | {"top_p": "fp32"}
    sizes = {"block": nucleus_kernel.BLOCK, "block_best": 32}
    assert "ld.global.v4" in _compile(nucleus_kernel._nucleus_kernel, asked, sizes, 16).asm["ptx"]
    merged = {
        "means": "*fp32",
        "logsums": "*fp32",
        "values": "*bf16",
        "out": "*bf16",
        "rows": "*i64",
        "positions": "*i64",
    }
    sizes = {"value_dim": 128, "block_value": 128, "splits": 8}
    assert _compile(attention_kernel._merge_kernel, merged, sizes, 2).asm["cubin"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_rotation_keeps_the_rounding_between_product_and_sum(tmp_path, monkeypatch, dtype):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from hf_dsde.kernels import elementwise as kernels

    launched = []
    kernel = kernels._rotate_and_store_kernel
    monkeypatch.setattr(kernels, "_rotate_and_store_kernel", Recorder(launched))
    states, caches = torch.zeros(3, 12, 128), torch.zeros(2, 4, 9, 128)
    index = torch.zeros(3, dtype=torch.int64)
    kernels.rotate_and_store(
        states, states[:, :4], states[:, :4], states[:, 0], states[:, 0], caches, caches, index, index
    )
    ((_, given),) = launched
    types = dict.fromkeys(("q", "k", "v", "cos", "sin", "out", "keys", "values"), f"*{dtype}")
    types |= {"rows": "*i64", "slots": "*i64"}
    options = {"warps": given.pop("num_warps"), "enable_fp_fusion": given.pop("enable_fp_fusion")}
    code = _compile(kernel, types, given, **options).asm["ptx"]
    assert re.search(r"mul\.rn\.\w*f(16|32)", code)
    assert not re.search(r"fma\.rn\.\w*f(16|32)", code)


class Recorder:
    """Stands for a kernel, and takes down its launches: arguments by position and by name."""

    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *values, **named: self.launched.append((values, named))


@pytest.mark.parametrize("tokens", [1, 16, 40])
@pytest.mark.parametrize(("rows", "width"), [((1536, 512, 512), 1536), ((4096, 1024, 1024), 4096), ((1536,), 6144)])
def test_products_of_few_tokens_compile_to_vector_copies_into_tensor_cores(tmp_path, monkeypatch, rows, width, tokens):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from hf_dsde.kernels import linear as skinny_linear

    for name, pointers in (("_linears_kernel", LINEARS_POINTERS), ("_gated_kernel", ("x", "gate", "up", "out"))):
        launched, kernel = [], getattr(skinny_linear, name)
        monkeypatch.setattr(skinny_linear, name, Recorder(launched))
        x = torch.zeros(tokens, width, dtype=torch.bfloat16)
        weights = [torch.empty(size, width, dtype=torch.bfloat16) for size in rows]
        if name == "_linears_kernel":
            skinny_linear.linears(x, weights, [torch.empty(rows[0], dtype=torch.bfloat16), *[None] * (len(rows) - 1)])
        else:
            skinny_linear.gated_linear(x, weights[0], weights[0])
        ((values, given),) = launched
        assert len(values) + len(given) - 1 == len(kernel.arg_names)
        warps = given.pop("num_warps")
        compiled = _compile(kernel, dict.fromkeys(pointers, "*bf16"), given, warps)
        code = compiled.asm["ptx"]
        assert "mma" in code
        sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+)", code)
        assert set(sizes) == {"0x10"}
        assert compiled.metadata.shared <= 113 * 1024  # two programs per multiprocessor


LINEARS_POINTERS = ("x", *(f"{name}{place}" for name in ("weight", "bias", "out") for place in range(3)))


@pytest.mark.parametrize(
    ("adapters", "ranks", "gated", "tokens", "capability"),
    [
        (torch.bfloat16, (16, 16, 16), False, 8, 90),
        (torch.float32, (8, 64), True, 64, 80),
    ],
    ids=str,
)
def test_low_rank_adapters_compile_to_vector_reads(tmp_path, monkeypatch, adapters, ranks, gated, tokens, capability):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from hf_dsde.kernels import low_rank
    from hf_dsde.kernels.reference import LowRank

    launched, originals = [], {}
    for name in ("_down_kernel", "_up_kernel"):
        originals[name] = getattr(low_rank, name)
        monkeypatch.setattr(low_rank, name, Recorder(launched))
    states = torch.zeros(tokens, 4096, dtype=torch.bfloat16)
    bases = [torch.zeros(tokens, 1024, dtype=torch.bfloat16) for _ in ranks]
    terms = [
        [LowRank(torch.zeros(rank, 4096, dtype=adapters), torch.zeros(1024, rank, dtype=adapters), 2.0)]
        for rank in ranks
    ]
    low_rank.gated_low_rank(states, bases, terms) if gated else low_rank.add_low_rank(states, bases, terms)
    own = f"*{'bf16' if adapters == torch.bfloat16 else 'fp32'}"
    for kernel, (values, given) in zip(originals.values(), launched, strict=True):
        if "chained" in given:
            given["chained"] = capability >= 90
        assert len(values) + len(given) - 1 == len(kernel.arg_names)
        warps = given.pop("num_warps")
        types = {"sums": "*fp32", "x": "*bf16"} | {f"scaling{place}": "fp32" for place in range(3)}
        types |= {f"{name}{place}": "*bf16" for name in ("base", "out") for place in range(3)}
        for place in range(3):  # where there is no module, the input stands for its weights
            types |= dict.fromkeys((f"down{place}", f"up{place}"), own if place < len(ranks) else "*bf16")
        types |= dict.fromkeys(("total", *(f"{name}{place}" for name in ("rows", "rank") for place in range(3))), "i32")
        compiled = _compile(kernel, types, given, warps, capability=capability)
        code = compiled.asm["ptx"]
        assert "mma" in code
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+)", code)
        assert "0x10" in copies or "ld.global.v4" in code
        assert compiled.metadata.shared <= 99 * 1024
