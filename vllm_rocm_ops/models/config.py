"""Read a model's config.json, and the quantization of its linear layers."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

from vllm_rocm_ops.ops.mxfp8_scaled_mm import BLOCK as MX_BLOCK
from vllm_rocm_ops.ops.shared.experts import SCHEMES
from vllm_rocm_ops.ops.shared.gemm import BLOCK

SHIPPED = Path(__file__).parent

# Quantization of a linear layer: weights are e4m3 except in UNQUANTIZED and INT8.
UNQUANTIZED = "none"
STATIC = "static"  # a static scale for the input
TENSOR = "tensor"  # a dynamic scale per tensor for the input, computed by vLLM
TOKEN = "token"  # a scale per token and per output channel
BLOCKS = "block"  # a scale per 1x128 of the input and per 128x128 of the weight
MX = "mx"  # an e8m0 scale per 32 of both; e4m3fn on every GPU
INT8 = "int8"  # int8 weights and input, with a scale per token and per output channel
INT8_STATIC = "int8 static"  # the same with a static scale for the input

EXPERTS = {kind: SCHEMES[kind] for kind in (UNQUANTIZED, TENSOR, BLOCKS, MX)}
EXPERTS |= {STATIC: SCHEMES["tensor"], TOKEN: SCHEMES["channel"]}
"""The schemes of experts' weights, by the quantization of linear layers; experts of others run in vLLM."""


def shipped() -> list[str]:
    """Return the names of models whose config.json is in the package."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))


def read(model: str) -> dict:
    """Return a model's configuration, from a config.json, a folder with one, or a shipped name. Raises ValueError."""
    candidates = (Path(model), Path(model) / "config.json", SHIPPED / model / "config.json")
    try:
        path = next(path for path in candidates if path.is_file())
    except (StopIteration, OSError, ValueError):
        wanted = f"a config.json, a folder with one, or one of {', '.join(shipped())}"
        raise ValueError(f"model must be {wanted}, got {shown(model)}") from None
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or "architectures" not in config:
        raise ValueError(f"{path} is not a model's configuration: it has no architectures")
    return config


def shown(value: object) -> str:
    """Return a value as text, shortened for messages."""
    text = str(value) or "an empty text"
    return text if len(text) <= 60 else f"{text[:60]}..."


def section(config: dict, key: str) -> dict:
    """Return a section of a configuration, empty if it is missing or null."""
    part = config.get(key)
    if part is not None and type(part) is not dict:
        raise ValueError(f"{key} must be an object, got {shown(part)}")
    return part or {}


def names(config: dict, *keys: str) -> list[str]:
    """Return the first list of names under one of these keys, empty if there is none."""
    key = next((key for key in keys if config.get(key)), keys[0])
    listed = config.get(key) or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"{key} must be a list of names, got {shown(listed)}")
    for expression in (name[3:] for name in listed if name.startswith("re:")):
        try:
            re.compile(expression)
        except re.error as error:
            raise ValueError(f"{key} has re:{shown(expression)}, which is not an expression: {error}") from None
    return listed


def quantization(config: dict) -> tuple[str, Callable[[str], bool]]:
    """Return the quantization of linear layers, and a test for ignored modules. Raises ValueError."""
    method = config.get("quant_method")
    if method is None:
        return UNQUANTIZED, lambda module: True
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"quant_method must be one of {', '.join(METHODS)}, got {shown(method)}")
    quantization, ignored = METHODS[method](config)
    return quantization, functools.partial(_matches, tuple(ignored))


def _matches(patterns: tuple[str, ...], module: str) -> bool:
    """True if a list names a module: in full, by its last part, as `re:<expression>`, or with wildcards."""
    return any(
        re.match(pattern[3:], module)
        if pattern.startswith("re:")
        else fnmatch.fnmatchcase(module, pattern) or module.endswith("." + pattern)
        for pattern in patterns
    )


