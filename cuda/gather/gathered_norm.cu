// SPDX-License-Identifier: Apache-2.0

// The exchange of a branch's output, and the norm that reads it, in one kernel: one block for each
// row sends the rank's columns in packets, and norms the row once those of the others are there.
// The gathered row stays in registers. After a mixture the block sums the places of the rank's
// columns first. Sum and norm are those of combine.cu and rms_norm.cu, thread by thread, so the
// bits are those of the ops alone.

#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "gather/exchange.cuh"
#include "moe/sum_places.cuh"
#include "norm/register_norm.cuh"
#include "ops/gather.h"
#include "ops/ops.h"

namespace paceline {
namespace cuda {
namespace {

// The rank that has a byte of a row.
__device__ __forceinline__ int32_t owner_of(const GatherArgs& a, int32_t byte) {
  int32_t rank = 0;
  while (byte >= a.begin[rank + 1]) ++rank;
  return rank;
}

// kSums: `places` is there.
template <class X, class Y, int kVectors, bool kSums>
__global__ void __launch_bounds__(kMaxRegisterThreads)
    gathered_norm_kernel(const __grid_constant__ GatherArgs a,
                         const __grid_constant__ RmsNormParams p,
                         const __grid_constant__ CombineExpertsParams places) {
  __shared__ __align__(16) NormPartials partials;
  constexpr auto kItem = static_cast<int32_t>(sizeof(X));
  constexpr int kPackets = kPerVector * kItem / static_cast<int>(kPacketBytes);  // of a vector
  let_successor_start();
  RegisterNorm<kVectors> norm;
  norm.begin(p, partials);
  int32_t owner[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    owner[v] = norm.is_inside[v] ? owner_of(a, norm.at[v] * kItem) : a.rank;
  }

  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const uint64_t count = load_exchange_count(a);
  const int32_t num_rows = min(*a.num_rows, a.max_rows);
  uint64_t packets[kVectors][kPackets] = {};
  float residual[kVectors][kPerVector] = {};
  // Loads the row before checking whether it exists: one latency instead of two.
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!norm.is_inside[v] || owner[v] != a.rank) continue;
    const int32_t byte = norm.at[v] * kItem - a.begin[a.rank];
    if constexpr (kSums) {
      float sum[kPerVector];
      if (!sum_places<X, true>(places, row, num_rows, byte / kItem, kPerVector, sum)) break;
      X elements[kPerVector];
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) narrow(sum[i], &elements[i]);
      memcpy(packets[v], elements, sizeof(elements));
    } else {
#pragma unroll
      for (int i = 0; i < kPackets; i += 2) {
        const uint4 word =
            *reinterpret_cast<const uint4*>(a.x + row * a.x_stride + byte + i * kPacketBytes);
        memcpy(&packets[v][i], &word, sizeof(word));
      }
    }
  }
  norm.load_residual(p, row, residual);
  if (num_rows <= 0) return;
  const uint64_t number = begin_exchange(a, count);
  if (row >= num_rows) return;

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!norm.is_inside[v] || owner[v] != a.rank) continue;
    const auto first = norm.at[v] * kItem / static_cast<int32_t>(kPacketBytes);
#pragma unroll
    for (int i = 0; i < kPackets; ++i) send_packet(a, number, row, first + i, packets[v][i]);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (owner[v] == a.rank) continue;
    const auto first = norm.at[v] * kItem / static_cast<int32_t>(kPacketBytes);
    receive_packets(a, number, owner[v], row, first, packets[v]);
  }
  float x[kVectors][kPerVector];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    X elements[kPerVector];
    memcpy(elements, packets[v], sizeof(elements));
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) x[v][i] = widen(elements[i]);
  }
  norm.template finish<Y>(p, row, x, residual, partials);
}

// Whether one kernel can do both, which all ranks decide alike.
bool is_joined(const GatherArgs& a, const GatheredNormParams& p) {
  return goes_in_packets(a) && a.max_rows <= kMaxPacketBlocks && fits_registers(p.norm) &&
         is_aligned(a, kPerVector * dtype_bytes(p.gather.dtype)) &&
         (!p.places || (is_vector_aligned(p.places->x) && is_vector_aligned(p.places->base)));
}

template <class X, class Y, bool kSums>
void launch_gathered_norm(CudaContext& ctx, const GatherArgs& a, const GatheredNormParams& p) {
  const RegisterRows rows = register_rows(p.norm.hidden);
  launch(ctx, "gathered_norm",
         rows.vectors == 1 ? gathered_norm_kernel<X, Y, 1, kSums>
                           : gathered_norm_kernel<X, Y, 2, kSums>,
         dim3(static_cast<unsigned>(a.max_rows)), dim3(rows.threads), 0, a, p.norm,
         p.places ? *p.places : CombineExpertsParams{});
}

}  // namespace
}  // namespace cuda

void gathered_norm(CudaContext& ctx, const GatheredNormParams& p) {
  check_gathered(p);
  cuda::GatherArgs args = cuda::gather_args(p.gather);
  if (p.gather.max_rows <= 0) return;
  if (!cuda::is_joined(args, p)) {
    if (p.places) combine_experts(ctx, *p.places);
    gather_columns(ctx, p.gather);
    rms_norm(ctx, p.norm);
    return;
  }
  static_cast<void>(cuda::count_packets(args));
  cuda::with_element_type(p.norm.x_dtype, "gathered_norm x", [&](auto x) {
    cuda::with_element_type(p.norm.y_dtype, "gathered_norm y", [&](auto y) {
      using X = decltype(x);
      using Y = decltype(y);
      if (p.places) {
        cuda::launch_gathered_norm<X, Y, true>(ctx, args, p);
      } else {
        cuda::launch_gathered_norm<X, Y, false>(ctx, args, p);
      }
    });
  });
}

}  // namespace paceline
