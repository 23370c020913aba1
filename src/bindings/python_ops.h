// Ops and fusions written in Python, as entries of the same tables that the built-in ones fill.
#pragma once

#include <pybind11/pybind11.h>

namespace tandem::bindings {

/// Adds what Python needs to `module`: the runtime that calls user code, registration of ops and of
/// fusions over op lists.
void bind_python_ops(pybind11::module_& module);

}  // namespace tandem::bindings
