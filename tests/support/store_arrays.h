// SPDX-License-Identifier: Apache-2.0
#pragma once

// Pools of KV blocks, for the builders of op cases: what the layers of a few sequences have stored,
// and what an op writes.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "ops/compressed.h"
#include "support/op_cases.h"
#include "support/row_values.h"

namespace paceline::testing {

inline constexpr int32_t kSequences = 3;
inline constexpr int64_t kGap = 64;  // unused elements around each block

// Rows without a slot in the pool.
inline bool is_inert(int64_t id) { return id % 13 == 6; }

// Slots in a pool that an op writes: every row has its own one, past the null block.
inline Handle add_slots(OpInstance& op, const char* name, const Rows& rows, int32_t block_size) {
  return op.add(row_ints<int64_t>(
      name, rows, [&](int64_t id) -> int64_t { return is_inert(id) ? 0 : block_size + id; }));
}

// The pool of these slots: NaN, in blocks of `block` elements.
inline Handle add_written_pool(OpInstance& op, const std::string& name, Element element,
                               int64_t block, int32_t block_size, const Rows& rows) {
  const int64_t count = (1 + (kMaxRowId + block_size - 1) / block_size) * block;
  OpArray pool =
      float_array(name, element, element, count, [=](float* to) { std::fill_n(to, count, kNan); });
  pool.role = Role::kInOut;
  pool.num_ignored = block;
  if (block_size == 1) {  // a row of the pool is the slot of one row
    pool.row_length = block;
    for (const int64_t id : rows.ids) pool.row_at.push_back(is_inert(id) ? 0 : id + 1);
  }
  return op.add(std::move(pool));
}

// A pool of blocks in an array of an op case.
struct StorePool {
  StorePool(Element element, int64_t entry_width, int32_t entries_of_block)
      : width(entry_width),
        block_size(entries_of_block),
        bytes(element_bytes(element)),
        block(block_size * width + 2 * kGap),
        dtype(element == Element::kF32 ? DType::kFloat32 : DType::kBFloat16) {}

  [[nodiscard]] KvLayerView view(const Addresses& at) const {
    return {.base = at.raw(pool),
            .block_bytes = block * bytes,
            .k_offset = kGap * bytes,
            .v_offset = kGap * bytes,
            .block_size = block_size,
            .dtype = dtype};
  }

  int64_t width;  // elements of an entry
  int32_t block_size;
  int64_t bytes;  // of an element
  int64_t block;  // elements of a block and its gaps
  DType dtype;
  Handle pool = kNoArray;
};

// What the sequences store: blocks in any order, NaN but for their entries.
struct StoreArrays : StorePool {
  StoreArrays(OpInstance& op, const std::string& name, Element element, int32_t length,
              int64_t entry_width, int32_t entries_of_block, uint64_t seed, Purpose purpose)
      : StorePool(element, entry_width, entries_of_block) {
    stride = (length + block_size - 1) / block_size + 2;
    const auto num_blocks = static_cast<int32_t>(1 + kSequences * stride);
    // Blocks that must not be followed are the null block.
    std::vector<int32_t> blocks(static_cast<size_t>(kSequences * stride), 0);
    std::vector<int32_t> free(static_cast<size_t>(num_blocks - 1));
    std::iota(free.begin(), free.end(), 1);
    Stream stream(seed, kOrdering, static_cast<uint64_t>(purpose));
    shuffle(free, stream);
    for (int32_t seq = 0; seq < kSequences; ++seq) {
      for (int64_t b = 0; b < (length + block_size - 1) / block_size; ++b) {
        blocks[static_cast<size_t>(seq * stride + b)] = free.back();
        free.pop_back();
      }
    }
    table = op.add(int_array(name + " table", Role::kInput, blocks));
    const auto fill = [=, *this](float* to) {
      std::fill_n(to, num_blocks * block, kNan);
      for (int32_t seq = 0; seq < kSequences; ++seq) {
        for (int32_t entry = 0; entry < length; ++entry) {
          const int32_t at = blocks[static_cast<size_t>(seq * stride + entry / block_size)];
          Stream(seed, purpose, static_cast<uint64_t>(seq), static_cast<uint64_t>(entry))
              .fill(to + at * block + kGap + entry % block_size * width, width);
        }
      }
    };
    OpArray values = float_array(name, element, element, num_blocks * block, fill);
    values.is_constant = true;
    pool = op.add(std::move(values));
  }
  [[nodiscard]] BlockTable blocks(const Addresses& at) const {
    return {.blocks = at.get<int32_t>(table), .stride = stride, .block_size = block_size};
  }

  int64_t stride = 0;
  Handle table = kNoArray;
};

// A store that an op writes, at the slots of `add_slots`.
struct WrittenStore : StorePool {
  WrittenStore(OpInstance& op, const std::string& name, Element element, int64_t entry_width,
               int32_t entries_of_block, const Rows& rows)
      : StorePool(element, entry_width, entries_of_block) {
    pool = add_written_pool(op, name, element, block, block_size, rows);
  }
};

}  // namespace paceline::testing
