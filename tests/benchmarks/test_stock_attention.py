"""serving_benchmarks/stock_attention.py: what stands for vLLM's attention, beside our ops; vLLM's own where there is a GPU."""

import contextlib
import importlib
import pathlib
import sys
import types

import pytest
import torch

from vllm_rocm_ops import correctness, ops

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "serving_benchmarks"
sys.path.append(str(SCRIPTS))
stock, stock_attention = map(importlib.import_module, ("stock", "stock_attention"))
sys.path.remove(str(SCRIPTS))

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
CONTEXT, PAGE = 37, 64
FLASH = "vllm.vllm_flash_attn.flash_attn_interface"
GPU = pytest.mark.skipif(not HAS_GPU, reason="vLLM's kernels need a GPU")


def arguments(name: str, device: str = DEVICE) -> tuple:
    """Of an op of attention: two sequences of Llama's or DeepSeek's heads, as a step gives them."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape):
        return torch.randn(*shape, generator=generator).bfloat16().to(device)

    table = torch.tensor([[1], [2]], dtype=torch.int32, device=device)
    lengths = torch.full((2,), CONTEXT, dtype=torch.int32, device=device)
    positions, slots = lengths.long() - 1, table[:, 0].long() * PAGE + CONTEXT - 1
    qkv, latent = values(2, 18 * 128), values(2, 16 * 192)
    caches = [values(3, PAGE, 1, 128) for _ in range(2)]
    angles = torch.rand(CONTEXT, 64, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).bfloat16().to(device)
    q_pe, kv = latent.unflatten(1, (16, 192))[..., 128:], values(2, 576)
    return {
        "rope_and_cache": (*qkv.split((2048, 128, 128), 1), positions, cos_sin, True, *caches, slots),
        "rope_and_cache_mla": (
            q_pe,
            kv[:, 512:],
            kv[:, :512],
            positions,
            cos_sin[:, 32:96].contiguous(),
            False,
            values(3, PAGE, 576),
            slots,
        ),
        "paged_attention_decode": (qkv[:, :2048].unflatten(1, (16, 128)), *caches, table, lengths, 0.09),
        "mla_decode": (values(2, 16, 512), q_pe, values(3, PAGE, 576), table, lengths, 0.07),
    }[name]


def compare(name: str, call) -> None:
    """Raises ValueError if `call` is not what the op's reference is."""
    op = getattr(ops, name)
    mine, theirs = ([correctness.clone(v, DEVICE) for v in arguments(name)] for _ in range(2))
    stock.require_same(call(*mine), op.reference(*theirs))
    for updated in op.mutates:
        stock.require_same(*(getattr(op.Arguments(*given), updated) for given in (mine, theirs)))


@pytest.mark.parametrize("name", stock_attention.KINDS)
def test_without_vllms_kernels_pytorch_computes_the_op(name):
    *_, (last, call) = stock_attention.candidates(getattr(ops, name))
    assert last == "torch"
    compare(name, call)


@GPU
@pytest.mark.parametrize(("name", "by"), [(n, by) for n, of in stock_attention.KINDS.items() for by in of])
def test_vllms_kernels_compute_the_op(name, by):
    call = dict(stock_attention.candidates(getattr(ops, name)))[by]
    with contextlib.suppress(ImportError):  # not in this build of vLLM
        compare(name, call)


class FlashMade:
    """Modules that stand for vLLM's: they take what its functions take and compute by our references."""

    def __init__(self):
        self.planned = []

    def get_scheduler_metadata(self, batch, queries, most, heads, kv_heads, size, lengths, dtype, **rest):
        self.planned.append((batch, queries, most, heads, kv_heads, size, rest["headdim_v"]))
        assert rest["cu_seqlens_q"].tolist() == [0, 1, 2] and rest["page_size"] == PAGE
        return "schedule"

    def flash_attn_varlen_func(self, q, k, v, *, seqused_k, block_table, softmax_scale, **rest):
        assert rest["scheduler_metadata"] == "schedule" and rest["max_seqlen_k"] == CONTEXT and rest["fa_version"] == 3
        if "q_v" in rest:
            cache = torch.cat((v, k), -1)[:, :, 0]
            return ops.mla_decode.reference(rest["q_v"], q, cache, block_table, seqused_k, softmax_scale)[0]
        return ops.paged_attention_decode.reference(q, k, v, block_table, seqused_k, softmax_scale)[0]

    def get_mla_metadata(self):
        self.planned.append(())
        return "schedule", None

    def flash_mla_with_kvcache(self, q, cache, table, lengths, size, schedule, *, softmax_scale, causal):
        assert schedule == "schedule" and causal and q.shape[1] == cache.shape[2] == 1
        parts = q[:, 0].split([size, q.shape[3] - size], -1)
        return ops.mla_decode.reference(*parts, cache[:, :, 0], table, lengths, softmax_scale)[0][:, None], None


@pytest.mark.parametrize(
    ("name", "by", "module", "plan"),
    [
        ("paged_attention_decode", "vllm FlashAttention 3", FLASH, (2, 1, 37, 16, 1, 128, 128)),
        ("mla_decode", "vllm FlashAttention 3", FLASH, (2, 1, 37, 16, 1, 64, 512)),
        ("mla_decode", "vllm FlashMLA", "vllm.v1.attention.ops.flashmla", ()),
    ],
)
def test_a_step_plans_once_for_all_layers(name, by, module, plan, monkeypatch):
    made = FlashMade()
    names = [n for n in dir(made) if n.startswith(("get_", "flash_"))]
    fake = types.SimpleNamespace(**{n: getattr(made, n) for n in names})
    load = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda asked: fake if asked == module else load(asked))
    others = {other: make for other, make in stock_attention.KINDS[name].items() if other in (by, "torch")}
    monkeypatch.setitem(stock_attention.KINDS, name, others)
    chosen = stock.Stock(getattr(ops, name), "cuda")
    given = arguments(name, "cpu")
    layers = [chosen(*given) for _ in range(3)]
    assert made.planned == [plan] and chosen.used == {by: []}
    assert torch.equal(layers[0][0], getattr(ops, name).reference(*given)[0]) and layers[0][1].numel() == 0
    monkeypatch.setattr(made, "planned", [])
    for wrong in fake.__dict__:
        if wrong.startswith("flash_"):
            exact = getattr(fake, wrong)

            def off(*a, exact=exact, **k):
                found = exact(*a, **k)
                return (1.1 * found[0], None) if isinstance(found, tuple) else 1.1 * found

            monkeypatch.setattr(fake, wrong, off)
    chosen = stock.Stock(getattr(ops, name), "cuda")
    chosen(*given)
    [(used, [first, *_])] = chosen.used.items()
    assert used == "torch" and "off by 0.10" in first


def test_a_write_to_another_slot_is_not_the_same(monkeypatch):
    """What an op updates is compared too."""

    def late(query, key, value, positions, cos_sin, is_neox, key_cache, value_cache, slots):
        stock_attention._rotate_by_torch(
            query, key, value, positions, cos_sin, is_neox, key_cache, value_cache, slots - 1
        )

    monkeypatch.setitem(stock_attention.KINDS, "rope_and_cache", {"late": lambda: late})
    with pytest.raises(RuntimeError, match="late: ValueError its result is off by 0."):
        stock.Stock(ops.rope_and_cache, "cuda")(*arguments("rope_and_cache", "cpu"))
