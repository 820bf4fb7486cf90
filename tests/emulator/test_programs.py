"""Run compiled C++ in the emulator: random programs against the host's compiler, and a split-K GEMM with faults."""

from __future__ import annotations

import ctypes
import random
import re
import subprocess

import numpy as np
import pytest
import torch
from assembly import build_module
from marks import AMD, full

from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.emulator import Emulator, errors

build = build_module()
THREADS = 128  # two blocks
PROGRAMS = 12  # per architecture

# Random programs: integers of all widths, f16, f32 and f64, with branches and loops. No undefined behavior: unsigned
# arithmetic, masked shifts, odd divisors, conversions of clamped floats.

TYPES = {
    "u": ("unsigned", 5), "i": ("int", 4), "q": ("unsigned long long", 3), "l": ("long long", 2), "f": ("float", 5),
    "h": ("unsigned short", 2), "b": ("signed char", 2), "d": ("double", 1), "H": ("_Float16", 3),
}  # fmt: skip
VARIABLES = [f"{letter}{n}" for letter, (_, count) in TYPES.items() for n in range(count)]
OPERATIONS = """
(unsigned long long)A + B;(unsigned long long)A - B;(unsigned long long)A * B;A & B;A | B;A ^ B;~A;A < B ? B : C;(A & B) | C
((unsigned long long)A << N) + B;(unsigned)A >> (B & 31);(unsigned)A << (B & 31);(int)A >> (B & 31)
(unsigned long long)A >> (B & 63);(unsigned long long)A << (B & 63);(long long)A >> (B & 63)
(unsigned)A / ((unsigned)B | 1);(unsigned)A % ((unsigned)B | 1);(int)A / (((int)B & 0xffff) | 1);(unsigned)A / 641u;(unsigned)A / 7u
(unsigned long long)A / ((unsigned)B | 1);__builtin_popcount((unsigned)A);__builtin_clz((unsigned)A | 1)
__builtin_ctz((unsigned)A | 0x80000000u);((unsigned)A >> N) & 255;(unsigned)(((unsigned long long)(unsigned)A * (unsigned)B) >> 32)
(unsigned)(((long long)(int)A * (int)B) >> 32);(unsigned long long)(unsigned)A * (unsigned)B + C;(long long)(int)A * (int)B
__builtin_bswap32((unsigned)A);(signed char)A + (short)B;((unsigned)A >> 7 | (unsigned)A << 25);(A > B ? 1ull : 0) + C
__builtin_bit_cast(unsigned, F);(int)__builtin_fminf(__builtin_fmaxf(F, -1e9f), 1e9f)
(unsigned)__builtin_fminf(__builtin_fmaxf(F, 0.f), 4e9f);__builtin_elementwise_add_sat((unsigned)A, (unsigned)B)
__builtin_elementwise_sub_sat((int)A, (int)B);__builtin_elementwise_bitreverse((unsigned)A)"""
FLOATS = """
F + F;F * F;F - F;F / F;-F;__builtin_fmaf(F, F, F);__builtin_fminf(F, F) + 0.f;__builtin_fmaxf(F, F) + 0.f;(float)(int)A
(float)(unsigned)A;__builtin_fabsf(F);F > F ? F : F;__builtin_floorf(F);__builtin_truncf(F);__builtin_rintf(F);(float)H0
__builtin_sqrtf(__builtin_fabsf(F));(float)d0;(float)q0;(float)l0"""
HALVES = "H0 + H1;H1 * H2;H0 - H2;(_Float16)F;H0 < H1 ? H2 : H0;(_Float16)(short)A"
DOUBLES = "d0 + (double)F;d0 * (double)F;d0 - (double)(int)A;(double)F"


