"""Llama, DeepSeek V3 and Qwen3-Next in plain PyTorch, read from a checkpoint: the expected answers of a tiny model, without vLLM.

Written from the papers and the checkpoints' formats. It shares no code with the ops or with vLLM. Values are rounded to
the model's dtype between modules; inside a module they are fp32.
"""

import json
import pathlib

import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize, silu, softplus

LIMIT = 448.0
BLOCK = 128
GROUP = 32


class Model:
    """A checkpoint and its forward pass, in e4m3fn: e4m3fnuz represents the same values by scales twice as large."""

    def __init__(self, folder: pathlib.Path):
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        quantization = self.config.get("quantization_config") or {}
        self.upper_bound = quantization.get("activation_scale_ub")
        self.dtype = torch.bfloat16
        self.quantizes = True  # inputs of MX-FP8 layers

    def logits(self, tokens: list[int], prompt_length: int) -> torch.Tensor:
        """Return the logits [tokens, vocabulary] after each token of a sequence."""
        hidden = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        residual = torch.zeros_like(hidden)
        attention = self.mla_attention if "q_lora_rank" in self.config else self.attention
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            normed, residual = self.norm(f"{prefix}.input_layernorm", hidden, residual)
            hidden = attention(f"{prefix}.self_attn", normed, prompt_length)
            normed, residual = self.norm(f"{prefix}.post_attention_layernorm", hidden, residual)
            dense = layer < self.config.get("first_k_dense_replace", self.config["num_hidden_layers"])
            hidden = (self.mlp if dense else self.experts)(f"{prefix}.mlp", normed)
        normed, _ = self.norm("model.norm", hidden, residual)
        return normed.float() @ self.weights["lm_head.weight"].float().t()

    def norm(self, name: str, x: torch.Tensor, residual: torch.Tensor | None = None):
        total = (x.float() + (0.0 if residual is None else residual.float())).to(self.dtype)
        inverse = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        normed = (total.float() * inverse).to(self.dtype) * self.weights[f"{name}.weight"]
        return normed if residual is None else (normed, total)

    def linear(self, name: str, x: torch.Tensor, merged: tuple[str, ...] = ()) -> torch.Tensor:
        """Compute one linear layer of x, rounded once. Layers in `merged` share one scale per tensor with it."""
        if (packed := self.weights.get(f"{name}.weight_packed")) is not None:
            values = (packed.unsqueeze(-1) >> torch.arange(0, 32, 4) & 15).flatten(1).float() - 8
            groups = values.unflatten(-1, (-1, GROUP)) * self.weights[f"{name}.weight_scale"].float()[..., None]
            return (x.to(self.dtype).float() @ groups.flatten(-2).t()).to(self.dtype)
        weight = self.weights[f"{name}.weight"]
        if weight.dtype == self.dtype:
            return (x.to(self.dtype).float() @ weight.float().t()).to(self.dtype)
        if f"{name}.weight_scale_inv" in self.weights:
            values = self.rounded(x.unflatten(-1, (-1, BLOCK)).float(), None).flatten(-2)
            return (values @ self.unscaled(name).t()).to(self.dtype)
        scale = self.weights[f"{name}.weight_scale"].float()
        if self.weights[f"{name}.weight_scale"].dtype == torch.uint8:
            groups = weight.float().unflatten(-1, (-1, GROUP)) * torch.exp2(scale - 127)[..., None]
            values = x.float().unflatten(-1, (-1, GROUP))
            values = self.rounded_to_powers(values) if self.quantizes else values
            return (values.flatten(-2) @ groups.flatten(-2).t()).to(self.dtype)
        if f"{name}.input_scale" not in self.weights:
            values = self.rounded(x.float(), None, self.upper_bound)
            return (values @ (weight.float() * scale.reshape(-1, 1)).t()).to(self.dtype)
        names = merged or (name,)
        largest = max(self.weights[f"{other}.weight_scale"] for other in names)
        shared = self.rounded((weight.half() * scale.half()).float(), largest)
        values = self.rounded(x.float(), max(self.weights[f"{other}.input_scale"] for other in names))
        return (values @ shared.t()).to(self.dtype)

    def rounded(self, x: torch.Tensor, scale: torch.Tensor | None, upper_bound: float | None = None) -> torch.Tensor:
        """Return x rounded to e4m3 with this scale, or with one scale for each row of the last dimension."""
        if scale is None:
            largest = x.abs().amax(-1, keepdim=True).clamp(max=upper_bound or torch.inf)
            scale = (largest / LIMIT).clamp(min=1 / (LIMIT * 512))
        return (x / scale).clamp(-LIMIT, LIMIT).to(torch.float8_e4m3fn).float() * scale

    def rounded_to_powers(self, x: torch.Tensor) -> torch.Tensor:
        """Return x rounded to e4m3 with a power of two as scale for each row, which clamps no element."""
        unit = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp(min=2.0**-118) / LIMIT)))
        return (x / unit).to(torch.float8_e4m3fn).float() * unit

    def unscaled(self, name: str) -> torch.Tensor:
        """Return a weight in fp32, by its scales per 128x128 block, or row, if it has any."""
        weight = self.weights[f"{name}.weight"].float()
        if f"{name}.weight_scale_inv" not in self.weights:
            return weight * self.weights.get(f"{name}.weight_scale", torch.ones(1))
        (rows, columns), scale = weight.shape, self.weights[f"{name}.weight_scale_inv"]
        return weight * scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        both = f"{name}.gate_proj", f"{name}.up_proj"
        gate, up = (self.linear(part, x, both).float() for part in both)
        return self.linear(f"{name}.down_proj", gate / (1 + torch.exp(-gate)) * up)

    def experts(self, name: str, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        groups = config["n_group"]
        scores = torch.sigmoid((x.float() @ self.weights[f"{name}.gate.weight"].float().t()).to(self.dtype).float())
        biased = scores + self.weights[f"{name}.gate.e_score_correction_bias"]
        best_two = biased.unflatten(1, (groups, -1)).topk(2, -1).values.sum(-1)
        kept = torch.zeros(len(x), groups, dtype=torch.bool)
        kept.scatter_(1, best_two.topk(config["topk_group"], -1).indices, True)
        kept = kept.repeat_interleave(config["n_routed_experts"] // groups, 1)
        chosen = biased.masked_fill(~kept, -torch.inf).topk(config["num_experts_per_tok"], -1).indices
        share = scores.gather(1, chosen)
        share = share / share.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        total = torch.zeros(x.shape)
        for expert in chosen.unique().tolist():
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            total[row] += share[row, slot, None] * self.mlp(f"{name}.experts.{expert}", x[row]).float()
        return (total + self.mlp(f"{name}.shared_experts", x).float()).to(self.dtype)

    def attention(self, name: str, x: torch.Tensor, prompt_length: int) -> torch.Tensor:
        heads, head_dim = self.config["num_attention_heads"], self.config["head_dim"]
        merged = tuple(f"{name}.{part}_proj" for part in "qkv")
        query, key, value = (self.linear(part, x, merged).unflatten(-1, (-1, head_dim)) for part in merged)
        half = head_dim // 2
        query, key = (self.rotated(t, t[..., :half], t[..., half:], interleaved=False) for t in (query, key))
        repeat = heads // key.shape[1]
        out = self.attend(query, key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1))
        return self.linear(f"{name}.o_proj", out.flatten(-2))

    def mla_attention(self, name: str, x: torch.Tensor, prompt_length: int) -> torch.Tensor:
        config, heads = self.config, self.config["num_attention_heads"]
        nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
        query = self.linear(f"{name}.q_b_proj", self.norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x)))
        query = query.unflatten(-1, (heads, nope + rope))
        latent = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        key_rope = latent[:, None, rank:]
        latent = self.norm(f"{name}.kv_a_layernorm", latent[:, :rank])
        query_rope, key_rope = (
            self.rotated(t, t[..., 0::2], t[..., 1::2], interleaved=True) for t in (query[..., nope:], key_rope)
        )
        query = torch.cat([query[..., :nope], query_rope], -1)
        # Prompts go through the linear layer; later tokens multiply by its weight, which then is not quantized twice.
        weight = f"{name}.kv_b_proj"
        exact = self.unscaled(weight).to(self.dtype)
        outputs = []
        for expanded in (self.linear(weight, latent), (latent.float() @ exact.float().t()).to(self.dtype)):
            key, value = expanded.unflatten(-1, (heads, -1)).split([nope, config["v_head_dim"]], -1)
            outputs.append(self.attend(query, torch.cat([key, key_rope.expand(-1, heads, -1)], -1), value))
        out = torch.cat([outputs[0][:prompt_length], outputs[1][prompt_length:]])
        return self.linear(f"{name}.o_proj", out.flatten(-2))

    def rotated(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """Return the rotary embedding of x [tokens, heads, rope], given as its two halves."""
        steps = torch.arange(first.shape[-1]) / first.shape[-1]
        angles = torch.outer(torch.arange(len(x)).float(), self.config["rope_theta"] ** -steps)[:, None]
        cos, sin = (f(angles).to(self.dtype).float() for f in (torch.cos, torch.sin))
        first, second = first.float() * cos - second.float() * sin, second.float() * cos + first.float() * sin
        both = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
        return both.to(self.dtype)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Compute causal attention over [tokens, heads, width]."""
        query, key, value = (t.float().transpose(0, 1) for t in (query, key, value))
        scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        out = torch.softmax(scores.masked_fill(future, -torch.inf), -1) @ value
        return out.transpose(0, 1).to(self.dtype)


class Next(Model):
    """Qwen3-Next: layers of Gated DeltaNet, attention whose output has a gate, and experts beside a shared one with a gate."""

    def logits(self, tokens: list[int], prompt_length: int) -> torch.Tensor:
        hidden = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        residual = torch.zeros_like(hidden)
        for layer, kind in enumerate(self.config["layer_types"]):
            prefix = f"model.layers.{layer}"
            normed, residual = self.norm(f"{prefix}.input_layernorm", hidden, residual)
            mixes = {
                "linear_attention": ("linear_attn", self.delta_net),
                "full_attention": ("self_attn", self.attention),
            }
            name, mix = mixes[kind]
            hidden = mix(f"{prefix}.{name}", normed, prompt_length)
            normed, residual = self.norm(f"{prefix}.post_attention_layernorm", hidden, residual)
            hidden = self.experts(f"{prefix}.mlp", normed)
        normed, _ = self.norm("model.norm", hidden, residual)
        return normed.float() @ self.weights["lm_head.weight"].float().t()

    def norm(self, name: str, x: torch.Tensor, residual: torch.Tensor | None = None):
        total = (x.float() + (0.0 if residual is None else residual.float())).to(self.dtype)
        inverse = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        normed = (total.float() * inverse * (1 + self.weights[f"{name}.weight"].float())).to(self.dtype)
        return normed if residual is None else (normed, total)

    def attention(self, name: str, x: torch.Tensor, prompt_length: int) -> torch.Tensor:
        size, repeat = self.config["head_dim"], self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        query, key, value = (self.linear(f"{name}.{part}_proj", x) for part in "qkv")
        query, gate = query.unflatten(-1, (-1, 2 * size)).split(size, -1)
        key = key.unflatten(-1, (-1, size))
        query, key = (self.turned(self.norm(f"{name}.{of}_norm", part)) for of, part in (("q", query), ("k", key)))
        key, value = (part.repeat_interleave(repeat, 1) for part in (key, value.unflatten(-1, (-1, size))))
        return self.linear(f"{name}.o_proj", (self.attend(query, key, value) * gate.float().sigmoid()).flatten(-2))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, heads, width] with the rotary embedding of a part of each head."""
        rotary = int(x.shape[-1] * self.config["partial_rotary_factor"])
        first, second, rest = x.split([rotary // 2, rotary // 2, x.shape[-1] - rotary], -1)
        return torch.cat([self.rotated(x, first, second, interleaved=False), rest], -1)

    def delta_net(self, name: str, x: torch.Tensor, prompt_length: int) -> torch.Tensor:
        config, size = self.config, self.config["linear_key_head_dim"]
        groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        each = heads // groups
        rows = self.linear(f"{name}.in_proj_qkvz", x).unflatten(1, (groups, -1))
        q, k, v, z = rows.split([size, size, each * size, each * size], 2)
        ba = self.linear(f"{name}.in_proj_ba", x).unflatten(1, (groups, -1)).float()
        b, alpha = (part.flatten(1) for part in ba.chunk(2, 2))
        kernel = self.weights[f"{name}.conv1d.weight"].squeeze(1).float()
        past = kernel.shape[1] - 1
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], 1).float()
        window = torch.cat([mixed.new_zeros(past, mixed.shape[1]), mixed])
        mixed = silu(sum(window[t : t + len(x)] * kernel[:, t] for t in range(past + 1))).to(self.dtype).float()
        q, k, v = mixed.split([groups * size, groups * size, heads * size], 1)
        q, k = (normalize(part.unflatten(1, (groups, size)), dim=2).repeat_interleave(each, 1) for part in (q, k))
        v, q = v.unflatten(1, (heads, size)), q * size**-0.5
        rate, bias = self.weights[f"{name}.A_log"].float().exp(), self.weights[f"{name}.dt_bias"].float()
        beta, decay = b.sigmoid(), torch.exp(-rate * softplus(alpha + bias))
        state, made = torch.zeros(heads, size, size), []
        for token in range(len(x)):
            state = state * decay[token, :, None, None]
            delta = (v[token] - torch.einsum("hvk,hk->hv", state, k[token])) * beta[token, :, None]
            state = state + delta[:, :, None] * k[token, :, None]
            made.append(torch.einsum("hvk,hk->hv", state, q[token]))
        out = torch.stack(made).to(self.dtype).float()
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + config["rms_norm_eps"])
        out = out * self.weights[f"{name}.norm.weight"].float() * silu(z.reshape(out.shape).float())
        return self.linear(f"{name}.out_proj", out.flatten(1).to(self.dtype))

    def experts(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scores = self.linear(f"{name}.gate", x).float().softmax(-1)
        share, chosen = scores.topk(self.config["num_experts_per_tok"], -1)
        share = share / share.sum(-1, keepdim=True)
        total = torch.zeros(x.shape)
        for expert in chosen.unique().tolist():
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            total[row] += share[row, slot, None] * self.mlp(f"{name}.experts.{expert}", x[row]).float()
        gate = self.linear(f"{name}.shared_expert_gate", x).float().sigmoid()
        return (total + gate * self.mlp(f"{name}.shared_expert", x).float()).to(self.dtype)
