// Warpgroup 1 of packed attention: decode items, and the combination of their split-KV parts. Read after
// packed_prefill.cuh (packed_hopper.cuh has the overview).
#pragma once

#include "packed_math.cuh"
#include "packed_storage.cuh"

namespace tilewright::paged {

// Stores the O, m and l that the decode warpgroup holds in registers as one split-KV part.
template <class Element, int kHeadDim>
template <class Out>
CUTLASS_DEVICE void PackedHopper<Element, kHeadDim>::store_part(Partial& part, const Out& out,
                                                                const float (&row_max)[2], const float (&row_sum)[2]) {
  const int thread = threadIdx.x % kWarpgroup;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4 * kHalves; ++i) part.out[i][thread] = out(i);
  CUTLASS_PRAGMA_UNROLL
  for (int c = 0; c < 2; ++c) {
    if (thread >= 4) continue;  // m and l are equal in all threads of a column; threads 0 to 3 have all 8 columns
    part.row_max[2 * thread + c] = row_max[c];
    part.row_sum[2 * thread + c] = row_sum[c];
  }
}

// Adds a part to the O, m and l in registers: both are rescaled to the larger m. The loads bypass the L1 cache, which
// may hold lines from before another CTA wrote the part.
template <class Element, int kHeadDim>
template <class Out>
CUTLASS_DEVICE void PackedHopper<Element, kHeadDim>::add_part(const Partial& part, Out& out, float (&row_max)[2],
                                                              float (&row_sum)[2], float scale2) {
  const int thread = threadIdx.x % kWarpgroup;
  float part_max[2], part_sum[2], part_out[4 * kHalves];  // all loads are issued before the first use
  CUTLASS_PRAGMA_UNROLL
  for (int c = 0; c < 2; ++c) {
    part_max[c] = __ldcg(&part.row_max[thread % 4 * 2 + c]);
    part_sum[c] = __ldcg(&part.row_sum[thread % 4 * 2 + c]);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4 * kHalves; ++i) part_out[i] = __ldcg(&part.out[i][thread]);
  CUTLASS_PRAGMA_UNROLL
  for (int c = 0; c < 2; ++c) {
    const float rescale = raise(row_max[c], fmaxf(row_max[c], part_max[c]), scale2);
    const float part_scale = raise(part_max[c], row_max[c], scale2);
    row_sum[c] = row_sum[c] * rescale + part_sum[c] * part_scale;
    CUTLASS_PRAGMA_UNROLL
    for (int i = c; i < 4 * kHalves; i += 2) out(i) = out(i) * rescale + part_out[i] * part_scale;
  }
}

