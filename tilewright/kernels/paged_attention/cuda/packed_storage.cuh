// struct PackedHopper: tile sizes, layouts and MMAs, work items, shared memory with its mbarriers, and the kernel's
// parameters. Its larger functions are declared here and defined in the headers that are read next: packed_loads.cuh,
// packed_prefill.cuh, packed_decode.cuh, packed_hopper.cuh (which has the overview).
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "packed_plan.cuh"
#include "tilewright/warpgroup.cuh"

namespace tilewright::paged {

using namespace cute;

template <class Element, int kHeadDim>
struct PackedHopper {
  static constexpr int kHalf = 64, kHalves = kHeadDim / kHalf;  // 64 columns are the 128 bytes of SWIZZLE_128B
  static constexpr int kGroup = 8;  // rows of the swizzle atom, in which 16-byte chunks are permuted

  // Chunk items: rows and keys of a tile, units of the ring. The ring holds 128 KB of K and V.
  static constexpr int kRows = 128, kKeys = 128, kUnits = kHeadDim == 64 ? 8 : 4;
  // Decode items, whose rows are columns of the transposed products. The ring holds 48 KB of K and V. More decode loads
  // in flight delay the loads of chunks.
  static constexpr int kColumns = 8, kDecodedKeys = 64, kDecodedUnits = kHeadDim == 64 ? 6 : 3;
  static constexpr int kProbabilityBuffers = 4;  // buffers of P for decode; at most two are in use at a time

  static constexpr int kThreads = 4 * kWarpgroup, kWarps = 4;  // kWarps: of a warpgroup
  // Registers per thread, set by setmaxnreg: the four warpgroups share the SM's 64K registers, 512 for each of 128
  // threads.
  static constexpr int kCopyRegisters = 32, kDecodeRegisters = 64, kChunkRegisters = 208;
  static_assert(kCopyRegisters + kDecodeRegisters + 2 * kChunkRegisters <= 512);

  // kStep and kVote are used by the decode warpgroup alone: a plain barrier, and the one of any_of_warpgroup.
  // kPingPong + half is the barrier on which chunk warpgroup `half` waits before it issues its wgmmas.
  enum NamedBarrier { kStep = 3, kVote, kPingPong };

