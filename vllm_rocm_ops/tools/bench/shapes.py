"""Define what bench times: an op's case, a model's call, or lists of public models' shapes (rows, gemm, routing)."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import correctness
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.clock import Clock, tensor_bytes
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.quantization import MX
from vllm_rocm_ops.models import arguments as model_arguments
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.fused_calls import EXPERT_GATES
from vllm_rocm_ops.ops.shared import weight_layout
from vllm_rocm_ops.ops.shared.inputs import Inputs
from vllm_rocm_ops.tools.bench.baselines import Baseline, baselines
from vllm_rocm_ops.tools.bench.baselines.gemm import column_major

Check = Callable[[], dict[str, object]]  # returns fields of a line


@dataclass(frozen=True)
class Shape:
    """Pair an op with arguments.

    The result is checked as in the tests unless `compare(op, arguments)` returns another check. The tests' check creates
    arguments on the CPU, other checks on the clock's device. `layout` converts them to the plugin's layout if it differs from the
    baselines'.
    """

    op: Op
    case: Case
    sizes: dict[str, int] = field(default_factory=dict)
    compare: Callable[[Op, tuple], Check] | None = None
    layout: Callable[..., tuple] = lambda *arguments: arguments
    group: str = ""  # groups cases in a summary
    draws_on_device = False
    """True if arguments are created on the clock's device without `compare`, too."""
    listed = ""
    """The bench list whose baselines it is timed against. Empty for the op's own."""

    def arguments(self, device: str, fp8_dtype: torch.dtype) -> tuple:
        if self.compare or self.draws_on_device:
            return self.case.make(device, torch.Generator(device).manual_seed(0), fp8_dtype)
        made = self.case.make("cpu", correctness.generator_of(self.case.name), fp8_dtype)
        return tuple(correctness.clone(value, device) for value in made)

    def sets(self, clock: Clock, arguments: tuple) -> list[tuple]:
        """Return the clock's number of argument sets, the given one first."""
        copies = range(clock.calls(self.bytes_moved([arguments])) - 1)
        return [arguments, *(tuple(correctness.clone(value, clock.device) for value in arguments) for _ in copies)]

    def bytes_moved(self, sets: list[tuple]) -> float:
        """Return the bytes moved by a call, on average: every tensor, and twice those updated in place."""
        a = self.op.Arguments(*sets[0])
        outputs = correctness.as_tuple(self.op.allocate(a))
        return tensor_bytes(*a, *outputs, *(getattr(a, name) for name in self.op.mutates))

    def flops(self, sizes: Mapping[str, int]) -> int:
        """Return the FLOPs of a call, among the sizes or a GEMM's; else 0."""
        if "flops" in sizes:
            return sizes["flops"]
        return 2 * sizes["m"] * sizes["n"] * sizes["k"] if {"m", "n", "k"} <= set(sizes) else 0

    def check(self, sets: list[tuple], device: str, baselines: Mapping[str, Baseline]) -> Check:
        """Return a check of the op's result in its current configuration."""
        if self.compare:
            return self.compare(self.op, self.layout(*sets[0]))
        on_cpu = tuple(correctness.clone(value) for value in sets[0])

        def fields() -> dict[str, object]:
            try:
                with correctness.unwritten_is_nan():
                    correctness.run_and_check(self.op, on_cpu, device)
            except correctness.Wrong as error:
                return {"wrong": str(error)}
            return {"wrong": None}

        return fields

    def baselines(self, sets: list[tuple]) -> Mapping[str, Baseline]:
        return baselines(self.op, self.listed)


