// Warps 0 to 3 of packed attention: `copy` issues the TMA loads of a queue, `look_ahead` takes its items and zeroes
// rows of V that no query sees. Read after packed_storage.cuh and before packed_prefill.cuh (packed_hopper.cuh has the
// overview).
#pragma once

#include "packed_storage.cuh"

namespace tilewright::paged {

// The look_ahead warp of a queue. It takes the next item when the copy warp arrives on `wanted`, and zeroes the rows
// of V that no query sees: such memory may hold NaN, and 0 * NaN is NaN.
template <class Element, int kHeadDim>
template <Queue kQueue, class Storage>
CUTLASS_DEVICE void PackedHopper<Element, kHeadDim>::look_ahead(const Params& p, Storage& s) {
  const int lane = threadIdx.x % 32;
  const Segment* const sorted =
      reinterpret_cast<const Segment*>(p.plan + 1) + (kQueue == kChunks ? 0 : p.sequences + 2);
  uint32_t earlier_units = 0, cleared_units = 0;  // units of earlier items; V units zeroed so far
  int last_rows = Storage::kKeys;  // visible rows in the last block of the previous item
  auto wait = [&](uint32_t unit) {
    // Wait first for `to_clear`, on which the copy warp arrives after it has issued this unit's load. Before that,
    // the parity of full[unit] may still be that of an earlier round. Afterwards it cannot change until
    // `cleared`: the readers that compute with the unit release it later.
    Empty::wait(&s.to_clear[cleared_units % Storage::kUnits], Storage::phase_of(cleared_units));
    s.wait(unit);
  };
  auto clear = [&](uint32_t unit, int from, int to) {
    // A warp zeroes four rows at a time: 8 lanes write the 128 bytes of a row's half, so swizzling does not matter.
    CUTLASS_PRAGMA_NO_UNROLL
    for (int row = from + lane / 8; row < to; row += 4) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        const int element = ((row / kGroup * kHalves + half) * kGroup + row % kGroup) * kHalf + lane % 8 * 8;
        *reinterpret_cast<uint4*>(s.unit[unit % Storage::kUnits] + element) = make_uint4(0, 0, 0, 0);
      }
    }
  };
  // Zeroes up to the end of the last page with visible keys. TMA has already written zeros behind it.
  auto clear_behind = [&](uint32_t unit, int row) {
    clear(unit, row, min((((row - 1) >> p.page_bits) + 1) << p.page_bits, Storage::kKeys));
  };
  // The async-proxy fence orders the zeros, written by the generic proxy, before the wgmma reads.
  auto cleared = [&] {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane == 0) Empty::arrive(&s.cleared[cleared_units % Storage::kUnits]);
    ++cleared_units;
  };
  for (int count = 0;; ++count) {
    // The plan gives item blockIdx.x to this CTA. Each later one is asked for while the copy warp loads the item before
    // it, so item `count` belongs to phase count - 1 of `wanted`.
    int number = int(blockIdx.x);
    if (count > 0) {
      Empty::wait(&s.wanted, (count - 1) % 2);
      if (lane == 0) number = atomicAdd(&p.plan->next[kQueue], 1);
      number = __shfl_sync(~0u, number, 0);
    }
    Item item;
    item.blocks = -1;
    const int items = p.plan->items[kQueue];
    if (number < items) {
      // Find the last segment whose first item is <= number: directly if no segment is split, else by a 32-way search
      // over the sorted segments.
      int low = 0, size = p.plan->segments[kQueue];
      if (kQueue == kDecoded && items == size * p.kv_heads) {
        low = number / p.kv_heads;
        size = 1;
      }
      while (size > 1) {
        const int step = (size + 31) / 32, at = lane * step;
        const bool begun = at < size && sorted[low + at].first_item <= number;
        const int passed = (__popc(__ballot_sync(~0u, begun)) - 1) * step;
        low += passed;
        size = min(step, size - passed);
      }
      const Segment segment = sorted[low];
      // Tiles of a chunk that read the same keys are adjacent in the queue. The tile with the last tokens sees the
      // most keys and comes first.
      const int in_segment = number - segment.first_item;
      const int nth = kQueue == kChunks ? in_segment % segment.items : in_segment / p.kv_heads;
      const int offset = kQueue == kChunks ? (segment.items - 1 - nth) * p.each[kChunks] : 0;
      item.sequence = segment.sequence;
      item.head = kQueue == kChunks ? in_segment / segment.items : in_segment % p.kv_heads;
      item.token = segment.token + offset;
      item.count = min(segment.count - offset, p.each[kQueue]);
      item.position = segment.position + offset;
      item.length = segment.length;
      auto within = [&](int key) { return min(max(key, 0), segment.length); };
      const VisibleKeys visible_keys = VisibleKeys::of(item.position, item.count, item.length, p.left, p.right);
      item.low = visible_keys.low;
      item.high = visible_keys.high;
      item.all_low = within(item.position + item.count - (p.left + 1));
      item.all_high = within(item.position + p.right + 1);
      item.first = item.low / Storage::kKeys;
      item.blocks = (item.high + Storage::kKeys - 1) / Storage::kKeys - item.first;
      if constexpr (kQueue == kDecoded) {
        item.part = nth;
        item.parts = segment.items;
        item.slot = segment.slot * p.kv_heads + item.head * segment.items;
        if (item.parts > 1) {
          const int each = (item.blocks + item.parts - 1) / item.parts;
          item.first += nth * each;
          item.blocks = min(item.blocks - nth * each, each);
          item.low = max(item.low, item.first * Storage::kKeys);
          item.high = min(item.high, (item.first + item.blocks) * Storage::kKeys);
        }
      }
    }
    if (lane == 0) {
      s.items[count % Storage::kItemSlots] = item;
      Empty::arrive(&s.ready);
    }
    // The last V unit of the previous item is zeroed only now, after the next item is written: waiting for its load
    // first would let the copy warp run out of items.
    if (last_rows < Storage::kKeys) {
      wait(earlier_units - 1);
      clear_behind(earlier_units - 1, last_rows);
      cleared();
    }
    if (item.blocks < 0) return;
    const Limits limits = Limits::template of<Storage::kKeys>(item);
    const int end = item.high - (item.first + item.blocks - 1) * Storage::kKeys;
    if (limits.cleared[0] >= 0) {
      // V0 follows K0 in the ring, or with kLate K1 if there is one.
      const uint32_t values = earlier_units + (item.blocks == 1 || !Storage::kLate ? 1 : 2);
      wait(values);
      clear(values, 0, item.low % Storage::kKeys);
      if (item.blocks == 1) clear_behind(values, end);
      cleared();
    }
    last_rows = limits.cleared[1] >= 0 ? end : Storage::kKeys;
    earlier_units += 2 * item.blocks;
  }
}

