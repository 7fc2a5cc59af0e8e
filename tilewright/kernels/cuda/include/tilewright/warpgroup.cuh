// Shared by the CUTLASS-based kernels for compute capability 9.0a that are specialized by warpgroup.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/arch/barrier.h"
#include "cutlass/array.h"
#include "cutlass/numeric_conversion.h"

namespace tilewright {

constexpr int kWarpgroup = cutlass::NumThreadsPerWarpGroup;  // threads of a warpgroup: 128

// The entry point of a kernel class: one CTA per SM, parameters in constant memory (as TMA descriptors need), dynamic
// shared memory aligned to the 1024 bytes of the 128-byte swizzle.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) run_kernel(__grid_constant__ const typename Kernel::Params p) {
  extern __shared__ __align__(1024) char storage[];
  Kernel{}(p, *reinterpret_cast<typename Kernel::SharedStorage*>(storage));
}

// Converts kSize floats to Element. Both pointers must be aligned as the arrays they are read as.
template <class Element, int kSize>
CUTLASS_DEVICE void convert(const float* from, Element* to) {
  *reinterpret_cast<cutlass::Array<Element, kSize>*>(to) = cutlass::NumericArrayConverter<Element, float, kSize>{}(
      *reinterpret_cast<const cutlass::Array<float, kSize>*>(from));
}

// Synchronizes the calling warpgroup by named barrier `barrier`. CUTLASS adds the number of its reserved barriers, so 0
// is the first one for users.
CUTLASS_DEVICE void sync_warpgroup(int barrier) { cutlass::arch::NamedBarrier::sync(kWarpgroup, uint32_t(barrier)); }

}  // namespace tilewright
