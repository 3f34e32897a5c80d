"""Weights of four bits without a GPU: what plain torch makes of them, how launches are planned, what is compiled.

`interpreted_four_bits.py` runs the kernel interpreted, which looks codes up in memory. PTX that moves bytes instead is
run here, one instruction after another.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace

import pytest
import torch
from four_bit_cases import FOUR_BIT_CASES, FourBitCase, make_four_bits, slow_four_bit_linear, slow_numbers, slow_weight
from test_kernels import Recorder, _compile

from hf_dsde.kernels import reference
from hf_dsde.kernels.four_bit_plan import MOST_TOKENS, SLICE, FourBitPlan, held, plan_four_bits, reads_four_bits
from hf_dsde.kernels.four_bit_weights import dequantised
from hf_dsde.utils import tuning
from hf_dsde.utils.tuning import HOPPER, SAFE

triton_only = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
compiled_only = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(), reason="compiled where no GPU runs it"
)
SIZES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (1536, 576), (32, 64))


@pytest.mark.parametrize("case", FOUR_BIT_CASES.values(), ids=FOUR_BIT_CASES)
def test_plain_torch_reads_what_the_format_says(case: FourBitCase) -> None:
    product = make_four_bits(case, torch.float32)
    expected = slow_weight(product.weight)
    torch.testing.assert_close(dequantised(product.weight, torch.float32).double(), expected, rtol=1e-6, atol=1e-7)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = dequantised(product.weight, dtype)
        assert rounded.dtype == dtype
        assert float((rounded == expected.to(dtype)).double().mean()) > 0.99, "rounded once, from float32"
    found = reference.four_bit_linear(*product)
    torch.testing.assert_close(found.double(), slow_four_bit_linear(product), rtol=1e-5, atol=1e-4)


def test_a_weight_read_in_another_way_is_another_weight() -> None:
    weight = make_four_bits(FourBitCase(1, 256, 40, inner=32), torch.float32).weight
    assert weight.nested is not None
    right = slow_weight(weight)
    for wrong in (
        weight._replace(codes=(weight.codes << 4) | (weight.codes >> 4)),
        weight._replace(absmax=weight.absmax.roll(1)),
        weight._replace(kind="fp4"),
        weight._replace(blocksize=128),
        weight._replace(nested=weight.nested._replace(offset=torch.tensor(0.0))),
        weight._replace(nested=weight.nested._replace(blocksize=64)),
    ):
        assert float((dequantised(wrong, torch.float32) - right).abs().max()) > 0.05


def run_ptx(code: str, given: int) -> list[int]:
    """What the registers $0 to $3 hold after code has run with bytes in $4: a move, shifts, masks, permutations."""
    registers = {"$4": given}

    def value(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    for operation, target, *sources in re.findall(
        r"(\w+)\.\w+ ([^\s,]+), ([^\s,;]+)(?:, ([^\s,;]+))?(?:, (\w+))?;", code
    ):
        if operation == "reg":
            continue
        values = [value(source) for source in sources if source]
        if operation == "prmt":
            low, high, places = values
            both = (low | high << 32).to_bytes(8, "little")
            chosen = [places >> 4 * place & 15 for place in range(4)]
            assert max(chosen) < 8, "the highest bit of a place asks for signs"
            registers[target] = int.from_bytes(bytes(both[place] for place in chosen), "little")
        else:
            computed = {
                "mov": lambda first: first,
                "shr": lambda first, second: first >> second,
                "and": lambda first, second: first & second,
                "or": lambda first, second: first | second,
            }[operation](*values)
            registers[target] = computed
    return [registers[f"${place}"] for place in range(4)]


@triton_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_moved_bytes_are_the_numbers_of_the_codes(kind: str, dtype: torch.dtype) -> None:
    from hf_dsde.kernels.four_bits import lookup

    code = lookup(kind, dtype)
    bits = [each & 0xFFFF for each in torch.tensor(slow_numbers(kind)).to(dtype).view(torch.int16).tolist()]
    assert len(set(bits)) >= 15
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 256, (300, 4), generator=generator).tolist()
    for stored in (*drawn, *([byte, 255 - byte, byte // 2, 0] for byte in range(256))):
        found = run_ptx(code, int.from_bytes(bytes(stored), "little"))
        high, low = (
            [bits[code] for code in codes] for codes in zip(*(divmod(byte, 16) for byte in stored), strict=True)
        )
        assert found == [
            high[0] | high[1] << 16, high[2] | high[3] << 16, low[0] | low[1] << 16, low[2] | low[3] << 16,
        ]  # fmt: skip


@pytest.mark.parametrize("shared", [64, 99, 163, 227], ids=["T4", "L4", "A100", "H200"])
@pytest.mark.parametrize("row", [HOPPER, SAFE], ids=["Hopper", "safe"])
def test_launches_are_planned_within_the_shared_memory_of_the_device(row: tuning.Tuning, shared: int) -> None:
    for tokens in (1, 4, 16, 17, 32, 33, 64):
        for rows, width in SIZES:
            plan = plan_four_bits(tokens, rows, width, shared=shared << 10, tuning=row)
            assert held(plan) <= shared << 10
            assert tokens <= plan.block_m <= MOST_TOKENS
            assert plan.block_n >= 16
            assert plan.stages >= 2
            assert 1 <= plan.splits <= max(1, width // (SLICE * plan.slices))
            assert plan.slices in (1, plan.warps), "a warp without a slice would compute what another one does"


def test_the_inner_dimension_is_divided_where_rows_are_few() -> None:
    assert plan_four_bits(4, 1024, 4096).splits > 1
    assert plan_four_bits(4, 1024, 4096).splits >= plan_four_bits(4, 4096, 4096).splits
    assert plan_four_bits(4, 28672, 4096).splits == 1
    assert plan_four_bits(4, 32, 64).splits == 1


def test_what_the_kernel_takes_is_few_tokens_of_half_precision_in_whole_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_four_bits(FourBitCase(1, 256, 32), torch.float16).weight
    assert reads_four_bits(1, weight, torch.bfloat16)
    assert reads_four_bits(MOST_TOKENS, weight, torch.float16)
    assert not reads_four_bits(MOST_TOKENS + 1, weight, torch.float16)
    assert not reads_four_bits(1, weight, torch.float32)
    assert not reads_four_bits(1, weight._replace(width=96), torch.float16)
    assert not reads_four_bits(1, weight._replace(blocksize=32), torch.float16)
    monkeypatch.setattr(tuning, "HOPPER", SAFE)
    assert not reads_four_bits(1, weight, torch.bfloat16), "nothing has been measured there"
    assert not reference.reads_four_bits(1, weight, torch.bfloat16)


@compiled_only
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("plan", [None, FourBitPlan(16, 64, 4, 4, 3, 1), FourBitPlan(32, 32, 4, 4, 3, 2)], ids=str)
def test_the_kernel_compiles_to_copies_ahead_and_moved_bytes_and_tensor_cores(tmp_path, monkeypatch, plan, nested):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from hf_dsde.kernels import four_bits

    kernel, launched = four_bits._four_bit_kernel, []
    monkeypatch.setattr(four_bits, "_four_bit_kernel", Recorder(launched))
    monkeypatch.setattr(four_bits, "_sum_kernel", Recorder([]))
    monkeypatch.setattr(four_bits, "_permute", lambda kind, x: four_bits.lookup(kind, x.dtype))
    plan = plan or plan_four_bits(4, 4096, 4096)
    x, weight, _ = make_four_bits(FourBitCase(4, 512, 64, inner=256 * nested), torch.bfloat16)
    four_bits.launch_four_bits(x, weight, None, replace(plan, splits=1))
    ((values, given),) = launched
    assert len(values) + len(given) - 1 == len(kernel.arg_names)
    types = dict.fromkeys(("inner_numbers", "inner_absmax", "inner_offset"), "*fp32") | {
        "pairs": "*i32", "codes": "*u8", "absmax": "*u8" if nested else "*fp32", "table": "*bf16", "bias": "*bf16",
        "out": "*bf16",
    }  # fmt: skip
    compiled = _compile(kernel, types, given, given.pop("num_warps"))
    code = compiled.asm["ptx"]
    assert "mma.sync" in code
    assert "prmt.b32" in code
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+)", code)
    assert "0x10" in sizes
    assert compiled.metadata.shared <= held(plan)
