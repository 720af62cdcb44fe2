// SPDX-License-Identifier: Apache-2.0
#pragma once

// A scheduler with a pool of any size, whose device finishes when a test says so.

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "scheduler/scheduler.h"
#include "wire/blocks.h"

namespace paceline::testing {

inline constexpr int32_t kBlockSize = 8;

// One full group of 64 bytes a token; the pool has room for `num_tokens` tokens.
inline KvLayout layout_for(int32_t num_tokens) {
  const std::vector<KvLayerShape> layers = {{.kind = FullKv{}, .num_kv_heads = 1, .head_dim = 8}};
  // The planner wants eight slabs at least; small pools are cut to exactly what a test needs.
  KvLayout layout = plan_kv_layout(layers, {}, kBlockSize, DType::kFloat32, 1 << 20);
  const int64_t blocks = (num_tokens + kBlockSize - 1) / kBlockSize;
  layout.slab_bytes = layout.groups[0].block_bytes;
  layout.num_slabs = blocks + 1;
  layout.pool_bytes = layout.num_slabs * layout.slab_bytes;
  return layout;
}

struct SchedulerHost {
  explicit SchedulerHost(int32_t pool_tokens,
                         SchedulerOptions options = {.max_num_seqs = 4,
                                                     .max_num_batched_tokens = 64,
                                                     .prefill_chunk_size = 16,
                                                     .max_score_rows = 8,
                                                     .num_draft_tokens = 3,
                                                     .max_in_flight = 2})
      : layout(layout_for(pool_tokens)),
        pool(layout),
        scheduler(options, pool),
        max_drafts(options.num_draft_tokens) {}

  Sequence& add(int32_t prompt_len, int32_t max_tokens, bool is_score = false) {
    return add_sample(next_id++, 0, 1, prompt_len, max_tokens, is_score);
  }

  std::vector<Sequence*> add_samples(int32_t num_samples, int32_t prompt_len, int32_t max_tokens) {
    const RequestId id = next_id++;
    std::vector<Sequence*> samples;
    for (int32_t i = 0; i < num_samples; ++i) {
      samples.push_back(&add_sample(id, i, num_samples, prompt_len, max_tokens));
    }
    return samples;
  }

  Sequence& add_sample(RequestId id, int32_t sample, int32_t num_samples, int32_t prompt_len,
                       int32_t max_tokens, bool is_score = false) {
    auto sequence = std::make_unique<Sequence>();
    sequence->id = id;
    sequence->sample = sample;
    sequence->num_samples = num_samples;
    sequence->tokens.assign(prompt_len, 1);
    sequence->prompt_len = prompt_len;
    sequence->limit = is_score ? prompt_len : prompt_len + max_tokens;
    sequence->max_drafts = max_drafts;
    sequence->is_score = is_score;
    scheduler.add(*sequence);
    all.push_back(std::move(sequence));
    return *all.back();
  }

  // The planned rows of a sequence, or null.
  [[nodiscard]] const PlannedSequence* planned(const Sequence& sequence) const {
    for (const PlannedSequence& launch : plan.sequences) {
      if (launch.sequence == &sequence) return &launch;
    }
    return nullptr;
  }

  // Plans and launches the next iteration.
  bool plan_next() {
    plan.iteration = iteration + 1;
    plan.num_drafts = max_drafts;
    if (!scheduler.plan(plan)) return false;
    ++iteration;
    return true;
  }

  // The device has finished everything; each emitting launch of `plan` brought `num_tokens`.
  void read(int32_t num_tokens = 1) {
    scheduler.complete(iteration);
    for (const PlannedSequence& launch : plan.sequences) {
      Sequence& s = *launch.sequence;
      --s.launches_in_flight;
      if (launch.epoch != s.epoch) continue;
      if (launch.kind == RowKind::kDecode || launch.kind == RowKind::kPrefillFinal) {
        --s.emitting_in_flight;
        s.tokens.insert(s.tokens.end(), num_tokens, 2);
      }
      scheduler.advance(s, launch);
    }
  }

  KvLayout layout;
  SlabPool pool;
  Scheduler scheduler;
  int32_t max_drafts;
  IterationPlan plan;
  std::vector<std::unique_ptr<Sequence>> all;
  RequestId next_id = 1;
  int64_t iteration = -1;
};

}  // namespace paceline::testing
