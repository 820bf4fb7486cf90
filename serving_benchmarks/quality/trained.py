"""Train a small Llama, DeepSeek V3 and Qwen3-Next on text that ships with Python, with bytes as tokens.

A wrong scale changes the perplexity of a trained model on unseen text, but not of a random model. Training takes some minutes per model on
one core, with the same steps every time, or a minute on a GPU. Checkpoints are stored in the user's cache folder, one per quantization
that the seams support.
"""

import json
import os
import pathlib
import re
import sys
import sysconfig
import time
from collections.abc import Callable

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "vllm"))
import checkpoints

sys.path.pop()
WINDOW = 256
"""Tokens of a sequence, in training and in evaluation."""
HELD_OUT_EVERY = 8  # files
MAX_OF_ENTROPY = 0.6
"""Maximum loss of a trained model, relative to the entropy of single bytes."""

SHARED = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 2}
CONFIGS = {"llama": checkpoints.LLAMA | SHARED, "deepseek": checkpoints.DEEPSEEK | SHARED}
CONFIGS["qwen3-next"] = checkpoints.LLAMA | checkpoints.FAMILIES["qwen3_next"] | SHARED | {"model_type": "qwen3_next"}
CONFIGS["qwen3-next"] |= {"layer_types": ["linear_attention", "full_attention"]}
CONFIGS["qwen3-next"] |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
KINDS = {
    "llama": ("bf16", "static", "dynamic", "token", "bounded", "block", "mxfp8"),
    "deepseek": ("bf16", "static", "dynamic", "token", "block", "mxfp8"),
    "qwen3-next": ("bf16", "dynamic", "block"),
}
"""vLLM has no experts for fbgemm's format, "bounded"."""
STEPS = {"llama": 700, "deepseek": 500, "qwen3-next": 400}
SEQUENCES = 4  # per step
RATES = {
    "llama": (3e-3, 3e-3),
    "deepseek": (1e-3, 6e-3),
    "qwen3-next": (2e-3, 4e-3),
}  # for layers; for the embedding and lm_head
BIAS_RATE = 3e-3  # for a router's bias, per step


# Text


def files(held_out: bool) -> list[pathlib.Path]:
    """Return modules of the standard library; every eighth is held out."""
    modules = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path for place, path in enumerate(modules) if (place % HELD_OUT_EVERY == 0) == held_out]


def text(held_out: bool) -> Tensor:
    """Return the bytes of those files."""
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files(held_out))), dtype=torch.uint8)


def windows(tokens: int, held_out: Tensor | None = None) -> Tensor:
    """Return held-out sequences [tokens / WINDOW, WINDOW], spread evenly over that text, by default this Python's."""
    held_out, count = text(held_out=True) if held_out is None else held_out, tokens // WINDOW
    starts = torch.linspace(0, len(held_out) - WINDOW, count).long()
    return torch.stack([held_out[start : start + WINDOW] for start in starts]).long()


def entropy(tokens: Tensor) -> float:
    """Return the nats per token for independent tokens."""
    share = torch.bincount(tokens.flatten().long(), minlength=256).double() / tokens.numel()
    return -(share * share.clamp(min=1e-30).log()).sum().item()


# Models


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


# Training


