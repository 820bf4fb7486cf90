"""Run forward passes of the small models that trained.py trains, in fp32 and plain PyTorch."""

import pathlib
import re
import sys

import torch
from torch import Tensor
from torch.nn import functional

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "vllm"))
import checkpoints

sys.path.pop()


def among_experts(name: str) -> str:
    """Return the name of a layer with all routed experts merged."""
    return re.sub(r"(?<=experts\.)\d+\.", "", name)


class Model:
    """Run the forward pass of a model in fp32, over weights with checkpoint names."""

    def __init__(self, config: dict, weights: dict[str, Tensor]):
        self.config, self.weights = config, weights
        self.largest: dict[str, Tensor] | None = None  # maximum input of each linear layer, if requested
        self.loads: dict[str, Tensor] = {}  # tokens per expert of a layer in the last pass

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [sequences, tokens, vocabulary] after each token of the sequences [sequences, tokens]."""
        hidden = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            hidden = hidden + self.mix(layer, prefix, self.norm(f"{prefix}.input_layernorm", hidden))
            normed = self.norm(f"{prefix}.post_attention_layernorm", hidden)
            has_experts = checkpoints.has_experts(self.config, layer)
            hidden = hidden + (self.experts if has_experts else self.mlp)(f"{prefix}.mlp", normed)
        return functional.linear(self.norm("model.norm", hidden), self.weights["lm_head.weight"])

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the nats per token after the first."""
        logits = self.logits(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def mix(self, layer: int, prefix: str, x: Tensor) -> Tensor:
        """Apply a layer's attention or Gated DeltaNet."""
        if "layer_types" not in self.config:
            attention = self.mla_attention if "kv_lora_rank" in self.config else self.attention
            return attention(f"{prefix}.self_attn", x)
        if self.config["layer_types"][layer] == "full_attention":
            return self.gated_attention(f"{prefix}.self_attn", x)
        return self.delta_net(f"{prefix}.linear_attn", x)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Apply RMSNorm, of Qwen3-Next with 1 + weight."""
        weight = self.weights[f"{name}.weight"] + ("layer_types" in self.config)
        return functional.rms_norm(x, x.shape[-1:], weight, self.config["rms_norm_eps"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer."""
        if self.largest is not None and len(x):
            largest, layer = x.detach().abs().amax(), among_experts(name)
            self.largest[layer] = torch.maximum(self.largest.get(layer, largest), largest)
        return functional.linear(x, self.weights[f"{name}.weight"])

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """Apply a gated MLP."""
        gate, up = (self.linear(f"{name}.{part}_proj", x) for part in ("gate", "up"))
        return self.linear(f"{name}.down_proj", functional.silu(gate) * up)

    def experts(self, name: str, x: Tensor) -> Tensor:
        """Apply routed experts and the shared expert."""
        rows = x.flatten(0, -2)
        logits = functional.linear(rows, self.weights[f"{name}.gate.weight"])
        if "num_experts" in self.config:
            share, chosen = logits.softmax(-1).topk(self.config["num_experts_per_tok"])
            share = share / share.sum(-1, keepdim=True)
            gate = functional.linear(rows, self.weights[f"{name}.shared_expert_gate.weight"]).sigmoid()
            total, experts = gate * self.mlp(f"{name}.shared_expert", rows), self.config["num_experts"]
        else:
            share, chosen = self.among_groups(name, logits)
            total, experts = self.mlp(f"{name}.shared_experts", rows), self.config["n_routed_experts"]
            self.loads[name] = torch.bincount(chosen.flatten(), minlength=experts)
        for expert in range(experts):
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            total = total.index_add(0, row, share[row, slot, None] * self.mlp(f"{name}.experts.{expert}", rows[row]))
        return total.view(x.shape)

    def among_groups(self, name: str, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares and ids of experts, by sigmoids with a bias within the best groups."""
        config, scores = self.config, torch.sigmoid(logits)
        biased = scores.detach() + self.weights[f"{name}.gate.e_score_correction_bias"]
        grouped = biased.unflatten(1, (config["n_group"], -1))
        best = grouped.topk(2).values.sum(-1).topk(config["topk_group"]).indices
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        allowed = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = allowed.topk(config["num_experts_per_tok"]).indices
        share = scores.gather(1, chosen)
        return share / share.sum(-1, keepdim=True) * config["routed_scaling_factor"], chosen

    def attention(self, name: str, x: Tensor) -> Tensor:
        """Apply GQA."""
        parts = (self.linear(f"{name}.{part}_proj", x) for part in "qkv")
        query, key, value = (part.unflatten(-1, (-1, self.config["head_dim"])).transpose(1, 2) for part in parts)
        query, key = (torch.cat(self.rotated(*part.chunk(2, -1)), -1) for part in (query, key))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.linear(f"{name}.o_proj", out.transpose(1, 2).flatten(2))

    def gated_attention(self, name: str, x: Tensor) -> Tensor:
        """Apply GQA with norms of heads, rotations of a part of a head, and a gate for each head's output."""
        size = self.config["head_dim"]
        width = int(size * self.config["partial_rotary_factor"])
        parts = (self.linear(f"{name}.{part}_proj", x) for part in "qkv")
        query, key, value = (
            part.unflatten(-1, (-1, wide)).transpose(1, 2) for part, wide in zip(parts, (2 * size, size, size))
        )
        query, gate = query.chunk(2, -1)
        query, key = self.norm(f"{name}.q_norm", query), self.norm(f"{name}.k_norm", key)
        query, key = (
            torch.cat([*self.rotated(*part[..., :width].chunk(2, -1)), part[..., width:]], -1) for part in (query, key)
        )
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.linear(f"{name}.o_proj", (out * gate.sigmoid()).transpose(1, 2).flatten(2))

    def delta_net(self, name: str, x: Tensor) -> Tensor:
        """Apply Gated DeltaNet, one token after the other."""
        config, weights = self.config, self.weights
        keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        size, each = config["linear_key_head_dim"], heads // keys
        packed = self.linear(f"{name}.in_proj_qkvz", x).unflatten(-1, (keys, -1))
        q, k, v, z = packed.split([size, size, each * size, each * size], -1)
        b, a = (part.flatten(2) for part in self.linear(f"{name}.in_proj_ba", x).unflatten(-1, (keys, -1)).chunk(2, -1))
        mixed = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1).transpose(1, 2)
        mixed = functional.conv1d(
            functional.pad(mixed, (3, 0)), weights[f"{name}.conv1d.weight"], groups=mixed.shape[1]
        )
        parts = functional.silu(mixed).transpose(1, 2).split([keys * size, keys * size, heads * size], -1)
        q, k, v = (part.unflatten(-1, (-1, size)) for part in parts)
        q, k = (functional.normalize(part, dim=-1).repeat_interleave(each, 2) for part in (q, k))
        steps = functional.softplus(a + weights[f"{name}.dt_bias"])
        decay, beta = torch.exp(-weights[f"{name}.A_log"].exp() * steps), b.sigmoid()
        state, outs = x.new_zeros(len(x), heads, size, size), []  # of values and keys
        for t in range(x.shape[1]):
            state = state * decay[:, t, :, None, None]
            error = (v[:, t] - (state @ k[:, t, ..., None]).squeeze(-1)) * beta[:, t, :, None]
            state = state + error[..., None] * k[:, t, :, None]
            outs.append((state @ q[:, t, ..., None]).squeeze(-1) * size**-0.5)
        out = functional.rms_norm(torch.stack(outs, 1), (size,), weights[f"{name}.norm.weight"], config["rms_norm_eps"])
        out = out * functional.silu(z.flatten(2).unflatten(-1, (heads, size)))
        return self.linear(f"{name}.out_proj", out.flatten(2))

    def mla_attention(self, name: str, x: Tensor) -> Tensor:
        """Apply MLA."""
        config, heads = self.config, self.config["num_attention_heads"]
        nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
        query = self.linear(f"{name}.q_b_proj", self.norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x)))
        query = query.unflatten(-1, (heads, nope + rope)).transpose(1, 2)
        latent = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        query_rope, key_rope = (
            torch.stack(self.rotated(part[..., 0::2], part[..., 1::2]), -1).flatten(-2)
            for part in (query[..., nope:], latent[:, None, :, rank:])
        )
        expanded = self.linear(f"{name}.kv_b_proj", self.norm(f"{name}.kv_a_layernorm", latent[..., :rank]))
        key, value = expanded.unflatten(-1, (heads, -1)).transpose(1, 2).split([nope, config["v_head_dim"]], -1)
        query = torch.cat([query[..., :nope], query_rope], -1)
        key = torch.cat([key, key_rope.expand(-1, heads, -1, -1)], -1)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.linear(f"{name}.o_proj", out.transpose(1, 2).flatten(2))

    def rotated(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Apply rotary embedding to the two halves of [..., tokens, width]."""
        steps = torch.arange(first.shape[-1]) / first.shape[-1]
        angles = torch.outer(torch.arange(first.shape[-2]).float(), self.config["rope_theta"] ** -steps)
        cos, sin = angles.cos(), angles.sin()
        return first * cos - second * sin, second * cos + first * sin
