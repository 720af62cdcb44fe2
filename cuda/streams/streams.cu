// SPDX-License-Identifier: Apache-2.0

// Reading, writing and making residual streams. Every sum has one order whatever the number of
// rows, so rows are invariant.

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "ops/streams.h"

namespace paceline {
namespace cuda {
namespace {

// --- element by element: a block computes a piece of a row, a thread four columns ----------------

constexpr int32_t kThreads = 128;
constexpr int32_t kPerThread = 4;

template <bool kIsVector>
__global__ void __launch_bounds__(kThreads)
    spread_streams_kernel(const __grid_constant__ SpreadStreamsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t first = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x) * kPerThread;
  const int32_t count = p.hidden - first;
  if (row >= *p.num_rows || count <= 0) return;
  float x[kPerThread];
  load_first<kIsVector>(p.x + int64_t{row} * p.hidden + first, count, x);
  for (int32_t stream = 0; stream < p.num_streams; ++stream) {
    float* const y = p.y + (int64_t{row} * p.num_streams + stream) * p.hidden + first;
    float values[kPerThread] = {};
    if (p.adds) load_first<kIsVector>(y, count, values);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] = p.adds ? __fadd_rn(values[i], x[i]) : x[i];
    store_first<kIsVector>(values, count, y);
  }
}

template <class Y, bool kIsVector>
__global__ void __launch_bounds__(kThreads)
    mean_streams_kernel(const __grid_constant__ MeanStreamsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t first = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x) * kPerThread;
  const int32_t count = p.hidden - first;
  if (row >= *p.num_rows || count <= 0) return;
  const float* const x = p.x + int64_t{row} * p.num_streams * p.hidden + first;
  float values[kPerThread];
  load_first<kIsVector>(x, count, values);
  for (int32_t stream = 1; stream < p.num_streams; ++stream) {
    float others[kPerThread];
    load_first<kIsVector>(x + int64_t{stream} * p.hidden, count, others);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] = __fadd_rn(values[i], others[i]);
  }
  const auto divisor = static_cast<float>(p.num_streams);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) values[i] = __fdiv_rn(values[i], divisor);
  store_first<kIsVector>(values, count, static_cast<Y*>(p.y) + row * p.y_stride + first);
}

template <bool kIsVector>
__global__ void __launch_bounds__(kThreads)
    sum_streams_kernel(const __grid_constant__ SumStreamsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t first = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x) * kPerThread;
  const int32_t count = p.hidden - first;
  if (row >= *p.num_rows || count <= 0) return;
  const float* const x = p.x + int64_t{row} * p.num_streams * p.hidden + first;
  const float* const pre = p.mix + int64_t{row} * p.mix_stride;
  float values[kPerThread];
  load_first<kIsVector>(x, count, values);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) values[i] = __fmul_rn(pre[0], values[i]);
  for (int32_t stream = 1; stream < p.num_streams; ++stream) {
    float others[kPerThread];
    load_first<kIsVector>(x + int64_t{stream} * p.hidden, count, others);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      values[i] = __fmaf_rn(pre[stream], others[i], values[i]);
    }
  }
  store_first<kIsVector>(values, count, p.y + int64_t{row} * p.hidden + first);
}

template <class X, bool kIsVector, int kMaxCount>
__global__ void __launch_bounds__(kThreads)
    write_streams_kernel(const __grid_constant__ WriteStreamsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t first = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x) * kPerThread;
  const int32_t count = p.hidden - first;
  if (row >= *p.num_rows || count <= 0) return;
  const int32_t streams = p.num_streams;
  const float* const mix = p.mix + int64_t{row} * mix_width(streams, /*is_end=*/false);
  float* const y = p.y + int64_t{row} * streams * p.hidden + first;
  float x[kPerThread];
  float before[kMaxCount][kPerThread];
  load_first<kIsVector>(static_cast<const X*>(p.x) + int64_t{row} * p.hidden + first, count, x);
#pragma unroll
  for (int i = 0; i < kMaxCount; ++i) {
    load_first<kIsVector>(y + int64_t{i} * p.hidden, i < streams ? count : 0, before[i]);
  }
#pragma unroll
  for (int j = 0; j < kMaxCount; ++j) {
    if (j >= streams) break;
    const float post = mix[streams + j];
    float values[kPerThread];
#pragma unroll
    for (int e = 0; e < kPerThread; ++e) values[e] = __fmul_rn(post, x[e]);
#pragma unroll
    for (int i = 0; i < kMaxCount; ++i) {
      if (i >= streams) break;
      const float keep = mix[2 * streams + i * streams + j];
#pragma unroll
      for (int e = 0; e < kPerThread; ++e) values[e] = __fmaf_rn(keep, before[i][e], values[e]);
    }
    store_first<kIsVector>(values, count, y + int64_t{j} * p.hidden);
  }
}

// --- with a norm: a block computes a row -----------------------------------------------------

