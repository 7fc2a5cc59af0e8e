"""Attention over a sequence whose rows are split over a mesh axis, inside ``shard_map``.

Every device holds some rows of the query and some of the keys and values. Its computation is always calls of
``flash_attention``'s kernel, forward and backward; this package decides which rows meet which, moves them, and combines
partial results. No kernel is changed: where the layout allows it, absolute positions become static bands of indices, so
that every backend serves them.

Symbols: n devices; device i; a step of shift s, in which device i has the keys and values of device i − s (mod n).

| strategy | forward | backward | memory beside the operands |
| --- | --- | --- | --- |
| ring | n − 1 hops of K and V by ``ppermute`` | n + 1 hops of K and V, of dK and dV, or both | two shards of each |
| all_gather | K and V gathered, one call | dK and dV by ``psum_scatter`` | K and V of all devices |
| ulysses | rows for heads by ``all_to_all``, one call, and back | the transposes | a copy of each operand |

Ring: a hop is issued before the kernels of the step that it overlaps. Partial results are float32 and combined by their
lse. Backward kernels get out and lse of the whole, so that P = exp(S − lse) is right. dK and dV travel in float32 one
step behind their keys, and home at last.

| layout | rows of device i | steps under a causal mask |
| --- | --- | --- |
| contiguous | shard i of n | full, diagonal or empty; the last device has the most work |
| zigzag | chunks i and 2n − 1 − i of 2n | the diagonal; then two of four pairs of chunks on every device |

The two pairs are all queries with the first chunk of the keys, or the second chunk of the queries with all keys.

A step is planned for each device while tracing (``plan.py``): rectangles of rows and columns with a static band.
Devices with different plans take branches of one ``lax.switch``. Pairs without a visible position are in no rectangle;
a shift for which no device has any is left out, and its hop is joined with the next one: with a window that is shorter
than a shard a causal ring has two steps.

| what masks | how a device sees it |
| --- | --- |
| causal, windows, either alignment | the band of the whole, shifted by the first positions of two chunks |
| segment ids | those of the keys travel with the keys |
| packed sequences | ids from positions and boundaries, which all devices have; known to the host, they bound the band |
| lengths | how many of a device's positions are below the length: they ascend, so that is a prefix |
| a band that counts from each element's or packed sequence's end | positions that are arrays; every step is computed |

Sinks are logits without a value: they are added to the combined lse once. A bias or mask of all pairs and dropout are
refused: their arrays, and the counter of the dropout, are those of the whole call.
"""
