// SPDX-License-Identifier: Apache-2.0
#pragma once

// A piece of a product on the CPU: some columns of y = x W^T for some rows. `gemm` and
// `expert_gemm` split their work into such pieces. An output has the same bits whatever piece
// computes it (gemm_columns.cc), so a row of an expert has the bits that gemm gives it.

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

}  // namespace paceline
