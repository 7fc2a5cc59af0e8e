// What kernels of CUTLASS's parts share that work by warpgroups, on compute capability 9.0a.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/arch/barrier.h"
#include "cutlass/array.h"
#include "cutlass/numeric_conversion.h"

namespace tilewright {

constexpr int kWarpgroup = cutlass::NumThreadsPerWarpGroup;

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) run_kernel(__grid_constant__ const typename Kernel::Params p) {
  extern __shared__ __align__(1024) char storage[];
  Kernel{}(p, *reinterpret_cast<typename Kernel::SharedStorage*>(storage));
}

template <class Element, int kSize>
CUTLASS_DEVICE void convert(const float* from, Element* to) {
  *reinterpret_cast<cutlass::Array<Element, kSize>*>(to) = cutlass::NumericArrayConverter<Element, float, kSize>{}(
      *reinterpret_cast<const cutlass::Array<float, kSize>*>(from));
}

// Of the warpgroup that calls it, at a barrier of its own.
CUTLASS_DEVICE void sync_warpgroup(int barrier) { cutlass::arch::NamedBarrier::sync(kWarpgroup, uint32_t(barrier)); }

}  // namespace tilewright
