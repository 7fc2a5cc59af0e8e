"""Every code example of the reference pages, completed only by what a page leaves out."""

import dataclasses
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.ops import Invocation, Kernel, clear_invocations


@dataclass(frozen=True)
class MyConfig:
    block_size: int = 128
    num_warps: int = 4
    algorithm: str = "default"


class MyKernel(Kernel[MyConfig, jnp.ndarray]):
    def __init__(self):
        super().__init__(name="my_kernel")

    def run(self, a, b, *, cfg: MyConfig, **kwargs) -> jnp.ndarray:
        return jnp.dot(a, b)

    def heuristic_cfg(self, inv: "Invocation") -> MyConfig:
        a = inv.args[0]
        block = 128 if a.shape[0] >= 128 else 64
        return MyConfig(block_size=block)

    def config_space(self, inv: Invocation) -> list[MyConfig]:
        return [
            MyConfig(block_size=64, num_warps=2),
            MyConfig(block_size=128, num_warps=4),
            MyConfig(block_size=256, num_warps=8),
        ]


kernel = my_kernel = MyKernel()
my_config = MyConfig(block_size=32)
a = np.random.default_rng(0).standard_normal((16, 8), np.float32)
b = np.random.default_rng(1).standard_normal((8, 4), np.float32)
product = a @ b


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


# ops: Kernel


def test_basic_kernel():
    close(kernel(a, b), product)
    close(my_kernel(jnp.asarray(a), jnp.asarray(b)), product)


@dataclass(frozen=True)
class AttentionConfig:
    triton_params: Any = dataclasses.field(default=None, hash=False)
    pallas_params: Any = dataclasses.field(default=None, hash=False)


def xla_attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def triton_flash_attention(q, k, v, **params):
    raise NotImplementedError("not on a CPU")


pallas_attention = triton_flash_attention


class AttentionKernel(Kernel[AttentionConfig, jnp.ndarray]):
    def run_triton(self, q, k, v, *, cfg, **kwargs):
        """Triton GPU implementation."""
        return triton_flash_attention(q, k, v, **cfg.triton_params)

    def run_pallas(self, q, k, v, *, cfg, **kwargs):
        """Pallas TPU implementation."""
        return pallas_attention(q, k, v, **cfg.pallas_params)

    def run_xla(self, q, k, v, *, cfg, **kwargs):
        """XLA fallback implementation."""
        return xla_attention(q, k, v)

    def run(self, q, k, v, *, cfg, **kwargs):
        """Default fallback."""
        return self.run_xla(q, k, v, cfg=cfg, **kwargs)

    def heuristic_cfg(self, inv):
        return AttentionConfig()


def test_platform_specific_implementations():
    q, k, v = np.random.default_rng(2).standard_normal((3, 8, 4), np.float32)
    close(AttentionKernel()(q, k, v), xla_attention(jnp.asarray(q), k, v))


def custom_forward(a, b, cfg):
    return a @ b


def custom_grad_a(a, b, ct, cfg):
    return ct @ b.T


def custom_grad_b(a, b, ct, cfg):
    return a.T @ ct


class MyDifferentiableKernel(Kernel[MyConfig, jnp.ndarray]):
    def run(self, a, b, *, cfg, **kwargs):
        return custom_forward(a, b, cfg)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        """Custom backward pass."""
        a, b = primals
        ct = cotangents[0]
        grad_a = custom_grad_a(a, b, ct, cfg)
        grad_b = custom_grad_b(a, b, ct, cfg)
        return (grad_a, grad_b)

    def heuristic_cfg(self, inv):
        return MyConfig()


def test_custom_gradients():
    loss = lambda k: lambda a, b: (k(a, b) ** 2).sum()
    got = jax.grad(loss(MyDifferentiableKernel()), (0, 1))(a, b)
    want = jax.grad(loss(jnp.dot), (0, 1))(jnp.asarray(a), jnp.asarray(b))
    jax.tree.map(close, got, want)


# ops: Invocation and Executor


def test_invocation():
    from tilewright.ops import Invocation

    inv = Invocation(
        kernel=my_kernel,
        args=(a, b),
        kwargs={"scale": 1.0},
        metadata={"shapes": [a.shape, b.shape], "dtypes": [a.dtype, b.dtype], "device": jax.devices()[0]},
    )
    assert [x.shape for x in inv.abstract_args] == [a.shape, b.shape]
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in inv.abstract_args)
    assert inv.abstract_kwargs == {"scale": 1.0}
    assert isinstance(inv.device_fingerprint, str)
    assert isinstance(inv.key, str)
    assert inv.metadata["shapes"] == [a.shape, b.shape]


