// SPDX-License-Identifier: Apache-2.0
#include "runner/cuda_products.h"

#include <algorithm>
#include <vector>

#include "base/overloaded.h"
#include "model/forward/layer_ops.h"
#include "model/weights/visit_weights.h"

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
  const auto add = [&](const WeightMatrix& weight, int32_t max_rows, DType y_dtype) {
    auto found = std::find_if(all.begin(), all.end(), [&](const Products& p) {
      return p.n == weight.n && p.k == weight.k && p.y_dtype == y_dtype;
    });
    if (found == all.end()) {
      found = all.insert(
          found, {.n = weight.n, .k = weight.k, .y_dtype = y_dtype, .max_rows = 0, .weights = {}});
    }
    found->max_rows = std::max(found->max_rows, max_rows);
    if (std::ranges::find(found->weights, weight.data) != found->weights.end()) return;
    found->weights.push_back(weight.data);
  };
  const auto add_all = [&](const Decoder& decoder, int32_t max_rows, int32_t max_logit_rows) {
    const DecoderWeights& weights = decoder.weights();
    const auto add_linear = [&](const Linear& own, const LinearShape& shape) {
      // The library has no products by head or by group.
      if (shape.is_by_head || shape.num_groups > 1) return;
      // markov_draft multiplies W2 of a Markov head.
      if (&own == &weights.head.markov) return;
      const bool is_lm_head = &own == &weights.lm_head;
      // With centroids, the rows of the LM head are looked up.
      if (is_lm_head && weights.head.centroids.is_present()) return;
      const WeightMatrix& weight = is_lm_head ? decoder.lm_head().weight : own.weight;
      if (weight.dtype != DType::kBFloat16 || weight.format != WeightFormat::kPlain) return;
      const auto rows_of = [&] {
        switch (shape.rows) {
          case LinearRows::kPass:
            return max_rows;
          case LinearRows::kStreams:
            return max_rows * decoder.config().streams.count;
          case LinearRows::kLogits:
            return max_logit_rows;
        }
        return max_rows;
      };
      add(weight, rows_of(), shape.has_float_output ? DType::kFloat32 : DType::kBFloat16);
    };
    // The library has no products by expert.
    const auto skip = [](const ExpertLinears&, const LinearShape&) {};
    for_each_linear(decoder.config(), weights, Overloaded{add_linear, skip});
  };
  // The context of a block drafter may take some rows of a matrix only.
  const auto add_context = [&](const Decoder& decoder, int32_t max_rows) {
    for (size_t i = 0; i < decoder.config().layers.size(); ++i) {
      std::visit(
          [&]<class Kind>(const Kind& kind) {
            if constexpr (Kind::kWritesContext) {
              const auto& own = std::get<WeightsOf<Kind>>(decoder.weights().layers[i].attention);
              const Linear rows = context_rows(kind, own);
              if (rows.weight.dtype != DType::kBFloat16) return;
              if (rows.weight.format != WeightFormat::kPlain) return;
              add(rows.weight, max_rows, DType::kBFloat16);
            }
          },
          decoder.config().layers[i].attention);
    }
  };
  add_all(target, shape.max_verify_rows, shape.max_logit_rows);
  if (drafter != nullptr) {
    const std::optional<DrafterConfig>& config = drafter->config().drafter;
    const bool drafts_in_blocks = config && config->kind == DrafterKind::kBlock;
    add_all(*drafter, shape.max_verify_rows + shape.max_seqs,
            drafts_in_blocks ? shape.max_seqs * shape.num_draft_tokens : shape.max_seqs);
    if (drafts_in_blocks) add_context(*drafter, shape.max_verify_rows + shape.max_seqs);
  }
  for (const Products& p : all) {
    planner.admit(ctx, p.max_rows, p.weights, p.n, p.k, p.y_dtype);
  }
}

}  // namespace paceline
