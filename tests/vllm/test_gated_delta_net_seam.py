"""Test the launch of Gated DeltaNet in vLLM's engine, for Qwen3-Next and Qwen3.5: tokens, the steps that it serves, and its selection."""

import functools
import json

import checkpoints
import delta_net
import engine
import plain
import pytest
import test_selection
import torch
from engines import LOADED, STEPS, prompts, prompts_of
from fakes import Fake, change, check_and_time, parameter, require_near, spoil
from linears import one_rank  # noqa: F401
from marks import FULL, full
from test_drafts import NGRAM, PLAIN_NUMBA, WITHOUT_DRAFTS
from test_families import INSTALLED
from vllm.model_executor.layers.fusion import quant_activation
from vllm.model_executor.layers.linear import ReplicatedLinear

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.vllm.attention import gated_delta_net
from vllm_rocm_ops.vllm.attention import gated_delta_net_core as layers
from vllm_rocm_ops.vllm.attention.gated_delta_net_comparison import GatedDeltaNetPart, shapes_of
from vllm_rocm_ops.vllm.graph import fused_quant
from vllm_rocm_ops.vllm.selection import kernel_timing
from vllm_rocm_ops.vllm.selection.key import COMPILED
from vllm_rocm_ops.vllm.selection.replays import copies

OP = ops.gated_delta_net_decode
LAYERS = checkpoints.DELTA["layer_types"].count("linear_attention")
ON_GPU = torch.cuda.is_available()
LONG = 400  # tokens of prompts that fill a page
CACHED = {
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
}

# A layer

KEY_HEADS, HEADS, SIZE = 1, 2, 128
CHANNELS = (2 * KEY_HEADS + HEADS) * SIZE
KEYS = {"static": "kFp8StaticTensorSym", "groups": "kFp8Dynamic128Sym", "": "kFp8DynamicTokenSym"}


class OutProjection(torch.nn.Module):
    """out_proj, with vLLM's quantization of its input; its result is the input."""

    def __init__(self, kind: str):
        super().__init__()
        self.input_scale = torch.tensor(0.02) if kind == "static" else None
        self.vllm_rocm_ops_column_major_scales = False
        quant_activation.expose_input_quant_key(self, Fake(input_quant_key=lambda: getattr(fused_quant, KEYS[kind])))

    def vllm_rocm_ops_quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.input_scale is not None:
            return quantization.static(x.float(), self.input_scale, fused_quant.QUANT_DTYPE), self.input_scale
        values, scales = quantization.per_token(x.float().unflatten(1, (-1, SIZE)), fused_quant.QUANT_DTYPE, None)
        return values.flatten(1), scales.view(len(x), -1)

    def forward(self, x):
        return x, None


def projection(columns: int) -> torch.nn.Module:
    """Return in_proj_ba as vLLM makes it, with a weight as loaded."""
    linear = ReplicatedLinear(columns, 2 * HEADS, bias=False, params_dtype=torch.bfloat16)
    weight = torch.randn(2 * HEADS, columns, generator=torch.Generator().manual_seed(5)) * columns**-0.5
    linear.weight.data.copy_(2 * weight)
    linear.cpu_linear = torch.nn.functional.linear
    return linear


