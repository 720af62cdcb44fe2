// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which tokens of a sequence are counted, and whether as prompt or as output: the single
// specification that the CPU loops over and CUDA threads run.

#include <cstdint>

#include "base/host_device.h"
#include "sample/logits.h"
#include "wire/batch_shape.h"
#include "wire/sequence_state.h"

namespace paceline {

struct CountedSequence {
  int32_t seq_slot;
  int32_t num_tokens;  // 0: the sequence is not counted
};

struct CountedToken {
  int32_t token;  // -1: outside the vocabulary
  bool is_output;
};

[[nodiscard]] PACELINE_HOST_DEVICE inline CountedToken counted_token(const SamplingState& s,
                                                                     int32_t token,
                                                                     bool is_output) {
  return {token < s.vocab_size ? token : -1, is_output};
}

[[nodiscard]] PACELINE_HOST_DEVICE inline CountedSequence counted_sequence(
    const CountPrefillTokensParams& p, int32_t i) {
  const int32_t seq_slot = p.inputs.seq_slot[i];
  const bool is_decode = p.inputs.kind[i] == static_cast<int32_t>(RowKind::kDecode);
  if (is_decode || p.sampling.adjusts[seq_slot] == 0) return {seq_slot, 0};
  return {seq_slot, p.inputs.verify_indptr[i + 1] - p.inputs.verify_indptr[i]};
}

[[nodiscard]] PACELINE_HOST_DEVICE inline CountedToken counted_token(
    const CountPrefillTokensParams& p, int32_t i, int32_t index) {
  const int32_t prompt_len = p.sampling.prompt_len[p.inputs.seq_slot[i]];
  return counted_token(p.sampling, p.inputs.prefill_tokens[p.inputs.verify_indptr[i] + index],
                       p.inputs.prefill_start[i] + index >= prompt_len);
}

[[nodiscard]] PACELINE_HOST_DEVICE inline CountedSequence counted_sequence(
    const CountEmittedTokensParams& p, int32_t i) {
  const int32_t seq_slot = p.inputs.seq_slot[i];
  return {seq_slot, p.sampling.adjusts[seq_slot] == 0 ? 0 : p.results[i].emitted_len};
}

[[nodiscard]] PACELINE_HOST_DEVICE inline CountedToken counted_token(
    const CountEmittedTokensParams& p, int32_t i, int32_t index) {
  return counted_token(p.sampling, p.results[i].tokens[index], /*is_output=*/true);
}

}  // namespace paceline
