"""A kernel that uses everything the launcher gives: shared memory, a workspace, attributes, absent arrays."""

from pathlib import Path

from tests.support.plain_variant import PlainVariant
from tilewright.kernels.cuda import Compare, DeviceField, Fact, Field, VariantTable

# Sums each row in a block's dynamic shared memory, by way of a workspace, and adds what the attributes say.
HEADER = """
#pragma once
#include <cstdint>

template <int kShared>
__global__ void to_workspace(const float* x, float* workspace, int64_t width) {
  extern __shared__ float row[];
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) row[kShared / 4 - 1 - i] = x[blockIdx.x * width + i];
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
  for (int64_t i = 0; i < width; ++i) sum += row[kShared / 4 - 1 - i];
  workspace[blockIdx.x] = sum;
}

__global__ void from_workspace(const float* workspace, const float* bias, float* out, float scale, int64_t offset) {
  out[threadIdx.x] = workspace[threadIdx.x] * scale + static_cast<float>(offset) + (bias ? bias[threadIdx.x] : 0.0f);
}

template <int kShared>
struct RowSum {
  static tilewright::Facts facts() { return {kShared, 32, 1}; }

  static int64_t workspace(const tilewright::Problem& problem) { return problem.rows * 4; }

  static tilewright::ffi::Error run(cudaStream_t stream, const tilewright::Device&, const tilewright::Problem& problem,
                                    const tilewright::Arguments& arguments) {
    float scale;
    int64_t offset;
    TILEWRIGHT_RETURN_IF_ERROR(tilewright::attribute(arguments, "scale", &scale));
    TILEWRIGHT_RETURN_IF_ERROR(tilewright::attribute(arguments, "offset", &offset));
    auto* workspace = static_cast<float*>(arguments.workspace);
    TILEWRIGHT_RETURN_IF_ERROR(tilewright::launch<&to_workspace<kShared>>(
        dim3(problem.rows), dim3(32), kShared, stream, tilewright::input<float>(arguments, 0), workspace,
        problem.width));
    return tilewright::launch<&from_workspace>(dim3(1), dim3(problem.rows), 0, stream, workspace,
                                               tilewright::input<float>(arguments, 1),
                                               tilewright::output<float>(arguments, 0), scale, offset);
  }
};
"""


def row_sum(shared: int, *, checked: bool = True) -> PlainVariant:
    """A variant for rows that fit into bytes of shared memory, which may be more than the device has if unchecked."""
    fits = Compare(Fact("shared_bytes"), "<=", DeviceField("shared_memory"))
    return PlainVariant(
        name=f"shared{shared}",
        cpp_class=f"RowSum<{shared}>",
        sort_key=(shared,),
        requirements=(Compare(Field("width"), "<=", shared // 4), *([fits] if checked else [])),
    )


def row_sum_table(folder: Path, *flags: str) -> VariantTable:
    """The table, with its header in a folder.

    The last variant takes more shared memory than any device has, without the requirement that would say so.
    """
    (folder / "row_sum.cuh").write_text(HEADER)
    variants = (row_sum(1024), row_sum(60 << 10), row_sum(64 << 10), row_sum(1 << 20, checked=False))
    return VariantTable("row_sum", folder / "row_sum.cuh", ("rows", "width"), variants, flags=flags)
