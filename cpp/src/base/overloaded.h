// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace paceline {

// One function object of several lambdas, for std::visit: one for each alternative, so that a new
// alternative of a variant does not compile until every visit has an answer for it.
template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

}  // namespace paceline
