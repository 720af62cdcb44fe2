// SPDX-License-Identifier: Apache-2.0
#pragma once

// Windows of drafts without models: many sequences at once go through the very ops that an
// iteration drafts and judges with (graph/rejection.h), on logits that the test gives.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "device/cpu_context.h"
#include "device/device_arena.h"
#include "graph/rejection.h"
#include "metadata/pass_rows.h"
#include "sample/accept.h"
#include "wire/batch_shape.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline::testing {

struct RejectionSpec {
  int32_t num_seqs = 1;
  int32_t vocab_size = 0;
  int32_t num_drafts = 1;  // k
  AcceptMethod method = AcceptMethod::kStandard;
  bool samples_drafts = true;
  int32_t num_proposals = 0;
  float temperature = 1.0f;
  float stop_threshold = 0.0f;  // see DraftStop
};

// Sequence i is in slot i and has known_len(i) tokens.
class RejectionRig {
 public:
  // The logits after the drafts of sequence i so far.
  using LogitsOf =
      std::function<const std::vector<float>&(int32_t i, const std::vector<int32_t>& drafts)>;

  RejectionRig(const RejectionSpec& spec, uint64_t seed, int32_t first_len, int32_t len_step)
      : spec_(spec), first_len_(first_len), len_step_(len_step) {
    const int32_t n = spec.num_seqs;
    const int32_t k = spec.num_drafts;
    const int32_t width = k + 1;
    identity_.resize(static_cast<size_t>(n) * static_cast<size_t>(width) + 1);
    std::iota(identity_.begin(), identity_.end(), 0);
    const auto ints = [&](int64_t count) { return arena_.allocate<int32_t>(count, "test"); };
    // One history for all, in which each writes after its own length.
    s = {.known_len = ints(n),
         .limit = ints(n),
         .is_active = ints(n),
         .seed = arena_.allocate<uint64_t>(n, "test"),
         .temperature = arena_.allocate<float>(n, "test"),
         .num_stop_ids = ints(n),
         .stop_ids = ints(int64_t{n} * kMaxStopIds),
         .history = ints(first_len + int64_t{n} * len_step + width),
         .history_stride = 0,
         .draft_tokens = ints(int64_t{n} * k),
         .draft_len = ints(n),
         .draft_source = ints(n),
         .num_draft_tokens = k};
    in = {.counts = &counts,
          .seq_slot = ints(n),
          .kind = ints(n),
          .verify_indptr = ints(n + 1),
          .logit_indptr = ints(n + 1),
          .logit_rows = identity_.data()};
    rows = {.num_rows = &counts.num_logit_rows,
            .positions = ints(int64_t{n} * width),
            .seq_slot = ints(int64_t{n} * width),
            .capacity = n * width};
    counts.num_seqs = n;
    counts.num_logit_rows = n * width;
    for (int32_t i = 0; i < n; ++i) {
      s.known_len[i] = known_len(i);
      s.limit[i] = known_len(i) + 1000;
      s.is_active[i] = 1;
      s.seed[i] = seed;
      s.temperature[i] = spec.temperature;
      s.draft_len[i] = k;
      in.seq_slot[i] = i;
      in.kind[i] = static_cast<int32_t>(RowKind::kDecode);
      in.verify_indptr[i + 1] = in.logit_indptr[i + 1] = (i + 1) * width;
      for (int32_t r = 0; r < width; ++r) {
        rows.seq_slot[i * width + r] = i;
        rows.positions[i * width + r] = known_len(i) - 1 + r;
      }
    }
    target_tokens = ints(int64_t{n} * width);
    results.resize(static_cast<size_t>(n));
    buffers = allocate_rejection(
        arena_, {.max_seqs = n, .max_logit_rows = n * width, .num_draft_tokens = k}, spec.method,
        spec.samples_drafts, spec.num_proposals);
    logits.resize(static_cast<size_t>(n) * static_cast<size_t>(width * spec.vocab_size));
  }

  [[nodiscard]] int32_t known_len(int32_t i) const { return first_len_ + i * len_step_; }
  [[nodiscard]] std::vector<int32_t> drafts(int32_t i, int32_t count) const {
    const int32_t* const first = s.draft_tokens + int64_t{i} * s.num_draft_tokens;
    return {first, first + count};
  }
  [[nodiscard]] std::vector<int32_t> emitted(int32_t i) const {
    const SequenceResult& result = results[static_cast<size_t>(i)];
    return {result.tokens, result.tokens + result.emitted_len};
  }