@pytest.fixture
def made(configuration, one_rank, monkeypatch):  # noqa: F811
    """Return a function that makes a part of a layer of vLLM's."""
    from vllm.model_executor.layers.layernorm import RMSNormGated
    from vllm.model_executor.layers.mamba import mamba_utils
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention as Layer
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, getattr(torch.cpu, name))
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", mamba_utils.get_conv_state_layout.__wrapped__)
    delta_net.install()
    gdn_attention.register_cpu_gdn_attention_ops()

    def make(
        interleaved: bool = True,
        state: str = "auto",
        kind: str = "",
        drafts: int = 0,
        dim_first: bool = False,
        tokens: int = 0,
    ) -> GatedDeltaNetPart:
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS" if dim_first else "SD")
        generator = torch.Generator().manual_seed(0)
        layer = Layer.__new__(Layer)
        torch.nn.Module.__init__(layer)
        layer.prefix, layer.tp_size, layer.num_spec, layer.activation = "layers.0", 1, drafts, "silu"
        layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim = KEY_HEADS, HEADS, SIZE, SIZE
        layer.key_dim, layer.value_dim, layer.conv_kernel_size = KEY_HEADS * SIZE, HEADS * SIZE, 4
        layer.gqa_interleaved_layout, layer._forward_method = interleaved, layer.forward_cpu
        layer.model_config = Fake(dtype=torch.bfloat16)
        layer.cache_config = Fake(mamba_cache_dtype="auto", mamba_ssm_cache_dtype=state)
        layer.A_log, layer.dt_bias = parameter(torch.rand(HEADS)), parameter(torch.randn(HEADS).bfloat16())
        layer.norm = RMSNormGated(SIZE, eps=1e-6, norm_before_gate=True, dtype=torch.bfloat16, activation="silu")
        layer.norm.weight.requires_grad_(False)
        layer.conv1d = torch.nn.Module()
        weight = 0.5 * torch.randn(CHANNELS, 1, 4, generator=generator)
        layer.conv1d.weight, layer.conv1d.bias = parameter(weight.bfloat16()), None
        layer.in_proj_qkvz, layer.in_proj_ba, layer.out_proj = (OutProjection(kind) for _ in range(3))
        if tokens:
            layer.in_proj_ba = projection(tokens)
        settings = Fake(static_forward_context={"layers.0": layer}, fast_moe_cold_start=False, static_all_moe_layers=[])
        speculative = Fake(num_speculative_tokens=drafts) if drafts else None
        config = Fake(
            model_config=layer.model_config,
            compilation_config=settings,
            speculative_config=speculative,
            scheduler_config=Fake(max_num_seqs=64),
        )
        return GatedDeltaNetPart(layer, config, COMPILED)

    return make


CASES = {
    "1:2x128 bfloat16 interleaved": {},
    "1:2x128 bfloat16 float32 dim first to e4m3 by 128": {
        "interleaved": False,
        "state": "float32",
        "kind": "groups",
        "dim_first": True,
    },
    "1:2x128 bfloat16 2 rows to e4m3": {"interleaved": False, "kind": "static", "drafts": 1},
    "1:2x128 bfloat16 interleaved from 256": {"tokens": 256},
}


@pytest.mark.parametrize("shape", CASES)
def test_a_kernel_is_measured_beside_vllms_layer(made, shape):
    """The emulated launch is as close to exact results and states as vLLM's layer."""
    part = made(**CASES[shape])
    assert str(part.key) == f"gated_delta_net_decode {shape} compiled" and part.key.has_one_choice
    assert part.token_counts([1, 2]) == [requests * part.rows for requests in (2, 8, 32)]
    require_near(part, 2 * part.rows)


@pytest.mark.parametrize("kind", ["", "groups"])
def test_vllms_layer_compiles(made, kind):
    """It is one graph, with vLLM's op inside, for any number of tokens."""
    part = made(kind=kind)
    baseline = part.compiled(lambda: functools.partial(torch.compile, backend="eager", fullgraph=True, dynamic=True))
    for tokens in (3, 5):
        given = part.inputs(tokens, 0)
        with torch.inference_mode():
            found, wanted = (run(*copies(given)) for run in (baseline, part.baseline))
        for pair in zip(part.results(found, tokens), part.results(wanted, tokens), strict=True):
            torch.testing.assert_close(*pair)


@pytest.mark.parametrize("result", ["out", "state", "conv_state"])
def test_each_result_is_checked(made, result, monkeypatch):
    spoil(monkeypatch, OP, result)
    with pytest.raises(kernel_timing.Mismatch):
        check_and_time(made())


def test_its_name_is_that_of_a_models_call(made):
    for shape, given in CASES.items():
        if not given.get("drafts"):
            state, *rest = given.get("state", "bfloat16"), given.get("kind", ""), given.get("tokens", 0)
            assert shape in shapes_of((1, 2, given.get("interleaved", True), state, *rest), torch.bfloat16)
            assert made(**given).pattern.shape == shape


