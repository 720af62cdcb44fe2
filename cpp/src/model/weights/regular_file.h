// SPDX-License-Identifier: Apache-2.0
#pragma once

// A regular file, open for reading. It is not mapped: reading a file that has been shortened throws
// an exception, where a mapping would kill the process with SIGBUS. Reading is thread-safe.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace paceline {

class RegularFile final {
 public:
  // Throws ModelFileError for a file that cannot be opened (is_missing when it does not exist) and
  // for a directory, FIFO or device, without waiting for a writer.
  explicit RegularFile(const std::string& path);
  ~RegularFile();
  RegularFile(RegularFile&& other) noexcept;
  RegularFile& operator=(RegularFile&&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] int64_t bytes() const { return bytes_; }  // when it was opened

  // Fills `to` with the bytes from `offset` on. Throws ModelFileError when the file ends earlier.
  void read(int64_t offset, std::span<std::byte> to) const;

  // The content of the file. Throws ModelFileError when it has more than `max_bytes`.
  [[nodiscard]] std::string read_all(int64_t max_bytes) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t bytes_ = 0;
};

}  // namespace paceline
