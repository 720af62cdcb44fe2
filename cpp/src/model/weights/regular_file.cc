// SPDX-License-Identifier: Apache-2.0
#include "model/weights/regular_file.h"

#include <fcntl.h>
#include <paceline/error.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace paceline {
namespace {

// The most that one call asks for: the kernel gives at most 2 GiB.
constexpr size_t kMaxReadBytes = size_t{1} << 30;

// What a path that is no regular file leads to.
const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

[[noreturn]] void fail(const std::string& path, int code) {
  throw ModelFileError(concat(path, ": ", std::strerror(code), "; allowed: a readable file"),
                       /*is_missing=*/code == ENOENT || code == ENOTDIR);
}

}  // namespace

RegularFile::RegularFile(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a FIFO by mistake must not wait for its writer.
  do {
    descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  } while (descriptor_ < 0 && errno == EINTR);
  if (descriptor_ < 0) fail(path, errno);
  struct stat status = {};
  const int code = fstat(descriptor_, &status) == 0 ? 0 : errno;
  if (code != 0 || !S_ISREG(status.st_mode)) close(std::exchange(descriptor_, -1));
  if (code != 0) fail(path, code);
  if (!S_ISREG(status.st_mode)) {
    throw ModelFileError(
        concat(path, ": is ", kind_of(status.st_mode), "; allowed: a regular file"));
  }
  bytes_ = status.st_size;
}

RegularFile::~RegularFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

RegularFile::RegularFile(RegularFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      bytes_(std::exchange(other.bytes_, 0)) {}

void RegularFile::read(int64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t count = pread(descriptor_, to.data(), std::min(to.size(), kMaxReadBytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(path_, errno);
    if (count == 0) {
      throw ModelFileError(concat(path_, ": byte ", offset, " is missing, but the file had ",
                                  bytes_,
                                  " bytes when it was opened; replace a file by renaming another, "
                                  "never write over one that is being loaded"));
    }
    offset += count;
    to = to.subspan(static_cast<size_t>(count));
  }
}

std::string RegularFile::read_all(int64_t max_bytes) const {
  if (bytes_ > max_bytes) {
    throw ModelFileError(concat(path_, ": has ", bytes_, " bytes; allowed: at most ", max_bytes));
  }
  std::string content(static_cast<size_t>(bytes_), '\0');
  read(0, std::as_writable_bytes(std::span(content)));
  return content;
}

}  // namespace paceline
