// SPDX-License-Identifier: Apache-2.0
#include "executor_options.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "guide.h"
#include "messages.h"

namespace paceline::python {
namespace {

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

[[noreturn]] void refuse_option(const char* name, py::handle value, const std::string& allowed) {
  throw py::value_error("executor option '" + std::string(name) + "' is " + shorten(value) +
                        "; allowed: " + allowed);
}

template <class T>
void read_option(const char* name, py::handle value, T& field) {
  if constexpr (std::is_enum_v<T>) {
    std::string allowed;
    for (size_t i = 0; i < option_names<T>.size(); ++i) {
      const std::string choice = option_names<T>[i];
      if (py::isinstance<py::str>(value) && value.cast<std::string>() == choice) {
        field = static_cast<T>(i);
        return;
      }
      allowed += (allowed.empty() ? "'" : ", '") + choice + "'";
    }
    refuse_option(name, value, allowed);
  } else if constexpr (std::is_same_v<T, bool>) {
    if (!py::isinstance<py::bool_>(value)) {
      refuse_option(name, value, "True or False");
    }
    field = value.cast<bool>();
  } else if constexpr (IsOptional<T>::value) {
    if (value.is_none()) {
      field = std::nullopt;
    } else {
      read_option(name, value, field.emplace());
    }
  } else if constexpr (std::is_same_v<T, std::shared_ptr<HostDrafter>>) {
    if (PyCallable_Check(value.ptr()) == 0) {
      refuse_option(name, value, "a function of token ids and a number of drafts");
    }
    field = make_drafter(py::reinterpret_borrow<py::object>(value));
  } else {
    const char* allowed = std::is_floating_point_v<T>    ? "a number"
                          : sizeof(T) == sizeof(int32_t) ? "an integer of 32 bits"
                                                         : "an integer of 64 bits";
    if (py::isinstance<py::bool_>(value)) {
      refuse_option(name, value, allowed);
    }
    py::detail::make_caster<T> caster;
    if (!caster.load(value, /*convert=*/true)) {
      PyErr_Clear();
      refuse_option(name, value, allowed);
    }
    field = py::detail::cast_op<T>(caster);
  }
}

template <class T>
py::object write_option(const T& field) {
  if constexpr (std::is_enum_v<T>) {
    return py::str(option_names<T>[static_cast<size_t>(field)]);
  } else if constexpr (IsOptional<T>::value) {
    return field.has_value() ? write_option(*field) : py::object(py::none());
  } else if constexpr (std::is_same_v<T, std::shared_ptr<HostDrafter>>) {
    return object_of(field);
  } else {
    return py::cast(field);
  }
}

}  // namespace

ExecutorOptions options_from_dict(const py::dict& dict) {
  ExecutorOptions options;
  for (const auto& [key, given] : dict) {
    const std::string name = py::str(key).cast<std::string>();
    const py::handle value = given;
    bool is_known = false;
    std::string allowed;
    visit_options(options, [&](const char* option, auto& field, const auto&... /*range*/) {
      allowed += allowed.empty() ? "" : ", ";
      allowed += option;
      if (name == option) {
        read_option(option, value, field);
        is_known = true;
      }
    });
    if (!is_known) {
      throw py::value_error("unknown executor option " + shorten(key) + "; allowed: " + allowed);
    }
  }
  return options;
}

py::dict options_to_dict(const ExecutorOptions& options) {
  py::dict dict;
  visit_options(options, [&](const char* option, const auto& field, const auto&... /*range*/) {
    dict[option] = write_option(field);
  });
  return dict;
}

}  // namespace paceline::python
