// SPDX-License-Identifier: Apache-2.0
#include "executor/cuda_products.h"

#include <algorithm>
#include <vector>

namespace paceline {

void plan_products(CudaContext& ctx, GemmPlanner& planner, const BatchShape& shape,
                   const Decoder& target, const Decoder* drafter) {
  struct Products {  // all products of one shape
    int32_t n;
    int32_t k;
    DType y_dtype;
    int32_t max_rows;
    std::vector<const void*> weights;
  };
  std::vector<Products> all;
  const auto add = [&](const std::byte* weight, int64_t n, int64_t k, int32_t max_rows,
                       DType y_dtype) {
    auto found = std::find_if(all.begin(), all.end(), [&](const Products& p) {
      return p.n == n && p.k == k && p.y_dtype == y_dtype;
    });
    if (found == all.end()) {
      found = all.insert(found, {.n = static_cast<int32_t>(n),
                                 .k = static_cast<int32_t>(k),
                                 .y_dtype = y_dtype,
                                 .max_rows = 0,
                                 .weights = {}});
    }
    found->max_rows = std::max(found->max_rows, max_rows);
    found->weights.push_back(weight);
  };
  const auto add_all = [&](const Decoder& decoder, int32_t max_rows, int32_t max_logit_rows) {
    const DecoderWeights& weights = decoder.weights();
    if (weights.dtype != DType::kBFloat16) return;
    const DecoderConfig& c = decoder.config();
    const int64_t per_layer = c.per_layer_inputs.size;
    for (size_t layer = 0; layer < c.layers.size(); ++layer) {
      const AttentionConfig& a = c.layers[layer].attention;
      const MlpConfig& m = c.layers[layer].mlp;
      const LayerWeights& w = weights.layers[layer];
      const int64_t q = int64_t{a.num_qo_heads} * a.head_dim;
      add(w.qkv, qkv_rows(a), c.qkv_inputs(layer), max_rows, DType::kBFloat16);
      add(w.o, c.hidden, q, max_rows, DType::kBFloat16);
      add(w.gate_up, 2 * int64_t{m.intermediate}, c.hidden, max_rows, DType::kBFloat16);
      add(w.down, c.hidden, m.intermediate, max_rows, DType::kBFloat16);
      if (per_layer > 0) {
        add(w.per_layer_gate, per_layer, c.hidden, max_rows, DType::kBFloat16);
        add(w.per_layer_proj, c.hidden, per_layer, max_rows, DType::kBFloat16);
      }
    }
    if (per_layer > 0) {
      add(weights.per_layer_proj, per_layer * static_cast<int64_t>(c.layers.size()), c.hidden,
          max_rows, DType::kBFloat16);
    }
    const DraftHeadWeights& head = weights.head;
    if (c.drafter) add(head.fc, c.hidden, c.drafter->fc_width(), max_rows, DType::kFloat32);
    if (head.centroids != nullptr) {
      add(head.centroids, c.drafter->centroids.count, c.hidden, max_logit_rows, DType::kFloat32);
    } else {
      add(decoder.lm_head(), c.lm_head_rows(), c.hidden, max_logit_rows, DType::kFloat32);
    }
    if (head.feedback != nullptr) {
      add(head.feedback, c.drafter->target_hidden, c.hidden, max_logit_rows, DType::kFloat32);
    }
  };
  add_all(target, shape.max_verify_rows, shape.max_logit_rows);
  if (drafter != nullptr) {
    add_all(*drafter, shape.max_verify_rows + shape.max_seqs, shape.max_seqs);
  }
  for (const Products& p : all) {
    planner.admit(ctx, p.max_rows, p.weights, p.n, p.k, p.y_dtype);
  }
}

}  // namespace paceline