def initial(config: dict, like: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return initial weights: norms 1, biases 0, of DeltaNet's convolution and decays `like`, the rest random."""
    weights, one_plus = {}, "layer_types" in config
    deviations = {"model.embed_tokens.weight": 0.5, "lm_head.weight": 0.02}
    for name, weight in like.items():
        if name.endswith(("norm.weight", "bias")):
            is_one = name.endswith("weight") and (not one_plus or ".linear_attn." in name)
            weights[name] = torch.full(weight.shape, float(is_one))
            continue
        if name.endswith(("conv1d.weight", "A_log", "dt_bias")):
            weights[name] = weight.float()
            continue
        ends = name.endswith(
            ("o_proj.weight", "out_proj.weight", "down_proj.weight")
        )  # summed into the residual once per layer
        deviation = (
            deviations.get(name, weight.shape[1] ** -0.5) / (2 * config["num_hidden_layers"] if ends else 1) ** 0.5
        )
        weights[name] = torch.randn(weight.shape, generator=generator) * deviation
    if "kv_lora_rank" in config:
        look_back(config, weights, torch.randn(config["hidden_size"], generator=generator).sign())
    return weights


def look_back(config: dict, weights: dict[str, Tensor], constant: Tensor) -> None:
    """Make each head of MLA attend to one of the previous tokens, the first head to the last.

    From random weights learning that takes far longer. A constant part of all tokens becomes queries and keys that only their
    positions rotate.
    """
    heads, nope, rope = (config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    frequencies = config["rope_theta"] ** -(torch.arange(0, rope, 2) / rope)
    weights["model.embed_tokens.weight"] += 0.5 * constant
    unit = constant / len(constant) * 2**0.5  # gives 1 for a token after the norm
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn"
        weights[f"{prefix}.kv_a_proj_with_mqa.weight"][config["kv_lora_rank"] :: 2] += 1.3 * unit
        weights[f"{prefix}.q_a_proj.weight"][0] = 11 * unit  # 8 after the norm
        queries = weights[f"{prefix}.q_b_proj.weight"].view(heads, nope + rope, -1)
        for head in range(heads):
            angles = frequencies * (head + 1)
            queries[head, nope::2, 0], queries[head, nope + 1 :: 2, 0] = 0.16 * angles.cos(), -0.16 * angles.sin()


MAKE = {"llama": checkpoints.llama_weights, "deepseek": checkpoints.deepseek_weights}


def train(model: str, steps: int, report=lambda step, loss: None) -> dict[str, Tensor]:
    """Return the weights, in bf16, after `steps` steps."""
    config, generator = CONFIGS[model], torch.Generator().manual_seed(0)
    shapes = MAKE.get(model, checkpoints.family_weights)(config)
    device = find_device()
    weights = {name: weight.to(device) for name, weight in initial(config, shapes, generator).items()}
    trained = Model(config, weights)
    parameters = {name: weight.requires_grad_() for name, weight in weights.items() if not name.endswith("bias")}
    outer = {"model.embed_tokens.weight", "lm_head.weight"}
    groups = [
        {"params": [weight for name, weight in parameters.items() if (name in outer) == is_outer], "rate": rate}
        for is_outer, rate in zip((False, True), RATES[model])
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    source = text(held_out=False)
    for step in range(steps):
        for group in optimizer.param_groups:  # linear warm-up over 20 steps, then linear decay
            group["lr"] = group["rate"] * min((step + 1) / 20, (steps - step) / steps)
        starts = torch.randint(len(source) - WINDOW, (SEQUENCES,), generator=generator)
        sequences = torch.stack([source[start : start + WINDOW] for start in starts]).long().to(device)
        with torch.device(device):
            loss = trained.loss(sequences)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        optimizer.step()
        for name, load in trained.loads.items():  # balances experts without a loss, as DeepSeek does
            weights[f"{name}.gate.e_score_correction_bias"] += BIAS_RATE * (load.float().mean() - load).sign()
        report(step, loss.item())
    return {name: weight.detach().to("cpu", shapes[name].dtype) for name, weight in weights.items()}


def find_device() -> str:
    """Return a GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# Evaluation


def log_probabilities(model: str, weights: dict[str, Tensor], sequences: Tensor) -> Tensor:
    """Return the log probability of each token after the first, [sequences, tokens - 1]."""
    device = find_device()
    with torch.no_grad(), torch.device(device):
        here = Model(CONFIGS[model], {name: weight.float().to(device) for name, weight in weights.items()})
        parts = [
            here.logits(part[:, :-1]).log_softmax(-1).gather(2, part[:, 1:, None]).squeeze(2)
            for part in sequences.to(device).split(SEQUENCES)
        ]
    return torch.cat(parts).cpu()


def largest_inputs(model: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the maximum input magnitude of each linear layer, over training text."""
    trained = Model(CONFIGS[model], {name: weight.float() for name, weight in weights.items()})
    trained.largest = {}
    source = text(held_out=False)
    with torch.no_grad():
        for start in torch.linspace(0, len(source) - WINDOW, 32).long():
            trained.logits(source[None, start : start + WINDOW].long())
    return trained.largest


SCALED = ("q_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "down_proj", "in_proj_qkvz", "out_proj")
"""A wrong scale of another linear layer has the effect of one of these: k_proj's of q_proj's, v_proj's of o_proj's and up_proj's of
down_proj's; kv_b_proj's of several. q_a_proj's has none, as a norm follows."""


def scaled_layers(weights: dict[str, Tensor]) -> dict[str, list[str]]:
    """Return the weights with independent scales, by layer. All routed experts of a layer are one."""
    layers: dict[str, list[str]] = {}
    for name in weights:
        layer = re.sub(r"model\.layers\.|self_attn\.|mlp\.|\.weight", "", among_experts(name))
        if layer.endswith(SCALED):
            layers.setdefault(layer, []).append(name)
    return layers


def with_scale_error(weights: dict[str, Tensor], names: list[str], error: float) -> dict[str, Tensor]:
    """Return the weights with an error in the scale of some."""
    return weights | {name: weights[name].float() * (1 + error) for name in names}


def effects_of_scales(model: str, weights: dict[str, Tensor], sequences: Tensor) -> dict[str, Tensor]:
    """Return by layer the linearized change of each token's log probability for a relative scale error of 1."""
    exact, error = log_probabilities(model, weights, sequences), 0.02
    return {
        layer: (log_probabilities(model, with_scale_error(weights, names, error), sequences) - exact) / error
        for layer, names in scaled_layers(weights).items()
    }


# Checkpoints


def cache() -> pathlib.Path:
    """Return the checkpoint folder."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "vllm-rocm-ops" / "trained"


def held_out(folder: pathlib.Path) -> Tensor:
    """Return the held-out text of a folder's checkpoints."""
    return cached(folder / "held-out.safetensors", lambda: {"text": text(held_out=True)})["text"]


def trained_weights(model: str, folder: pathlib.Path, say=print) -> dict[str, Tensor]:
    """Return a trained model's cached weights."""
    return cached(folder / f"{model}.safetensors", lambda: train_until_good(model, say))


def cached(path: pathlib.Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of a file, which is created if missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(make(), path)
    return load_file(path)


def train_until_good(model: str, say) -> dict[str, Tensor]:
    """Return the weights of a model with a sufficient loss. Raises RuntimeError."""
    threads, start = torch.get_num_threads(), time.process_time()
    torch.set_num_threads(1)
    try:
        weights = train(model, STEPS[model], lambda step, loss: step % 50 or say(f"{model}: {step}, loss {loss:.3f}"))
    finally:
        torch.set_num_threads(threads)
    loss = -log_probabilities(model, weights, windows(8192)).mean().item()
    most = MAX_OF_ENTROPY * entropy(text(held_out=True))
    say(f"{model}: held-out loss {loss:.3f}, at most {most:.3f}; {time.process_time() - start:.0f} s CPU time")
    if loss > most:
        raise RuntimeError(f"{model} must have a loss of at most {most:.3f} on held-out text, got {loss:.3f}")
    return weights


def quantized(weights: dict[str, Tensor], kind: str, largest: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's quantized tensors, with static scales for these largest inputs."""
    if kind not in ("static", "dynamic", "block"):
        return checkpoints.quantize(weights, kind)
    tensors = dict(weights)
    for name in [name for name in weights if "_proj" in name and not re.search(checkpoints.GATES, name)]:
        weight, layer = weights[name].float(), name.removesuffix(".weight")
        if kind == "block":
            tensors[name], tensors[f"{name}_scale_inv"] = checkpoints.quantize_blocks(weight)
            continue
        tensors[f"{name}_scale"] = scale = weight.abs().amax() / checkpoints.LIMIT
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        if kind == "static":
            tensors[f"{layer}.input_scale"] = largest[among_experts(layer)] / checkpoints.LIMIT
    return tensors


QUANTIZATION = checkpoints.QUANTIZATION | {
    "dynamic": checkpoints.QUANTIZATION["static"] | {"activation_scheme": "dynamic"},
    "bounded": checkpoints.QUANTIZATION["bounded"] | {"activation_scale_ub": 1200.0},
}


def checkpoint(model: str, kind: str, folder: pathlib.Path) -> pathlib.Path:
    """Return the folder of a quantized checkpoint, written if missing."""
    path = folder / f"{model}-{kind}"
    held_out(folder)
    if not (path / "config.json").exists():
        weights = trained_weights(model, folder)
        largest = largest_inputs(model, weights) if kind == "static" else {}
        write(path, model, kind, quantized(weights, kind, largest))
    return path


def write(path: pathlib.Path, model: str, kind: str, tensors: dict[str, Tensor]) -> None:
    """Write a checkpoint of these tensors, its config.json last."""
    path.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors", {"format": "pt"})
    quantization = checkpoints.quantization(QUANTIZATION[kind], CONFIGS[model], tensors)
    config = CONFIGS[model] | ({"quantization_config": quantization} if quantization else {})
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    (path / "config.json").write_text(json.dumps(config, indent=1))
