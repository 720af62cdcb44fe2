// SPDX-License-Identifier: Apache-2.0
#pragma once

// The exception types that the library throws. All derive from Error, and no function of the public
// headers throws another type; only what a caller's own function throws (ModelBuilder::ReadBytes,
// Executor::Progress) passes through unchanged. Expected outcomes (no free block, a full queue, a
// cancelled request) are return values. Every message names the argument, the value seen, the
// values allowed and the cure.

#include <stdexcept>
#include <string>

#include <paceline/export.h>

namespace paceline {

// The base of all of them.
class PACELINE_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller's mistake: a bad option, shape, file content or request. ValueError in Python.
class PACELINE_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A valid request for something that this build or version does not support. The message lists
// what is supported. NotImplementedError in Python.
class PACELINE_API Unsupported : public Error {
 public:
  using Error::Error;
};

// A model file that cannot be read or whose content is not valid; the message names the file.
// ValueError in Python, and also FileNotFoundError when the file is missing (see `is_missing`).
class PACELINE_API ModelFileError : public InvalidArgument {
 public:
  explicit ModelFileError(const std::string& what, bool is_missing = false)
      : InvalidArgument(what), is_missing_(is_missing) {}
  // Whether the file does not exist.
  [[nodiscard]] bool is_missing() const { return is_missing_; }

 private:
  bool is_missing_;
};

// A broken invariant, which is a bug in Paceline. RuntimeError in Python.
class PACELINE_API InternalError : public Error {
 public:
  using Error::Error;
};

// The device or its driver failed or is missing, or the system refuses a thread or another
// resource; the message has the call and the reason. After one that came from a running engine,
// that engine is lost. RuntimeError in Python.
class PACELINE_API DeviceError : public Error {
 public:
  using Error::Error;
};

// Memory could not be allocated, for weights, KV pool and workspace or for anything else; the
// message says which. MemoryError in Python.
class PACELINE_API OutOfMemory : public Error {
 public:
  using Error::Error;
};

}  // namespace paceline
