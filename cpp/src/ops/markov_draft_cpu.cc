// SPDX-License-Identifier: Apache-2.0
//
// A draft of a Markov chain on the CPU. Threads have pieces of the columns of W2, as in `gemm`. The
// products of a piece stay in the cache until they are added to the logits; the draw follows.

#include <algorithm>

#include "base/check.h"
#include "base/float_types.h"
#include "device/cpu_context.h"
#include "ops/gemm_columns.h"
#include "ops/markov.h"

namespace paceline {
namespace {

// Behind what gemm_columns uses of a thread's scratch memory: rows of W1, then products.
constexpr int64_t kScratchFloats =
    static_cast<int64_t>((ThreadPool::kScratchBytes - kPlainScratchBytes) / sizeof(float));
constexpr int64_t kRowFloats = kScratchFloats / 2;
constexpr int64_t kMaxRows = 128;  // at once; more would leave room for the products of few columns

// Row previous[row] of W1 as floats; zeros without such a row.
void copy_row(const MarkovDraftParams& p, int32_t row, float* to) {
  const int32_t token = p.previous[row];
  const int32_t rank = p.weight.k;
  if (token < 0 || token >= p.vocab_size) {
    std::fill_n(to, rank, 0.0f);
  } else if (p.weight.dtype == DType::kFloat32) {
    std::copy_n(static_cast<const float*>(p.table) + int64_t{token} * rank, rank, to);
  } else {
    const auto* const from = static_cast<const uint16_t*>(p.table) + int64_t{token} * rank;
    for (int32_t i = 0; i < rank; ++i) to[i] = bf16_to_float(from[i]);
  }
}

// Adds the products of columns [begin, end) to the logits of rows [first, last).
void add_products(const MarkovDraftParams& p, int32_t first, int32_t last, int32_t begin,
                  int32_t end, std::byte* scratch) {
  const int32_t rank = p.weight.k;
  auto* const own = reinterpret_cast<float*>(scratch + kPlainScratchBytes);
  float* const products = own + kRowFloats;
  const auto* x = static_cast<const float*>(p.factors) + int64_t{first} * rank;
  if (p.factors == nullptr) {
    for (int32_t row = first; row < last; ++row)
      copy_row(p, row, own + int64_t{row - first} * rank);
    x = own;
  }
  WeightMatrix piece = p.weight;
  piece.data += begin * piece.row_bytes();
  piece.n = end - begin;
  gemm_columns({.num_rows = last - first,
                .x = x,
                .x_stride = rank,
                .weight = piece,
                .y = products,
                .y_stride = piece.n},
               0, piece.n, scratch);
  for (int32_t row = first; row < last; ++row) {
    const float* const added = products + int64_t{row - first} * piece.n;
    float* const logits = p.logits + int64_t{row} * p.weight.n + begin;
    for (int32_t i = 0; i < piece.n; ++i) logits[i] += added[i];
  }
}

}  // namespace

void check_markov_draft(const MarkovDraftParams& p) {
  const WeightMatrix& w = p.weight;
  PACELINE_CHECK(w.format == WeightFormat::kPlain && !w.is_packed(),
                 "the Markov head multiplies plain weights");
  PACELINE_CHECK((p.factors == nullptr) == (p.table != nullptr) &&
                     (p.table == nullptr) == (p.previous == nullptr),
                 "a draft has either factors or the rows of a table");
  if (!p.draws) return;
  const DrawParams& d = p.draw;
  PACELINE_CHECK(d.num_rows == p.num_rows && d.max_rows == p.max_rows && d.logits == p.logits &&
                     d.logits_stride == w.n && d.vocab_limit <= w.n && d.logit_rows == nullptr &&
                     d.probabilities == nullptr,
                 "a draft is drawn from its own logits, without probabilities");
}

void markov_draft(CpuContext& ctx, const MarkovDraftParams& p) {
  check_markov_draft(p);
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  PACELINE_CHECK(p.weight.k <= kRowFloats, "a Markov head of rank ", p.weight.k,
                 "; the largest is ", kRowFloats);
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  if (num_rows <= 0) return;
  const auto chunk =
      static_cast<int32_t>(std::min<int64_t>({num_rows, kRowFloats / p.weight.k, kMaxRows}));
  const auto room = static_cast<int32_t>(kRowFloats / chunk / kGemmGrain * kGemmGrain);
  const GemmScratch scratch(ctx);
  split_columns(ctx, num_rows, p.weight, [&](int32_t begin, int32_t end) {
    for (int32_t column = begin; column < end; column += room) {
      for (int32_t row = 0; row < num_rows; row += chunk) {
        add_products(p, row, std::min(row + chunk, num_rows), column, std::min(column + room, end),
                     scratch.of_thread());
      }
    }
  });
  if (p.draws) draw(ctx, p.draw);
}

}  // namespace paceline
