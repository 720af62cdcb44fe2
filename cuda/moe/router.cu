// SPDX-License-Identifier: Apache-2.0

// The router of a mixture for passes of few rows: logits, choices and the order of expert rows in
// one kernel of one cluster. Three kernels would wait for each other longer than they work.
//
// - A block computes the logits of one tile of experts and one tile of rows, with the order of sums
//   of `gemm`. The chain of products over K takes most of the time, and no split can shorten it.
// - The blocks of a tile of rows share its rows. Each receives the logits of its rows, and a warp
//   chooses the experts of a row.
// - The first block of the cluster receives the choices, and for every expert a bit for each row
//   that chose it. The number of bits below a row's is its place among the expert rows: sorting
//   needs no counters.

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "gemm/tensor_map.h"
#include "gemm/wgmma.cuh"
#include "gemm/wgmma_products.cuh"
#include "moe/route_row.cuh"
#include "moe/sigmoid_row.cuh"
#include "ops/moe.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kThreads = 512;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kProductWarps = 4;  // the first ones multiply
constexpr int32_t kWeightWarp = 4;    // requests weights
constexpr int32_t kRowWarp = 5;       // requests rows
constexpr int32_t kTileRows = 64;     // of the pass, at most: those of a product
constexpr int32_t kDepth = 64;        // columns of K in a stage
constexpr int32_t kRowBytes = kDepth * 2;
constexpr int32_t kMaxStages = 48;
constexpr int32_t kInFlight = 2;     // stages that are being multiplied
constexpr int32_t kMaxBlocks = 8;    // of a cluster
constexpr int32_t kMaxRows = 256;    // of the pass
constexpr int32_t kMaxRouted = 256;  // experts
constexpr int32_t kMaxPlaces = 2048;
constexpr int32_t kChoiceBytes = 8;  // that a place sends
constexpr uint32_t kBarrierBytes = sizeof(uint64_t);

constexpr int32_t kRowWords = kMaxRows / 32;
constexpr int32_t kMaxSharedBytes = 227 << 10;
// Up to this many rows, one block chooses for all of them: that takes one exchange less.
constexpr int32_t kRowsOfOneBlock = 16;

// How a pass is divided.
struct RouterPlan {
  int32_t weights;     // experts of a block
  int32_t experts;     // blocks along the experts, a power of two
  int32_t tiles;       // blocks along the rows, a power of two
  int32_t tile_rows;   // of the pass, of a block; a multiple of 8
  int32_t num_stages;  // of the ring
  int32_t owners_log;  // 2^owners_log blocks share the rows of a tile
};

template <int32_t kWeights, int32_t kPerLane>
struct RouterShared {
  static constexpr int32_t kExperts = 32 * kPerLane;
  static constexpr int32_t kLogits = kPerLane == 1 || kWeights == 16 ? 2048 : 4096;

  uint64_t full[kMaxStages];   // one phase per filling: all bytes of the stage have arrived
  uint64_t empty[kMaxStages];  // one phase per use: every warp has multiplied the stage
  uint64_t has_logits;         // all logits of this block's rows have arrived
  uint64_t has_choices;        // in the first block: the choices of all rows have arrived
  // What other blocks send: the logits of rows that this block owns, [row][expert], and to the
  // first block the choices.
  float logits[kLogits];
  uint32_t rows_of[kRowWords * kExperts];  // [32 rows][expert] a bit for each row that chose it
  int32_t chosen[kMaxPlaces];              // [row][place]
  int32_t begin[kExperts];                 // the first expert row of each expert
};

// The ring of a block. A stage holds the weights of a tile of experts, then a tile of rows.
template <int32_t kWeights>
struct RouterRing {
  static constexpr int32_t kWeightBytes = kWeights * kRowBytes;

  std::byte* data;
  uint64_t* full;
  uint64_t* empty;
  int32_t num_stages;
  int32_t row_bytes;   // of a tile of rows
  int32_t num_blocks;  // of kDepth columns

  [[nodiscard]] __device__ __forceinline__ int32_t stage_bytes() const {
    return kWeightBytes + row_bytes;
  }

