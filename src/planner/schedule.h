// The order of backward steps, what they write again instead of having it kept, and when values die.
#pragma once

#include <vector>

#include "core/plan.h"
#include "core/step.h"

namespace tandem {

/// Decides for each forward value that a backward step could write again whether it does: exactly where some other step reads it and
/// none of those is needed to get to the writer, whatever gradients are asked for. All other such writes, and what is read only for
/// them, become absent.
///
/// Where the source of quantized codes is there in backward, written again or kept for another step, backward quantizes it again, to
/// the same bits, instead of having the codes kept.
void choose_reemitted(const Steps& forward, Steps& backward,
                      const std::vector<bool>& is_free_to_keep,
                      const std::vector<Names>& reemit_reads);

/// Orders steps so that each runs after those that write what it reads and after earlier ones that mutate the same values; otherwise
/// in the order given.
void schedule(Steps& steps);

/// Values that forward must leave behind: read by a backward step that will run, and not written by one. No op decides this; it is
/// derived, so a frozen weight or a fused neighbour changes it without touching an op.
Values values_from_forward(const Steps& backward, const Values& output_gradients);

/// Fills in `dead` of every step. `stays` holds values that outlive the run.
void find_dead(Steps& steps, const std::vector<bool>& stays);

}  // namespace tandem
