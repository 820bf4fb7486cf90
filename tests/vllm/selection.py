"""Print what vLLM selects on a GPU: `python selection.py answers.json`, with a vLLM's Python files first on PYTHONPATH.

vLLM's own selection code runs on its own platform class. Its queries of the machine are faked: the arch, on ROCm that
`aiter` is installed, on CUDA that vLLM's kernels are. Each machine is a fork, because vLLM reads all this at import.
"""

import contextlib
import inspect
import itertools
import json
import os
import sys
import types

import formats

from vllm_rocm_ops.vllm.meta import simulated

ARCHS = ("gfx942", "gfx950")
AITER = ("0", "1")
PLUGIN = ("without", "with")
NVIDIA = ("without", "with", "asked")  # asked: with VLLM_ROCM_OPS_ON_NVIDIA=1


def fake_nvidia() -> None:
    """Fake an H200 in torch, and CUDA as vLLM's platform, with its own kernels and Triton's, without DeepGEMM."""
    import torch

    device = types.SimpleNamespace(total_memory=140 << 30, multi_processor_count=132, major=9, minor=0)
    torch.cuda.get_device_properties = lambda *_: device
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_name = lambda *_: "NVIDIA H200"
    torch.version.cuda = "13.0"
    sys.meta_path.insert(0, simulated.Pretended(*(f"vllm.{name}" for name in simulated.COMPILED)))
    simulated.define_missing_op()

    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    vllm.platforms._current_platform = vllm.platforms.current_platform = NonNvmlCudaPlatform()

    from vllm import _custom_ops

    for name in ("scaled_mm_supports_fp8", "scaled_mm_supports_block_fp8", "group_gemm_supported"):
        setattr(_custom_ops, f"cutlass_{name}", lambda capability: True)


def select(plugin: str) -> dict[str, str]:
    """Return everything that vLLM selects."""
    import torch
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    from vllm_rocm_ops.vllm import register, seam

    os.environ["VLLM_ROCM_OPS_ON_NVIDIA"] = str(int(plugin == "asked"))
    if plugin != "without":
        register()
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    answer = {
        "fp8 dtype": str(current_platform.fp8_dtype()),
        "seams off": ", ".join(entry.name for entry in seam.status() if not entry.on),
        "seams on": ", ".join(seam.active()),
        "fingerprint": str("vllm_rocm_ops" in config.additional_config),
    }
    with set_current_vllm_config(config, check_compile=False):
        for part in (layers, linear_kernels, experts, attention, decode_rows):
            answer |= part(torch)
        if plugin == "with" and current_platform.is_rocm() and os.environ["VLLM_ROCM_USE_AITER"] == "1":
            import recipes

            answer |= recipes.answers(torch, config)
    return answer


def layers(torch) -> dict[str, str]:
    """Return the classes of RMSNorm() and SiluAndMul(), the forward they run, and what runs compiled models' passes."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.platforms import current_platform

    made = {"RMSNorm()": RMSNorm(64), "SiluAndMul()": SiluAndMul()}
    answer = {name: f"{type(layer).__name__}.{layer._forward_method.__name__}" for name, layer in made.items()}
    return answer | {"passes": current_platform.get_pass_manager_cls()}


def keys_of(scheme: str) -> tuple:
    """Return vLLM's keys of weights and inputs in a format."""
    from vllm.model_executor.layers.quantization.utils import quant_utils

    return tuple(getattr(quant_utils, name) for name in formats.LINEARS[scheme].keys)


def linear_kernel(scheme: str) -> object:
    """Return the kernel that vLLM makes for a linear layer in a format."""
    return formats.LINEARS[scheme].kernel(16384, 16384)


