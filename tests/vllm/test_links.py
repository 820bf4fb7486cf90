"""Norms and activations are linked to the linear that alone reads their result: which it is says the source of vLLM's models, in every
release that the seams were tried on, and where the source is another one there is no link."""

import __future__

import ast
import subprocess

import pytest
import test_selection
import torch
from torch import nn

from vllm_rocm_ops.vllm import readers

MODELS = "vllm/model_executor/models"


class Leaf(nn.Module):
    """A linear layer, experts or attention: followed no further."""


class Norm(nn.Module):
    """A norm or an activation."""


class Other(nn.Module):
    """What neither is."""


def of_release(release: str, path: str, name: str, **parts) -> nn.Module:
    """A module with these parts and the forward of a class of a vLLM release, of which nothing else is imported. Classes that the
    forward names are those of the parts."""
    try:
        file = test_selection.python_files(test_selection.RELEASES[release]) / f"{path}.py"
    except subprocess.CalledProcessError as error:
        raise pytest.skip.Exception(f"vLLM {release} is not here and cannot be downloaded: {error}") from error
    tree = ast.parse(file.read_text())
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    functions = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    functions = [node for node in functions if not node.decorator_list]
    names = {"super": super} | {type(part).__name__: type(part) for part in parts.values()}
    for node in functions:
        code = compile(ast.Module([node], []), str(file), "exec", __future__.annotations.compiler_flag)
        exec(code, names)  # noqa: S102  vLLM's own
    methods = {node.name: names[node.name] for node in functions}
    return made(type(name, (nn.Module,), {**methods, "__module__": "vllm"}), **parts)


