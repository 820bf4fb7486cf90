"""Test the plugin's decode attention in vLLM's backends: the calls it serves, their caches, and the engine's tokens."""

import dataclasses
import sys
import types

import checkpoints
import on_cpu
import pytest
import torch
from engines import STEPS
from fakes import Counting, Fake, set_config
from marks import full
from torch.utils._python_dispatch import TorchDispatchMode
from vllm._aiter_ops import rocm_aiter_ops
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.v1.attention.backends import registry

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import backends as attention_backends
from vllm_rocm_ops.vllm.attention import decoder as attention
from vllm_rocm_ops.vllm.attention import timing as attention_timing
from vllm_rocm_ops.vllm.meta import simulated

LAYERS = {"llama": checkpoints.LLAMA["num_hidden_layers"], "deepseek": checkpoints.DEEPSEEK["num_hidden_layers"]}
HEADS, KV_HEADS, SIZE, PAGE, SCALE = 6, 2, 64, 16, 0.11
SENTINEL = 7.0


# In the engine


def prompts() -> list[list[int]]:
    """Return prompts, of which some have pages that a second generation finds in the cache."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 500, (length,), generator=generator).tolist() for length in (70, 9, 97)]


@pytest.fixture(scope="module")
def generated(engines) -> dict[str, dict]:
    """Return the answers of models with the plugin's attention and without, by vLLM's CPU engine; each generates twice."""
    jobs = {}
    for name in LAYERS:
        for whose, switch in {"plugin": "1", "stock": "0"}.items():
            made = engines.job((name, "bf16"), then=["again"], environment={"VLLM_ROCM_OPS_ATTENTION": switch})
            if name == "llama":  # vLLM has no prefixes of MLA on CPU
                made["prompts"], made["engine"]["enable_prefix_caching"] = prompts(), True
                made["engine"]["block_size"] = 32
            jobs[f"{name} {whose}"] = made
    return engines.run(jobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "op", "bound"), [("llama", "paged_attention_decode", 0.018), ("deepseek", "mla_decode", 0.003)]
)
def test_tokens_equal_baseline_vllms(generated, model, op, bound):
    """Tokens are equal, also with cached prefixes.

    The plugin has one call per layer and step after the prefill, and none unless enabled. The bound is on the mean, as
    one log probability moves by two roundings of a bf16 logit (0.125) and by the processor's own kernels. Attention
    that is 2 % too large has means of 0.025 and 0.005; right, they are 0.010 and 0.001.
    """
    plugin, baseline = generated[f"{model} plugin"], generated[f"{model} stock"]
    assert plugin["tokens"] == baseline["tokens"]
    assert plugin["then"] == baseline["then"]
    assert plugin["cached"] == baseline["cached"]
    assert (plugin["cached"] > 0) is (model == "llama")
    assert sum(plugin["stats"][op].values()) == LAYERS[model] * (STEPS - 1)
    products = sum(sum(plugin["stats"].get(name, {}).values()) for name in ("batched_gemm", "batched_gemm_rope"))
    prefills = LAYERS[model]  # whose queries one launch rotates
    assert products == (2 * LAYERS[model] * (STEPS - 1) + prefills if model == "deepseek" else 0)
    assert not {op, "batched_gemm"} & baseline["stats"].keys()
    assert plugin["logprobs"] != baseline["logprobs"]  # by rounding: two implementations ran
    difference = torch.tensor(plugin["logprobs"]) - torch.tensor(baseline["logprobs"])
    assert difference.abs().mean() < bound


MEASURED = """
import os
from fakes import FakeClock
from vllm_rocm_ops.vllm.attention import decoder as attention, timing as attention_timing
from vllm_rocm_ops.vllm import worker_startup

class Clock(FakeClock):
    def times(self, calls, sets, replays):
        for call in calls.values():
            call(*sets[0])
        metadata = sets[0][-1]
        lens = getattr(getattr(metadata, "decode", metadata), "seq_lens", (1,))  # there are none of products
        slow = str(int(lens[0])) == os.environ["SLOW"]
        return {"plugin": [3.0 if slow else 1.0], "baseline": [2.0]}

