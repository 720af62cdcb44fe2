// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which kernel computes a product. All of them sum every output over K in ascending order with one
// float32 accumulator, so the choice never shows in the bits: our own kernel by construction, a
// library algorithm because it was compared with ours, bit for bit, on this machine before its
// first use (`admit`).

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <tuple>

#include "ops/ops.h"

namespace paceline {

class CublasLt;
struct CudaContext;

class GemmPlanner {
 public:
  // `uses_library`: false leaves everything to our own kernel. Throws DeviceError when the library
  // is wanted and cannot be loaded (the message says where it was looked for).
  explicit GemmPlanner(bool uses_library);
  ~GemmPlanner();
  GemmPlanner(const GemmPlanner&) = delete;
  GemmPlanner& operator=(const GemmPlanner&) = delete;

  // Rows that the library computes for `rows`: one plan serves all row counts up to the next step.
  // Buffers of x and y must reach that far.
  [[nodiscard]] static int32_t padded_rows(int32_t rows);

  // Tries the library's algorithms for products of bfloat16 weights [n, k], at every step of rows
  // that up to `max_rows` of them use, and keeps the fastest that agrees with our kernel in every
  // bit and is faster. `weights`: of one shape, as one layer after the other has them. Allocates,
  // runs kernels and waits for them: only at start. Results are kept by shape.
  void admit(CudaContext& ctx, int32_t max_rows, std::span<const void* const> weights, int32_t n,
             int32_t k, DType y_dtype);

  // Whether an admitted algorithm was enqueued.
  [[nodiscard]] bool run_library(CudaContext& ctx, const GemmParams& p);

 private:
  struct Plan;
  struct Trial;
  using Key = std::tuple<int32_t, int32_t, int32_t, DType>;  // padded rows, n, k, dtype of y

  [[nodiscard]] std::unique_ptr<Plan> best_plan(CudaContext& ctx, const Trial& trial, int32_t rows);

  std::unique_ptr<CublasLt> library_;
  std::map<Key, std::unique_ptr<Plan>> plans_;  // null: our own kernel is the better
};

}  // namespace paceline
