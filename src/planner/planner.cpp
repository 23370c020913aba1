#include "planner/planner.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "planner/budget.h"
#include "planner/keep.h"
#include "planner/liveness.h"
#include "planner/lower.h"
#include "planner/quantize_points.h"
#include "planner/schedule.h"
#include "planner/slice.h"
#include "planner/value_set.h"

namespace tandem {

namespace {

/// Marks values that are computed from a value that may come late: they may come late too.
void note_what_comes_late(Draft& draft) {
  const auto comes_late = [&](Value value) {
    return exists(value) && draft.types[index_of(value)].may_come_late;
  };
  const auto note = [&](const std::vector<Step>& steps) {
    for (const Step& step : steps)
      if (std::ranges::any_of(step.reads, comes_late))
        for (const Value value : step.writes)
          if (exists(value)) draft.types[index_of(value)].may_come_late = true;
  };
  note(draft.forward);
  note(draft.backward);
}

/// The forward pass. Everything that is read later is demanded.
void finish_forward(const Description& description, const UserFusions& user,
                    const std::vector<OpGroup>& groups, FusionScope& scope,
                    const Values& may_be_kept, Draft& draft, Plan& plan) {
  const ValueSet is_demanded(draft.types.size(), {&draft.outputs, &plan.kept, &may_be_kept});
  drop_dead_steps(draft.forward, draft.types, is_demanded, [](size_t) { return true; });
  if (std::ranges::any_of(draft.forward,
                          [](const Step& step) { return step.phase != Phase::compute; }))
    schedule(draft.forward);
  const auto demanded_parts = parts_of(draft.forward);
  scope.pass = Pass::forward;
  scope.is_demanded = is_demanded;
  StepList forward(std::move(draft.forward), draft.types.size());
  fuse_groups(forward, groups, scope);
  fuse(forward, fusions_of(Pass::forward, description, user), scope);
  draft.forward = forward.take();
  check_coverage(demanded_parts, draft.forward, "forward");
}

/// Drops steps that nothing needs once a budget has decided what is kept. The fused steps stay as
/// they are without a budget, so that results do not change.
void settle_forward(Draft& draft, const Plan& plan) {
  const ValueSet is_demanded(draft.types.size(), {&draft.outputs, &plan.kept});
  if (plan.within)
    drop_dead_steps(draft.forward, draft.types, is_demanded, [](size_t) { return true; });
  const ValueSet is_there(draft.types.size(), {&draft.inputs, &draft.params, &draft.argument_codes,
                                               &draft.workspaces, &draft.state, &draft.buffers});
  ValueSet stays = is_there;
  stays.add(draft.outputs);
  stays.add(plan.kept);
  find_dead(draft.forward, stays.flags());
  check_reads(draft.forward, is_there.flags(), draft.types);
}

void assign_slots(Plan& plan) {
  plan.slot_of.clear();
  for (const Type& type : plan.types) {
    if (type.format == Format::opaque) {
      plan.slot_of.push_back(static_cast<uint32_t>(plan.opaques++));
    } else if (type.format == Format::shape) {
      plan.slot_of.push_back(static_cast<uint32_t>(plan.shapes++));
    } else {
      plan.slot_of.push_back(static_cast<uint32_t>(plan.tensor_slots));
      plan.tensor_slots += tensors_per_value(type);
    }
  }
  plan.kept_at.assign(plan.types.size(), -1);
  for (size_t k = 0; k < plan.kept.size(); ++k)
    plan.kept_at[index_of(plan.kept[k])] = static_cast<int32_t>(k);
}

/// Tensors that steps after `step` or backward read, and outputs.
Values read_after(const Plan& plan, size_t step) {
  ValueSet is_read(plan.types.size(), {&plan.outputs, &plan.kept});
  for (size_t s = step + 1; s < plan.forward.size(); ++s) is_read.add(plan.forward[s].reads);
  Values values;
  for (size_t v = 0; v < plan.types.size(); ++v)
    if (const Format format = plan.types[v].format;
        is_read(static_cast<Value>(v)) && format != Format::opaque && format != Format::shape)
      values.push_back(static_cast<Value>(v));
  return values;
}

/// Notes the arguments that steps overwrite. Backward must not read any of them.
void note_overwritten(Plan& plan) {
  for (size_t s = 0; s < plan.forward.size(); ++s) {
    const Step& step = plan.forward[s];
    for (const Value value : step.mutates) {
      const auto input = std::find(plan.inputs.begin(), plan.inputs.end(), value);
      if (input == plan.inputs.end()) continue;  // a workspace, state or a buffer
      const Value result = step.writes[step.main_write];
      plan.overwritten.push_back({static_cast<size_t>(input - plan.inputs.begin()), result,
                                  plan.types[index_of(result)].requires_grad, s,
                                  read_after(plan, s)});
      TORCH_CHECK_VALUE(plan.kept_at[index_of(value)] < 0, step.name,
                        ": expected an argument that backward does not read, got ",
                        plan.types[index_of(value)].name,
                        ", whose old value another op needs. Use in_place=False.");
    }
  }
}

void check_required(const Description& description, const Plan& plan) {
  if (description.required_fusions.empty()) return;
  const std::vector<Decision> decisions = decisions_of(plan, full_mask(plan));
  for (const std::string& name : description.required_fusions) {
    std::string reasons;
    bool made = false;
    for (const Decision& decision : decisions) {
      if (decision.fusion != name) continue;
      made |= decision.reason.empty();
      if (!decision.reason.empty())
        reasons += (reasons.empty() ? "" : "; ") + decision.place + ": " + decision.reason;
    }
    TORCH_CHECK_VALUE(made, "require_fusion: expected fusion \"", name, "\" to be made, got ",
                      reasons.empty() ? "no steps that match its pattern" : "a refusal: " + reasons,
                      ". See explain().");
  }
}

std::shared_ptr<const BackwardFusions> backward_fusions(const Description& description,
                                                        const UserFusions& user,
                                                        std::vector<OpGroup> groups,
                                                        const Draft& draft) {
  auto backward = std::make_shared<BackwardFusions>();
  backward->user_patterns = user.patterns;
  backward->patterns = fusions_of(Pass::backward, description, user);
  backward->groups = std::move(groups);
  backward->operands = draft.operands;
  backward->skipped = description.skipped_fusions;
  return backward;
}

/// Moves the finished parts of a draft into the plan.
void take_over(Draft& draft, Plan& plan) {
  for (size_t v = 0; v < draft.types.size(); ++v)
    draft.types[v].requires_grad = draft.requires_grad[v];
  for (const Value output : draft.outputs)
    plan.output_requires_grad.push_back(draft.requires_grad[index_of(output)]);
  PlanParts& parts = plan;
  parts = std::move(draft);
  plan.absorbed.assign(plan.gradients.size(), false);
  for (const Step& step : plan.backward)
    for (const uint32_t gradient : step.absorbs) plan.absorbed[gradient] = true;
  const auto mutates_buffers = [&](const Step& step) {
    return std::ranges::any_of(step.mutates, [&](Value value) {
      return plan.types[index_of(value)].origin == Origin::buffer;
    });
  };
  plan.mutates_buffers_in_forward = std::ranges::any_of(plan.forward, mutates_buffers);
  plan.mutates_buffers_in_backward = std::ranges::any_of(plan.backward, mutates_buffers);
  plan.uses_state_in_backward = std::ranges::any_of(
      plan.backward, [](const Step& step) { return step.kind == StepKind::take_scale; });
  for (const Step& step : plan.forward) plan.runs_user_code |= step.runs_user_code;
}

}  // namespace

std::unique_ptr<const Plan> make_plan(const Description& description, const PlanKey& key,
                                      const UserFusions& user) {
  auto plan = std::make_unique<Plan>();
  plan->is_quantized = description.recipe.has_value();
  plan->kinds = description.kinds;
  FusionScope scope{
      .pass = Pass::joint, .skipped = &description.skipped_fusions, .decisions = &plan->decisions};
  UserGroups groups;
  groups.joint = groups_of(Pass::joint, description, user, scope);
  Draft draft = lower(description, key, groups.joint);
  if (!description.fuse) groups.joint.clear();
  put_quantize_points(description, key, draft);
  note_what_comes_late(draft);
  scope.types = &draft.types;
  scope.operands = &draft.operands;
  groups.forward = groups_of(Pass::forward, description, user, scope, groups.joint);
  if (!draft.backward.empty())
    groups.backward = groups_of(Pass::backward, description, user, scope, groups.joint);
  fuse_jointly(description, user, groups, scope, draft);
  std::optional<BudgetFit> budget;
  if ((description.memory_budget || description.recomputes()) && !draft.backward.empty())
    budget.emplace(description, key, groups.backward, draft);
  choose_kept(description, groups.backward, draft, *plan);
  finish_forward(description, user, groups.forward, scope, budget ? budget->codes() : Values(),
                 draft, *plan);
  if (budget) budget->fit(draft, *plan);
  settle_forward(draft, *plan);
  if (!draft.backward.empty() || std::ranges::any_of(draft.gradients, exists)) {
    plan->backward_fusions = backward_fusions(description, user, std::move(groups.backward), draft);
    plan->needs_backward = true;
  }
  take_over(draft, *plan);
  assign_slots(*plan);
  note_overwritten(*plan);
  check_required(description, *plan);
  return plan;
}

std::vector<CachedParams> cached_params(const Description& description, const PlanKey& key) {
  Draft draft = lower(description, key);
  put_quantize_points(description, key, draft);
  std::vector<CachedParams> result;
  for (const CachedWeight& cached : draft.cached_weights) {
    CachedParams& made = result.emplace_back(CachedParams{{}, cached.quantizer, cached.parts});
    for (const Value piece : cached.pieces)
      made.params.push_back(
          static_cast<size_t>(std::ranges::find(draft.params, piece) - draft.params.begin()));
  }
  return result;
}

std::shared_ptr<const BackwardPlan> backward_plan(const Plan& plan, const BackwardMask& mask) {
  if (auto known = plan.backward_plans.find(mask)) return known;
  return plan.backward_plans.insert(mask, slice_backward(plan, mask));
}

BackwardMask full_mask(const Plan& plan) {
  BackwardMask all;
  for (size_t i = 0; i < plan.outputs.size(); ++i)
    all.given.push_back(exists(plan.output_gradients[i]));
  for (size_t i = 0; i < plan.gradients.size(); ++i)
    all.requested.push_back(exists(plan.gradients[i]) || plan.absorbed[i]);
  return all;
}

std::shared_ptr<const BackwardPlan> full_backward(const Plan& plan) {
  return backward_plan(plan, full_mask(plan));
}

std::vector<Decision> decisions_of(const Plan& plan, const BackwardMask& mask) {
  std::vector<Decision> decisions = plan.decisions;
  if (plan.needs_backward) {
    const auto backward = backward_plan(plan, mask);
    decisions.insert(decisions.end(), backward->decisions.begin(), backward->decisions.end());
  }
  return decisions;
}

}  // namespace tandem
