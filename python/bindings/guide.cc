// SPDX-License-Identifier: Apache-2.0
#include "guide.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace paceline::python {
namespace {

py::list list_of(std::span<const int32_t> tokens) {
  py::list list(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) list[i] = py::int_(tokens[i]);
  return list;
}

// Calls Python with the GIL. What Python raises becomes an exception with its text alone, since the
// error itself may be dropped only with the GIL.
template <class Call>
std::vector<int32_t> call_python(Call call) {
  const py::gil_scoped_acquire acquire;
  try {
    return call().template cast<std::vector<int32_t>>();
  } catch (const py::error_already_set& error) {
    throw std::runtime_error(py::str(error.value()).cast<std::string>());
  }
}

// Holds an object that is released with the GIL.
class Held {
 public:
  explicit Held(py::object object) : object_(std::move(object)) {}
  ~Held() {
    const py::gil_scoped_acquire acquire;
    object_ = py::object();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  [[nodiscard]] const py::object& get() const { return object_; }

 private:
  py::object object_;
};

class PyConstraint final : public TokenConstraint {
 public:
  explicit PyConstraint(py::object object) : object_(std::move(object)) {}

  void constrain(std::span<const int32_t> emitted, std::vector<int32_t>& drafts, int32_t max_drafts,
                 std::span<uint32_t> masks) override {
    drafts = call_python([&] {
      return object_.get().attr("constrain")(list_of(emitted), list_of(drafts), max_drafts,
                                             reinterpret_cast<uintptr_t>(masks.data()));
    });
  }

 private:
  Held object_;
};

class PyDrafter final : public HostDrafter {
 public:
  explicit PyDrafter(py::object object) : object_(std::move(object)) {}

  std::vector<int32_t> draft(std::span<const int32_t> tokens, int32_t max_drafts) override {
    return call_python([&] { return object_.get()(list_of(tokens), max_drafts); });
  }
  [[nodiscard]] const py::object& object() const { return object_.get(); }

 private:
  Held object_;
};

}  // namespace

std::shared_ptr<TokenConstraint> make_constraint(py::object object) {
  return std::make_shared<PyConstraint>(std::move(object));
}

std::shared_ptr<HostDrafter> make_drafter(py::object object) {
  return std::make_shared<PyDrafter>(std::move(object));
}

py::object object_of(const std::shared_ptr<HostDrafter>& drafter) {
  const auto* const made = dynamic_cast<const PyDrafter*>(drafter.get());
  return made == nullptr ? py::none() : made->object();
}

}  // namespace paceline::python