  // Requests a tile of every block of columns; called by one thread for the weights and by another
  // for the rows. `bytes` is the size of a tile, and `offset` its place in a stage.
  __device__ __forceinline__ void produce(const CUtensorMap* map, int32_t first, int32_t offset,
                                          int32_t bytes) const {
    int32_t stage = 0;
    uint32_t parity = 1;
    for (int32_t block = 0; block < num_blocks; ++block) {
      if (block >= num_stages) barrier_wait(&empty[stage], parity);
      barrier_expect(&full[stage], bytes);
      copy_box(data + stage * stage_bytes() + offset, map, block * kDepth, first, &full[stage],
               kEvictNormal);
      if (++stage == num_stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }

  // Multiplies the stages as they arrive; called by a warpgroup. A tile with fewer rows than a
  // product has some of what follows it in shared memory as its last rows; nothing reads their
  // sums.
  __device__ __forceinline__ void consume(float (&sums)[kWeights / 2]) const {
    const uint32_t data_at = uniform(shared_address(data));
    const uint32_t full_at = uniform(shared_address(full));
    const uint32_t empty_at = uniform(shared_address(empty));
    int32_t stage = 0;
    uint32_t parity = 0;
    int32_t done = 0;  // the stage that is released next
    for (int32_t block = 0; block < num_blocks; ++block) {
      barrier_wait(full_at + stage * kBarrierBytes, parity);
      const uint32_t weights_at = uniform(data_at + stage * stage_bytes());
      const uint64_t a = tile_descriptor(weights_at + kWeightBytes);
      const uint64_t b = tile_descriptor(weights_at);
      pin(sums);
      wgmma_begin();
#pragma unroll
      for (int32_t i = 0; i < kDepth / 16; ++i) {
        wgmma<kWeights>(sums, a + i * kNext16Columns, b + i * kNext16Columns);
      }
      wgmma_commit();
      pin(sums);
      if (++stage == num_stages) {
        stage = 0;
        parity ^= 1;
      }
      if (block < kInFlight) continue;
      wgmma_wait<kInFlight>();
      if (threadIdx.x % 32 == 0) barrier_arrive(empty_at + done * kBarrierBytes);
      if (++done == num_stages) done = 0;
    }
    wgmma_wait<0>();
    pin(sums);
  }
};

// The order of the expert rows, from the choices of all rows; called by all threads of a block.
template <int32_t kWeights, int32_t kPerLane>
__device__ __forceinline__ void sort_choices(const SortExpertRowsParams& p,
                                             RouterShared<kWeights, kPerLane>& shared,
                                             int32_t num_rows, int32_t warp) {
  constexpr int32_t kExperts = RouterShared<kWeights, kPerLane>::kExperts;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t num_places = num_rows * p.top_k;
  const bool is_counter = warp == kWarps - 1;  // the warp that most often has no row to route
  int32_t num_hit = 0;                         // of a lane's experts
  if (is_counter) {
    // A lane has kPerLane neighbouring experts.
    uint32_t* const own = shared.rows_of + lane * kPerLane;
    int32_t counts[kPerLane] = {};
    for (int32_t word = 0; word * 32 < num_rows; ++word) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) counts[i] += __popc(own[word * kExperts + i]);
    }
    int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      sum += counts[i];
      num_hit += counts[i] > 0 ? 1 : 0;
    }
    int32_t row = sum_up_to_lane(sum, lane) - sum;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      shared.begin[lane * kPerLane + i] = row;
      row += counts[i];
    }
  }
  // The rows before a place's that chose the same expert.
  const auto num_before = [&](int32_t row, int32_t expert) {
    const uint32_t* const rows = shared.rows_of + expert;
    int32_t count = __popc(rows[row / 32 * kExperts] & ((1u << row % 32) - 1u));
    for (int32_t word = 0; word < row / 32; ++word) count += __popc(rows[word * kExperts]);
    return count;
  };
  int32_t row = thread / p.top_k;
  int32_t expert = thread < num_places ? shared.chosen[thread] : 0;
  int32_t before = thread < num_places ? num_before(row, expert) : 0;
  __syncthreads();  // all of shared.begin is there
  for (int32_t place = thread; place < num_places;) {
    const int32_t at = shared.begin[expert] + before;
    p.source_row[at] = row;
    p.expert_row[place] = at;
    place += kThreads;
    if (place >= num_places) break;
    row = place / p.top_k;
    expert = shared.chosen[place];
    before = num_before(row, expert);
  }
  if (!is_counter) return;
  for (int32_t e = lane; e < p.num_experts; e += 32) p.expert_begin[e] = shared.begin[e];
  num_hit = __reduce_add_sync(kAllLanes, num_hit);
  if (lane > 0) return;
  p.expert_begin[p.num_experts] = num_places;
  if (p.counters == nullptr) return;
  // Atomic only because no thread then waits for the old values.
  auto* const counters = reinterpret_cast<unsigned long long*>(p.counters);
  atomicAdd(counters, static_cast<unsigned long long>(num_hit));
  atomicAdd(counters + 1, 1ull);
}

