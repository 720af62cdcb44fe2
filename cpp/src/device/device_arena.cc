// SPDX-License-Identifier: Apache-2.0
#include "device/device_arena.h"

#include <algorithm>

namespace paceline {

namespace {
constexpr int64_t kAlignment = 256;
constexpr int64_t kChunkBytes = int64_t{1} << 20;  // small buffers share a chunk
}  // namespace

std::byte* DeviceArena::allocate_bytes(int64_t bytes, std::string_view purpose) {
  bytes = std::max(bytes, kAlignment);
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (chunks_.empty() || chunk_used_ + bytes > chunks_.back().bytes()) {
    chunks_.emplace_back(*memory_, std::max(bytes, kChunkBytes), purpose);
    chunk_used_ = 0;
  }
  std::byte* data = chunks_.back().data() + chunk_used_;
  chunk_used_ += bytes;
  bytes_by_purpose_[std::string(purpose)] += bytes;
  return data;
}

}  // namespace paceline
