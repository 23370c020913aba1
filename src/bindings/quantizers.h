// Quantizers for Python, which knows them by their texts.
#pragma once

#include <pybind11/pybind11.h>

namespace tandem::bindings {

/// Adds functions of a quantizer's text to `module`: its traits, and the sizes of the tensors that
/// it writes; also the function that returns the text of a recipe's quantizer.
void bind_quantizers(pybind11::module_& module);

}  // namespace tandem::bindings
