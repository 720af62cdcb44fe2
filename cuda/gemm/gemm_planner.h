// SPDX-License-Identifier: Apache-2.0
#pragma once

// Chooses the kernel that computes a product. All of them sum every output over K in ascending
// order with one float32 accumulator, so the choice does not change a bit: our own kernel by
// construction, a library algorithm because `admit` compared it with ours, bit for bit, on this
// machine before its first use.

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
  // With `uses_library` false our own kernel computes everything. Throws DeviceError when the
  // library is requested and cannot be loaded; the message has the paths tried.
  explicit GemmPlanner(bool uses_library);
  ~GemmPlanner();
  GemmPlanner(const GemmPlanner&) = delete;
  GemmPlanner& operator=(const GemmPlanner&) = delete;

  // The number of rows that the library computes for `rows`: one plan serves all row counts up to
  // the next step. Buffers of x and y must have room for that many rows.
  [[nodiscard]] static int32_t padded_rows(int32_t rows);

  // Tries the library's algorithms for products of bfloat16 weights [n, k], at every step of rows
  // up to `max_rows`, and stores, by shape, the fastest that agrees with our kernel in every bit
  // and is faster. `weights` are the weights of that shape, layer by layer. Allocates, runs kernels
  // and waits for them, so call it at start only.
  void admit(CudaContext& ctx, int32_t max_rows, std::span<const void* const> weights, int32_t n,
             int32_t k, DType y_dtype);

  // Whether there is an admitted algorithm for this product.
  [[nodiscard]] bool has_plan(const GemmParams& p) const { return plan_of(p) != nullptr; }
  // Enqueues an admitted algorithm, if there is one for this product; returns whether it did.
  [[nodiscard]] bool run_library(CudaContext& ctx, const GemmParams& p);

 private:
  struct Plan;
  struct Trial;
  using Key = std::tuple<int32_t, int32_t, int32_t, DType>;  // padded rows, n, k, dtype of y

  [[nodiscard]] const Plan* plan_of(const GemmParams& p) const;
  [[nodiscard]] std::unique_ptr<Plan> best_plan(CudaContext& ctx, const Trial& trial, int32_t rows);

  std::unique_ptr<CublasLt> library_;
  std::map<Key, std::unique_ptr<Plan>> plans_;  // null: our own kernel is faster
};

}  // namespace paceline