// The page that holds a key of a sequence. Columns outside the table, and invalid entries, give num_pages: TMA fills
// a page beyond the cache with zeros.
template <class Element, int kHeadDim>
CUTLASS_DEVICE int PackedHopper<Element, kHeadDim>::page_of(const Params& p, int sequence, int key, int columns) {
  const int column = key >> p.page_bits;
  const int page = column < columns ? p.table[int64_t(sequence) * p.columns + column] : p.num_pages;
  return unsigned(page) < unsigned(p.num_pages) ? page : p.num_pages;
}

// The index, over all pages, of the group of 8 rows that holds a key of a page.
template <class Element, int kHeadDim>
CUTLASS_DEVICE int PackedHopper<Element, kHeadDim>::group_of(const Params& p, int page, int key) {
  return (page << (p.page_bits - 3)) + (key & ((1 << p.page_bits) - 1)) / kGroup;
}

// The copy warp of a queue issues the TMA loads of its items. A unit is copied in pieces of a page, or of kDecodedKeys
// keys of a larger page, and lane i copies the i-th piece.
template <class Element, int kHeadDim>
template <Queue kQueue, class Storage>
CUTLASS_DEVICE void PackedHopper<Element, kHeadDim>::copy(const Params& p, Storage& s) {
  // The copy warp asks for the next item when this many KV blocks of the current one are left, so that the atomic of
  // look_ahead and its reads of the plan are complete in time.
  constexpr int kAhead = 5;
  const int lane = threadIdx.x % 32, copies = Storage::kKeys >> p.piece_bits;
  const int part = (lane & (copies - 1)) << p.piece_bits;  // first key of the lane's piece, within the block
  uint32_t number = 0, cleared_units = 0;  // units issued so far; V units to be zeroed so far
  for (int count = 0;; ++count) {
    Empty::wait(&s.ready, count % 2);
    const Item& item = s.items[count % Storage::kItemSlots];
    const Limits limits = Limits::template of<Storage::kKeys>(item);
    const int blocks = item.blocks, first = item.first, sequence = item.sequence, head = item.head;
    // Do not load pages that no row sees.
    const int columns = min(p.columns, (item.high + (1 << p.page_bits) - 1) >> p.page_bits);
    auto piece_key_of = [&](int block) { return (first + block) * Storage::kKeys + part; };
    auto load = [&](const CUtensorMap& map, int block, int page) {
      const int unit = number % Storage::kUnits;
      // Round n of the slot waits for its n - 1st release, hence the other parity; round 0 passes at once.
      Empty::wait(&s.empty[unit], Storage::phase_of(number) ^ 1);
      ++number;
      const uint32_t present = __ballot_sync(~0u, page < p.num_pages) & ((1 << copies) - 1);
      // The arrival also publishes `present` to the readers. The bytes are those of a whole unit: pieces without a page
      // are copied too, as zeros.
      if (lane == 0) {
        s.present[unit] = present;
        Full::arrive_and_expect_tx(&s.full[unit], sizeof(s.unit[unit]));
      }
      __syncwarp();
      if (lane < copies) {
        SM90_TMA_LOAD_5D::copy(&map, &s.full[unit], kHint, s.unit[unit] + part * kHeadDim, 0, 0, 0,
                               group_of(p, page, piece_key_of(block)), head);
      }
    };
    auto load_values = [&](int block, int page) {
      load(p.value, block, page);
      if (!limits.clear(block)) return;
      if (lane == 0) Empty::arrive(&s.to_clear[cleared_units % Storage::kUnits]);
      ++cleared_units;
    };
    // Page numbers are read from the table one block ahead, so that a load does not wait for the table. K0 is issued
    // before Q: its unit may be free while the previous item's Q is still in use.
    int page = 0, page_after = 0;
    if (blocks > 0) {
      page = page_of(p, sequence, piece_key_of(0), columns);
      page_after = page_of(p, sequence, piece_key_of(1), columns);
      load(p.key, 0, page);
    }
    const int buffer = count % Storage::kQueries;
    // As with `empty`: the first kQueries items pass at once.
    Empty::wait(&s.query_empty[buffer], (count / Storage::kQueries + 1) % 2);
    if (lane == 0) {
      if (blocks > 0) {
        // The box has each * group rows, whatever the item's count; the buffer's further rows keep old data. Both are
        // padding rows, whose results are not stored.
        Full::arrive_and_expect_tx(&s.query_full[buffer], p.each[kQueue] * p.group * kHeadDim * sizeof(Element));
        for (int i = 0; i < kHalves; ++i) {
          SM90_TMA_LOAD_3D::copy(&p.queries[kQueue], &s.query_full[buffer], kHint,
                                 s.query[buffer] + i * Storage::kRows * kHalf, i * kHalf, head * p.group, item.token);
        }
      } else {
        // No key, or the end of the queue: readers need the item alone.
        Empty::arrive(&s.query_full[buffer]);
      }
      if (0 <= blocks && blocks <= kAhead) Empty::arrive(&s.wanted);
    }
    if (blocks < 0) {
      if (lane == 0) s.loading = 0;
      return;
    }
    for (int block = 1; block < blocks; ++block) {
      const int page_before = page;
      page = page_after;
      page_after = page_of(p, sequence, piece_key_of(block + 1), columns);
      if constexpr (Storage::kLate) load(p.key, block, page);
      load_values(block - 1, page_before);
      if constexpr (!Storage::kLate) load(p.key, block, page);
      if (block == blocks - kAhead && lane == 0) Empty::arrive(&s.wanted);
    }
    if (blocks > 0) load_values(blocks - 1, page);
  }
}

}  // namespace tilewright::paged
