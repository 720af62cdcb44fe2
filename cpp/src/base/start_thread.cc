// SPDX-License-Identifier: Apache-2.0
#include "base/start_thread.h"

#include <paceline/error.h>

#include "base/check.h"

namespace paceline {

void throw_out_of_threads(const std::string& missing, const std::system_error& cause) {
  throw DeviceError(concat("cannot start ", missing, ": ", cause.code().message(),
                           "; lower num_threads or raise the limit on threads (ulimit -u, the "
                           "pids limit of the container, or the memory for their stacks)"));
}

}  // namespace paceline