def made(cls: type, **parts) -> nn.Module:
    """A module of a class with these parts, made without its own constructor."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def links(model: nn.Module) -> dict[str, str]:
    """The norms and activations of a model -> the one leaf that reads each, or what else does."""
    known, found = readers.Model(model, (Leaf,)), {}
    for name, layer in model.named_modules():
        if not isinstance(layer, Norm):
            continue
        read = known.readers(layer)
        if isinstance(read, str):
            found[name] = read
        else:
            names = [part for _, part in read.parts.values()]
            found[name] = ", ".join([*names, *read.others]) + " as a tensor" * read.as_tensor
    return found


DENSE = {
    # family -> the classes of its decoder layer, attention and feed-forward
    "llama": ("llama.LlamaDecoderLayer", "llama.LlamaAttention", "llama.LlamaMLP"),
    "mistral": ("mistral.MistralDecoderLayer", "mistral.MistralAttention", "mistral.MistralMLP"),
    "qwen2": ("qwen2.Qwen2DecoderLayer", "qwen2.Qwen2Attention", "qwen2.Qwen2MLP"),
    "qwen3": ("qwen3.Qwen3DecoderLayer", "qwen3.Qwen3Attention", "qwen2.Qwen2MLP"),
    "qwen2_moe": ("qwen2_moe.Qwen2MoeDecoderLayer", "qwen2_moe.Qwen2MoeAttention", "qwen2_moe.Qwen2MoeMLP"),
    "qwen3_moe": ("qwen3_moe.Qwen3MoeDecoderLayer", "qwen3_moe.Qwen3MoeAttention", "qwen3_moe.Qwen3MoeMLP"),
    "glm4_moe": ("glm4_moe.Glm4MoeDecoderLayer", "glm4_moe.Glm4MoeAttention", "glm4_moe.Glm4MoeMLP"),
    "mixtral": ("mixtral.MixtralDecoderLayer", "mixtral.MixtralAttention", "llama.LlamaMLP"),
}
ROUTED = {
    "qwen2_moe": ("qwen2_moe.Qwen2MoeSparseMoeBlock", "gate, experts as a tensor"),
    "qwen3_moe": ("qwen3_moe.Qwen3MoeSparseMoeBlock", "experts as a tensor"),
    "glm4_moe": ("glm4_moe.Glm4MoE", "gate, experts as a tensor"),
    "mixtral": ("mixtral.MixtralMoE", "gate, experts as a tensor"),
    "deepseek": ("deepseek_v2.DeepseekV2MoE", "experts as a tensor"),
}
"""A family -> the class of its experts and their router, and who reads the norm in front."""


def part(release: str, path: str, **parts) -> nn.Module:
    """The part of a model that is the class `file.Class`."""
    file, name = path.split(".")
    return of_release(release, f"{MODELS}/{file}", name, **parts)


def feed_forward(release: str, path: str) -> nn.Module:
    return part(release, path, gate_up_proj=Leaf(), act_fn=Norm(), down_proj=Leaf(), expert_gate=None)


def attention(release: str, path: str) -> nn.Module:
    names = {"qkv_proj": Leaf(), "o_proj": Leaf(), "attn": Leaf(), "rotary_emb": Other(), "do_llama_4_scaling": False}
    names |= {"q_norm": Norm(), "k_norm": Norm()} if path.split(".")[0] in ("qwen3", "qwen3_moe", "glm4_moe") else {}
    return part(release, path, **names, qk_norm=False, use_qk_norm=True)


def experts(release: str, path: str) -> nn.Module:
    return part(release, path, gate=Leaf(), experts=Leaf(), is_sequence_parallel=False)


@pytest.mark.parametrize("release", test_selection.ASKED)
@pytest.mark.parametrize("family", DENSE)
def test_layers_with_grouped_queries(release, family):
    """Both norms of a layer and its activation; not the norms of queries and keys, which are rotated then. In front of experts the router
    reads the norm, too."""
    decoder, attends, dense = DENSE[family]
    norms = {"input_layernorm": Norm(), "post_attention_layernorm": Norm(), "ada_rms_norm_t_cond": None}
    for routed in (False, True) if family in ROUTED else (False,):
        mlp = experts(release, ROUTED[family][0]) if routed else feed_forward(release, dense)
        named = {"block_sparse_moe" if family == "mixtral" else "mlp": mlp}
        layer = part(release, decoder, self_attn=attention(release, attends), **named, **norms)
        found = links(layer)
        rotated = "self.rotary_emb(positions, q, k) as a tensor"
        assert {found.pop(name, rotated) for name in ("self_attn.q_norm", "self_attn.k_norm")} == {rotated}
        wanted = {"input_layernorm": "qkv_proj"}
        if routed:
            casts = (family, release) == ("glm4_moe", "0.30")  # for its router
            by = "experts, hidden_states.to(dtype=torch.float32) as a tensor" if casts else ROUTED[family][1]
            wanted["post_attention_layernorm"] = by
        else:
            [place] = named
            wanted |= {"post_attention_layernorm": "gate_up_proj", f"{place}.act_fn": "down_proj"}
        assert found == wanted


def deepseek(release: str, routed: bool = False, sparse: bool = False, **flags) -> nn.Module:
    """A decoder layer of DeepSeek's."""
    flags = {"use_sequence_parallel_moe": False, "q_lora_rank": 128, "g_proj": None, "skip_topk": False, **flags}
    q = {"q_a_layernorm": Norm(), "q_b_proj": Leaf(), "fused_qkv_a_proj": Leaf(), "q_proj": None}
    if flags["q_lora_rank"] is None:
        q = {"q_proj": Leaf(), "kv_a_proj_with_mqa": Leaf()}
    rest = {"kv_a_layernorm": Norm(), "mla_attn": Leaf(), "o_proj": Leaf(), "rotary_emb": Other()}
    rest |= {"is_sparse": sparse, "indexer": Other() if sparse else None, "fuse_qkv_rmsnorm": False}
    rest |= {"dcp_q_replicate": False, **{name: flags.pop(name) for name in ("q_lora_rank", "g_proj", "skip_topk")}}
    folder = "vllm/model_executor/layers/mla"
    latent = of_release(release, folder, "MultiHeadLatentAttentionWrapper", **q, **rest)
    self_attn = part(release, "deepseek_v2.DeepseekV2MLAAttention", mla_attn=latent)
    path = ROUTED["deepseek"][0] if routed else "deepseek_v2.DeepseekV2MLP"
    mlp = experts(release, path) if routed else feed_forward(release, path)
    norms = {"input_layernorm": Norm(), "post_attention_layernorm": Norm()}
    parts = {"self_attn": self_attn, "mlp": mlp, "use_mha": False, **norms, **flags}
    return part(release, "deepseek_v2.DeepseekV2DecoderLayer", **parts)


LATENT = "self_attn.mla_attn"