  // Step by step, as in an iteration. A sequence that has stopped goes on drafting here; those
  // drafts are not judged.
  void draft(const LogitsOf& drafter) {
    const int32_t n = spec_.num_seqs;
    const int32_t vocab = spec_.vocab_size;
    std::vector<float> row_logits(static_cast<size_t>(n) * static_cast<size_t>(vocab));
    std::vector<int32_t> positions(static_cast<size_t>(n));
    std::vector<int32_t> drawn(static_cast<size_t>(n));
    std::vector<float> probabilities(static_cast<size_t>(n));
    for (int32_t step = 0; step < spec_.num_drafts; ++step) {
      for (int32_t i = 0; i < n; ++i) {
        const std::vector<float>& of = drafter(i, drafts(i, step));
        std::copy(of.begin(), of.end(), row_logits.begin() + int64_t{i} * vocab);
        positions[static_cast<size_t>(i)] = known_len(i) - 1 + step;
      }
      const DrawParams coupled = {
          .num_rows = &counts.num_seqs,
          .max_rows = n,
          .logits = row_logits.data(),
          .logits_stride = vocab,
          .vocab_limit = vocab,
          .row_index = identity_.data(),
          .seq_slot = in.seq_slot,
          .positions = positions.data(),
          .seeds = s.seed,
          .temperatures = s.temperature,
          .tokens = drawn.data(),
          .probabilities = spec_.stop_threshold > 0 ? probabilities.data() : nullptr,
          .token_limit = vocab};
      ctx.run(draw, propose_draft(ctx, buffers, s, coupled, step > 0 ? &step : nullptr));
      for (int32_t i = 0; i < n; ++i) {
        s.draft_tokens[int64_t{i} * s.num_draft_tokens + step] = drawn[static_cast<size_t>(i)];
        const bool is_stopped = spec_.stop_threshold > 0 &&
                                probabilities[static_cast<size_t>(i)] < spec_.stop_threshold;
        if (is_stopped) s.draft_len[i] = std::min(s.draft_len[i], step + 1);
      }
    }
  }

  // The target's rows and its own draws.
  void draw_targets(const LogitsOf& target) {
    const int32_t width = spec_.num_drafts + 1;
    for (int32_t i = 0; i < spec_.num_seqs; ++i) {
      for (int32_t r = 0; r < width; ++r) {
        const std::vector<float>& of = target(i, drafts(i, r));
        std::copy(of.begin(), of.end(),
                  logits.begin() + (int64_t{i} * width + r) * spec_.vocab_size);
      }
    }
    ctx.run(draw, DrawParams{.num_rows = &counts.num_logit_rows,
                             .max_rows = rows.capacity,
                             .logits = logits.data(),
                             .logits_stride = spec_.vocab_size,
                             .vocab_limit = spec_.vocab_size,
                             .row_index = identity_.data(),
                             .seq_slot = rows.seq_slot,
                             .positions = rows.positions,
                             .seeds = s.seed,
                             .temperatures = s.temperature,
                             .tokens = target_tokens});
  }

  void judge() {
    num_drafts.assign(s.draft_len, s.draft_len + spec_.num_seqs);
    reject(ctx, buffers,
           {.inputs = in,
            .sequences = s,
            .rows = rows,
            .method = spec_.method,
            .target_tokens = target_tokens,
            .logits = logits.data(),
            .vocab_size = spec_.vocab_size,
            .num_logit_rows = rows.capacity,
            .num_seqs = spec_.num_seqs});
    accept(ctx, {.inputs = in,
                 .sequences = s,
                 .target_tokens = target_tokens,
                 .results = results.data(),
                 .max_seqs = spec_.num_seqs,
                 .method = spec_.method,
                 .num_accepted = buffers.num_accepted,
                 .recovered_tokens = buffers.recovered_tokens,
                 .synthetic_rate = {}});
  }

  void run(const LogitsOf& drafter, const LogitsOf& target) {
    draft(drafter);
    draw_targets(target);
    judge();
  }

  CpuContext ctx;
  SequenceState s{};
  IterationCounts counts{};
  StagedInputs in{};
  PassRows rows{};
  RejectionBuffers buffers;
  std::vector<float> logits;  // of the target's rows
  int32_t* target_tokens = nullptr;
  std::vector<SequenceResult> results;
  std::vector<int32_t> num_drafts;  // by sequence, of the windows judged last

 private:
  RejectionSpec spec_;
  int32_t first_len_;
  int32_t len_step_;
  DeviceArena arena_;
  std::vector<int32_t> identity_;
};

}  // namespace paceline::testing
