"""Record the launches of a model's `forward` without values: which op takes each layer, its sizes, and who reads its result."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.quantization import STATIC, TENSOR, UNQUANTIZED
from vllm_rocm_ops.models.config import EXPERTS
from vllm_rocm_ops.models.layers import DELTA_NET, GATED_NORM, GATES, PREFILL
from vllm_rocm_ops.ops.shared.gemm import HALVES
from vllm_rocm_ops.vllm import coverage, seam
from vllm_rocm_ops.vllm.attention import rope_and_cache, rope_pre_attention
from vllm_rocm_ops.vllm.moe import expert_support, quantized_input, routing_experts, vllm_routing
from vllm_rocm_ops.vllm.selection.kernel_selection import types

TOKENS = 4
LINEAR, NORM, ACTIVATION, EXPERTS_KIND, OTHER = "linear", "norm", "activation", "experts", ""
OPAQUE = "an op"


@dataclasses.dataclass(eq=False)
class Record:
    """A launch of a step, and who reads its result: records, or names of PyTorch's functions."""

    module: str
    kind: str
    dtype: torch.dtype
    op: str | None = None
    parameters: tuple = ()
    runs: str = ""
    quantization: str | None = None
    readers: list[Record | str] = dataclasses.field(default_factory=list)
    source: Record | None = None
    layer: str = ""
    block: str = ""
    traits: tuple = ()


