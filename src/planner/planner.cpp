#include "planner/planner.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

#include "planner/lower.h"
#include "planner/schedule.h"
#include "planner/step_list.h"

namespace tandem {

/// What the backward pass applies to every mask's program.
struct BackwardFusions {
  std::vector<const Fusion*> patterns;
  std::vector<std::shared_ptr<const Fusion>>
      user_patterns;  ///< those of `patterns` that may be removed
  std::vector<OpGroup> groups;
  std::vector<OperandTable> operands;
  std::vector<std::string> skipped;
};

namespace {

/// User fusions come first in every pass.
std::vector<const Fusion*> fusions_of(Pass pass, const Description& description,
                                      const UserFusions& user) {
  std::vector<const Fusion*> fusions;
  if (!description.fuse) return fusions;
  for (const auto& fusion : user.patterns)
    if (fusion->pass == pass) fusions.push_back(fusion.get());
  for (const Fusion& fusion : built_in_fusions(pass)) fusions.push_back(&fusion);
  return fusions;
}

std::vector<OpGroup> groups_of(Pass pass, const Description& description, const UserFusions& user) {
  if (!description.fuse || !user.groups) return {};
  std::vector<OpGroup> groups = user.groups(pass, description);
  size_t next = 0;
  for (const OpGroup& group : groups) {
    TORCH_CHECK_VALUE(
        group.first >= next && group.last >= group.first && group.last < description.ops.size(),
        group.fusion->name, ": expected fused ops that cover ops ", next, " to ",
        description.ops.size() - 1, " once and in order, got ops ", group.first, " to ", group.last,
        ". Return every op of the list, alone or in one fused op.");
    next = group.last + 1;
  }
  return groups;
}

std::string list_of(const std::vector<Part>& parts) {
  std::ostringstream text;
  for (const Part& part : parts)
    text << (text.tellp() > 0 ? ", " : "") << "op " << part.op
         << (part.nth ? " backward " : " forward") << (part.nth ? std::to_string(part.nth) : "");
  return text.str();
}

/// What steps cover, in order.
std::vector<Part> parts_of(const Steps& steps) {
  std::vector<Part> parts;
  for (const Step& step : steps) parts.insert(parts.end(), step.covers.begin(), step.covers.end());
  std::sort(parts.begin(), parts.end());
  return parts;
}

/// Every part that was covered must still be, exactly once.
void check_coverage(const std::vector<Part>& before, const Steps& after, const char* pass) {
  const std::vector<Part> covered = parts_of(after);
  TORCH_INTERNAL_ASSERT(covered == before, "the ", pass, " pass was to cover ", list_of(before),
                        " and covers ", list_of(covered));
}

/// Values of a plan as flags.
class ValueSet {
 public:
  explicit ValueSet(size_t count) : flags_(count) {}
  void add(Value value) {
    if (exists(value)) flags_[index_of(value)] = true;
  }
  void add(const Values& values) {
    for (const Value value : values) add(value);
  }
  bool operator()(Value value) const {
    return index_of(value) < flags_.size() && flags_[index_of(value)];
  }
  const std::vector<bool>& flags() const { return flags_; }

 private:
  std::vector<bool> flags_;
};

/// Removes steps whose writes nobody demands, from the end; other undemanded writes become absent. What the caller has asked to be
/// written in place is written all the same; codes of weights that nobody reads are not refreshed.
template <typename IsDemanded>
void drop_dead_steps(Steps& steps, size_t value_count, IsDemanded&& is_demanded_outside) {
  ValueSet read(value_count);
  Steps live;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    bool needed = !step->mutates.empty() && step->kind != StepKind::refresh;
    for (Value& value : step->writes) {
      if (exists(value) && !read(value) && !is_demanded_outside(value)) value = Value::none;
      needed |= exists(value);
    }
    if (!needed) continue;
    read.add(step->reads);
    live.push_back(std::move(*step));
  }
  std::reverse(live.begin(), live.end());
  steps = std::move(live);
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
      plan.tensor_slots += tensors_per_value(type.format);
    }
  }
}

