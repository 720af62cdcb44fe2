// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of the blocks, and asynchronous copies to it.

#include <cstring>
#include <vector>

#include "machine.h"
#include "shared_range.h"

namespace paceline::emulator {
namespace {

constexpr size_t kOverrunBytes = 1024;  // checked after dynamic shared memory

struct Range {
  std::byte* begin;
  size_t bytes;
};
Range static_range() {
  return {first_shared, static_cast<size_t>(reinterpret_cast<uintptr_t>(last_shared) -
                                            reinterpret_cast<uintptr_t>(first_shared))};
}
Range dynamic_range() {
  return {emulated_dynamic_shared, machine().launch->dynamic_shared_bytes + kOverrunBytes};
}

void fill(Range range) {
  const uint64_t pattern = machine().options.pattern;
  size_t at = 0;
  for (; at + 8 <= range.bytes; at += 8) std::memcpy(range.begin + at, &pattern, 8);
  std::memcpy(range.begin + at, &pattern, range.bytes - at);
}

}  // namespace

void fill_shared() {
  fill(static_range());
  fill(dynamic_range());
}

void save_shared(Block& block) {
  const Range fixed = static_range();
  const Range dynamic = dynamic_range();
  block.shared.resize(fixed.bytes + dynamic.bytes);
  std::memcpy(block.shared.data(), fixed.begin, fixed.bytes);
  std::memcpy(block.shared.data() + fixed.bytes, dynamic.begin, dynamic.bytes);
}
void restore_shared(const Block& block) {
  const Range fixed = static_range();
  const Range dynamic = dynamic_range();
  std::memcpy(fixed.begin, block.shared.data(), fixed.bytes);
  std::memcpy(dynamic.begin, block.shared.data() + fixed.bytes, dynamic.bytes);
}

bool kept_to_dynamic_shared() {
  const size_t size = machine().launch->dynamic_shared_bytes;
  std::vector<std::byte> expected(size % 8 + kOverrunBytes);
  fill({expected.data(), expected.size()});
  return std::memcmp(emulated_dynamic_shared + size, expected.data() + size % 8, kOverrunBytes) ==
         0;
}

void* shared_of_block(const void* shared, int32_t rank) {
  Machine& m = machine();
  const Thread& self = *m.current;
  const auto* const at = static_cast<const std::byte*>(shared);
  if (rank < 0 || static_cast<size_t>(rank) >= m.blocks.size()) {
    fail("asks for block " + std::to_string(rank) + " of a cluster of " +
         std::to_string(m.blocks.size()));
  }
  Block& block = m.blocks[static_cast<size_t>(rank)];
  if (block.num_ended == m.num_threads) {
    fail("asks for shared memory of block " + std::to_string(rank) + ", which has ended");
  }
  if (static_cast<uint32_t>(rank) == self.block) return const_cast<std::byte*>(at);
  size_t begin = 0;
  for (const Range range : {static_range(), dynamic_range()}) {
    if (at >= range.begin && at < range.begin + range.bytes) {
      return block.shared.data() + begin + (at - range.begin);
    }
    begin += range.bytes;
  }
  fail("maps an address to another block that is not in shared memory");
}

uint32_t shared_address(const void* shared) {
  const auto at = reinterpret_cast<uintptr_t>(shared);
  const auto base = reinterpret_cast<uintptr_t>(emulated_dynamic_shared);
  return static_cast<uint32_t>(at - base);
}

void* shared_pointer(uint32_t address, size_t num_bytes) {
  std::byte* const at = emulated_dynamic_shared + static_cast<int32_t>(address);
  for (const Range range : {static_range(), dynamic_range()}) {
    if (at >= range.begin && at + num_bytes <= range.begin + range.bytes) return at;
  }
  fail("uses the address " + std::to_string(static_cast<int32_t>(address)) +
       ", which is not in shared memory");
}

void copy_later(void* to, const void* from, size_t num_bytes) {
  Thread& self = *machine().current;
  self.copies.push_back({static_cast<std::byte*>(to), static_cast<const std::byte*>(from),
                         num_bytes, self.num_groups});
}

void end_copy_group() { ++machine().current->num_groups; }

void make_copies(Thread& thread, uint32_t end_group) {
  size_t num_done = 0;
  for (const Copy& copy : thread.copies) {
    if (copy.group >= end_group) break;
    if (copy.from != nullptr) {
      std::memcpy(copy.to, copy.from, copy.num_bytes);
    } else {
      std::memset(copy.to, 0, copy.num_bytes);
    }
    ++num_done;
  }
  thread.copies.erase(thread.copies.begin(),
                      thread.copies.begin() + static_cast<ptrdiff_t>(num_done));
}

void wait_for_copies(uint32_t num_pending) {
  Thread& self = *machine().current;
  if (self.num_groups > num_pending) make_copies(self, self.num_groups - num_pending);
}

}  // namespace paceline::emulator
