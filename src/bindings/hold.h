// Python objects that C++ keeps.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace tandem::bindings {

/// A Python object that may be dropped by any thread.
inline std::shared_ptr<void> hold(pybind11::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* pointer) {
    if (Py_IsInitialized() == 0) return;
    const pybind11::gil_scoped_acquire gil;
    pybind11::handle(static_cast<PyObject*>(pointer)).dec_ref();
  });
}

}  // namespace tandem::bindings
