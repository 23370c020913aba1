// What the modules of attention and of a transformer layer share.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "tandem/attention.h"

namespace tandem {

/// Throws c10::NotImplementedError, in the name of `op`, where a window is asked for that leaves
/// more out than the mask does.
void check_window(const std::string& op, std::optional<Window> window, AttnMaskType mask_type);

/// Those of a child: of "proj.weight" "weight". Throws c10::ValueError, in the name of `op`, where
/// one is of none of `children`.
MainGrads main_grads_of(const std::string& op, const MainGrads& main_grads,
                        const std::string& child, std::initializer_list<const char*> children);

}  // namespace tandem
