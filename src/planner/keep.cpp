#include "planner/keep.h"

#include <algorithm>

#include "planner/liveness.h"
#include "planner/schedule.h"
#include "planner/value_set.h"

namespace tandem {

ValueSet kept_for_groups(const Description& description, const std::vector<OpGroup>& groups,
                         const Draft& draft) {
  ValueSet values(draft.types.size());
  std::vector<size_t> group_end(description.ops.size());  // by op: the end of its group, or 0
  for (const OpGroup& group : groups)
    std::fill(group_end.begin() + static_cast<std::ptrdiff_t>(group.first),
              group_end.begin() + static_cast<std::ptrdiff_t>(group.last) + 1, group.last + 1);
  for (const Step& step : draft.backward)
    if (!step.covers.empty() && step.covers.back().op < group_end[step.covers.front().op])
      for (const Values* list : {&step.writes, &step.reads})
        for (const Value value : *list)
          if (exists(value) && draft.types[index_of(value)].origin != Origin::gradient)
            values.add(value);
  return values;
}

void settle_backward(Draft& draft, Plan& plan) {
  schedule(draft.backward);
  const ValueSet requested(draft.types.size(), {&draft.gradients});
  drop_dead_steps(draft.backward, draft.types, requested, [](size_t) { return true; });
  plan.kept.clear();
  for (const Value value : values_from_forward(draft.backward, draft.output_gradients)) {
    const Origin origin = draft.types[index_of(value)].origin;
    if (origin != Origin::workspace && origin != Origin::buffer && origin != Origin::state)
      plan.kept.push_back(value);
  }
}

void choose_kept(const Description& description, const std::vector<OpGroup>& backward_groups,
                 Draft& draft, Plan& plan) {
  // Values that backward may read at no cost, or must not re-emit.
  ValueSet is_free = kept_for_groups(description, backward_groups, draft);
  for (const Values* list : {&draft.inputs, &draft.params, &draft.argument_codes, &draft.outputs})
    is_free.add(*list);
  choose_reemitted(draft.forward, draft.backward, draft.types, is_free.flags(), draft.operands,
                   draft.quantized_again);
  settle_backward(draft, plan);
}

}  // namespace tandem
