"""The layers and weights of one rank of a model, with random values, for a decode step (decode_step.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from figures import kind_of
from torch import Tensor

from vllm_rocm_ops import model_layers, ops
from vllm_rocm_ops.op import Op

WEIGHTS = ("weight", "b", "scale_b", "w1", "w2", "w1_scale", "w2_scale", "e_score_correction_bias")


class Part(NamedTuple):
    """One call of a layer: `given` are its op's arguments, whose weights stay; each step replaces activations."""

    op: Op
    kind: str
    given: tuple

    def bytes(self) -> int:
        """Of weights, of all experts."""
        values = (getattr(self.given, name, None) for name in WEIGHTS)
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


class Rank:
    """The layers of one rank: for each the parts by name, and last what follows the layers."""

    def __init__(self, config: dict, tp: int, ep: int | None, device: str, fp8_dtype: torch.dtype):
        if ep and ep % tp:
            raise ValueError(f"ep must be a multiple of tp={tp}, got {ep}")
        calls = model_layers.sequence(config, tp, ep)
        self.config, self.tp, self.device, self.dtype = config, tp, device, calls[0].dtype
        self.groups = (ep or tp) // tp  # of ranks with sequences of their own
        self.folds_shared = False
        self.generator = torch.Generator(device).manual_seed(0)
        self.layers: list[dict[str, Part]] = []
        self.absorbed: list[tuple[Tensor, Tensor]] = []  # by layer, W_UK [heads, nope, rank] and W_UV [heads, rank, v]
        for call in calls:
            if call.layer in ("input norm", "final norm"):
                self.layers.append({})
            if call.op is ops.mxfp8_scaled_mm:
                raise ValueError(f"there is no step for MX-FP8, which {call.layer} has")
            if call.count == 0:  # kv_b, which only prefill multiplies with as it is
                self.absorbed.append(self._absorbed(*call.parameters[:2]))
                continue
            given = call.op.Arguments(*call.case(1).make(device, self.generator, fp8_dtype))
            self.layers[-1][call.layer] = Part(call.op, kind_of(call.layer, call.op.name), _tamed(call.op, given))

    def _absorbed(self, n: int, rank: int) -> tuple[Tensor, Tensor]:
        """The two halves of kv_b, unquantised and, as vLLM has them, views of it."""
        nope, v = self.config["qk_nope_head_dim"], self.config["v_head_dim"]
        w_uk, w_uv = self.values(n // (nope + v), nope + v, rank).split((nope, v), 1)
        return w_uk.mul_(nope**-0.5), w_uv.mul_(rank**-0.5).transpose(1, 2)

    @property
    def softmax_scale(self) -> float:
        """Of latent attention."""
        return (self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"]) ** -0.5

    def sizes(self, layer: int, name: str) -> dict[str, int]:
        """Of the problem of a layer's part."""
        part = self.layers[layer][name]
        return part.op.problem(part.given)

    def values(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normally distributed, of the model's dtype."""
        drawn = torch.empty(shape, dtype=self.dtype, device=self.device)
        return drawn.normal_(0.0, scale, generator=self.generator)

    def fold_shared(self) -> None:
        """Has the routed experts hold the shared one as their last, of which its parts are views. Raises ValueError."""
        self.folds_shared = True
        for layer in self.layers:
            if "experts" not in layer or "shared gate_up" not in layer:
                continue
            experts, folded = layer["experts"], {}
            for name, shared in (("w1", "shared gate_up"), ("w2", "shared down")):
                weight, of_shared = getattr(experts.given, name), layer[shared]
                single = of_shared.op is ops.block_scaled_mm and of_shared.given.b.shape == weight.shape[1:]
                if not single or self.groups > 1:
                    wanted = "one shared expert in FP8 blocks, as wide as the routed ones and with the same tokens"
                    raise ValueError(f"to be folded there must be {wanted}")
                rows = torch.cat((weight.view(torch.uint8), of_shared.given.b.view(torch.uint8)[None]))
                folded[name] = rows.view(weight.dtype)
                scales = getattr(experts.given, f"{name}_scale")
                folded[f"{name}_scale"] = torch.cat((scales, of_shared.given.scale_b[None]))
                of_shared = of_shared.given._replace(b=folded[name][-1], scale_b=folded[f"{name}_scale"][-1])
                layer[shared] = layer[shared]._replace(given=of_shared)
            layer["experts"] = experts._replace(given=experts.given._replace(**folded))


def _tamed(op: Op, given: tuple) -> tuple:
    """The arguments with weights that keep results about as large as activations, and experts about as likely."""
    if op is ops.unquantized_gemm:
        given.weight.mul_(given.weight.shape[1] ** -0.5)
    elif op in (ops.scaled_mm, ops.block_scaled_mm):
        given.scale_b.mul_(given.a.shape[1] ** -0.5)
    elif op is ops.fused_experts:
        for weight, scale in ((given.w1, given.w1_scale), (given.w2, given.w2_scale)):
            (weight if scale is None else scale).mul_(weight.shape[2] ** -0.5)
    elif op is ops.grouped_topk and given.e_score_correction_bias is not None:
        given.e_score_correction_bias.mul_(0.01)
    return given