UNSUPPORTED = {
    "two projections": ("in_proj_qkv", torch.nn.Identity()),
    "of all ranks": ("disable_tp_for_ba_proj", True),
    "activation gelu": ("activation", "gelu"),
    "of the gate sigmoid": ("norm.activation", "sigmoid"),
    "another gated norm": ("norm.norm_before_gate", False),
    "with a bias": ("conv1d.bias", parameter(torch.zeros(CHANNELS))),
    "another forward": ("_forward_method", lambda x: x),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_layers_are_not_served(made, what):
    layer = made().layer
    assert [*gated_delta_net.unsupported_features(layer)] == []
    layer.tp_size = 2
    change(layer, *UNSUPPORTED[what])
    [why] = gated_delta_net.unsupported_features(layer)
    assert what in why


def test_projections_as_lora_has_them_in_qwen3_5_are_not_served(made):
    """vLLM then makes in_proj_qkv and in_proj_z in place of in_proj_qkvz."""
    layer = made(interleaved=False).layer
    del layer.in_proj_qkvz
    layer.in_proj_qkv, layer.in_proj_z = torch.nn.Identity(), torch.nn.Identity()
    assert [*gated_delta_net.unsupported_features(layer)] == ["qkv and z from two projections"]


@pytest.mark.parametrize("kind", ["static", "groups"])
def test_an_out_proj_of_loras_gets_16_bits(made, kind):
    layer = made(kind=kind).layer
    assert layers.Core(layer).kind == kind
    layer.out_proj = Adapted(projection(256))
    assert layers.Core(layer).kind == ""


def test_batch_invariance_is_not_served(made, monkeypatch):
    from vllm import envs

    layer = made().layer
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    assert [*gated_delta_net.unsupported_features(layer)] == ["batch invariance"]


def step(part: GatedDeltaNetPart, **changed):
    """Return the metadata of a step of 3 requests, changed."""
    result = part.step(3, "cpu")
    for name, value in changed.items():
        setattr(result, name, value)
    return result


def test_only_steps_of_decode_rows_are_served(made):
    """Decodes beside drafts come as prefills; a step of prefills has no decode."""
    plain, drafting = made(), made(drafts=2)
    assert layers.requests_of(step(plain)).slots.shape == (3, 1)
    given = torch.tensor([1, 2, 3], dtype=torch.int32)
    slots, accepted, starts = layers.requests_of(step(drafting, num_accepted_tokens=given))
    assert slots.shape == (3, 3) and accepted.tolist() == [1, 2, 3] and starts.tolist() == [0, 3, 6, 9]
    for part, changed in (
        (plain, {"num_prefills": 1}),
        (plain, {"num_decodes": 0}),
        (drafting, {"num_prefills": 1}),
        (drafting, {"num_decodes": 1}),
    ):
        assert layers.requests_of(step(part, **changed)) is None


def test_a_padded_graph_has_more_slots_than_requests(made):
    """Absent requests of a captured step have slot 0: their results are zeros, and no state changes."""
    part = made()
    qkvz, ba, conv, state, _ = part.inputs(3, 0)
    metadata = step(part, non_spec_state_indices_tensor=torch.tensor([2, 0, 0, 1], dtype=torch.int32))
    before, outputs = (conv.clone(), state.clone()), part.core.outputs(qkvz)
    outputs[0].fill_(torch.nan)
    with part.running(conv, state, metadata):
        assert part.core.advance(qkvz, ba, metadata, outputs)
    assert outputs[0][0].abs().amin() > 0 and not outputs[0][1:].any()
    for now, then in zip((conv, state), before):
        assert not now[2].equal(then[2]) and now[[0, 1, 3]].equal(then[[0, 1, 3]])


def projected(part: GatedDeltaNetPart, metadata, adopted: bool) -> tuple[torch.Tensor, ...]:
    """Return what a layer hands to out_proj, dequantized, and both states, after a step."""
    qkvz, gates, conv, state, _ = part.inputs(metadata.num_actual_tokens, 0)
    layer = part.layer
    layer.in_proj_qkvz.forward = lambda x: (qkvz, None)
    if not part.core.projects:
        layer.in_proj_ba.forward = lambda x: (gates, None)
    layers.adopt(layer, adopted)
    with part.running(conv, state, metadata), torch.inference_mode():
        found = layer(gates if part.core.projects else qkvz)
    layers.adopt(layer, False)
    if isinstance(found, fused_quant.Quantized):
        scales = found.scale.expand(len(qkvz), HEADS) if found.scale.dim() < 2 else found.scale
        found = (found.data.float().unflatten(1, (-1, SIZE)) * scales[..., None]).flatten(1)
    return found.float(), conv, state


@pytest.mark.parametrize("tokens", [0, 256])
@pytest.mark.parametrize("kind", ["", "static", "groups"])
def test_other_steps_are_vllms_with_the_same_states(made, kind, tokens, monkeypatch):
    """A layer with the launch leaves a prefill and a step of decodes as vLLM's layer does, and quantizes what it hands over."""
    part = made(kind=kind, tokens=tokens)
    decodes = step(part)
    start = torch.tensor([0, 3], dtype=torch.int32)
    prefill = step(part, num_prefills=1, num_decodes=0, non_spec_query_start_loc=start)
    prefill.has_initial_state = torch.tensor([False])
    calls = []
    monkeypatch.setattr(layers.decoder, "run", lambda op, *given: calls.append(op) or op(*given) or True)
    for metadata, launches in ((prefill, []), (decodes, [OP])):
        calls.clear()
        (values, *states), (wanted, *left) = (projected(part, metadata, adopted) for adopted in (True, False))
        assert calls == launches
        torch.testing.assert_close(values, wanted, rtol=0.07 if kind else 0.02, atol=0.03)
        for now, then in zip(states, left):
            torch.testing.assert_close(now, then, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("most", [2, 3])
def test_the_launch_projects_b_and_a_of_few_requests(made, most, monkeypatch):
    """With more requests the op runs in_proj_ba first."""
    part = made(tokens=256)
    qkvz, tokens, conv, state, metadata = part.inputs(3, 0)
    monkeypatch.setattr(layers, "MOST_PROJECTED", most)
    with part.running(conv, state, metadata):
        given = OP.Arguments(*part.core.arguments(qkvz, tokens, layers.requests_of(metadata), part.core.outputs(qkvz)))
    if most == 3:
        assert given.ba is None and given.tokens is tokens and given.ba_weight is part.layer.in_proj_ba.weight
    else:
        assert given.tokens is None and torch.equal(given.ba, part.layer.in_proj_ba(tokens)[0])


class Adapted(torch.nn.Module):
    """A linear layer as LoRA wraps it."""

    def __init__(self, base_layer: torch.nn.Module):
        super().__init__()
        self.base_layer, self.weight, self.quant_method = base_layer, base_layer.weight, base_layer.quant_method
        self.bias = None


APART = {
    "drafts": lambda layer: setattr(layer, "num_spec", 1),
    "LoRA": lambda layer: setattr(layer, "in_proj_ba", Adapted(layer.in_proj_ba)),
    "a quantized weight": lambda layer: setattr(layer.in_proj_ba, "quant_method", Fake()),
    "a float32 weight": lambda layer: layer.in_proj_ba.float(),
    "a bias": lambda layer: setattr(layer.in_proj_ba, "bias", parameter(torch.zeros(2 * HEADS))),
    "a packed weight": lambda layer: setattr(layer.in_proj_ba, "weight", parameter(torch.zeros(0).bfloat16())),
    "odd columns": lambda layer: setattr(layer, "in_proj_ba", projection(252)),
    "many columns": lambda layer: setattr(layer, "in_proj_ba", projection(4104)),
    "heads of other ranks": lambda layer: setattr(layer, "tp_size", 2),
}


@pytest.mark.parametrize("why", APART)
def test_other_projections_of_b_and_a_stay_apart(made, why):
    layer = made(tokens=256).layer
    assert layers.may_project(layer)
    APART[why](layer)
    assert not layers.may_project(layer)


def test_a_layer_is_served_where_it_won_or_is_forced(made, monkeypatch):
    part = made()
    plain = type(part.layer)
    for serves, forced in ((True, ""), (False, ""), (False, "1")):
        monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", forced)
        assert part.runs_unmeasured() == bool(forced)
        part.apply_decision(serves)
        assert isinstance(part.layer, layers.OneLaunch) == (serves or bool(forced))
        assert isinstance(part.layer, plain) and type(part.layer).__name__ == plain.__name__


# In vLLM's engine

MODELS = {
    "next": ("qwen3_next", "mixed"),
    "cached": ("qwen3_next", "mixed"),
    "drafts": ("qwen3_next", "mixed"),
    "cached drafts": ("qwen3_next", "mixed"),
    "dense": ("qwen3_5_text", "block"),
    "static": ("qwen3_5_text", "static"),
    "experts": ("qwen3_5_moe_text", "mixed"),
}
LONG_SEEDS, DRAFTED_SEEDS = (41, 56, 72), (154, 173, 238)
"""Seeds of prompts that fill a page, and of prompts for more steps, found as engines.py tells."""
PAGE = 256
KEPT = {**CACHED, "prefix_cache_retention_interval": PAGE}
"""Options with which pages of answers are kept, too."""
TURNS = (427, 253, 29), (502, 249, 54), (135, 251, 52)
"""Seeds and lengths of prompts with whose answers a page ends, and how many tokens of a prompt follow its answer. Found in the same way."""
PLUGIN_ONLY = "dense", "static"
"""Models whose linear layers vLLM's CPU build lacks."""
RUN = [name for name in MODELS if FULL or name != "static"]
BEFORE = f"""{PLAIN_NUMBA}
import delta_net
delta_net.install_absent()
delta_net.keep_small_weights()
"""
EXPERT_GATE = "silu_and_mul_with_expert_gate_per_token_quant"


def jobs(engines, names, switch: str) -> dict[str, dict]:
    """Return a job for each name, with the launch or without."""
    result = {}
    for name in names:
        environment = {"VLLM_ROCM_OPS_ATTENTION": switch, "VLLM_ROCM_OPS_MEASURE": "0"}
        compiled = name == "next" and switch == "1"
        job = engines.job(MODELS[name], compiled=compiled, environment=environment)
        if name == "cached":
            job["prompts"] = [of_words(seed, LONG) for seed in LONG_SEEDS]
            job["engine"] |= CACHED
            job["then"] = (
                ["again", "reload"] if switch == "1" else ["again"]
            )  # after it vLLM's CPU build says something else
        elif name == "cached drafts":
            job["prompts"] = [of_words(seed, 1 + length)[1:] for seed, length, _ in TURNS]
            job["turns"] = [prompt[:repeated] for prompt, (_, _, repeated) in zip(job["prompts"], TURNS)]
            job["engine"] |= KEPT
            job["then"] = ["again", engine.TURN] if switch == "1" else [engine.TURN]
            if switch == "1":
                job["engine"]["speculative_config"] = {**NGRAM, "num_speculative_tokens": 3}
        elif name == "drafts" and switch == "1":  # vLLM's CPU build says something else with drafts
            job["engine"]["speculative_config"] = {**NGRAM, "num_speculative_tokens": 3}
            job["engine"]["enable_prefix_caching"] = False
        elif name == "next":
            job["max_tokens"] = [STEPS, STEPS - 2, STEPS]
        if name == "drafts":
            job["prompts"] = prompts_of(DRAFTED_SEEDS)
            job["max_tokens"] = [3 * STEPS, 3 * STEPS, STEPS]
        result[f"{name} {switch}"] = job
    return result


def of_words(seed: int, length: int) -> list[int]:
    """Return a prompt for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, checkpoints.LLAMA["vocab_size"], (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def plugin(engines, alone) -> dict[str, dict]:
    """Return the answers with the launch, and without it where vLLM alone has none."""
    asked = jobs(engines, RUN, "1") | jobs(engines, [name for name in RUN if name in PLUGIN_ONLY], "0")
    turned = asked["cached drafts 1"]
    turned["environment"][delta_net.KNOWN] = json.dumps(texts(turned, alone["cached drafts 0"]))
    before = f"{BEFORE}delta_net.draft_known({PAGE})\ndelta_net.install()"
    return engines.run(asked, before, "cache-delta-net")


def texts(job: dict, answer: dict) -> list[list[int]]:
    """Return prompts and answers of both turns."""
    first = [prompt + tokens for prompt, tokens in zip(job["prompts"], answer["tokens"])]
    return first + [text + turn + tokens for text, turn, tokens in zip(first, job["turns"], *answer["then"])]


@pytest.fixture(scope="module")
def alone(engines) -> dict[str, dict]:
    """Return the answers of vLLM alone, by its own kernels."""
    names = [name for name in RUN if name not in PLUGIN_ONLY]
    return engines.run(jobs(engines, names, "0"), BEFORE, VLLM_PLUGINS="none")


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="replaces what only vLLM's CPU build has")
@pytest.mark.parametrize("name", RUN)
def test_tokens_are_vllms(request, plugin, name):
    """Prefill and mixed steps stay vLLM's, and decode steps go on with their states."""
    found = plugin[f"{name} 1"]
    wanted = (plugin if name in PLUGIN_ONLY else request.getfixturevalue("alone"))[f"{name} 0"]
    assert OP.name not in wanted["stats"] and found["tokens"] == wanted["tokens"]
    calls = sum(found["stats"][OP.name].values())
    assert (EXPERT_GATE in found["stats"]) is (name not in PLUGIN_ONLY) and EXPERT_GATE not in wanted["stats"]
    if name == "drafts":
        assert found["accepted"] > 0 and "8" in found["rows"][OP.name]
        return
    if name == "cached drafts":  # pages end among accepted drafts, and another turn begins with their states
        assert found["accepted"] > 0 and min(found["cached"], wanted["cached"]) >= 2 * PAGE
        assert found["then"] == [found["tokens"], *wanted["then"]]
        return
    if name == "cached":  # prompts come one after another, beside decodes
        assert min(found["cached"], wanted["cached"]) >= len(LONG_SEEDS) * PAGE and wanted["then"] == [wanted["tokens"]]
        assert found["then"] == [found["tokens"]] * 2 and 0 < calls < LAYERS * (STEPS + 2)
        return
    assert calls == LAYERS * (STEPS - 1)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="replaces what only vLLM's CPU build has")
def test_tokens_are_those_of_a_plain_model(engines, plugin):
    """The model knows nothing of vLLM."""
    found, model = plugin["next 1"], plain.Next(engines.checkpoint(MODELS["next"]))
    for prompt, tokens in zip(prompts(MODELS["next"]), found["tokens"], strict=True):
        assert model.logits([*prompt, *tokens[:-1]], len(prompt))[len(prompt) - 1 :].argmax(1).tolist() == tokens


@full
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="replaces what only vLLM's CPU build has")
def test_tokens_of_generated_code(engines):
    """Code that Inductor generates and a later start loads calls the launch."""
    given = {"qwen3_next": jobs(engines, ["next"], "1")["next 1"], "static": jobs(engines, ["static"], "1")["static 1"]}
    given["static"]["engine"] = {**given["static"]["engine"], "enforce_eager": False}
    first, later = (
        engines.run(given, f"{BEFORE}delta_net.install()", "kept-delta-net", generates=True) for _ in range(2)
    )
    assert LOADED not in first["output"] and LOADED in later["output"]
    for name in given:
        assert first[name]["tokens"] == later[name]["tokens"]
        assert sum(later[name]["stats"][OP.name].values()) == LAYERS * (STEPS - 1)


ELSEWHERE = "next", "drafts", "experts"


@full
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="has its own release")
@pytest.mark.parametrize("release", [release for release in test_selection.RELEASES if release != INSTALLED])
def test_tokens_in_other_releases(engines, alone, release, tmp_path):
    """They are the installed release's without the launch."""
    package, cache = test_selection.runnable(release, tmp_path), f"delta-net-{release}"
    names = [name for name in ELSEWHERE if name != "drafts" or release != WITHOUT_DRAFTS]
    found = engines.run(jobs(engines, names, "1"), f"{BEFORE}delta_net.install()", cache, package)
    for name in names:
        assert found[f"{name} 1"]["tokens"] == alone[f"{name} 0"]["tokens"], name
        assert sum(found[f"{name} 1"]["stats"][OP.name].values()) >= LAYERS * (STEPS - 2)
        assert EXPERT_GATE in found[f"{name} 1"]["stats"], name
