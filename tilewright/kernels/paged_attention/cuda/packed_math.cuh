// Arithmetic of packed attention: single instructions, a vote of a warpgroup, and the running softmax that both
// queues use. Read after packed_prefetch.cuh and before packed_storage.cuh (packed_hopper.cuh has the overview).
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

#include "cutlass/arch/barrier.h"
#include "tilewright/warpgroup.cuh"

namespace tilewright::paged {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kSlack = 8;  // m is raised only if P would exceed 2^8: rescaling O is rare

// Two floats as a pair of 16-bit elements, `low` in the lower half.
template <class Element>
CUTLASS_DEVICE uint32_t pack(float low, float high) {
  const float from[2] = {low, high};
  uint32_t packed;
  convert<Element, 2>(from, reinterpret_cast<Element*>(&packed));
  return packed;
}

// 2^exponent in one instruction; a subnormal result becomes 0.
CUTLASS_DEVICE float power_of_two(float exponent) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(exponent));
  return found;
}

// A mask of the lowest `count` bits, at most 32.
CUTLASS_DEVICE uint32_t first_bits(int count) {
  uint32_t found;
  asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(found) : "r"(count));
  return found;
}

CUTLASS_DEVICE float reciprocal(float number) {
  float found;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(number));
  return found;
}

// Transposes the 8 x 8 matrix of 16-bit elements that a warp holds.
CUTLASS_DEVICE uint32_t transposed(uint32_t part) {
  uint32_t found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(part));
  return found;
}

// True if `holds` for any thread of the calling warpgroup: a barrier with an OR reduction, on a named barrier that
// nothing else uses.
CUTLASS_DEVICE bool any_of_warpgroup(int barrier, bool holds) {
  int found;
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.ne.s32 mine, %1, 0;\nbarrier.cta.red.or.pred.aligned any, %2, %3, mine;\n"
      "selp.s32 %0, 1, 0, any;\n}"
      : "=r"(found)
      : "r"(int(holds)), "r"(int(cutlass::arch::NamedBarrier::ReservedNamedBarrierCount) + barrier), "n"(kWarpgroup)
      : "memory");
  return found != 0;
}

// m in units of `scale`, or 0 for a row that has seen no key, so that -inf - (-inf) does not occur.
CUTLASS_DEVICE float subtrahend(float row_max, float scale) {
  return row_max == -INFINITY ? 0.0f : row_max * scale;
}

// Sets m to `most` and returns the factor by which l and O of the row (decode: column) are rescaled.
CUTLASS_DEVICE float raise(float& row_max, float most, float scale2) {
  // Return exactly 1 if m is unchanged: the compiler may fuse the multiplication and the difference into one FMA,
  // whose single rounding can give another value.
  const float shrink = row_max == most ? 1.0f : power_of_two(row_max * scale2 - subtrahend(most, scale2));
  row_max = most;
  return shrink;
}

CUTLASS_DEVICE float log_sum(float row_max, float total, float scale) {
  return total == 0 ? -INFINITY : subtrahend(row_max, scale) + logf(total);
}

}  // namespace tilewright::paged
