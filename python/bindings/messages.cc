// SPDX-License-Identifier: Apache-2.0
#include "messages.h"

namespace paceline::python {
namespace {

constexpr py::ssize_t kMaxShown = 60;  // characters

}  // namespace

std::string shorten(py::handle value) {
  try {
    const py::str text = py::repr(value);
    if (py::len(text) <= static_cast<size_t>(kMaxShown)) return text.cast<std::string>();
    const py::object head = text[py::slice(0, kMaxShown, 1)];
    return head.cast<std::string>() + "...";
  } catch (const py::error_already_set&) {
    return "<" + py::type::of(value).attr("__name__").cast<std::string>() + ">";
  }
}

}  // namespace paceline::python
