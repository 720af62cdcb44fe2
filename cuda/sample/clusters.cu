// SPDX-License-Identifier: Apache-2.0

// The output layer of drafters that score only the tokens of a few clusters: it selects clusters
// and computes the logits of their tokens. A row depends only on its own scores and states, so rows
// are invariant.

#include <algorithm>
#include <cstdint>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "ops/ops.h"

namespace paceline {
namespace cuda {
namespace {

constexpr int32_t kSelectThreads = 256;
constexpr int32_t kLogitThreads = 256;
constexpr int32_t kLogitsPerWarp = 4;  // loads in flight for each lane
constexpr int32_t kLogitsPerBlock = kLogitThreads / 32 * kLogitsPerWarp;
constexpr int32_t kPerLane = 8;  // elements of a row that a lane loads at once

// A cluster's rank is the number of clusters before it: no sort, no order of arrival. Each block
// ranks kSelectThreads clusters of a row against all of them.
__global__ void __launch_bounds__(kSelectThreads)
    select_clusters_kernel(const __grid_constant__ SelectClustersParams p) {
  __shared__ float tile[kSelectThreads];
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  if (row >= *p.num_rows) return;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t cluster = static_cast<int32_t>(blockIdx.y) * kSelectThreads + thread;
  const float* const scores = p.scores + int64_t{row} * p.num_clusters;
  const bool is_cluster = cluster < p.num_clusters;
  const float own = is_cluster ? comparable(scores[cluster]) : 0.0f;
  int32_t rank = 0;
  for (int32_t first = 0; first < p.num_clusters; first += kSelectThreads) {
    const int32_t count = min(kSelectThreads, p.num_clusters - first);
    __syncthreads();
    if (thread < count) tile[thread] = comparable(scores[first + thread]);
    __syncthreads();
    for (int32_t i = 0; i < count; ++i) {
      const bool is_before = tile[i] > own || (tile[i] == own && first + i < cluster);
      rank += is_before ? 1 : 0;
    }
  }
  if (is_cluster && rank < p.top) p.clusters[int64_t{row} * p.top + rank] = cluster;
}

template <class X, class Weight, bool kIsVector>
__global__ void __launch_bounds__(kLogitThreads)
    cluster_logits_kernel(const __grid_constant__ ClusterLogitsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  if (row >= *p.num_rows) return;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t num_logits = p.top * p.cluster_size;
  const int32_t first = static_cast<int32_t>(blockIdx.y) * kLogitsPerBlock + warp * kLogitsPerWarp;
  int32_t tokens[kLogitsPerWarp];
  float sums[kLogitsPerWarp];
#pragma unroll
  for (int i = 0; i < kLogitsPerWarp; ++i) {
    const int32_t logit = min(first + i, num_logits - 1);
    const int32_t cluster = p.clusters[int64_t{row} * p.top + logit / p.cluster_size];
    tokens[i] = p.token_ordering[int64_t{cluster} * p.cluster_size + logit % p.cluster_size];
    sums[i] = 0.0f;
  }
  const X* const x = static_cast<const X*>(p.x) + int64_t{row} * p.hidden;
  const Weight* const weight = static_cast<const Weight*>(p.weight);
  for (int32_t at = lane * kPerLane; at < p.hidden; at += 32 * kPerLane) {
    const int32_t count = min(kPerLane, p.hidden - at);
    float of_x[kPerLane];
    load_first<kIsVector>(x + at, count, of_x);
    float of_weight[kLogitsPerWarp][kPerLane];
#pragma unroll
    for (int i = 0; i < kLogitsPerWarp; ++i) {
      load_first<kIsVector>(weight + int64_t{tokens[i]} * p.hidden + at, count, of_weight[i]);
    }
#pragma unroll
    for (int i = 0; i < kLogitsPerWarp; ++i) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) sums[i] = fmaf(of_x[j], of_weight[i][j], sums[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kLogitsPerWarp; ++i) sums[i] = warp_sum(sums[i]);
  if (lane != 0) return;
#pragma unroll
  for (int i = 0; i < kLogitsPerWarp; ++i) {
    if (first + i >= num_logits) break;
    p.logits[int64_t{row} * num_logits + first + i] = sums[i];
    p.tokens[int64_t{row} * num_logits + first + i] = tokens[i];
  }
}

dim3 grid_of(int32_t rows, int32_t items, int32_t items_per_block) {
  return dim3(static_cast<unsigned>(rows),
              static_cast<unsigned>((items + items_per_block - 1) / items_per_block));
}

}  // namespace
}  // namespace cuda

void select_clusters(CudaContext& ctx, const SelectClustersParams& p) {
  using namespace cuda;
  launch(ctx, "select_clusters", select_clusters_kernel,
         grid_of(p.max_rows, p.num_clusters, kSelectThreads), dim3(kSelectThreads), 0, p);
}

void cluster_logits(CudaContext& ctx, const ClusterLogitsParams& p) {
  using namespace cuda;
  const bool is_vector =
      p.hidden % kPerLane == 0 && is_vector_aligned(p.x) && is_vector_aligned(p.weight);
  with_element_type(p.x_dtype, "cluster_logits x", [&](auto x) {
    with_element_type(p.weight_dtype, "cluster_logits weight", [&](auto weight) {
      using X = decltype(x);
      using Weight = decltype(weight);
      launch(ctx, "cluster_logits",
             is_vector ? cluster_logits_kernel<X, Weight, true>
                       : cluster_logits_kernel<X, Weight, false>,
             grid_of(p.max_rows, p.top * p.cluster_size, kLogitsPerBlock), dim3(kLogitThreads), 0,
             p);
    });
  });
}

}  // namespace paceline
