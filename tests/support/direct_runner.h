// SPDX-License-Identifier: Apache-2.0
#pragma once

// Drives a runner iteration by iteration, with blocks and plans made by hand, so that tests can
// look at device memory between iterations. The models' device decides which runner.

#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "batch/batch_builder.h"
#include "runner/cpu_runner.h"
#ifdef PACELINE_CUDA
#include "runner/cuda_runner.h"
#endif
#include "kv/kv_layout.h"
#include "kv/sequence_blocks.h"
#include "model/description/kv_shapes.h"
#include "support/kv_layers.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"

namespace paceline::testing {

struct DirectOptions {
  int32_t max_seqs = 4;
  int32_t max_verify_rows = 256;
  int32_t num_draft_tokens = 0;
  int32_t max_model_len = 256;
  int32_t block_size = 16;
  int64_t pool_bytes = 8 << 20;
  DraftDriver driver = DraftDriver::kUnrolled;
  AcceptMethod rejection_sample_method = AcceptMethod::kCoupled;
  int32_t num_threads = 1;
  NgramOptions ngram{};
  DraftPosition draft_position = DraftPosition::kLast;
  int32_t max_logprobs = 0;
  int32_t kept_hidden_tokens = 0;
};

class DirectRunner {
 public:
  DirectRunner(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
               const DirectOptions& options)
      : options_(options),
        layout_(plan_kv_layout(kv_layer_shapes(target->config),
                               draft != nullptr
                                   ? draft_kv_layer_shapes(draft->config, target->config)
                                   : std::vector<KvLayerShape>{},
                               options.block_size, target->weights.dtype, options.pool_bytes)),
        pool_(layout_),
        vocab_size_(target->config.vocab_size),
        memory_(device_memory(target->device)) {
    shape_ = {
        .max_seqs = options.max_seqs,
        .max_verify_rows = options.max_verify_rows,
        .max_logit_rows = options.max_verify_rows,
        .num_draft_tokens = options.num_draft_tokens,
        .first_rows =
            traits_for(draft != nullptr ? &draft->config : nullptr, {options.ngram}).first_rows,
        .max_logprobs = options.max_logprobs};
    const IterationOptions iteration = {.shape = shape_,
                                        .max_model_len = options.max_model_len,
                                        .rejection_sample_method = options.rejection_sample_method,
                                        .model_free = {options.ngram},
                                        .draft_position = options.draft_position,
                                        .kept_hidden_tokens = options.kept_hidden_tokens};
    const RunnerOptions runner_options = {.iteration = iteration, .driver = options.driver};
    plan_.num_drafts = options.num_draft_tokens;
    if (target->device == Device::kCpu) {
      auto runner = std::make_unique<CpuRunner>(
          target, draft, layout_,
          CpuRunnerOptions{
              .runner = runner_options, .num_threads = options.num_threads, .poison_pool = true});
      buffers_ = &runner->buffers();
      kv_pool_ = runner->kv_pool();
      run_now_ = [cpu = runner.get()](const Batch& batch) { cpu->run_now(batch); };
      runner_ = std::move(runner);
    }
#ifdef PACELINE_CUDA
    if (target->device == Device::kCuda) {
      auto runner = std::make_unique<CudaRunner>(
          target, draft, layout_, CudaRunnerOptions{.runner = runner_options, .poison_pool = true});
      buffers_ = &runner->buffers();
      kv_pool_ = runner->kv_pool();
      run_now_ = [cuda = runner.get()](const Batch& batch) {
        cuda->launch(batch);
        cuda->wait(batch.iteration);
        cuda->synchronize();
      };
      runner_ = std::move(runner);
    }
#endif
    sequences_.resize(options.max_seqs);
  }

  // Starts a sequence in a sequence slot with the known `tokens`; blocks are reserved for `limit`
  // tokens.
  void start(int32_t slot, std::vector<int32_t> tokens, int32_t limit, double temperature = 0,
             uint64_t seed = 0, bool is_score = false) {
    sequences_[slot] = std::make_unique<Sequence>();
    Sequence& s = *sequences_[slot];
    s.id = slot + 1;
    s.tokens = std::move(tokens);
    s.prompt_len = s.known_len();
    s.limit = limit;
    s.max_drafts = shape_.num_draft_tokens;
    s.seq_slot = slot;
    s.sampling.temperature = temperature;
    s.sampling.seed = seed;
    s.is_score = is_score;
    s.logits = std::make_shared<std::vector<float>>();  // so that scored rows have logits
    s.needs_reset = true;
    s.blocks = SequenceBlocks(static_cast<int32_t>(layout_.groups.size()));
    if (!s.blocks.reserve(pool_, limit, slot, plan_.table_writes)) {
      throw InternalError("the test's pool is too small");
    }
  }

