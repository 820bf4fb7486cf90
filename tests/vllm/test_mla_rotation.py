"""Test the rotation of queries in MLA attention: the launches that do it, its results, and when attention may do it."""

import pytest
import test_mla_norms
import torch
from fakes import Counting, Fake, change, check_and_time, parameter, require_near, spoil
from test_mla_norms import HEADS, KV, ROPE
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.ops.shared import rotation
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import mla_absorb, mla_pre_attention, mla_rotation
from vllm_rocm_ops.vllm.selection import kernel_timing
from vllm_rocm_ops.vllm.selection.key import COMPILED

OP, NOPE, V = ops.batched_gemm_rope, 128, 64
pytestmark = pytest.mark.usefixtures("configuration")


def attention(nope: int = NOPE) -> torch.nn.Module:
    """Return vLLM's attention layer with what its forward_impl reads. It keeps the queries of decode and of prefills."""
    attn, generator, seen = MLAAttention.__new__(MLAAttention), torch.Generator().manual_seed(2), {}
    torch.nn.Module.__init__(attn)
    w_uk, w_uv = (torch.randn(HEADS, *shape, generator=generator).bfloat16() / 8 for shape in ((nope, KV), (KV, V)))
    attn.W_UK_T, attn.W_UV = parameter(w_uk), parameter(w_uv)

    def forward_mqa(q, *rest):
        seen["decode"] = [part.clone() for part in q]
        return q[0].clone(), None

    def forward_mha(q, *rest, output, **keywords):
        seen["prefill"] = q.clone()

    no = dict.fromkeys(("is_sparse", "supports_quant_query_input"), False)
    attn.impl = Fake(forward_mqa=forward_mqa, forward_mha=forward_mha, reserve_workspace=list, dcp_world_size=1, **no)
    given = {"kv_cache_dtype": "auto", "q_pad_num_heads": None, "prefill_backend": None, "seen": seen}
    given |= {"num_heads": HEADS, "v_head_dim": V, "kv_lora_rank": KV, "_chunked_prefill_workspace_size": 1}
    given |= {"qk_nope_head_dim": nope, "qk_rope_head_dim": ROPE, "_k_scale": torch.tensor(1.0)}
    attn.__dict__ |= given | dict.fromkeys((*mla_rotation.OTHERS, "use_pcp", "use_direct_call"), False)
    return attn


class Layer(test_mla_norms.Layer):
    """A layer with vLLM's attention and a rotation of queries and keys."""

    qk_nope_head_dim, qk_head_dim = NOPE, NOPE + ROPE

    def __init__(self, nope: int = NOPE):
        super().__init__(None)
        decoder = self.mla_attn.impl.rocm_ops
        self.mla_attn, self.qk_nope_head_dim = attention(nope), nope
        self.mla_attn.impl.rocm_ops = decoder
        self.rotary_emb.forward_native = lambda positions, *heads: [self.rotated(x, positions) for x in heads]

    def rotated(self, x, positions):
        x = x.clone()
        rotation.rotate(x, positions, self.rotary_emb.cos_sin_cache, False)
        return x


def query_rotation(layer: Layer | None = None) -> mla_rotation.QueryRotation:
    return mla_rotation.QueryRotation(mla_pre_attention.MlaPreAttention(layer or Layer(), COMPILED), COMPILED)


STEPS = {
    # decode rows, prefill rows, rows that a graph adds; rows of the product in the op's launch
    "decode": (3, 0, 0, 3),
    "a padded graph": (3, 0, 2, 3),
    "as many as kernels take": (64, 0, 0, 64),
    "more than kernels take": (65, 0, 0, 0),
    "prefills": (0, 4, 0, 0),
    "both": (2, 3, 1, 0),
}


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """Return the rows of the product in each of the op's launches."""
    rows, call = [], OP.call

    def counted(*arguments):
        rows.append(len(arguments[0]))
        return call(*arguments)

    monkeypatch.setattr(OP, "call", counted)
    return rows


