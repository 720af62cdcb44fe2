// SPDX-License-Identifier: Apache-2.0
#pragma once

// A .safetensors file. Its header is validated when the file is opened: every tensor lies inside
// the file, and no two overlap. An invalid file throws ModelFileError, which names the file, the
// value seen and the values allowed. Reading is thread-safe.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/weights/regular_file.h"

namespace paceline {

// One tensor of a file; valid while the SafetensorsFile lives.
struct StoredTensor {
  std::string_view dtype;          // as in the file, e.g. "BF16"
  std::span<const int64_t> shape;  // rank 0..8
  int64_t begin = 0;               // in the file; row-major, little-endian
  int64_t bytes = 0;
};

class SafetensorsFile final {
 public:
  explicit SafetensorsFile(const std::string& path);

  // Sorted.
  [[nodiscard]] std::vector<std::string_view> names() const;
  [[nodiscard]] std::optional<StoredTensor> find(std::string_view name) const;

  // Fills `to` with the bytes of the tensor from `first` on. Throws ModelFileError when the file
  // has been shortened since it was opened.
  void read(const StoredTensor& tensor, int64_t first, std::span<std::byte> to) const;

 private:
  struct Entry {
    std::string name;
    std::string_view dtype;  // a string constant
    size_t first_dim;        // in dims_
    size_t rank;
    int64_t begin;  // in the file
    int64_t end;
  };

  void read_header();

  RegularFile file_;
  std::vector<Entry> entries_;  // sorted by name
  std::vector<int64_t> dims_;   // of all shapes
};

}  // namespace paceline