constexpr int32_t kNormThreads = 512;
constexpr int32_t kNormWarps = kNormThreads / 32;
constexpr int32_t kInRegisters = 2;  // pieces of a thread that stay in registers
constexpr int32_t kNormPiece = 8;

// y = norm(x) with weight `weight`, for a row of `size` elements of which load(first, count,
// values) gives kNormPiece from `first` on. The first pieces of a thread are loaded once, others
// twice.
template <bool kIsVector, class Y, class Load>
__device__ __forceinline__ void norm_row(int32_t size, const float* weight, float eps,
                                         const Load& load, Y* y) {
  __shared__ float partials[kNormWarps];
  constexpr int32_t kStep = kNormThreads * kNormPiece;
  const int32_t own = static_cast<int32_t>(threadIdx.x) * kNormPiece;
  float kept[kInRegisters][kNormPiece];
  float squares = 0.0f;
  const auto add = [&](const float (&values)[kNormPiece]) {
#pragma unroll
    for (const float value : values) squares = __fmaf_rn(value, value, squares);
  };
#pragma unroll
  for (int i = 0; i < kInRegisters; ++i) {
    load(own + i * kStep, size - own - i * kStep, kept[i]);
    add(kept[i]);
  }
  for (int32_t first = own + kInRegisters * kStep; first < size; first += kStep) {
    float values[kNormPiece];
    load(first, size - first, values);
    add(values);
  }
  const float factor = rsqrtf(block_sum(squares, partials) / static_cast<float>(size) + eps);
  const auto store = [&](int32_t first, float (&values)[kNormPiece]) {
    float weights[kNormPiece];
    load_first<kIsVector>(weight + first, size - first, weights);
#pragma unroll
    for (int i = 0; i < kNormPiece; ++i) values[i] *= factor * weights[i];
    store_first<kIsVector>(values, size - first, y + first);
  };
#pragma unroll
  for (int i = 0; i < kInRegisters; ++i) store(own + i * kStep, kept[i]);
  for (int32_t first = own + kInRegisters * kStep; first < size; first += kStep) {
    float values[kNormPiece];
    load(first, size - first, values);
    store(first, values);
  }
}

template <class Y, bool kIsVector, int kMaxCount>
__global__ void __launch_bounds__(kNormThreads)
    read_streams_kernel(const __grid_constant__ ReadStreamsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  if (row >= *p.num_rows) return;
  const float* const x = p.x + int64_t{row} * p.num_streams * p.hidden;
  float pre[kMaxCount];
#pragma unroll
  for (int i = 0; i < kMaxCount; ++i) {
    pre[i] = i < p.num_streams ? p.mix[int64_t{row} * p.mix_stride + i] : 0.0f;
  }
  norm_row<kIsVector>(
      p.hidden, p.weight, p.eps,
      [&](int32_t first, int32_t count, float (&to)[kNormPiece]) {
        float of_streams[kMaxCount][kNormPiece];
#pragma unroll
        for (int i = 0; i < kMaxCount; ++i) {
          load_first<kIsVector>(x + int64_t{i} * p.hidden + first, i < p.num_streams ? count : 0,
                                of_streams[i]);
        }
#pragma unroll
        for (int e = 0; e < kNormPiece; ++e) to[e] = __fmul_rn(pre[0], of_streams[0][e]);
#pragma unroll
        for (int i = 1; i < kMaxCount; ++i) {
          if (i >= p.num_streams) break;
#pragma unroll
          for (int e = 0; e < kNormPiece; ++e) to[e] = __fmaf_rn(pre[i], of_streams[i][e], to[e]);
        }
      },
      static_cast<Y*>(p.y) + int64_t{row} * p.hidden);
}

// A block norms one stream of a row.
template <class X, class Y, bool kIsVector>
__global__ void __launch_bounds__(kNormThreads)
    norm_streams_kernel(const __grid_constant__ NormStreamsParams p) {
  let_successor_start();
  wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const auto stream = static_cast<int32_t>(blockIdx.y);
  const int32_t num_rows = min(*p.num_rows, p.max_rows);
  if (row == 0 && stream == 0 && threadIdx.x == 0) *p.num_stream_rows = num_rows * p.num_streams;
  if (row >= num_rows) return;
  const int64_t from = p.row_index == nullptr ? row : p.row_index[row];
  const X* const x =
      static_cast<const X*>(p.x) + (from * p.num_streams + stream) * int64_t{p.hidden};
  norm_row<kIsVector>(
      p.hidden, p.weight, p.eps,
      [&](int32_t first, int32_t count, float (&to)[kNormPiece]) {
        load_first<kIsVector>(x + first, count, to);
      },
      static_cast<Y*>(p.y) + (int64_t{row} * p.num_streams + stream) * p.hidden);
}

void check_streams(int32_t num_streams) {
  PACELINE_CHECK(num_streams >= 1 && num_streams <= kMaxStreams, num_streams, " streams");
}

