// Warpgroups 2 and 3 of packed attention: chunk items. Read after packed_loads.cuh and before packed_decode.cuh
// (packed_hopper.cuh has the overview).
#pragma once

#include <climits>

#include "packed_math.cuh"
#include "packed_storage.cuh"

namespace tilewright::paged {

// Chunk items: two warpgroups, each with 64 of the 128 rows. `half` is 0 or 1. In the wgmma accumulators S and O a
// thread holds two rows, first_row and first_row + 8, and of each two of every 8 columns: element i has row i / 2 % 2.
// The four lanes of a quad share these rows.
template <class Element, int kHeadDim>
CUTLASS_DEVICE void PackedHopper<Element, kHeadDim>::prefill(const Params& p, SharedStorage& storage, int half) {
  Chunks& s = storage.chunks;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const int first_row = half * 64 + 16 * warp + lane / 4;  // the thread's other row is 8 below
  // Token and offset in [tokens, heads] of the thread's two rows, relative to the item's first row.
  const int tokens[2] = {token_of(p, first_row), token_of(p, first_row + 8)};
  const int row_offsets[2] = {int(row_of(p, 0, first_row)), int(row_of(p, 0, first_row + 8))};
  // Staging of O: where stmatrix of this lane writes its 16-byte chunk, and where the lane reads a chunk of its row.
  // Chunks of a row are permuted against bank conflicts.
  uint4* const out_staging = storage.out_staging[kWarps * half + warp];
  const int store_index = lane % 8 * 4 + (lane / 8 ^ lane % 8 / 2), load_index = lane / 4 * 4 + (lane % 4 ^ lane / 8);
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
  Tensor probabilities = make_tensor<Element>(partition_shape_A(mma_pv, cute::Shape<Int<kRows>, Int<kKeys>>{}));
  static_assert(decltype(size(logits))::value == kLogits && decltype(size(probabilities))::value == kLogits);
  static_assert(decltype(size(out))::value == kOut);
  mma_pv.accumulate_ = GMMA::ScaleOut::One;
  // m, m * scale2, l and the rescale factor of two rows. l is that of the thread's own keys until the end of the item,
  // where the quad adds up; the others are equal in a quad.
  float row_max[2], subtracted[2], row_sum[2], rescale[2];
  int limit[2];  // bits of m + slack as an int, or INT_MIN if that is negative
  const int all_present = (1 << (kKeys >> p.piece_bits)) - 1;
  uint32_t consumed = 0, cleared_units = 0;  // units consumed; zeroed V units consumed
  // Half 0 goes first: this arrival stands for the one with which half 1 otherwise ends its turn. From then on sync and
  // arrive alternate on both barriers, across items too, since both halves skip the same items (`both`).
  if (half == 1) cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, kPingPong);