void check_required(const Description& description, const Plan& plan) {
  for (const std::string& name : description.required_fusions) {
    std::string reasons;
    bool made = false;
    for (const Decision& decision : plan.decisions) {
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

/// Tensors that steps behind one read, that backward reads, and outputs.
Values read_after(const Plan& plan, size_t step) {
  ValueSet is_read(plan.types.size());
  for (size_t s = step + 1; s < plan.forward.size(); ++s) is_read.add(plan.forward[s].reads);
  is_read.add(plan.outputs);
  for (const Kept& kept : plan.kept) is_read.add(kept.value);
  Values values;
  for (size_t v = 0; v < plan.types.size(); ++v)
    if (const Format format = plan.types[v].format;
        is_read(static_cast<Value>(v)) && format != Format::opaque && format != Format::shape)
      values.push_back(static_cast<Value>(v));
  return values;
}

/// An argument that a step writes in place must not be one that backward reads.
void note_overwritten(Plan& plan, const std::vector<bool>& requires_grad) {
  for (size_t s = 0; s < plan.forward.size(); ++s) {
    const Step& step = plan.forward[s];
    for (const Value value : step.mutates) {
      const auto input = std::find(plan.inputs.begin(), plan.inputs.end(), value);
      if (input == plan.inputs.end()) continue;  // a workspace
      const Value result = step.writes[step.main_write];
      plan.overwritten.push_back({static_cast<size_t>(input - plan.inputs.begin()), result,
                                  requires_grad[index_of(result)], s, read_after(plan, s)});
      TORCH_CHECK_VALUE(plan.kept_at[index_of(value)] < 0, step.name,
                        ": expected an argument that backward does not read, got ",
                        plan.types[index_of(value)].name,
                        ", whose old value another op needs. Use in_place=False.");
    }
  }
}

/// The joint pass: on all of both directions.
void fuse_both(Lowered& program, const Description& description, const UserFusions& user,
               FusionScope& scope) {
  const auto groups = groups_of(Pass::joint, description, user);
  const auto fusions = fusions_of(Pass::joint, description, user);
  if (groups.empty() && fusions.empty()) return;
  ValueSet is_demanded(program.types.size());
  is_demanded.add(program.outputs);
  is_demanded.add(program.gradients);
  scope.is_demanded = is_demanded;
  const auto forward_parts = parts_of(program.forward), backward_parts = parts_of(program.backward);
  StepList forward(std::move(program.forward), program.types.size()),
      backward(std::move(program.backward), program.types.size());
  fuse_groups_jointly(forward, backward, groups, scope, program.types);
  fuse_jointly(forward, backward, fusions, scope, program.types);
  program.forward = forward.take();
  program.backward = backward.take();
  check_coverage(forward_parts, program.forward, "joint");
  check_coverage(backward_parts, program.backward, "joint");
}

}  // namespace

std::unique_ptr<const Plan> make_plan(const Description& description, const PlanKey& key,
                                      const UserFusions& user) {
  Lowered program = lower(description, key);
  auto plan = std::make_unique<Plan>();
  plan->is_quantized = description.recipe.has_value();
  plan->runs_user_code = program.runs_user_code;
  plan->no_composite = program.no_composite;
  plan->definitions = description.definitions;

  FusionScope scope{.pass = Pass::joint,
                    .types = &program.types,
                    .operands = &program.operands,
                    .skipped = &description.skipped_fusions,
                    .decisions = &plan->decisions};
  fuse_both(program, description, user, scope);

  // What backward needs of forward.
  const size_t value_count = program.types.size();
  ValueSet is_free(value_count), asked(value_count), is_output(value_count);
  for (const Values* list : {&program.inputs, &program.params, &program.outputs})
    is_free.add(*list);
  asked.add(program.gradients);
  is_output.add(program.outputs);
  std::vector<OpGroup> backward_groups;
  if (!program.backward.empty()) backward_groups = groups_of(Pass::backward, description, user);
  std::vector<size_t> group_end(description.ops.size());  // by op: the end of its group, or 0
  for (const OpGroup& group : backward_groups)
    std::fill(group_end.begin() + static_cast<std::ptrdiff_t>(group.first),
              group_end.begin() + static_cast<std::ptrdiff_t>(group.last) + 1, group.last + 1);
  for (const Step& step : program.backward)  // groups write gradients only
    if (!step.covers.empty() && step.covers.back().op < group_end[step.covers.front().op])
      for (const Value value : step.writes)
        if (exists(value) && program.types[index_of(value)].origin != Origin::gradient)
          is_free.add(value);
  std::vector<Names> reemit_reads;
  for (const OpNode& op : description.ops) reemit_reads.push_back(op.def->reemit_reads);
  choose_reemitted(program.forward, program.backward, program.types, is_free.flags(), reemit_reads);
  schedule(program.backward);
  drop_dead_steps(program.backward, value_count, asked);
  for (const Value value : values_from_forward(program.backward, program.output_gradients)) {
    const Type& type = program.types[index_of(value)];
    if (type.origin == Origin::workspace) continue;
    if (type.format == Format::opaque || type.format == Format::shape) {
      plan->kept_opaque.push_back(value);
    } else {
      const uint8_t parts =
          is_fp8(type.format) ? 2 : 1;  // codes and their scale; nobody reads the amax again
      for (uint8_t part = 0; part < parts; ++part)
        plan->kept.push_back({value, part, is_output(value)});
    }
  }

  // Forward pass: everything that is read later is demanded.
  ValueSet is_demanded(value_count);
  is_demanded.add(program.outputs);
  is_demanded.add(plan->kept_opaque);
  for (const Kept& kept : plan->kept) is_demanded.add(kept.value);
  drop_dead_steps(program.forward, value_count, is_demanded);
  const auto demanded_parts = parts_of(program.forward);
  scope.pass = Pass::forward;
  scope.is_demanded = is_demanded;
  StepList forward(std::move(program.forward), value_count);
  fuse_groups(forward, groups_of(Pass::forward, description, user), scope);
  fuse(forward, fusions_of(Pass::forward, description, user), scope);
  program.forward = forward.take();
  check_coverage(demanded_parts, program.forward, "forward");
  for (const Step& step : program.forward) plan->runs_user_code |= step.runs_user_code;

  ValueSet is_there(value_count);
  for (const Values* list : {&program.inputs, &program.params, &program.workspaces})
    is_there.add(*list);
  for (const Values* list : {&program.inputs, &program.params, &program.workspaces})
    is_demanded.add(*list);
  find_dead(program.forward, is_demanded.flags());
  check_reads(program.forward, is_there.flags(), program.types);

  if (!program.backward.empty() ||
      std::any_of(program.gradients.begin(), program.gradients.end(), exists)) {
    auto backward = std::make_shared<BackwardFusions>();
    backward->patterns = fusions_of(Pass::backward, description, user);
    backward->user_patterns = user.patterns;
    backward->groups = backward_groups;
    backward->operands = program.operands;
    backward->skipped = description.skipped_fusions;
    plan->backward_fusions = std::move(backward);
    plan->needs_backward = true;
  }
  for (const Value output : program.outputs)
    plan->output_requires_grad.push_back(program.requires_grad[index_of(output)]);
  plan->types = std::move(program.types);
  plan->inputs = std::move(program.inputs);
  plan->params = std::move(program.params);
  plan->workspaces = std::move(program.workspaces);
  plan->workspace_weights = std::move(program.workspace_weights);
  plan->outputs = std::move(program.outputs);
  plan->forward = std::move(program.forward);
  plan->backward = std::move(program.backward);
  plan->output_gradients = std::move(program.output_gradients);
  plan->gradients = std::move(program.gradients);
  assign_slots(*plan);
  plan->kept_at.assign(plan->types.size(), -1);
  for (size_t k = plan->kept.size(); k-- > 0;)
    plan->kept_at[index_of(plan->kept[k].value)] = static_cast<int32_t>(k);
  note_overwritten(*plan, program.requires_grad);
  if (!description.required_fusions.empty()) {
    if (const auto full = plan->needs_backward ? full_backward(*plan) : nullptr)
      plan->decisions.insert(plan->decisions.end(), full->decisions.begin(), full->decisions.end());
    check_required(description, *plan);
  }
  return plan;
}

namespace {

/// Resolves sums with undefined operands and drops steps that no defined gradient reaches.
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
      for (const Value value : step.writes)
        if (exists(value) && gradients != 0 && !is_again(step, value, plan_.types)) {
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
  std::vector<bool> from_gradient_;  ///< written from a gradient, so undefined where that is
  Values substitute_;
};

}  // namespace

std::shared_ptr<const BackwardPlan> backward_plan(const Plan& plan, const BackwardMask& mask) {
  if (auto known = plan.backward_plans.find(mask)) return known;
  auto sliced = std::make_shared<BackwardPlan>();
  Slicing slicing(plan, mask);
  sliced->steps = slicing.run();
  for (size_t i = 0; i < plan.gradients.size(); ++i)
    sliced->gradients.push_back(mask.asked[i] ? slicing.resolve(plan.gradients[i]) : Value::none);
  const size_t value_count = plan.types.size();
  ValueSet asked(value_count), is_there(value_count);
  asked.add(sliced->gradients);
  drop_dead_steps(sliced->steps, value_count, asked);
  const auto parts = parts_of(sliced->steps);
  for (size_t i = 0; i < plan.output_gradients.size(); ++i)
    if (mask.given[i]) is_there.add(plan.output_gradients[i]);
  for (const Kept& kept : plan.kept) is_there.add(kept.value);
  is_there.add(plan.kept_opaque);
  is_there.add(plan.workspaces);
  FusionScope scope{.pass = Pass::backward,
                    .types = &plan.types,
                    .operands = &plan.backward_fusions->operands,
                    .is_demanded = asked,
                    .is_there = is_there,
                    .resolved = [&](Value value) { return slicing.resolve(value); },
                    .skipped = &plan.backward_fusions->skipped,
                    .decisions = &sliced->decisions};
  StepList steps(std::move(sliced->steps), value_count);
  fuse_groups(steps, plan.backward_fusions->groups, scope);
  fuse(steps, plan.backward_fusions->patterns, scope);
  sliced->steps = steps.take();
  check_coverage(parts, sliced->steps, "backward");
  if (!plan.backward_fusions->groups.empty())  // sums that only the replaced steps read
    drop_dead_steps(sliced->steps, value_count, asked);
  ValueSet stays = asked;
  stays.add(plan.workspaces);
  find_dead(sliced->steps, stays.flags());
  check_reads(sliced->steps, is_there.flags(), plan.types);
  return plan.backward_plans.insert(mask, std::move(sliced));
}

std::shared_ptr<const BackwardPlan> full_backward(const Plan& plan) {
  BackwardMask all;
  for (size_t i = 0; i < plan.outputs.size(); ++i)
    all.given.push_back(exists(plan.output_gradients[i]));
  for (const Value gradient : plan.gradients) all.asked.push_back(exists(gradient));
  return backward_plan(plan, all);
}

}  // namespace tandem
