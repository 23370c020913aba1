// The order of steps, and which forward values backward re-emits.
#pragma once

#include <algorithm>
#include <vector>

#include "core/plan.h"
#include "core/step.h"
#include "planner/draft.h"

namespace tandem {

/// Whether a write of a backward step is a forward result that the step re-emits, not a gradient.
bool is_again(const Step& step, Value value, const std::vector<Type>& types);

/// Whether a backward step does nothing but re-emit (`StepDef::writes_again`).
bool only_writes_again(const Step& step, const std::vector<OperandTable>& operands);

/// Visits the indices of the reads that a backward step has only in order to re-emit.
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

/// Decides for each forward value that a backward step could re-emit whether it does. It does if
/// another step reads the value and no reader must run before the writer, whichever gradients are
/// requested. All other re-emits, and the reads that only they need, become absent.
///
/// If the source of codes exists in backward, because it is re-emitted or kept for another step,
/// backward quantizes it to the same bits instead of having the codes kept. It does so as well if
/// the source is in `requested`, and then also computes the casts of these values that the
/// quantization reads.
void choose_reemitted(const Steps& forward, Steps& backward, const std::vector<Type>& types,
                      const std::vector<bool>& is_free_to_keep,
                      const std::vector<OperandTable>& operands, const Values& requested);

/// Orders the steps: each runs after the writers of what it reads, and no step passes another that
/// mutates a value which either reads or mutates. Otherwise the given order stays, except that a
/// step which starts a collective runs as early as it can and one which waits as late as it can, so
/// that other steps stand between.
void schedule(Steps& steps);

/// The values that forward must keep: some backward step reads them and none writes them. No op
/// decides this, so a frozen weight or a fused neighbour changes it without a change of an op.
Values values_from_forward(const Steps& backward, const Values& output_gradients);

}  // namespace tandem
