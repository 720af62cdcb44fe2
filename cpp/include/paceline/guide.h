// SPDX-License-Identifier: Apache-2.0
#pragma once

// Interfaces with which a caller takes part in decoding: a constraint says which tokens may follow,
// and a host drafter proposes drafts. Both are called on threads of the executor, never on that of
// the engine: one for a drafter, one to four for constraints. A slow call delays the samples that
// wait for it or for its thread, and all others by at most 2 ms in an iteration. What they throw
// ends the sample with FinishReason::kError and the exception's text. docs/structured-output.md
// describes them.

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/export.h>

namespace paceline {

// Constrains one sample to the tokens of a grammar; two samples never share an object. The calls
// for a sample come one after the other, not always on the same thread.
class PACELINE_API TokenConstraint {
 public:
  virtual ~TokenConstraint();

  // Prepares the next verify window of the sample.
  //
  // emitted: the output tokens since the last call. The first call has none, or the tokens of
  //   Request::num_resumed_tokens.
  // drafts: the proposed tokens, at most max_drafts. The constraint keeps the drafts that it
  //   allows, up to the first that it does not. It may append others in place of the rest, up to
  //   max_drafts in all; tokens that the grammar forces are good drafts. Drafts from the first that
  //   its own mask excludes are ignored.
  // masks: [max_drafts + 1, (vocab_size + 31) / 32], all zero. Bit t % 32 of word t / 32 in row j
  //   is to be set if token t may follow the output and the first j of the returned drafts. Rows 0
  //   to drafts.size() are read. A row after a stop token has no effect.
  //
  // Drafts only save time: the output depends on the masks alone, and they must depend on the
  // tokens before their row alone.
  virtual void constrain(std::span<const int32_t> emitted, std::vector<int32_t>& drafts,
                         int32_t max_drafts, std::span<uint32_t> masks) = 0;
};

// A drafter of one's own, for all requests of an executor. Calls come one at a time.
class PACELINE_API HostDrafter {
 public:
  virtual ~HostDrafter();

  // Returns at most `max_drafts` token ids, each in [0, vocab_size), that may follow the tokens of
  // prompt and output. Fewer, or none, are allowed.
  [[nodiscard]] virtual std::vector<int32_t> draft(std::span<const int32_t> tokens,
                                                   int32_t max_drafts) = 0;
};

}  // namespace paceline
