"""Read a model's config.json."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_rocm_ops.core.quantization import STATIC, TOKEN
from vllm_rocm_ops.ops.shared.experts import SCHEMES

SHIPPED = Path(__file__).parent

EXPERTS = {TOKEN if name == "channel" else name: scheme for name, scheme in SCHEMES.items()} | {
    STATIC: SCHEMES["tensor"]
}
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
