// The planning kernel of packed attention, by threads of the host. Reads calls from standard input, writes their plans.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(threads)
#define __align__(bytes)

struct Index {
  unsigned x;
};
static thread_local Index threadIdx;
static Index blockDim;

struct alignas(16) int4 {
  int x, y, z, w;
};

using std::max;
using std::min;

class Barrier {
 public:
  explicit Barrier(unsigned threads) { pthread_barrier_init(&barrier_, nullptr, threads); }
  ~Barrier() { pthread_barrier_destroy(&barrier_); }
  void wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

struct Warp {
  Barrier barrier{32};
  int values[32];
};

static std::unique_ptr<Barrier> block;
static std::vector<std::unique_ptr<Warp>> warps;

static void __syncthreads() { block->wait(); }

// What each lane has, seen by all.
template <class Find>
static int exchange(int mine, Find find) {
  Warp& warp = *warps[threadIdx.x / 32];
  warp.values[threadIdx.x % 32] = mine;
  warp.barrier.wait();
  const int found = find(warp.values, int(threadIdx.x % 32));
  warp.barrier.wait();
  return found;
}

static int __shfl_up_sync(unsigned, int mine, int distance) {
  return exchange(mine, [=](const int* of, int lane) { return of[lane < distance ? lane : lane - distance]; });
}

static int __shfl_xor_sync(unsigned, int mine, int distance) {
  return exchange(mine, [=](const int* of, int lane) { return of[lane ^ distance]; });
}

static float __fdividef(float a, float b) { return a / b; }

static void atomicAdd(int* to, int what) { std::atomic_ref<int>(*to) += what; }

#include "packed_plan.cuh"

using namespace tilewright::paged;

static std::vector<int> read(size_t size) {
  std::vector<int> values(size);
  if (std::fread(values.data(), sizeof(int), size, stdin) != size) values.clear();
  return values;
}

int main() {
  for (;;) {
    const std::vector<int> head = read(10);
    if (head.empty()) return 0;
    const PlanSizes sizes{head[0], head[1], head[2], head[3], head[4],
                          head[5], head[6], head[7], head[8], head[9]};
    const std::vector<int> cum = read(sizes.sequences + 1), lengths = read(sizes.sequences);
    const PlanLaunch launch = PlanLaunch::of(sizes.sequences);
    // Behind both ends lies what must not be written.
    const PlanMemory memory = PlanMemory::of(sizes.sequences, sizes.kv_heads, sizes.capacity, sizes.block_keys, 0);
    const size_t room = memory.bytes / sizeof(int4);
    std::vector<int4> plan(room + 2, int4{-7, -7, -7, -7});
    std::vector<int4> shared(launch.bytes / sizeof(int4) + 2, int4{-9, -9, -9, -9});
    blockDim.x = unsigned(launch.threads);
    block = std::make_unique<Barrier>(blockDim.x);
    warps.clear();
    for (int warp = 0; warp < launch.threads / 32; ++warp) warps.push_back(std::make_unique<Warp>());
    std::vector<std::thread> threads;
    for (int thread = 0; thread < launch.threads; ++thread) {
      threads.emplace_back([&, thread] {
        threadIdx.x = unsigned(thread);
        char* const workspace = reinterpret_cast<char*>(&plan[1]);
        make_plan(cum.data(), lengths.data(), sizes, launch.lane_bits, &shared[1].x,
                  reinterpret_cast<Plan*>(workspace), reinterpret_cast<int*>(workspace + memory.arrived));
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const int4& end : {plan.front(), plan.back()}) {
      if (end.x != -7 || end.y != -7 || end.z != -7 || end.w != -7) return 1;
    }
    for (const int4& end : {shared.front(), shared.back()}) {
      if (end.x != -9 || end.y != -9 || end.z != -9 || end.w != -9) return 2;
    }
    const int size = int(room * sizeof(int4));
    std::fwrite(&size, sizeof size, 1, stdout);
    std::fwrite(&plan[1], sizeof(int4), room, stdout);
  }
}
