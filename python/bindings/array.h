// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <paceline/device.h>

#include "bindings.h"

namespace paceline::python {

// A float32 array that the engine has computed, row-major in the memory of a device. The array owns
// its memory together with everything that was made of it. Its values are complete.
struct PyArray {
  std::shared_ptr<float> data;
  std::vector<int64_t> shape;
  Device device = Device::kCpu;
};

// A numpy array of the values. On the CPU it shares the memory; otherwise it is a copy.
py::object to_numpy(const PyArray& array);

void register_array(py::module_& module);

}  // namespace paceline::python
