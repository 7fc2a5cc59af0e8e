"""Overlays and policy overrides: where they hold, and that JAX's trace caches know of them."""

import asyncio
import contextvars
import threading

import jax
import pytest

from tests.ops.kernel.samples import A, B, Config, Product, watching
from tests.support.threads import together
from tilewright.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Tuner,
    overlay_cache,
    policy_override,
)
from tilewright.ops.config.context import current_overrides


def overlay(kernel, cfg, **kwargs):
    cache = ConfigCache()
    cache.put(Invocation(kernel, (A, B), **kwargs).key, cfg)
    return cache


@pytest.fixture
def kernel():
    return Product("tests.context")


@pytest.fixture
def executor():
    return Executor(ConfigSelectorChain(tuner=Tuner(0, 1)))


class TestOverlays:
    def test_nest_and_end(self, kernel, executor):
        chosen = lambda: executor.choose_config(kernel, A, B).block
        outer, inner = overlay(kernel, Config(1)), overlay(kernel, Config(2))
        assert chosen() == 64
        with overlay_cache(outer) as entered:
            assert entered is outer
            assert chosen() == 1
            with overlay_cache(inner):
                assert chosen() == 2
                with overlay_cache(ConfigCache()):
                    assert chosen() == 2
            assert chosen() == 1
            with pytest.raises(RuntimeError), overlay_cache(inner):
                raise RuntimeError
            assert chosen() == 1
        assert chosen() == 64

    def test_run_what_they_say(self, kernel, executor):
        def ran(call):
            with watching() as seen:
                call(A)
            return [each.cfg.block for each in seen][-1:]

        eager = lambda a: executor(kernel, a, B)
        jitted = jax.jit(eager)
        cache = overlay(kernel, Config(5))
        for call in (eager, jitted):
            assert ran(call) == [64]
            with overlay_cache(cache):
                assert ran(call) == [5]
                assert ran(call) == []
            # What was traced outside is still there.
            assert ran(call) == []

    def test_a_changed_overlay_is_seen(self, kernel, executor):
        function = jax.jit(lambda a: executor(kernel, a, B))
        for call in (lambda a: executor(kernel, a, B), function):
            cache = overlay(kernel, Config(5))
            with overlay_cache(cache):
                call(A)
                cache.put(Invocation(kernel, (A, B)).key, Config(6))
                executor.choose_config(kernel, A, B)
                with watching() as seen:
                    call(A)
                if call is not function:
                    assert [each.cfg for each in seen][-1:] == [Config(6)]

    def test_need_no_selector(self, kernel):
        with overlay_cache(overlay(kernel, Config(5))), watching() as seen:
            kernel(A, B)
        assert seen[-1].cfg == Config(5)

    @pytest.mark.parametrize("wrong", [None, {}, "cache"])
    def test_wrong_input(self, wrong):
        with pytest.raises(TypeError, match=f"got {wrong!r}"), overlay_cache(wrong):
            pass


class TestPolicies:
    def test_nest_and_end(self):
        chain = ConfigSelectorChain()
        allowed = lambda: chain.effective_policy().allow_autotune
        assert not allowed()
        with policy_override(autotune=True):
            assert allowed()
            with policy_override(autotune=False, budget_s=3.0):
                assert not allowed()
                assert chain.effective_policy().budget_s == 3.0
                with policy_override(allow_autotune=True):
                    assert chain.effective_policy() == AutotunePolicy(budget_s=3.0)
            assert allowed()
            assert chain.effective_policy().budget_s is None
        assert not allowed()

    def test_retrace_jitted_functions(self, kernel, executor):
        steps = []
        executor.chooser.on_event = lambda event: steps.append(getattr(event, "step", None))
        function = jax.jit(lambda a: executor(kernel, a, B))
        function(A)
        assert steps == ["heuristic"]
        with policy_override(autotune=True):
            function(A)
        assert steps[-1] == "autotune"
        count = len(steps)
        function(A)
        with policy_override(autotune=True):
            function(A)
        assert len(steps) == count

    def test_unknown_fields_are_an_error(self):
        with pytest.raises(TypeError, match=r"\['tune'\]; it takes .*'allow_autotune'"), policy_override(tune=True):
            pass


class TestWhereTheyHold:
    def test_not_in_other_threads(self, kernel, executor):
        found = []
        with overlay_cache(overlay(kernel, Config(5))):
            thread = threading.Thread(target=lambda: found.append(executor.choose_config(kernel, A, B)))
            thread.start()
            thread.join()
            context = contextvars.copy_context()
            thread = threading.Thread(
                target=context.run, args=(lambda: found.append(executor.choose_config(kernel, A, B)),)
            )
            thread.start()
            thread.join()
        assert found == [Config(64), Config(5)]

    def test_threads_do_not_share_traces(self, kernel, executor):
        function = jax.jit(lambda a: executor(kernel, a, B))
        ran = {}

        def work(i):
            with overlay_cache(overlay(kernel, Config(i))):
                for _ in range(20):
                    function(A)
                ran[i] = executor.choose_config(kernel, A, B)

        with watching() as seen:
            together(work, range(1, 5))
        assert ran == {i: Config(i) for i in range(1, 5)}
        assert {s.cfg.block for s in seen} >= {1, 2, 3, 4}

    def test_async_tasks_have_their_own(self, kernel, executor):
        function = jax.jit(lambda a: executor(kernel, a, B))

        async def task(block):
            found = []
            with overlay_cache(overlay(kernel, Config(block))):
                for _ in range(3):
                    await asyncio.sleep(0)
                    found.append(executor.choose_config(kernel, A, B).block)
                    with watching() as seen:
                        executor(kernel, A, B)
                    found += [each.cfg.block for each in seen][-1:]
                    await asyncio.sleep(0)
                    function(A)
            await asyncio.sleep(0)
            found.append(executor.choose_config(kernel, A, B).block)
            return found

        async def main():
            return await asyncio.gather(*(task(block) for block in (1, 2, 3)))

        for block, found in zip((1, 2, 3), asyncio.run(main()), strict=True):
            assert set(found[:-1]) == {block}
            assert found[-1] == 64
        assert current_overrides().overlays == ()


class TestTraceCache:
    def test_other_functions_are_not_retraced_without_cause(self, kernel, executor):
        traced = []

        @jax.jit
        def function(x):
            traced.append(x)
            return x + 1

        function(A)
        executor(kernel, A, B)
        with policy_override():
            function(A)
        executor(kernel, A, B)
        function(A)
        assert len(traced) == 1
