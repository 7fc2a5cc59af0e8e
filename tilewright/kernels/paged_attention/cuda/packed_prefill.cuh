// Warpgroups 2 and 3 of packed attention: chunk items. Read after packed_loads.cuh and before packed_decode.cuh
// (packed_hopper.cuh has the overview).
#pragma once

#include <climits>

#include "packed_math.cuh"
#include "packed_storage.cuh"

namespace tilewright::paged {

// Chunk items: two warpgroups, each with 64 of the 128 rows. `half` is 0 or 1.
template <class Element, int kHeadDim>
CUTLASS_DEVICE void PackedHopper<Element, kHeadDim>::attend(const Params& p, SharedStorage& storage, int half) {
  Chunks& s = storage.chunks;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const int first_row = half * 64 + 16 * warp + lane / 4;  // the thread's other row is 8 below
  // Token and offset in [tokens, heads] of the thread's two rows, relative to the item's first row.
  const int tokens[2] = {token_of(p, first_row), token_of(p, first_row + 8)};
  const int places[2] = {int(row_of(p, 0, first_row)), int(row_of(p, 0, first_row + 8))};
  // Staging of O: where stmatrix of this lane writes its 16-byte chunk, and where the lane reads a chunk of its row.
  // Chunks of a row are permuted against bank conflicts.
  uint4* const results = storage.results[kWarps * half + warp];
  const int stored = lane % 8 * 4 + (lane / 8 ^ lane % 8 / 2), loaded = lane / 4 * 4 + (lane % 4 ^ lane / 8);
  const float scale2 = p.scale * kLog2e, slack = kSlack / scale2;

  MmaQK mma_qk;
  MmaPV mma_pv;
  const auto qk = mma_qk.get_thread_slice(half * kWarpgroup);
  const auto pv = mma_pv.get_thread_slice(half * kWarpgroup);
  Tensor queries = qk.partition_fragment_A(make_tensor(make_smem_ptr(s.query[0]), RowLayout<kRows, kHeadDim, 1>{}));
  Tensor keys = qk.partition_fragment_B(make_tensor(make_smem_ptr(s.unit[0]), KeyLayout<kKeys, kUnits>{}));
  Tensor values = pv.partition_fragment_B(make_tensor(make_smem_ptr(s.unit[0]), ValueLayout<kKeys, kUnits>{}));
  Tensor logits = partition_fragment_C(mma_qk, cute::Shape<Int<kRows>, Int<kKeys>>{});
  Tensor out = partition_fragment_C(mma_pv, cute::Shape<Int<kRows>, Int<kHeadDim>>{});
  Tensor weights = make_tensor<Element>(partition_shape_A(mma_pv, cute::Shape<Int<kRows>, Int<kKeys>>{}));
  static_assert(decltype(size(logits))::value == kLogits && decltype(size(weights))::value == kLogits);
  static_assert(decltype(size(out))::value == kOut);
  mma_pv.accumulate_ = GMMA::ScaleOut::One;
  float row_max[2], subtracted[2], total[2], shrink[2];  // m, m * scale2, l and the rescale factor of two rows
  int limit[2];  // bits of m + slack as an int, or INT_MIN if that is negative
  const int all_present = (1 << (kKeys >> p.piece_bits)) - 1;
  uint32_t taken = 0, clears = 0;  // units consumed; zeroed V units consumed
  if (half == 1) cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, kPingPong);  // half 0 goes first

