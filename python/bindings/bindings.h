// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the binding's files share: one register_<thing>() each, called by module.cc, and the holders
// of the wrapped objects. Bindings convert and check; what Paceline does is decided elsewhere.
//
// The rule of the GIL: whatever can block, load, free much memory or join a thread runs without it,
// constructors and destructors included, and no Python object is touched meanwhile.

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>
#include <string>

#include <paceline/device.h>
#include <paceline/model.h>
#include <paceline/request.h>

namespace paceline::python {

namespace py = pybind11;

// Releases the GIL until the end of the scope.
//
// An interpreter that exits ends every thread that then asks for the GIL: it unwinds the thread's
// stack, and C++ frames that may not throw abort the process. Such a thread sleeps here instead,
// until the process has ended. (From Python 3.14 on, the interpreter does the same.)
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

// Deletes without the GIL: a destructor may join a thread or give back gigabytes.
template <class T>
struct GilReleasingDeleter {
  void operator()(T* object) const {
    const GilRelease release;
    delete object;
  }
};

template <class T>
using Holder = std::unique_ptr<T, GilReleasingDeleter<T>>;

// `Model` is opaque in the public headers; Python holds this.
struct PyModel {
  std::shared_ptr<const Model> model;
};

// `RequestEvent` in Python.
struct PyRequestEvent {
  RequestEvent event;
  int32_t vocab_size;  // columns of logits
};

// "cpu" or "cuda"; ValueError for anything else.
Device parse_device(const std::string& name);

void register_device(py::module_& module);
void register_errors(py::module_& module);
void register_safetensors_file(py::module_& module);
void register_tensor(py::module_& module);
void register_model_builder(py::module_& module);
void register_model(py::module_& module);
void register_request(py::module_& module);
void register_event(py::module_& module);
void register_executor(py::module_& module);
void register_limits(py::module_& module);
void register_log(py::module_& module);
void register_receipts(py::module_& module);

}  // namespace paceline::python