def test_executor():
    from tilewright.ops import ConfigCache, ConfigSelectorChain, Executor

    # Create the execution stack
    cache = ConfigCache()
    selector = ConfigSelectorChain(cache=cache)
    executor = Executor(selector)

    # Run a kernel
    result = executor(my_kernel, a, b)
    close(result, product)

    # Run with explicit config
    result = executor(my_kernel, a, b, cfg=my_config)
    close(result, product)


# ops: caches


def test_config_cache():
    from tilewright.ops import ConfigCache

    key, config = "key", MyConfig()
    cache = ConfigCache()
    assert cache.get(key) is None
    cache.put(key, config)
    config = cache.get(key)
    assert config == MyConfig()
    assert key in cache


def test_persistent_cache(tmp_path, monkeypatch):
    from tilewright.ops import PersistentCache

    monkeypatch.setenv("HOME", str(tmp_path))
    key, config = "key", MyConfig()
    persistent = PersistentCache(path="~/.cache/tilewright/configs")
    persistent.put(key, config)
    config = persistent.get(key)
    assert config == MyConfig()
    assert persistent.path == tmp_path / ".cache/tilewright/configs"


def test_config_selector_chain():
    from tilewright.ops import ConfigCache, ConfigSelectorChain, Executor, PersistentCache

    selector = ConfigSelectorChain(
        cache=ConfigCache(),  # Level 1: In-memory
        persistent=PersistentCache(),  # Level 2: Disk
        autotune=True,  # Level 3: Benchmark if not found
    )
    close(Executor(selector)(kernel, a, b), product)


def test_temporary_overrides():
    from tilewright.ops import ConfigCache, ConfigSelectorChain, Executor, overlay_cache, policy_override

    executor, args, kwargs = Executor(ConfigSelectorChain(autotune=True)), (a, b), {}
    my_custom_cache = ConfigCache()

    # Temporarily use different cache
    with overlay_cache(my_custom_cache):
        result = executor(kernel, *args)
    close(result, product)

    # Temporarily change autotuning policy
    with policy_override(autotune=False):
        result = executor(kernel, *args, **kwargs)  # No autotuning
    close(result, product)


# ops: tuning


def test_manual_autotuning():
    from tilewright.ops import autotune, benchmark

    inv = Invocation(kernel, (a, b))
    # Autotune a specific kernel call
    best_config = autotune(kernel, a, b, configs=kernel.config_space(inv), num_warmup=3, num_iters=10)
    assert best_config in [*kernel.config_space(inv), kernel.heuristic_cfg(inv)]

    # Simple function benchmarking
    time_ms = benchmark(lambda: kernel(a, b), num_iters=100)
    assert isinstance(time_ms, float)
    assert time_ms > 0


def test_batch_autotuning():
    from tilewright.ops import autotune_recorded, get_invocations, record_invocation

    inv = Invocation(kernel=kernel, args=(a, b), kwargs={})
    try:
        # Enable recording
        record_invocation(kernel, inv)

        # ... run your model with various inputs ...
        jax.jit(lambda a, b: kernel(a, b))(a[:4], b)

        # Get all recorded invocations
        invocations = get_invocations()
        assert sorted(inv.args[0].shape[0] for inv in invocations) == [4, 16]

        # Autotune all at once
        results = autotune_recorded(invocations)
        assert {entry.key for entry in results} == {inv.key for inv in invocations}
    finally:
        clear_invocations()


# ops: batch


def test_vmap_with_config():
    from tilewright.ops import vmap_with_config

    batched_a, batched_b = np.stack([a, 2 * a]), np.stack([b, b])
    batched_result = vmap_with_config(
        kernel,
        in_axes=(0, 0),  # Batch over first axis
    )(batched_a, batched_b)
    close(batched_result, np.stack([product, 2 * product]))


def test_pmap_with_config():
    from tilewright.ops import pmap_with_config

    sharded_a, sharded_b = np.stack([i * a for i in range(8)]), np.stack([b] * 8)
    # Run kernel across multiple devices
    parallel_result = pmap_with_config(kernel, axis_name="devices")(sharded_a, sharded_b)
    close(parallel_result, sharded_a @ b)
    assert len(parallel_result.sharding.device_set) == 8