  for (int count = 0;; ++count) {
    s.wait_for_query(count);
    const Item& item = s.items[count % Chunks::kItemSlots];
    const int blocks = item.blocks;
    if (blocks < 0) return;
    const Limits limits = Limits::template of<kKeys>(item);
    // This warpgroup has no row: only release the units, for which the copy warp waits from both warpgroups.
    if (item.count * p.group <= 64 * half) {
      s.release_query(count);
      for (int unit = 0; unit < 2 * blocks; ++unit) {
        s.wait(consumed + unit);
        s.release(consumed + unit);
      }
      consumed += 2 * blocks;
      cleared_units += limits.num_cleared();
      continue;
    }

    // Issues S = Q K^T of a K unit as one wgmma group.
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
    // Waits for a V unit, and issues O += P V of it as one wgmma group.
    auto start_out = [&](int block, uint32_t number) {
      const int unit = number % kUnits;
      s.wait(number);
      if (limits.clear(block)) s.wait_cleared(cleared_units++);
      warpgroup_fence_operand(probabilities);
      warpgroup_fence_operand(out);
      warpgroup_arrive();
      cute::gemm(mma_pv, probabilities, values(_, _, _, unit), out);
      warpgroup_commit_batch();
    };
    // Masks S of a block and turns S into P. Returns true if O must be rescaled by `rescale`. A small increase of the
    // maximum does not rescale, since P may exceed 1 (kSlack).
    auto softmax = [&](int block, int present, auto first) -> bool {
      if (limits.mask(block) || present != all_present) {
        const int start = (item.first + block) * kKeys;
        // One bit for each key of the thread, which holds two of every 8 neighbouring keys. The bits of missing pages
        // are 0.
        uint32_t key_bits = ~0u;
        if (present != all_present) {
          const int bits = p.piece_bits - 2;
          CUTLASS_PRAGMA_NO_UNROLL
          for (int piece = 0; piece < kKeys >> p.piece_bits; ++piece) {
            if (((present >> piece) & 1) == 0) key_bits &= ~(first_bits(1 << bits) << (piece << bits));
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
          const uint32_t visible_keys = key_bits & bits_before(high) & ~bits_before(low);
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < kLogits / 2; ++k) {
            if ((visible_keys & (1u << k)) == 0) logits(k / 2 * 4 + 2 * r + k % 2) = -INFINITY;
          }
        }
      }
      // Non-negative floats are ordered as their bits are, so __vimax3_s32 takes the maximum of three in one
      // instruction. Where m + slack is negative, limit is INT_MIN and the exact test below decides.
      bool exceeds_limit = false;
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < (first ? 0 : 2); ++r) {
        int max_bits[2] = {INT_MIN, INT_MIN};
        CUTLASS_PRAGMA_UNROLL
        for (int i = 2 * r; i < kLogits; i += 4) {
          int& largest = max_bits[i / 4 % 2];
          largest = __vimax3_s32(largest, __float_as_int(logits(i)), __float_as_int(logits(i + 1)));
        }
        exceeds_limit = exceeds_limit || max(max_bits[0], max_bits[1]) > limit[r];
      }
      bool raised = false;
      // The first block of an item has no m yet. For later ones the maximum over the quad and the exact test are needed
      // only if some row of the warp may exceed m + slack.
      if (first || __any_sync(~0u, exceeds_limit)) {
        float block_max[2];
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          block_max[r] = logits(2 * r);
          CUTLASS_PRAGMA_UNROLL
          for (int i = 2 * r; i < kLogits; i += 4) block_max[r] = fmaxf(block_max[r], fmaxf(logits(i), logits(i + 1)));
          block_max[r] = fmaxf(block_max[r], __shfl_xor_sync(~0u, block_max[r], 1));
          block_max[r] = fmaxf(block_max[r], __shfl_xor_sync(~0u, block_max[r], 2));
        }
        raised = __any_sync(~0u, block_max[0] > row_max[0] + slack || block_max[1] > row_max[1] + slack);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          // Decide for each row alone: padding rows must not change the result of others.
          const float new_max = block_max[r] > row_max[r] + slack ? block_max[r] : row_max[r];
          rescale[r] = raise(row_max[r], new_max, scale2);
          subtracted[r] = subtrahend(new_max, scale2);
          limit[r] = new_max + slack >= 0 ? __float_as_int(new_max + slack) : INT_MIN;
          row_sum[r] *= rescale[r];
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 2 * r; i < kLogits; i += 4) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = i; j < i + 2; ++j) {
            logits(j) = power_of_two(fmaf(logits(j), scale2, -subtracted[r]));
            row_sum[r] += logits(j);
          }
        }
      }
      return raised;
    };
    // P overwrites the registers that the PV of the previous block reads: call it after that wgmma is complete.
    auto convert_probabilities = [&] { convert<Element, kLogits>(logits.data(), probabilities.data()); };

    clear(out);
    row_max[0] = row_max[1] = -INFINITY;
    subtracted[0] = subtracted[1] = row_sum[0] = row_sum[1] = 0;
    limit[0] = limit[1] = INT_MIN;
    const bool both = item.count * p.group > 64;  // both warpgroups have rows
    if (blocks == 0) {
      s.release_query(count);
    } else {
      int present = s.wait_for_keys(consumed);
      start_logits(consumed);
      warpgroup_wait<0>();
      warpgroup_fence_operand(logits);
      s.release(consumed);
      if (blocks == 1) s.release_query(count);
      softmax(0, present, true_type{});
      convert_probabilities();
      CUTLASS_PRAGMA_NO_UNROLL
      for (int block = 1; block < blocks; ++block) {
        const uint32_t key_unit = ++consumed, value_unit = ++consumed;
        present = s.wait_for_keys(key_unit);
        // Ping-pong: one warpgroup issues its wgmmas while the other computes its softmax. The other arrives on this
        // barrier once its S is complete.
        if (both) cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, uint32_t(kPingPong + half));
        start_logits(key_unit);
        start_out(block - 1, value_unit);
        // At most one group, the younger PV, is still in flight: S is complete.
        warpgroup_wait<1>();
        if (both) cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, uint32_t(kPingPong + 1 - half));
        warpgroup_fence_operand(logits);
        s.release(key_unit);
        if (block + 1 == blocks) s.release_query(count);
        const bool raised = softmax(block, present, false_type{});
        warpgroup_wait<0>();
        warpgroup_fence_operand(out);
        s.release(value_unit);
        convert_probabilities();
        if (raised) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kOut; ++i) out(i) *= rescale[i / 2 % 2];
        }
      }
      start_out(blocks - 1, ++consumed);
      warpgroup_wait<0>();
      warpgroup_fence_operand(out);
      s.release(consumed);
      ++consumed;
    }

    const int rows = item.count * p.group;
    const int64_t base = first_row_of(p, item);
    float inverse_sum[2];
    Element* to[2];
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance <= 2; distance *= 2) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], distance);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      inverse_sum[r] = row_sum[r] == 0 ? 0.0f : reciprocal(row_sum[r]);
      to[r] = p.out + (base + row_offsets[r]) * kHeadDim + lane % 4 * 8;
    }
    // Store O through shared memory, so that a row gets 64 bytes per store: segments below 32 bytes were much slower.
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOut; i += 16) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        uint32_t words[4];
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 4; ++k) {
          const int at = i + 4 * k + 2 * r;
          words[k] = pack<Element>(out(at) * inverse_sum[r], out(at + 1) * inverse_sum[r]);
        }
        SM90_U32x4_STSM_N::copy(words[0], words[1], words[2], words[3],
                                reinterpret_cast<uint128_t&>(out_staging[32 * r + store_index]));
      }
      __syncwarp();
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const uint4 chunk = out_staging[32 * r + load_index];
        if (first_row + 8 * r < rows) *reinterpret_cast<uint4*>(to[r] + 2 * i) = chunk;
      }
      __syncwarp();
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (lane % 4 != 0 || first_row + 8 * r >= rows) continue;
      p.lse[base + row_offsets[r]] = log_sum_exp(row_max[r], row_sum[r], p.scale);
    }
  }
}

}  // namespace tilewright::paged
