// Checks and helpers that the attention module and the transformer layer share.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "tandem/attention.h"

namespace tandem {

/// Throws c10::NotImplementedError, in the name of `op`, for a window that leaves out more than the
/// mask type does.
void check_window(const std::string& op, std::optional<Window> window, AttnMaskType mask_type);

/// Returns the main_grads of a child, under the names that the parameters have in the child:
/// "weight" for "proj.weight". Throws c10::ValueError, in the name of `op`, for a name that begins
/// with none of `children`.
MainGrads main_grads_of(const std::string& op, const MainGrads& main_grads,
                        const std::string& child, std::initializer_list<const char*> children);

}  // namespace tandem