# ops: parameters and utilities


def test_params():
    from tilewright.ops import BwdParams, FwdParams

    fwd = FwdParams(
        q_blocksize=128,  # Query block size
        kv_blocksize=256,  # Key-value block size
        num_warps=4,  # GPU warps
        num_stages=2,  # Pipeline stages
    )
    bwd = BwdParams(
        q_blocksize=64,
        kv_blocksize=128,
    )
    assert (fwd.kv_blocksize, fwd.blocksize_m, bwd.q_blocksize, bwd.num_warps) == (256, None, 64, None)


def test_device_detection():
    from tilewright.ops import device_fingerprint, device_kind, get_device_platform

    assert device_kind() == "cpu"
    assert get_device_platform() == "xla"
    fingerprint = device_fingerprint()
    assert fingerprint.startswith("cpu:")


def test_sharding_utilities():
    from tilewright.ops import default_key_builder_with_sharding, sharding_fingerprint

    array, args, kwargs = jnp.asarray(a), (a, b), {}
    fingerprint = sharding_fingerprint(array)
    assert fingerprint == ""
    key = default_key_builder_with_sharding(kernel, args, kwargs)
    assert key == Invocation(kernel, args, kwargs).key


def test_serialization():
    from tilewright.ops import from_json, stable_json, to_json

    config = MyConfig(block_size=64)
    # Serialize config to JSON
    json_str = to_json(config)
    # Deserialize
    config = from_json(json_str, MyConfig)
    assert config == MyConfig(block_size=64)
    # Stable JSON (deterministic ordering for cache keys)
    stable_str = stable_json(config)
    assert stable_str == '{"algorithm":"default","block_size":64,"num_warps":4}'


def test_hlo_analysis():
    from tilewright.ops import extract_labels_from_hlo_text, find_labels_in_lowered, labels_to_configs

    fn, args = (lambda a: kernel(a, b)), a
    # Find labeled operations in lowered JAX code
    lowered = jax.jit(fn).lower(args)
    labels = find_labels_in_lowered(lowered)
    assert len(labels) == 1

    # Extract from HLO text
    for hlo_text in (lowered.as_text(), lowered.as_text(debug_info=True), lowered.compile().as_text()):
        assert extract_labels_from_hlo_text(hlo_text) == labels

    # Convert labels to configs
    configs = labels_to_configs(labels)
    assert list(configs) == labels
    assert isinstance(configs[labels[0]], MyConfig)


def test_labeling_operations():
    from tilewright.ops import find_labels_in_lowered, label

    attention_impl = xla_attention

    # Add label for HLO analysis
    @label("my_attention")
    def my_attention(q, k, v):
        return attention_impl(q, k, v)

    q, k, v = np.random.default_rng(2).standard_normal((3, 8, 4), np.float32)
    close(my_attention(q, k, v), attention_impl(q, k, v))
    lowered = jax.jit(my_attention).lower(q, k, v)
    assert find_labels_in_lowered(lowered) == ["my_attention"]
    assert find_labels_in_lowered(lowered.compile()) == ["my_attention"]


# ops: best practices


def test_use_the_module_api():
    # Recommended for most users
    from tilewright.modules import flash_attention

    q, k, v = np.random.default_rng(3).standard_normal((3, 2, 16, 4, 8), np.float32)
    output = flash_attention(q, k, v, causal=True)
    close(output, jax.nn.dot_product_attention(q, k, v, is_causal=True))


def test_good_heuristics():
    class Heuristic(AttentionKernel):
        def heuristic_cfg(self, inv):
            # Consider input shapes
            q = inv.args[0]
            _batch, seq_len, _heads, _dim = q.shape

            # Larger sequences benefit from larger blocks
            if seq_len >= 2048:
                block = 256
            elif seq_len >= 512:
                block = 128
            else:
                block = 64
            return MyConfig(block_size=block)

    from tilewright.ops import default_executor

    shapes = [(1, length, 2, 8) for length in (256, 1024, 4096)]
    chosen = [default_executor().choose_config(Heuristic(), *[np.zeros(s, np.float32)] * 3) for s in shapes]
    assert [cfg.block_size for cfg in chosen] == [64, 128, 256]


