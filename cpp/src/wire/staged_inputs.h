// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the host sends to the device for one iteration: counts and arrays. The batch builder fills
// them in an entry of the iteration ring. The iteration's first op copies them to the device's own
// arrays, which have fixed addresses. Both sides use the same struct, and `visit_staged_arrays` is
// the only list of its arrays: their memory, their layout in the ring and their copies follow from
// it.

#include <cstddef>
#include <cstdint>

#include "wire/blocks.h"
#include "wire/sequence_state.h"

namespace paceline {

// All fields are int32, so that the device can read the struct as words.
struct IterationCounts {
  int32_t num_seqs;
  int32_t num_drafting;     // the first num_drafting sequences draft: they decode or end a prefill
  int32_t num_verify_rows;  // rows of the verify pass
  int32_t num_first_rows;   // rows of the drafter's first pass
  int32_t num_logit_rows;   // rows of logits that tokens are drawn from
  int32_t num_prompt_rows;  // rows of logits after those, for prompt logprobs
  int32_t num_all_logit_rows;  // num_logit_rows + num_prompt_rows
  int32_t num_prefill_tokens;  // num_verify_rows if any sequence prefills, else 0
  int32_t num_resets;
  int32_t num_list_words;
  int32_t num_forks;  // 0 without prefill rows: a fork starts with one
  int32_t num_block_copies;
  int32_t num_table_writes;
  int32_t num_adopted_tokens;
  int32_t num_windows;
  int32_t num_mask_words;
};

// In num_drafts: the sequence has no live rows in the drafter's passes, since its KV there has
// holes that are not filled now.
inline constexpr int32_t kLeftOut = -1;
// In prefill_start of a decoding sequence.
inline constexpr int32_t kNoPart = -1;

struct StagedInputs {
  IterationCounts* counts;  // [1]
  int32_t* seq_slot;        // [max_seqs] by batch row
  int32_t* kind;            // [max_seqs] RowKind
  // [max_seqs] position of the first row. For decode: of the first row of the drafter's first pass,
  // which has a part of the tokens that the drafter has missed; or kNoPart: the pass has the newest
  // tokens.
  int32_t* prefill_start;
  int32_t* next_token;     // [max_seqs] the prompt's token after an unfinished chunk; else 0
  int32_t* num_drafts;     // [max_seqs] most drafts for the next window, or kLeftOut
  int32_t* num_kept;       // [max_seqs] newest tokens that the drafter has missed whose hidden
                           // states were kept; see KeptHidden
  int32_t* verify_indptr;  // [max_seqs + 1] CSR offsets of each sequence's rows in the verify pass,
  int32_t* first_indptr;   // [max_seqs + 1] in the drafter's first pass,
  int32_t* logit_indptr;   // [max_seqs + 1] and among the rows of logits that draw
  int32_t* logit_rows;     // [max_logit_rows] verify row of each row of logits
  int32_t* prompt_targets;  // [max_prompt_rows] the prompt token after each row for prompt logprobs
  int32_t* prefill_tokens;  // [max_verify_rows] by verify row; entries of decoding rows are unused
  int32_t* reset_seq_slots;  // [max_seqs] distinct: sequence slots in which a sequence starts, or
                             // starts again
  SequenceFork* forks;       // [max_seqs]
  BlockCopy* block_copies;   // [max_block_copies] copies that the forks need
  int32_t* adopted_tokens;   // [max_adopted_tokens] histories of forks without a parent

  // Only the ring has these arrays: the first op applies them, and the device has no copy. Null in
  // the device's struct.
  SequenceReset* resets;     // [max_seqs] one for each of reset_seq_slots, in that order
  int32_t* lists;            // [max_list_words] lists of the resets
  TableWrite* table_writes;  // [max_table_writes] at most one for each entry of a block table
  HostWindow* windows;       // [max_seqs] at most one for each sequence of the batch
  uint32_t* masks;           // [max_mask_words] masks of the windows, which ops read in place
};

// Extents of the arrays.
struct InputCapacity {
  int32_t seqs = 0;
  int32_t verify_rows = 0;
  int32_t logit_rows = 0;
  int32_t prompt_rows = 0;
  int32_t list_words = 0;
  int32_t block_copies = 0;
  int32_t table_writes = 0;
  int32_t adopted_tokens = 0;
  int32_t mask_words = 0;
};

// Calls visit(array, capacity, count, extra) for every array that the device copies. `array` is a
// member pointer and `capacity` its extent. It has `counts->*count + extra` used elements.
template <class Visit>
void visit_staged_arrays(const InputCapacity& c, const Visit& visit) {
  using Inputs = StagedInputs;
  using Counts = IterationCounts;
  visit(&Inputs::seq_slot, c.seqs, &Counts::num_seqs, 0);
  visit(&Inputs::kind, c.seqs, &Counts::num_seqs, 0);
  visit(&Inputs::prefill_start, c.seqs, &Counts::num_seqs, 0);
  visit(&Inputs::next_token, c.seqs, &Counts::num_seqs, 0);
  visit(&Inputs::num_drafts, c.seqs, &Counts::num_seqs, 0);
  visit(&Inputs::num_kept, c.seqs, &Counts::num_seqs, 0);
  visit(&Inputs::verify_indptr, c.seqs + 1, &Counts::num_seqs, 1);
  visit(&Inputs::first_indptr, c.seqs + 1, &Counts::num_seqs, 1);
  visit(&Inputs::logit_indptr, c.seqs + 1, &Counts::num_seqs, 1);
  visit(&Inputs::logit_rows, c.logit_rows, &Counts::num_all_logit_rows, 0);
  visit(&Inputs::prompt_targets, c.prompt_rows, &Counts::num_prompt_rows, 0);
  visit(&Inputs::prefill_tokens, c.verify_rows, &Counts::num_prefill_tokens, 0);
  visit(&Inputs::reset_seq_slots, c.seqs, &Counts::num_resets, 0);
  visit(&Inputs::forks, c.seqs, &Counts::num_forks, 0);
  visit(&Inputs::block_copies, c.block_copies, &Counts::num_block_copies, 0);
  visit(&Inputs::adopted_tokens, c.adopted_tokens, &Counts::num_adopted_tokens, 0);
}
inline constexpr int32_t kNumStagedArrays = 16;

// Does the same for the arrays that only the ring has.
template <class Visit>
void visit_ring_arrays(const InputCapacity& c, const Visit& visit) {
  visit(&StagedInputs::resets, c.seqs, &IterationCounts::num_resets, 0);
  visit(&StagedInputs::lists, c.list_words, &IterationCounts::num_list_words, 0);
  visit(&StagedInputs::table_writes, c.table_writes, &IterationCounts::num_table_writes, 0);
  visit(&StagedInputs::windows, c.seqs, &IterationCounts::num_windows, 0);
  visit(&StagedInputs::masks, c.mask_words, &IterationCounts::num_mask_words, 0);
}

enum class InputSide : uint8_t { kRing, kDevice };

// Points the arrays of `inputs` at consecutive memory from `base` on, each aligned to 64 bytes, and
// returns the bytes that they take. If `base` is null, it only counts the bytes.
int64_t place_inputs(const InputCapacity& capacity, InputSide side, std::byte* base,
                     StagedInputs& inputs);

}  // namespace paceline
