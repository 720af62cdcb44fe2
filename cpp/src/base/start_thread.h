// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace paceline {

// Throws the DeviceError for a thread that the system refuses. `missing` names the thread.
[[noreturn]] void throw_out_of_threads(const std::string& missing, const std::system_error& cause);

// A std::thread that runs `body`. Throws DeviceError when the system refuses it.
template <class Body>
[[nodiscard]] std::thread start_thread(const char* name, Body body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw_out_of_threads(name, error);
  }
}

}  // namespace paceline
