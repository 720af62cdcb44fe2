// SPDX-License-Identifier: Apache-2.0
#pragma once

// The device of the simulator: executes the batches of build_batch on a model of the
// per-sequence state and of the contents of every KV block, without any arithmetic.
//
// A cell of a block holds which KV was written there: after which tokens, and whether the last one
// is part of the true output or a draft that will be rejected. A block that becomes
// reusable loses its contents and gets a new generation; table entries carry the generation that
// the block had when they were made. So an access through an entry whose block has been given back
// is seen, even if another sequence has written there since.
//
// Which drafts are right is known beforehand: a pure function of request, sample and length.

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/check.h"
#include "batch/batch.h"
#include "kv/slab_pool.h"
#include "support/simulator.h"
#include "wire/sequence_result.h"

namespace paceline::testing {

struct SimulationViolation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) throw SimulationViolation(concat(parts...));
}

// What one sample of a request writes in the end, whatever the engine does.
class SimulatedOutput {
 public:
  SimulatedOutput(const SimulatedRequest& request, int32_t sample);

  [[nodiscard]] int32_t token(int32_t position) const;
  // Of the salt and all tokens up to this position: even, as good as unique, and not 0.
  [[nodiscard]] uint64_t prefix(int32_t position) const {
    return prefixes_.at(static_cast<size_t>(position));
  }
  // Right drafts after `known_len` tokens, of k.
  [[nodiscard]] int32_t num_right(int32_t known_len, int32_t k) const;
  // Drafts that the drafter makes after `known_len` tokens, of k; fewer than k where it stops
  // early.
  [[nodiscard]] int32_t num_drafted(int32_t known_len, int32_t k, bool may_be_none) const;
  [[nodiscard]] int32_t end_len() const { return end_len_; }
  [[nodiscard]] int32_t limit() const { return limit_; }
  [[nodiscard]] int32_t max_drafts() const { return max_drafts_; }
  [[nodiscard]] int32_t prompt_len() const { return prompt_len_; }

 private:
  [[nodiscard]] uint64_t salt_at(int32_t position) const;

  std::vector<SimulatedSegment> segments_;
  std::vector<uint64_t> prefixes_;
  uint64_t prompt_salt_;
  uint64_t salt_;
  int32_t acceptance_;
  int32_t prompt_len_;
  int32_t limit_;
  int32_t max_drafts_;
  int32_t end_len_;
};

// A sample that has, or had, a sequence slot.
struct SimulatedOwner {
  int32_t request = -1;
  int32_t sample = 0;
  bool is_score = false;
  const SimulatedOutput* output = nullptr;
};

class SimulatedDevice {
 public:
  SimulatedDevice(const SimulationScript& script, const KvLayout& layout);

  // Of SlabPool::set_on_reusable.
  void become_reusable(GroupId group, BlockId block);

  // What the runner is given, with the sample of each batch row. `inputs` stay valid until the
  // iteration has been executed.
  void launch(const Batch& batch, std::vector<SimulatedOwner> owners);

  // Executes the oldest launched iteration.
  [[nodiscard]] std::vector<SequenceResult> execute();

  // Whether a launched iteration may still write to or read the block by what it was told itself.
  [[nodiscard]] int64_t num_waiting() const { return static_cast<int64_t>(launched_.size()); }

 private:
  struct Entry {
    BlockId block = kNullBlock;
    uint32_t generation = 0;
  };
  struct Slot {
    SimulatedOwner owner;
    bool is_active = false;
    int32_t known_len = 0;
    int32_t draft_len = 0;
    int32_t limit = 0;
    int32_t max_drafts = 0;
    std::vector<bool> keeps;                 // the positions whose hidden states were kept
    std::vector<std::vector<Entry>> tables;  // [groups][blocks]
  };
  struct Launched {
    const Batch* batch = nullptr;
    std::vector<SimulatedOwner> owners;
    std::vector<uint32_t> table_generations;  // of batch's table_writes
    std::vector<uint32_t> copy_generations;   // of batch's block_copies: source, destination, ...
  };

  void reset_slots(const Launched& launched);
  void write_tables(const Launched& launched);
  void fork_slots(const Launched& launched);
  void check_logit_rows(const StagedInputs& in, int32_t i) const;
  SequenceResult verify(const StagedInputs& in, int32_t i);
  void prefill(Slot& slot, const StagedInputs& in, int32_t i, SequenceResult& result);
  void emit(Slot& slot, int32_t count, SequenceResult& result);
  // Keeps the hidden states of the tokens that a decoding sequence has emitted.
  void keep(const StagedInputs& in, int32_t i, const SequenceResult& result);
  void draft(const StagedInputs& in, int32_t i, const SequenceResult& result);
  // The first position of the drafter's rows for which it has hidden states, of which all rows
  // before `window` are those of missed tokens.
  [[nodiscard]] int32_t first_with_hidden(const StagedInputs& in, int32_t i, int32_t begin,
                                          int32_t window);
  void draft_steps(Slot& slot);

  // Of positions [begin, end) in all groups of `owner`; those from `first_wrong` on hold drafts
  // that are not part of the output.
  // A draft head has no hidden states of those below `first_with_hidden`.
  void write(Slot& slot, KvOwner owner, int32_t begin, int32_t end, int32_t first_wrong,
             int32_t first_with_hidden = 0);
  // What queries at positions [begin, end) see; below `first_draft` it must be part of the output.
  void read(const Slot& slot, KvOwner owner, int32_t begin, int32_t end, int32_t first_draft) const;
  // Whether the block of a position is null, so that rows of groups that hand on write nothing.
  [[nodiscard]] bool has_null_block(const Slot& slot, size_t group, int32_t position) const;
  // Cell of a position, which must lie in a block that the sequence still has.
  [[nodiscard]] size_t cell(const Slot& slot, size_t group, int32_t position,
                            const char* verb) const;
  [[nodiscard]] uint64_t content(const Slot& slot, KvOwner owner, int32_t position) const;
  [[nodiscard]] uint32_t& generation(GroupId group, BlockId block) {
    return generations_[static_cast<size_t>(group)][static_cast<size_t>(block)];
  }

  const SimulationScript& script_;
  const KvLayout& layout_;
  int32_t k_;
  std::vector<Slot> slots_;
  std::vector<std::vector<uint64_t>> cells_;  // [groups][blocks * block_size]; 0: nothing
  // [groups][blocks * block_size] the request that may read the cell, since the drafter had no
  // hidden states for it, + 1; 0: all
  std::vector<std::vector<int32_t>> readers_;
  std::vector<std::vector<uint32_t>> generations_;  // [groups][blocks]
  std::vector<Launched> launched_;
};

// splitmix64: a hash whose output is as good as random.
[[nodiscard]] constexpr uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace paceline::testing