def run(one: mla_rotation.QueryRotation, q: torch.Tensor, decode: int, prefill: int, runs: bool = True) -> None:
    """Run vLLM's attention on q, whose last rows may be padding, or its profile run."""
    metadata = Fake(num_actual_tokens=decode + prefill, num_decode_tokens=decode, decode=())
    metadata.num_decodes, metadata.num_prefills = decode, prefill
    keys = torch.zeros(len(q), KV + ROPE, dtype=q.dtype).split([KV, ROPE], 1)
    output = torch.empty(len(q), HEADS * V, dtype=q.dtype)
    with torch.no_grad():
        one.attn.forward_impl(q, *keys, torch.empty(0), metadata if runs else None, output=output)


def step(one: mla_rotation.QueryRotation, decode: int, prefill: int, padding: int = 0) -> tuple[torch.Tensor, ...]:
    """Run a step of attention, and return its queries before, and their positions."""
    generator, rows = torch.Generator().manual_seed(3), decode + prefill + padding
    q = torch.randn(rows, HEADS, one.nope + ROPE, generator=generator).bfloat16()
    positions = torch.randint(0, 64, (rows,), generator=generator)
    one.angles = positions, *one.pre_attention.angles()
    run(one, q.clone(), decode, prefill)
    return q, positions


@pytest.mark.parametrize("serves", [True, False, None])
@pytest.mark.parametrize("what", STEPS)
def test_each_row_is_rotated_once(what, serves, launched):
    """Decode-only steps have one launch if the product serves (True), not if it lost (False) or is not asked (None)."""
    one = query_rotation(layer := Layer())
    if serves is not None:
        mla_absorb.adopt(one.attn, True, 64)
    if serves is False:
        one.weights.rocm_ops_choice = Fake(plugin_serves=lambda rows: False, baseline_always_serves=False)
    one.apply_decision(True)
    decode, prefill, padding, rows = STEPS[what]
    for _ in range(2):
        q, positions = step(one, decode, prefill, padding)
        rotated = q.clone()
        rotated[..., NOPE:] = layer.rotated(q[..., NOPE:], positions)
        seen = one.attn.seen
        assert ("decode" in seen, "prefill" in seen) == (decode > 0, prefill > 0)
        if decode:
            absorbed, q_pe = seen["decode"]
            weights = torch.Tensor(one.weights.detach().double())
            wanted = torch.einsum("mhk,hkn->mhn", q[:decode, :, :NOPE].double(), weights)
            assert torch.equal(q_pe, rotated[:decode, :, NOPE:])
            torch.testing.assert_close(absorbed.double(), wanted, rtol=2**-7, atol=2**-7)
        if prefill:
            assert torch.equal(seen["prefill"], rotated[decode : decode + prefill])
    assert launched == [rows if serves else 0] * 2


