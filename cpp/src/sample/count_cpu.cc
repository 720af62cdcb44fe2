// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "device/cpu_context.h"
#include "sample/count_rules.h"
#include "sample/logits.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace {

template <class Params>
void count_sequences(const Params& p) {
  const SamplingState& s = p.sampling;
  for (int32_t i = 0; i < p.inputs.counts->num_seqs; ++i) {
    const CountedSequence sequence = counted_sequence(p, i);
    const int64_t seq_slot = sequence.seq_slot;
    for (int32_t index = 0; index < sequence.num_tokens; ++index) {
      const CountedToken counted = counted_token(p, i, index);
      if (counted.token < 0) continue;
      s.seen[seq_slot * mask_words(s.vocab_size) + counted.token / 32] |= uint32_t{1}
                                                                          << counted.token % 32;
      if (counted.is_output) ++s.counts[seq_slot * s.vocab_size + counted.token];
    }
  }
}

}  // namespace

void clear_counts(CpuContext&, const ClearCountsParams& p) {
  const SamplingState& s = p.sampling;
  const int64_t num_words = mask_words(s.vocab_size);
  for (int32_t i = 0; i < std::min(*p.num_seqs, p.max_seqs); ++i) {
    const int64_t seq_slot = p.seq_slots[i];
    if (s.adjusts[seq_slot] == 0) continue;
    std::fill_n(s.counts + seq_slot * s.vocab_size, s.vocab_size, 0);
    std::fill_n(s.seen + seq_slot * num_words, num_words, 0u);
  }
}

void count_prefill_tokens(CpuContext&, const CountPrefillTokensParams& p) { count_sequences(p); }

void count_emitted_tokens(CpuContext&, const CountEmittedTokensParams& p) { count_sequences(p); }

}  // namespace paceline
