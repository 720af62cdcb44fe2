// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tray to sorting: what the host tells the device about one iteration. Everything here is known
// when the iteration is launched; what is not (lengths, drafts, tokens of decoding rows) lives on
// the device. Filled by the batch builder, copied to the device in launch order.

#include <cstdint>
#include <memory>
#include <vector>

#include "wire/blocks.h"
#include "wire/sequence_state.h"

namespace paceline {

// Logits of a scored chunk, to be copied to the host.
struct ScoreCopy {
  int32_t first_logit_row = 0;
  int32_t num_rows = 0;
  std::shared_ptr<std::vector<float>> destination;  // [prompt_len, vocab]
  int32_t destination_row = 0;
};

struct IterationInputs {
  int64_t iteration = 0;
  bool has_prefill = false;     // any kind but kDecode
  bool has_logit_work = false;  // some sequence wants more of its logits than a draw
  int32_t num_seqs = 0;
  int32_t num_drafting = 0;  // the first num_drafting sequences draft (decode, final chunk)
  int32_t num_verify_rows = 0;
  int32_t num_first_rows = 0;  // of the drafter's first pass
  int32_t num_logit_rows = 0;
  int32_t num_prompt_rows = 0;  // rows of logits behind those, of prompts whose tokens are rated

  // [max_seqs], by batch row
  std::vector<int32_t> seq_slot;
  std::vector<int32_t> kind;           // RowKind
  std::vector<int32_t> prefill_start;  // position of the first row; 0 for decode
  std::vector<int32_t> next_token;     // after an unfinished chunk, the prompt's; else 0
  // [max_seqs + 1], CSR offsets of each sequence's rows
  std::vector<int32_t> verify_indptr;
  std::vector<int32_t> first_indptr;
  std::vector<int32_t> logit_indptr;
  std::vector<int32_t> prefill_tokens;  // [max_verify_rows], by verify row; decode rows unused
  std::vector<int32_t> logit_rows;      // [max_logit_rows] verify row of each row of logits
  std::vector<int32_t> prompt_targets;  // [max_prompt_rows] the prompt token after each such row

  std::vector<SequenceReset> resets;
  std::vector<int32_t> lists;  // of the resets
  std::vector<TableWrite> table_writes;
  std::vector<SequenceFork> forks;      // with prefill rows only: a fork begins with some
  std::vector<BlockCopy> block_copies;  // of the forks
  std::vector<ScoreCopy> score_copies;
};

}  // namespace paceline
