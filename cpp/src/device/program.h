// SPDX-License-Identifier: Apache-2.0
#pragma once

// A recorded sequence of op calls with fixed buffers: the CPU counterpart of a CUDA graph. Whatever
// may change between replays must be memory behind a pointer in the params, because a recorded call
// has its own copy of the params. Recording does not execute the ops.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

namespace paceline {

struct CpuContext;

class Program {
 public:
  // One recorded call. Its params are in the program's own storage.
  struct Node {
    void (*invoke)(CpuContext&, void (*op)(), const void* params);
    void (*op)();          // type-erased function pointer of the op, also its identity
    size_t params_offset;  // into params_, aligned to 16
  };

  template <class Params>
  void record(void (*op)(CpuContext&, const Params&), const Params& params) {
    static_assert(std::is_trivially_copyable_v<Params> && alignof(Params) <= 16);
    const size_t offset = (params_.size() + 15) / 16 * 16;
    params_.resize(offset + sizeof(Params));
    std::memcpy(params_.data() + offset, &params, sizeof(Params));
    nodes_.push_back({.invoke = &invoke_as<Params>,
                      .op = reinterpret_cast<void (*)()>(op),
                      .params_offset = offset});
  }

  // Executes the nodes in order. Allocates nothing.
  void replay(CpuContext& context) const;

  [[nodiscard]] int64_t num_nodes() const { return static_cast<int64_t>(nodes_.size()); }
  [[nodiscard]] std::span<const Node> nodes() const { return nodes_; }

  // The params of a node of this program as bytes, and what pads them to the next one.
  [[nodiscard]] std::span<const std::byte> params_of(const Node& node) const {
    const bool is_last = &node == &nodes_.back();
    const size_t end = is_last ? params_.size() : (&node + 1)->params_offset;
    return std::span(params_).subspan(node.params_offset, end - node.params_offset);
  }

  // The params of every node that calls `op`, for inspection; tests also edit them to plant faults.
  template <class Params>
  [[nodiscard]] std::vector<Params*> params_of(void (*op)(CpuContext&, const Params&)) {
    std::vector<Params*> found;
    for (const Node& node : nodes_) {
      if (node.op == reinterpret_cast<void (*)()>(op)) {
        found.push_back(reinterpret_cast<Params*>(params_.data() + node.params_offset));
      }
    }
    return found;
  }

 private:
  template <class Params>
  static void invoke_as(CpuContext& context, void (*op)(), const void* params) {
    reinterpret_cast<void (*)(CpuContext&, const Params&)>(op)(context,
                                                               *static_cast<const Params*>(params));
  }

  std::vector<Node> nodes_;
  std::vector<std::byte> params_;  // operator new aligns to 16, so aligned offsets suffice
};

}  // namespace paceline
