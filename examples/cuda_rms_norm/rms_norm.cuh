// A fused RMSNorm: out = x / sqrt(mean(x^2) + eps) * weight, over the last dimension, in one pass over memory.
//
// A block normalises one row at a time. Its threads keep the row in registers, `kPack` neighbouring elements at a time,
// so that each is read from memory once; the sum of squares is in float32 whatever the arrays are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

namespace rms_norm {

// What one thread reads at once.
template <class T, int kPack>
struct alignas(sizeof(T) * kPack) Pack {
  T values[kPack];
};

template <int kWarps>
__device__ float sum_over_block(float value) {
  __shared__ float partial[kWarps];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if constexpr (kWarps == 1) return value;
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < kWarps; ++warp) total += partial[warp];
  __syncthreads();  // the next row writes `partial` anew
  return total;
}

template <class T, int kWidth, int kPack, int kThreads>
__global__ __launch_bounds__(kThreads) void kernel(const T* x, const T* weight, T* out, int64_t rows, int width,
                                                   float eps) {
  using P = Pack<T, kPack>;
  constexpr int kPacks = (kWidth + kThreads * kPack - 1) / (kThreads * kPack);  // of one thread
  const int packs = width / kPack;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    P kept[kPacks];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack = i * kThreads + static_cast<int>(threadIdx.x);
      if (pack >= packs) break;
      kept[i] = reinterpret_cast<const P*>(x + row * width)[pack];
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float value = static_cast<float>(kept[i].values[j]);
        squares += value * value;
      }
    }
    const float scale = rsqrtf(sum_over_block<kThreads / 32>(squares) / static_cast<float>(width) + eps);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack = i * kThreads + static_cast<int>(threadIdx.x);
      if (pack >= packs) break;
      const P weights = reinterpret_cast<const P*>(weight)[pack];
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float value = static_cast<float>(kept[i].values[j]) * scale * static_cast<float>(weights.values[j]);
        kept[i].values[j] = static_cast<T>(value);
      }
      reinterpret_cast<P*>(out + row * width)[pack] = kept[i];
    }
  }
}

}  // namespace rms_norm

// Rows of up to kWidth elements, read kPack at a time. Its three functions are what tilewright asks of a variant.
template <class T, int kWidth, int kPack, int kThreads>
struct RmsNorm {
  static tilewright::Facts facts() {
    tilewright::Facts facts;
    facts.shared_bytes = kThreads / 32 * static_cast<int64_t>(sizeof(float));
    facts.threads = kThreads;
    facts.alignment = kPack;
    return facts;
  }

  static int64_t workspace(const tilewright::Problem&) { return 0; }

  static tilewright::ffi::Error run(cudaStream_t stream, const tilewright::Device& device,
                                    const tilewright::Problem& problem, const tilewright::Arguments& arguments) {
    float eps = 0.0f;
    TILEWRIGHT_RETURN_IF_ERROR(tilewright::attribute(arguments, "eps", &eps));
    // As many blocks as run at once, so that none of them starts for a single row.
    const int64_t resident = device.multiprocessors * (2048 / kThreads);
    const dim3 grid(static_cast<unsigned>(std::min(problem.rows, resident)));
    return tilewright::launch<&rms_norm::kernel<T, kWidth, kPack, kThreads>>(
        grid, dim3(kThreads), 0, stream, tilewright::input<T>(arguments, 0), tilewright::input<T>(arguments, 1),
        tilewright::output<T>(arguments, 0), problem.rows, static_cast<int>(problem.width), eps);
  }
};