def test_profile_before_optimizing(tmp_path):
    from tilewright.ops import ConfigSelectorChain, Executor

    executor, args = Executor(ConfigSelectorChain()), (a, b)
    with jax.profiler.trace(str(tmp_path / "jax-trace")):
        result = executor(kernel, *args)
    close(result, product)


def test_type_variables():
    from tilewright.ops import Cfg, Out

    assert Kernel.__parameters__ == (Cfg, Out)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("tilewright.ops", "Kernel Executor"),
        ("tilewright.ops.core.kernel", "Kernel Invocation"),
        ("tilewright.ops.core.types", "Cfg Out"),
        ("tilewright.ops.config.cache", "ConfigCache overlay_cache"),
        ("tilewright.ops.config.persistent", "PersistentCache"),
        ("tilewright.ops.config.selection", "ConfigSelectorChain AutotunePolicy"),
        ("tilewright.ops.execution.executor", "Executor ConfigChooser"),
        ("tilewright.ops.execution.batch", "vmap_with_config pmap_with_config"),
        ("tilewright.ops.execution.tuning", "Autotuner benchmark autotune autotune_recorded Tuner"),
        ("tilewright.ops.registry", "record_invocation get_invocations"),
        ("tilewright.ops.utils", "datacarrier"),
        ("tilewright.ops.utils.datacarrier", "FwdParams BwdParams"),
        ("tilewright.kernels._registry", "Platform Backend"),
        ("tilewright.modules", "FlashAttention flash_attention"),
        ("tilewright.modules.base", "KernelConfig create_default_executor detect_platform"),
    ],
)
def test_module_structure(module, names):
    """Every module path that the pages name, with what they say of it."""
    loaded = importlib.import_module(module)
    assert [name for name in names.split() if getattr(loaded, name, None) is None] == []


# modules.base


def test_kernel_config():
    from tilewright.modules.base import KernelConfig

    documented = {
        "block_q": 128,
        "block_k": 128,
        "block_d": 64,
        "num_warps": 4,
        "num_stages": 2,
        "platform": "auto",
        "backend": "any",
        "algorithm": None,
        "priority": 0,
    }
    assert dataclasses.asdict(KernelConfig()) == documented
    assert list(inspect.signature(KernelConfig).parameters) == list(documented)
    assert KernelConfig(platform="xla", backend="cpu").platform == "xla"


def test_create_default_executor(tmp_path):
    from tilewright.modules.base import create_default_executor

    with pytest.warns(DeprecationWarning, match="Executor"):
        executor = create_default_executor(str(tmp_path / "kernel_cache"))
    close(executor(kernel, a, b), product)
    with pytest.warns(DeprecationWarning, match="create_default_executor"):
        executor = create_default_executor(None, enable_autotuning=False, warmup_iterations=1, timing_iterations=1)
    close(executor(kernel, a, b), product)


def test_executor_in_place_of_create_default_executor(tmp_path):
    from tilewright.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, PersistentCache, Tuner

    executor = Executor(
        ConfigSelectorChain(
            cache=ConfigCache(),
            policy=AutotunePolicy(allow_autotune=True),
            tuner=Tuner(warmup=2, iters=5),
            persistent=PersistentCache(str(tmp_path / "kernel_cache")),
        )
    )

    from tilewright.modules import FlashAttention

    q, k, v = np.random.default_rng(4).standard_normal((3, 1, 16, 2, 8), np.float32)
    attn = FlashAttention()
    output = executor(attn, q, k, v, causal=True)
    close(output, jax.nn.dot_product_attention(q, k, v, is_causal=True))
    assert len(list((tmp_path / "kernel_cache").iterdir())) == 1


def test_detect_platform():
    from tilewright.modules.base import detect_platform

    platform = detect_platform("flash_attention", platform="auto")
    assert platform == "xla"
    assert detect_platform("flash_attention", platform=None, maybe_pallas=True) == "xla"
    with pytest.raises(ValueError, match=r"ring_of_none"):
        print(f"Selected: {detect_platform('ring_of_none')}")


def test_tree_of_documentation_is_importable():
    import tilewright.ops.config.persistent
    import tilewright.ops.tuning.tuning
    import tilewright.ops.utils.datacarrier

    assert tilewright.ops.utils.datacarrier.FwdParams is tilewright.ops.FwdParams
