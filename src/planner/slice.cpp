#include "planner/slice.h"

#include "planner/liveness.h"
#include "planner/schedule.h"
#include "planner/value_set.h"

namespace tandem {

namespace {

/// Resolves sums with undefined operands and drops steps that depend on an undefined gradient.
class Slicing {
 public:
  Slicing(const Plan& plan, const BackwardMask& mask)
      : plan_(plan),
        is_defined_(plan.types.size(), true),
        from_gradient_(plan.types.size()),
        substitute_(plan.types.size()) {
    for (size_t v = 0; v < substitute_.size(); ++v) substitute_[v] = static_cast<Value>(v);
    for (size_t i = 0; i < plan.output_gradients.size(); ++i)
      if (const Value gradient = plan.output_gradients[i]; exists(gradient)) {
        is_defined_[index_of(gradient)] = mask.given[i];
        from_gradient_[index_of(gradient)] = true;
      }
  }

  Steps run() {
    Steps steps;
    for (const Step& original : plan_.backward) {
      Step step = original;
      size_t gradients = 0, defined = 0;
      for (Value& value : step.reads) {
        if (!exists(value)) continue;
        value = substitute_[index_of(value)];
        if (!from_gradient_[index_of(value)]) continue;
        ++gradients;
        defined += is_defined_[index_of(value)];
        if (!is_defined_[index_of(value)]) value = Value::none;
      }
      const bool is_of_forward = step.kind == StepKind::again || step.kind == StepKind::behind;
      for (const Value value : step.writes)
        if (exists(value) && gradients != 0 && !is_of_forward &&
            !is_again(step, value, plan_.types)) {
          from_gradient_[index_of(value)] = true;
          is_defined_[index_of(value)] = defined != 0;
        }
      if (gradients != 0 && defined == 0) continue;
      if (step.kind == StepKind::add && defined == 1) {
        substitute_[index_of(step.writes[0])] =
            exists(step.reads[0]) ? step.reads[0] : step.reads[1];
        continue;
      }
      steps.push_back(std::move(step));
    }
    return steps;
  }

  Value resolve(Value value) const {
    if (!exists(value)) return value;
    value = substitute_[index_of(value)];
    return is_defined_[index_of(value)] ? value : Value::none;
  }

 private:
  const Plan& plan_;
  std::vector<bool> is_defined_;
  /// Written from a gradient, and so undefined if that is undefined.
  std::vector<bool> from_gradient_;
  Values substitute_;
};

}  // namespace

std::shared_ptr<const BackwardPlan> slice_backward(const Plan& plan, const BackwardMask& mask) {
  auto sliced = std::make_shared<BackwardPlan>();
  Slicing slicing(plan, mask);
  sliced->steps = slicing.run();
  for (size_t i = 0; i < plan.gradients.size(); ++i)
    sliced->gradients.push_back(mask.requested[i] ? slicing.resolve(plan.gradients[i])
                                                  : Value::none);
  const size_t value_count = plan.types.size();
  const ValueSet requested(value_count, {&sliced->gradients});
  const auto is_requested = [&](size_t gradient) { return mask.requested[gradient]; };
  drop_dead_steps(sliced->steps, plan.types, requested, is_requested);
  const auto parts = parts_of(sliced->steps);
  ValueSet is_there(value_count, {&plan.kept, &plan.workspaces, &plan.state, &plan.buffers});
  for (size_t i = 0; i < plan.output_gradients.size(); ++i)
    if (mask.given[i]) is_there.add(plan.output_gradients[i]);
  const BackwardFusions& fusions = *plan.backward_fusions;
  FusionScope scope{.pass = Pass::backward,
                    .types = &plan.types,
                    .operands = &fusions.operands,
                    .is_demanded = requested,
                    .is_there = is_there,
                    .resolved = [&](Value value) { return slicing.resolve(value); },
                    .skipped = &fusions.skipped,
                    .decisions = &sliced->decisions};
  StepList steps(std::move(sliced->steps), value_count);
  fuse_groups(steps, fusions.groups, scope);
  fuse(steps, fusions.patterns, scope);
  sliced->steps = steps.take();
  check_coverage(parts, sliced->steps, "backward");
  if (!fusions.groups.empty())  // drop sums that only the replaced steps read
    drop_dead_steps(sliced->steps, plan.types, requested, is_requested);
  const ValueSet stays(value_count,
                       {&sliced->gradients, &plan.workspaces, &plan.state, &plan.buffers});
  find_dead(sliced->steps, stays.flags());
  check_reads(sliced->steps, is_there.flags(), plan.types);
  return sliced;
}

}  // namespace tandem
