// Functions by which the Python front writes descriptions.
#pragma once

#include <pybind11/pybind11.h>

namespace tandem::bindings {

/// Adds OpEntry, write_ops and write_description to `module`, and the version and build id that
/// every description contains.
void bind_description(pybind11::module_& module);

}  // namespace tandem::bindings
