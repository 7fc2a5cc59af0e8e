"""Makes recurrent_layers.npz: outputs of other implementations' layers for random weights.

    pip install torch transformers==5.24.0 rwkv==0.8.32
    python tests/examples/make_recurrent_layers.py

The layers of Qwen3-Next, Kimi Linear and Mamba-2 are those of transformers in PyTorch, without kernels of other
packages; those of RWKV-7 are the functions of the rwkv package, by the author of the models. Arrays are called
``layer/name``, weights ``layer/w.name`` as in the checkpoints. Weights and inputs are float16, in which they are exact.
"""

import os
from pathlib import Path

import numpy as np
import torch
from transformers.cache_utils import DynamicCache
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
from rwkv.model import RWKV_x070_CMix_seq, RWKV_x070_TMix_seq

WIDTH, LENGTH = 16, 66
FOUND: dict[str, np.ndarray] = {}


def exact(x):
    return x.half().float()


def draw(*shape, scale=1.0, mean=0.0):
    return exact(mean + scale * torch.randn(shape))


def weight(name, shape):
    if "A_log" in name:
        return exact(torch.log(0.1 + 4 * torch.rand(shape)))
    if "dt_bias" in name:
        return draw(*shape, mean=-1.0)
    if "norm" in name or name == "D":
        return draw(*shape, scale=0.25, mean=1.0)
    if "conv1d.weight" in name:
        return draw(*shape, scale=0.5)
    return draw(*shape, scale=shape[1] ** -0.5 if len(shape) == 2 else 0.25)


def save(name, weights, **arrays):
    halves = {"x": arrays.pop("x"), **{f"w.{key}": value for key, value in weights.items()}}
    for key, value in halves.items():
        FOUND[f"{name}/{key}"] = value.detach().numpy().astype(np.float16)
        assert (FOUND[f"{name}/{key}"] == value.detach().numpy()).all(), (name, key)
    for key, value in arrays.items():
        FOUND[f"{name}/{key}"] = value.detach().numpy().astype(np.float32)


def of_transformers(name, layer, config, checkpoint=dict):
    with torch.no_grad():
        for key, value in layer.named_parameters():
            value.copy_(weight(key, value.shape))
        x, cache = draw(1, LENGTH, WIDTH), DynamicCache(config=config)
        y = layer.eval()(x, cache)
    states = {"conv_state": cache.get_conv_state(0, state_idx=0), "memory": cache.get_recurrent_state(0, state_idx=0)}
    save(name, checkpoint(layer.named_parameters()), x=x, y=y, **states)
    return x


def kimi_checkpoint(parameters):
    """The names of checkpoints, in which convolutions are three."""
    found = {name.replace("forget_gate.", ""): value for name, value in parameters}
    parts = found.pop("conv1d.weight").chunk(3)
    return found | {f"{name}_conv1d.weight": part for name, part in zip("qkv", parts, strict=True)}


def kimi():
    sizes = {
        "num_heads": 3,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
    }
    config = KimiLinearConfig(hidden_size=WIDTH, num_hidden_layers=4, linear_attn_config=sizes)
    layer = KimiLinearDeltaAttention(config, 0)
    x = of_transformers("kimi_linear", layer, config, kimi_checkpoint)
    # With the bounded decay of another model that has the layer.
    config.linear_lower_bound = -5.0
    gate = Glm5NextTextForgetGate(config)
    gate.load_state_dict(
        {name: p.reshape(-1) if name == "A_log" else p for name, p in layer.forget_gate.named_parameters()}
    )
    layer.forget_gate = gate
    with torch.no_grad():
        FOUND["kimi_linear/y_of_lower_bound"] = layer(x).numpy()


def rwkv7_weights(ranks, heads):
    matrices = {f"{name}_proj.weight": (WIDTH, WIDTH) for name in "rkvo"}
    for name, rank in ranks.items():
        matrices |= {f"{name}_lora.lora.0.weight": (rank, WIDTH), f"{name}_lora.lora.2.weight": (WIDTH, rank)}
    return {
        **{name: draw(*shape, scale=shape[1] ** -0.5) for name, shape in matrices.items()},
        **{f"{name}_lora.lora.2.bias": draw(WIDTH) for name in ranks if name != "g"},
        **{f"x_{name}": exact(torch.rand(1, 1, WIDTH)) for name in "rwkvag"},
        **{name: draw(WIDTH, scale=0.25, mean=1.0) for name in ("k_k", "k_a", "g_norm.weight")},
        "r_k": draw(heads, WIDTH // heads),
        "g_norm.bias": draw(WIDTH),
    }


def rwkv7(name, value_first=None):
    heads, ranks = 2, {"w": 5, "a": 4, "g": 6} | ({} if value_first is None else {"v": 3})
    w, x = rwkv7_weights(ranks, heads), draw(LENGTH, WIDTH)

    def low_rank(name):
        return w[f"{name}_lora.lora.2.bias"], *low_rank_matrices(name)

    def low_rank_matrices(name):
        return w[f"{name}_lora.lora.0.weight"].T, w[f"{name}_lora.lora.2.weight"].T

    head_dim = WIDTH // heads
    y, last, memory, first = RWKV_x070_TMix_seq(
        0 if value_first is None else 1, heads, head_dim, x, torch.zeros(WIDTH), value_first,
        torch.zeros(heads, head_dim, head_dim), *(w[f"x_{name}"].reshape(-1) for name in "rwkvag"),
        *low_rank("w"), *low_rank("a"), *low_rank("a" if value_first is None else "v"), *low_rank_matrices("g"),
        w["k_k"], w["k_a"], w["r_k"].reshape(-1), *(w[f"{name}_proj.weight"].T for name in "rkvo"),
        w["g_norm.weight"], w["g_norm.bias"],
    )  # fmt: skip
    given = {} if value_first is None else {"value_first": value_first[None]}
    # The package's states have the value's dimension first.
    save(name, w, x=x[None], y=y[None], conv_state=last[None, :, None], memory=memory[None].mT, **given)
    return first


def main():
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=WIDTH,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        num_hidden_layers=4,
    )
    of_transformers("qwen3_next", Qwen3NextGatedDeltaNet(config, 0), config)
    kimi()
    config = Mamba2Config(
        hidden_size=WIDTH, num_heads=4, head_dim=8, state_size=8, n_groups=2, num_hidden_layers=1, chunk_size=32
    )
    of_transformers("mamba2", Mamba2Mixer(config, 0), config)
    first = rwkv7("rwkv7_first")
    rwkv7("rwkv7", first)
    x = draw(LENGTH, WIDTH)
    w = {
        "x_k": exact(torch.rand(WIDTH)),
        "key.weight": draw(24, WIDTH, scale=0.25),
        "value.weight": draw(WIDTH, 24, scale=0.25),
    }
    y = RWKV_x070_CMix_seq(x, torch.zeros(WIDTH), w["x_k"], w["key.weight"].T, w["value.weight"].T)[0]
    save("rwkv7_channel_mix", w, x=x[None], y=y[None], conv_state=x[None, -1, :, None])
    np.savez_compressed(Path(__file__).with_name("recurrent_layers.npz"), **FOUND)


if __name__ == "__main__":
    main()