template <int32_t kWeights, int32_t kPerLane>
__global__ void __launch_bounds__(kThreads, 1)
    router_kernel(const __grid_constant__ CUtensorMap weight_map,
                  const __grid_constant__ CUtensorMap row_map,
                  const __grid_constant__ RouterParams p, const RouterPlan plan) {
  using Shared = RouterShared<kWeights, kPerLane>;
  extern __shared__ __align__(1024) std::byte ring_storage[];
  __shared__ Shared shared;
  let_successor_start();
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t warp = __shfl_sync(kAllLanes, thread / 32, 0);  // uniform, to the compiler as well
  // The grid is one cluster.
  const int32_t first_expert = static_cast<int32_t>(blockIdx.x) * kWeights;
  const int32_t first_row = static_cast<int32_t>(blockIdx.y) * plan.tile_rows;
  const int32_t rank_in_tile = static_cast<int32_t>(blockIdx.x);
  const int32_t first_rank = static_cast<int32_t>(blockIdx.y) * plan.experts;  // of the tile
  const bool is_first_block = first_rank + rank_in_tile == 0;
  const RouterRing<kWeights> ring = {
      // Dynamic shared memory is aligned to 16 bytes only; the swizzle needs 1,024.
      .data = ring_storage + (-shared_address(ring_storage) & 1023u),
      .full = shared.full,
      .empty = shared.empty,
      .num_stages = plan.num_stages,
      .row_bytes = plan.tile_rows * kRowBytes,
      .num_blocks = (p.product.weight.k + kDepth - 1) / kDepth};
  if (lane == 0) {  // an initialisation takes a warp for itself
#pragma unroll 1
    for (int32_t i = warp; i < plan.num_stages; i += kWarps) {
      barrier_init(&shared.full[i], 2);  // weights and rows
      barrier_init(&shared.empty[i], kProductWarps);
    }
    if (warp == kWarps - 1) {
      barrier_init(&shared.has_logits, 1);
      barrier_init(&shared.has_choices, 1);
    }
    barrier_init_fence();
  }
  for (int32_t i = thread; i < kRowWords * Shared::kExperts; i += kThreads) shared.rows_of[i] = 0;
  __syncthreads();
  // Other blocks may send. Without a cluster the wait would be a barrier of the block, which the
  // thread that requests weights would reach too late.
  const bool is_cluster = gridDim.x * gridDim.y > 1;
  if (is_cluster) cluster_arrive();

  // Weights do not depend on the predecessor.
  if (warp == kWeightWarp && lane == 0) {
    ring.produce(&weight_map, first_expert, 0, ring.kWeightBytes);
  }
  if (warp == kRowWarp && lane == 0) prefetch_map(&row_map);
  __syncwarp();
  if (is_cluster) cluster_wait();
  wait_for_predecessor();
  if (warp == kRowWarp && lane == 0) {
    ring.produce(&row_map, first_row, ring.kWeightBytes, ring.row_bytes);
  }
  __syncwarp();
  const int32_t num_rows = min(*p.product.num_rows, p.product.max_rows);
  const int32_t num_in_tile = max(min(num_rows - first_row, plan.tile_rows), 0);
  // Row r of the tile is row r / owners of block r % owners.
  const int32_t owners = 1 << plan.owners_log;
  const int32_t num_own =
      rank_in_tile < owners ? (num_in_tile - rank_in_tile + owners - 1) >> plan.owners_log : 0;
  if (thread == kThreads - 1) {
    constexpr int32_t kLogitBytes = sizeof(float);
    barrier_expect(&shared.has_logits, num_own * plan.experts * kWeights * kLogitBytes);
    barrier_expect(&shared.has_choices, num_rows * p.route.top_k * kChoiceBytes);
  }

  if (warp < kProductWarps) {
    float bias[kWeights / 4];
#pragma unroll
    for (int32_t i = 0; i < kWeights / 4; ++i) {
      const int32_t expert = first_expert + i / 2 * 8 + 2 * (lane % 4) + i % 2;
      bias[i] =
          p.product.bias != nullptr && expert < p.route.num_experts ? p.product.bias[expert] : 0.0f;
    }
    float sums[kWeights / 2] = {};
    ring.consume(sums);
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t row = 16 * warp + lane / 4 + 8 * half;
      if (row >= num_in_tile) continue;
      const int32_t owner = first_rank + row % owners;
      const uint32_t barrier = cluster_address(&shared.has_logits, owner);
      const uint32_t to = cluster_address(
          &shared
               .logits[(row >> plan.owners_log) * Shared::kExperts + first_expert + 2 * (lane % 4)],
          owner);
#pragma unroll
      for (int32_t j = 0; j < kWeights / 8; ++j) {
        const float* const two = sums + 4 * j + 2 * half;
        send(to + j * 8 * sizeof(float), float2{two[0] + bias[2 * j], two[1] + bias[2 * j + 1]},
             barrier);
      }
    }
  }

  const bool is_sigmoid = p.route.rule == RouterRule::kSigmoid;
  const Corrections<kPerLane> corrections(p.route.correction, is_sigmoid ? p.route.num_experts : 0);
  barrier_wait_for_cluster(&shared.has_logits, 0);
  const uint32_t has_choices = cluster_address(&shared.has_choices, 0);
  for (int32_t slot = warp; slot < num_own; slot += kWarps) {
    const int32_t row = first_row + (slot << plan.owners_log) + rank_in_tile;
    const float* const logits = shared.logits + slot * Shared::kExperts;
    const Choice own = choose(is_sigmoid ? sigmoid_keys(p.route, logits, corrections)
                                         : logit_keys<kPerLane>(logits, p.route.num_experts),
                              p.route.top_k);
    if (lane < p.route.top_k) {
      send(cluster_address(&shared.chosen[row * p.route.top_k + lane], 0), own.expert, has_choices);
      send_bits(cluster_address(&shared.rows_of[row / 32 * Shared::kExperts + own.expert], 0),
                1u << row % 32, has_choices);
    }
    if (is_sigmoid) {
      write_sigmoid_choices(p.route, row, logits, own);
    } else {
      write_choices(p.route, row, own);
    }
  }
  if (!is_first_block) return;
  barrier_wait_for_cluster(&shared.has_choices, 0);
  sort_choices(p.sort, shared, num_rows, warp);
}

