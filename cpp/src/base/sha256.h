// SPDX-License-Identifier: Apache-2.0
#pragma once

// SHA-256 (FIPS 180-4). Processors with instructions for it use them.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace paceline {

class Sha256 final {
 public:
  using Digest = std::array<uint8_t, 32>;

  // uses_instructions false: the portable code, for tests.
  explicit Sha256(bool uses_instructions = true);

  void add(std::span<const std::byte> bytes);
  void add(std::string_view text) { add(std::as_bytes(std::span(text))); }
  void add(const Digest& digest) { add(std::as_bytes(std::span(digest))); }
  // Of all that was added. The object starts anew.
  [[nodiscard]] Digest finish();

 private:
  void add_blocks(const uint8_t* data, size_t num_blocks);

  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> block_;  // the first num_bytes_ % 64 wait
  uint64_t num_bytes_ = 0;
  bool uses_instructions_;
};

// In hexadecimal, lowercase.
[[nodiscard]] std::string hex(const Sha256::Digest& digest);

// The digest of a text, in hexadecimal.
[[nodiscard]] std::string sha256_hex(std::string_view text);

}  // namespace paceline
