// Definitions of ops as Python sees them.
#pragma once

#include <string>

namespace tandem::bindings {

/// What is to be known of the op of this name from outside, as JSON: see
/// python/tandem/ops/signature.py. Throws c10::ValueError.
std::string signature_of(const std::string& name);
/// The fields of a recipe, as the options above. Throws c10::ValueError.
std::string recipe_signature_of(const std::string& name);

}  // namespace tandem::bindings