worker_startup.clock, attention_timing.LENGTHS = Clock, (32, 100)
right = attention.run

def run(op, *arguments):
    out, *rest = right(op, *arguments)
    for written in (out, op.Arguments(*arguments).out):
        if written is not None:
            written.mul_(float(os.environ["FACTOR"]))
    return out, *rest

attention.run = run
"""


WHAT = {
    "faster": ("llama", "0", 1.0),
    "slower with more keys": ("llama", "100", 1.0),
    "wrong": ("llama", "0", 1.05),
    "latent": ("deepseek", "0", 1.0),
}
OPS = {"llama": ("paged_attention_decode", "4:2x64"), "deepseek": ("mla_decode", "4x512+64")}
OF = {"llama": ("page 32", "CPUAttentionBackend"), "deepseek": ("page 16", "CPUMLABackend")}


@pytest.fixture(scope="module")
def measured(engines, tmp_path_factory) -> dict[str, tuple]:
    """Return what was served and recorded if the plugin is faster, faster for few keys only, and wrong."""
    folder, jobs = tmp_path_factory.mktemp("measured"), {}
    for name, (model, slow, factor) in WHAT.items():
        environment = {"VLLM_ROCM_OPS_TABLES": str(folder / name), "SLOW": slow, "FACTOR": str(factor)}
        jobs[name] = engines.job((model, "bf16"), environment=environment)
        jobs[name]["engine"]["block_size"] = 32 if model == "llama" else None
    return engines.run(jobs, before=MEASURED), {name: on_cpu.records(folder / name) for name in WHAT}


@full
@pytest.mark.slow
@pytest.mark.parametrize("what", WHAT)
def test_what_was_measured_to_be_faster_serves(measured, what):
    """It serves at every length. An op that is wrong on this machine is off."""
    answers, records = measured
    model, slow, factor = WHAT[what]
    (op, shape), (page, backend) = OPS[model], OF[model]
    stats, [record] = answers[what]["stats"].get(op, {}), records[what]
    assert sum(stats.values()) == (LAYERS[model] * (STEPS - 1) if (slow, factor) == ("0", 1.0) else 0)
    products = {key for key in record.shapes if key.op.startswith("batched_gemm")}
    assert len(products) == (2 if model == "deepseek" else 0)
    if what == "wrong":
        assert shape in record.off[op]
        assert answers["output"].count(f"{op} is off on this GPU") == 1
        return
    keys = [f"{op} {shape} auto {page} {n} of 256 keys {backend}" for n in (32, 100)]
    timed = {str(key): by_tokens for key, by_tokens in record.shapes.items() if key.op.startswith(op)}
    assert sorted(timed) == sorted(keys) and all(list(one) == [1, 2, 4] for one in timed.values())
    assert all(0 < one.error < 0.01 for by_tokens in timed.values() for one in by_tokens.values())


# Backends


@dataclasses.dataclass
class Batch:
    """A call of a layer with requests of these lengths, of which the last `query_lens` tokens are the rows."""

    lens: list[int]
    query_lens: list[int]
    padding: int = 0  # rows of tensors after the batch's tokens
    fp8: bool = False
    layout: str = "contiguous"
    output_dtype: torch.dtype = torch.bfloat16
    fp8_query: bool = False
    q_scales: tuple[int, ...] = ()  # their shape

    def __post_init__(self):
        generator = torch.Generator().manual_seed(sum(self.lens))
        self.pages = torch.randperm(40, generator=generator)[: 4 * len(self.lens)].view(-1, 4).int()
        shape = (len(self.lens), 4 * PAGE, KV_HEADS, SIZE)
        self.keys, self.values = (torch.randn(shape, generator=generator) for _ in range(2))
        self.keys[:, 3:7] *= 3
        tokens = sum(self.query_lens) + self.padding
        self.query = torch.randn(tokens, HEADS, SIZE, generator=generator).bfloat16()
        dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        self.keys, self.values = self.keys.to(dtype), self.values.to(dtype)
        self.scales = (0.4, 2.3) if self.fp8 else (1.0, 1.0)
        self.output = torch.full_like(self.query, SENTINEL, dtype=self.output_dtype)
        self.q_scale = 0.6 if self.fp8_query else 1.0
        if self.fp8_query:
            self.query = self.query.to(dtype)

    def expected(self, window: int = 99, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output, in float64."""
        rows, begin = torch.full(self.query.shape, SENTINEL, dtype=torch.float64), 0
        for request, (length, count) in enumerate(zip(self.lens, self.query_lens)):
            heads = (x[request].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (self.keys, self.values))
            keys, values = heads
            for t in range(count):
                end = max(length - count + t + 1, 0)
                seen = slice(max(end - window, 0), end)
                scores = torch.einsum("hd,nhd->hn", self.query[begin + t].double(), keys[seen])
                scores = scores * SCALE * self.scales[0] * self.q_scale
                if sinks is not None:
                    scores = torch.cat((scores, sinks.double()[:, None]), 1)
                weights = scores.softmax(-1)[:, : end - seen.start]
                rows[begin + t] = torch.einsum("hn,nhd->hd", weights, values[seen]) * self.scales[1]
            begin += count
        return rows

    def packed(self) -> torch.Tensor:
        """Return a cache [pages, heads, slots, key and value], with NaN in unwritten slots."""
        cache = torch.full((40, KV_HEADS, PAGE, 2 * SIZE), torch.nan).to(self.keys.dtype)
        if self.layout == "tokens first":
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        elif self.layout == "padded":
            cache = torch.full((40, KV_HEADS, PAGE, 2 * SIZE + 32), torch.nan).to(self.keys.dtype)[..., : 2 * SIZE]
        data = cache.view(torch.uint8 if self.fp8 else cache.dtype)
        keys, values = (x.view(data.dtype) for x in (self.keys, self.values))
        for request, length in enumerate(self.lens):
            for token in range(length):
                page, slot = self.pages[request, token // PAGE], token % PAGE
                data[page, :, slot, :SIZE], data[page, :, slot, SIZE:] = keys[request, token], values[request, token]
        return data

    def baseline(self) -> torch.Tensor:
        """Return a cache [pages, 2, slots, bytes]: keys [heads, size / x, slots, x], values [heads, size, slots]."""
        both = self.packed()
        x = 16 // both.element_size()
        keys = both[..., :SIZE].unflatten(-1, (-1, x)).permute(0, 1, 3, 2, 4).reshape(40, PAGE, -1)
        values = both[..., SIZE:].transpose(2, 3).reshape(40, PAGE, -1)
        stacked = torch.stack([keys, values], 1 if self.layout == "padded" else 0)
        return stacked if self.layout == "padded" else stacked.transpose(0, 1)

    def shuffled(self) -> torch.Tensor:
        """Return a cache [pages, 2, slots, bytes] as vLLM's reshape_and_cache_shuffle_kernel writes it: each side has its pages, or a page both."""
        packed = self.packed()
        x, d, t = 16 // packed.element_size(), torch.arange(SIZE), torch.arange(PAGE)[:, None]
        at = d // x * PAGE * x + t * x + d % x, t // x * SIZE * x + d * x + t % x
        sides = torch.stack([torch.zeros(40, KV_HEADS, PAGE * SIZE, dtype=packed.dtype)] * 2)
        for side, place, part in zip(sides, at, packed.split(SIZE, -1)):
            side[..., place.flatten()] = part.flatten(2)
        sides = sides.transpose(0, 1)
        sides = sides.contiguous() if self.layout == "a page has both" else sides
        return sides.unflatten(-1, (PAGE, SIZE)).flatten(2).unflatten(-1, (PAGE, -1))

    def metadata(self, member: str, **given):
        tokens, longest = sum(self.query_lens), max(self.query_lens)
        common = {"num_actual_tokens": tokens, "seq_lens": torch.tensor(self.lens, dtype=torch.int32), "causal": True}
        common["block_table"] = self.pages
        if member == "ROCM_AITER_FA":
            decodes = [count for count in self.query_lens if count <= 8]
            common |= {"num_decodes": len(decodes), "num_decode_tokens": sum(decodes)}
            common["decode_metadata"] = Fake(max_query_len=max(decodes, default=0))
        else:
            common["max_query_len"] = longest
        return Fake(**common | given)


GPU_BACKENDS = attention.PLATFORMS["rocm"]


@pytest.fixture(autouse=True)
def aiter(monkeypatch):
    """Fake the module that ROCM_AITER_UNIFIED_ATTN imports for a layer, and the GPU that it asks for."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: Fake(gcnArchName="gfx942"))
    simulated.rocm_platform()  # it asks at import
    module = types.ModuleType("aiter.ops.triton.unified_attention")
    module.unified_attention = None
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def layer(configuration, monkeypatch):
    """Return a function that makes and calls a layer's implementation, and returns who served."""
    monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", "1")

    def call(member: str, batch: Batch, output_scale=None, given=(), cache=None, **options) -> str:
        served = []
        backend = attention_backends.made(attention.BACKENDS[member])
        baseline = backend.get_impl_cls().__mro__[2]
        monkeypatch.setattr(baseline, "forward", lambda self, *arguments: served.append(arguments))
        common = dict.fromkeys(("alibi_slopes", "sliding_window")) | {"kv_cache_dtype": "fp8" if batch.fp8 else "auto"}
        impl = backend.get_impl_cls()(HEADS, SIZE, SCALE, KV_HEADS, **common | options)
        k_scale, v_scale = map(torch.tensor, batch.scales)
        module = Fake(_k_scale=k_scale, _v_scale=v_scale, _q_scale=torch.full(batch.q_scales, batch.q_scale))
        if cache is None:
            cache = batch.baseline() if member == "ROCM_ATTN" else batch.packed()
        arguments = module, batch.query, None, None, cache, batch.metadata(member, **dict(given)), batch.output
        vllm_rocm_ops.reset_stats()
        impl.forward(*arguments, output_scale=output_scale)
        ran = sum(vllm_rocm_ops.stats().get("paged_attention_decode", {}).values())
        assert (ran, len(served)) in ((1, 0), (0, 1))
        assert not served or served[0] == (*arguments, output_scale, None)
        assert ran or (batch.output.float() == SENTINEL).all()
        return "plugin" if ran else "stock"

    return call


def assert_right(batch: Batch, **given) -> None:
    assert (batch.output.double() - batch.expected(**given)).abs().max() < 0.02


@pytest.mark.parametrize("member", GPU_BACKENDS)
@pytest.mark.parametrize("layout", ["contiguous", "tokens first", "padded"])
@pytest.mark.parametrize("fp8", [False, True])
def test_caches_are_read_as_they_lie(layer, member, layout, fp8):
    """The caches are in each order in memory, with the scales of keys and of values."""
    batch = Batch([33, 1, 50], [1, 1, 1], layout=layout, fp8=fp8)
    assert layer(member, batch) == "plugin"
    assert_right(batch)


@pytest.mark.parametrize("member", GPU_BACKENDS)
@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_queries_that_vllm_quantizes_are_served(layer, member, output_dtype):
    """vLLM gives them in the cache's dtype to Triton's and AITER's unified attention, with one scale or one per head."""
    batch = Batch([33, 1, 50], [1, 1, 1], fp8=True, fp8_query=True, output_dtype=output_dtype)
    scale = None if output_dtype == torch.bfloat16 else torch.tensor(0.02)
    assert layer(member, batch, output_scale=scale) == "plugin"
    got, wanted = batch.output.double() * (1.0 if scale is None else 0.02), batch.expected()
    assert ((got - wanted).abs() <= (0.02 if scale is None else wanted.abs() / 16 + 0.02)).all()
    assert layer(member, Batch([33], [1], fp8=True, fp8_query=True, q_scales=(KV_HEADS,))) == "stock"
    assert layer(member, Batch([33], [1], fp8=True, fp8_query=True, output_dtype=torch.float32)) == "stock"


@pytest.mark.parametrize("layout", ["contiguous", "a page has both"])
@pytest.mark.parametrize("fp8", [False, True])
def test_aiters_shuffled_cache_is_read(layer, monkeypatch, layout, fp8):
    monkeypatch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: True)
    batch = Batch([33, 1, 50], [1, 1, 1], layout=layout, fp8=fp8)
    assert layer("ROCM_AITER_FA", batch, cache=batch.shuffled()) == "plugin"
    assert_right(batch)


