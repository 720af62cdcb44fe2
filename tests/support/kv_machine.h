// SPDX-License-Identifier: Apache-2.0
#pragma once

// A random machine over the pool: sequences grow, slide, fork, finish and are preempted while a
// fake device runs up to three iterations behind the host. After every operation the pool must
// agree with the ledger of the machine.

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/check.h"
#include "kv/kv_layout.h"
#include "kv/sequence_blocks.h"
#include "kv/slab_pool.h"
#include "support/kv_layers.h"
#include "support/kv_ledger.h"

namespace paceline::testing {

inline constexpr int32_t kNumSequences = 12;  // at most 32, see KvLedger
inline constexpr int32_t kMaxTokens = 300;
inline constexpr int64_t kMaxLateness = 2;

// Faults of the host or the pool; the machine must see each.
enum class KvFault : uint8_t {
  kNone,
  kCompletesEarly,     // calls complete for an iteration that still runs
  kStaleTag,           // releases under an older iteration than the newest launched
  kKeepsPartOfFailed,  // a failed reservation leaves a block behind
  kLosesBlock,         // a finished sequence keeps a block
  kReleasesTwice,      // a finished sequence gives a shared block back for its parent, too
  kReleasesSource,     // a parent goes in the plan that copies from it, but after the fork
};

struct KvSequence {
  SequenceBlocks blocks;
  int32_t num_reserved = 0;
  int32_t known = 0;                         // host-known committed length
  std::vector<std::vector<BlockId>> tables;  // what `blocks` must say
  std::vector<int32_t> num_released;         // leading entries given back, per group
};

class KvMachine {
 public:
  KvMachine(const KvLayout& layout, uint64_t seed, KvFault fault)
      : layout_(layout),
        num_groups_(static_cast<int32_t>(layout.groups.size())),
        pool_(layout),
        random_(seed),
        fault_(fault),
        ledger_(layout) {
    for (int32_t s = 0; s < kNumSequences; ++s) {
      KvSequence& sequence = sequences_.emplace_back();
      sequence.blocks = SequenceBlocks(num_groups_);
      sequence.tables.resize(layout.groups.size());
      sequence.num_released.resize(layout.groups.size());
    }
    pool_.set_on_reusable(
        [this](GroupId g, BlockId block) { ledger_.reuse(g, block, device_completed_); });
  }

  // Throws KvViolation.
  void run(int64_t num_operations) {
    for (int64_t i = 0; i < num_operations; ++i) {
      try {
        operate();
        ledger_.check(pool_);
        if (i % 1000 == 0) check_tables();
      } catch (const std::exception& error) {
        throw KvViolation(concat("operation ", i, " (", operation_, "): ", error.what()));
      }
    }
  }

  [[nodiscard]] std::string summary() const {
    return concat(num_grown_, " reservations, ", num_forked_, " forks, ", num_unforkable_,
                  " that could not, ", num_refused_, " refused, ", num_completed_, " completions, ",
                  num_quiesced_, " quiesced, ", num_served_alone_, " served alone, ",
                  num_too_large_, " too large");
  }
  // Every kind of operation must really have happened.
  [[nodiscard]] bool is_thorough() const {
    return num_grown_ > 0 && num_forked_ > 0 && num_unforkable_ > 0 && num_refused_ > 0 &&
           num_completed_ > 0 && num_quiesced_ > 0 && num_served_alone_ > 0 && num_too_large_ > 0;
  }

 private:
  int32_t draw(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }

  void operate() {
    const int32_t s = draw(0, kNumSequences - 1);
    const int32_t dice = draw(0, 9999);
    if (dice < 40) {
      operation_ = "quiesce";
      quiesce();
    } else if (dice < 4500) {
      operation_ = "grow";
      grow(s, sequences_[s].num_reserved + draw(1, 24));
    } else if (dice < 6000) {
      operation_ = "release_below";
      commit(s, draw(0, sequences_[s].num_reserved));
    } else if (dice < 6400) {
      operation_ = "finish or cancel";
      release_all(s);
    } else if (dice < 6600) {
      operation_ = "preempt and restart";
      const int32_t num_tokens = sequences_[s].num_reserved;
      release_all(s);
      grow(s, num_tokens);
    } else if (dice < 6900) {
      operation_ = "fork";
      fork(s, (s + draw(1, kNumSequences - 1)) % kNumSequences);
    } else if (dice < 8000) {
      operation_ = "launch";
      if (launched_ - device_completed_ <= kMaxLateness) ++launched_;
    } else {
      operation_ = "complete";
      complete(launched_ - draw(0, kMaxLateness));
    }
  }

