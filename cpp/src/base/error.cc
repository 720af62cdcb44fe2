// SPDX-License-Identifier: Apache-2.0
#include "base/check.h"

namespace paceline {

void throw_check_failure(const char* condition, const std::string& message,
                         std::source_location where) {
  throw InternalError(concat("internal error, please report: ", condition, " does not hold at ",
                             where.file_name(), ":", where.line(), message.empty() ? "" : ": ",
                             message));
}

}  // namespace paceline