@pytest.mark.parametrize("member", GPU_BACKENDS)
def test_rows_behind_the_batch_are_left_alone(layer, member):
    """Rows that pad a graph's batch as requests without keys are zero; rows after all requests keep their values."""
    batch = Batch([20, 35, 0, 0], [1, 1, 1, 1], padding=3)
    batch.pages[2:] = 2**30
    assert layer(member, batch) == "plugin"
    wanted = batch.expected()
    wanted[2:4] = 0
    assert (batch.output.double() - wanted).abs().max() < 0.02
    assert (batch.output[4:] == SENTINEL).all()


@pytest.mark.parametrize("member", GPU_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_outputs_that_vllm_wants_quantized_are_served(layer, member, dtype):
    """The outputs use the scale of the next layer."""
    batch = Batch([33, 50], [1, 1], padding=1, output_dtype=dtype)
    assert layer(member, batch, output_scale=torch.tensor(0.02)) == "plugin"
    wanted = batch.expected()[:2]
    assert ((batch.output[:2].double() * 0.02 - wanted).abs() <= wanted.abs() / 16 + 0.02).all()
    assert (batch.output[2:].float() == SENTINEL).all()


@pytest.mark.parametrize("member", GPU_BACKENDS)
def test_the_kernel_writes_to_vllms_output(layer, member):
    """There is one launch, and PyTorch runs views only."""
    batch, called, emulator = Batch([20, 35], [1, 1], padding=1), [], Counting("gfx942")

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not any(result.alias_info for result in func._schema.returns):
                called.append(func.name())
            return func(*args, **kwargs or {})

    with launch.executor(emulator):
        forward = attention.HeadsDecoder.serve

        def serve(*arguments):
            with Calls():
                return forward(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention.HeadsDecoder, "serve", serve)
            assert layer(member, batch) == "plugin"
    assert called == ["vllm_rocm_ops::paged_attention_decode"] and len(emulator.launches) == 1
    assert_right(batch)


@pytest.mark.parametrize("member", GPU_BACKENDS)
def test_all_requests_may_have_the_same_few_rows(layer, member):
    """Speculative decoding has such requests. The first token of a request may be among them."""
    batch = Batch([20, 3, 49], [3, 3, 3])
    assert layer(member, batch) == "plugin"
    assert_right(batch)


@pytest.mark.parametrize("member", GPU_BACKENDS)
@pytest.mark.parametrize("query_lens", [(1, 1, 12), (1, 3), (9, 9), (2, 1, 2)])
def test_mixed_batches_stay_baseline(layer, member, query_lens):
    batch = Batch([30, 31, 32][: len(query_lens)], list(query_lens))
    assert layer(member, batch) == "stock"


@pytest.mark.parametrize("member", GPU_BACKENDS)
def test_calls_with_what_our_op_lacks_stay_baseline(layer, member):

    batch = Batch([20, 35], [1, 1])
    assert layer(member, batch) == "plugin"

    def rest(**options) -> str:
        return layer(member, Batch([20, 35], [1, 1]), **options)

    assert rest(given={"causal": False}) == "stock"
    assert rest(given={"causal": torch.tensor([True, False])}) == "stock"
    assert rest(alibi_slopes=[0.1] * HEADS) == "stock"
    assert rest(logits_soft_cap=30.0) == "stock"
    assert rest(kv_cache_dtype="fp8_e5m2") == "stock"
    wide = torch.zeros(HEADS, dtype=torch.float64 if member != "ROCM_AITER_FA" else torch.bfloat16)
    assert rest(sinks=wide) == "stock"
    batch = Batch([20, 35], [1, 1])
    batch.query = batch.query.float()
    assert layer(member, batch) == "stock"


def test_more_of_what_triton_has_stays_baseline(layer):
    for given in ({"mm_prefix_range_tensor": torch.zeros(1)}, {"rswa_prefix_lens": torch.zeros(1)}):
        assert layer("TRITON_ATTN", Batch([20], [1]), given=given) == "stock"
    assert layer("TRITON_ATTN", Batch([20], [1]), kv_cache_dtype="int8_per_token_head") == "stock"
    assert layer("TRITON_ATTN", Batch([20], [1]), chunk_lookback=2) == "stock"
    assert layer("TRITON_ATTN", Batch([20], [1]), attn_type="encoder_decoder") == "stock"


@pytest.mark.parametrize("member", GPU_BACKENDS)
def test_windows_and_sinks_are_served(layer, member):
    """A row sees the last `window` keys, its own among them. A sink only adds to a row's sum."""
    batch = Batch([33, 50], [1, 1])
    assert layer(member, batch, sliding_window=10) == "plugin"
    assert_right(batch, window=10)
    for sinks in (torch.full((HEADS,), 3.0), torch.tensor([0.0, 5.0, 8.0, 40.0, 200.0, -200.0])):
        batch = Batch([33, 50], [1, 1])
        assert layer(member, batch, sinks=sinks) == "plugin"
        assert_right(batch, sinks=sinks)
    if member != "ROCM_AITER_FA":  # other backends' kernels load sinks of any dtype
        batch, parameter = Batch([33, 50], [1, 1]), sinks.bfloat16()
        assert layer(member, batch, sinks=parameter) == "plugin" and parameter.dtype == torch.float32
        assert_right(batch, sinks=parameter)


def test_batches_that_a_graph_cannot_tell_apart_stay_baseline(layer, monkeypatch):
    """A graph for several tokens of one request may be replayed for fewer. One row is one row in any graph."""
    several, one = Batch([20], [4]), Batch([20], [1])
    modes = {CUDAGraphMode.FULL: "stock", CUDAGraphMode.FULL_AND_PIECEWISE: "plugin", CUDAGraphMode.NONE: "plugin"}
    for mode, who in modes.items():
        config = set_config(monkeypatch, compilation_config=Fake(cudagraph_mode=mode), speculative_config=None)
        assert layer("TRITON_ATTN", dataclasses.replace(several)) == who
        assert layer("TRITON_ATTN", dataclasses.replace(one)) == "plugin"
    config.speculative_config = Fake(enable_adaptive_verification=True)
    assert layer("TRITON_ATTN", dataclasses.replace(several)) == "stock"
    assert layer("TRITON_ATTN", dataclasses.replace(one)) == "plugin"


def test_switches_leave_decode_attention_to_vllm(layer, monkeypatch):
    """With the switch off and no measurement, and in batch-invariant mode, vLLM's own runs."""
    monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", "0")
    assert layer("ROCM_ATTN", Batch([20], [1])) == "stock"
    monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", "1")
    assert layer("ROCM_ATTN", Batch([20], [1])) == "plugin"
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True, raising=False)
    assert layer("ROCM_ATTN", Batch([20], [1])) == "stock"