constexpr int32_t next_power_of_two(int32_t value) {
  int32_t power = 1;
  while (power < value) power *= 2;
  return power;
}

// What a stage costs a block, in bytes: those that arrive after the predecessor, at about 64 a
// clock, or twice those that the products read from shared memory, at 128 a clock. A tile of 64
// rows is read whatever the rows are, and weights arrive earlier as far as the ring has room.
double stage_cost(const RouterPlan& plan, int32_t k) {
  const int32_t num_blocks = (k + kDepth - 1) / kDepth;
  const double in_ring = 190 << 10;
  const double stage_bytes = (plan.weights + plan.tile_rows) * kRowBytes;
  const double early = std::min(in_ring / (stage_bytes * num_blocks), 1.0);
  const double arriving = plan.tile_rows + (1.0 - early) * plan.weights;
  return std::max(arriving, (kTileRows + plan.weights) / 2.0) * kRowBytes;
}

// The cheapest division of a pass that one cluster can take, of equals that with the fewest experts
// a block. Tiles have 16 rows as long as there are blocks for them.
std::optional<RouterPlan> router_plan(const RouterParams& p) {
  const int32_t num_experts = p.route.num_experts;
  const int32_t max_rows = p.route.max_rows;
  if (num_experts > kMaxRouted || max_rows > kMaxRows || max_rows <= 0 ||
      max_rows * p.route.top_k > kMaxPlaces) {
    return std::nullopt;
  }
  std::optional<RouterPlan> best;
  for (const int32_t weights : {16, 32, 64}) {
    const int32_t experts = next_power_of_two((num_experts + weights - 1) / weights);
    const bool is_too_wide = weights > 16 && weights / 2 >= num_experts;
    if (is_too_wide || experts > kMaxBlocks || max_rows > kMaxBlocks / experts * kTileRows)
      continue;
    const int32_t tiles = std::min(next_power_of_two((max_rows + 15) / 16), kMaxBlocks / experts);
    RouterPlan plan = {.weights = weights,
                       .experts = experts,
                       .tiles = tiles,
                       .tile_rows = ((max_rows + tiles - 1) / tiles + 7) / 8 * 8,
                       .num_stages = 0,
                       .owners_log = 0};
    while (max_rows > kRowsOfOneBlock && 1 << plan.owners_log < experts) ++plan.owners_log;
    const int32_t k = p.product.weight.k;
    if (!best.has_value() || stage_cost(plan, k) < stage_cost(*best, k)) best = plan;
  }
  return best;
}

