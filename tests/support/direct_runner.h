// SPDX-License-Identifier: Apache-2.0
#pragma once

// Drives a CpuRunner iteration by iteration on the calling thread, with blocks and plans made by
// hand, so that tests can look at device memory between iterations.

#include <cstring>
#include <memory>
#include <vector>

#include "batch/batch_builder.h"
#include "executor/cpu_runner.h"
#include "kv/kv_layout.h"
#include "kv/sequence_blocks.h"

namespace paceline::testing {

struct DirectOptions {
  int32_t max_seqs = 4;
  int32_t max_verify_rows = 256;
  int32_t num_draft_tokens = 0;
  int32_t max_model_len = 256;
  int32_t block_size = 16;
  int64_t pool_bytes = 8 << 20;
  DraftDriver driver = DraftDriver::kUnrolled;
  int32_t num_threads = 1;
  bool use_window_lists = false;
};

class DirectRunner {
 public:
  DirectRunner(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
               const DirectOptions& options)
      : options_(options),
        layout_(plan_kv_layout(
            kv_layer_shapes(target->config),
            draft != nullptr ? kv_layer_shapes(draft->config) : std::vector<KvLayerShape>{},
            options.block_size, target->weights.dtype, options.pool_bytes)),
        pool_(layout_),
        vocab_size_(target->config.vocab_size) {
    shape_ = {.max_seqs = options.max_seqs,
              .max_verify_rows = options.max_verify_rows,
              .max_logit_rows = options.max_verify_rows,
              .num_draft_tokens = options.num_draft_tokens,
              .first_rows_per_decode = draft != nullptr ? 2 : 0};
    runner_ = std::make_unique<CpuRunner>(
        target, draft, layout_,
        CpuRunnerOptions{.iteration = {.shape = shape_,
                                       .max_model_len = options.max_model_len,
                                       .use_window_lists = options.use_window_lists},
                         .driver = options.driver,
                         .num_threads = options.num_threads,
                         .poison_pool = true});
    reserve_inputs(inputs_, shape_);
    sequences_.resize(options.max_seqs);
  }

  // Starts a sequence in a slot: `tokens` is all that is known of it, blocks are reserved for
  // `limit` tokens.
  void start(int32_t slot, std::vector<int32_t> tokens, int32_t limit, double temperature = 0,
             uint64_t seed = 0, bool is_score = false) {
    sequences_[slot] = std::make_unique<Sequence>();
    Sequence& s = *sequences_[slot];
    s.id = slot + 1;
    s.tokens = std::move(tokens);
    s.prompt_len = s.known_len();
    s.limit = limit;
    s.slot = slot;
    s.sampling.temperature = temperature;
    s.sampling.seed = seed;
    s.is_score = is_score;
    s.needs_slot_reset = true;
    s.blocks = SequenceBlocks(static_cast<int32_t>(layout_.groups.size()));
    if (!s.blocks.reserve(pool_, limit, slot, plan_.table_writes)) {
      throw InternalError("the test's pool is too small");
    }
  }

  // Adds rows of a sequence to the next iteration; see PlannedSequence.
  void plan(int32_t slot, RowKind kind, int32_t start, int32_t num_rows) {
    Sequence& s = *sequences_[slot];
    plan_.sequences.push_back({.sequence = &s,
                               .kind = kind,
                               .start = start,
                               .num_rows = num_rows,
                               .resets_slot = s.needs_slot_reset});
    s.needs_slot_reset = false;
  }

  void run() {
    std::stable_sort(plan_.sequences.begin(), plan_.sequences.end(),
                     [](const PlannedSequence& a, const PlannedSequence& b) {
                       return static_cast<int32_t>(a.kind) < static_cast<int32_t>(b.kind);
                     });
    build_batch(plan_, shape_, inputs_);
    inputs_.score_copies.clear();  // tests read the logits buffer
    runner_->run_now(inputs_);
    last_plan_ = plan_;
    plan_.sequences.clear();
    plan_.table_writes.clear();
  }

  // Logits of a sequence's rows in the last iteration without a drafter: [rows][vocab].
  [[nodiscard]] std::vector<std::vector<float>> logits_of(int32_t slot) const {
    std::vector<std::vector<float>> rows;
    for (size_t i = 0; i < last_plan_.sequences.size(); ++i) {
      if (last_plan_.sequences[i].sequence->slot != slot) continue;
      for (int32_t row = inputs_.logit_indptr[i]; row < inputs_.logit_indptr[i + 1]; ++row) {
        const float* begin = runner_->buffers().logits + int64_t{row} * vocab_size_;
        rows.emplace_back(begin, begin + vocab_size_);
      }
    }
    return rows;
  }

  // K and V bytes of one position in every layer of a group.
  [[nodiscard]] std::vector<std::byte> kv_of(int32_t slot, GroupId g, int32_t position) const {
    const KvGroup& group = layout_.groups[g];
    const BlockId block = sequences_[slot]->blocks.table(g)[position / group.block_size];
    const int64_t token_bytes = int64_t{group.num_kv_heads} * group.head_dim *
                                dtype_bytes(group.dtype);
    std::vector<std::byte> bytes;
    for (size_t layer = 0; layer < group.layers.size() * 2; ++layer) {  // K and V alternate
      const std::byte* at = runner_->kv_pool() + block * group.block_bytes +
                            static_cast<int64_t>(layer) * group.layer_bytes / 2 +
                            position % group.block_size * token_bytes;
      bytes.insert(bytes.end(), at, at + token_bytes);
    }
    return bytes;
  }

  // Makes the device believe that `tokens` is what is known of the sequence and that `drafts`
  // follow.
  void set_known(int32_t slot, const std::vector<int32_t>& tokens,
                 const std::vector<int32_t>& drafts) {
    const SequenceState& s = runner_->buffers().sequences;
    std::copy(tokens.begin(), tokens.end(), s.history + slot * s.history_stride);
    s.known_len[slot] = static_cast<int32_t>(tokens.size());
    s.is_active[slot] = 1;
    std::copy(drafts.begin(), drafts.end(), s.draft_tokens + int64_t{slot} * s.num_draft_tokens);
    s.draft_len[slot] = static_cast<int32_t>(drafts.size());
  }

  [[nodiscard]] CpuRunner& runner() { return *runner_; }
  [[nodiscard]] const KvLayout& layout() const { return layout_; }
  [[nodiscard]] SlabPool& pool() { return pool_; }
  [[nodiscard]] Sequence& sequence(int32_t slot) { return *sequences_[slot]; }
  [[nodiscard]] const SequenceResult& result(int32_t batch_row) const {
    return runner_->buffers().results[batch_row];
  }

 private:
  DirectOptions options_;
  KvLayout layout_;
  SlabPool pool_;
  int32_t vocab_size_;
  BatchShape shape_;
  std::unique_ptr<CpuRunner> runner_;
  IterationInputs inputs_;
  StepPlan plan_;
  StepPlan last_plan_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
};

}  // namespace paceline::testing