  // Ends the sequence in a sequence slot.
  void stop(int32_t slot) {
    sequences_[slot]->blocks.release_all(pool_, plan_.iteration - 1);
    pool_.complete(plan_.iteration - 1);
    sequences_[slot].reset();
  }
  [[nodiscard]] bool has_sequence(int32_t slot) const { return sequences_[slot] != nullptr; }

  // The k' of the iterations from now on; at first k.
  void set_num_drafts(int32_t num_drafts) { plan_.num_drafts = num_drafts; }
  [[nodiscard]] int32_t known_len(int32_t slot) const {
    return download(buffers_->sequences.known_len + slot, 1).front();
  }

  // Adds rows of a sequence to the next iteration; see PlannedSequence. The sequence drafts, unless
  // the drafter leaves out its window or chunk, or gets a part of what it has missed, from
  // catch_up_start on.
  void plan(int32_t slot, RowKind kind, int32_t start, int32_t num_rows, int32_t num_missed = 0,
            int32_t catch_up_start = kNoPart, bool is_left_out = false) {
    Sequence& s = *sequences_[slot];
    plan_.sequences.push_back({.sequence = &s,
                               .kind = kind,
                               .start = start,
                               .num_rows = num_rows,
                               .resets_state = s.needs_reset,
                               .num_drafts = is_left_out                 ? kLeftOut
                                             : catch_up_start != kNoPart ? 0
                                                                         : plan_.num_drafts,
                               .num_missed = num_missed,
                               .num_kept = options_.kept_hidden_tokens,
                               .catch_up_start = catch_up_start,
                               .is_followed = !is_left_out});
    s.needs_reset = false;
  }

  void run() {
    build();
    launch();
    finish();
  }

  // The three parts of `run`: the host makes the batch, the device runs it, the plan is emptied.
  void build() {
    std::stable_sort(plan_.sequences.begin(), plan_.sequences.end(),
                     [](const PlannedSequence& a, const PlannedSequence& b) {
                       return static_cast<int32_t>(a.kind) < static_cast<int32_t>(b.kind);
                     });
    plan_.has_prefill = std::any_of(plan_.sequences.begin(), plan_.sequences.end(),
                                    [](const auto& rows) { return rows.kind != RowKind::kDecode; });
    const bool is_head = shape_.first_rows == FirstRows::kWindow;
    plan_.follows_chunks = is_head && std::ranges::any_of(plan_.sequences, [](const auto& rows) {
                             return rows.kind != RowKind::kDecode && rows.is_followed;
                           });
    // All hidden states that the drafter may need later are kept.
    const bool catches_up =
        std::ranges::any_of(plan_.sequences, [](const auto& rows) { return rows.num_missed > 0; });
    plan_.keeps_hidden = is_head && options_.kept_hidden_tokens > 0 &&
                         (plan_.num_drafts == 0 || plan_.has_prefill || catches_up);
    batch_.iteration = plan_.iteration;
    runner_->bind(batch_);
    build_batch(plan_, shape_, batch_);
    batch_.score_copies.clear();  // tests read the logits buffer
  }
  void launch() { run_now_(batch_); }
  void finish() {
    ++plan_.iteration;
    last_plan_ = plan_;
    plan_.sequences.clear();
    plan_.table_writes.clear();
  }

  // Logits of a sequence's rows in the last iteration without a drafter: [rows][vocab].
  [[nodiscard]] std::vector<std::vector<float>> logits_of(int32_t slot) const {
    std::vector<std::vector<float>> rows;
    for (size_t i = 0; i < last_plan_.sequences.size(); ++i) {
      if (last_plan_.sequences[i].sequence->seq_slot != slot) continue;
      for (int32_t row = batch_.inputs.logit_indptr[i]; row < batch_.inputs.logit_indptr[i + 1];
           ++row) {
        rows.push_back(download(buffers_->logits + int64_t{row} * vocab_size_, vocab_size_));
      }
    }
    return rows;
  }

