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
  result["num_gpus"] = status.num_gpus;
  result["compute_capability"] = status.compute_capability;
  result["num_sms"] = status.num_sms;
  result["total_bytes"] = status.total_bytes;
  result["block_shared_bytes"] = status.block_shared_bytes;
  result["sm_shared_bytes"] = status.sm_shared_bytes;
  result["architectures"] = status.architectures;
  result["kernels"] = status.kernels;
  result["has_been_run"] = status.has_been_run;
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
  module.def("cuda_status", &cuda_status_dict,
             R"doc(Describes the first GPU as the CUDA backend sees it; needs no driver.

Takes no memory of the GPU: the process gets a CUDA context only when it first uses the GPU.

Returns:
    A dict with "is_built" (bool: this binary has the backend), "architectures" (str: those it has
    kernels for, as "80,90a"), "is_usable" (bool: there is also a GPU that it supports), "reason"
    (str: why it is not usable and what to do; empty if it is), "num_gpus" (int: those that the
    process sees), and for GPU 0 "name" (str),
    "compute_capability" (int: 90 = sm_90), "num_sms", "total_bytes", "block_shared_bytes" and
    "sm_shared_bytes" (int: shared memory of a block and of a multiprocessor), "kernels" (str:
    "sm_90a" or "portable") and "has_been_run" (bool: the project's tests have run on such a GPU;
    on others kernels were compiled, and run in an emulator).
)doc");
  module.def("cuda_free_bytes", &cuda_free_bytes, py::arg("gpu") = 0, py::call_guard<GilRelease>(),
             R"doc(Asks how much memory of a GPU is free.

Gives the process a CUDA context, which itself takes several hundred MB; releases the GIL.

Args:
    gpu: Its number among the GPUs that the process sees.

Returns:
    Bytes.

Raises:
    NotImplementedError: There is no usable GPU of this number; the message says why.
    paceline.DeviceError: The device failed.
)doc");
  module.def("set_cublaslt_path", &set_cublaslt_path, py::arg("path"), py::call_guard<GilRelease>(),
             R"doc(Sets the path at which libcublasLt.so.13 is looked for first.

Takes effect on the first CUDA executor of the process.

Args:
    path: A folder or a file.
)doc");
  module.def("measure_cuda_read_bandwidth", &measure_cuda_read_bandwidth,
             py::call_guard<GilRelease>(),
             R"doc(Measures the bandwidth of reading memory of GPU 0, which limits decoding.

Takes a moment; releases the GIL.

Returns:
    Bytes per second.

Raises:
    NotImplementedError: There is no usable GPU; the message says why.
    paceline.DeviceError: The device failed.
)doc");
}

}  // namespace paceline::python