  // Q, and P of decode items: K-major, rows by columns by buffers.
  template <int kSize, int kDims, int kCount>
  using RowLayout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                           cute::Shape<Int<kSize>, Int<kDims>, Int<kCount>>{}));
  // K as groups of 8 keys with all their columns, so that one TMA copy brings a whole page.
  template <int kSize, int kCount>
  using KeyLayout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                           cute::Shape<Int<kSize>, Int<kHeadDim>, Int<kCount>>{}, Step<_2, _1, _3>{}));
  // The same shared memory read as V^T: head dims are the rows.
  template <int kSize, int kCount>
  using ValueLayout =
      decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                             cute::Shape<Int<kHeadDim>, Int<kSize>, Int<kCount>>{}, Step<_1, _2, _3>{}));

  // Chunk items: S [128, 128] = Q K^T with both operands in shared memory, O [128, head_dim] += P V with P in
  // registers. Two warpgroups share each product, 64 rows for each.
  using Warpgroups = cute::Layout<cute::Shape<_2, _1, _1>>;
  using MmaQK = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, cute::Shape<_64, Int<kKeys>, Int<kHeadDim>>, GMMA::Major::K,
                           GMMA::Major::K>(), Warpgroups{}));
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, cute::Shape<_64, Int<kHeadDim>, Int<kKeys>>, GMMA::Major::K,
                           GMMA::Major::MN>(), Warpgroups{}));
  // Decode items: S^T [64, 8] = K Q^T, O^T [head_dim, 8] += V^T P^T, all operands in shared memory.
  using MmaKQ = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, cute::Shape<_64, Int<kColumns>, Int<kHeadDim>>, GMMA::Major::K,
                           GMMA::Major::K>()));
  using MmaVP = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, cute::Shape<_64, Int<kColumns>, Int<kDecodedKeys>>,
                           GMMA::Major::MN, GMMA::Major::K>()));
  static constexpr int kLogits = kKeys / 2;  // elements of S of a chunk item per thread
  static constexpr int kOut = kHeadDim / 2;  // elements of O of a chunk item per thread

  // Decode reads K and V once, which calls for EVICT_FIRST; measured, that hint made the loads slower.
  static constexpr uint64_t kHint = uint64_t(TMA::CacheHintSm90::EVICT_NORMAL);

  // mbarriers. A phase of `Full` completes with the last arrival and the last of the bytes that were announced to it, a
  // phase of `Empty` with the last arrival.
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;

  // A work item: a tile of a chunk, or the decode tokens of a sequence with all keys or a part of them, for one KV
  // head. Keys [low, high) are visible to some row, keys [all_low, all_high) to every row; all four are token positions
  // of the sequence.
  struct Item {
    int sequence, head, token, count, position, length;  // KV head; first token of `count`; its position; keys
    int low, high, all_low, all_high;
    // KV blocks [first, first + blocks). 0: no key is visible, O is 0 and lse is -inf. Negative: the queue is empty.
    int first, blocks;
    int part, parts;    // split-KV of decode items: this part and the number of parts
    int slot;           // index of the first part's Partial; those of the other parts follow
  };

  // The KV blocks of an item that need masking or zeroed rows of V. Blocks are counted from the item's first one. Only
  // the first and the last block can hold keys that no row sees, so an item has at most two blocks to clear.
  struct Limits {
    int masked_before, masked_from;  // blocks before / from on: some row does not see all keys
    int cleared[2];                  // blocks with keys that no row sees; -1: none

    template <int kKeysOf>
    static CUTLASS_DEVICE Limits of(const Item& item) {
      const bool first = item.low % kKeysOf != 0, last = item.high % kKeysOf != 0;
      return {(item.all_low + kKeysOf - 1) / kKeysOf - item.first, item.all_high / kKeysOf - item.first,
              {first || (last && item.blocks == 1) ? 0 : -1, last && item.blocks > 1 ? item.blocks - 1 : -1}};
    }
    CUTLASS_DEVICE bool mask(int block) const { return block < masked_before || block >= masked_from; }
    CUTLASS_DEVICE bool clear(int block) const { return block == cleared[0] || block == cleared[1]; }
    CUTLASS_DEVICE int num_cleared() const { return (cleared[0] >= 0) + (cleared[1] >= 0); }
  };

  // The shared memory of one queue. A unit is a ring slot that holds K or V of one KV block. Units are loaded in the
  // order of use: K0 V0 K1 V1 ..., or with kLate, where S of the next block is issued before PV, K0 K1 V0 K2 V1 ....
  template <int kRowsOf, int kQueriesOf, int kKeysOf, int kUnitsOf, int kReadersOf, bool kLateOf>
  struct QueueStorage {
    static constexpr int kRows = kRowsOf, kQueries = kQueriesOf, kKeys = kKeysOf, kUnits = kUnitsOf;
    static constexpr int kReaders = kReadersOf;  // warps that arrive on `empty` and `query_empty`
    static constexpr bool kLate = kLateOf;       // V of a block is loaded after K of the next block
    // The ring of items holds one item whose Q has been read but whose O is still being stored, kQueries items whose Q
    // is loaded or being loaded, and the one that look_ahead writes. look_ahead is asked for that one only after the
    // copy warp has waited for `query_empty`, hence a slot is never overwritten while a warp still reads it.
    static constexpr int kItemSlots = kQueries + 2;
    alignas(1024) Element query[kQueries][kRows * kHeadDim];
    alignas(1024) Element unit[kUnits][kKeys * kHeadDim];
    Item items[kItemSlots];
    int present[kUnits];   // K units: bit i says that the i-th copied piece has a page
    volatile int loading;  // 1 until the copy warp has reached the end of the queue; read as a hint, without a barrier

    //   barrier      arrivals in a phase                                                       waited for by
    //   query_full   copy warp, and the bytes of its TMA loads                                 readers
    //   query_empty  kReaders readers, after the last QK^T of the item                         copy warp
    //   full         copy warp, and the bytes of its TMA loads                                 readers, look_ahead
    //   empty        kReaders readers, after the last wgmma that reads the unit                copy warp
    //   wanted       copy warp, when it will soon need the next item                           look_ahead
    //   ready        look_ahead, when it has written that item                                 copy warp
    //   to_clear     copy warp, when it has issued the load of a V unit with rows to zero      look_ahead
    //   cleared      look_ahead, when it has zeroed these rows                                 readers
    //
    // Readers are the warps of the decode warpgroup or of the two chunk warpgroups. They read an item without waiting
    // for `ready`: the copy warp has waited, before it arrives on query_full.
    //
    // Phases: the n-th use of a barrier, counted from 0, completes a phase of parity n % 2, and wait(parity) returns
    // once that phase is complete. Of a ring of barriers each slot counts its own uses; to_clear and cleared are rings
    // over the units with rows to zero alone. A wait for parity 1 before the first phase returns at once, which is how
    // the copy warp finds all slots of `empty` and `query_empty` free in the first round.
    typename Full::ValueType query_full[kQueries], full[kUnits];
    typename Empty::ValueType query_empty[kQueries], empty[kUnits], wanted, ready;
    typename Empty::ValueType to_clear[kUnits], cleared[kUnits];

    // `number` counts units since the kernel began; unit number % kUnits holds it, and the parity flips each round.
    static CUTLASS_DEVICE uint32_t phase_of(uint32_t number) { return number / kUnits % 2; }

    CUTLASS_DEVICE void wait(uint32_t number) { Full::wait(&full[number % kUnits], phase_of(number)); }

    // Called by all lanes of a reader; one of them arrives.
    CUTLASS_DEVICE void release(uint32_t number) {
      if (threadIdx.x % 32 == 0) Empty::arrive(&empty[number % kUnits]);
    }

    // Waits for a K unit and returns `present`.
    CUTLASS_DEVICE int wait_for_keys(uint32_t number) {
      wait(number);
      return present[number % kUnits];
    }

    // Waits until look_ahead has zeroed the rows of the number-th such V unit.
    CUTLASS_DEVICE void wait_cleared(uint32_t number) { Empty::wait(&cleared[number % kUnits], phase_of(number)); }

    CUTLASS_DEVICE void wait_for_query(int count) { Full::wait(&query_full[count % kQueries], count / kQueries % 2); }

    CUTLASS_DEVICE void release_query(int count) {
      if (threadIdx.x % 32 == 0) Empty::arrive(&query_empty[count % kQueries]);
    }

    // Called by one thread before any other uses the barriers.
    CUTLASS_DEVICE void init() {
      loading = 1;
      for (int i = 0; i < kQueries; ++i) {
        Full::init(&query_full[i], 1);
        Empty::init(&query_empty[i], kReaders);
      }
      for (int i = 0; i < kUnits; ++i) {
        Full::init(&full[i], 1);
        Empty::init(&empty[i], kReaders);
        Empty::init(&to_clear[i], 1);
        Empty::init(&cleared[i], 1);
      }
      Empty::init(&wanted, 1);
      Empty::init(&ready, 1);
    }
  };
  // Decode items are short and their Q is small: a second buffer lets the Q of the next item be loaded meanwhile.
  using Chunks = QueueStorage<kRows, 1, kKeys, kUnits, 2 * kWarps, true>;
  using Decoded = QueueStorage<kColumns, 2, kDecodedKeys, kDecodedUnits, kWarps, false>;

  // The split-KV result of one part of the keys: O and l before normalisation, relative to the part's maximum m.
  struct Partial {
    float out[4 * kHalves][kWarpgroup];  // in register order: [element, thread]
    float row_max[kColumns], row_sum[kColumns];
  };

  struct SharedStorage {
    Chunks chunks;
    Decoded decoded;
    alignas(1024) Element probabilities[kProbabilityBuffers][kColumns * kDecodedKeys];  // P of decode items
    alignas(128) uint4 out_staging[2 * kWarps][64];  // staging of O, 16 rows of 64 bytes per warp
    float block_max[kWarps][kColumns], row_sum[kWarps][kColumns];  // m and l of decode items, per warp
    int last;  // this CTA was the last to finish a part of its item
  };

  struct Params {
    CUtensorMap queries[2], key, value;  // TMA descriptors; Q has one for the box of each queue
    const int* table;                    // page table, [sequences, columns]
    Element* out;
    float* lse;
    Plan* plan;
    int* arrived;  // finished parts, at the slot of an item's first part
    Partial* partials;
    int sequences, heads, kv_heads, group, num_pages, columns;
    int page_bits;    // log2 of the page size in tokens
    int piece_bits;   // log2 of the keys of one TMA copy: min(page size, kDecodedKeys)
    int left, right;  // a query at position i sees keys [i - left, i + right]
    int each[2];      // max tokens of an item, by queue
    int inverse;      // x / group == x * inverse >> 16 for the rows x < 128 of an item
    float scale;
  };

  static Facts facts() { return {int64_t(sizeof(SharedStorage)), kThreads, 1}; }

  static int64_t workspace(const Problem& problem) { return memory_of(problem).bytes; }

  static PlanMemory memory_of(const Problem& problem) {
    return PlanMemory::of(problem.sequences, problem.kv_heads, problem.columns * problem.page_size, kDecodedKeys,
                          int64_t(sizeof(Partial)));
  }

  // packed_hopper.cuh: launches both kernels; the kernel's warps go to their roles.
  static ffi::Error run(cudaStream_t stream, const Device& device, const Problem& problem, const Arguments& arguments);
  CUTLASS_DEVICE void operator()(const Params& p, SharedStorage& s) const;

  // packed_loads.cuh: warps 0 to 3.
  template <Queue kQueue, class Storage>
  static CUTLASS_DEVICE void look_ahead(const Params& p, Storage& s);
  template <Queue kQueue, class Storage>
  static CUTLASS_DEVICE void copy(const Params& p, Storage& s);
  static CUTLASS_DEVICE int page_of(const Params& p, int sequence, int key, int columns);
  static CUTLASS_DEVICE int group_of(const Params& p, int page, int key);

  // packed_prefill.cuh: warpgroups 2 and 3.
  static CUTLASS_DEVICE void prefill(const Params& p, SharedStorage& storage, int half);

  // packed_decode.cuh: warpgroup 1.
  static CUTLASS_DEVICE void decode(const Params& p, SharedStorage& storage);
  template <class Out>
  static CUTLASS_DEVICE void store_part(Partial& part, const Out& out, const float (&row_max)[2],
                                        const float (&row_sum)[2]);
  template <class Out>
  static CUTLASS_DEVICE void add_part(const Partial& part, Out& out, float (&row_max)[2], float (&row_sum)[2],
                                      float scale2);

  // The token of an item's row: row r is token r / group, query head r % group.
  static CUTLASS_DEVICE int token_of(const Params& p, int row) { return (row * p.inverse) >> 16; }

  // The index of an item's first row in [tokens, heads]; row_of gives that of another row, `first` that of row 0.
  static CUTLASS_DEVICE int64_t first_row_of(const Params& p, const Item& item) {
    return int64_t(item.token) * p.heads + item.head * p.group;
  }

  static CUTLASS_DEVICE int64_t row_of(const Params& p, int64_t first, int row) {
    const int token = token_of(p, row);
    return first + token * p.heads + (row - token * p.group);
  }
};

}  // namespace tilewright::paged