  // What one position stores in every layer of a group.
  [[nodiscard]] std::vector<std::byte> kv_of(int32_t slot, GroupId g, int32_t position) const {
    const KvGroup& group = layout_.groups[g];
    std::vector<std::byte> bytes;
    if (!completes_entry(group.kind, position)) return bytes;
    const int32_t entry = num_entries(group.kind, position);
    const BlockId block = sequences_[slot]->blocks.table(g)[entry / group.block_size];
    const std::byte* const of_block = kv_pool_ + block * group.block_bytes;
    // The parts of a layer in a block: K and V, or entries, or entries and the indexer's keys.
    std::vector<int64_t> parts(static_cast<size_t>(kv_parts(group.kind)),
                               int64_t{group.num_kv_heads} * group.head_dim);
    if (const auto* compressed = std::get_if<CompressedKv>(&group.kind)) {
      parts.push_back(compressed->index_dim);
    }
    int64_t offset = 0;
    for (size_t layer = 0; layer < group.layers.size(); ++layer) {
      for (const int64_t elements : parts) {
        const int64_t entry_bytes = elements * dtype_bytes(group.dtype);
        const std::byte* const at = of_block + offset + entry % group.block_size * entry_bytes;
        const std::vector<std::byte> part = download(at, entry_bytes);
        bytes.insert(bytes.end(), part.begin(), part.end());
        offset += group.block_size * entry_bytes;
      }
    }
    return bytes;
  }

  // Sets the known tokens and the drafts of the sequence on the device.
  void set_known(int32_t slot, const std::vector<int32_t>& tokens,
                 const std::vector<int32_t>& drafts) {
    const SequenceState& s = buffers_->sequences;
    const auto known_len = static_cast<int32_t>(tokens.size());
    const auto draft_len = static_cast<int32_t>(drafts.size());
    const int32_t is_active = 1;
    upload(s.history + slot * s.history_stride, tokens.data(), known_len);
    upload(s.known_len + slot, &known_len, 1);
    upload(s.is_active + slot, &is_active, 1);
    upload(s.draft_tokens + int64_t{slot} * s.num_draft_tokens, drafts.data(), draft_len);
    upload(s.draft_len + slot, &draft_len, 1);
  }

  // Copies from and to the device.
  template <class T>
  [[nodiscard]] std::vector<T> download(const T* from, int64_t count) const {
    std::vector<T> values(static_cast<size_t>(count));
    memory_.download(values.data(), reinterpret_cast<const std::byte*>(from),
                     count * static_cast<int64_t>(sizeof(T)));
    return values;
  }
  template <class T>
  void upload(T* to, const T* from, int64_t count) const {
    if (count == 0) return;
    memory_.upload(reinterpret_cast<std::byte*>(to), from, count * static_cast<int64_t>(sizeof(T)));
  }

  // The sequence slot of a row of the last batch, and the row's inputs.
  [[nodiscard]] int32_t slot_of_row(size_t row) const {
    return last_plan_.sequences[row].sequence->seq_slot;
  }
  [[nodiscard]] const Batch& last_batch() const { return batch_; }
  // All of the KV pool but the slab of the null blocks, where padding may be written.
  [[nodiscard]] std::vector<std::byte> pool_bytes() const {
    return download(kv_pool_ + layout_.slab_bytes, layout_.pool_bytes - layout_.slab_bytes);
  }

  // The logprobs of the tokens that a row of the last batch emitted; empty if its sequence wants
  // none.
  [[nodiscard]] std::vector<TokenLogprob> logprobs_of_row(size_t row) {
    const int32_t num_best = last_plan_.sequences[row].sequence->sampling.logprobs;
    std::vector<TokenLogprob> entries;
    if (num_best < 0) return entries;
    const std::span<const TokenLogprob> all = runner_->logprobs(batch_.iteration);
    const int32_t emitted_len = result(static_cast<int32_t>(row)).emitted_len;
    for (int32_t j = 0; j < emitted_len; ++j) {
      const auto begin =
          all.begin() + int64_t{batch_.inputs.logit_indptr[row] + j} * (1 + options_.max_logprobs);
      entries.insert(entries.end(), begin, begin + 1 + num_best);
    }
    return entries;
  }

  [[nodiscard]] Runner& runner() { return *runner_; }
  [[nodiscard]] const IterationBuffers& buffers() const { return *buffers_; }
  [[nodiscard]] const KvLayout& layout() const { return layout_; }
  [[nodiscard]] SlabPool& pool() { return pool_; }
  [[nodiscard]] Sequence& sequence(int32_t slot) { return *sequences_[slot]; }
  [[nodiscard]] SequenceResult result(int32_t batch_row) const {
    return download(buffers_->results + batch_row, 1).front();
  }

 private:
  DirectOptions options_;
  KvLayout layout_;
  SlabPool pool_;
  int32_t vocab_size_;
  BatchShape shape_;
  DeviceMemory& memory_;
  std::unique_ptr<Runner> runner_;
  const IterationBuffers* buffers_ = nullptr;
  const std::byte* kv_pool_ = nullptr;
  std::function<void(const Batch&)> run_now_;
  Batch batch_;
  IterationPlan plan_;
  IterationPlan last_plan_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
};

}  // namespace paceline::testing