def _fp8(config: dict) -> tuple[str, list[str]]:
    ignored = names(config, "ignored_layers", "modules_to_not_convert")
    if config.get("weight_block_size") is not None:
        return _blocks(config, "weight_block_size"), ignored
    return STATIC if config.get("activation_scheme") == "static" else TENSOR, ignored


def _blocks(config: dict, key: str) -> str:
    if config[key] != [BLOCK, BLOCK]:
        raise ValueError(f"{key} must be {[BLOCK, BLOCK]}, got {shown(config[key])}")
    return BLOCKS


def _compressed_tensors(config: dict) -> tuple[str, list[str]]:
    ignored, groups = names(config, "ignore"), section(config, "config_groups")
    group = section(groups, next(iter(groups), "group_0"))
    weights, inputs = section(group, "weights"), section(group, "input_activations")
    if len(groups) == 1 and [(q.get("type"), q.get("num_bits")) for q in (weights, inputs)] == [("int", 8)] * 2:
        return _int8(weights, inputs), ignored
    if len(groups) != 1 or [(q.get("type"), q.get("num_bits")) for q in (weights, inputs)] != [("float", 8)] * 2:
        raise ValueError("config_groups must have one group, with weights and inputs in 8-bit float or 8-bit int")
    if all(tuple(map(q.get, ("strategy", "group_size", "scale_dtype"))) == MX_STRATEGY for q in (weights, inputs)):
        return MX, ignored
    if weights.get("strategy") == "block":
        return _blocks(weights, "block_structure"), ignored
    return TOKEN if inputs.get("dynamic") else STATIC, ignored


def _int8(weights: dict, inputs: dict) -> str:
    if weights.get("strategy") not in ("channel", "tensor") or inputs.get("strategy") not in ("token", "tensor"):
        wanted = "in 8-bit int must have weights with the strategy channel or tensor, and inputs with token or tensor"
        raise ValueError(f"config_groups {wanted}")
    if not weights.get("symmetric", True) or not inputs.get("symmetric", True):
        raise ValueError("config_groups in 8-bit int must be symmetric: layers with zero points run in vLLM")
    return INT8 if inputs.get("dynamic") else INT8_STATIC


def _modelopt(config: dict) -> tuple[str, list[str]]:
    algorithm = config.get("quant_algo")
    if algorithm != "MXFP8":
        raise ValueError(f"modelopt must have MXFP8 for its quant_algo, got {shown(algorithm)}")
    return MX, names(config, "ignore", "exclude_modules")


def _quark(config: dict) -> tuple[str, list[str]]:
    """Read a Quark configuration. Its layer entries may differ in outputs only, as for a quantized KV cache."""

    def parts_of(entry: dict) -> tuple[dict, dict]:
        return section(entry, "weight"), section(entry, "input_tensors")

    weights, inputs = parts_of(section(config, "global_quant_config"))
    layers = section(config, "layer_quant_config")
    same = all(parts_of(section(layers, name)) == (weights, inputs) for name in layers)
    dtypes = {q.get("dtype") for q in (weights, inputs)}
    if dtypes not in ({"fp8_e4m3"}, {"int8"}) or not same:
        raise ValueError("global_quant_config must have weights and inputs in fp8_e4m3 or int8, the same in all layers")
    ignored = names(config, "exclude")
    if dtypes == {"int8"}:
        if not all(q.get("symmetric") for q in (weights, inputs)):
            raise ValueError("global_quant_config in int8 must be symmetric: layers with zero points run in vLLM")
        return INT8 if inputs.get("is_dynamic") else INT8_STATIC, ignored
    if not inputs.get("is_dynamic"):
        return STATIC, ignored
    return TOKEN if inputs.get("qscheme") == "per_channel" else TENSOR, ignored


MX_STRATEGY = ("group", MX_BLOCK, "torch.uint8")
METHODS: dict[str, Callable[[dict], tuple[str, list[str]]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda config: (TOKEN, names(config, "modules_to_not_convert")),
    "compressed-tensors": _compressed_tensors,
    "quark": _quark,
    "modelopt": _modelopt,
    "mxfp8": lambda config: (MX, names(config, "ignored_layers", "modules_to_not_convert")),
}
