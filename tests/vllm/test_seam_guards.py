"""Test guards of attention seams that nothing else tests without an engine."""

import frames
import pytest
import torch
from fakes import Fake, fake_decoder, parameter
from vllm._aiter_ops import rocm_aiter_ops

from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import backends, mla_absorb
from vllm_rocm_ops.vllm.attention import decoder as attention
from vllm_rocm_ops.vllm.attention import mla as mla_attention
from vllm_rocm_ops.vllm.attention import timing as attention_timing


def choices(*plugin: bool) -> tuple:
    """Return the choices of a layer, one for each length of requests."""
    serves = [lambda requests, wins=wins: wins for wins in plugin]
    return tuple(Fake(plugin_serves=f, baseline_always_serves=not f(1), layers=None) for f in serves)


@pytest.mark.parametrize(
    ("of", "plugin"),
    [(choices(True, True), True), (choices(True, False), False), (choices(False, True), False), ((), False)],
)
def test_the_plugin_serves_where_it_is_faster_at_every_length(of, plugin):
    decoder = attention.HeadsDecoder.__new__(attention.HeadsDecoder)
    decoder.is_forced, decoder.choices = False, {1: of}
    assert decoder.plugin_serves((3, 1)) is plugin


@pytest.mark.parametrize(
    ("of", "forced", "unsupported_reason", "never"),
    [
        ({1: choices(True, True)}, False, "", False),
        ({1: choices(True, False)}, False, "", True),
        ({1: choices(True, False), 4: choices(True, True)}, False, "", False),
        ({}, False, "", True),
        ({}, True, "", False),
        ({1: choices(True, True)}, False, "ALiBi is not supported", True),
    ],
)
@pytest.mark.parametrize("kind", [attention.DecodeImpl, mla_attention.MlaImpl])
def test_an_implementation_that_ours_never_serves_is_vllms_own(kind, of, forced, unsupported_reason, never):
    """It is from its second batch on, which asks the plugin nothing."""
    name, *parameters = kind.METHOD

    asked = []

    def theirs(self, *given):
        asked.append(given)
        return "theirs"

    impl = type("Impl", (kind, type("Stock", (), {name: theirs})), {"__init__": lambda self: None})()
    impl.rocm_ops = attention.Decoder.__new__(attention.Decoder)
    impl.rocm_ops.choices, impl.rocm_ops.is_forced, impl.rocm_ops.unsupported_reason = of, forced, unsupported_reason
    impl.rocm_ops.serve = lambda *_: False
    given = [None if parameter.startswith("output_") else parameter for parameter in parameters]

    def call():
        assert getattr(impl, name)(*given) == "theirs"

    assert frames.entered(call)
    assert bool(frames.entered(call)) is not never
    assert asked == [tuple(given)] * 2


def test_whether_a_layer_ever_serves_is_computed_once():
    """It is found once measurements are known, and again for a new cache."""
    decoder = attention.Decoder.__new__(attention.Decoder)
    decoder.is_forced, decoder.unsupported_reason, decoder.choices = False, "", {1: choices(True)}
    of = decoder.choices[1][0]
    of.layers = {}
    assert not decoder.baseline_always_serves()
    of.layers, of.baseline_always_serves = None, True
    assert decoder.baseline_always_serves()
    decoder.choices = None  # no call reads it any more
    assert decoder.baseline_always_serves()


def test_caches_in_another_order_are_left_alone(configuration, monkeypatch):
    """These are AMX's cache, AITER's shuffled one, and one with interleaved values."""
    impl, cache = Fake(head_size=64, num_kv_heads=2), torch.zeros(4, 2, 32, 128)
    assert backends.of_cpu(impl, Fake(isa="vec"), cache) and backends.of_cpu(impl, Fake(isa="amx"), cache) is None
    for shuffled in (False, True):
        monkeypatch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda shuffled=shuffled: shuffled)
        assert (backends.packed_or_shuffled(impl, None, cache) is None) is shuffled
    for heads in (1, 2):  # as up to 0.28, where keys and values are not apart
        impl._split_kv_cache = lambda kv_cache: kv_cache.transpose(1, 2).split(64, dim=-1)
        given = torch.zeros(4, heads, 32, 128), torch.zeros(4, 2, 32, heads * 64)
        assert [backends.packed_or_shuffled(impl, None, one) for one in given] == [None, None]
    impl._use_interleaved_v_cache = True
    assert backends.split_rocm_cache(impl, None, cache) is None
    for shuffled in (False, True):
        impl._shuffle_kv_layout = shuffled
        assert (backends.packed_unless_interleaved(impl, None, cache) is None) is shuffled


@pytest.mark.parametrize(
    "changed",
    [
        {"is_forced": True},
        {"unsupported_reason": "ALiBi is not supported"},
        {"is_batch_invariant": True},
        {"impl": Fake(dcp_world_size=2)},
    ],
    ids=["forced", "lacking", "invariant", "gathered heads"],
)
def test_unsupported_attention_is_not_measured(changed):
    assert attention_timing.is_measured(fake_decoder())
    assert not attention_timing.is_measured(fake_decoder(**changed))


@pytest.mark.parametrize("longest", [length + by for length in attention_timing.LENGTHS for by in (-1, 0, 1)])
def test_requests_are_as_long_as_the_model_allows(configuration, longest):
    """A model of exactly a listed length is measured at it."""
    lengths = [length for length in attention_timing.LENGTHS if length <= longest] or [longest]
    decoder = fake_decoder(longest, baseline_alone=True)
    attention_timing.choose(decoder, Fake(_k_scale=torch.ones(1)), None, 16)
    pages = [f"32:8x128 auto page 16 {n} of {longest} keys" for n in lengths]
    assert [choice.key.call for choice in decoder.choices[1]] == pages
    assert decoder.baseline_alone is None  # found for other choices


def test_with_drafts_single_rows_are_measured_too(configuration):
    """The first step of a request has no drafts. A builder may take a request with drafts for a prefill, or none for one."""
    decoder = fake_decoder(supports_rows=lambda query_len: query_len <= 4)
    for drafts, most, wanted in ((0, None, {1}), (3, None, {1, 4}), (3, 4, {1, 4}), (3, 1, {1}), (4, None, {1})):
        decoder.config.speculative_config, decoder.choices = Fake(num_speculative_tokens=drafts), {}
        attention_timing.choose(decoder, Fake(_k_scale=torch.ones(1)), Fake(reorder_batch_threshold=most), 16)
        assert decoder.choices.keys() == wanted
        why = attention_timing.drafts_refusal(decoder, Fake(reorder_batch_threshold=most))
        assert bool(why) == (wanted == {1} and drafts > 0)
        assert ("prefills: 4 rows, of which it takes 1 for a decode" in why) == (most == 1)


def test_tokens_of_another_type_than_the_weight_are_torchs():
    """torch raises the error."""
    layer = Fake(W_UK_T=parameter(torch.ones(2, 8, 8).bfloat16()))
    mla_absorb.adopt(layer, True, 64)
    assert type(layer.W_UK_T) is seam.mixed(mla_absorb.Absorbed, torch.nn.Parameter)
    with pytest.raises(RuntimeError, match="Half"):
        torch.bmm(torch.ones(2, 1, 8).half(), layer.W_UK_T)
