// Doubles an array, or does what a candidate of a tuning may not do.
#pragma once

#include <cstdint>

namespace hostile {

enum Way { kRight, kSlow, kLeftOut, kIllegal, kHang };

template <int kWay>
__global__ void twice(const float* x, float* out, int64_t size) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= size) return;
  if (kWay == kIllegal && i == size / 2) {
    // Nothing is ever mapped there.
    *reinterpret_cast<volatile float*>(16) = 1.0f;
  }
  if (kWay == kHang && i == 0) {
    // Reads what it writes itself, so that the compiler cannot tell that it never ends.
    volatile float* flag = out;
    *flag = 1.0f;
    while (*flag != 0.0f) {
    }
  }
  if (kWay == kLeftOut && i == size / 3) return;
  float value = x[i];
  for (int turn = 0; kWay == kSlow && turn < 1000; ++turn) value = __fsqrt_rn(value * value);
  out[i] = kWay == kSlow ? copysignf(2 * value, x[i]) : 2 * value;
}

}  // namespace hostile

template <int kWay>
struct Twice {
  static tilewright::Facts facts() { return {0, 256, 1}; }

  static int64_t workspace(const tilewright::Problem&) { return 0; }

  static tilewright::ffi::Error run(cudaStream_t stream, const tilewright::Device&, const tilewright::Problem& problem,
                                    const tilewright::Arguments& arguments) {
    const dim3 grid(static_cast<unsigned>((problem.size + 255) / 256));
    return tilewright::launch<&hostile::twice<kWay>>(grid, dim3(256), 0, stream,
                                                     tilewright::input<float>(arguments, 0),
                                                     tilewright::output<float>(arguments, 0), problem.size);
  }
};
