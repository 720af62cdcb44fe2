// SPDX-License-Identifier: Apache-2.0

// The exchange of a branch's output, and the norm that reads it, in one kernel: one block for each
// row sends the rank's columns in packets, and norms the row once those of the others are there.
// The gathered row stays in registers. The norm is that of rms_norm.cu, thread by thread, so the
// bits are those of the two ops.

#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "gather/exchange.cuh"
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

template <class X, class Y, int kVectors>
__global__ void __launch_bounds__(kMaxRegisterThreads)
    gathered_norm_kernel(const __grid_constant__ GatherArgs a,
                         const __grid_constant__ RmsNormParams p) {
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
  const int32_t num_rows = min(*a.num_rows, a.max_rows);
  uint64_t packets[kVectors][kPackets] = {};
  float residual[kVectors][kPerVector] = {};
  // Loads the row before checking whether it exists: one latency instead of two.
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!norm.is_inside[v] || owner[v] != a.rank) continue;
    const std::byte* const from = a.x + row * a.x_stride + (norm.at[v] * kItem - a.begin[a.rank]);
#pragma unroll
    for (int i = 0; i < kPackets; i += 2) {
      const uint4 word = *reinterpret_cast<const uint4*>(from + i * kPacketBytes);
      memcpy(&packets[v][i], &word, sizeof(word));
    }
  }
  norm.load_residual(p, row, residual);
  if (num_rows <= 0) return;
  const uint64_t number = begin_exchange(a);
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
         is_aligned(a, kPerVector * dtype_bytes(p.gather.dtype));
}

template <class X, class Y>
void launch_gathered_norm(CudaContext& ctx, const GatherArgs& a, const RmsNormParams& p) {
  const RegisterRows rows = register_rows(p.hidden);
  launch(ctx, "gathered_norm",
         rows.vectors == 1 ? gathered_norm_kernel<X, Y, 1> : gathered_norm_kernel<X, Y, 2>,
         dim3(static_cast<unsigned>(a.max_rows)), dim3(rows.threads), 0, a, p);
}

}  // namespace
}  // namespace cuda

void gathered_norm(CudaContext& ctx, const GatheredNormParams& p) {
  check_gathered(p);
  cuda::GatherArgs args = cuda::gather_args(p.gather);
  if (p.gather.max_rows <= 0) return;
  if (!cuda::is_joined(args, p)) {
    gather_columns(ctx, p.gather);
    rms_norm(ctx, p.norm);
    return;
  }
  static_cast<void>(cuda::count_packets(args));
  cuda::with_element_type(p.norm.x_dtype, "gathered_norm x", [&](auto x) {
    cuda::with_element_type(p.norm.y_dtype, "gathered_norm y", [&](auto y) {
      cuda::launch_gathered_norm<decltype(x), decltype(y)>(ctx, args, p.norm);
    });
  });
}

}  // namespace paceline
