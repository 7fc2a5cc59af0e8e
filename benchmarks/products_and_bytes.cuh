// Matrix products beside bytes that are read, and nothing else: what a kernel that needs as many of both cannot beat.
//
// A block stays on each multiprocessor. Two of its warpgroups multiply the same 128 × 128 with the same 128 × 256 out of
// shared memory again and again; a thread of the third reads the block's share of an array, 64 KB at a time under way.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "tilewright/warpgroup.cuh"

namespace tilewright::limits {

using namespace cute;

struct ProductsAndBytes {
  using Element = cutlass::bfloat16_t;
  static constexpr int kRows = 128, kColumns = 256, kInner = 128;
  static constexpr int kSlots = 8, kSlotBytes = 8192;
  static constexpr int kThreads = 3 * kWarpgroup;
  using LayoutA = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, cute::Shape<Int<kRows>, Int<kInner>>{}));
  using LayoutB =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, cute::Shape<Int<kColumns>, Int<kInner>>{}));
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, cute::Shape<_64, Int<kColumns>, Int<kInner>>, GMMA::Major::K,
                           GMMA::Major::K>(), cute::Layout<cute::Shape<_2, _1, _1>>{}));
  using Full = cutlass::arch::ClusterTransactionBarrier;

  struct SharedStorage {
    alignas(1024) Element a[kRows * kInner];
    alignas(1024) Element b[kColumns * kInner];
    alignas(1024) char slots[kSlots][kSlotBytes];
    typename Full::ValueType full[kSlots];
  };

  struct Params {
    const char* data;
    float* sums;  // of each thread, so that no product can be left out
    int products, copies;
  };

  static Facts facts() { return {int64_t(sizeof(SharedStorage)), kThreads, 1}; }

  static int64_t workspace(const Problem&) { return 0; }

  static ffi::Error run(cudaStream_t stream, const Device& device, const Problem& problem, const Arguments& arguments) {
    const Params p{input<char>(arguments, 0), output<float>(arguments, 0), int(problem.products), int(problem.copies)};
    return launch<run_kernel<ProductsAndBytes>>(dim3(unsigned(device.multiprocessors)), dim3(kThreads),
                                                sizeof(SharedStorage), stream, p);
  }

  CUTLASS_DEVICE void operator()(const Params& p, SharedStorage& s) const {
#if defined(CUTLASS_ARCH_MMA_SM90A_ENABLED)
    const Element* const values = reinterpret_cast<const Element*>(p.data);
    for (int i = threadIdx.x; i < kRows * kInner; i += kThreads) s.a[i] = values[i];
    for (int i = threadIdx.x; i < kColumns * kInner; i += kThreads) s.b[i] = values[kRows * kInner + i];
    if (threadIdx.x == 0) {
      for (int i = 0; i < kSlots; ++i) Full::init(&s.full[i], 1);
      cutlass::arch::fence_barrier_init();
    }
    cutlass::arch::fence_view_async_shared();
    __syncthreads();
    if (threadIdx.x >= 2 * kWarpgroup) {
      cutlass::arch::warpgroup_reg_dealloc<40>();
      if (threadIdx.x == 2 * kWarpgroup) read(p, s);
    } else {
      cutlass::arch::warpgroup_reg_alloc<232>();
      multiply(p, s);
    }
#endif
  }

  static CUTLASS_DEVICE void read(const Params& p, SharedStorage& s) {
    const char* const mine = p.data + int64_t(blockIdx.x) * p.copies * kSlotBytes;
    for (int i = 0; i < p.copies + kSlots; ++i) {
      const int slot = i % kSlots;
      if (i >= kSlots && i - kSlots < p.copies) Full::wait(&s.full[slot], (i / kSlots + 1) % 2);
      if (i >= p.copies) continue;
      Full::arrive_and_expect_tx(&s.full[slot], kSlotBytes);
      SM90_BULK_COPY_G2S::copy(mine + int64_t(i) * kSlotBytes, &s.full[slot], s.slots[slot], kSlotBytes);
    }
  }

  static CUTLASS_DEVICE void multiply(const Params& p, SharedStorage& s) {
    Mma mma;
    const auto slice = mma.get_thread_slice(threadIdx.x);
    Tensor a = slice.partition_fragment_A(make_tensor(make_smem_ptr(s.a), LayoutA{}));
    Tensor b = slice.partition_fragment_B(make_tensor(make_smem_ptr(s.b), LayoutB{}));
    Tensor sums = partition_fragment_C(mma, cute::Shape<Int<kRows>, Int<kColumns>>{});
    clear(sums);
    mma.accumulate_ = GMMA::ScaleOut::One;
    for (int i = 0; i < p.products; ++i) {
      warpgroup_fence_operand(sums);
      warpgroup_arrive();
      cute::gemm(mma, a, b, sums);
      warpgroup_commit_batch();
      warpgroup_wait<1>();
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    float total = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(sums); ++i) total += sums(i);
    p.sums[blockIdx.x * 2 * kWarpgroup + threadIdx.x] = total;
  }
};

}  // namespace tilewright::limits
