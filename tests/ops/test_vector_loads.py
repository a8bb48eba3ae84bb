"""Kernels read and write 16 bytes an instruction: seen in what Triton compiles them to, without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from ds_zo.ops import triton_factors, triton_lomo, triton_ops  # noqa: E402

BF16 = 16  # dropped bits
UPDATE = {
    **dict.fromkeys(("DROPPED", "U_DROPPED"), BF16),
    **dict.fromkeys(("HAS_COEF", "HAS_CLIP", "HAS_SCALE", "HAS_ROWS", "HAS_COLS", "HAS_RESIDUE"), False),
    **dict.fromkeys(("HAS_GUARDS", "STOCHASTIC", "WHOLE_LANES"), True),
    "LANES": triton_lomo.LANES,
}
ADALOMO = dict.fromkeys(("HAS_SCALE", "HAS_ROWS", "HAS_COLS"), True)
SQUARES = {"U_DROPPED": BF16, "HAS_COEF": False, "HAS_ROWS": True, "WHOLE_LANES": True, "LANES": triton_lomo.LANES}
TILES = {"ROWS": triton_lomo.TILE_ROWS, "COLS": triton_lomo.TILE_COLS}

REPLAY = {
    **dict.fromkeys(("FORMAT", "OUT_FORMAT", "FACTORS"), BF16),
    **dict.fromkeys(("NORMAL", "TRAINABLE", "VECTOR", "REPLAY", "WRITE", "HAS_OUT", "LANE_ROWS"), True),
    **dict.fromkeys(("HAS_LOW_IN", "HAS_PAIR", "PERTURB", "DITHER_OUT", "HAS_STILL"), False),
    "NUM_GROUPS": 1,
    "Q": 32,
    "COPY_BITS": 8,
    "STORE": triton_ops._FOLD.value,
    "LANES": triton_ops.LANES,
}
FACTORS = {"LOG_WIDTH": 34, "Q": 32, "FORMAT": BF16, "TILE": triton_factors.TILE}


def compiled(kernel: Any, constants: dict[str, Any]) -> str:
    """PTX for bf16 tensors at aligned addresses and for sizes that the compiler does not know."""
    tensors = [name for name in kernel.arg_names if name.endswith("_ptr")]
    narrow = {"p_ptr", "u_ptr", "residue_ptr", "g_ptr", "src_ptr", "dst_ptr", "out_ptr", "factors_ptr"}
    types = {name: "*i16" if name in narrow else "*fp32" for name in tensors}
    types |= dict.fromkeys(("chunks_ptr", "blocks_ptr", "matrices_ptr"), "*i64") | {"chunk_matrices_ptr": "*i32"}
    types |= dict.fromkeys(("lr", "decay", "clip", "scale"), "fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    position = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    aligned = {position[name]: [["tt.divisibility", 16]] for name in tensors}
    values = {position[name]: value for name, value in constants.items()}
    target = GPUTarget("cuda", 90, 32)
    made = triton.compile(ASTSource(kernel, signature, values, aligned), target=target, options={"num_warps": 8})
    return str(made.asm["ptx"])


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        pytest.param(triton_lomo._update_kernel, UPDATE, id="lomo"),
        pytest.param(triton_lomo._update_kernel, UPDATE | ADALOMO, id="adalomo"),
        pytest.param(triton_lomo._square_sum_kernel, SQUARES, id="square sum"),
        pytest.param(
            triton_lomo._row_and_col_kernel, {"DROPPED": BF16, "WHOLE_LANES": True, **TILES}, id="rows and columns"
        ),
    ],
)
def test_elements_are_moved_by_vectors(kernel: Any, constants: dict[str, Any]) -> None:
    ptx = compiled(kernel, constants)
    assert re.search(r"ld\.global\.v4\.b32", ptx)
    assert not re.search(r"(ld|st)\.global\.[bu]16", ptx)


def test_factors_of_rank1_noise_are_moved_by_vectors() -> None:
    """One load of 16 bits is left in a loop over members: a lane's u."""
    ptx = compiled(triton_ops._replay_perturb_kernel, REPLAY)
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 2  # stored weights, v
    assert len(re.findall(r"(ld|st)\.global\.[bu]16", ptx)) == 1
    drawn = compiled(triton_factors._factors_kernel, FACTORS)
    assert re.search(r"st\.global\.v4\.b32", drawn)
    assert not re.search(r"st\.global\.[bu]16", drawn)
