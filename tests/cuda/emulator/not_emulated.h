// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

namespace paceline::emulator {

// Thrown by an op whose kernels the emulator does not run.
class NotEmulated : public std::runtime_error {
 public:
  explicit NotEmulated(const std::string& op) : std::runtime_error(op) {}
};

}  // namespace paceline::emulator