  bool grow(int32_t s, int32_t num_tokens) {
    KvSequence& sequence = sequences_[s];
    num_tokens = std::min(num_tokens, kMaxTokens);
    std::vector<int64_t> counts;
    std::vector<size_t> ends;
    for (GroupId g = 0; g < num_groups_; ++g) {
      const auto size = sequence.tables[g].size();
      const auto wanted = static_cast<size_t>(blocks_for(g, num_tokens));
      ends.push_back(std::max(size, wanted));
      counts.push_back(static_cast<int64_t>(ends[g] - size));
    }
    const bool is_possible = ledger_.can_allocate(counts);
    require(pool_.can_allocate(counts) == is_possible, "can_allocate is wrong");

    writes_.clear();
    const bool is_done = sequence.blocks.reserve(pool_, num_tokens, s, writes_);
    require(is_done == is_possible, "reserve gave ", is_done);
    if (!is_done) {
      ++num_refused_;
      require(writes_.empty(), "a failed reservation wrote to the table");
      if (fault_ == KvFault::kKeepsPartOfFailed) {
        for (GroupId g = 0; g < num_groups_; ++g) (void)pool_.allocate(g);
      }
    } else {
      ++num_grown_;
      sequence.num_reserved = std::max(sequence.num_reserved, num_tokens);
      for (const TableWrite& write : writes_) {
        require(write.seq_slot == s, "seq_slot is ", write.seq_slot);
        std::vector<BlockId>& table = sequence.tables.at(write.group);
        require(write.index == static_cast<int32_t>(table.size()), "index is ", write.index);
        ledger_.own(s, write.group, write.block);
        table.push_back(write.block);
      }
      for (GroupId g = 0; g < num_groups_; ++g) {
        require(sequence.tables[g].size() == ends[g], "group ", g, " does not cover ", num_tokens);
      }
    }
    check_table(s);
    return is_done;
  }

  // KvSequence s ends, and begins again with some of the first positions of `parent`. Like a plan,
  // which launches at once.
  void fork(int32_t s, int32_t parent) {
    release_all(s);
    if (sequences_[parent].num_reserved == 0) return;
    const int32_t num_tokens = draw(1, sequences_[parent].num_reserved);
    KvSequence& child = sequences_[s];
    bool is_possible = true;
    for (GroupId g = 0; g < num_groups_; ++g) {
      for (int32_t i = 0; i < blocks_for(g, num_tokens); ++i) {
        is_possible &= !is_seen(g, i, num_tokens) || sequences_[parent].tables[g].at(i) != 0;
      }
    }
    require(sequences_[parent].blocks.can_fork(layout_, num_tokens) == is_possible,
            "can_fork is wrong");
    if (!is_possible) {
      ++num_unforkable_;
      return;
    }
    ++num_forked_;
    child.blocks.fork(pool_, sequences_[parent].blocks, num_tokens);
    child.known = num_tokens;
    for (GroupId g = 0; g < num_groups_; ++g) {
      for (int32_t i = 0; last_token(g, i) < num_tokens; ++i) {
        const bool is_shared = is_seen(g, i, num_tokens);
        const BlockId block = is_shared ? sequences_[parent].tables[g][i] : kNullBlock;
        child.tables[g].push_back(block);
        if (is_shared) {
          require(ledger_.hold(s, g, block) == pool_.num_holders(g, block), "holders of block ",
                  block);
        } else {
          ++child.num_released[g];
        }
      }
    }
    ledger_.check(pool_);
    if (!grow(s, num_tokens + draw(1, 24))) {
      release_all(s);
      return;
    }
    copies_.clear();
    child.blocks.append_copies(layout_, sequences_[parent].blocks, num_tokens, copies_);
    size_t at = 0;
    for (GroupId g = 0; g < num_groups_; ++g) {
      // The last block that has any entry, unless its last token is among them.
      const int32_t last = blocks_for(g, num_tokens) - 1;
      if (last < 0 || last_token(g, last) < num_tokens) continue;
      const auto index = static_cast<size_t>(last);
      require(at < copies_.size() && copies_[at].group == g &&
                  copies_[at].source == sequences_[parent].tables[g][index] &&
                  copies_[at].destination == child.tables[g][index],
              "the copy of group ", g, " is wrong");
      ledger_.begin_copy(launched_ + 1, copies_[at++]);
    }
    require(at == copies_.size(), "copies of nothing");
    if (fault_ == KvFault::kReleasesSource) release_all(parent);
    if (launched_ - device_completed_ > kMaxLateness) complete(launched_);
    ++launched_;
  }

