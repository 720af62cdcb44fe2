// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/check.h"
#include "kv/prefix_cache.h"

namespace paceline {

std::string PrefixCache::check_integrity() const {
  std::vector<bool> is_free(nodes_.size());
  int64_t num_free = 0;
  for (int32_t id = first_free_node_; id != kNone;
       id = nodes_[static_cast<size_t>(id)].next_in_bucket) {
    if (is_free[static_cast<size_t>(id)]) return "the list of free nodes has a cycle";
    is_free[static_cast<size_t>(id)] = true;
    ++num_free;
  }
  if (num_nodes_ + num_free + 1 != static_cast<int64_t>(nodes_.size())) {
    return concat("nodes: ", num_nodes_, " counted, ", num_free, " free, ", nodes_.size(),
                  " in all");
  }
  std::vector<int64_t> num_known(groups_.size());
  for (int32_t id = 1; id < static_cast<int32_t>(nodes_.size()); ++id) {
    if (is_free[static_cast<size_t>(id)]) continue;
    const Node& node = nodes_[static_cast<size_t>(id)];
    const auto is_used = [&](int32_t other) {
      return other >= 0 && other < static_cast<int32_t>(nodes_.size()) &&
             !is_free[static_cast<size_t>(other)];
    };
    if (!is_used(node.parent) || node.depth != nodes_[static_cast<size_t>(node.parent)].depth + 1) {
      return concat("node ", id, " of depth ", node.depth, " has the parent ", node.parent);
    }
    const int32_t listed = node.prev_sibling != kNone
                               ? nodes_[static_cast<size_t>(node.prev_sibling)].next_sibling
                               : nodes_[static_cast<size_t>(node.parent)].first_child;
    if (listed != id) return concat("node ", id, " is not among the children of its parent");
    if (child(node.parent, key_of(id), node.salt) != id) {
      return concat("node ", id, " is not found by its tokens");
    }
    if (node.depth > 0 && node.salt != nullptr) {
      return concat("node ", id, " of depth ", node.depth, " has a salt");
    }
    if (node.first_child == kNone && !has_blocks(id)) return concat("node ", id, " is bare");
    for (size_t g = 0; g < groups_.size(); ++g) {
      const BlockId known = block(id, g);
      const bool ends_block = (node.depth + 1) % groups_[g].nodes_per_block == 0;
      if (known == kNullBlock) {
        if (ends_block && groups_[g].sees_all && !groups_[g].is_optional) {
          return concat("node ", id, " lacks its block of group ", g);
        }
        continue;
      }
      if (groups_[g].is_optional) {
        int32_t above = id;
        for (int32_t i = 0; i < groups_[g].nodes_per_block && above != kRoot; ++i) {
          above = nodes_[static_cast<size_t>(above)].parent;
        }
        if (above != kRoot && block(above, g) == kNullBlock) {
          return concat("node ", id, " has a block of group ", g, ", but those above it do not");
        }
      }
      if (!ends_block || groups_[g].node_of[static_cast<size_t>(known)] != id ||
          !pool_.is_known(static_cast<GroupId>(g), known)) {
        return concat("node ", id, " has block ", known, " of group ", g,
                      ", which pool or table do not know");
      }
      ++num_known[g];
    }
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    const std::vector<int32_t>& node_of = groups_[g].node_of;
    const int64_t num_marked = pool_.num_known(static_cast<GroupId>(g));
    const auto num_listed =
        static_cast<int64_t>(node_of.size()) - std::count(node_of.begin(), node_of.end(), kNone);
    if (num_listed != num_known[g] || num_marked != num_known[g]) {
      return concat("group ", g, ": ", num_known[g], " blocks in nodes, ", num_listed,
                    " listed, and the pool knows ", num_marked);
    }
  }
  return {};
}

}  // namespace paceline