@pytest.mark.parametrize("release", test_selection.ASKED)
def test_layers_with_latent_attention(release):
    """Those of DeepSeek V2, V3, Kimi-K2 and multi-token prediction. V3.2's indexer reads what its norms give, a gather over ranks
    what the first one gives, and without a latent of the queries two linears do."""
    dense = {"input_layernorm": "fused_qkv_a_proj", f"{LATENT}.q_a_layernorm": "q_b_proj"}
    dense |= {"post_attention_layernorm": "gate_up_proj", "mlp.act_fn": "down_proj"}
    kept = {f"{LATENT}.kv_a_layernorm": "mla_attn"}
    assert links(deepseek(release)) == dense | kept
    routed = {name: reader for name, reader in dense.items() if name != "mlp.act_fn"}
    routed["post_attention_layernorm"] = ROUTED["deepseek"][1]
    assert links(deepseek(release, routed=True)) == routed | kept
    sparse = links(deepseek(release, sparse=True))
    assert "self.indexer" in sparse.pop("input_layernorm") and "self.indexer" in sparse.pop(f"{LATENT}.q_a_layernorm")
    assert sparse.items() <= (dense | kept).items() and len(sparse) == 3
    gathered = links(deepseek(release, routed=True, use_sequence_parallel_moe=True))
    assert "tensor_model_parallel_all_gather" in gathered["input_layernorm"]
    assert links(deepseek(release, q_lora_rank=None))["input_layernorm"] == "kv_a_proj_with_mqa, q_proj"
    assert "g_proj" in links(deepseek(release, g_proj=Leaf()))["input_layernorm"]


class Layer(nn.Module):
    """What the layers below have: two norms and two linears."""

    def __init__(self):
        super().__init__()
        self.norm, self.other, self.linear, self.second = Norm(), Norm(), Leaf(), Leaf()
        self.flag, self.part = False, None


class Plain(Layer):
    def forward(self, x, residual=None):
        if residual is None:
            residual = x
            x = self.norm(x)
        else:
            x, residual = self.norm(x, residual)
        rows = x.shape[0]
        return self.linear(x), residual, rows


class ByName(Layer):
    def forward(self, x):
        norm, linear = self.norm, self.second if self.flag else self.linear
        read = y = norm(x=x)
        if self.flag or not isinstance(self.part, Leaf) and self.part is not None:
            read = y * 2
        return linear(input=read)


def maybe_fused_norm_quant(norm, x, residual, linear):
    """As a patched vLLM's."""


class Handed(Layer):
    def forward(self, x, residual):
        if residual is None:
            return self.linear(maybe_fused_norm_quant(self.norm, x, None, self.linear))
        x, residual = maybe_fused_norm_quant(self.norm, x, residual, self.linear)
        return self.linear(x), residual


class ThroughMethods(Layer):
    def first(self, y):
        return self.linear(y)

    def forward(self, x):
        return self.first(self.norm(x))


class AsksItsBase(ThroughMethods):
    def forward(self, x):
        return super().forward(x)


class Overrides(AsksItsBase):
    def forward(self, x):
        return self.linear(self.norm(x))


class ReadsTwice(Layer):
    def forward(self, x):
        x = self.norm(x)
        return self.linear(x) + self.second(x)


class UsesBoth(Layer):
    def forward(self, x):
        return self.linear(self.norm(x)) + self.second(self.other(x))


class AddsToTheResidual(Layer):
    def forward(self, x, residual):
        x, residual = self.norm(x, residual)
        residual = residual + x
        return self.linear(x), residual


class GrowsInPlace(Layer):
    def forward(self, x, y):
        x = self.norm(x)
        x += y
        return self.linear(x)


class GrowsTheResidual(Layer):
    def forward(self, x, residual):
        x = self.norm(x)
        residual += x
        return self.linear(x), residual


class KeepsTheResidual(Layer):
    def forward(self, x, residual):
        x, total = self.norm(x, residual)
        return self.linear(x), total + residual


class OneBranchReads(Layer):
    def forward(self, x, y):
        x = self.norm(x)
        if y is not None:
            y = y + x
        return self.linear(x), y


class Returns(Layer):
    def forward(self, x):
        x = self.norm(x)
        self.linear(x)
        return x


class Loops(Layer):
    def forward(self, x):
        for _ in range(2):
            x = self.linear(self.norm(x))
        return x


class KeepsIt(Layer):
    def forward(self, x):
        self.kept = x = self.norm(x)
        return self.linear(x)


class WritesInPlace(Layer):
    def forward(self, x):
        x = self.norm(x)
        x[0] = 0
        return self.linear(x)


class HandsTheNormOn(Layer):
    def forward(self, x):
        return self.linear(self.norm(x)) + self.part(self.norm)


class CallsFromAMethod(Layer):
    def again(self, x):
        return self.norm(x)

    def forward(self, x):
        return self.linear(self.norm(x)) + self.again(x)


class Casts(Layer):
    def forward(self, x):
        x = self.norm(x)
        return self.linear(x) if x.dtype == torch.float16 else x.shape


class Views(Layer):
    def forward(self, x):
        return self.linear(self.norm(x).view(-1, 8))


class Toggled(Layer):
    def toggle(self, flag):
        self.flag = flag

    def forward(self, x):
        x = self.norm(x)
        if self.flag:
            self.second(x)
        return self.linear(x)


