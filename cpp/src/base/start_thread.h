// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace paceline {

// Throws the DeviceError for a thread that the system refuses. `missing` names the thread.
[[noreturn]] void throw_out_of_threads(const std::string& missing, const std::system_error& cause);

// Makes the C++ library allocate what this thread needs to throw exceptions. Without it, the
// thread's first std::bad_alloc ends the process, because there is no memory left to throw it.
inline void prepare_to_throw() {
  // Volatile, because this is a pure function: the compiler drops a call whose result nobody reads.
  [[maybe_unused]] const volatile int num_exceptions = std::uncaught_exceptions();
}

// A std::thread that runs `body`. Throws DeviceError when the system refuses it.
template <class Body>
[[nodiscard]] std::thread start_thread(const char* name, Body body) {
  try {
    return std::thread([body = std::move(body)]() mutable {
      prepare_to_throw();
      body();
    });
  } catch (const std::system_error& error) {
    throw_out_of_threads(name, error);
  }
}

}  // namespace paceline
