// SPDX-License-Identifier: Apache-2.0
#include "executor/default_sizes.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"
#include "device/host_bytes.h"
#include "executor/default_options.h"
#include "executor/kv_cache_size.h"
#include "executor/setup.h"
#include "model/description/kv_shapes.h"
#include "model/weights/model_impl.h"
#include "model/weights/rank_model.h"
#include "runner/dtypes.h"
#include "scheduler/scheduler.h"

namespace paceline {
namespace {

// Chooses sizes for the models of one engine.
class SizeChooser {
 public:
  SizeChooser(const ExecutorOptions& given, const Model& target, const Model* draft,
              std::optional<int64_t> free_bytes)
      : target_(target),
        draft_(draft),
        has_given_len_(given.max_model_len != 0),
        has_given_pool_(given.kv_cache_bytes != 0),
        options_(with_defaults(given, target, draft)),
        target_layers_(kv_layer_shapes(target.config)) {
    if (draft != nullptr) draft_layers_ = draft_kv_layer_shapes(draft->config, target.config);
    memory_.free = free_bytes;
    if (!free_bytes) {
      memory_.free =
          target.device == Device::kCuda ? std::optional(cuda_free_bytes()) : host_bytes().room();
    }
    if (options_.gpu_memory_utilization > 0) {
      memory_.total = cuda_status().total_bytes;
      memory_.weights = model_weight_bytes(target) + (draft ? model_weight_bytes(*draft) : 0);
    }
  }

  [[nodiscard]] DefaultSizes choose() const {
    DefaultSizes sizes = {.options = options_};
    if (!has_given_len_) choose_len(sizes);
    KvCacheSize pool = pool_size(sizes.options);
    sizes.options.kv_cache_bytes = pool.bytes;
    sizes.kv_cache_rule = std::move(pool.reason);
    return sizes;
  }

 private:
  void choose_len(DefaultSizes& sizes) const {
    const int32_t supported = target_.config.max_position;
    const int32_t longest = options_.max_model_len;
    const int32_t found = longest_that_fits();
    sizes.options.max_model_len = found;
    sizes.is_shortened = found < supported;
    if (found == supported) {
      sizes.model_len_rule = "the length that the model supports";
    } else if (found == longest && has_indexer(target_)) {
      sizes.model_len_rule =
          concat("the model supports ", supported,
                 " tokens, but a larger max_model_len makes each of its iterations longer");
    } else if (found == longest) {
      sizes.model_len_rule = concat("the length that the drafter supports, of the ", supported,
                                    " tokens that the model supports");
    } else {
      sizes.model_len_rule =
          concat("the most for which the KV pool has room (kv_cache_bytes sets its size), of the ",
                 supported, " tokens that the model supports");
    }
  }

  [[nodiscard]] int32_t longest_that_fits() const {
    const int32_t longest = options_.max_model_len;
    if (fits(longest)) return longest;
    const int32_t block_size = std::max(options_.block_size, 1);
    // [fitting, failing), in blocks.
    int32_t fitting = 0;
    int32_t failing = (longest + block_size - 1) / block_size;
    while (failing - fitting > 1) {
      const int32_t middle = fitting + (failing - fitting) / 2;
      (fits(middle * block_size) ? fitting : failing) = middle;
    }
    // Without room for any sequence, what makes the pool or the first request says so.
    return fitting > 0 ? fitting * block_size : std::min(longest, kLeastDefaultLen);
  }

  // Whether a sequence of so many tokens can run.
  [[nodiscard]] bool fits(int32_t max_model_len) const {
    ExecutorOptions o = options_;
    o.max_model_len = max_model_len;
    // Without k the drafter has no rows. The engine refuses that when it starts.
    const Model* const draft = o.speculative.num_speculative_tokens > 0 ? draft_ : nullptr;
    try {
      o.kv_cache_bytes = pool_size(o).bytes;
    } catch (const OutOfMemory&) {
      return false;
    }
    if (max_model_len > kLeastDefaultLen && memory_.free &&
        !has_room_beside(o, workspace_bytes(o, target_, draft), target_.device, *memory_.free)) {
      return false;
    }
    const KvLayout layout = plan_layout(o, target_, draft_);
    const std::vector<int64_t> blocks =
        most_blocks(engine_options(o, target_, draft).scheduler, layout, max_model_len);
    int64_t num_slabs = 0;
    for (GroupId g = 0; g < static_cast<GroupId>(blocks.size()); ++g) {
      const int64_t per_slab = layout.blocks_per_slab(g);
      num_slabs += (blocks[static_cast<size_t>(g)] + per_slab - 1) / per_slab;
    }
    return num_slabs <= layout.num_usable_slabs();
  }

  [[nodiscard]] KvCacheSize pool_size(const ExecutorOptions& o) const {
    if (has_given_pool_) return {o.kv_cache_bytes, "as given"};
    DeviceBytes memory = memory_;
    if (o.gpu_memory_utilization > 0) memory.workspace = workspace_bytes(o, target_, draft_);
    const int32_t shared_len =
        has_given_len_ ? o.max_model_len : std::min(o.max_model_len, kLeastDefaultLen);
    return default_kv_cache_size(target_layers_, draft_layers_, kv_dtype(target_), target_.device,
                                 o, memory, shared_len);
  }

  const Model& target_;
  const Model* const draft_;
  const bool has_given_len_;
  const bool has_given_pool_;
  const ExecutorOptions options_;  // max_model_len: as given, or the longest
  const std::vector<KvLayerShape> target_layers_;
  std::vector<KvLayerShape> draft_layers_;
  DeviceBytes memory_;
};

}  // namespace

DefaultSizes choose_sizes(const ExecutorOptions& given, const Model& target, const Model* draft,
                          std::optional<int64_t> free_bytes) {
  const int32_t num_ranks = given.tensor_parallel_size;
  if (target.ranks.empty() && num_ranks <= 1) {
    return SizeChooser(given, target, draft, free_bytes).choose();
  }
  // Each rank has a pool and a workspace of its own, which have the same sizes. GPUs have memory of
  // their own, and ranks on the CPU share that of the host.
  std::optional<int64_t> free = free_bytes;
  if (!free && target.device == Device::kCuda) {
    for (const auto& rank : target.ranks) {
      const int64_t of_gpu = cuda_free_bytes(rank->gpu);
      free = free ? std::min(*free, of_gpu) : of_gpu;
    }
  } else {
    if (!free) free = host_bytes().room();
    if (free) free = *free / num_ranks;
  }
  // The drafter outlives the call, so this need not own it.
  const std::shared_ptr<const Model> shared_draft(std::shared_ptr<void>(), draft);
  const RankModels drafts = rank_drafts(shared_draft, given);
  const Model* const own_draft = drafts.front().get();
  if (!target.ranks.empty()) {
    return SizeChooser(given, *target.ranks.front(), own_draft, free).choose();
  }
  check_ranks(target, num_ranks);
  const RankShare first = {.rank = 0, .num_ranks = num_ranks};
  return SizeChooser(given, *rank_model(target, first), own_draft, free).choose();
}

}  // namespace paceline