class Step(TorchFunctionMode):
    """Record the launches of a step. Tensors are known by their storage, so that views are their tensors."""

    def __init__(self, names: dict[torch.nn.Module, str], positions: int):
        super().__init__()
        self.names, self.positions, self.records, self.silent = names, positions, [], 0
        self.modules = {name: module for module, name in names.items()}
        self.seen: set[torch.nn.Module] = set()
        self.makers: dict[int, Record] = {}
        self.kept: list[Tensor] = []  # else another tensor may get their storage's address

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if re.match(r"vllm(_rocm_ops)?\.", str(function)) and not self.silent:
            return self.opaque(function, *args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        if not self.silent and isinstance(result, Tensor):
            name = getattr(function, "__name__", str(function))
            read = [x for x in itertools.chain(args, (kwargs or {}).values()) if isinstance(x, Tensor)]
            is_view = any(x.untyped_storage()._cdata == result.untyped_storage()._cdata for x in read)
            if not is_view and not re.search("empty|zeros|ones|full|_like|__get__", name):
                for x in read:
                    self.read(x, name)
        return result

    def opaque(self, function: Callable, *given, **more):
        """Record an op of vLLM's, which compilers do not see into. One without an implementation for shapes writes its arguments."""
        if str(function).endswith(("unquantized_gemm", "unquantized_linear")):
            x, weight, *bias = given
            layer = next(module for module in self.names if getattr(module, "weight", None) is weight)
            return linear(self, layer, x, *bias or (None,))
        read = next((x for x in (*given, *more.values()) if isinstance(x, Tensor)), None)
        result = None
        with contextlib.suppress(RuntimeError), self.quietly():
            result = function(*given, **more)
        made = result if isinstance(result, Tensor) else None
        if read is not None:
            self.add(OPAQUE, OTHER, read, made, layer=str(function).partition(".")[2], runs="an op of vLLM's")
        return result

    def read(self, x: Tensor, reader: Record | str) -> Record | None:
        """Note a reader of a tensor, and return what made it."""
        maker = self.makers.get(x.untyped_storage()._cdata)
        if maker is not None:
            maker.readers.append(reader)
        return maker

    def add(
        self, module: torch.nn.Module | str, kind: str, read: Tensor, made: Tensor | None = None, **given
    ) -> Record:
        """Record a launch that reads a tensor and makes another."""
        name = module if isinstance(module, str) else self.names.get(module, type(module).__name__)
        record = Record(name, kind, read.dtype, **given)
        self.records.append(record)
        self.seen.add(module)
        record.source = self.read(read, record)
        if made is not None:
            self.kept.append(made)
            self.makers[made.untyped_storage()._cdata] = record
        return record

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Record nothing that PyTorch's functions read within."""
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1


def linear(step: Step, layer: torch.nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """Record a linear layer."""
    weight, method = getattr(layer, "weight", None), type(layer.quant_method).__name__
    sizes = ("output_size_per_partition", "num_embeddings_per_partition", "output_size")
    n = next(filter(None, (getattr(layer, name, None) for name in sizes)))
    k = x.shape[-1]
    made = x.new_empty((*x.shape[:-1], n))
    parent = parent_of(step, layer)
    is_gated = rope_pre_attention.is_gate_beside(parent) and parent.o_proj is layer
    is_plain = method.startswith("Unquantized") and weight.dtype == x.dtype and x.dtype in HALVES
    if kernel := next(coverage.kernels_of(layer), None):
        op, quantization, traits = kernel.comparison.op, kernel.quantization, kernel.traits
        if is_gated and quantization in GATES:
            given = {"op": GATES[quantization][0].name, "parameters": (k, parent.attn.head_size)}
            step.add(layer, OTHER, x, x, layer="output gate", **given)
    elif is_plain and "unquantized_linear" in seam.active():
        op, quantization, traits = ops.unquantized_gemm, UNQUANTIZED, ()
    else:
        runs = f"{method} of {types(weight.dtype) if isinstance(weight, Tensor) else 'packed'} weights"
        step.add(layer, LINEAR, x, made, runs=runs)
        return made
    has_bias = (True,) if bias is not None and "bias" in op.Arguments._fields else ()
    given = {"op": op.name, "parameters": (n, k, *traits, *has_bias), "quantization": quantization}
    step.add(layer, LINEAR, x, made, **given)
    return made


def norm(step: Step, layer: torch.nn.Module, run: Callable, x: Tensor, residual: Tensor | None = None, *rest, **more):
    """Record a norm. The second argument of some is a gate."""
    if residual is not None and "residual" not in inspect.signature(run).parameters:
        rest, residual = (residual, *rest), None
    with step.quietly():
        result = x.clone() if residual is None else (x.clone(), residual.clone())
    made = result if residual is None else result[0]
    epsilon = getattr(layer, "variance_epsilon", None)
    weight = getattr(layer, "weight", None)
    is_gemma, parent = "Gemma" in type(layer).__name__, parent_of(step, layer)
    is_heads = x.dim() > 2 and x.shape[0] == TOKENS or layer in norms_of(parent, x.dtype)
    is_taken = hasattr(layer, "rocm_ops_forward") and x.dtype in HALVES
    is_taken = is_taken and isinstance(weight, Tensor) and weight.dtype == x.dtype and not rest and not more
    parameters = (x.shape[-1], residual is not None, float(epsilon), *[True] * is_gemma) if is_taken else ()
    record = step.add(layer, NORM, x, made, parameters=parameters, runs="" if is_taken else type(layer).__name__)
    if residual is not None:
        step.kept.append(result[1])
    record.quantization = "heads" if is_heads and is_taken else None
    if record.quantization:
        record.traits = head_traits(parent, x.dtype, is_gemma)
    return result


def norms_over_all(step: Step, norms: tuple, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Record norms of queries and keys that a method of their class computes."""
    parent, made = parent_of(step, norms[0]), []
    is_taken = bool(norms_of(parent, rows[0].dtype))
    for layer, x in zip(norms, rows):
        with step.quietly():
            made.append(x.clone())
        runs = ", ".join(filter(None, (type(layer).__name__, rope_pre_attention.norm_refusal(layer))))
        record = step.add(layer, NORM, x, made[-1], runs="" if is_taken else runs)
        if is_taken:
            record.quantization, record.traits = "heads", head_traits(parent, x.dtype, False)
    return tuple(made)


def norms_over_ranks(step: Step, norms: tuple, qkv: Tensor, query: int, key: int) -> tuple[Tensor, ...]:
    """Record what vLLM's op of norms over ranks launches."""
    q, k, v = qkv.split([query, key, key], -1)
    made = norms_over_all(step, norms, (q, k))
    step.add("all-reduce", OTHER, q, made[0], layer="all-reduce of squares")
    return *made, v


def norms_of(layer: torch.nn.Module | None, dtype: torch.dtype) -> tuple[torch.nn.Module, ...]:
    """Return the norms of queries and keys that one launch with the rotation supports."""
    attn = getattr(layer, "attn", None)
    return rope_pre_attention.norms_of(layer, attn, dtype) if hasattr(attn, "num_kv_heads") else ()


def parent_of(step: Step, layer: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that has a layer."""
    return step.modules.get(step.names.get(layer, "").rpartition(".")[0])


def head_traits(layer: torch.nn.Module | None, dtype: torch.dtype, one_plus: bool) -> tuple:
    """Return what is special of a layer's head norms and rotation, as `Traits` has it; nothing if nothing is."""
    from vllm.config import get_current_vllm_config

    rotary = getattr(layer, "rotary_emb", None)
    sections = (0, 0) if rotary is None else rope_and_cache.sections_of(rotary, get_current_vllm_config())
    norms = norms_of(layer, dtype)
    over_all = bool(norms) and rope_pre_attention.are_over_all(norms, layer.attn.head_size)
    traits = rope_pre_attention.Traits(one_plus, rope_pre_attention.is_gate_beside(layer), *sections, over_all)
    return tuple(traits) if traits != rope_pre_attention.Traits() else ()


def plain(step: Step, layer: torch.nn.Module, run: Callable, x: Tensor, *rest, **more):
    """Record an activation or another layer that computes by PyTorch's functions."""
    with step.quietly():
        result = run(x, *rest, **more)
    made = result if isinstance(result, Tensor) else None
    is_taken = hasattr(layer, "rocm_ops_forward") and x.dtype in HALVES and x.dim() == 2
    given = {"parameters": (made.shape[-1],)} if is_taken else {"runs": type(layer).__name__}
    step.add(layer, ACTIVATION, x, made, **given)
    return result


def rotation(step: Step, layer: torch.nn.Module, run: Callable, positions: Tensor, query: Tensor, key=None, *rest, **_):
    """Record a rotation of queries and keys."""
    with step.quietly():
        result = query.clone(), None if key is None else key.clone()
    step.add(layer, OTHER, query, result[0], parameters=(layer.rotary_dim,), layer="rotation")
    return result


def attention(step: Step, layer: torch.nn.Module, run: Callable, query: Tensor, key, value, *rest, **more) -> Tensor:
    """Record attention with the write of its cache."""
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_size
    made = query.new_empty((query.shape[0], heads * getattr(layer, "head_size_v", size)))
    runs = unserved(layer)
    if key is not None:
        step.add(layer, OTHER, key, None, layer="cache write")
    given = {"parameters": (heads, kv_heads, size, step.positions)} if not runs else {}
    op = None if runs else ops.paged_attention_decode.name
    step.add(layer, OTHER, query, made, layer="attention", op=op, runs=runs, **given)
    return made


def latent_attention(step: Step, layer: torch.nn.Module, run: Callable, q: Tensor, kv: Tensor, k_pe, *rest, **more):
    """Record MLA's attention: the write of its cache, both absorbed GEMMs, and the projection of prefill, which decoding does not run."""
    heads, nope, rope = layer.num_heads, layer.qk_nope_head_dim, layer.qk_rope_head_dim
    latent, v, runs = layer.kv_lora_rank, layer.v_head_dim, unserved(layer)
    made = q.new_empty((q.shape[0], heads * v))
    step.add(layer, OTHER, k_pe, None, layer="cache write")

    def add(name: str, op, read: Tensor, result: Tensor | None, *parameters) -> None:
        given = {"runs": runs} if runs else {"op": op.name, "parameters": parameters}
        step.add(layer, OTHER, read, result, layer=name, **given)

    add("W_UK", ops.batched_gemm, q, None, heads, nope, latent, True)
    add("attention", ops.mla_decode, kv, None, heads, latent, rope, nope + rope, step.positions)
    add("W_UV", ops.batched_gemm, q, made, heads, latent, v, False)
    up = layer.kv_b_proj
    up.quant_method.apply(up, q.new_empty((TOKENS, latent)))
    step.records[-1].layer = PREFILL
    return made


def delta_net(step: Step, layer: torch.nn.Module, run: Callable, hidden_states: Tensor) -> Tensor:
    """Record Gated DeltaNet: projections, vLLM's convolution and recurrence, and the gated norm."""
    (qkvz, _), (ba, _) = layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
    heads = layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size
    made = qkvz.new_empty((qkvz.shape[0], heads[1] * layer.head_v_dim))
    *_, state = layer.get_state_dtype()[:2]
    given = *heads, layer.gqa_interleaved_layout, types(state)
    runs = "vLLM's convolution and recurrence"
    step.read(ba, step.add(layer, OTHER, qkvz, None, layer=DELTA_NET, parameters=given, runs=runs))
    step.add(layer, OTHER, qkvz, made, layer=GATED_NORM, runs=type(layer.norm).__name__)
    step.seen |= {layer.norm, layer.conv1d}
    return layer.out_proj(made)[0]


def unserved(layer: torch.nn.Module) -> str:
    """Return the class of a layer's attention and why no seam serves it, empty if one does."""
    impl = getattr(layer, "impl", None)
    plugin = getattr(impl, "rocm_ops", None)
    if plugin is None:
        return type(impl).__name__
    return f"{type(impl).__name__}: {plugin.unsupported_reason}" if plugin.unsupported_reason else ""


def experts(step: Step, runner: torch.nn.Module, hidden: Tensor, logits: Tensor, shared_input: Tensor | None):
    """Record the routing, the experts and the shared experts of a layer. Return what the shared ones and the others make."""
    routed = getattr(runner, "routed_experts", runner)
    made = hidden.new_empty(hidden.shape)
    cls = getattr(routed.quant_method, "experts_cls", None)
    w1, total = expert_support.first_weight(routed), runner.moe_config.num_experts
    topk, quantization = runner.moe_config.experts_per_token, scheme(routed, getattr(cls, "weight_only", False))
    if topk > total:
        raise ValueError(f"{topk} experts per token of {total}")
    is_ours = getattr(cls, "__name__", "").startswith("RocmOps") and quantization is not None
    what = type(routed.quant_method).__name__
    runs = "" if is_ours else getattr(cls, "__name__", f"{what} of {types(w1.dtype)} weights")
    is_known = is_ours and not quantized_input.moves_tokens(runner.moe_config)
    by_vllm = vllm_routing.routing_of(runner) if is_known else None
    if is_ours and routes(routed):
        method = routing_experts.METHODS[runner.moe_config.routing_method.name]
        scale = getattr(routed, "routed_scaling_factor", None)
        groups = tuple(
            getattr(routed, name, None) for name in ("num_expert_group", "topk_group", "e_score_correction_bias")
        )
        chosen = routing_experts.arguments_after_logits(method, topk, total, *groups, 1.0 if scale is None else scale)
        op = ops.topk_softmax if routing_experts.is_plain(chosen) else ops.grouped_topk
        step.add(routed, OTHER, logits, None, layer="routing", op=op.name, parameters=(total, *spelled_routing(chosen)))
    else:
        given: dict = {"runs": type(getattr(runner, "router", runner)).__name__}
        if by_vllm:
            chosen = routing_experts.arguments_after_logits(by_vllm.method, by_vllm.topk, total, *by_vllm.groups)
            given["parameters"] = (total, *spelled_routing(chosen))
        step.add(routed, OTHER, logits, None, layer="routing", **given)
    sizes = runner.moe_config.hidden_dim, w1.shape[1] // 2
    parameters = (total, w1.shape[0], topk, *sizes, quantization) if is_ours else ()
    parameters += rest_of(runner.moe_config) if is_ours else ()
    op = ops.fused_experts.name if is_ours else None
    step.add(routed, EXPERTS_KIND, hidden, made, layer="experts", op=op, parameters=parameters, runs=runs)
    shared = getattr(runner, "_shared_experts", None)
    if shared is None:
        return None, made
    both = shared._layer(hidden if shared_input is None else shared_input)
    step.add(routed, OTHER, both, None, layer="sum with shared experts")
    return both, made


def spelled_routing(chosen: tuple) -> tuple:
    """Return the arguments after the logits, with whether there is a bias in its place."""
    return chosen if routing_experts.is_plain(chosen) else (*chosen[:-1], chosen[-1] is not None)


def routes(routed: torch.nn.Module) -> bool:
    """True if the plugin's experts of a layer route its tokens."""
    cls = getattr(routed.quant_method, "experts_cls", None)
    is_class = isinstance(cls, type) and hasattr(cls, "backend") and issubclass(cls, routing_experts.experts.Predicates)
    return is_class and "Routing" in cls.__name__


def float_gate(step: Step, layer: torch.nn.Module, run: Callable, x: Tensor):
    """Record a gate with a float32 weight. It reads the 16-bit tokens."""
    n, k = layer.weight.shape
    made = x.new_empty((*x.shape[:-1], n), dtype=layer.weight.dtype)
    runs = f"{type(layer).__name__} of {types(layer.weight.dtype)} weights"
    record = step.add(layer, LINEAR, x, made, parameters=(n, k), runs=runs, quantization=UNQUANTIZED)
    record.dtype = layer.weight.dtype
    return (made, None) if getattr(layer, "return_bias", False) else made


def rest_of(config) -> tuple:
    """Return the parameters of `models.arguments.experts` for biases and the activation, empty without a bias and with SwiGLU."""
    names = ("alpha", "beta")
    constants = {f"gemm1_{name}": getattr(config, f"swiglu_{name}") for name in names}
    quant = SimpleNamespace(gemm1_clamp_limit=config.swiglu_limit, **constants)
    swiglu = expert_support.swiglu_of(SimpleNamespace(quant_config=quant), config.activation)
    rest = False, config.has_bias, *swiglu
    return rest if rest != (False, False, None, 1.0, 0.0, False) else ()


def scheme(routed: torch.nn.Module, weight_only: bool) -> str | None:
    """Return the quantization of a layer of experts as the plugin's experts know it."""
    w1, names = expert_support.first_weight(routed), ("w13_weight_scale_inv", "w13_weight_scale", "w13_scales")
    scale = next((given for given in (getattr(routed, name, None) for name in names) if given is not None), None)
    if not isinstance(scale, Tensor):
        return UNQUANTIZED if w1.dtype in HALVES else None
    if w1.dtype == torch.int32:  # of four-bit weights, before loading ends
        w1 = w1.view(torch.uint8)
    operands = w1.shape, w1.dtype, scale.shape, scale.dtype, weight_only
    known = [kind for kind, scheme in EXPERTS.items() if scheme.rows and scheme.fits(*operands)]
    if known:
        return known[0]
    if w1.dtype.itemsize != 1 or scale.numel() > 2 * w1.shape[0]:
        return None
    return STATIC if getattr(routed, "w13_input_scale", None) is not None else TENSOR
