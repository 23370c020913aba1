// Functions by which the Python front writes descriptions.
#pragma once

#include <pybind11/pybind11.h>

#include "tandem/options.h"

namespace tandem::bindings {

/// Converts options by the types of Python: what is no bool, int, float or str is a list of ints.
OptionValues options_of(const pybind11::dict& options);

/// Adds OpEntry, write_ops and write_description to `module`, and the version and build id that
/// every description contains.
void bind_description(pybind11::module_& module);

}  // namespace tandem::bindings
