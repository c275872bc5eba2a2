"""The kernels compile for real cards, which the interpreter cannot tell; no card is needed.

In a process of its own: here, kernels may be interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="there is no triton for this platform")

SMALLEST_SHARED_MEMORY = 99 * 1024
"""Bytes that a program may have on the smallest of the cards meant (compute capability 8.6)."""

SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.attention import triton_kernels as kernels
from engine.attention.triton_paged import tiling_for

def shared_memory(kernel, pointers, constants, **options):
    def kind(name):
        if name in constants:
            return "constexpr"
        return pointers.get(name, "fp32" if name in ("scaling", "softcap") else "i32")
    names = kernel.arg_names
    source = ASTSource(
        kernel, {n: kind(n) for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
    )
    target = GPUTarget("cuda", 86, 32)
    return triton.compile(source, target=target, options=options).metadata.shared

def attend(dtype, size, group, one_each):
    tiling = tiling_for(group, size, 4 if dtype == "*fp32" else 2, one_each)
    pointers = dict.fromkeys(("query", "keys", "values", "out"), dtype)
    pointers |= dict.fromkeys(("part_max", "part_sum", "part_out"), "*fp32")
    pointers |= dict.fromkeys(("tiles", "ragged", "tables"), "*i32")
    return shared_memory(
        kernels.attend_tile, pointers, {
            "GROUP": group, "HEADS": 2 * group, "SIZE": size,
            "SIZE_PADDED": max(16, triton.next_power_of_2(size)), "BLOCK_SIZE": 16,
            "ROWS": tiling.rows, "KEYS": tiling.keys, "SPLITS": 4 if one_each else 1,
            "CAPPED": size == 256, "WINDOWED": size == 256,
        }, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )

parts = {"out": "*bf16", "part_max": "*fp32", "part_sum": "*fp32", "part_out": "*fp32"}
stored = dict.fromkeys(("new_keys", "new_values", "keys", "values"), "*bf16")
print(json.dumps([
    attend("*bf16", 128, 4, True),
    attend("*bf16", 80, 3, False),
    attend("*bf16", 256, 2, False),
    attend("*fp32", 128, 1, False),
    attend("*fp32", 256, 8, True),
    shared_memory(kernels.add_parts, parts, {
        "HEADS": 6, "SIZE": 80, "SIZE_PADDED": 128, "BLOCK_HEADS": 4, "SPLITS": 8}),
    shared_memory(kernels.store_tokens, stored | {"slots": "*i64"}, {
        "HEADS": 3, "SIZE": 80, "WIDTH": 256, "TOKENS": 16}),
]))
"""


def test_the_kernels_compile_and_fit_in_shared_memory(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-2000:]
    sizes = json.loads(answer.stdout.splitlines()[-1])
    assert len(sizes) == 7
    assert max(sizes) < SMALLEST_SHARED_MEMORY