class Comprehends(Layer):
    def forward(self, x):
        x = self.norm(x)
        return [layer(x) for layer in (self.linear, self.second)]


class Decorated(Layer):
    @torch.no_grad()
    def forward(self, x):
        return self.linear(self.norm(x))


LINKED = (Plain, ByName, Handed, ThroughMethods, Overrides, KeepsTheResidual)
REFUSED = {
    ReadsTwice: "linear, second",
    AddsToTheResidual: "linear, residual + x",
    GrowsInPlace: "x += y",
    GrowsTheResidual: "linear, residual += x",
    OneBranchReads: "linear, y + x",
    Returns: "linear, return x",
    Loops: "for _ in range(2):",
    KeepsIt: "linear, self.norm(x)",
    WritesInPlace: "linear, x[0]",
    HandsTheNormOn: "linear, self.part(self.norm)",
    CallsFromAMethod: "CallsFromAMethod.again uses it",
    AsksItsBase: "ThroughMethods.forward uses it",
    Casts: "linear as a tensor",
    Views: "linear as a tensor",
    Toggled: "second, linear",
    Comprehends: "[layer(x) for layer in (self.linear, self.second)]",
    Decorated: "the source of Decorated.forward is not known",
}


def read_by(layer: nn.Module) -> str:
    return links(nn.ModuleList([layer]))["0.norm"]


@pytest.mark.parametrize("cls", LINKED)
def test_one_reader_is_found(cls):
    """Through names, methods and branches that are not taken."""
    assert read_by(cls()) == "linear"


@pytest.mark.parametrize("cls", REFUSED)
def test_what_is_not_understood_is_a_reader(cls):
    assert read_by(cls()).removesuffix(" as a tensor" * (cls is WritesInPlace)) == REFUSED[cls]


def test_a_forward_of_one_layer_alone_is_not_known():
    """As where another package has put its own in the place of a class's."""
    layer = Plain()
    layer.forward = lambda x: x
    assert read_by(layer) == "the source of Plain.forward is not known"
    layer = made(type("Built", (Layer,), {"forward": eval("lambda self, x: self.linear(self.norm(x))")}))
    Layer.__init__(layer)
    assert read_by(layer) == "the source of Built.forward is not known"


def test_a_norm_that_others_use_is_not_linked():
    """By its name in another module, or as a module of two."""

    class Outer(nn.Module):
        def forward(self, x):
            return self.inner.norm(x)

    outer, layer = Outer(), Plain()
    outer.inner = layer
    assert links(outer)["inner.norm"] == "norm is used by other modules than its own"
    layer = UsesBoth()
    layer.other = layer.norm
    assert read_by(layer) == "linear, second"
    both = nn.ModuleList([Plain(), Plain()])
    both[1].norm = both[0].norm
    assert links(both)["0.norm"] == "linear, linear"


class Scales(Layer):
    def forward(self, x, residual):
        residual = residual + x * 2
        return self.linear(self.norm(residual)), residual


class ScalesSometimes(Layer):
    def forward(self, x):
        if x.dtype == torch.float16:
            x *= 2
        return self.linear(self.norm(x))


@pytest.mark.parametrize(("cls", "behind"), [(Plain, False), (Scales, True), (ScalesSometimes, False)])
def test_what_the_compiler_makes_in_front(cls, behind):
    """It fuses that with its own norm. DeepSeek scales in fp16 alone, which is not known from the source."""
    layer = cls()
    assert readers.Model(layer, (Leaf,)).readers(layer.norm).is_behind == behind


def test_norms_in_a_row():
    """The first of two feeds another: as Gemma's behind attention do."""

    class Ours(Norm):
        consumer = None

    class Sandwich(Layer):
        def forward(self, x, residual):
            x = self.norm(x)
            x, residual = self.other(x, residual)
            return self.linear(x), residual

    layer = Sandwich()
    layer.norm, layer.other = Ours(), Ours()
    known = readers.Model(layer, (Leaf,))
    assert [known.readers(norm).feeds_norm for norm in (layer.norm, layer.other)] == [True, False]
    plain = Returns()
    assert readers.Model(plain, (Leaf,)).readers(plain.norm).feeds_norm


def test_which_residuals_are_free():
    """Where the sum takes the residual's name, nothing reads the residual as it was, and it may be updated in place."""
    for cls, free in ((Plain, True), (KeepsTheResidual, False)):
        layer = cls()
        read = readers.Model(layer, (Leaf,)).readers(layer.norm)
        assert (read.pairs == read.overwritten == 1) == free and read.pairs == 1
