"""Matmuls with a gather before or a sum after, of operands that are split over a mesh axis inside ``shard_map``.

Each is an op whose plans make calls of ``matmul`` on the parts: plain collectives, rings whose transfers overlap with
the matmuls (``rings.py``), and one kernel for Hopper GPUs, whose devices send to each other (``remote.py``).
"""
