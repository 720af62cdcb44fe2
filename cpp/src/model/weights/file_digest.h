// SPDX-License-Identifier: Apache-2.0
#pragma once

// The SHA-256 of files of weights, for receipts. Digests are kept in $XDG_CACHE_HOME or ~/.cache,
// in paceline/digests: one small file for each file of weights, which is valid as long as the stamp
// is the same.

#include <string>

#include <paceline/model.h>

namespace paceline {

// The stamp of a file as it is now. Throws ModelFileError where it cannot be read.
[[nodiscard]] FileStamp file_stamp(const std::string& path);

// The SHA-256 of the file in hexadecimal, from the cache or computed, with a line in the log. A
// cache that cannot be read or written costs time and nothing else. Throws ModelFileError for a
// file that cannot be read or is not the one with this stamp.
[[nodiscard]] std::string file_digest(const FileStamp& stamp);

}  // namespace paceline
