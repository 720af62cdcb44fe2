// SPDX-License-Identifier: Apache-2.0

// y = x W^T on tensor cores. Weights are the 64-row operand of wgmma and tokens its columns, so
// that one token costs no more than eight and the tile's rows are always full. One warp keeps a
// ring of tiles filled by the copy engine; one or two warpgroups walk K in ascending order with one
// accumulator an output. Nothing splits K, and the tile shape never enters the order of a sum:
// that is what makes rows invariant (docs/architecture.md).
//
// The ring's first weight tiles are requested before the kernel waits for its predecessor: weights
// do not depend on it, so the copy engine works through the end of the kernel before.

#include <cuda_bf16.h>

#include <algorithm>
#include <array>

#include "common/launch.cuh"
#include "gemm/gemm_planner.h"
#include "gemm/wgmma.cuh"
#include "ops/ops.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kTileRows = 64;   // weight rows a warpgroup
constexpr int32_t kTileDepth = 64;  // columns of K in one 128-byte row of a tile
constexpr int32_t kMaxStages = 12;
constexpr int32_t kTileRowBytes = kTileDepth * 2;

struct GemmArgs {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* bias;  // [n], or null
  void* y;
  int64_t y_stride;
  int32_t n;
  int32_t k;
  int32_t num_stages;
};

template <int kTokens, int kGroups>
struct TileShape {
  // Two steps of K a stage where tiles are small: fewer barriers.
  static constexpr int32_t kSteps = kTokens <= 64 ? 2 : 1;
  static constexpr int32_t kWeightBytes = kGroups * kTileRows * kTileRowBytes;
  static constexpr int32_t kTokenBytes = kTokens * kTileRowBytes;
  static constexpr int32_t kStageBytes = kSteps * (kWeightBytes + kTokenBytes);
  static constexpr int32_t kThreads = kGroups * 128 + 32;
};

// Keeps the compiler from moving accumulators across asynchronous products.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <class Out>
__device__ __forceinline__ Out to_out(float value);
template <>
__device__ __forceinline__ float to_out<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 to_out<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

