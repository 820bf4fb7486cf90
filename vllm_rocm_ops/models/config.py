"""Read a model's config.json, and name the quantizations of layers."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_rocm_ops.ops.shared.experts import SCHEMES

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

EXPERTS = {TOKEN if name == "channel" else name: scheme for name, scheme in SCHEMES.items()}
EXPERTS |= {STATIC: SCHEMES["tensor"]}
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
