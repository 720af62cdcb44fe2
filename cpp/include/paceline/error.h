// SPDX-License-Identifier: Apache-2.0
#pragma once

// The exception types that cross the library's edge. Expected outcomes (no free block, queue full,
// cancelled) are return values and never one of these. Every message names the argument, the value
// seen, the values allowed and the cure.

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

// Something valid that this build or version does not do; the message lists what it does.
// NotImplementedError in Python.
class PACELINE_API Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A model file that cannot be read or does not hold what it must. OSError in Python when the file
// is missing (see `is_missing`), else ValueError.
class PACELINE_API ModelFileError : public InvalidArgument {
 public:
  explicit ModelFileError(const std::string& what, bool is_missing = false)
      : InvalidArgument(what), is_missing_(is_missing) {}
  [[nodiscard]] bool is_missing() const { return is_missing_; }

 private:
  bool is_missing_;
};

// A bug in Paceline itself: a broken invariant. RuntimeError in Python.
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

// Memory for weights, KV pool or workspace could not be had at start. MemoryError in Python.
class PACELINE_API OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string what) : what_(std::move(what)) {}
  [[nodiscard]] const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

}  // namespace paceline
