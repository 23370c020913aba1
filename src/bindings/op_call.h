// Parts of the library's ops, for ops and fusions that are written in Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace tandem::bindings {

void bind_op_call(pybind11::module_& module);

}  // namespace tandem::bindings
