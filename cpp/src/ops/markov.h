// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ops of a block drafter's heads, under the rules of ops.h. MarkovHead and ConfidenceHead
// (model/description/decoder_config.h) have the equations and the names.

#include <cstdint>

#include <paceline/dtype.h>

#include "ops/ops.h"

namespace paceline {

// A part of a row: `width` elements of row i of x.
struct RowPart {
  const void* x = nullptr;  // [max_rows, width] dtype, rows `stride` apart; null: zeros
  int64_t stride = 0;
  int32_t width = 0;
  DType dtype = DType::kFloat32;
};

// y = the parts of a row, one after the other, converted to y_dtype.
struct JoinPartsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  RowPart parts[3];  // those at the end may have width 0
  void* y;           // [max_rows, sum of the widths] y_dtype; overlaps no part
  DType y_dtype = DType::kFloat32;

  [[nodiscard]] int32_t width() const { return parts[0].width + parts[1].width + parts[2].width; }
};
void join_parts(CpuContext&, const JoinPartsParams&);
void join_parts(CudaContext&, const JoinPartsParams&);

// y = sigmoid(gate) * e, of MarkovHead::kGated.
struct GateEmbeddingsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* gate;  // [max_rows, rank]
  const float* e;     // [max_rows, rank]
  void* y;            // [max_rows, rank] y_dtype
  int32_t rank;
  DType y_dtype = DType::kFloat32;
};
void gate_embeddings(CpuContext&, const GateEmbeddingsParams&);
void gate_embeddings(CudaContext&, const GateEmbeddingsParams&);

// state = sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c) and y = tanh(o), of MarkovHead::kRnn.
struct AdvanceMarkovParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* mix;  // [max_rows, 3 * rank] g, c and o
  float* state;      // [max_rows, rank], updated
  bool is_first;     // the state before is 0, whatever `state` holds
  void* y;           // [max_rows, rank] y_dtype
  int32_t rank;
  DType y_dtype = DType::kFloat32;
};
void advance_markov(CpuContext&, const AdvanceMarkovParams&);
void advance_markov(CudaContext&, const AdvanceMarkovParams&);

// One draft of a Markov chain: logits += W2 f, and with `draws` the draw from these logits. f is
// the row of W1 for the token before, or is given. The logits of a row have the same bits whether
// the op draws or not, and whatever the other rows are, so that a draft depends on its sequence
// alone.
struct MarkovDraftParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  // f: [max_rows, weight.k] dtype; or null, then row previous[i] of `table` for row i.
  const void* factors = nullptr;
  const int32_t* previous = nullptr;  // [max_rows] outside of [0, vocab_size): f is zero
  const void* table = nullptr;        // W1, [vocab_size, weight.k] weight.dtype
  int32_t vocab_size = 0;
  WeightMatrix weight;            // W2, [n, k], plain and row-major; on a GPU weight.dtype is dtype
  float* logits;                  // [max_rows, n], updated; with `draws` undefined afterwards
  DType dtype = DType::kFloat32;  // of the activations
  bool draws = false;
  // With `draws`: the draw, from `logits` with the stride n, for the same rows, without
  // probabilities and logit_rows.
  DrawParams draw = {};
};
void markov_draft(CpuContext&, const MarkovDraftParams&);
void markov_draft(CudaContext&, const MarkovDraftParams&);
// Throws if the parameters contradict each other.
void check_markov_draft(const MarkovDraftParams& p);

// sigmoid(weight [h ; e] + bias), the estimate of a confidence head. Sums are float32, and so are
// the weights.
struct EstimateAcceptanceParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* h;        // [max_rows, hidden] dtype
  const float* e;       // [max_rows, rank]; not read where rank is 0
  const float* weight;  // [hidden + rank]
  const float* bias;    // [1]; null: 0
  float* probability;   // [max_rows]
  int32_t hidden;
  int32_t rank;  // 0: the head reads h alone
  DType dtype = DType::kFloat32;
};
void estimate_acceptance(CpuContext&, const EstimateAcceptanceParams&);
void estimate_acceptance(CudaContext&, const EstimateAcceptanceParams&);

}  // namespace paceline
