// SPDX-License-Identifier: Apache-2.0
#include <paceline/version.h>

#include "bindings.h"

namespace paceline::python {
namespace {

py::dict build_info_dict() {
  const BuildInfo info = build_info();
  py::dict result;
  result["compiler"] = info.compiler;
  result["cpu_features"] = info.cpu_features;
  result["has_cuda"] = info.has_cuda;
  result["num_cores"] = info.num_cores;
  return result;
}

}  // namespace
}  // namespace paceline::python

PYBIND11_MODULE(_core, module) {
  namespace py = pybind11;
  using namespace paceline::python;  // NOLINT(google-build-using-namespace): function scope

  module.doc() = "The C++ runtime of Paceline. Internal: use the names that `paceline` exports.";

  register_errors(module);
  register_device(module);
  register_safetensors_file(module);
  register_tensor(module);
  register_model(module);
  register_model_builder(module);
  register_request(module);
  register_event(module);
  register_executor(module);
  register_limits(module);
  register_log(module);
  register_receipts(module);

  module.def("version", &paceline::version, R"doc(Returns the version of the C++ library.

Returns:
    The version, for example "0.1.0".
)doc");
  module.def("build_info", &build_info_dict, R"doc(Describes this binary and the machine.

Returns:
    A dict with "compiler" (str), "cpu_features" (str: those of this machine that the
    kernels use), "has_cuda" (bool) and "num_cores" (int: usable by this process).
)doc");
  module.def(
      "measure_arithmetic", &paceline::measure_arithmetic, py::call_guard<GilRelease>(),
      py::arg("num_threads") = 0, py::arg("is_bfloat16") = false,
      R"doc(Measures the arithmetic of the CPU's vector units, which limits decoding many sequences.

Takes about a tenth of a second; releases the GIL.

Args:
    num_threads: Threads that compute; 0 = all cores.
    is_bfloat16: Measure whatever multiplies bfloat16 weights fastest, instead of float32.

Returns:
    Operations per second; a multiply-add counts as two.
)doc");
  module.def(
      "measure_read_bandwidth", &paceline::measure_read_bandwidth, py::call_guard<GilRelease>(),
      py::arg("num_threads") = 0, py::arg("num_bytes") = 0,
      R"doc(Measures the bandwidth of reading the same bytes again and again, which limits decoding.

Takes up to half a second; releases the GIL.

Args:
    num_threads: Threads that read; 0 = all cores.
    num_bytes: Bytes that are read; few of them stay in the caches. 0, and anything above 512 MiB,
        is 512 MiB, which is read from memory.

Returns:
    Bytes per second.
)doc");
}
