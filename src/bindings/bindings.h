// The parts of the Python extension.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

#include "tandem/options.h"

namespace tandem::bindings {

/// Converts options by the types of Python: what is no bool, int, float or str is a list of ints.
OptionValues options_of(const pybind11::dict& options);

/// Adds OpEntry, write_ops and write_description to `module`, and the version and build id that
/// every description contains.
void bind_description(pybind11::module_& module);

/// Adds the parts of the library's ops, for ops and fusions that are written in Python.
void bind_op_call(pybind11::module_& module);

/// Adds to `module` the functions that Python needs: to set the runtime that calls user code, and
/// to register ops and fusions over op lists.
void bind_python_ops(pybind11::module_& module);

/// Adds functions of a quantizer's text to `module`: its traits, and the sizes of the tensors that
/// it writes; also the function that returns the text of a recipe's quantizer.
void bind_quantizers(pybind11::module_& module);

/// The public properties of the op with this name, as JSON (python/tandem/op_base/signature.py).
/// Throws c10::ValueError for an unknown name.
std::string signature_of(const std::string& name);
/// The fields of a recipe, in the form of an op's options. Throws c10::ValueError for an unknown
/// name.
std::string recipe_signature_of(const std::string& name);

}  // namespace tandem::bindings