template <class Out, int kTokens, int kGroups>
__global__ void __launch_bounds__(TileShape<kTokens, kGroups>::kThreads)
    gemm_kernel(const __grid_constant__ CUtensorMap weight_map,
                const __grid_constant__ CUtensorMap token_map, const GemmArgs args) {
  using Shape = TileShape<kTokens, kGroups>;
  extern __shared__ __align__(1024) std::byte ring_storage[];
  __shared__ uint64_t full[kMaxStages];
  __shared__ uint64_t empty[kMaxStages];
  // Dynamic shared memory is aligned to 16 bytes only; the swizzle needs 1,024.
  std::byte* const ring = reinterpret_cast<std::byte*>(
      (reinterpret_cast<uintptr_t>(ring_storage) + 1023) & ~uintptr_t{1023});

  const int32_t first_token = static_cast<int32_t>(blockIdx.x) * kTokens;
  const int32_t first_column = static_cast<int32_t>(blockIdx.y) * kTileRows * kGroups;
  const int32_t num_blocks =
      (args.k + Shape::kSteps * kTileDepth - 1) / (Shape::kSteps * kTileDepth);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  constexpr int32_t kProducerWarp = kGroups * 4;

  if (threadIdx.x == 0) {
    for (int32_t stage = 0; stage < args.num_stages; ++stage) {
      barrier_init(&full[stage], 1);
      barrier_init(&empty[stage], kGroups * 4);  // one arrival a consumer warp
    }
    barrier_init_fence();
  }
  __syncthreads();
  let_successor_start();

  if (warp == kProducerWarp) {
    if (threadIdx.x % 32 == 0) {
      const auto weights_of = [&](int32_t stage) { return ring + stage * Shape::kStageBytes; };
      const auto request_weights = [&](int32_t block, int32_t stage) {
        barrier_expect(&full[stage], Shape::kStageBytes);
        for (int32_t step = 0; step < Shape::kSteps; ++step) {
          for (int32_t group = 0; group < kGroups; ++group) {
            copy_box(
                weights_of(stage) + step * Shape::kWeightBytes + group * kTileRows * kTileRowBytes,
                &weight_map, (block * Shape::kSteps + step) * kTileDepth,
                first_column + group * kTileRows, &full[stage], kEvictFirst);
          }
        }
      };
      const auto request_tokens = [&](int32_t block, int32_t stage) {
        std::byte* const to = weights_of(stage) + Shape::kSteps * Shape::kWeightBytes;
        for (int32_t step = 0; step < Shape::kSteps; ++step) {
          copy_box(to + step * Shape::kTokenBytes, &token_map,
                   (block * Shape::kSteps + step) * kTileDepth, first_token, &full[stage],
                   kEvictLast);
        }
      };
      const int32_t num_ahead = min(args.num_stages, num_blocks);
      for (int32_t block = 0; block < num_ahead; ++block) request_weights(block, block);
      wait_for_predecessor();
      for (int32_t block = 0; block < num_ahead; ++block) request_tokens(block, block);
      int32_t stage = 0;
      uint32_t parity = 0;
      for (int32_t block = num_ahead; block < num_blocks; ++block) {
        barrier_wait(&empty[stage], parity);
        request_weights(block, stage);
        request_tokens(block, stage);
        if (++stage == args.num_stages) {
          stage = 0;
          parity ^= 1;
        }
      }
    } else {
      wait_for_predecessor();
    }
    return;
  }

  const int32_t group = warp / 4;
  float sums[kTokens / 2] = {};
  int32_t stage = 0;
  uint32_t parity = 0;
  int32_t previous = -1;
  for (int32_t block = 0; block < num_blocks; ++block) {
    barrier_wait(&full[stage], parity);
    const std::byte* const weights =
        ring + stage * Shape::kStageBytes + group * kTileRows * kTileRowBytes;
    const std::byte* const tokens =
        ring + stage * Shape::kStageBytes + Shape::kSteps * Shape::kWeightBytes;
    pin(sums);
    wgmma_begin();
#pragma unroll
    for (int32_t step = 0; step < Shape::kSteps; ++step) {
      const uint64_t a = tile_descriptor(weights + step * Shape::kWeightBytes);
      const uint64_t b = tile_descriptor(tokens + step * Shape::kTokenBytes);
#pragma unroll
      for (int32_t i = 0; i < kTileDepth / 16; ++i) {
        wgmma<kTokens>(sums, a + i * kNext16Columns, b + i * kNext16Columns);
      }
    }
    wgmma_commit();
    pin(sums);
    // The products of the block before are done: its stage may be filled again.
    wgmma_wait<1>();
    if (previous >= 0 && threadIdx.x % 32 == 0) barrier_arrive(&empty[previous]);
    previous = stage;
    if (++stage == args.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  wgmma_wait<0>();
  pin(sums);
  wait_for_predecessor();

  // By way of shared memory, so that each token's outputs leave in long pieces. The ring is idle:
  // every tile that was requested has been multiplied.
  constexpr int32_t kConsumers = kGroups * 128;
  constexpr int32_t kColumns = kGroups * kTileRows;
  constexpr int32_t kVector = 16 / static_cast<int32_t>(sizeof(Out));
  constexpr int32_t kPitch = kColumns + kVector;
  Out* const staged = reinterpret_cast<Out*>(ring);
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t column = warp * 16 + lane / 4;  // warps count through the groups
  const auto bias_of = [&](int32_t c) {
    return args.bias != nullptr && first_column + c < args.n ? args.bias[first_column + c] : 0.0f;
  };
  const float bias_low = bias_of(column);
  const float bias_high = bias_of(column + 8);
#pragma unroll
  for (int32_t j = 0; j < kTokens / 8; ++j) {
    Out* const to = staged + (8 * j + 2 * (lane % 4)) * kPitch + column;
    to[0] = to_out<Out>(sums[4 * j] + bias_low);
    to[kPitch] = to_out<Out>(sums[4 * j + 1] + bias_low);
    to[8] = to_out<Out>(sums[4 * j + 2] + bias_high);
    to[kPitch + 8] = to_out<Out>(sums[4 * j + 3] + bias_high);
  }
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
  const int32_t num_rows = min(*args.num_rows, args.max_rows);
  const int32_t num_tokens = min(num_rows - first_token, kTokens);
  const int32_t num_columns = min(args.n - first_column, kColumns);
  Out* const y = static_cast<Out*>(args.y) + int64_t{first_token} * args.y_stride + first_column;
  const bool is_aligned = args.y_stride % kVector == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0;
  constexpr int32_t kPieces = kColumns / kVector;  // of one token
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < num_tokens * kPieces; i += kConsumers) {
    const int32_t token = i / kPieces;
    const int32_t begin = i % kPieces * kVector;
    const Out* const from = staged + token * kPitch + begin;
    Out* const to = y + token * args.y_stride + begin;
    if (is_aligned && begin + kVector <= num_columns) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int32_t c = 0; c < kVector && begin + c < num_columns; ++c) to[c] = from[c];
    }
  }
}

