// Arithmetic of packed attention: single instructions, a vote of a warpgroup, and the running softmax that both
// queues use. Read after packed_prefetch.cuh and before packed_storage.cuh (packed_hopper.cuh has the overview).
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

#include "cutlass/arch/barrier.h"
#include "tilewright/warpgroup.cuh"

namespace tilewright::paged {

constexpr float kLog2e = 1.4426950408889634f;

// m is raised only if P would exceed 2^8, so that O is rarely rescaled. P and l stay far below the largest float16 and
// float32, and the division by l cancels the common factor.
constexpr float kSlack = 8;

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

// 1 / number in one instruction, with an error of at most one ulp; a subnormal input counts as 0.
CUTLASS_DEVICE float reciprocal(float number) {
  float found;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(number));
  return found;
}

// Transposes the 8 x 8 matrix of 16-bit elements that a warp holds: lane i has row i / 4, columns 2 * (i % 4) and the
// one after it. All 32 lanes must call it.
CUTLASS_DEVICE uint32_t transposed(uint32_t part) {
  uint32_t found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(part));
  return found;
}

// True if `holds` for any thread of the calling warpgroup: a barrier with an OR reduction, on a named barrier that
// nothing else uses. Like any barrier it also makes earlier writes to shared memory visible to the warpgroup. CUTLASS's
// NamedBarrier has no reduction, hence the PTX; the offset is the one that NamedBarrier::sync adds.
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

// Sets m to `new_max`, which is not smaller, and returns the factor by which l and O of the row (decode: column) are
// rescaled.
CUTLASS_DEVICE float raise(float& row_max, float new_max, float scale2) {
  // Return exactly 1 if m is unchanged: the compiler may fuse the multiplication and the difference into one FMA,
  // whose single rounding can give another value. If m is raised from -inf, the factor is 0: l and O hold nothing yet.
  const float rescale = row_max == new_max ? 1.0f : power_of_two(row_max * scale2 - subtrahend(new_max, scale2));
  row_max = new_max;
  return rescale;
}

// lse of a row, in natural logarithms; -inf for a row that sees no key.
CUTLASS_DEVICE float log_sum_exp(float row_max, float row_sum, float scale) {
  return row_sum == 0 ? -INFINITY : subtrahend(row_max, scale) + logf(row_sum);
}

}  // namespace tilewright::paged