def test_queries_are_timed_as_vllm_gives_them(configuration, monkeypatch):
    """For an FP8 cache, Triton's implementation gets them in e4m3."""
    monkeypatch.setattr(get_current_vllm_config(), "model_config", Fake(dtype=torch.bfloat16, max_model_len=64))
    kind, given = attention_backends.made(attention.BACKENDS["TRITON_ATTN"]).get_impl_cls(), []
    baseline = kind.__mro__[2]
    construct = baseline.__init__

    def __init__(self, *arguments, **keywords):
        construct(self, *arguments, **keywords)
        self.supports_quant_query_input = True  # as on a GPU

    monkeypatch.setattr(baseline, "__init__", __init__)
    monkeypatch.setattr(baseline, "forward", lambda self, *arguments: given.append(arguments))
    decoder = kind(HEADS, SIZE, SCALE, KV_HEADS, None, None, "fp8").rocm_ops
    assert attention_timing.is_measured(decoder) and decoder.describe().endswith("fp8 e4m3 queries")

    class Builder:
        def build(self, prefix, common):
            return Fake(**vars(common), block_table=common.block_table_tensor)

    batch = Batch([20, 20], [1, 1], fp8=True)
    module = Fake(kv_cache=batch.packed(), _k_scale=torch.tensor(0.4), _v_scale=torch.tensor(2.3))
    module._q_scale = torch.ones(KV_HEADS)
    assert not decoder.has_single_scales(module, True) and decoder.has_single_scales(module, False)
    module._q_scale = torch.tensor(0.03)
    layer = torch.ones(1), torch.bfloat16, attention_timing.Layer(decoder, module, Builder())
    context = attention_timing.Context(decoder, PAGE, 1, 20)
    x = batch.query.flatten(1)
    arguments = context.arguments(layer, x, 0)
    assert arguments[0].dtype == torch.float8_e4m3fn
    assert (arguments[0].float() * 0.03 - batch.query.float()).abs().max() < 0.2
    output = context.comparable(context.plugin(*arguments))
    exact = context.exact(arguments, x, torch.arange(2), torch.arange(HEADS * SIZE))
    assert output.dtype == torch.bfloat16 and (output.float() - exact).abs().max() < 0.02
    (found,) = context.baseline(*arguments)[:1]
    assert found.dtype == torch.bfloat16 and given[0][1] is arguments[0]


