// Definitions that are made from their names when they are asked for, and live as long as somebody
// holds them.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "core/op_def.h"
#include "tandem/export.h"

namespace tandem {

/// Makes the definition that a name stands for; null where the name is none of the source's.
using OpSource = std::function<std::shared_ptr<const OpKind>(std::string_view name)>;

/// How a front that has ops of its own is asked for them. What it makes is held by descriptions and
/// plans.
TANDEM_API void set_op_source(OpSource source);

/// The op of this name, from the source or registered, which nobody needs to hold; throws as
/// `op_kind` does.
TANDEM_API std::shared_ptr<const OpKind> find_op(std::string_view name);

}  // namespace tandem
