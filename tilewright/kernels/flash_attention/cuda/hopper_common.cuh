// What the kernel for compute capability 9.0a builds on: the problem shape, tensor strides, the tile order, the staging
// of an output tile, checks of limits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"
#include "tilewright/warpgroup.cuh"

namespace tilewright::attention::hopper {

using namespace cute;

constexpr int kAlignment = 8;  // elements in 16 bytes, of which TMA wants each stride to be a multiple

// (batch, heads, q_length, kv_length, head_dim, lowest, highest). A key is visible iff lowest <= key - query <=
// highest.
using Shape7 = cute::tuple<int, int, int, int, int, int, int>;

inline Shape7 shape_of(const Problem& problem) {
  // The masks need lowest <= highest, so an empty band becomes one far below every (query, key) pair.
  const bool empty = problem.lowest > problem.highest;
  const int64_t lowest = empty ? -(1 << 30) : problem.lowest, highest = empty ? -(1 << 30) : problem.highest;
  return {int(problem.batch),    int(problem.heads), int(problem.q_length), int(problem.kv_length),
          int(problem.head_dim), int(lowest),        int(highest)};
}

// [length, head_dim, (batch, head)] of an array that is contiguous as [batch, length, heads, head_dim].
using Strides = cute::tuple<int64_t, _1, cute::tuple<int64_t, int64_t>>;

inline Strides strides_of(int64_t length, int64_t heads, int64_t head_dim) {
  return {heads * head_dim, _1{}, {length * heads * head_dim, head_dim}};
}

// A tile [64, kHeadDim] of shared memory that TMA loads, or from which a warpgroup stores its output by TMA.
template <int kHeadDim>
using OutTile = cute::Shape<_64, Int<kHeadDim>>;
template <class Number, int kHeadDim>
using OutLayout = decltype(tile_to_shape(
    cutlass::gemm::collective::detail::ss_smem_selector<GMMA::Major::K, Number, _64, Int<kHeadDim>>(),
    OutTile<kHeadDim>{}));

// setmaxnreg counts per thread for the producer warpgroup and for the two consumer warpgroups.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

// The tile schedule: maps blockIdx.x to (tile, batch, head). Heads are grouped in sections whose K and V fit the L2
// cache. Within a section the order is tile by tile, and all heads of the section for each tile. If later tiles have
// more work (causal forward), tiles are reversed, so that the longest run first.
struct TileOrder {
  struct TileCoord {
    int tile, batch, head;
  };

  cutlass::FastDivmod section, tiles, heads;
  int total = 0, last_tile = 0;
  bool reversed = false;

  // `bytes` is what the tiles of one head read again and again (K and V, or Q and dO); `shared` neighbouring heads read
  // the same.
  static TileOrder make(int tiles, int batch, int heads, int64_t bytes, int shared, bool reversed) {
    constexpr int64_t kCache = int64_t(24) << 20;  // half of the 50 MB of L2, which also holds the outputs
    const int all = batch * heads;
    const int64_t wanted = std::max<int64_t>(1, kCache / std::max<int64_t>(bytes, 1)) * shared;
    int section = int(std::min<int64_t>(wanted, all));
    while (all % section != 0) --section;
    TileOrder order;
    order.section = cutlass::FastDivmod(section);
    order.tiles = cutlass::FastDivmod(tiles);
    order.heads = cutlass::FastDivmod(heads);
    order.total = tiles * all;
    order.last_tile = tiles - 1;
    order.reversed = reversed;
    return order;
  }

  CUTLASS_DEVICE TileCoord operator()(int index) const {
    int rest, in_section, which, tile, batch, head;
    section(rest, in_section, index);
    tiles(which, tile, rest);
    heads(batch, head, which * section.divisor + in_section);
    return {reversed ? last_tile - tile : tile, batch, head};
  }
};

// Rejects arrays that a TMA descriptor cannot address, and grids that exceed 32 bits.
inline ffi::Error check_limits(const Problem& problem, int64_t blocks) {
  const int64_t length = std::max(problem.q_length, problem.kv_length);
  if (length * problem.heads * problem.head_dim >= int64_t(1) << 37) {
    return ffi::Error::InvalidArgument("one batch element is too large for the copy engine of compute capability 9.0");
  }
  if (blocks > INT32_MAX) return ffi::Error::InvalidArgument("the attention has too many tiles for one launch");
  return ffi::Error::Success();
}

inline ffi::Error read_scale(const Arguments& arguments, float* out) {
  TILEWRIGHT_RETURN_IF_ERROR(attribute<float>(arguments, "scale", out));
  // The kernel keeps the maximum of unscaled logits, and masked logits are -inf: a negative scale would turn the
  // maximum into a minimum, and 0 * -inf is NaN.
  if (!(*out >= 0)) return ffi::Error::InvalidArgument("this attention kernel needs a scale of 0 or more");
  *out = std::max(*out, 1e-30f);
  return ffi::Error::Success();
}

// Converts a warpgroup's accumulator of `TiledMma` to `Element` and writes it to shared memory by stmatrix. The
// async-proxy fence makes it visible to the TMA store; the caller still has to synchronize the warpgroup.
template <class Element, class TiledMma, class Fragment, class Shared>
CUTLASS_DEVICE void stage_tile(const Fragment& fragment, Shared&& shared, int thread) {
  Tensor narrow = make_tensor<Element>(fragment.layout());
  convert<Element, decltype(size(fragment))::value>(fragment.data(), narrow.data());
  auto copying = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, TiledMma{}).get_thread_slice(thread);
  cute::copy(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, copying.retile_S(narrow), copying.partition_D(shared));
  cutlass::arch::fence_view_async_shared();
}

}  // namespace tilewright::attention::hopper
