// SPDX-License-Identifier: Apache-2.0
#include <paceline/device.h>

#include "bindings.h"

namespace paceline::python {
namespace {

py::dict cuda_status_dict() {
  CudaStatus status;
  {
    const GilRelease release;
    status = cuda_status();
  }
  py::dict result;
  result["is_built"] = status.is_built;
  result["is_usable"] = status.is_usable;
  result["reason"] = status.reason;
  result["name"] = status.name;
  result["compute_capability"] = status.compute_capability;
  result["num_sms"] = status.num_sms;
  result["total_bytes"] = status.total_bytes;
  result["free_bytes"] = status.free_bytes;
  return result;
}

}  // namespace

Device parse_device(const std::string& name) {
  std::string allowed;
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    if (name == device_name(device)) {
      return device;
    }
    allowed += allowed.empty() ? "'" : ", '";
    allowed += device_name(device);
    allowed += "'";
  }
  throw py::value_error("device is '" + name + "'; allowed: " + allowed);
}

void register_device(py::module_& module) {
  module.def("cuda_status", &cuda_status_dict, R"doc(What the CUDA backend finds; needs no driver.

Returns:
    A dict with "is_built" (bool: this binary has the backend), "is_usable" (bool: and there is a GPU
    that it can run on), "reason" (str: why not, with the cure; empty when usable), and of GPU 0
    "name" (str), "compute_capability" (int: 90 = sm_90), "num_sms" (int), "total_bytes" and
    "free_bytes" (int).
)doc");
  module.def("set_cublaslt_path", &set_cublaslt_path, py::arg("path"), py::call_guard<GilRelease>(),
             R"doc(Names where libcublasLt.so.13 is looked for before the usual places.

Takes effect on the first CUDA executor of the process.

Args:
    path: A folder or a file.
)doc");
  module.def("measure_cuda_read_bandwidth", &measure_cuda_read_bandwidth,
             py::call_guard<GilRelease>(),
             R"doc(Measures how fast GPU 0 reads its memory: the ceiling of a decode step.

Takes a moment; releases the GIL.

Returns:
    Bytes per second.

Raises:
    NotImplementedError: No usable GPU; says why.
    paceline.DeviceError: The device failed.
)doc");
}

}  // namespace paceline::python