template <int32_t kWeights, int32_t kPerLane>
void launch_router(CudaContext& ctx, const RouterParams& p, RouterPlan plan) {
  using Shared = RouterShared<kWeights, kPerLane>;
  auto* const kernel = &router_kernel<kWeights, kPerLane>;
  static const int32_t max_ring_bytes = [&] {
    cudaFuncAttributes attributes = {};
    check(cudaFuncGetAttributes(&attributes, kernel), "router");
    const int32_t bytes = kMaxSharedBytes - static_cast<int32_t>(attributes.sharedSizeBytes);
    allow_shared_bytes(kernel, static_cast<size_t>(bytes), "router");
    return bytes;
  }();
  PACELINE_CHECK(plan.experts * kWeights <= Shared::kExperts &&
                 ((plan.tile_rows - 1 >> plan.owners_log) + 1) * Shared::kExperts <=
                     Shared::kLogits);
  const GemmParams& product = p.product;
  const int32_t k = product.weight.k;
  const int32_t stage_bytes = (kWeights + plan.tile_rows) * kRowBytes;
  // The products read 64 rows from the beginning of a tile, also of the last one.
  const int32_t rest = 1024 + (kTileRows - plan.tile_rows) * kRowBytes;
  plan.num_stages =
      std::min({(k + kDepth - 1) / kDepth, (max_ring_bytes - rest) / stage_bytes, kMaxStages});
  const dim3 grid(static_cast<unsigned>(plan.experts), static_cast<unsigned>(plan.tiles));
  launch_clusters(ctx, "router", kernel, grid, dim3(kThreads), grid,
                  static_cast<size_t>(plan.num_stages * stage_bytes + rest),
                  tensor_map(product.weight.data, product.weight.n, k, k, kWeights),
                  tensor_map(product.x, product.max_rows, k, product.x_stride, plan.tile_rows), p,
                  plan);
}

using LaunchRouter = void (*)(CudaContext&, const RouterParams&, RouterPlan);

LaunchRouter router_of(int32_t weights, int32_t num_experts) {
  if (num_experts <= 32) return weights == 16 ? &launch_router<16, 1> : &launch_router<32, 1>;
  if (num_experts <= 128) {
    return weights == 16   ? &launch_router<16, 4>
           : weights == 32 ? &launch_router<32, 4>
                           : &launch_router<64, 4>;
  }
  return weights == 32 ? &launch_router<32, 8> : &launch_router<64, 8>;
}

}  // namespace
}  // namespace cuda

void run_router(CudaContext& ctx, const RouterParams& p) {
  using namespace cuda;
  const WeightMatrix& weight = p.product.weight;
  PACELINE_CHECK(weight.n == p.route.num_experts && p.product.y == p.route.logits &&
                     p.product.y_stride == weight.n && p.product.y_dtype == DType::kFloat32,
                 "the logits of a router are its product");
  const bool is_plain = weight.format == WeightFormat::kPlain && weight.dtype == DType::kBFloat16 &&
                        p.product.x_dtype == weight.dtype && weight.k % 8 == 0 &&
                        p.product.x_stride % 8 == 0;
  const std::optional<RouterPlan> plan = router_plan(p);
  if (!is_plain || !plan.has_value()) {
    gemm(ctx, p.product);
    route_and_sort(ctx, {.route = p.route, .sort = p.sort});
    return;
  }
  check_params(p.route);
  check_params(p.sort);
  if (ctx.trace != nullptr) {
    ctx.trace->label_next(concat("router ", weight.n, "x", weight.k));
  }
  router_of(plan->weights, p.route.num_experts)(ctx, p, *plan);
}

}  // namespace paceline
