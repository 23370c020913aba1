// What forward leaves for backward: derived from the steps that will run, chosen by no op.
#pragma once

#include "core/plan.h"
#include "planner/draft.h"
#include "planner/fuse.h"
#include "planner/value_set.h"

namespace tandem {

/// Orders backward, lets it write again what that is cheaper for, drops what nobody needs, and
/// notes in `plan` what is kept.
///
/// `backward_groups`: user fusions of backward, which write gradients only; what their ops would
/// write again is kept, and what these read, as who writes it again may need such a gradient.
void choose_kept(const Description& description, const std::vector<OpGroup>& backward_groups,
                 Draft& draft, Plan& plan);

/// What the ops of these groups would write again or read, and so what is kept, if backward reads
/// it.
ValueSet kept_for_groups(const Description& description, const std::vector<OpGroup>& groups,
                         const Draft& draft);

/// The end of every choice: orders backward, drops what nobody needs, and notes what is kept.
void settle_backward(Draft& draft, Plan& plan);

}  // namespace tandem
