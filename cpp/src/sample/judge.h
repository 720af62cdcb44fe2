// SPDX-License-Identifier: Apache-2.0
#pragma once

// The verdict on one sequence, independent of how its inputs are read: the single specification
// that accept uses on the CPU and on CUDA.

#include <cstdint>

#include "base/host_device.h"
#include "base/philox.h"
#include "wire/sequence_result.h"

namespace paceline {

// kSynthetic: whether draft `index` of a sequence with `known_len` tokens is accepted, given that
// all drafts before it were.
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

// The fields of SequenceResult except its tokens.
struct Verdict {
  int32_t emitted_len;
  int32_t accepted_len;
  int32_t drafted_len;
  int32_t discarded_len;
  SequenceOutcome outcome;
};

// `num_accepted` of `num_drafts` drafts are accepted, so up to num_accepted + 1 tokens may be
// emitted; `room` is how many more tokens fit the sequence. Bit j of `invalid_bits`: token j is no
// valid token. Bit j of `stop_bits`: token j is a stop token. Bits above `num_accepted` have no
// effect.
[[nodiscard]] PACELINE_HOST_DEVICE inline Verdict judge(int32_t num_accepted, int32_t num_drafts,
                                                        int32_t room, uint32_t invalid_bits,
                                                        uint32_t stop_bits) {
  // If accepted drafts reach the limit, there is no room for the token after them.
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
  // A stop token among the accepted drafts ends the verdict; later drafts are discarded.
  const bool is_cut = emitted <= num_accepted && emitted < num_drafts;
  verdict.drafted_len = is_cut ? emitted : num_drafts;
  verdict.discarded_len = num_drafts - verdict.drafted_len;
  return verdict;
}

}  // namespace paceline