// Decode items: one warpgroup. An item's rows are the columns of S^T [64 keys, 8] and O^T [head_dim, 8]. In the wgmma
// accumulators a thread holds two columns, `column` and the one after it, of keys (or head dims) lane / 4 and
// lane / 4 + 8 of its warp's 16: element i has column i % 2 and row i / 2 % 2. Hence m and l of a column are reduced
// over the 8 lanes that share it, by shuffles, and over the four warps, through shared memory.
template <class Element, int kHeadDim>
CUTLASS_DEVICE void PackedHopper<Element, kHeadDim>::decode(const Params& p, SharedStorage& storage) {
  Decoded& s = storage.decoded;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const int column = lane % 4 * 2;             // the thread also holds column + 1
  const int first_key = 16 * warp + lane / 4;  // key within the block; the thread also holds first_key + 8
  const float scale2 = p.scale * kLog2e, slack = kSlack / scale2;
  const int all_present = (1 << (kDecodedKeys >> p.piece_bits)) - 1;

  MmaKQ mma_kq;
  MmaVP mma_vp;
  const auto kq = mma_kq.get_thread_slice(0);
  const auto vp = mma_vp.get_thread_slice(0);
  Tensor keys = kq.partition_fragment_A(
      make_tensor(make_smem_ptr(s.unit[0]), KeyLayout<kDecodedKeys, kDecodedUnits>{}));
  Tensor values = vp.partition_fragment_A(
      make_tensor(make_smem_ptr(s.unit[0]), ValueLayout<kDecodedKeys, kDecodedUnits>{}));
  Tensor queries = kq.partition_fragment_B(
      make_tensor(make_smem_ptr(s.query[0]), RowLayout<kColumns, kHeadDim, Decoded::kQueries>{}));
  Tensor probabilities = vp.partition_fragment_B(
      make_tensor(make_smem_ptr(storage.probabilities[0]), RowLayout<kColumns, kDecodedKeys, kProbabilityBuffers>{}));
  Tensor logits = partition_fragment_C(mma_kq, cute::Shape<Int<kDecodedKeys>, Int<kColumns>>{});
  Tensor out = partition_fragment_C(mma_vp, cute::Shape<Int<kHeadDim>, Int<kColumns>>{});
  static_assert(decltype(size(logits))::value == 4 && decltype(size(out))::value == 4 * kHalves);
  mma_vp.accumulate_ = GMMA::ScaleOut::One;
  // m, l and the rescale factor of two columns. l is that of the thread's own keys until the end of the item.
  float row_max[2], row_sum[2], rescale[2];
  uint32_t consumed = 0, cleared_units = 0;  // units consumed; zeroed V units consumed

  for (int count = 0;; ++count) {
    s.wait_for_query(count);
    const Item& item = s.items[count % Decoded::kItemSlots];
    const int blocks = item.blocks;
    if (blocks < 0) return;
    const Limits limits = Limits::template of<kDecodedKeys>(item);
    const uint32_t earlier = consumed / 2;  // KV blocks of earlier items
    // P is a ring: warps that lag may still have wgmmas that read P of the previous block.
    auto buffer_of = [&](int block) { return (earlier + block) % kProbabilityBuffers; };

    // Issues S^T = K Q^T of a K unit as one wgmma group.
    auto start_logits = [&](uint32_t number) {
      const int unit = number % kDecodedUnits;
      warpgroup_fence_operand(logits);
      warpgroup_arrive();
      mma_kq.accumulate_ = GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < size<2>(keys); ++k) {
        cute::gemm(mma_kq, keys(_, _, k, unit), queries(_, _, k, count % Decoded::kQueries), logits);
        mma_kq.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
    };
    // Waits for a V unit, and issues O^T += V^T P^T of it as one wgmma group.
    auto start_out = [&](int block, uint32_t number) {
      const int unit = number % kDecodedUnits;
      s.wait(number);
      if (limits.clear(block)) s.wait_cleared(cleared_units++);
      warpgroup_fence_operand(out);
      warpgroup_arrive();
      cute::gemm(mma_vp, values(_, _, _, unit), probabilities(_, _, _, buffer_of(block)), out);
      warpgroup_commit_batch();
    };
    // Turns S into P with the m of the earlier blocks and writes P to shared memory. Only the vote, after all threads
    // have written, tells whether some logit exceeds m + slack; m is then raised and P is written again.
    auto softmax = [&](int block, int present) -> bool {
      if (limits.mask(block) || present != all_present) {
        const int start = (item.first + block) * kDecodedKeys;
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 2; ++c) {
          const int position = item.position + token_of(p, column + c) - start;
          const int low = max(position - p.left, -start);
          const int high = min(position + p.right + 1, item.length - start);
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 2; ++r) {
            const int key = first_key + 8 * r;
            if (key < low || key >= high || ((present >> (key >> p.piece_bits)) & 1) == 0) {
              logits(2 * r + c) = -INFINITY;
            }
          }
        }
      }
      // P in the layout of the shared-memory operand: row lane / 4 of P (a column here), its 16-byte chunks permuted by
      // the swizzle. The async-proxy fence orders these writes before the wgmma reads; the vote or kStep, which follows
      // each call, extends that to the writes of the other warps.
      auto write = [&](float (&found)[4]) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          found[i] = power_of_two(fmaf(logits(i), scale2, -subtrahend(row_max[i % 2], scale2)));
        }
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          // After the transpose a lane holds two neighbouring keys of column lane / 4.
          const uint32_t word = transposed(pack<Element>(found[2 * r], found[2 * r + 1]));
          const int chunk = (2 * warp + r) ^ (lane / 4);
          Element* const row = storage.probabilities[buffer_of(block)] + lane / 4 * kDecodedKeys;
          *reinterpret_cast<uint32_t*>(row + chunk * 8 + lane % 4 * 2) = word;
        }
        cutlass::arch::fence_view_async_shared();
      };
      float found[4], block_max[2];
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < 2; ++c) block_max[c] = fmaxf(logits(c), logits(2 + c));
      write(found);
      const bool raised =
          any_of_warpgroup(kVote, block_max[0] > row_max[0] + slack || block_max[1] > row_max[1] + slack);
      if (raised) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 2; ++c) {
          CUTLASS_PRAGMA_UNROLL
          for (int distance = 4; distance < 32; distance *= 2) {
            block_max[c] = fmaxf(block_max[c], __shfl_xor_sync(~0u, block_max[c], distance));
          }
          if (lane < 4) storage.block_max[warp][column + c] = block_max[c];
        }
        sync_warpgroup(kStep);
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 2; ++c) {
          CUTLASS_PRAGMA_UNROLL
          for (int w = 0; w < kWarps; ++w) block_max[c] = fmaxf(block_max[c], storage.block_max[w][column + c]);
          rescale[c] = raise(row_max[c], block_max[c] > row_max[c] + slack ? block_max[c] : row_max[c], scale2);
          row_sum[c] *= rescale[c];
        }
        // Each thread overwrites its own elements of P. The barrier also separates the reads of storage.block_max above
        // from its next writes.
        write(found);
        sync_warpgroup(kStep);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) row_sum[i % 2] += found[i];
      return raised;
    };

    clear(out);
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0;
    // Each unit is released as soon as it has been read. Overlapping the wgmmas of two blocks would hold units longer
    // and leave fewer loads in flight.
    if (blocks == 0) s.release_query(count);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int block = 0; block < blocks; ++block) {
      const int present = s.wait_for_keys(consumed);
      start_logits(consumed);
      warpgroup_wait<0>();
      warpgroup_fence_operand(logits);
      if (block + 1 == blocks) s.release_query(count);
      // Throttle the decode loads: K is released only after softmax, and while chunks still load, K of every other
      // block only when PV has been issued. With fewer decode loads in flight, the loads of chunks arrive sooner. Warps
      // may read `loading` differently; each only chooses when it arrives itself.
      const bool yielding = consumed / 2 % 2 == 0 && storage.chunks.loading;
      const bool raised = softmax(block, present);
      if (!yielding) s.release(consumed);
      if (raised) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4 * kHalves; ++i) out(i) *= rescale[i % 2];
      }
      start_out(block, consumed + 1);
      if (yielding) s.release(consumed);
      ++consumed;
      warpgroup_wait<0>();
      warpgroup_fence_operand(out);
      s.release(consumed);
      ++consumed;
    }
    if (blocks > 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < 2; ++c) {
        CUTLASS_PRAGMA_UNROLL
        for (int distance = 4; distance < 32; distance *= 2) row_sum[c] += __shfl_xor_sync(~0u, row_sum[c], distance);
        if (lane < 4) storage.row_sum[warp][column + c] = row_sum[c];
      }
      // No barrier is needed after the reads: storage.row_sum is next written after a barrier of the next item that has
      // keys.
      sync_warpgroup(kStep);
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < 2; ++c) {
        row_sum[c] = 0;
        CUTLASS_PRAGMA_UNROLL
        for (int w = 0; w < kWarps; ++w) row_sum[c] += storage.row_sum[w][column + c];
      }
    }

    if (item.parts > 1) {
      Partial* const all = p.partials + item.slot;
      // Every thread makes its part of O visible to the device before thread 0 counts the part as arrived: fence, then
      // barrier, then atomic.
      store_part(all[item.part], out, row_max, row_sum);
      __threadfence();
      sync_warpgroup(kStep);
      if (thread == 0) storage.last = atomicAdd(p.arrived + item.slot, 1) == item.parts - 1;
      sync_warpgroup(kStep);
      if (!storage.last) continue;
      // All parts have arrived. The last CTA combines them in a fixed order, so the result is deterministic. The fence
      // orders the reads after the atomic, which only thread 0 has performed.
      __threadfence();
      clear(out);
      row_max[0] = row_max[1] = -INFINITY;
      row_sum[0] = row_sum[1] = 0;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int part = 0; part < item.parts; ++part) add_part(all[part], out, row_max, row_sum, scale2);
    }

    const int64_t base = first_row_of(p, item);
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < 2; ++c) {
      if (column + c >= item.count * p.group) continue;
      const int64_t to = row_of(p, base, column + c);
      if (thread < 4) p.lse[to] = log_sum_exp(row_max[c], row_sum[c], p.scale);
      const float inverse_sum = row_sum[c] == 0 ? 0.0f : 1 / row_sum[c];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kHalves; ++i) {
        p.out[to * kHeadDim + i / 2 * kHalf + first_key + i % 2 * 8] = Element(out(2 * i + c) * inverse_sum);
      }
    }
  }
}

}  // namespace tilewright::paged
