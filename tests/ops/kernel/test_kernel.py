"""Which hook of a kernel runs, and where its gradients come from."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.kernel.samples import FORMS, Config, Pair, Product, Recomputing, operands, watching
from tilewright.ops import ConfigSelectorChain, Executor, Invocation, Kernel
from tilewright.ops.kernel.optional import gradient_form, platform_hook
from tilewright.ops.types import Device

CPU, GPU, TPU = (Device(kind, kind, fingerprint=kind) for kind in ("cpu", "gpu", "tpu"))


class Plain(Kernel):
    def run(self, x, *, cfg, **kwargs):
        return 2.0 * x

    def heuristic_cfg(self, inv):
        return Config()


def close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, want)


class TestHooks:
    def hooks(self, *names):
        return type("Hooks", (Plain,), {f"run_{name}": lambda self, *args, **kwargs: None for name in names})()

    @pytest.mark.parametrize(
        ("device", "defined", "runs"),
        [
            (CPU, "xla pallas triton cuda", "run_xla"),
            (CPU, "pallas triton cuda", "run"),
            (GPU, "xla pallas triton cuda", "run_triton"),
            (GPU, "xla pallas cuda", "run_cuda"),
            (GPU, "xla pallas", "run_pallas"),
            (GPU, "xla", "run_xla"),
            (TPU, "xla pallas triton", "run_pallas"),
            (TPU, "xla triton", "run_xla"),
            (TPU, "", "run"),
        ],
    )
    def test_the_devices_most_specific_wins(self, device, defined, runs):
        kernel = self.hooks(*defined.split())
        for cfg in (Config(), Config(platform=None), object()):
            assert platform_hook(kernel, cfg, device) == getattr(kernel, runs)

    @pytest.mark.parametrize("platform", ["xla", "pallas", "triton", "cuda"])
    def test_a_configs_platform_comes_before_the_devices(self, platform):
        kernel = self.hooks("xla", "pallas", "triton", "cuda")
        for device in (CPU, GPU, TPU):
            assert platform_hook(kernel, Config(platform=platform), device) == getattr(kernel, f"run_{platform}")
        assert platform_hook(Plain(), Config(platform=platform), CPU).__name__ == "run"

    def test_the_hook_runs(self):
        class Hooked(Plain):
            def run_xla(self, x, *, cfg):
                return 3.0 * x

            def run_triton(self, x, *, cfg):
                return 5.0 * x

        (x,) = operands((4,))
        close(Hooked()(x), 3 * x)
        close(Hooked()(x, cfg=Config(platform="triton")), 5 * x)

    def test_prepare_owns_the_argument_list(self):
        class Prepared(Plain):
            def prepare(self, x, factor=1.0, *, shift=0.0):
                if x.ndim != 2:
                    raise ValueError(f"{x.shape=} must have two axes")
                return (x.astype(jnp.float32),), {"factor": factor, "shift": jnp.asarray(shift, jnp.float32)}

            def run(self, x, *, cfg, factor, shift):
                return factor * x + shift

        x = np.ones((2, 3), np.float16)
        close(Prepared()(x, 3.0, shift=1.0), np.full((2, 3), 4.0))
        with pytest.raises(ValueError, match=r"x.shape=\(2,\) must have two axes"):
            Prepared()(np.ones(2))
        with pytest.raises(TypeError, match="unexpected keyword"):
            Prepared()(x, other=1)


class TestName:
    def test_defaults_to_the_qualified_name(self):
        assert Plain().name == f"{Plain.__module__}.Plain"
        assert Plain().version == "0"
        assert repr(Plain("other", version="2")) == "Plain(name='other', version='2')"


@pytest.mark.parametrize("form", FORMS)
class TestGradients:
    def test_of_the_second_order(self, form):
        kernel, (a, b) = form(), operands((3, 2), (2, 3))
        loss = lambda f: lambda a: (f(a, b) ** 3).sum()
        directional = lambda f: jax.grad(lambda a: (jax.grad(loss(f))(a) * a).sum())
        close(directional(kernel)(a), directional(jnp.matmul)(a))
        close(jax.jit(directional(kernel))(a), directional(jnp.matmul)(a))

    def test_explicit_config_reaches_both_directions(self, form):
        kernel, (a, b) = form(), operands((6, 5), (5, 4))
        with watching() as seen:
            jax.grad(lambda a: kernel(a, b, cfg=Config(7)).sum())(a)
        assert {each.cfg for each in seen} == {Config(7)}
        assert {each.stage for each in seen} == {
            Product: {"run"},
            Recomputing: {"run", "backward"},
            Pair: {"run", "forward", "backward"},
        }[form]

    def test_nothing_is_compiled_twice(self, form):
        kernel, (a, b) = form(), operands((6, 5), (5, 4))
        gradient = jax.grad(lambda a: kernel(a, b).sum())
        gradient(a)
        compiled = []

        def listen(event, duration, **kwargs):
            if "backend_compile" in event:
                compiled.append(event)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            gradient(a)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        assert compiled == []

    def test_works_without_jit(self, form):
        kernel, (a, b) = form(), operands((6, 5), (5, 4))
        with jax.disable_jit():
            close(kernel(a, b), a @ b)
            close(jax.grad(lambda a: kernel(a, b).sum())(a), jnp.ones((6, 4)) @ b.T)


def test_no_form_allows_forward_mode():
    kernel, (a, b) = Product(), operands((3, 2), (2, 3))
    close(jax.jacfwd(kernel)(a, b), jax.jacfwd(jnp.matmul)(a, b))
    close(jax.jvp(kernel, (a, b), (b.T, b))[1], jax.jvp(jnp.matmul, (a, b), (b.T, b))[1])
    close(jax.hessian(lambda a: (kernel(a, b) ** 3).sum())(a), jax.hessian(lambda a: ((a @ b) ** 3).sum())(a))


class Weighted(Plain):
    """Two arrays, an integer one, and a weight by keyword, with gradients as a dict."""

    gradients = staticmethod(lambda x, y, weight, c: {"x": c * weight, "y": c, "weight": (c * x).sum()})

    def run(self, x, y, index, *, cfg, weight=None, scale=1.0):
        return x * weight + y + index

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        x, y, _ = primals
        return self.gradients(x, y, kwargs["weight"], cotangents[0])


def returning(gradients):
    return type("Returning", (Weighted,), {"gradients": staticmethod(gradients)})()


class TestWhatComesBack:
    x, y = operands((4,), (4,), seed=3)
    index = jnp.arange(4)
    weight = jnp.float32(2.5)

    def test_a_dict_may_name_keyword_arrays(self):
        loss = lambda f: lambda x, y, w: (f(x, y, self.index, weight=w) ** 2).sum()
        plain = lambda x, y, index, weight: x * weight + y + index
        got = jax.grad(loss(Weighted()), (0, 1, 2))(self.x, self.y, self.weight)
        close(got, jax.grad(loss(plain), (0, 1, 2))(self.x, self.y, self.weight))

    @pytest.mark.parametrize("missing", ["x", "y", "weight"])
    @pytest.mark.parametrize("gap", ["absent", "none"])
    def test_a_missing_gradient_is_an_error_that_names_it(self, missing, gap):
        def gradients(x, y, weight, c):
            complete = {"x": c * weight, "y": c, "weight": (c * x).sum()}
            return complete | {missing: None} if gap == "none" else {k: v for k, v in complete.items() if k != missing}

        kernel = returning(gradients)
        loss = lambda x, y, weight: kernel(x, y, self.index, weight=weight).sum()
        arguments = (self.x, self.y, self.weight)
        for i, name in enumerate(["x", "y", "weight"]):
            for transform in (lambda f: f, jax.jit):
                if name == missing:
                    with pytest.raises(TypeError, match=rf"no gradient for its argument '{name}'.*stop_gradient"):
                        transform(jax.grad(loss, i))(*arguments)
                else:
                    transform(jax.grad(loss, i))(*arguments)
        constant = jax.grad(lambda x, y, weight: loss(x, y, weight), 1 - (missing == "y"))
        assert constant(*arguments).shape == (4,)

    def test_none_in_a_tuple_is_no_gradient(self):
        kernel = returning(lambda x, y, weight, c: (c * weight, None, None))
        close(jax.grad(lambda x: kernel(x, self.y, self.index, weight=self.weight).sum())(self.x), jnp.full(4, 2.5))
        with pytest.raises(TypeError, match="'y'"):
            jax.grad(lambda y: kernel(self.x, y, self.index, weight=self.weight).sum())(self.y)
        with pytest.raises(TypeError, match="'weight'"):
            jax.grad(lambda w: kernel(self.x, self.y, self.index, weight=w).sum())(self.weight)

    @pytest.mark.parametrize(
        ("gradients", "message"),
        [
            (lambda x, y, w, c: (c, c), r"one gradient for each of its 3 positional arguments \('x', 'y', 'index'\)"),
            (lambda x, y, w, c: c, "got "),
            (lambda x, y, w, c: None, "got NoneType"),
            (lambda x, y, w, c: (c[:2], c, None), r"gradient.shape=\(2,\) for 'x' with array.shape=\(4,\)"),
            (lambda x, y, w, c: {"x": c, "z": c}, r"\['z'\], which are no arguments"),
        ],
    )
    def test_anything_else_is_an_error(self, gradients, message):
        kernel = returning(gradients)
        with pytest.raises(TypeError, match=message):
            jax.grad(lambda x: kernel(x, self.y, self.index, weight=self.weight).sum())(self.x)

    def test_a_gradient_takes_its_arguments_dtype(self):
        kernel = returning(lambda x, y, w, c: {"x": c.astype(jnp.float32), "y": c.astype(jnp.float16)})
        x = self.x.astype(jnp.bfloat16)
        weight = jnp.bfloat16(2)
        assert jax.grad(lambda x: kernel(x, x, self.index, weight=weight).sum().astype(jnp.float32))(x).dtype == x.dtype

    def test_an_integer_argument_has_none(self):
        kernel = Weighted()
        got = jax.grad(lambda i: kernel(self.x, self.y, i, weight=self.weight).sum(), allow_int=True)(self.index)
        assert got.dtype == jax.dtypes.float0
        both = jax.vjp(lambda x, i: kernel(x, self.y, i, weight=self.weight), self.x, self.index)[1](self.x)
        assert both[1].dtype == jax.dtypes.float0


class TestPytrees:
    class Tree(Plain):
        def run(self, params, x, *, cfg, extra=None):
            return params["w"] * x + params["b"][0] + (0.0 if extra is None else extra["e"])

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            params, x = primals
            (c,) = cotangents
            found = {"params": {"w": c * x, "b": (c, None)}, "x": c * params["w"]}
            return found if kwargs.get("extra") is None else found | {"extra": {"e": c}}

    def test_arguments(self):
        w, b, x, e = operands((3,), (3,), (3,), (3,))
        plain = lambda params, x, extra: params["w"] * x + params["b"][0] + extra["e"]
        loss = lambda f: lambda *args: (f(*args) ** 2).sum()
        kernel = self.Tree()
        ours = lambda params, x, extra: kernel({**params, "b": (params["b"][0], 7)}, x, extra=extra)
        arguments = ({"w": w, "b": (b,)}, x, {"e": e})
        got = jax.grad(loss(ours), (0, 1, 2))(*arguments)
        close(got, jax.grad(loss(plain), (0, 1, 2))(*arguments))

    def test_a_gradient_of_another_structure_is_an_error(self):
        class Wrong(self.Tree):
            def custom_vjp(self, primals, cfg, kwargs, cotangents):
                return {"params": (cotangents[0],) * 3}

        w, x = operands((3,), (3,))
        with pytest.raises(TypeError, match="'params'"):
            jax.grad(lambda w: Wrong()({"w": w, "b": (x, x)}, x).sum())(w)


class Several(Plain):
    """Outputs: a float array, an integer one, and a dict."""

    calls: ClassVar[list] = []

    def run(self, x, *, cfg):
        return x * x, jnp.argmax(x), {"sum": x.sum()}

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        assert len(cotangents) == 3
        Several.calls.append([None if c is None else jax.tree.map(jnp.shape, c) for c in cotangents])
        (x,), (square, index, total) = primals, cotangents
        assert index is None
        return (2 * x * square + total["sum"],)


class TestOutputs:
    (x,) = operands((5,))

    def test_each_has_a_cotangent(self):
        def loss(f):
            def of(x):
                square, index, total = f(x)
                return (jnp.sin(square) * index).sum() + 3 * total["sum"]

            return of

        plain = lambda x: (x * x, jnp.argmax(x), {"sum": x.sum()})
        close(Several()(self.x), plain(self.x))
        for transform in (lambda f: f, jax.jit):
            close(transform(jax.grad(loss(Several())))(self.x), jax.grad(loss(plain))(self.x))

    def test_an_unused_output_has_zeros(self):
        Several.calls.clear()
        close(jax.grad(lambda x: Several()(x)[2]["sum"])(self.x), jnp.ones(5))
        close(jax.grad(lambda x: Several()(x)[0].sum())(self.x), 2 * self.x)
        assert all(call[0] == (5,) and call[2] == {"sum": ()} for call in Several.calls)

    def test_a_dict_is_one_output(self):
        class One(Plain):
            def run(self, x, *, cfg):
                return {"y": 2 * x, "n": x > 0}

            def custom_vjp(self, primals, cfg, kwargs, cotangents):
                (c,) = cotangents
                assert c["n"] is None
                return (2 * c["y"],)

        close(jax.grad(lambda x: One()(x)["y"].sum())(self.x), jnp.full(5, 2.0))

    def test_none_and_empty_outputs_keep_their_places(self):
        class Gaps(Plain):
            def run(self, x, *, cfg):
                return x, None, ()

        y, none, empty = Gaps()(self.x)
        close(y, self.x)
        assert (none, empty) == (None, ())


class TestForms:
    def test_half_a_pair_is_an_error(self):
        class Half(Plain):
            def forward_with_residuals(self, x, *, cfg):
                return x, x

        class OtherHalf(Plain):
            def backward(self, residuals, cotangents, x, *, cfg):
                return cotangents

        for kernel in (Half(), OtherHalf()):
            with pytest.raises(TypeError, match="both forward_with_residuals and backward"):
                kernel(jnp.ones(3))

    def test_the_pair_comes_before_custom_vjp(self):
        both = type("Both", (Pair, Recomputing), {"__init__": lambda self: Product.__init__(self, "tests.both")})()
        assert gradient_form(both) == "residuals"
        assert [gradient_form(form()) for form in FORMS] == [None, "recomputing", "residuals"]

    def test_residuals_may_be_anything(self):
        class Odd(Plain):
            def forward_with_residuals(self, x, *, cfg):
                return 2 * x, (None, {"count": jnp.int32(3), "key": jax.random.key(0), "static": None}, [x])

            def backward(self, residuals, cotangents, x, *, cfg):
                none, found, (kept,) = residuals
                assert none is None
                assert jax.dtypes.issubdtype(found["key"].dtype, jax.dtypes.prng_key)
                return (2 * cotangents[0] + 0 * kept * found["count"],)

        x = jnp.arange(3.0)
        close(jax.grad(lambda x: Odd()(x).sum())(x), jnp.full(3, 2.0))
        close(jax.jit(jax.vmap(jax.grad(lambda x: Odd()(x).sum())))(jnp.ones((4, 3))), jnp.full((4, 3), 2.0))

    def test_shapes_must_not_depend_on_the_config(self):
        class Shifty(Plain):
            def run(self, x, *, cfg):
                return x[: cfg.block]

            def forward_with_residuals(self, x, *, cfg):
                return 2 * x, x[: cfg.block]

            def backward(self, residuals, cotangents, x, *, cfg):
                return (2 * cotangents[0],)

            def heuristic_cfg(self, inv):
                return Config(2)

        from tilewright.ops import ConfigCache, overlay_cache

        kernel, x = Shifty(), jnp.ones(8)
        cache = ConfigCache()
        cache.put(Invocation(kernel, (x,)).key, Config(4))
        with overlay_cache(cache), pytest.raises(TypeError, match="depend on its config"):
            kernel(x)

    def test_a_recomputing_kernel_may_have_arguments_of_any_name(self):
        class Named(Plain):
            def run(self, x, *, cfg, residuals, wanted):
                return residuals * x + wanted

            def custom_vjp(self, primals, cfg, kwargs, cotangents):
                return (kwargs["residuals"] * cotangents[0],)

        close(jax.grad(lambda x: Named()(x, residuals=3.0, wanted=1.0))(2.0), 3.0)


class TestCalling:
    @pytest.mark.parametrize("wrong", [{}, [1], {1}])
    def test_an_unhashable_config_is_an_error(self, wrong):
        def call(x):
            return Pair()(x, x, cfg=wrong)

        for transform in (lambda f: f, jax.jit, lambda f: jax.grad(lambda x: f(x).sum())):
            with pytest.raises(TypeError, match=r"cfg=.* must be hashable, such as a frozen dataclass"):
                transform(call)(*operands((2, 2)))

    def test_what_is_no_kernel_is_an_error(self):
        executor = Executor(ConfigSelectorChain())
        for wrong in ("flash", Plain, lambda x: x, None):
            for call in (executor, executor.choose_config, executor.compile, executor.explain):
                with pytest.raises(TypeError, match="kernel="):
                    call(wrong, jnp.ones(3))
        with pytest.raises(TypeError, match="ConfigChooser"):
            Executor(None)