  // Whether a query at `position` or later sees anything of block i.
  bool is_seen(GroupId g, int32_t i, int32_t position) const {
    return last_token(g, i) >= first_visible(layout_.groups[g].kind, position);
  }

  // The last token whose entry is in block i.
  int32_t last_token(GroupId g, int32_t i) const {
    const KvGroup& group = layout_.groups[g];
    return (i + 1) * group.block_size * tokens_per_entry(group.kind) - 1;
  }

  // The number of blocks with entries of the first num_tokens tokens.
  int32_t blocks_for(GroupId g, int32_t num_tokens) const {
    const KvGroup& group = layout_.groups[g];
    const int32_t entries = num_entries(group.kind, num_tokens);
    return (entries + group.block_size - 1) / group.block_size;
  }

  // The host learns that `known` tokens are committed.
  void commit(int32_t s, int32_t known) {
    KvSequence& sequence = sequences_[s];
    sequence.known = std::max(sequence.known, known);
    for (GroupId g = 0; g < num_groups_; ++g) {
      const KvGroup& group = layout_.groups[g];
      std::vector<BlockId>& table = sequence.tables[g];
      int32_t& i = sequence.num_released[g];
      // The last token of block i is older than the oldest key that the next query sees.
      while (i < static_cast<int32_t>(table.size()) &&
             last_token(g, i) < first_visible(group.kind, sequence.known)) {
        ledger_.disown(s, g, table[i], launched_);
        table[i++] = kNullBlock;
      }
    }
    sequence.blocks.release_below(pool_, sequence.known, tag());
    check_table(s);
  }

  void release_all(int32_t s) {
    KvSequence& sequence = sequences_[s];
    for (GroupId g = 0; g < num_groups_; ++g) {
      for (BlockId block : sequence.tables[g]) {
        if (block == kNullBlock) continue;
        ledger_.disown(s, g, block, launched_);
        if (fault_ == KvFault::kReleasesTwice && pool_.num_holders(g, block) > 1) {
          pool_.release(g, block, tag());
        }
      }
      sequence.tables[g].clear();
      sequence.num_released[g] = 0;
    }
    sequence.num_reserved = 0;
    sequence.known = 0;
    if (fault_ == KvFault::kLosesBlock && sequence.blocks.num_held() > 0) {
      sequence.blocks = SequenceBlocks(num_groups_);
    }
    sequence.blocks.release_all(pool_, tag());
    check_table(s);
  }

  void complete(int64_t iteration) {
    if (iteration < 0) return;
    device_completed_ = std::max(device_completed_, iteration);
    ++num_completed_;
    ledger_.end_copies(device_completed_);
    pool_.complete(fault_ == KvFault::kCompletesEarly ? iteration + 1 : iteration);
    ledger_.check_quarantine(device_completed_);
  }