// Whether rows of `hidden` elements consist of whole aligned vectors of `per_thread`.
template <class... Pointers>
bool takes_vectors(int32_t hidden, int32_t per_thread, const Pointers*... pointers) {
  return hidden % per_thread == 0 && (is_vector_aligned(pointers) && ...);
}

// Calls run with constants: whether the kernel takes vectors, and the most streams it takes.
template <class Run>
void with_variant(bool takes_vectors, int32_t num_streams, Run run) {
  const auto with_count = [&](auto max_count) {
    if (takes_vectors) {
      run(std::true_type{}, max_count);
    } else {
      run(std::false_type{}, max_count);
    }
  };
  if (num_streams <= 4) {
    with_count(std::integral_constant<int, 4>{});
  } else {
    with_count(std::integral_constant<int, kMaxStreams>{});
  }
}

dim3 grid_of(int32_t max_rows, int32_t hidden) {
  constexpr int32_t kPerBlock = kThreads * kPerThread;
  return dim3(static_cast<uint32_t>(max_rows),
              static_cast<uint32_t>((hidden + kPerBlock - 1) / kPerBlock));
}

}  // namespace
}  // namespace cuda

void spread_streams(CudaContext& ctx, const SpreadStreamsParams& p) {
  using namespace cuda;
  check_streams(p.num_streams);
  const bool is_vector = takes_vectors(p.hidden, kPerThread, p.x, p.y);
  launch(ctx, "spread_streams",
         is_vector ? spread_streams_kernel<true> : spread_streams_kernel<false>,
         grid_of(p.max_rows, p.hidden), dim3(kThreads), 0, p);
}

void mean_streams(CudaContext& ctx, const MeanStreamsParams& p) {
  using namespace cuda;
  check_streams(p.num_streams);
  const bool is_vector =
      takes_vectors(p.hidden, kPerThread, p.x, p.y) && p.y_stride % kPerThread == 0;
  with_element_type(p.y_dtype, "mean_streams y", [&](auto element) {
    using Y = decltype(element);
    launch(ctx, "mean_streams",
           is_vector ? mean_streams_kernel<Y, true> : mean_streams_kernel<Y, false>,
           grid_of(p.max_rows, p.hidden), dim3(kThreads), 0, p);
  });
}

void sum_streams(CudaContext& ctx, const SumStreamsParams& p) {
  using namespace cuda;
  check_streams(p.num_streams);
  const bool is_vector = takes_vectors(p.hidden, kPerThread, p.x, p.y);
  launch(ctx, "sum_streams", is_vector ? sum_streams_kernel<true> : sum_streams_kernel<false>,
         grid_of(p.max_rows, p.hidden), dim3(kThreads), 0, p);
}

void write_streams(CudaContext& ctx, const WriteStreamsParams& p) {
  using namespace cuda;
  check_streams(p.num_streams);
  const bool is_vector = takes_vectors(p.hidden, kPerThread, p.x, p.y);
  with_element_type(p.x_dtype, "write_streams x", [&](auto element) {
    with_variant(is_vector, p.num_streams, [&](auto in_vectors, auto max_count) {
      launch(ctx, "write_streams",
             write_streams_kernel<decltype(element), in_vectors.value, max_count.value>,
             grid_of(p.max_rows, p.hidden), dim3(kThreads), 0, p);
    });
  });
}

void read_streams(CudaContext& ctx, const ReadStreamsParams& p) {
  using namespace cuda;
  check_streams(p.num_streams);
  const bool is_vector = takes_vectors(p.hidden, kNormPiece, p.x, p.weight, p.y);
  with_element_type(p.y_dtype, "read_streams y", [&](auto element) {
    with_variant(is_vector, p.num_streams, [&](auto in_vectors, auto max_count) {
      launch(ctx, "read_streams",
             read_streams_kernel<decltype(element), in_vectors.value, max_count.value>,
             dim3(static_cast<uint32_t>(p.max_rows)), dim3(kNormThreads), 0, p);
    });
  });
}

void norm_streams(CudaContext& ctx, const NormStreamsParams& p) {
  using namespace cuda;
  check_streams(p.num_streams);
  const bool is_vector = takes_vectors(p.hidden, kNormPiece, p.x, p.weight, p.y);
  with_element_type(p.x_dtype, "norm_streams x", [&](auto x_element) {
    with_element_type(p.y_dtype, "norm_streams y", [&](auto y_element) {
      using X = decltype(x_element);
      using Y = decltype(y_element);
      launch(ctx, "norm_streams",
             is_vector ? norm_streams_kernel<X, Y, true> : norm_streams_kernel<X, Y, false>,
             dim3(static_cast<uint32_t>(p.max_rows), static_cast<uint32_t>(p.num_streams)),
             dim3(kNormThreads), 0, p);
    });
  });
}

}  // namespace paceline
