// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace paceline {

// Makes appending `num_more` values unable to throw. Capacity grows geometrically, which an exact
// vector::reserve would not do.
template <class T>
void reserve_more(std::vector<T>& values, size_t num_more) {
  const size_t needed = values.size() + num_more;
  if (needed > values.capacity()) values.reserve(std::max(needed, 2 * values.capacity()));
}

}  // namespace paceline
