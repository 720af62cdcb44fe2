// SPDX-License-Identifier: Apache-2.0
#include "device/program.h"

namespace paceline {

void Program::append(const Program& child) {
  const size_t base = (params_.size() + 15) / 16 * 16;
  params_.resize(base);
  params_.insert(params_.end(), child.params_.begin(), child.params_.end());
  for (Node node : child.nodes_) {
    node.params_offset += base;
    nodes_.push_back(node);
  }
}

void Program::replay(CpuContext& context) const {
  for (const Node& node : nodes_) {
    node.invoke(context, node.op, params_.data() + node.params_offset);
  }
}

}  // namespace paceline