def select(shapes: Iterable[Shape], op: Iterable[str], case: Iterable[str]) -> list[Shape]:
    """Return the shapes whose op and case names match a pattern each. Raises ValueError if none do."""
    op, case = list(op), list(case)

    def matches(name: str, patterns: list[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    selected = [shape for shape in shapes if matches(shape.op.name, op) and matches(shape.case.name, case)]
    if not selected:
        raise ValueError(f"no case matches --op {' '.join(op)} --case {' '.join(case)}")
    return selected


def made_case(name: str, dtype: torch.dtype, arguments: Callable, *sizes) -> Case:
    """Return a case whose arguments `model_arguments` creates."""

    def make(device: str, generator: torch.Generator, fp8_dtype: torch.dtype) -> tuple:
        tokens, *parameters = sizes
        return arguments(tokens, Inputs(device, generator, fp8_dtype, dtype), *parameters)

    return Case(name, make)


# Rows

ROWS = tuple(2**i for i in range(12))
HIDDEN = (16384, 7168)  # Llama-3.1-405B and DeepSeek-V3
ROW_OPS = {
    **dict.fromkeys(
        (
            ops.fused_add_rms_norm,
            ops.fused_add_rms_norm_static_fp8_quant,
            ops.rms_norm_dynamic_per_token_quant,
            ops.rms_norm_per_block_quant,
            ops.rms_norm_and_per_block_quant,
        ),
        (True, 1e-6),
    ),
    **{op: () for kind, (op, _) in model_layers.ACTIVATIONS.items() if kind != MX},
    **{op: (256,) for kind, (op, _) in model_layers.GATES.items() if kind != MX},
}
"""Ops, with the parameters of their calls after the columns: whether a norm adds a residual, and epsilon; a gate's head size."""


def rows(tokens: Iterable[int] = ROWS, dtype: torch.dtype = torch.bfloat16) -> Iterator[Shape]:
    """Yield norms and activations. Raises ValueError for an unsupported dtype."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"the dtype of rows must be bfloat16 or float16, got {dtype}")
    for (op, parameters), h, m in itertools.product(ROW_OPS.items(), HIDDEN, tokens):
        name = f"{m}x{h} {str(dtype).removeprefix('torch.')}"
        case = made_case(name, dtype, model_layers.ARGUMENTS[op], m, h, *parameters)
        yield Shape(op, case, {"rows": m, "hidden": h}, beside_vllm)


SHARED_EXPERTS = {"qwen3-next tp1": (512, 2048), "qwen3-next tp4": (128, 2048), "qwen3.5-397b tp1": (1024, 4096)}
"""Columns of a shared expert with a gate, and of its tokens."""


def expert_gates(tokens: Iterable[int] = ROWS) -> Iterator[Shape]:
    """Yield activations of shared experts with a gate."""
    for (op, arguments), (name, (h, k)), m in itertools.product(EXPERT_GATES.values(), SHARED_EXPERTS.items(), tokens):
        case = made_case(f"{name} {m}x{h}", torch.bfloat16, arguments, m, h, k)
        yield Shape(op, case, {"rows": m, "hidden": h, "columns": k})


def beside_vllm(op: Op, arguments: tuple) -> Check:
    """Return a check for differences from vLLM's op.

    It reports the fraction of elements with other bits in the output and in tensors updated in place, and the largest relative
    difference of a scale.
    """
    baseline = baselines(op).get("vllm")
    if baseline is None:
        return lambda: {"differs_from_vllm": None}

    def share(a: torch.Tensor, b: torch.Tensor) -> float:
        bits = torch.uint8 if a.element_size() == 1 else torch.int16
        return (a.view(bits) != b.view(bits)).float().mean().item()

    def own() -> tuple:
        return op.Arguments(*(correctness.clone(value, arguments[0].device) for value in arguments))

    vllm_output, of_vllm = baseline.prepare(*own())
    baseline.call(vllm_output, of_vllm)
    if op is ops.fused_add_rms_norm:  # vLLM's op writes into its input
        vllm_output = of_vllm.input

    def fields() -> dict[str, object]:
        of_ours = own()
        ours, result = op(*of_ours), {}
        if isinstance(ours, tuple):
            result["scale_relative"] = ((ours[1] - vllm_output[1]).abs() / vllm_output[1]).max().item()
        result["out"] = share(correctness.as_tuple(ours)[0], correctness.as_tuple(vllm_output)[0])
        result |= {name: share(getattr(of_ours, name), getattr(of_vllm, name)) for name in op.mutates}
        return {"differs_from_vllm": result}

    return fields


# GEMMs

TOKENS = (1, 2, 4, 8, 16, 32, 64)
MODELS = {"llama": "llama-3.1-405b-fp8", "deepseek": "deepseek-v3"}
TP = 8


def linear_layers(model: str, tp: int, arch: Arch | None = None) -> Iterator[tuple[model_layers.LayerCall, int, int]]:
    """Yield the linear layers of a model on `arch`, each with its N and K."""
    for call in model_layers.calls(model_config.read(model), tp, arch=model_layers.built_for(arch)):
        arguments = call.case(1).make("meta", torch.Generator(), torch.float8_e4m3fn)
        sizes = call.op.problem(call.op.Arguments(*arguments))
        if list(sizes) == ["m", "n", "k"]:
            yield call, sizes["n"], sizes["k"]


def _column_major_blocks(*sizes) -> tuple:
    """Create arguments with column-major activation scales, as most baselines need them."""
    return column_major(*ops.block_scaled_mm.linear(*sizes))


GEMMS: dict[Op, tuple] = {
    ops.scaled_mm: (ops.scaled_mm.linear, True),  # a scale per token and channel
    ops.block_scaled_mm: (_column_major_blocks,),
    ops.unquantized_gemm: (ops.unquantized_gemm.linear,),
    ops.scaled_mm_silu_and_mul_quant: (ops.scaled_mm_silu_and_mul_quant.linear,),
}


def gemm(
    tokens: Iterable[int] = TOKENS, tp: int = TP, arch: Arch | None = None, shuffled: bool = False
) -> Iterator[Shape]:
    """Yield the linear layers of a decode step on one of `tp` ranks on `arch`, FP8 layers with each kind of scales.

    If `shuffled`, the plugin's weights are in fragment order.
    """
    for op, (arguments, *traits) in GEMMS.items():
        layers = {
            f"{name}{f' tp{tp}' * (tp != TP)} {call.layer}": (n, k)
            for name, model in MODELS.items()
            for call, n, k in linear_layers(model, tp, arch)
            if call.count and (call.op is ops.unquantized_gemm) == (op is ops.unquantized_gemm)
            if call.layer.endswith("gate_up") or op is not ops.scaled_mm_silu_and_mul_quant
        }
        for (layer, (n, k)), m in itertools.product(layers.items(), tokens):
            case = made_case(
                f"{layer} {m}x{n}x{k}" + " shuffled" * shuffled, torch.bfloat16, arguments, m, n, k, *traits
            )
            layout = {"layout": _shuffle} if shuffled else {}
            yield Shape(op, case, {"m": m, "n": n, "k": k}, beside_float64, **layout)


FOUR_BIT_LAYERS = {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)}  # N and K
SPLIT = {"qkv": (8, 1), "o": (1, 8), "gate_up": (8, 1), "down": (1, 8)}  # of N and K on 8 ranks
GROUPS = (128, 32)


def four_bit(tokens: Iterable[int] = TOKENS) -> Iterator[Shape]:
    """Yield the layers of a decode step on one rank with INT4 weights, with groups of 32 and 128."""
    return four_bit_layers(ops.w4a16_gemm, "group", GROUPS, tokens)


def mx(tokens: Iterable[int] = TOKENS) -> Iterator[Shape]:
    """Yield the same with MXFP8 and MXFP4 weights."""
    return four_bit_layers(ops.mx_gemm, "form", ("fp8", "fp4"), tokens)


def four_bit_layers(op: Op, trait: str, traits: tuple, tokens: Iterable[int]) -> Iterator[Shape]:
    """Yield the layers of an op's calls, for each value of a trait."""
    for value, tp, (layer, (n, k)), m in itertools.product(traits, (1, 8), FOUR_BIT_LAYERS.items(), tokens):
        of_n, of_k = SPLIT[layer] if tp == 8 else (1, 1)
        sizes = m, n // of_n, k // of_k
        name = f"llama-70b tp{tp} {layer} {'x'.join(map(str, sizes))} {trait} {value}"
        case = made_case(name, torch.bfloat16, op.linear, *sizes, value)
        yield Shape(op, case, {**dict(zip("mnk", sizes)), trait: value}, beside_float64)


def _shuffle(a, weight, *rest) -> tuple:
    weight = weight if weight.is_contiguous() else weight.t()
    return a, weight_layout.shuffle_weight(weight), *rest


def beside_float64(op: Op, arguments: tuple) -> Check:
    """Return a check for the relative error (norm) against float64."""
    exact = op.reference(*(torch.float64 if value is torch.bfloat16 else value for value in arguments)).double()
    return lambda: {"relative_error": relative_error(op(*arguments), exact)}


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of an error relative to the norm of the exact result."""
    return ((result.double() - exact).norm() / exact.norm()).item()


# Routing

DEEPSEEK_ROUTING = 256, 8, True, 8, 4, "sigmoid", 2.5, True


def routing(tokens: Iterable[int] = (*TOKENS, 128, 1024)) -> Iterator[Shape]:
    """Yield routing over DeepSeek-V3's experts."""
    for m in tokens:
        case = made_case(f"{m}x{DEEPSEEK_ROUTING[0]}", torch.bfloat16, model_arguments.routing, m, *DEEPSEEK_ROUTING)
        yield Shape(ops.grouped_topk, case, {"tokens": m, "experts": DEEPSEEK_ROUTING[0]})


GATES = {
    "minimax-m2": (256, 3072),
    "glm-4.5-air": (128, 4096),
    "384 experts": (384, 6144),
    "512 experts": (512, 4096),
    "qwen3-next": (512, 2048, torch.bfloat16),
}
"""Experts and hidden size of gates: float32 ones that route by sigmoid with a bias, and 16-bit ones that route by softmax."""
GATE_ROUTING, SOFTMAX_ROUTING = (8, True, 1, 1, "sigmoid", 1.0), (10, True, 1, 1, "softmax", 1.0)


def gates(tokens: Iterable[int] = (1, 8, 32, 64)) -> Iterator[Shape]:
    """Yield the gates of `GATES`, which route without groups."""
    for (name, (experts, hidden, *dtype)), m in itertools.product(GATES.items(), tokens):
        case = made_case(f"{name} {m}x{experts}x{hidden}", torch.bfloat16, _gate, m, experts, hidden, *dtype)
        yield Shape(ops.router_gemm_topk, case, {"m": m, "n": experts, "k": hidden}, chosen_by_logits)


def _gate(tokens: int, inputs: Inputs, experts: int, hidden: int, dtype: torch.dtype = torch.float32) -> tuple:
    x, weight = inputs.values(tokens, hidden), inputs.values(experts, hidden, dtype=dtype) * hidden**-0.5
    routing = (*GATE_ROUTING, inputs.scales(experts)) if dtype == torch.float32 else (*SOFTMAX_ROUTING, None)
    return x, weight, *routing, None


def chosen_by_logits(op: Op, arguments: tuple) -> Check:
    """Return a check for the relative error (norm) of the logits against float64, and that they choose the experts."""
    a = op.Arguments(*arguments)
    exact = a.x.double() @ a.weight.double().t()

    def fields() -> dict[str, object]:
        logits, *chosen = op(*arguments)
        wanted = ops.grouped_topk.reference(logits, *arguments[2:-1])
        same = torch.equal(chosen[1], wanted[1]) and torch.allclose(chosen[0], wanted[0], rtol=1e-4)
        wrong = None if same else "the logits choose other experts"
        return {"relative_error": relative_error(logits, exact), "wrong": wrong}

    return fields
