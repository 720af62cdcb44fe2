// SPDX-License-Identifier: Apache-2.0
#pragma once

// The verdict on one sequence, apart from how its inputs are fetched: the one specification that
// the CPU and the CUDA accept share.

#include <cstdint>

#include "base/host_device.h"
#include "base/philox.h"
#include "wire/sequence_result.h"

namespace paceline {

// kSynthetic: whether draft `index` of a sequence of `known_len` tokens is kept, given that all
// before it were.
[[nodiscard]] PACELINE_HOST_DEVICE inline bool is_accepted_synthetically(uint64_t seed,
                                                                         int32_t known_len,
                                                                         int32_t index,
                                                                         float rate) {
  const NoiseKey key{.seed = seed,
                     .stream = NoiseStream::kSynthetic,
                     .position = static_cast<uint32_t>(known_len + index),
                     .salt = static_cast<uint32_t>(known_len)};
  uint32_t words[4];
  philox_words(key, 0, words);
  return uniform_open(words[0]) < rate;
}

// SequenceResult without its tokens.
struct Verdict {
  int32_t emitted_len;
  int32_t accepted_len;
  int32_t drafted_len;
  int32_t discarded_len;
  SequenceOutcome outcome;
};

// `kept` drafts of `num_drafts` are accepted; up to kept + 1 tokens may be emitted, and `room` more
// fit the sequence. Bit j of `invalid_bits` and of `stop_bits`: token j is no token,
// is a stop token; bits above `kept` do not matter.
[[nodiscard]] PACELINE_HOST_DEVICE inline Verdict judge(int32_t num_accepted, int32_t num_drafts,
                                                        int32_t room, uint32_t invalid_bits,
                                                        uint32_t stop_bits) {
  // All kept up to the limit leaves no room for the token after them.
  const int32_t most = num_accepted + 1 < room ? num_accepted + 1 : room;
  Verdict verdict = {0, 0, 0, 0, SequenceOutcome::kRunning};
  int32_t emitted = 0;
  while (emitted < most && verdict.outcome == SequenceOutcome::kRunning) {
    const uint32_t bit = uint32_t{1} << emitted;
    if ((invalid_bits & bit) != 0) {
      verdict.outcome = SequenceOutcome::kNoLogits;
      break;
    }
    ++emitted;
    if ((stop_bits & bit) != 0) verdict.outcome = SequenceOutcome::kStop;
  }
  if (verdict.outcome == SequenceOutcome::kRunning && emitted == room) {
    verdict.outcome = SequenceOutcome::kLength;
  }
  verdict.emitted_len = emitted;
  verdict.accepted_len = num_accepted < emitted ? num_accepted : emitted;
  // A stop among the kept drafts ends the judging.
  const bool is_cut = emitted <= num_accepted && emitted < num_drafts;
  verdict.drafted_len = is_cut ? emitted : num_drafts;
  verdict.discarded_len = num_drafts - verdict.drafted_len;
  return verdict;
}

}  // namespace paceline
