#include "planner/lower.h"

namespace tandem {

Draft lower(const Description& description, const PlanKey& key, const std::vector<OpGroup>& joint) {
  Draft draft;
  draft.grad_mode = key.call().grad_mode;
  const ForwardFlow flow = lower_forward(description, key, draft);
  lower_backward(description, flow, joint, draft);
  return draft;
}

bool is_passed_over(const Description& description, const OpNode& op) {
  const auto is_identity = op.kind->def.is_identity;
  return is_identity != nullptr && is_identity(op.options.get(), description.training);
}

}  // namespace tandem
