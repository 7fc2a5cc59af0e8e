"""The matmul core for Hopper: one persistent, warp-specialised kernel, to which an op gives its parts.

A CTA computes tiles of ``block_m × block_n`` elements of the result, one work item after the other. A producer
warpgroup loads the tiles of both operands by TMA, a K step of 128 bytes at a time, into a ring of stages; one to three
consumer warpgroups share the rows of the tile, multiply by wgmma, and store through shared memory by TMA. The two CTAs
of a cluster share the tiles of one operand; each of them loads a half for both::

    producer      A0 B0   A1 B1   ...   A(T-1) B(T-1)   A0' B0'   A1' B1'     (as far ahead as the ring has stages)
    consumer      wait 0 · MMA 0 | wait 1 · MMA 1 · wait for MMA 0, release stage 0 | ... | epilogue · store

All consumers work on one tile, so its epilogue and its store overlap with no MMAs. With ``turns`` each of two consumers
has whole tiles of its own, which take as many registers as half a tile of both, so these are smaller and load more for
each MMA: for items of few steps (``hopper/turns.py``)::

    consumer 0      MMAs of tile 0 | epilogue · store | MMAs of tile 2 | ...
    consumer 1                       MMAs of tile 1   | epilogue · store | MMAs of tile 3 | ...

======================  ===========================================================================================
part                    what an op gives
======================  ===========================================================================================
``schedule``            the work items as data: `DenseSchedule`; `RaggedRowsSchedule`, rows in groups, each with a
                        matrix; `RaggedReductionSchedule`, a sum over a group's own range of K; `DevicesSchedule`,
                        the rows of several devices. Sizes may be known on the device only. A new kind has
                        ``items()`` and ``work(item, cta)``, and arrays as leaves.
``products``            one lhs, and the operands of rhs that it is multiplied with, each of which has an accumulator;
                        several products of one shape are summed (the gradient of lhs of a gated pair).
operands' layouts       ``[x, k]`` or ``[k, x]``: wgmma transposes 16-bit tiles as it reads them, nothing is copied.
                        Ranges of K that end within a step are zeroed in shared memory (``mask.py``).
rows by an index        ``lhs`` of a product, or an operand of a sum over the rows of a group, may be `IndexedRows`:
                        the producer's threads copy the rows that an index names (``hopper/rows.py``), beside the TMA
                        copies of the others. Along K the rows of a step are found while the one before is loaded.
``scales``              of float8 operands: each step is scaled as it is added to the sum (``scaled.py``).
``epilogue``            from the float32 accumulators the tiles of the results, in registers, and values of rows: the
                        activation of a gated pair (``gate.py``), sums of a softmax. Its arrays are its leaves.
store                   whole tiles by TMA, which leaves out what is beyond an array's end; of a group's last tile of
                        rows a copy for each bit of their number (``store.py``).
======================  ===========================================================================================

==========================================  ==================  ==========================================
case                                        served by           notes
==========================================  ==================  ==========================================
NN, NT, TN, TT, 16 bits                     `dense_products`    rows of operands at multiples of 16 bytes
sizes that no tile divides                  all                 TMA reads zeros and stores nothing beyond
rows in groups, forward and dgrad           RaggedRows          rows without a group: no steps, zeros
sum over the rows of a group (wgrad)        RaggedReduction     NaN in rows of others reaches nothing
rows in groups, of tokens by an index       RaggedRows          16 bits, tiles of up to 128 rows
sum over rows of tokens by an index         RaggedReduction     of one operand, which no cluster shares
gated pair                                  two operands        columns are shared out: ``block_n / 2`` each
float8, forward                             `accumulate_scaled` K in the rows of both; a turn for each part
rows of several devices                     `gathered_matmul`   the producer sends the own ones, and waits for others
a sum over several devices                  `scattered_matmul`  the producer sends float32 tiles of others' rows
float32, other strides                      declined            TF32 wgmma wants K in the rows of both
==========================================  ==================  ==========================================

Files in reading order: ``params``, ``operands``, ``schedule``, ``plan``, ``kernel``, ``epilogue``, ``store``, then
``sending``, ``gathered``, ``scattered``; ``heuristics`` has the model by which configs are ordered.
"""
