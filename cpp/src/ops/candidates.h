// SPDX-License-Identifier: Apache-2.0
#pragma once

// Drafts that are chosen from a few candidates each, under the rules of ops.h. Draft j of sequence
// i is row j * max_seqs + i. Its candidates are the tokens with the highest logits
// (select_proposals), in ascending order. A scorer gives each pair of a candidate of the draft
// before and one of this draft a number, and a walk over the drafts follows the candidates that are
// drawn. Any scorer that fills `scores` fits: the walk knows nothing of it.

#include <cstdint>

#include <paceline/dtype.h>

#include "ops/ops.h"

namespace paceline {

// The most candidates of a draft: a lane of a warp has one.
inline constexpr int32_t kMaxCandidates = 32;
// The most columns of a codebook.
inline constexpr int32_t kMaxSelectorRank = 1024;

// The candidates of drafts, and what a scorer says of each pair.
struct CandidateLists {
  int32_t* ids = nullptr;   // [rows, count] tokens; -1: no candidate
  float* logits = nullptr;  // [rows, count] -inf without a candidate
  float* scores = nullptr;  // [rows, count, count] by candidate of the draft before and own one;
                            // of first drafts only [0] is there, for the token before
  int32_t count = 0;        // 1 to kMaxCandidates
};

// The scorer of DFlash2:
//   scores[a][c] = logits[c] + sum over r of (predecessors[a][r] * projected[r]) * successors[c][r]
// with the rows of the codebooks of tokens a and c. Those of tokens outside of [0, vocab_size) are
// zero. A sum has one order.
struct ScorePairsParams {
  const int32_t* num_seqs;  // [1]
  int32_t max_seqs;
  int32_t num_drafts;
  CandidateLists lists;      // [num_drafts * max_seqs] scores is written
  const int32_t* newest;     // [max_seqs] the token before the first draft
  const float* projected;    // [num_drafts * max_seqs, rank]
  const void* predecessors;  // [vocab_size, rank] dtype
  const void* successors;    // [vocab_size, rank] dtype
  int32_t vocab_size;
  int32_t rank;                   // 1 to kMaxSelectorRank
  DType dtype = DType::kFloat32;  // of the codebooks
};
void score_pairs(CpuContext&, const ScorePairsParams&);
void score_pairs(CudaContext&, const ScorePairsParams&);
// Throws InternalError if a size is too large.
void check_pairs(const ScorePairsParams& p);

// The scores of one draft's candidates, given the token before:
//   y[i] = scores[a] of row i, where a is the first candidate of the draft before that is
//   previous[i], or 0 without one.
struct FollowCandidatesParams {
  const int32_t* num_seqs;  // [1]
  int32_t max_seqs;
  int32_t count;            // of candidates
  const float* scores;      // [max_seqs, count, count]
  const int32_t* before;    // [max_seqs, count] candidates of the draft before; null: a first draft
  const int32_t* previous;  // [max_seqs] tokens; not read with a first draft
  float* y;                 // [max_seqs, count]
};
void follow_candidates(CpuContext&, const FollowCandidatesParams&);
void follow_candidates(CudaContext&, const FollowCandidatesParams&);

// All drafts of the sequences: for each draft in turn follow_candidates, and `draw` from its y with
// the candidates as token map. Both backends give the bits of these ops.
struct WalkCandidatesParams {
  const int32_t* num_seqs;  // [1]
  int32_t max_seqs;
  int32_t num_drafts;
  CandidateLists lists;  // [num_drafts * max_seqs]
  float* followed;       // [max_seqs, count] scratch
  // The draw, whose row_index and tokens have all num_drafts * max_seqs rows. It has no
  // probabilities, logit_rows, steps_ahead and salts. Its logits, their number and the token map
  // are not read.
  DrawParams draw = {};
};
void walk_candidates(CpuContext&, const WalkCandidatesParams&);
void walk_candidates(CudaContext&, const WalkCandidatesParams&);
// Throws InternalError if the draw asks for what a walk does not do.
void check_walk(const WalkCandidatesParams& p);
// The draw of draft j as an op of its own.
[[nodiscard]] DrawParams draw_of_draft(const WalkCandidatesParams& p, int32_t j);

}  // namespace paceline