def linear_kernels(torch) -> dict[str, str]:
    """Return the linear kernels, the vLLM kernel that each holds, and the quantized input it accepts."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys
    from vllm.platforms import current_platform

    names, answer = {value: name for name, value in vars(keys).items() if name.startswith("kFp8")}, {}

    def add(name: str, kernel) -> None:
        if inspect.isfunction(kernel):
            answer[name] = f"{kernel.__module__}.{kernel.__name__}"
            return
        baseline = getattr(kernel, "baseline", None)
        holds = f" holds {type(baseline).__name__}" if baseline is not None else ""
        taken = names.get(getattr(kernel, "input_quant_key", lambda: None)(), "no quantized input")
        answer[name] = f"{type(kernel).__name__}{holds} takes {taken}"

    for scheme in formats.LINEARS:
        add(f"linear {scheme}", linear_kernel(scheme))
    kernels = get_current_vllm_config().kernel_config
    for scheme, backend in (("static", "torch"), ("block", "triton"), ("mxfp8", "emulation")):
        kernels.linear_backend = backend
        add(f"linear {scheme}, named {backend}", linear_kernel(scheme))
    kernels.linear_backend = "auto"
    if current_platform.is_cuda():
        os.environ["VLLM_DISABLED_KERNELS"] = "MarlinMxfp8LinearKernel"
        add("linear mxfp8, without Marlin", linear_kernel("mxfp8"))
    return answer


def moe_config(torch, **options):
    """Return the configuration of a mixture-of-experts layer, DeepSeek V3's except for `options`."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    known = inspect.signature(FusedMoEConfig).parameters
    deepseek = {
        "num_experts": 256,
        "experts_per_token": 8,
        "hidden_dim": 7168,
        "intermediate_size": 2048,
        "num_local_experts": 256,
        "num_logical_experts": 256,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
        "activation": MoEActivation.SILU,
        "in_dtype": torch.bfloat16,
        "device": "cpu",
        "routing_method": RoutingMethodType.DeepSeekV3,
        "max_num_tokens": 512,
    }
    return FusedMoEConfig(**{name: value for name, value in (deepseek | options).items() if name in known})


def experts(torch) -> dict[str, str]:
    """Return the experts of a DeepSeek V3 by quantization, routing and named backend, and those they hold."""
    from compressed_tensors.quantization import QuantizationArgs
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
    from vllm.model_executor.layers.fused_moe.oracle import fp8, int_wna16, mxfp4, mxfp8, unquantized
    from vllm.model_executor.layers.quantization import fp8 as method
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys
    from vllm.platforms import current_platform

    answer = {}

    def add(name: str, select, *arguments) -> None:
        backend, chosen = select(*arguments)
        baseline = getattr(chosen, "baseline_class", lambda: None)()
        holds = f" holds {baseline.__name__}" if baseline else ""
        answer[f"experts {name}"] = f"{chosen.__name__}{holds} as {backend.name}"

    block, config = (keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym), moe_config(torch)
    add("fp8 block", method.select_fp8_moe_backend, config, *block)
    add("fp8 channel", fp8.select_fp8_moe_backend, config, keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym)
    add("fp8 static", fp8.select_fp8_moe_backend, config, keys.kFp8StaticTensorSym, keys.kFp8StaticTensorSym)
    add("fp8 dynamic", fp8.select_fp8_moe_backend, config, keys.kFp8StaticTensorSym, keys.kFp8DynamicTensorSym)
    add("mxfp8", mxfp8.select_mxfp8_moe_backend, config)
    add("bf16", unquantized.select_unquantized_moe_backend, config)
    int4 = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    add("int4", int_wna16.select_wna16_moe_backend, config, keys.kInt4Static32, int4, False, False, True)
    gpt_oss = {"activation": MoEActivation.SWIGLUOAI, "has_bias": True}
    gpt_oss = moe_config(torch, routing_method=RoutingMethodType.RenormalizeNaive, **gpt_oss)
    if current_platform.is_rocm():
        mxfp4._user_moe_activation_override = lambda: None  # there is no model to ask
        add("mxfp4", mxfp4.select_mxfp4_moe_backend, gpt_oss)
    custom = moe_config(torch, routing_method=RoutingMethodType.Custom)
    add("fp8 block, custom routing", fp8.select_fp8_moe_backend, custom, *block)
    add("bf16, custom routing", unquantized.select_unquantized_moe_backend, custom)
    named = moe_config(torch, moe_backend="triton")
    add("fp8 block, named triton", fp8.select_fp8_moe_backend, named, *block)
    add("bf16, named triton", unquantized.select_unquantized_moe_backend, named)
    return answer