class Program:
    """The text of a random function body that reads in[8][THREADS] and writes out[words][THREADS]."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.words = 0
        lines = [self._declare(n, name) for n, name in enumerate(VARIABLES)]
        lines += [self._statement(0) for _ in range(self.random.randint(25, 60))]
        lines += [line for name in VARIABLES for line in self._store(name)]
        self.body = "\n".join(lines)

    def _declare(self, n: int, name: str) -> str:
        type_, source = TYPES[name[0]][0], f"in[{n % 8} * {THREADS} + t]"
        value = {
            "f": f"__builtin_bit_cast(float, ({source} & 0x807fffffu) | ((({source} >> 24) & 15) + 120) << 23)",
            "d": f"(int){source} * 0.37",
            "H": f"(_Float16)((float)(int)({source} % 4001) * 0.013f - 20.f)",
            "q": f"(unsigned long long){source} << 32 | in[{(n + 3) % 8} * {THREADS} + t]",
        }
        return f"{type_} {name} = ({type_})({value.get(name[0], value['q'] if name[0] == 'l' else source)});"

    def _fill(self, choices: str) -> str:
        """Return one of the choices, with A, B, C replaced by integers, F by floats, N by a shift."""
        text = self.random.choice([choice for choice in re.split(r"[;\n]", choices) if choice])

        def value(match: re.Match) -> str:
            letters = "f" if match[0] == "F" else "uiqlhb"
            return (
                str(self.random.randint(0, 24))
                if match[0] == "N"
                else self.random.choice([v for v in VARIABLES if v[0] in letters])
            )

        return re.sub(r"\b[ABCFN]\b", value, text)

    def _statement(self, depth: int) -> str:
        kind = self.random.random()
        block = lambda most: " ".join(self._statement(depth + 1) for _ in range(self.random.randint(1, most)))
        if depth < 2 and kind < 0.08:
            condition = self._fill("A < B;A > B;A == B;A != B;F < F;F >= F;F != F")
            return f"if ({condition}) {{ {block(4)} }} else {{ {block(2)} }}"
        if depth < 2 and kind < 0.12:
            return f"for (unsigned n{depth} = 0; n{depth} < ({self._fill('A')} & 7); n{depth}++) {{ {block(3)} }}"
        name = self.random.choice(VARIABLES)
        if name[0] == "f":
            return f"{name} = {self._fill(FLOATS)};"
        if name[0] == "H":
            return f"{name} = {self._fill(HALVES)};"
        if name[0] == "d":
            return f"d0 = {self._fill(DOUBLES)}; if (!(__builtin_fabs(d0) < 1e30)) d0 = 1.5;"
        return f"{name} = ({TYPES[name[0]][0]})({self._fill(OPERATIONS)});"

    def _store(self, name: str):
        wide = {"d": "__builtin_bit_cast(unsigned long long, d0)"}.get(name[0], name)
        values = {
            "f": [f"{name} == {name} ? __builtin_bit_cast(unsigned, {name}) : 0x7fc00000u"],
            "H": [f"{name} == {name} ? (unsigned)__builtin_bit_cast(unsigned short, {name}) : 0x7e00u"],
        }.get(
            name[0],
            [f"(unsigned){name}"]
            if name[0] not in "dql"
            else [f"(unsigned){wide}", f"(unsigned)((unsigned long long){wide} >> 32)"],
        )
        for value in values:
            yield f"out[{self.words} * {THREADS} + t] = {value};"
            self.words += 1


PRAGMAS = '#pragma clang diagnostic ignored "-Weverything"\n#pragma clang fp contract(off)\n'
KERNEL = """extern "C" __attribute__((global)) void program%d(const unsigned* in, unsigned* out) {
unsigned t = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();
%s
}
"""
FUNCTION = """extern "C" void program%d(const unsigned* in, unsigned* out) { for (unsigned t = 0; t < %d; t++) {
%s
} }
"""


@pytest.fixture(scope="module")
def programs():
    return [Program(seed) for seed in range(PROGRAMS)]


@pytest.fixture(scope="module")
def host(programs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    text = PRAGMAS + "".join(FUNCTION % (i, THREADS, program.body) for i, program in enumerate(programs))
    (folder / "host.cpp").write_text(text)
    # Not c++: zig would first compile its C++ library.
    command = [*build.zig(), "cc", "-O1", "-ffp-contract=off", "-fno-sanitize=all", "-shared", "-fPIC"]
    command += ["host.cpp", "-o", "host.so"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return ctypes.CDLL(str(folder / "host.so"))


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=full)])
def test_random_programs_match_the_host(arch, programs, host, tmp_path):
    text = PRAGMAS + "".join(KERNEL % (i, program.body) for i, program in enumerate(programs))
    (tmp_path / "device.hip").write_text(text)
    build.compile_source(tmp_path / "device.hip", arch, tmp_path / "device.co")
    emulator = Emulator(arch)
    source = np.random.default_rng(0).integers(0, 1 << 32, (8, THREADS), dtype=np.uint32)
    source[:, :8] = [0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 2, 0xFFFF, 0x10000]
    for i, program in enumerate(programs):
        expected = np.zeros((program.words, THREADS), np.uint32)
        getattr(host, f"program{i}")(source.ctypes.data_as(ctypes.c_void_p), expected.ctypes.data_as(ctypes.c_void_p))
        output = torch.zeros(program.words, THREADS, dtype=torch.int32)
        arguments = (torch.from_numpy(source.view(np.int32)), output)
        emulator.run(tmp_path / "device.co", Launch("", f"program{i}", (2, 1, 1), (64, 1, 1), arguments), (output,))
        wrong = np.argwhere(output.numpy().view(np.uint32) != expected)
        assert not len(wrong), f"program {i}: output {wrong[0][0]} of thread {wrong[0][1]}"


# A GEMM: bf16 tiles through LDS into MFMA, K split over blocks, the last block of a tile sums the splits

GEMM = """
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef unsigned u32x4 __attribute__((ext_vector_type(4)));

