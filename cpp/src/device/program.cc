// SPDX-License-Identifier: Apache-2.0
#include "device/program.h"

namespace paceline {

void Program::replay(CpuContext& context) const {
  for (const Node& node : nodes_) {
    node.invoke(context, node.op, params_.data() + node.params_offset);
  }
}

}  // namespace paceline
