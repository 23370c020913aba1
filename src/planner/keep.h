// What forward keeps for backward. It is derived from the steps that will run; no op decides it.
#pragma once

#include "core/plan.h"
#include "planner/draft.h"
#include "planner/fuse.h"
#include "planner/value_set.h"

namespace tandem {

/// Decides what backward re-emits, orders backward, drops dead steps, and notes in `plan` what is
/// kept.
///
/// `backward_groups`: user fusions of backward, which write gradients only. What their ops would
/// re-emit is kept. What those ops read is kept as well, because a step that re-emits it may need a
/// gradient that the fusion writes.
void choose_kept(const Description& description, const std::vector<OpGroup>& backward_groups,
                 Draft& draft, Plan& plan);

/// The values that the ops of these groups would re-emit or read: they are kept if backward reads
/// them.
ValueSet kept_for_groups(const Description& description, const std::vector<OpGroup>& groups,
                         const Draft& draft);

/// The end of every choice: orders backward, drops dead steps, and notes what is kept.
void settle_backward(Draft& draft, Plan& plan);

}  // namespace tandem