def test_the_kernel_rotates_in_attention():
    """One launch of the emulated kernel in a decode step, and one before a mixed one."""
    one, emulator = query_rotation(layer := Layer()), Counting("gfx942")
    mla_absorb.adopt(one.attn, True, 64)
    one.apply_decision(True)
    with launch.executor(emulator):
        for decode, prefill in ((3, 0), (2, 2)):
            q, positions = step(one, decode, prefill)
            wanted = layer.rotated(q[:decode, :, NOPE:], positions[:decode])
            assert torch.equal(one.attn.seen["decode"][1], wanted)
    uk, uv = "batched_gemm_rope_bf16_transposed_16", "batched_gemm_bf16_transposed_16"
    assert emulator.symbols[0] == uk and uv in emulator.symbols
    grids = [planned.grid for planned in emulator.launches if planned.symbol == uk]
    assert grids == [(HEADS, KV // 64 + 1, 1), (HEADS, 1, 1)]


def test_a_step_that_has_no_angles_is_vllms(launched):
    """vLLM's graph rotates where the layer's own forward runs, and a profile run needs no rotation."""
    one = query_rotation()
    mla_absorb.adopt(one.attn, True, 64)
    one.apply_decision(True)
    before, positions = step(one, 2, 0)
    launched.clear()
    q = before.clone()
    run(one, q, 2, 0)
    one.angles = positions, *one.pre_attention.angles()
    run(one, q, 2, 0, runs=False)
    assert torch.equal(q, before) and launched == [] and one.angles is None


def test_queries_that_stay_unrotated_are_an_error(monkeypatch):
    """vLLM multiplies by another weight than expected."""
    one = query_rotation()
    mla_absorb.adopt(one.attn, True, 64)
    one.apply_decision(True)
    product = lambda x, *_, YQ=None, **__: x.new_zeros(x.shape[1], HEADS, KV if YQ is None else V)
    monkeypatch.setattr("vllm._aiter_ops.rocm_aiter_ops.triton_fp8_bmm", product)
    for name in ("W_K", "W_K_scale", "W_V", "W_V_scale"):
        setattr(one.attn, name, None)
    one.attn.is_aiter_triton_fp8_bmm_enabled = True
    with pytest.raises(RuntimeError, match="VLLM_ROCM_OPS_DISABLE=mla_norms"):
        step(one, 2, 0)


@pytest.mark.parametrize("tokens", [3, 70])
def test_a_kernel_is_measured_beside_vllms_layers(tokens):
    """The emulated kernel is as close to the exact q_pe and product. Above 64 tokens there is no product."""
    one = query_rotation()
    assert str(one.key) == f"batched_gemm_rope {HEADS}x{KV}x{NOPE}+{ROPE} bfloat16 compiled"
    require_near(one, tokens)
    assert one.work((), tokens)[0] > 0 and (one.work((), tokens)[1] > 0) == (tokens <= 64)


@pytest.mark.parametrize("part", ["q_pe", "out"])
def test_each_result_is_checked(part, monkeypatch):
    spoil(monkeypatch, OP, part)
    with pytest.raises(kernel_timing.Mismatch):
        check_and_time(query_rotation())


UNSUPPORTED = {
    "a product in FP8": ("is_aiter_triton_fp8_bmm_enabled", True),
    "a product in FP4": ("is_aiter_triton_fp4_bmm_enabled", True),
    "a product on CPU": ("is_amx_bmm_enabled", True),
    "no W_UK": ("W_UK_T",),
    "padded heads": ("q_pad_num_heads", 16),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_layers_are_not_served(what):
    layer = Layer()
    pre_attention = mla_pre_attention.MlaPreAttention(layer, COMPILED)
    assert len([*mla_rotation.rotations(pre_attention, COMPILED, torch.bfloat16)]) == 1
    change(layer.mla_attn, *UNSUPPORTED[what])
    assert [*mla_rotation.rotations(pre_attention, COMPILED, torch.bfloat16)] == []
    assert len([*mla_rotation.unsupported_features(layer.mla_attn)]) == 1


def test_kernels_must_take_the_sizes(monkeypatch):
    """On a GPU, the kernels are asked."""
    monkeypatch.setattr(seam, "arch_here", lambda platform: archs.named("gfx942").name)
    monkeypatch.setattr("vllm_rocm_ops.vllm.linear.base.launches.not_loaded", lambda *_: "")
    for nope, dtype, served in ((NOPE, torch.bfloat16, 1), (64, torch.bfloat16, 0), (NOPE, torch.float16, 0)):
        pre_attention = mla_pre_attention.MlaPreAttention(Layer(nope), COMPILED)
        assert len([*mla_rotation.rotations(pre_attention, COMPILED, dtype)]) == served


def test_a_layer_takes_and_drops_the_fused_launch():
    one = query_rotation()
    assert not one.runs_unmeasured()
    one.apply_decision(True)
    assert one.decoder.rotation is one and one.attn.forward_impl == one.forward_impl
    one.apply_decision(False)
    assert one.decoder.rotation is None and one.attn.forward_impl.__func__ is type(one.attn).forward_impl
    one.decoder.is_forced = True
    one.apply_decision(False)
    assert one.runs_unmeasured() and one.decoder.rotation is one
