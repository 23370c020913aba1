// Ops and fusions written in Python, as entries of the tables that hold the built-in ones.
#pragma once

#include <pybind11/pybind11.h>

namespace tandem::bindings {

/// Adds to `module` the functions that Python needs: to set the runtime that calls user code, and
/// to register ops and fusions over op lists.
void bind_python_ops(pybind11::module_& module);

}  // namespace tandem::bindings
