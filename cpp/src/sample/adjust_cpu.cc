// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <bit>
#include <limits>

#include "device/cpu_context.h"
#include "sample/adjust_rules.h"
#include "sample/logits.h"
#include "wire/limits.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

void adjust_row(const AdjustLogitsParams& p, int32_t i) {
  const SamplingState& s = p.sampling;
  const AdjustedRow row = adjusted_row(p, i);
  if (row.seq_slot < 0) return;
  const int32_t seq_slot = row.seq_slot;
  float* const logits = p.logits + i * p.logits_stride;
  const auto is_token = [&](int32_t id) { return id >= 0 && id < s.vocab_size; };

  const int64_t first_bias = int64_t{seq_slot} * kMaxLogitBias;
  for (int64_t j = first_bias; j < first_bias + s.num_bias[seq_slot]; ++j) {
    if (is_token(s.bias_ids[j])) logits[s.bias_ids[j]] += s.bias_values[j];
  }
  const Penalties penalties = penalties_of(s, seq_slot);
  if (penalties.is_any()) {
    for (int32_t word = 0; word < mask_words(s.vocab_size); ++word) {
      for (uint32_t bits = seen_bits(s, row, word); bits != 0; bits &= bits - 1) {
        const int32_t token = word * 32 + std::countr_zero(bits);
        logits[token] = penalised(penalties, logits[token], output_count(s, row, token));
      }
    }
  }
  if (s.has_allowed[seq_slot] != 0) {
    for (int32_t token = 0; token < s.vocab_size; ++token) {
      if (!is_allowed(s, seq_slot, token)) logits[token] = kNegInf;
    }
  }
  if (const uint32_t* const mask = mask_of(s, row)) {
    for (int32_t token = 0; token < s.vocab_size; ++token) {
      if ((mask[token / 32] >> token % 32 & 1) == 0) logits[token] = kNegInf;
    }
  }
  for (int32_t word = 0; word < s.num_bad_words[seq_slot]; ++word) {
    const int32_t token = token_banned_by(s, row, word);
    if (is_token(token)) logits[token] = kNegInf;
  }
  if (bans_stop_ids(s, row)) {
    const int32_t* const stop_ids = p.sequences.stop_ids + int64_t{seq_slot} * kMaxStopIds;
    for (int32_t j = 0; j < p.sequences.num_stop_ids[seq_slot]; ++j) {
      if (is_token(stop_ids[j])) logits[stop_ids[j]] = kNegInf;
    }
  }
}

}  // namespace

void adjust_logits(CpuContext& ctx, const AdjustLogitsParams& p) {
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  ctx.for_ranges(num_rows, /*pieces_per_thread=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) adjust_row(p, static_cast<int32_t>(i));
  });
}

}  // namespace paceline