static __attribute__((device)) void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(256, 256)))
void gemm(const short* a, const short* b, float* c, float* parts, unsigned* counters, int m, int n, int k, int splits) {
  static __attribute__((shared)) short tile_a[2][64 * 40], tile_b[2][64 * 40];
  static __attribute__((shared)) unsigned arrived;
  int thread = __builtin_amdgcn_workitem_id_x(), wave = thread >> 6, lane = thread & 63;
  int block_m = __builtin_amdgcn_workgroup_id_x(), block_n = __builtin_amdgcn_workgroup_id_y();
  int part = __builtin_amdgcn_workgroup_id_z(), depth = k / splits;
  int row = thread >> 2, column = (thread & 3) * 8;
  const short* from_a = a + (long)(block_m * 64 + row) * k + part * depth + column;
  const short* from_b = b + (long)(block_n * 64 + row) * k + part * depth + column;
  f32x4 sum[4] = {};
  for (int at = 0; at < depth; at += 32) {
    int buffer = at >> 5 & 1;
    *(u32x4*)&tile_a[buffer][row * 40 + column] = *(const u32x4*)(from_a + at);
    *(u32x4*)&tile_b[buffer][row * 40 + column] = *(const u32x4*)(from_b + at);
#ifndef NO_BARRIER
    barrier();
#endif
    for (int step = 0; step < 32; step += 16) {
      int inner = step + (lane >> 4) * 4;
      s16x4 left = *(s16x4*)&tile_a[buffer][(wave * 16 + (lane & 15)) * 40 + inner];
      for (int j = 0; j < 4; j++) {
        s16x4 right = *(s16x4*)&tile_b[buffer][(j * 16 + (lane & 15)) * 40 + inner];
        sum[j] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(left, right, sum[j], 0, 0, 0);
      }
    }
  }
  float* to = splits > 1 ? parts + (long)part * m * n : c;
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 4; i++)
      to[(long)(block_m * 64 + wave * 16 + (lane >> 4) * 4 + i) * n + block_n * 64 + j * 16 + (lane & 15)] = sum[j][i];
  if (splits == 1) return;
#ifndef NOT_RELEASED
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
#endif
#ifndef COUNTED_TOO_EARLY
  barrier();
