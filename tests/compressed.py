"""Quantization configurations of compressed-tensors."""


def compressed(written: str, weights: dict, inputs: dict | None, symmetric: bool = True) -> dict:
    """Return a quantization_config of compressed-tensors in one format."""
    weights = {"symmetric": True, "dynamic": False} | weights
    inputs = inputs and {"symmetric": symmetric, "dynamic": True} | inputs
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    known = {"quant_method": "compressed-tensors", "format": written, "ignore": ["lm_head"]}
    return known | {"config_groups": {"group_0": group}}


def number(kind: str, bits: int, strategy: str, **more) -> dict:
    """Return the numbers of a tensor, as compressed-tensors writes them."""
    return {"type": kind, "num_bits": bits, "strategy": strategy} | more
