// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "device/cpu_context.h"
#include "device/device_arena.h"
#include "metadata/pass_rows.h"
#include "sample/accept.h"
#include "wire/batch_shape.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline::testing {

inline constexpr int32_t kMaxLen = 32;

// One decoding sequence in sequence slot 1 of two, known tokens 0..known_len-1.
struct Window {
  Window(std::vector<int32_t> drafts, std::vector<int32_t> draws, int32_t known_len = 5,
         int32_t limit = kMaxLen)
      : draws(std::move(draws)) {
    const auto ints = [&](int64_t n) { return arena.allocate<int32_t>(n, "test"); };
    const auto k = static_cast<int32_t>(drafts.size());
    s = {.known_len = ints(2),
         .limit = ints(2),
         .max_drafts = ints(2),
         .is_active = ints(2),
         .seed = arena.allocate<uint64_t>(2, "test"),
         .temperature = arena.allocate<float>(2, "test"),
         .num_stop_ids = ints(2),
         .stop_ids = ints(2 * kMaxStopIds),
         .history = ints(2 * kMaxLen),
         .history_stride = kMaxLen,
         .draft_tokens = ints(2 * k),
         .draft_len = ints(2),
         .sources = ints(2),
         .draft_source = ints(2),
         .num_draft_tokens = k};
    s.known_len[1] = known_len;
    s.limit[1] = limit;
    s.max_drafts[1] = k;
    s.is_active[1] = 1;
    s.sources[1] = kAllSources;
    s.draft_len[1] = std::min(k, limit - known_len);
    for (int32_t t = 0; t < known_len; ++t) s.history[kMaxLen + t] = t;
    std::copy(drafts.begin(), drafts.end(), s.draft_tokens + k);
    in = {.counts = &counts,
          .seq_slot = ints(1),
          .kind = ints(1),
          .prefill_start = ints(1),
          .next_token = ints(1),
          .num_drafts = ints(1),
          .num_kept = ints(1),
          .verify_indptr = ints(2),
          .first_indptr = ints(2),
          .logit_indptr = ints(2),
          .logit_rows = ints(kMaxLen),
          .prefill_tokens = ints(kMaxLen)};
    in.counts->num_seqs = in.counts->num_drafting = 1;
    in.prefill_start[0] = kNoPart;
    in.num_drafts[0] = k;
    in.seq_slot[0] = 1;
    in.kind[0] = static_cast<int32_t>(RowKind::kDecode);
    in.verify_indptr[1] = in.logit_indptr[1] = in.counts->num_verify_rows = k + 1;
    in.first_indptr[1] = in.counts->num_first_rows = 2;
    const int32_t capacity = kMaxLen;
    rows = {.num_rows = ints(1),
            .token_ids = ints(capacity),
            .positions = ints(capacity),
            .seq_slot = ints(capacity),
            .capacity = capacity};
  }

  SequenceResult judge(AcceptMethod method = AcceptMethod::kCoupled,
                       std::vector<float> rates = {}) {
    AcceptParams params{.inputs = in,
                        .sequences = s,
                        .target_tokens = draws.data(),
                        .results = &result,
                        .method = method,
                        .synthetic_rate = {}};
    std::copy(rates.begin(), rates.end(), params.synthetic_rate);
    accept(ctx, params);
    return result;
  }

  std::vector<int32_t> emitted() const {
    return {result.tokens, result.tokens + result.emitted_len};
  }

  CpuContext ctx;
  DeviceArena arena;
  SequenceState s{};
  IterationCounts counts{};
  StagedInputs in{};
  PassRows rows{};
  std::vector<int32_t> draws;
  SequenceResult result;
};

using Tokens = std::vector<int32_t>;

}  // namespace paceline::testing
