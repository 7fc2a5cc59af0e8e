"""Configs of the grouped matmuls on Hopper, best guess first."""

from typing import Any

from tilewright.kernels.hopper.matmul.params import MatmulParams


def rows_candidates(
    rows: int, mean_rows: float, n: int, k: int, out_dtype: Any, num_sms: int
) -> list[MatmulParams]:
    if mean_rows <= 64:
        return [MatmulParams(64, 128, 8), MatmulParams(64, 64, 8), MatmulParams(64, 256, 5)]
    return [MatmulParams(128, 256, 4, cluster_m=2), MatmulParams(128, 256, 4), MatmulParams(128, 256, 4, cluster_n=2), MatmulParams(128, 128, 6)]


def reduction_candidates(
    matrices: int, mean_rows: float, m: int, n: int, out_dtype: Any, num_sms: int
) -> list[MatmulParams]:
    return [MatmulParams(128, 256, 4, cluster_m=2), MatmulParams(128, 256, 4), MatmulParams(256, 128, 4, cluster_n=2), MatmulParams(128, 128, 6)]
