// Definitions of ops for Python.
#pragma once

#include <string>

namespace tandem::bindings {

/// The public properties of the op with this name, as JSON (python/tandem/op_base/signature.py).
/// Throws c10::ValueError for an unknown name.
std::string signature_of(const std::string& name);
/// The fields of a recipe, in the form of an op's options. Throws c10::ValueError for an unknown
/// name.
std::string recipe_signature_of(const std::string& name);

}  // namespace tandem::bindings
