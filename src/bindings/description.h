// Descriptions, as the Python front has them written.
#pragma once

#include <pybind11/pybind11.h>

namespace tandem::bindings {

/// Adds OpEntry, write_ops and write_description to `module`, and what is in every description.
void bind_description(pybind11::module_& module);

}  // namespace tandem::bindings