  // All but one sequence go: what the one does not touch must be free, and usable.
  void quiesce() {
    ++num_quiesced_;
    const int32_t survivor = draw(0, kNumSequences - 1);
    for (int32_t s = 0; s < kNumSequences; ++s) {
      if (s != survivor) release_all(s);
    }
    complete(launched_);
    std::set<int64_t> touched;
    for (GroupId g = 0; g < num_groups_; ++g) {
      for (BlockId block : sequences_[survivor].tables[g]) {
        if (block != kNullBlock) touched.insert(block / layout_.blocks_per_slab(g));
      }
    }
    const int64_t num_free = layout_.num_slabs - 1 - static_cast<int64_t>(touched.size());
    require(pool_.num_free_slabs() >= num_free, pool_.num_free_slabs(), " slabs are free, not ",
            num_free);
    ledger_.check(pool_);

    const int32_t other = (survivor + 1) % kNumSequences;
    const int32_t num_tokens = draw(1, kMaxTokens);
    int64_t num_needed = 0;
    for (GroupId g = 0; g < num_groups_; ++g) {
      const int64_t per_slab = layout_.blocks_per_slab(g);
      num_needed += (blocks_for(g, num_tokens) + per_slab - 1) / per_slab;
    }
    const bool is_admitted = grow(other, num_tokens);
    require(is_admitted || num_needed > num_free, "refused ", num_needed, " of ", num_free,
            " free slabs");
    ledger_.check(pool_);

    release_all(survivor);
    release_all(other);
    complete(launched_);
    require(pool_.num_free_slabs() == layout_.num_slabs - 1, "the empty pool has used slabs");
    serve_alone(draw(0, kNumSequences - 1));
  }

  // A sequence that fits alone is served to its end on an empty pool, however late the device is.
  void serve_alone(int32_t s) {
    const int32_t num_tokens = draw(1, kMaxTokens);
    const int32_t rows = draw(1, 16);
    const int32_t lateness = draw(0, kMaxLateness);
    if (!pool_.fits_alone(peak_blocks(layout_, num_tokens, {.window = rows * (2 * lateness + 1)}))) {
      ++num_too_large_;
      return;
    }
    ++num_served_alone_;
    for (int32_t t = 0; rows * t < num_tokens; ++t) {
      complete(launched_ - lateness);
      commit(s, rows * std::max(0, t - lateness));
      require(grow(s, std::min(num_tokens, rows * (t + 1))), "refused at ", rows * t, " of ",
              num_tokens, " tokens, which fit alone; ", rows, " rows, lateness ", lateness);
      ledger_.check(pool_);
      ++launched_;
    }
    release_all(s);
  }

  int64_t tag() const {
    return fault_ == KvFault::kStaleTag ? std::max<int64_t>(-1, launched_ - 1) : launched_;
  }

  void check_table(int32_t s) const {
    const KvSequence& sequence = sequences_[s];
    int64_t num_held = 0;
    for (GroupId g = 0; g < num_groups_; ++g) {
      const auto table = sequence.blocks.table(g);
      require(std::equal(table.begin(), table.end(), sequence.tables[g].begin(),
                         sequence.tables[g].end()),
              "the table of sequence ", s, ", group ", g, " is wrong");
      num_held += static_cast<int64_t>(table.size()) - sequence.num_released[g];
    }
    require(sequence.blocks.num_held() == num_held, "sequence ", s, " holds ",
            sequence.blocks.num_held(), ", not ", num_held);
  }

  // The ledger against all tables, both ways.
  void check_tables() const {
    size_t num_entries = 0;
    for (int32_t s = 0; s < kNumSequences; ++s) {
      check_table(s);
      for (GroupId g = 0; g < num_groups_; ++g) {
        for (BlockId block : sequences_[s].tables[g]) {
          if (block == kNullBlock) continue;
          ++num_entries;
          require(ledger_.is_held(s, g, block), "block ", block, " is not of ", s);
        }
      }
    }
    ledger_.check_holders(pool_, num_entries);
  }

  const KvLayout layout_;
  const int32_t num_groups_;
  SlabPool pool_;
  std::mt19937_64 random_;
  const KvFault fault_;
  std::vector<KvSequence> sequences_;
  int64_t launched_ = -1;
  int64_t device_completed_ = -1;
  KvLedger ledger_;

  std::vector<TableWrite> writes_;
  std::vector<BlockCopy> copies_;
  const char* operation_ = "";
  int64_t num_grown_ = 0;
  int64_t num_forked_ = 0;
  int64_t num_unforkable_ = 0;
  int64_t num_refused_ = 0;
  int64_t num_completed_ = 0;
  int64_t num_quiesced_ = 0;
  int64_t num_served_alone_ = 0;
  int64_t num_too_large_ = 0;
};

}  // namespace paceline::testing