#endif
  if (thread == 0)
    arrived = __hip_atomic_fetch_add(&counters[block_m * (n / 64) + block_n], 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  barrier();
#ifdef EVERY_BLOCK_SUMS
  if (arrived >= 2u)
#else
  if (arrived == (unsigned)splits - 1)
#endif
  {
#ifndef NOT_ACQUIRED
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
#endif
    for (int i = thread; i < 64 * 64; i += 256) {
      long at = (long)(block_m * 64 + i / 64) * n + block_n * 64 + i % 64;
      float total = 0;
      for (int s = 0; s < splits; s++) total += parts[(long)s * m * n + at];
      c[at] = total;
    }
  }
}
"""


@pytest.fixture(scope="module", params=AMD)
def gemm(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemm")
    (folder / "gemm.hip").write_text(GEMM)

    def run(splits: int, define: str = "", seed: int | None = None):
        path = folder / f"{define}.co"
        if not path.exists():
            build.compile_source(folder / "gemm.hip", request.param, path, [define] if define else [])
        emulator = Emulator(request.param, seed=seed)
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(128, 256, generator=generator).bfloat16() for _ in range(2))
        c, parts, counters = torch.zeros(128, 128), torch.zeros(splits, 128, 128), torch.zeros(4, dtype=torch.int32)
        what = Launch("", "gemm", (2, 2, splits), (256, 1, 1), (a, b, c, parts, counters, 128, 128, 256, splits))
        emulator.run(path, what, (c, parts))
        torch.testing.assert_close(c, a.float() @ b.float().T, rtol=0, atol=1e-4)
        return emulator.last, c

    return run


def test_gemm(gemm):
    counters, _ = gemm(1)
    # 4 blocks, 4 waves, 8 steps of 32, two of 16 in each, 4 tiles of 16 columns: 16 cycles each
    assert counters.matrix_cycles == 4 * 4 * 8 * 2 * 4 * 16 and counters.barriers == 4 * 8


def test_split_gemm_in_any_order(gemm):
    results = [gemm(4, seed=seed)[1] for seed in (None, 0)]
    assert torch.equal(*results)


def test_gemm_without_its_barrier(gemm):
    with pytest.raises((errors.LdsRace, errors.Uninitialized), match="LDS address"):
        gemm(1, "NO_BARRIER")


@pytest.mark.parametrize("fault", ["EVERY_BLOCK_SUMS", "COUNTED_TOO_EARLY"])
def test_gemm_that_sums_before_all_parts_are_there(gemm, fault):
    with pytest.raises((errors.GlobalRace, errors.Uninitialized), match="argument"):
        gemm(4, fault)


@pytest.mark.parametrize(
    ("fault", "missing"), [("NOT_RELEASED", "it has no sc1"), ("NOT_ACQUIRED", "this access has no sc1")]
)
def test_gemm_that_leaves_parts_in_caches(gemm, fault, missing):
    with pytest.raises(errors.StaleRead, match=f"gemm.* of argument 3 was stored by .*`global_store_dword.*{missing}"):
        gemm(4, fault)


# Three dimensions, and the hidden arguments of hipcc's blockDim and gridDim

SHAPE = """
extern "C" __attribute__((global)) void shape(unsigned* out) {
  unsigned x = __builtin_amdgcn_workitem_id_x(), y = __builtin_amdgcn_workitem_id_y(), z = __builtin_amdgcn_workitem_id_z();
  unsigned bx = __builtin_amdgcn_workgroup_id_x(), by = __builtin_amdgcn_workgroup_id_y(), bz = __builtin_amdgcn_workgroup_id_z();
  unsigned sx = __builtin_amdgcn_workgroup_size_x(), sy = __builtin_amdgcn_workgroup_size_y(), sz = __builtin_amdgcn_workgroup_size_z();
  unsigned block = (bz * 2 + by) * 3 + bx;
  out[block * 60 + (z * sy + y) * sx + x] = block << 24 | z << 16 | y << 8 | x | sz << 28;
}
"""


@pytest.mark.parametrize("arch", AMD)
def test_grids_and_blocks_have_three_dimensions(arch, tmp_path):
    (tmp_path / "shape.hip").write_text(SHAPE)
    build.compile_source(tmp_path / "shape.hip", arch, tmp_path / "shape.co")
    output = torch.zeros(2, 2, 3, 3, 4, 5, dtype=torch.int32)  # blocks z y x, threads z y x
    Emulator(arch).run(tmp_path / "shape.co", Launch("", "shape", (3, 2, 2), (5, 4, 3), (output,)), (output,))
    bz, by, bx, z, y, x = np.indices(output.shape)
    expected = ((bz * 2 + by) * 3 + bx) << 24 | z << 16 | y << 8 | x | 3 << 28
    assert np.array_equal(output.numpy().view(np.uint32), expected)


# Calls, and one pointer type for LDS, scratch and global memory

CALLS = """
static __attribute__((device, noinline)) float total(const float* values, int count) {
  float sum = 0;
  for (int i = 0; i < count; i++) sum += values[i];
  return sum;
}

extern "C" __attribute__((global)) void calls(const float* in, float* out) {
  static __attribute__((shared)) float tile[64];
  int thread = __builtin_amdgcn_workitem_id_x();
  float own[8];
  for (int i = 0; i < 8; i++) own[i] = in[(thread + i) & 63];
  tile[thread] = in[thread];
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  out[thread] = total(tile, 64) + 2 * total(in, 64) + 4 * total(own, 1 + (thread & 7));
}
"""


@pytest.mark.parametrize("arch", AMD)
def test_calls_with_generic_pointers(arch, tmp_path):
    (tmp_path / "calls.hip").write_text(CALLS)
    build.compile_source(tmp_path / "calls.hip", arch, tmp_path / "calls.co")
    source, output = torch.arange(64).float(), torch.zeros(64)
    counters = Emulator(arch).run(
        tmp_path / "calls.co", Launch("", "calls", (1, 1, 1), (64, 1, 1), (source, output)), (output,)
    )
    own = [sum((thread + i) % 64 for i in range(1 + thread % 8)) for thread in range(64)]
    assert output.tolist() == [3 * sum(range(64)) + 4 * value for value in own]
    assert counters.mnemonics["s_swappc_b64"] >= 3 and counters.mnemonics["flat_load_dword"]
