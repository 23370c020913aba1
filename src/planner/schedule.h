// The order of steps, and what backward writes again instead of having it kept.
#pragma once

#include <algorithm>
#include <vector>

#include "core/plan.h"
#include "core/step.h"
#include "planner/draft.h"

namespace tandem {

/// Whether a write of a backward step is no gradient, but a result of forward written again.
bool is_again(const Step& step, Value value, const std::vector<Type>& types);

/// Whether a step of backward does nothing else: `StepDef::writes_again`.
bool only_writes_again(const Step& step, const std::vector<OperandTable>& operands);

/// Visits the reads, by place, that a step of backward has only for what it writes again.
template <typename Visit>
void for_each_read_to_reemit(const Step& step, const std::vector<OperandTable>& operands,
                             Visit&& visit) {
  if (step.kind != StepKind::op || step.covers[0].op >= operands.size()) return;
  const Part part = step.covers[0];
  const OpKind& op = operands[part.op].kind();
  for_each_read(op.backward[part.nth], operands[part.op], [&](size_t read, OperandRef ref, size_t) {
    if (!ref.is_gradient &&
        std::ranges::find(op.reemit_reads, ref.operand) != op.reemit_reads.end())
      visit(read);
  });
}

/// Decides for each forward value that a backward step could write again whether it does: exactly
/// where some other step reads it and none of those is needed to get to the writer, whatever
/// gradients are asked for. All other such writes, and what is read only for them, become absent.
///
/// Where the source of quantized codes is there in backward, written again or kept for another
/// step, backward quantizes it again, to the same bits, instead of having the codes kept. The same
/// where the source is among `asked`, with what each of these is a cast of.
void choose_reemitted(const Steps& forward, Steps& backward, const std::vector<Type>& types,
                      const std::vector<bool>& is_free_to_keep,
                      const std::vector<OperandTable>& operands, const Values& asked);

/// Orders steps so that each runs after those that write what it reads, and keeps its place among
/// those that mutate what it reads or mutates: no step passes another one that mutates what it
/// looks at. Otherwise in the order given, but what a step starts it starts as early as it can, and
/// waits for as late as it can, so that others stand between.
void schedule(Steps& steps);

/// Values that forward must leave behind: read by a backward step that will run, and not written by
/// one. No op decides this; it is derived, so a frozen weight or a fused neighbour changes it
/// without touching an op.
Values values_from_forward(const Steps& backward, const Values& output_gradients);

}  // namespace tandem
