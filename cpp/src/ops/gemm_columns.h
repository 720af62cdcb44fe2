// SPDX-License-Identifier: Apache-2.0
#pragma once

// A piece of a product on the CPU: some columns of y = x W^T for some rows. `gemm`, `expert_gemm`
// and `markov_draft` split their work into such pieces. An output has the same bits whatever piece
// computes it (gemm_columns.cc), so a row of an expert has the bits that gemm gives it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "device/cpu_context.h"
#include "ops/weight_matrix.h"

namespace paceline {

struct GemmColumns {
  int32_t num_rows = 0;
  const float* x = nullptr;  // [*, k], rows x_stride apart
  int64_t x_stride = 0;
  const int32_t* x_rows = nullptr;  // [num_rows] row of x of each row; null: row i of row i
  WeightMatrix weight;
  const float* bias = nullptr;  // [n], or null
  float* y = nullptr;           // [num_rows, n], rows y_stride apart
  int64_t y_stride = 0;
};

// Where gemm_columns keeps converted rows of x and dequantised rows of W: one piece of memory for
// each thread.
class GemmScratch {
 public:
  explicit GemmScratch(const CpuContext& ctx);
  [[nodiscard]] std::byte* of_thread() const {
    return threads_ == nullptr ? own_.get() : threads_->scratch();
  }

 private:
  const ThreadPool* threads_;
  std::unique_ptr<std::byte[]> own_;  // of a context without a pool, which only tests and tools use
};

// Columns [begin, end) of all rows. `scratch`: of the calling thread. The pieces of a product that
// threads write at once should begin at multiples of kGemmGrain, so that they share no cache line.
inline constexpr int32_t kGemmGrain = 16;
void gemm_columns(const GemmColumns& p, int32_t begin, int32_t end, std::byte* scratch);

// What gemm_columns leaves alone of a thread's scratch memory if the weights are plain: the bytes
// from this one on.
inline constexpr int64_t kPlainScratchBytes = 512 << 10;

// Calls multiply(begin, end) for pieces of columns that cover those of `weight`, on all threads if
// the product is large enough.
template <class Multiply>
void split_columns(const CpuContext& ctx, int32_t num_rows, const WeightMatrix& weight,
                   const Multiply& multiply) {
  // Fewer multiplications cost less than a fork and join.
  constexpr int64_t kMinParallelWork = 100 << 10;
  const int32_t n = weight.n;
  if (ctx.num_threads == 1 || int64_t{num_rows} * n * weight.k < kMinParallelWork) {
    multiply(0, n);
    return;
  }
  // Each thread has a few pieces, so that an interrupted thread does not delay the others.
  // Splitting a shorter stream costs more than it evens out.
  constexpr int64_t kMinSplitBytes = 4 << 20;
  const int64_t num_grains = (n + kGemmGrain - 1) / kGemmGrain;
  const int64_t thread_bytes = n * weight.row_bytes() / ctx.num_threads;
  const int32_t pieces_per_thread = thread_bytes >= kMinSplitBytes ? 4 : 1;
  ctx.for_ranges(num_grains, pieces_per_thread, [&](int64_t begin, int64_t end) {
    multiply(static_cast<int32_t>(begin * kGemmGrain),
             static_cast<int32_t>(std::min<int64_t>(end * kGemmGrain, n)));
  });
}

}  // namespace paceline