// --- Tensor maps -----------------------------------------------------------------------------

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                           cudaEnableDefault, &found),
          "looking up cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) {
      throw DeviceError("the driver has no cuTensorMapEncodeTiled; it is older than CUDA 12.0");
    }
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

// [rows, columns] of bfloat16, rows `stride` elements apart, read in boxes of box_rows x 64.
CUtensorMap map_of(const void* data, int32_t rows, int32_t columns, int64_t stride,
                   int32_t box_rows) {
  CUtensorMap map;
  const std::array<cuuint64_t, 2> extent = {static_cast<cuuint64_t>(columns),
                                            static_cast<cuuint64_t>(rows)};
  const std::array<cuuint64_t, 1> pitch = {static_cast<cuuint64_t>(stride) * 2};
  const std::array<cuuint32_t, 2> box = {kTileDepth, static_cast<cuuint32_t>(box_rows)};
  const std::array<cuuint32_t, 2> steps = {1, 1};
  const CUresult status =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data),
                     extent.data(), pitch.data(), box.data(), steps.data(),
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  PACELINE_CHECK(status == CUDA_SUCCESS, "tensor map of [", rows, ", ", columns, "] stride ",
                 stride, " at ", data, ": CUresult ", static_cast<int>(status));
  return map;
}

template <class Out, int kTokens, int kGroups>
void launch_gemm(CudaContext& ctx, const GemmParams& p) {
  using Shape = TileShape<kTokens, kGroups>;
  constexpr size_t kMaxSharedBytes = 226 << 10;  // of 227 KB; barriers take their share
  auto* const kernel = &gemm_kernel<Out, kTokens, kGroups>;
  static const bool is_allowed = [&] {
    allow_shared_bytes(kernel, kMaxSharedBytes, "gemm");
    return true;
  }();
  (void)is_allowed;
  const int32_t column_tiles = (p.n + kTileRows * kGroups - 1) / (kTileRows * kGroups);
  const int32_t token_tiles = (p.max_rows + kTokens - 1) / kTokens;
  // With tiles enough for two or three on every multiprocessor, rings of a part of its memory;
  // fewer tiles have to keep more bytes in flight each. Measured in docs/performance.md.
  const bool is_narrow = column_tiles * token_tiles <= ctx.num_sms;
  const size_t budget = (is_narrow ? 200u : kTokens <= 16 ? 73u : 100u) << 10;
  const auto epilogue =
      static_cast<size_t>(kTokens) * (kGroups * kTileRows + 16 / sizeof(Out)) * sizeof(Out);
  int32_t num_stages = static_cast<int32_t>(budget / Shape::kStageBytes);
  num_stages = std::clamp(num_stages, kTokens <= 32 ? 3 : 4, kMaxStages);
  num_stages = std::max<int32_t>(
      num_stages, static_cast<int32_t>((epilogue + Shape::kStageBytes - 1) / Shape::kStageBytes));
  const size_t shared_bytes = static_cast<size_t>(num_stages) * Shape::kStageBytes + 1024;
  PACELINE_CHECK(shared_bytes <= kMaxSharedBytes);
  const GemmArgs args = {.num_rows = p.num_rows,
                         .max_rows = p.max_rows,
                         .bias = p.bias,
                         .y = p.y,
                         .y_stride = p.y_stride,
                         .n = p.n,
                         .k = p.k,
                         .num_stages = num_stages};
  launch(ctx, "gemm", kernel, dim3(token_tiles, column_tiles), dim3(Shape::kThreads), shared_bytes,
         map_of(p.weight, p.n, p.k, p.k, kTileRows),
         map_of(p.x, p.max_rows, p.k, p.x_stride, kTokens), args);
}

template <class Out>
void launch_for_rows(CudaContext& ctx, const GemmParams& p) {
  const int32_t rows = p.max_rows;
  if (rows <= 8) return launch_gemm<Out, 8, 1>(ctx, p);
  if (rows <= 16) return launch_gemm<Out, 16, 1>(ctx, p);
  if (rows <= 24) return launch_gemm<Out, 24, 1>(ctx, p);
  if (rows <= 32) return launch_gemm<Out, 32, 1>(ctx, p);
  if (rows <= 48) return launch_gemm<Out, 48, 1>(ctx, p);
  if (rows <= 64) return launch_gemm<Out, 64, 1>(ctx, p);
  if (rows <= 96) return launch_gemm<Out, 96, 1>(ctx, p);
  if (rows <= 128) return launch_gemm<Out, 128, 1>(ctx, p);
  // Larger tiles read shared memory less, but fill whole waves of multiprocessors less well: the
  // least product of waves and the time of a tile, relative to the largest.
  const auto time_of = [&](int32_t tokens, int32_t columns, double tile_time) {
    const int64_t tiles = int64_t{(rows + tokens - 1) / tokens} * ((p.n + columns - 1) / columns);
    return static_cast<double>((tiles + ctx.num_sms - 1) / ctx.num_sms) * tile_time;
  };
  const double large = time_of(256, 128, 1.0);
  const double medium = time_of(128, 128, 0.55);
  const double small = time_of(128, 64, 0.4);
  if (large <= medium && large <= small) return launch_gemm<Out, 256, 2>(ctx, p);
  if (medium <= small) return launch_gemm<Out, 128, 2>(ctx, p);
  return launch_gemm<Out, 128, 1>(ctx, p);
}

