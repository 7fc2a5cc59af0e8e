"""Attention over a cache in Triton, on NVIDIA GPUs: split over keys where queries are too few to fill the card."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import max_shared_bytes
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.results import Results, empty_forward, run_with_sequential_vmap
from tilewright.kernels.paged_attention.token_layout import boundaries, packed_tiles, packed_tokens
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import FwdParams

LARGEST_DIM = 512
"""Elements of a key or value in one MMA; a latent may have 64 more, in a second."""

PROGRAMS_PER_CORE = 8
"""Programs per SM, from which the number of splits follows: two or three run at once, and several rounds of them even
out that some end earlier."""

ENOUGH_PER_CORE = 3.5
"""Programs per SM from which keys are not split: combining costs more than waiting for the last of them."""

MIN_BLOCKS = 4
"""Steps that a split should have where others fill the device, for its partial results are written and read again."""

MAX_SPLITS = 256

SMALL_BLOCK_M = 32
"""Query rows of a program over latents on a card with little shared memory."""

MAX_BLOCK_G = 64
"""Heads of a key head in a program, where its config does not say how many at most."""

LARGEST_SHARED_BYTES = 227 << 10
"""Shared memory of a CTA where the device's own limit is not known."""


class TritonPagedAttention(InferenceBackend[PagedInputs, Results, FwdParams]):
    """Serves float16, bfloat16 and float32, with any cache; float32 is multiplied without tensor cores.

    Its params are ``q_blocksize``, ``kv_blocksize``, ``blocksize_heads`` (at most so many heads of a key head in a
    program), ``num_key_splits`` and those of the launch.
    """

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = FwdParams
    serves: ClassVar[frozenset[str]] = frozenset(
        {
            "kv_starts", "key_scale", "value_scale", "alibi_slopes", "softmax_aux", "left", "right", "logits_soft_cap",
            "q_length", "latent_dim", "row_format", "tree_mask",
        }
    )  # fmt: skip

    def forward_reasons(self, inputs: PagedInputs, device: Device) -> list[str]:
        why = unavailable(device)
        if inputs.dtype.name not in ("float16", "bfloat16", "float32"):
            why.append(f"queries must be float16, bfloat16 or float32, not {inputs.dtype}")
        has_e4m3 = inputs.key.dtype.name == "float8_e4m3fn" or inputs.row_format is not None
        if has_e4m3 and device.capability is not None and device.capability < (8, 9):
            why.append(f"float8_e4m3fn needs compute capability 8.9, this device has {device.capability}")
        main, rest = _dims(inputs.head_dim, inputs.value_dim, inputs.latent_dim is not None)
        if max(main, inputs.value_dim) > LARGEST_DIM or rest > 128:
            why.append(f"head_dim={inputs.head_dim} and value_dim={inputs.value_dim} must be at most {LARGEST_DIM}")
        if inputs.dtype.itemsize > 2 and max(inputs.head_dim, inputs.value_dim) > 256:
            why.append(f"in float32 head_dim={inputs.head_dim} and value_dim={inputs.value_dim} must be at most 256")
        return why

    def heuristic(self, inputs: PagedInputs, device: Device, direction: Direction) -> FwdParams:
        """The config by a sweep on an H200 (benchmarks/results/nvidia-h200/serving_sweep.json)."""
        wide = power_of_two(max(inputs.head_dim, inputs.value_dim)) > 256
        block_g = _block_g(inputs, None)
        rows = 1
        if inputs.longest_q > 1:
            mean = inputs.tokens / max(inputs.sequences, 1)
            rows = max((128 if mean >= 128 and not wide else 64) // block_g, 1)
            if inputs.latent_dim is not None:
                # A row more costs 2 · (head_dim + value_dim) FLOPs for each latent of 2 · head_dim bytes: at 64 rows
                # about what a device computes in the time that it takes to read them. Rows of no token would count.
                rows = min(rows, power_of_two(math.ceil(mean), 1))
        block_m = max(rows * block_g, MIN_DOT)
        narrow = inputs.dtype.itemsize <= 2
        half = _half(inputs)
        # Converted elements take registers of their own: 64 rows and four warps then spill.
        if wide or block_m >= (64 if half else 128):
            warps = 8
        else:
            warps = 2 if half or (inputs.page_table is not None and inputs.page_size < 16 and block_m < 64) else 4
        # One buffer is enough where many programs share an SM, and leaves room for them.
        stages = 2 if wide or not narrow or (block_m < 64 and not half) else 3

        def params(block_n: int, warps: int = warps, stages: int = stages) -> FwdParams:
            return FwdParams(
                q_blocksize=min(rows, power_of_two(max(inputs.longest_q, 1))),
                kv_blocksize=block_n,
                num_key_splits=_splits(inputs, device, rows, block_g, block_n, warps),
                num_warps=warps,
                num_stages=stages,
            )

        # If keys take few instructions, one warp with a page per step is enough and does not wait for page numbers.
        if half and not wide and block_m < 64 and inputs.page_size == 16 and inputs.scales_constant_per_head:
            return params(16, 1)
        # Chunks of queries over keys with a scale each: two warps and 32 keys take half the time of eight warps and 64
        # keys on an H100 (in the table that ships). Their registers must hold the accumulator.
        scaled_chunk = half and block_m >= 64 and inputs.longest_q > 1 and not inputs.scales_constant_per_head
        if scaled_chunk and block_m * power_of_two(inputs.value_dim) <= 128 * 32 * 2:
            return params(32, 2, 2)
        # A latent of 512 fits with 64 keys too, but some versions of Triton then spill (3.9; 3.6 does not).
        sizes = (64, 32, 16) if narrow and not wide else (32, 16)
        fits = (size for size in sizes if not self.config_reasons(inputs, device, direction, params(size)))
        best = params(next(fits, MIN_DOT))
        if inputs.latent_dim is None or not self.config_reasons(inputs, device, direction, best):
            return best
        # A card with 99 KB of shared memory has no room for 64 rows of Q beside latents: half of the rows. Eight warps
        # would load 16 latents without copies that overlap with MMAs. Rows of bytes are converted in registers, which
        # spill beside those of more than 16 rows.
        small, block_n, few = (SMALL_BLOCK_M, MIN_DOT, 4) if inputs.row_format is None else (MIN_DOT, 32, 8)
        rows, block_g = max(rows * small // block_m, 1), min(block_g, small)
        return dataclasses.replace(params(block_n, few), blocksize_heads=block_g)

    def candidates(self, inputs: PagedInputs, device: Device, direction: Direction) -> Iterable[FwdParams]:
        best = self.heuristic(inputs, device, direction)
        splits = best.num_key_splits or 1
        made = []
        for block_n in (16, 32, 64, 128):
            for warps, stages in ((1, 3), (2, 2), (2, 3), (4, 2), (4, 3), (4, 4), (8, 2), (8, 3)):
                if (block_n == 16) != (warps == 1 and inputs.longest_q == 1):
                    continue  # one warp needs no other to reduce a row of few keys, and more have little to do
                for number in (splits, max(splits // 2, 1), min(2 * splits, MAX_SPLITS)):
                    made.append(
                        FwdParams(
                            q_blocksize=best.q_blocksize, kv_blocksize=block_n, blocksize_heads=best.blocksize_heads,
                            num_key_splits=number, num_warps=warps, num_stages=stages,
                        )
                    )  # fmt: skip
        fits = (params for params in made if not self.config_reasons(inputs, device, direction, params))
        return [params for params in dict.fromkeys(fits) if params != best]

    def config_reasons(self, inputs: PagedInputs, device: Device, direction: Direction, params: FwdParams) -> list[str]:
        """MMAs need sides of 16, the stages of the pipeline must fit shared memory, and O registers."""
        block_n, why = params.kv_blocksize or 64, []
        heads = params.blocksize_heads or MAX_BLOCK_G
        for name, size in (
            ("q_blocksize", params.q_blocksize or 1),
            ("kv_blocksize", block_n),
            ("blocksize_heads", heads),
        ):
            if size != power_of_two(size):
                why.append(f"{name}={size} must be a power of two")
        if block_n < MIN_DOT:
            why.append(f"kv_blocksize={block_n} must be at least {MIN_DOT}")
        main, rest = _dims(inputs.head_dim, inputs.value_dim, inputs.latent_dim is not None)
        elements = power_of_two(main) + (power_of_two(rest) if rest else 0)
        elements += 0 if inputs.latent_dim is not None else power_of_two(inputs.value_dim)
        block_m = max((params.q_blocksize or 1) * _block_g(inputs, params.blocksize_heads), MIN_DOT)
        stored = block_n * (params.num_stages or 1)
        stored *= elements * inputs.key.dtype.itemsize if inputs.row_format is None else inputs.key.shape[3]
        converted = inputs.key.dtype != inputs.dtype and not _half(inputs)
        # Besides the stages: operands of MMAs that are made in registers, that is converted keys and values, and Q and
        # P.
        held = (block_n * elements if converted else 0) + block_m * (power_of_two(main) + block_n)
        most = max_shared_bytes(device, LARGEST_SHARED_BYTES)
        if stored + held * inputs.dtype.itemsize > most:
            why.append(f"{params.num_stages} stages of {block_n} keys do not fit into {most} bytes of shared memory")
        # 128 registers of each thread for O: half of its maximum.
        if block_m * power_of_two(inputs.value_dim) > 128 * 32 * (params.num_warps or 4):
            why.append(f"{block_m} rows of {inputs.value_dim} do not fit into registers of {params.num_warps} warps")
        return why

    def forward(self, inputs: PagedInputs, params: FwdParams) -> Results:
        """``(out, lse)``; lse is float32."""
        if inputs.is_empty:
            return empty_forward(inputs)
        return run_with_sequential_vmap(lambda inputs: _run(inputs, params), inputs)


def _run(inputs: PagedInputs, params: FwdParams) -> Results:
    from tilewright.kernels.paged_attention.triton import kernels as triton_kernels

    tokens, heads, value_dim = inputs.tokens, inputs.heads, inputs.value_dim
    block_g, block_q = _block_g(inputs, params.blocksize_heads), params.q_blocksize or 1
    splits = params.num_key_splits or 1
    absent = jnp.zeros((0,), jnp.int32)
    per_sequence = 1
    tiles, owned, cum = absent, None, absent
    if inputs.q_length is None:
        cum = boundaries(inputs.cum_q_lens, tokens)
        plan, _ = packed_tiles(cum, inputs.kv_lengths, tokens, block_q)
        tiles, count = jnp.concatenate([plan.sequence, plan.token, plan.rows, plan.position]), plan.rows.shape[0]
        owned = packed_tokens(cum, tokens, inputs.sequences, None).owned
    else:
        per_sequence = -(-inputs.q_length // block_q)
        count = inputs.sequences * per_sequence
    float_absent = jnp.zeros((0,), jnp.float32)
    sinks = float_absent if inputs.softmax_aux is None else inputs.softmax_aux
    arrays = [
        inputs.query,
        inputs.key,
        inputs.key if inputs.value is None else inputs.value,
        absent if inputs.page_table is None else inputs.page_table,
        inputs.kv_lengths,
        absent if inputs.kv_starts is None else inputs.kv_starts,
        tiles,
        float_absent if inputs.key_scale is None else inputs.key_scale,
        float_absent if inputs.value_scale is None else inputs.value_scale,
        float_absent if inputs.alibi_slopes is None else inputs.alibi_slopes,
        sinks,
        jnp.zeros((0,), jnp.uint32) if inputs.tree_mask is None else inputs.tree_mask,
        absent if inputs.tree_mask is None else cum,
    ]
    constants = _constants(inputs, params, block_g, per_sequence)
    part = (splits,) if splits > 1 else ()
    results = [
        jax.ShapeDtypeStruct((tokens, heads, *part, value_dim), jnp.float32 if part else inputs.dtype),
        jax.ShapeDtypeStruct((tokens, heads, *part), jnp.float32),
    ]
    group_blocks = -(-inputs.groups // block_g)
    out, lse = launch(
        triton_kernels.attend,
        arrays,
        results,
        grid=[inputs.kv_heads * group_blocks * count * splits],
        scalars={"num_pages": inputs.num_pages, "num_tiles": count},
        constants=constants,
        num_warps=params.num_warps or 4,
        num_stages=params.num_stages or 2,
    )
    if part:
        block_v = power_of_two(value_dim)
        out, lse = launch(
            triton_kernels.combine,
            [out, lse, sinks],
            [
                jax.ShapeDtypeStruct((tokens, heads, value_dim), inputs.dtype),
                jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
            ],
            grid=[tokens, heads],
            constants={
                "heads": heads, "value_dim": value_dim, "splits": splits, "block_s": power_of_two(splits, 1),
                "block_v": block_v, **_sink_sizes(inputs),
            },
            num_warps=8 if power_of_two(splits) * block_v > 8192 else 4,
        )  # fmt: skip
    if owned is None:
        return out, lse
    # Tokens without a sequence were not written.
    nothing, nothing_lse = empty_forward(inputs)
    return jnp.where(owned[:, None, None], out, nothing), jnp.where(owned[:, None], lse, nothing_lse)


def _constants(inputs: PagedInputs, params: FwdParams, block_g: int, tiles: int) -> dict[str, Any]:
    """The constants of `kernels.attend`; ``tiles`` are those of a sequence, where queries are not packed."""
    block_q, half = params.q_blocksize or 1, _half(inputs)
    main, rest = _dims(inputs.head_dim, inputs.value_dim, inputs.latent_dim is not None)
    # In pairs the columns are split over two MMAs; each needs MIN_DOT of them.
    min_dim = MIN_DOT * (2 if half else 1)
    return {
        "heads": inputs.heads,
        "kv_heads": inputs.kv_heads,
        "head_dim": inputs.head_dim,
        "value_dim": inputs.value_dim,
        "page_size": inputs.page_size,
        "columns": inputs.columns,
        "capacity": inputs.capacity,
        "q_length": inputs.q_length or 1,
        "tiles_per_sequence": tiles,
        "paged": inputs.page_table is not None,
        "packed": inputs.cum_q_lens is not None,
        "latent": inputs.value is None,
        "has_starts": inputs.kv_starts is not None,
        "has_key_scale": inputs.key_scale is not None,
        "has_value_scale": inputs.value_scale is not None,
        **_strides("key_scale", inputs.key_scale),
        **_strides("value_scale", inputs.value_scale),
        "has_slopes": inputs.alibi_slopes is not None,
        **_sink_sizes(inputs),
        "softmax_scale": inputs.softmax_scale,
        "soft_cap": inputs.logits_soft_cap or 1.0,
        "has_soft_cap": inputs.logits_soft_cap is not None,
        "left": inputs.left or 0,
        "has_left": inputs.left is not None,
        "right": inputs.right or 0,
        "has_right": inputs.right is not None,
        "splits": params.num_key_splits or 1,
        "block_q": block_q,
        "block_g": block_g,
        "block_m": max(block_q * block_g, MIN_DOT),
        "block_n": params.kv_blocksize or 64,
        "block_d": power_of_two(main, min_dim),
        "block_r": power_of_two(rest, min_dim) if rest else 0,
        "block_v": power_of_two(inputs.value_dim, min_dim),
        "tile_dim": main,
        "exact": inputs.dtype.itemsize > 2,
        "stages": params.num_stages or 2,
        "row_bytes": inputs.row_format is not None,
        "half": half,
        "mask_words": 0 if inputs.tree_mask is None else inputs.tree_mask.shape[1],
    }


def _block_g(inputs: PagedInputs, most: int | None) -> int:
    """Heads of a key head in a program."""
    return min(power_of_two(inputs.groups), most or MAX_BLOCK_G)


def _dims(head_dim: int, value_dim: int, latent: bool) -> tuple[int, int]:
    """Elements of a key in the first MMA, and in the second."""
    return (value_dim, head_dim - value_dim) if latent else (head_dim, 0)


def _sink_sizes(inputs: PagedInputs) -> dict[str, int]:
    return {"num_sinks": inputs.sinks, "block_sinks": power_of_two(max(inputs.sinks, 1))}


def _strides(name: str, scale: jax.Array | None) -> dict[str, int]:
    """Strides of a scale for page, row and head; 0 where it is broadcast."""
    if scale is None:
        return {f"{name}_{axis}": 0 for axis in ("page", "row", "head")}
    pages, rows, heads = scale.shape
    return {
        f"{name}_page": rows * heads if pages > 1 else 0,
        f"{name}_row": heads if rows > 1 else 0,
        f"{name}_head": 1 if heads > 1 else 0,
    }


def _half(inputs: PagedInputs) -> bool:
    """True where stored elements have one byte, and are multiplied in float16 as pairs."""
    in_pairs = inputs.head_dim % 2 == inputs.value_dim % 2 == 0 and inputs.row_format is None
    return inputs.key.dtype.itemsize == 1 and inputs.dtype.itemsize == 2 and in_pairs


def _splits(inputs: PagedInputs, device: Device, block_q: int, block_g: int, block_n: int, warps: int) -> int:
    """Splits of the keys so that few long sequences fill the device, only by shapes; lengths are not read."""
    tiles = inputs.sequences * -(-inputs.longest_q // block_q)
    if inputs.cum_q_lens is not None:
        # How tokens are spread is not known: at least a tile for each sequence, at least whole tiles of all tokens.
        tiles = max(inputs.sequences, -(-inputs.tokens // block_q))
    programs = tiles * inputs.kv_heads * -(-inputs.groups // block_g)
    cores = max(device.cores, 1)
    # A program of one warp counts half.
    enough = programs * min(warps, 2) >= 2 * ENOUGH_PER_CORE * cores
    wanted = 1 if enough else PROGRAMS_PER_CORE * cores // max(programs, 1)
    blocks = -(-inputs.visible // block_n)
    # Where a split costs least, that is where programs are few, it may have a single step (H200: 8 x 700 tokens 10 us
    # for 13, 1 x 2000 7 us for 9).
    few = int(ENOUGH_PER_CORE * cores) // max(programs, 1)
    return max(min(max(min(wanted, blocks // MIN_BLOCKS), min(few, blocks)), MAX_SPLITS), 1)