def attention_backend(torch, member: str | None, **given) -> tuple[str, type]:
    """Return the path and the class of the attention backend of heads of 128, chosen or named."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import tl
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    tl.bfloat16 = "bfloat16"  # vLLM's stand-in for Triton lacks it, and ROCm's backends read it
    options = dict.fromkeys(AttentionSelectorConfig._fields, False)
    options |= {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
    options |= {"attn_type": "decoder"} | given
    options = {name: options[name] for name in AttentionSelectorConfig._fields}
    selected = member and AttentionBackendEnum[member]
    path = current_platform.get_attn_backend_cls(selected, AttentionSelectorConfig(**options), 16)
    return path, resolve_obj_by_qualname(path)


def attention(torch) -> dict[str, str]:
    """Return the attention backends of heads of 128 and of MLA, chosen or named, and those they hold."""
    from vllm.platforms import current_platform

    answer = {}

    def add(name: str, member: str | None, **given) -> None:
        path, chosen = attention_backend(torch, member, **given)
        baseline = chosen.__mro__[1].__name__ if path.startswith("vllm_rocm_ops") else ""
        answer[name] = f"{chosen.__name__} holds {baseline}" if baseline else chosen.__name__

    latent = {"head_size": 576, "use_mla": True}
    add("attention", None)
    add("attention, named triton", "TRITON_ATTN")
    if current_platform.is_rocm():
        add("attention with sinks", None, has_sink=True)
        add("attention, named unified", "ROCM_AITER_UNIFIED_ATTN")
    add("latent attention", None, **latent)
    add("latent attention, named triton", "TRITON_MLA", **latent)
    return answer


def decode_rows(torch) -> dict[str, str]:
    """Return the rows per request, of one with 3 drafts, that each backend of ROCm declares to be decode rows, or "any"."""
    from unittest import mock

    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionMetadataBuilder
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_rocm_ops.vllm.attention import decoder, mla

    declared, init = {}, AttentionMetadataBuilder._init_reorder_batch_threshold
    for member in (*decoder.PLATFORMS["rocm"], *mla.PLATFORMS["rocm"]) if current_platform.is_rocm() else ():
        name, found = f"decode rows, {member}", ["any"]
        try:
            builder = AttentionBackendEnum[member].get_class().get_builder_cls()
        except ModuleNotFoundError as error:  # of AITER
            declared[name] = str(error)
            continue

        def note(self, *arguments, found=found, **keywords):
            init(self, *arguments, **keywords)
            found[:] = [str(self.reorder_batch_threshold)]

        config = mock.MagicMock()
        config.speculative_config = types.SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
        config.parallel_config.decode_context_parallel_size = 1
        with (
            mock.patch.object(AttentionMetadataBuilder, "_init_reorder_batch_threshold", note),
            contextlib.suppress(Exception),  # what follows is not asked for, and the configuration has no numbers
        ):
            builder(mock.MagicMock(), [], config, torch.device("cpu"))
        by_class = getattr(builder, "query_len_support", None)
        starts = [
            vars(cls)["__init__"].__code__ for cls in builder.__mro__ if "__init__" in vars(cls) and cls is not object
        ]
        if (
            found == ["any"]
            and not by_class
            and any("_init_reorder_batch_threshold" in code.co_names for code in starts)
        ):
            raise RuntimeError(f"{builder.__name__} must declare its rows before it reads sizes")
        declared[name] = by_class.name if by_class else found[0]
    return declared


def forked(function, *arguments):
    """Return the result of a function in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = function(*arguments)
        except BaseException as error:  # noqa: BLE001  whatever it is, the parent shows it
            import traceback

            answer = {"error": f"{error!r}\n{traceback.format_exc()}"}
        with open(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        answer = json.load(pipe)
    os.waitpid(child, 0)
    return answer


def on_amd(arch: str, aiter: str) -> dict[str, dict[str, str]]:
    os.environ["VLLM_ROCM_USE_AITER"] = aiter
    simulated.amd(arch, aiter == "1")
    import vllm.config  # noqa: F401  once for both forks

    return {f"{arch} aiter={aiter} {plugin}": forked(select, plugin) for plugin in PLUGIN}


def on_nvidia() -> dict[str, dict[str, str]]:
    fake_nvidia()
    import vllm.config  # noqa: F401  once for all forks

    return {f"nvidia {plugin}": forked(select, plugin) for plugin in NVIDIA}


def main(answers_path: str) -> None:
    import torch  # noqa: F401  once for all forks
    import transformers  # noqa: F401

    answers = {}
    for arch, aiter in itertools.product(ARCHS, AITER):
        answers |= forked(on_amd, arch, aiter)
    answers |= forked(on_nvidia)
    with open(answers_path, "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main(sys.argv[1])
