"""The machine code of the kernels for GPUs, made without one: wide reads, and nothing spilt."""

import importlib.util
import os
import re
import subprocess

import pytest

from tests.support.full import full_but

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchmars.optim.gpu import programs

SINGLE, HALF = tl.float32, tl.bfloat16
# Of each kernel and form the dtypes that it reads, and those that it writes, element by element.
FORMS = {
    "inner_products": [
        ((SINGLE, SINGLE, True), [SINGLE] * 2, []),
        ((SINGLE, SINGLE, False), [SINGLE] * 2, []),
        ((HALF, SINGLE, True), [HALF, SINGLE], []),
        ((tl.float16, HALF, True), [tl.float16, HALF], []),
    ],
    "update": [
        (("adamw", SINGLE, SINGLE, SINGLE, SINGLE, SINGLE, True), [SINGLE] * 5, [SINGLE] * 4),
        (("adamw", SINGLE, SINGLE, None, SINGLE, SINGLE, False), [SINGLE] * 4, [SINGLE] * 3),
        (
            ("adamw", SINGLE, SINGLE, HALF, HALF, SINGLE, True),
            [SINGLE] * 3 + [HALF] * 2,
            [SINGLE] * 2 + [HALF] * 2,
        ),
        (("adamw", HALF, HALF, HALF, HALF, HALF, True), [HALF] * 5, [HALF] * 4),
        (("adamw", SINGLE, SINGLE, SINGLE, SINGLE, SINGLE, False), [SINGLE] * 5, [SINGLE] * 3),
        (("mars-lion", SINGLE, SINGLE, SINGLE, SINGLE, None, True), [SINGLE] * 4, [SINGLE] * 3),
        (("mars-lion", SINGLE, SINGLE, None, SINGLE, None, False), [SINGLE] * 3, [SINGLE] * 2),
        (("lion", SINGLE, SINGLE, None, SINGLE, None, False), [SINGLE] * 3, [SINGLE] * 2),
        (("mars", None, SINGLE, SINGLE, SINGLE, None, True), [SINGLE] * 3, [SINGLE] * 2),
        (("mars", None, SINGLE, None, SINGLE, None, False), [SINGLE] * 2, [SINGLE]),
        (("muon", None, SINGLE, None, SINGLE, None, False), [SINGLE] * 2, [SINGLE]),
    ],
    "pack": [
        (("mars", SINGLE, None, HALF), [SINGLE], [HALF]),
        (("muon", SINGLE, SINGLE, HALF), [SINGLE] * 2, [HALF]),
    ],
    "step_along": [
        ((SINGLE, HALF), [SINGLE, HALF], [SINGLE]),
        ((SINGLE, SINGLE), [SINGLE] * 2, [SINGLE]),
    ],
    "look_ahead": [((SINGLE, SINGLE), [SINGLE], [SINGLE])],
    "sum_pieces": [(None, None, None)],
    "settle": [(None, None, None)],
}
TARGETS = 80, 90, 100
CASES = [
    (name, number, target)
    for name in FORMS
    for number in range(len(FORMS[name]))
    for target in TARGETS
]
QUICK = [("inner_products", 0, 90), ("update", 2, 90)]
THREADS = 4 * 32


def compiled(kernel, form, target):
    """What Triton makes of a kernel, launched as `launches.launch` does."""
    kinds = {"numbers": "*fp64", "partial": "*fp64", "count": "i32", "first": "i32"}
    kinds |= {"norm": "*fp64", "total": "*fp64"}
    kinds |= {"form": "constexpr", "packed": "i64"}
    signature = {name: kinds.get(name, "*i64") for name in kernel.arg_names}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={} if form is None else {"form": form}
    )
    options = {"num_warps": THREADS // 32, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def of_full_blocks(dtypes):
    """How many accesses of 16 bytes a thread makes to one block of each dtype."""
    return sum(programs.BLOCK.value * each.primitive_bitwidth // (128 * THREADS) for each in dtypes)


@pytest.mark.parametrize("name,number,target", full_but(QUICK, CASES))
def test_full_blocks_move_16_bytes_at_a_time_and_nothing_is_spilt(name, number, target, tmp_path):
    form, reads, writes = FORMS[name][number]
    kernel = getattr(programs, name)
    made = compiled(kernel, form, target)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    dumped = subprocess.run(
        [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    )
    # It adds up a few numbers of each tensor, and Triton 3.8 spills one of them for sm_90.
    most = "[08]" if name == "sum_pieces" else "0"
    assert re.search(rf"STACK:{most} .*LOCAL:0 ", dumped.stdout), dumped.stdout
    if reads is None:
        return
    ptx = made.asm["ptx"]
    # Nothing else is read 16 bytes at a time: blocks that are cut, or lie anywhere, are not.
    wide = r"\.global[.\w]*\.v(4\.[bf]32|2\.[bf]64|8\.[bf]16)"
    assert len(re.findall(rf"ld{wide}", ptx)) == of_full_blocks(reads)
    assert len(re.findall(rf"st{wide}", ptx)) == of_full_blocks(writes)
    assert (".rn.bf16" in ptx) == (HALF in writes)
    fused = re.findall(r"\bfma\.rn\.f32", ptx)
    assert bool(fused) == (name == "inner_products" and not form[2])


@pytest.mark.parametrize(
    "number,target",
    full_but(
        [(2, 90)],
        [(n, t) for n, (form, *_) in enumerate(FORMS["update"]) if form[6] for t in TARGETS],
    ),
)
def test_last_gradients_are_written_when_all_threads_have_read_them(number, target):
    # What is written does not depend on what was there, and the compiler may let one thread write
    # what another one reads: Triton 3.6 did, and corrections were wrong wherever one came first.
    made = compiled(programs.update, FORMS["update"][number][0], target)
    order = re.findall(r"ld\.global|st\.global|bar\.sync|\bbra\b", made.asm["ptx"])
    writes = [at for at, each in enumerate(order) if each == "st.global"]
    first = [at for at in writes if "bra" in order[max(writes[: writes.index(at)], default=0) : at]]
    assert len(first) == 2  # of full blocks, and of others
    for at in first:
        before = [each for each in order[:at] if each != "bra"]
        assert before[-1] == "bar.sync"