  for (int count = 0;; ++count) {
    s.wait_for_query(count);
    const Item& item = s.items[count % Chunks::kPlaces];
    const int blocks = item.blocks;
    if (blocks < 0) return;
    const Limits limits = Limits::template of<kKeys>(item);
    if (item.count * p.group <= 64 * half) {  // this warpgroup has no row: only release the units
      s.release_query(count);
      for (int unit = 0; unit < 2 * blocks; ++unit) {
        s.wait(taken + unit);
        s.release(taken + unit);
      }
      taken += 2 * blocks;
      clears += limits.clears();
      continue;
    }

    auto start_logits = [&](uint32_t number) {
      warpgroup_fence_operand(logits);
      warpgroup_arrive();
      mma_qk.accumulate_ = GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < size<2>(queries); ++k) {
        cute::gemm(mma_qk, queries(_, _, k, 0), keys(_, _, k, number % kUnits), logits);
        mma_qk.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
    };
    auto start_out = [&](int block, uint32_t number) {
      const int unit = number % kUnits;
      s.wait(number);
      if (limits.clear(block)) s.wait_cleared(clears++);
      warpgroup_fence_operand(weights);
      warpgroup_fence_operand(out);
      warpgroup_arrive();
      cute::gemm(mma_pv, weights, values(_, _, _, unit), out);
      warpgroup_commit_batch();
    };
    // Masks S of a block and turns S into P. Returns true if O must be rescaled by `shrink`. A small increase of the
    // maximum does not rescale, since P may exceed 1 (kSlack).
    auto softmax = [&](int block, int present, auto first) -> bool {
      if (limits.mask(block) || present != all_present) {
        const int start = (item.first + block) * kKeys;
        // One bit for each key of the thread, which holds two of every 8 neighbouring keys. The bits of missing pages
        // are 0.
        uint32_t there = ~0u;
        if (present != all_present) {
          const int bits = p.piece_bits - 2;
          CUTLASS_PRAGMA_NO_UNROLL
          for (int piece = 0; piece < kKeys >> p.piece_bits; ++piece) {
            if (((present >> piece) & 1) == 0) there &= ~(first_bits(1 << bits) << (piece << bits));
          }
        }
        auto bits_before = [&](int key) {
          const int behind = key - lane % 4 * 2;  // keys from the thread's first key on
          return first_bits(max((behind >> 3) * 2 + min(behind & 7, 2), 0));
        };
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int position = item.position + tokens[r] - start;
          const int low = max(position - p.left, -start);
          const int high = min(position + p.right + 1, item.length - start);
          const uint32_t visible_keys = there & bits_before(high) & ~bits_before(low);
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < kLogits / 2; ++k) {
            if ((visible_keys & (1u << k)) == 0) logits(k / 2 * 4 + 2 * r + k % 2) = -INFINITY;
          }
        }
      }
      // Non-negative floats are ordered as their bits are, so __vimax3_s32 takes the maximum of three in one
      // instruction. Where m + slack is negative, limit is INT_MIN and the exact test below decides.
      bool beyond = false;
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < (first ? 0 : 2); ++r) {
        int most[2] = {INT_MIN, INT_MIN};
        CUTLASS_PRAGMA_UNROLL
        for (int i = 2 * r; i < kLogits; i += 4) {
          int& one = most[i / 4 % 2];
          one = __vimax3_s32(one, __float_as_int(logits(i)), __float_as_int(logits(i + 1)));
        }
        beyond = beyond || max(most[0], most[1]) > limit[r];
      }
      bool raised = false;
      if (first || __any_sync(~0u, beyond)) {  // the first block of an item has no m yet
        float most[2];
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          most[r] = logits(2 * r);
          CUTLASS_PRAGMA_UNROLL
          for (int i = 2 * r; i < kLogits; i += 4) most[r] = fmaxf(most[r], fmaxf(logits(i), logits(i + 1)));
          most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
          most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
        }
        raised = __any_sync(~0u, most[0] > row_max[0] + slack || most[1] > row_max[1] + slack);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          // Decide for each row alone: padding rows must not change the result of others.
          const float now = most[r] > row_max[r] + slack ? most[r] : row_max[r];
          shrink[r] = raise(row_max[r], now, scale2);
          subtracted[r] = subtrahend(now, scale2);
          limit[r] = now + slack >= 0 ? __float_as_int(now + slack) : INT_MIN;
          total[r] *= shrink[r];
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 2 * r; i < kLogits; i += 4) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = i; j < i + 2; ++j) {
            logits(j) = power_of_two(fmaf(logits(j), scale2, -subtracted[r]));
            total[r] += logits(j);
          }
        }
      }
      return raised;
    };
    auto narrow = [&] { convert<Element, kLogits>(logits.data(), weights.data()); };

    clear(out);
    row_max[0] = row_max[1] = -INFINITY;
    subtracted[0] = subtracted[1] = total[0] = total[1] = 0;
    limit[0] = limit[1] = INT_MIN;
    const bool both = item.count * p.group > 64;
    if (blocks == 0) {
      s.release_query(count);
    } else {
      int present = s.wait_for_keys(taken);
      start_logits(taken);
      warpgroup_wait<0>();
      warpgroup_fence_operand(logits);
      s.release(taken);
      if (blocks == 1) s.release_query(count);
      softmax(0, present, true_type{});
      narrow();
      CUTLASS_PRAGMA_NO_UNROLL
      for (int block = 1; block < blocks; ++block) {
        const uint32_t of_keys = ++taken, of_values = ++taken;
        present = s.wait_for_keys(of_keys);
        // Ping-pong: one warpgroup issues its wgmmas while the other computes its softmax. The other arrives on this
        // barrier once its S is complete.
        if (both) cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, uint32_t(kPingPong + half));
        start_logits(of_keys);
        start_out(block - 1, of_values);
        warpgroup_wait<1>();
        if (both) cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, uint32_t(kPingPong + 1 - half));
        warpgroup_fence_operand(logits);
        s.release(of_keys);
        if (block + 1 == blocks) s.release_query(count);
        const bool raised = softmax(block, present, false_type{});
        warpgroup_wait<0>();
        warpgroup_fence_operand(out);
        s.release(of_values);
        narrow();
        if (raised) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kOut; ++i) out(i) *= shrink[i / 2 % 2];
        }
      }
      start_out(blocks - 1, ++taken);
      warpgroup_wait<0>();
      warpgroup_fence_operand(out);
      s.release(taken);
      ++taken;
    }

    const int rows = item.count * p.group;
    const int64_t base = first_row_of(p, item);
    float weight[2];
    Element* to[2];
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance <= 2; distance *= 2) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) total[r] += __shfl_xor_sync(~0u, total[r], distance);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      weight[r] = total[r] == 0 ? 0.0f : reciprocal(total[r]);
      to[r] = p.out + (base + places[r]) * kHeadDim + lane % 4 * 8;
    }
    // Store O through shared memory, so that a row gets 64 bytes per store: segments below 32 bytes were much slower.
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOut; i += 16) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        uint32_t words[4];
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 4; ++k) {
          words[k] = pack<Element>(out(i + 4 * k + 2 * r) * weight[r], out(i + 4 * k + 2 * r + 1) * weight[r]);
        }
        SM90_U32x4_STSM_N::copy(words[0], words[1], words[2], words[3],
                                reinterpret_cast<uint128_t&>(results[32 * r + stored]));
      }
      __syncwarp();
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const uint4 chunk = results[32 * r + loaded];
        if (first_row + 8 * r < rows) *reinterpret_cast<uint4*>(to[r] + 2 * i) = chunk;
      }
      __syncwarp();
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (lane % 4 != 0 || first_row + 8 * r >= rows) continue;
      p.lse[base + places[r]] = log_sum(row_max[r], total[r], p.scale);
    }
  }
}

}  // namespace tilewright::paged