def test_an_op_without_outputs_says_that_it_ran(configuration):
    """The caller has another kernel, and must know."""
    case = next(iter(ops.rope_and_cache.cases()))
    arguments = case.make("cpu", torch.Generator().manual_seed(0), torch.float8_e4m3fnuz)
    assert ops.rope_and_cache.run_kernels(*arguments) is None
    with launch.executor(Emulator("gfx942")):
        assert ops.rope_and_cache.run_kernels(*arguments) is True


# The seam


def test_backends_keep_their_names(configuration):
    """vLLM compares names, and asks a class for the rest."""
    for member in attention.BACKENDS:
        backend = attention_backends.made(attention.BACKENDS[member])
        baseline = backend.__mro__[1]
        assert backend.get_name() == baseline.get_name()
        assert backend.get_builder_cls().__mro__[-1] is object
        assert issubclass(backend.get_impl_cls(), baseline.get_impl_cls())
        assert getattr(attention, backend.__name__) is backend
    with pytest.raises(AttributeError):
        attention.RocmOpsOtherBackend  # noqa: B018


ROCM = "vllm.v1.attention.backends.rocm_attn"


class OtherImpl(attention.DecodeImpl):
    METHOD = *attention.DecodeImpl.METHOD, "more"


CHANGES = {
    "RocmAttentionImpl.forward": {"kind": OtherImpl},
    "RocmAttentionImpl.heads": {"needs": ((f"{ROCM}.RocmAttentionImpl", ("heads",)),)},
    "RocmAttentionMetadata.lens": {"needs": ((f"{ROCM}.RocmAttentionMetadata", ("lens",)),)},
    "OtherImpl in": {"impl": "OtherImpl"},
    f"{ROCM}.Other as ROCM_ATTN": {"path": f"{ROCM}.Other"},
}


@pytest.mark.parametrize("lack", CHANGES)
def test_a_backend_of_another_shape_is_left_alone(configuration, lack):
    backend = attention.BACKENDS["ROCM_ATTN"]
    attention_backends.check("ROCM_ATTN", backend)
    with pytest.raises(seam.Unavailable, match=f"this vLLM lacks .*{lack}"):
        attention_backends.check("ROCM_ATTN", dataclasses.replace(backend, **CHANGES[lack]))


def test_another_plugins_backend_is_left_alone(configuration, monkeypatch):
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {registry.AttentionBackendEnum.CPU_ATTN: "theirs.Backend"})
    with pytest.raises(seam.Unavailable, match="another plugin replaces CPU_ATTN by theirs.Backend"):
        attention.SEAM.probe()
    registry._ATTN_OVERRIDES.clear()
    attention.SEAM.probe()
    attention.SEAM.install()
    assert registry.AttentionBackendEnum.CPU_ATTN.get_class() is attention_backends.made(attention.BACKENDS["CPU_ATTN"])