// --- float32, for tests ----------------------------------------------------------------------

// 16 x 16 outputs a block; each thread walks K in ascending order with one accumulator.
__global__ void gemm_float_kernel(const GemmArgs args, const float* x, int64_t x_stride,
                                  const float* weight) {
  constexpr int32_t kSide = 16;
  __shared__ float x_tile[kSide][kSide];
  __shared__ float w_tile[kSide][kSide + 1];
  let_successor_start();
  wait_for_predecessor();
  const int32_t num_rows = min(*args.num_rows, args.max_rows);
  const int32_t tx = static_cast<int32_t>(threadIdx.x);
  const int32_t ty = static_cast<int32_t>(threadIdx.y);
  const int32_t row = static_cast<int32_t>(blockIdx.y) * kSide + ty;
  const int32_t first_column = static_cast<int32_t>(blockIdx.x) * kSide;
  float sum = 0;
  for (int32_t k = 0; k < args.k; k += kSide) {
    const bool is_inside = k + tx < args.k;
    x_tile[ty][tx] = row < num_rows && is_inside ? x[row * x_stride + k + tx] : 0.0f;
    w_tile[ty][tx] = first_column + ty < args.n && is_inside
                         ? weight[int64_t{first_column + ty} * args.k + k + tx]
                         : 0.0f;
    __syncthreads();
    for (int32_t i = 0; i < kSide; ++i) sum = __fmaf_rn(x_tile[ty][i], w_tile[tx][i], sum);
    __syncthreads();
  }
  const int32_t column = first_column + tx;
  if (row >= num_rows || column >= args.n) return;
  const float bias = args.bias != nullptr ? args.bias[column] : 0.0f;
  static_cast<float*>(args.y)[row * args.y_stride + column] = sum + bias;
}

void launch_float(CudaContext& ctx, const GemmParams& p) {
  const GemmArgs args = {.num_rows = p.num_rows,
                         .max_rows = p.max_rows,
                         .bias = p.bias,
                         .y = p.y,
                         .y_stride = p.y_stride,
                         .n = p.n,
                         .k = p.k,
                         .num_stages = 0};
  launch(ctx, "gemm_float", &gemm_float_kernel, dim3((p.n + 15) / 16, (p.max_rows + 15) / 16),
         dim3(16, 16), 0, args, static_cast<const float*>(p.x), p.x_stride,
         static_cast<const float*>(p.weight));
}

}  // namespace
}  // namespace cuda

void gemm(CudaContext& ctx, const GemmParams& p) {
  if (p.max_rows <= 0) return;
  if (ctx.trace != nullptr) ctx.trace->label_next(concat("gemm ", p.n, "x", p.k));
  PACELINE_CHECK(p.x_dtype == p.weight_dtype, "on a GPU x has the dtype of the weights");
  if (p.weight_dtype == DType::kFloat32) {
    PACELINE_CHECK(p.y_dtype == DType::kFloat32, "float32 products have float32 outputs");
    return cuda::launch_float(ctx, p);
  }
  PACELINE_CHECK(p.weight_dtype == DType::kBFloat16, "gemm weights are float32 or bfloat16");
  if (p.k % 8 != 0 || p.x_stride % 8 != 0) {
    throw Unsupported(concat("a product over ", p.k, " columns with rows ", p.x_stride,
                             " apart; on a GPU both must be multiples of 8"));
  }
  if (p.max_rows >= GemmPlanner::kLibraryRows && ctx.gemm->run_library(ctx, p)) return;
  if (p.y_dtype == DType::kBFloat16) {
    cuda::launch_for_rows<__nv_bfloat16>(ctx, p);
  } else {
    cuda::launch_for_rows<float>(ctx, p);
  }
}

}  // namespace paceline
