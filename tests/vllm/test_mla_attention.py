"""Test the plugin's decode attention in vLLM's MLA backends: the calls it serves, and their results."""

import pytest
import torch
from fakes import Fake, set_config
from vllm.config import get_current_vllm_config

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import backends as attention_backends
from vllm_rocm_ops.vllm.attention import decoder as attention
from vllm_rocm_ops.vllm.attention import mla as mla_attention
from vllm_rocm_ops.vllm.attention.mla import LATENT, ROPE

HEADS, PAGE, SCALE = 3, 16, 0.09


class Baseline:
    """The parts of vLLM's implementations that the plugin uses."""

    def __init__(self, **given):
        known = {"num_heads": HEADS, "scale": SCALE, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
        self.__dict__ |= known | {"kv_cache_dtype": "auto", "dcp_world_size": 1} | given

    def forward_mqa(self, *arguments):
        return "stock", arguments


class Call:
    """Requests of these lengths, each with `query_len` rows."""

    def __init__(
        self, lens: list[int], query_len: int = 1, fp8: bool = False, prefills: int = 0, fp8_query: bool = False
    ):
        generator = torch.Generator().manual_seed(sum(lens))
        self.lens, self.query_len, self.scale = lens, query_len, 2.3 if fp8 else 1.0
        self.table = torch.randperm(40, generator=generator)[: 4 * len(lens)].view(-1, 4).int()
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.tokens = torch.randn(len(lens), 4 * PAGE, LATENT + ROPE, generator=generator).to(dtype)
        self.cache = torch.full((40, PAGE, LATENT + ROPE), torch.nan).to(dtype)
        for request, length in enumerate(lens):
            for token in range(length):
                page = self.cache[self.table[request, token // PAGE]]
                page.view(torch.uint8)[token % PAGE] = self.tokens[request, token].view(torch.uint8)
        shape = (len(lens) * query_len, HEADS, 2 * (LATENT + ROPE))
        self.q = torch.randn(shape, generator=generator).bfloat16()[..., : LATENT + ROPE]
        self.q_scale = 0.6 if fp8_query else 1.0
        if fp8_query:
            self.q = self.q.to(dtype)
        decode = Fake(block_table=self.table, seq_lens=torch.tensor(lens, dtype=torch.int32))
        self.metadata = Fake(decode=decode, causal=True, num_prefills=prefills)
        self.metadata.max_query_len = 90 if prefills else query_len
        self.layer = Fake(_k_scale=torch.tensor(self.scale), _q_scale=torch.tensor(self.q_scale))

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the logarithms of sums, in float64."""
        out, lse = torch.zeros(len(self.q), HEADS, LATENT).double(), torch.zeros(len(self.q), HEADS).double()
        for row, q in enumerate(self.q.double()):
            request, t = divmod(row, self.query_len)
            keys = self.tokens[request, : max(self.lens[request] - self.query_len + t + 1, 0)].double()
            scores = q @ keys.t() * SCALE * self.scale * self.q_scale
            out[row], lse[row] = scores.softmax(-1) @ keys[:, :LATENT] * self.scale, scores.logsumexp(-1)
        return out, lse


@pytest.fixture
def serve(configuration, monkeypatch):
    """Return a function that makes and calls an implementation, and returns None if vLLM's served."""
    monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", "1")
    monkeypatch.setattr(get_current_vllm_config(), "model_config", Fake(dtype=torch.bfloat16))

    def call(one: Call, member: str = "TRITON_MLA", q=None, cache=None, **given):
        kind = type("Impl", (mla_attention.MlaImpl, Baseline), {"rocm_ops_backend": mla_attention.BACKENDS[member]})
        given = {"kv_cache_dtype": "fp8" if one.scale != 1.0 else "auto"} | given
        impl = kind(**given)
        arguments = one.q.split([LATENT, ROPE], -1) if q is None else q, one.cache, one.metadata, one.layer
        found = impl.forward_mqa(*arguments)
        assert found[0] != "stock" or found[1] == arguments
        return None if isinstance(found[0], str) else found

    return call


@pytest.mark.parametrize("member", ["TRITON_MLA", "ROCM_AITER_MLA"])
@pytest.mark.parametrize("fp8", ["", "cache", "cache and queries"])
@pytest.mark.parametrize(("lens", "query_len"), [((33, 1, 50), 1), ((20, 3, 49), 3)])
def test_decode_rows_are_served(serve, member, fp8, lens, query_len):
    """Queries have two parts, in separate tensors or in one."""
    one = Call(list(lens), query_len, bool(fp8), fp8_query="queries" in fp8)
    for q in (None, one.q.contiguous()):
        out, lse = serve(one, member, q)
        assert (out.double() - one.expected()[0]).abs().max() < 0.03 * one.scale
        assert lse is None and out.dtype == torch.bfloat16


def test_rows_that_pad_a_graph_have_no_keys(serve):
    one = Call([33, 0, 0])
    one.table[1:] = 2**30
    out, _ = serve(one)
    assert (out[0].double() - one.expected()[0][0]).abs().max() < 0.03
    assert not out[1:].any()


def test_single_rows_beside_prefills_are_served(serve):
    """Requests with several rows are vLLM's: they may have different lengths."""
    one = Call([33, 20], prefills=1)
    out, _ = serve(one)
    assert (out.double() - one.expected()[0]).abs().max() < 0.03
    assert serve(Call([33, 20], query_len=2, prefills=1)) is None
    uneven = Call([33, 20], query_len=2)
    uneven.metadata.max_query_len = 3
    assert serve(uneven) is None


def test_a_cache_that_is_split_over_gpus(serve):
    """The plugin returns the logarithms for merging, for single rows."""
    one = Call([33, 20])
    _, lse = serve(one, dcp_world_size=2)
    assert lse.dtype == torch.float32
    assert (lse.double() - one.expected()[1]).abs().max() < 0.01
    assert serve(Call([33, 20], query_len=2), dcp_world_size=2) is None
    assert serve(one, "ROCM_AITER_MLA", dcp_world_size=2) is None


def test_calls_with_what_our_op_lacks_stay_baseline(serve, monkeypatch):
    one = Call([33, 20])
    assert serve(one)
    assert serve(one, kv_lora_rank=256) is None
    assert serve(one, qk_rope_head_dim=32) is None
    assert serve(one, kv_cache_dtype="fp8_ds_mla") is None
    assert serve(one, pcp_world_size=2) is None
    assert serve(one, q=one.q.to(torch.float8_e4m3fn)) is None
    per_head = Call([33, 20], fp8=True, fp8_query=True)
    assert serve(per_head)
    for name in ("_q_scale", "_k_scale"):
        with monkeypatch.context() as changed:
            changed.setattr(per_head.layer, name, torch.ones(HEADS))
            assert serve(per_head) is None
    one.metadata.causal = False
    assert serve(one) is None
    one.metadata.causal = True
    monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", "0")
    assert serve(one) is None


def test_queries_that_are_cut_on_the_device_stay_baseline(serve, monkeypatch):
    """The host then does not know their lengths, and rows of one request may be in another's places."""
    drafts = Fake(enable_adaptive_verification=True)
    config = set_config(monkeypatch, compilation_config=Fake(cudagraph_mode=None), speculative_config=drafts)
    assert serve(Call([33, 20])) is None
    config.speculative_config = None
    assert serve(Call([33, 20]))


@pytest.mark.parametrize(("invariant", "fixed_split_size"), [(False, 0), (True, mla_attention.FIXED_SPLIT_SIZE)])
def test_parts_are_constant_where_bits_may_not_depend_on_the_batch(serve, monkeypatch, invariant, fixed_split_size):
    given = []
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", invariant, raising=False)
    run = attention.run
    monkeypatch.setattr(attention, "run", lambda op, *arguments: given.append(arguments) or run(op, *arguments))
    assert serve(Call([33, 20]))
    assert ops.mla_decode.Arguments(*given[0]).fixed_split_size == fixed_split_size


def test_backends_are_checked(configuration, monkeypatch):
    """vLLM's registry finds them."""
    monkeypatch.setattr("vllm.v1.attention.backends.registry._ATTN_OVERRIDES", {})
    attention_backends.probe(mla_attention.BACKENDS)
    monkeypatch.setattr(mla_attention.MlaImpl, "METHOD", ("forward_mqa", "q"))
    missing = "this vLLM lacks TritonMLAImpl.forward_mqa.q., got .q, kv_c_and_k_pe_cache"
    with pytest.raises(seam.Unavailable, match=missing):
        attention_backends.probe(mla_attention.BACKENDS)
    for member, backend in mla_attention.BACKENDS.items():
        made = getattr(mla_attention, f"RocmOps{backend.name}")
        assert made.get_name() == member
        assert issubclass(made.get_impl_cls(), mla_attention.MlaImpl)
