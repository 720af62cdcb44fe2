// SPDX-License-Identifier: Apache-2.0
#include "model/weights/file_digest.h"

#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <system_error>
#include <vector>

#include "base/canonical_json.h"
#include "base/check.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sha256.h"
#include "base/utf8.h"
#include "model/weights/regular_file.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;

// An entry has a path of at most 4,095 bytes and five short values.
constexpr int64_t kMaxEntryBytes = int64_t{64} << 10;

// Null: there is no such file, or it cannot be asked; errno says why.
std::optional<FileStamp> find_stamp(const std::string& path) {
  struct stat status{};
  if (stat(path.c_str(), &status) != 0) return std::nullopt;
  const auto nanoseconds = [](const timespec& time) {
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  };
  return FileStamp{.path = path,
                   .bytes = status.st_size,
                   .modified_ns = nanoseconds(status.st_mtim),
                   .changed_ns = nanoseconds(status.st_ctim),
                   .inode = status.st_ino};
}

void check_unchanged(const FileStamp& stamp) {
  const std::optional<FileStamp> now = find_stamp(stamp.path);
  if (!now.has_value()) {
    throw ModelFileError(concat(
        stamp.path, ": ", std::strerror(errno),
        ", but a receipt needs the digest of the weights that were loaded from it; allowed: a file "
        "that stays where it is while its model is loaded"));
  }
  if (*now != stamp) {
    throw ModelFileError(concat(
        stamp.path,
        ": the file has changed since its weights were loaded, so a receipt would name other "
        "weights; load the model again"));
  }
}

// Empty: there is no home.
fs::path cache_folder() {
  if (const char* const cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != 0) {
    return fs::path(cache) / "paceline" / "digests";
  }
  const char* home = std::getenv("HOME");
  if (home == nullptr) {
    const passwd* const user = getpwuid(getuid());
    home = user != nullptr ? user->pw_dir : nullptr;
  }
  return home != nullptr ? fs::path(home) / ".cache" / "paceline" / "digests" : fs::path();
}

fs::path entry_of(const FileStamp& stamp) {
  const fs::path folder = cache_folder();
  std::error_code error;
  const fs::path real = fs::canonical(stamp.path, error);
  if (folder.empty() || error) return {};
  return folder / (sha256_hex(real.string()).substr(0, 32) + ".json");
}

// What is not UTF-8 becomes question marks: the path is there for readers.
std::string printable(std::string_view path) {
  std::string text;
  while (!path.empty()) {
    const size_t length = utf8_sequence(path);
    text += length > 0 ? path.substr(0, length) : "?";
    path.remove_prefix(std::max<size_t>(length, 1));
  }
  return text;
}

std::string entry_text(const FileStamp& stamp, const std::string& digest) {
  return concat(R"({"ctime_ns": )", stamp.changed_ns, R"(, "inode": )", stamp.inode,
                R"(, "mtime_ns": )", stamp.modified_ns, R"(, "path": )",
                canonical_string(printable(stamp.path)), R"(, "sha256": ")", digest,
                R"(", "size": )", stamp.bytes, "}\n");
}

// The digest in an entry; nullopt if there is none for the file as it is now.
std::optional<std::string> read_entry(const fs::path& entry, const FileStamp& stamp) {
  try {
    const std::string text = RegularFile(entry.string()).read_all(kMaxEntryBytes);
    const JsonDocument document(text, entry.string());
    std::string digest(document.root().at("sha256").as_string());
    const bool is_digest =
        digest.size() == 64 && digest.find_first_not_of("0123456789abcdef") == std::string::npos;
    if (is_digest && text == entry_text(stamp, digest)) return digest;
  } catch (const InvalidArgument&) {
    // A file that is not there, or is damaged.
  }
  return std::nullopt;
}

void write_entry(const fs::path& entry, const std::string& text) {
  std::error_code error;
  fs::create_directories(entry.parent_path(), error);
  std::string temporary = entry.string() + ".XXXXXX";
  const int descriptor = mkstemp(temporary.data());
  if (descriptor < 0) return;
  const bool is_written =
      write(descriptor, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(descriptor);
  if (is_written) {
    fs::rename(temporary, entry, error);
    if (!error) return;
  }
  fs::remove(temporary, error);
}

std::string compute(const FileStamp& stamp) {
  const RegularFile file(stamp.path);
  std::vector<std::byte> buffer(size_t{1} << 20);
  Sha256 sha256;
  for (int64_t offset = 0; offset < file.bytes();) {
    const auto count = std::min(file.bytes() - offset, static_cast<int64_t>(buffer.size()));
    const std::span<std::byte> part = std::span(buffer).first(static_cast<size_t>(count));
    file.read(offset, part);
    sha256.add(part);
    offset += count;
  }
  return hex(sha256.finish());
}

}  // namespace

FileStamp file_stamp(const std::string& path) {
  const std::optional<FileStamp> stamp = find_stamp(path);
  if (stamp.has_value()) return *stamp;
  throw ModelFileError(concat(path, ": ", std::strerror(errno)), errno == ENOENT);
}

std::string file_digest(const FileStamp& stamp) {
  check_unchanged(stamp);
  const fs::path entry = entry_of(stamp);
  if (!entry.empty()) {
    if (std::optional<std::string> found = read_entry(entry, stamp)) return *std::move(found);
  }
  log_made(LogLevel::kInfo, [&] {
    return concat(stamp.path, ": computing the SHA-256 of ", static_cast<double>(stamp.bytes) / 1e6,
                  " MB for receipts");
  });
  std::string digest = compute(stamp);
  check_unchanged(stamp);
  if (!entry.empty()) write_entry(entry, entry_text(stamp, digest));
  return digest;
}

}  // namespace paceline
