// SPDX-License-Identifier: Apache-2.0
#pragma once

// The exception types that the library throws. Expected outcomes (no free block, a full queue, a
// cancelled request) are return values. Every message names the argument, the value seen, the
// values allowed and the cure.

#include <new>
#include <stdexcept>
#include <string>

#include <paceline/export.h>

namespace paceline {

// The caller's mistake: a bad option, shape, file content or request. ValueError in Python.
class PACELINE_API InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A valid request for something that this build or version does not support; the message lists what
// is supported.
// NotImplementedError in Python.
class PACELINE_API Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A model file that cannot be read or whose content is not valid; the message names the file.
// ValueError in Python, and also FileNotFoundError when the file is missing (see `is_missing`).
class PACELINE_API ModelFileError : public InvalidArgument {
 public:
  explicit ModelFileError(const std::string& what, bool is_missing = false)
      : InvalidArgument(what), is_missing_(is_missing) {}
  [[nodiscard]] bool is_missing() const { return is_missing_; }

 private:
  bool is_missing_;
};

// A broken invariant, which is a bug in Paceline. RuntimeError in Python.
class PACELINE_API InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// The device or its driver failed or is missing, or the system refuses a thread; the message has
// the call and the reason. After one that came from a running engine, that engine is lost.
// RuntimeError in Python.
class PACELINE_API DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Memory for weights, KV pool or workspace could not be allocated. MemoryError in Python.
class PACELINE_API OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string what) : what_(std::move(what)) {}
  [[nodiscard]] const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

}  // namespace paceline
