// SPDX-License-Identifier: Apache-2.0
#include "executor/default_options.h"

#include <algorithm>
#include <optional>
#include <variant>

#include <paceline/executor.h>

#include "base/boundary.h"
#include "base/check.h"
#include "executor/default_sizes.h"
#include "model/weights/model_impl.h"

namespace paceline {
namespace {

constexpr int64_t kDefaultBatchedTokens = 2048;
constexpr int32_t kDefaultStateInterval = 4096;

// Only where the output does not depend on the number of drafts, and its cost can be measured.
bool adapts_by_default(const ExecutorOptions& o) {
  const SpeculativeOptions& s = o.speculative;
  return s.num_speculative_tokens > 0 && s.rejection_sample_method == AcceptMethod::kCoupled &&
         s.drafter == nullptr && !o.use_null_device;
}

ExecutorOptions recommend(const ExecutorOptions& given, const Model& target, const Model* draft) {
  return choose_sizes(given, target, draft, std::nullopt).options;
}

}  // namespace

bool has_indexer(const Model& model) {
  return std::ranges::any_of(model.config.layers, [](const LayerConfig& layer) {
    return std::visit([](const auto& attention) { return attention.scores_entries(); },
                      layer.attention);
  });
}

int32_t longest_model_len(const Model& target, const Model* draft) {
  const int32_t supported = has_indexer(target)
                                ? std::min(target.config.max_position, kLeastDefaultLen)
                                : target.config.max_position;
  // A draft head supports all positions of its target; its own max_position describes its training.
  if (draft == nullptr || draft->config.drafter) return supported;
  const int32_t least = std::min(supported, kLeastDefaultLen);
  return std::clamp(draft->config.max_position, least, supported);
}

ExecutorOptions with_defaults(ExecutorOptions o, const Model& target, const Model* draft) {
  if (o.max_model_len == 0) o.max_model_len = longest_model_len(target, draft);
  int32_t& k = o.speculative.num_speculative_tokens;
  if (k == 0 && draft != nullptr) k = draft->default_draft_tokens;
  SpeculativeOptions& s = o.speculative;
  if (!s.adaptive.has_value()) s.adaptive = adapts_by_default(o);
  if (o.state_interval == 0 && o.block_size > 0) {
    o.state_interval = std::max(kDefaultStateInterval / o.block_size, 1) * o.block_size;
  }
  if (o.max_num_batched_tokens == 0) {
    const int64_t windows = int64_t{o.max_num_seqs} * (int64_t{k} + 1);
    o.max_num_batched_tokens = static_cast<int32_t>(
        std::clamp(windows, kDefaultBatchedTokens, int64_t{largest::max_num_batched_tokens}));
  }
  return o;
}

ExecutorOptions recommended_options(const Model& target, const Model* draft) {
  return at_boundary([&] { return recommend({}, target, draft); });
}

ExecutorOptions recommended_options(const ModelFolder& folder) {
  return at_boundary([&] {
    if (folder.target == nullptr) throw InvalidArgument("folder.target is null; give a model");
    ExecutorOptions options;
    options.speculative.num_speculative_tokens = folder.num_speculative_tokens;
    return recommend(options, *folder.target, folder.draft.get());
  });
}

SamplingOptions recommended_sampling(const ModelFolder& folder) {
  return at_boundary([&] { return SamplingOptions{.stop_token_ids = folder.stop_token_ids}; });
}

}  // namespace paceline
