#include "planner/planner.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "kernel_ops/kernel_op.h"
#include "planner/glue.h"
#include "planner/lower.h"
#include "planner/schedule.h"

namespace tandem {

/// What the backward pass applies to every mask's program.
struct BackwardFusions {
  std::vector<const Fusion*> patterns;
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
  for (const Fusion* fusion : user.patterns)
    if (fusion->pass == pass) fusions.push_back(fusion);
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

std::string list_of(const std::set<Part>& parts) {
  std::ostringstream text;
  for (const Part& part : parts)
    text << (text.tellp() > 0 ? ", " : "") << "op " << part.op
         << (part.nth ? " backward " : " forward") << (part.nth ? std::to_string(part.nth) : "");
  return text.str();
}

std::multiset<Part> parts_of(const Steps& steps) {
  std::multiset<Part> parts;
  for (const Step& step : steps) parts.insert(step.covers.begin(), step.covers.end());
  return parts;
}

/// Every part that was covered must still be, exactly once.
void check_coverage(const std::multiset<Part>& before, const Steps& after, const char* pass) {
  const std::multiset<Part> covered = parts_of(after);
  TORCH_INTERNAL_ASSERT(covered == before, "the ", pass, " pass was to cover ",
                        list_of({before.begin(), before.end()}), " and covers ",
                        list_of({covered.begin(), covered.end()}));
}

/// Removes steps whose writes nobody demands, from the end; other undemanded writes become absent. Forward steps that mutate stay;
/// backward's only refresh the codes of weights, which is of no use where nobody reads them.
template <typename IsDemanded>
void drop_dead_steps(Steps& steps, IsDemanded&& is_demanded_outside, bool keep_mutating) {
  std::set<Value> read;
  Steps live;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    bool needed = keep_mutating && !step->mutates.empty();
    for (Value& value : step->writes) {
      if (exists(value) && read.count(value) == 0 && !is_demanded_outside(value))
        value = Value::none;
      needed |= exists(value);
    }
    if (!needed) continue;
    for (const Value value : step->reads)
      if (exists(value)) read.insert(value);
    live.push_back(std::move(*step));
  }
  std::reverse(live.begin(), live.end());
  steps = std::move(live);
}

void assign_slots(Plan& plan) {
  plan.slot_of.clear();
  for (const Type& type : plan.types) {
    if (type.format == Format::opaque) {
      plan.slot_of.push_back(static_cast<uint16_t>(plan.opaques++));
    } else if (type.format == Format::shape) {
      plan.slot_of.push_back(static_cast<uint16_t>(plan.shapes++));
    } else {
      plan.slot_of.push_back(static_cast<uint16_t>(plan.tensor_slots));
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

/// An argument that a step writes in place must not be one that backward reads.
void check_mutations(Plan& plan) {
  for (const Step& step : plan.forward)
    for (const Value value : step.mutates) {
      if (plan.types[index_of(value)].origin == Origin::workspace) continue;
      plan.mutates_arguments = true;
      TORCH_CHECK_VALUE(plan.kept_at[index_of(value)] < 0, step.kind,
                        ": expected an argument that backward does not read, got ",
                        plan.types[index_of(value)].name,
                        ", whose old value another op needs. Use in_place=False.");
    }
}

bool kernels_everywhere(const PlanKey& key, const Lowered& program) {
  for (size_t i = 0; i < key.tensor_count(); ++i)
    if (!key.tensor(i).device.is_cpu()) return false;
  return std::all_of(program.types.begin(), program.types.end(),
                     [](const Type& type) { return kernel_ops::has_cpu_kernel(type.dtype); });
}

}  // namespace

const BackwardPlan& BackwardPlans::insert(std::unique_ptr<const BackwardPlan> plan) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const BackwardPlan* known = find(plan->mask)) return *known;
  auto table = std::make_unique<Table>();
  if (const Table* old = table_.load(std::memory_order_acquire)) *table = *old;
  table->push_back(plan.get());
  plans_.push_back(std::move(plan));
  table_.store(table.get(), std::memory_order_release);
  tables_.push_back(std::move(table));
  return *plans_.back();
}

std::unique_ptr<const Plan> make_plan(const Description& description, const PlanKey& key,
                                      const UserFusions& user) {
  Lowered program = lower(description, key);
  auto plan = std::make_unique<Plan>();
  plan->has_kernels = kernels_everywhere(key, program);
  plan->is_quantized = description.recipe.has_value();
  plan->runs_user_code = program.runs_user_code;
  plan->no_composite = program.no_composite;

  const auto contains = [](const Values& list, Value value) {
    return std::find(list.begin(), list.end(), value) != list.end();
  };
  FusionScope scope{&program.types, &program.operands, nullptr, &description.skipped_fusions,
                    &plan->decisions};

  // Joint pass: on all of both directions.
  scope.is_demanded = [&](Value value) {
    return contains(program.outputs, value) || contains(program.gradients, value);
  };
  const auto forward_parts = parts_of(program.forward), backward_parts = parts_of(program.backward);
  fuse_groups_jointly(program.forward, program.backward, groups_of(Pass::joint, description, user),
                      scope);
  fuse_jointly(program.forward, program.backward, fusions_of(Pass::joint, description, user),
               scope);
  check_coverage(forward_parts, program.forward, "joint");
  check_coverage(backward_parts, program.backward, "joint");

  // What backward needs of forward.
  std::vector<bool> is_free(program.types.size());
  for (const Values* list : {&program.inputs, &program.params, &program.outputs})
    for (const Value value : *list) is_free[index_of(value)] = true;
  std::vector<OpGroup> backward_groups;
  if (!program.backward.empty()) backward_groups = groups_of(Pass::backward, description, user);
  for (const OpGroup& group : backward_groups)  // these write gradients only
    for (const Step& step : program.backward)
      if (!step.covers.empty() && step.covers.front().op >= group.first &&
          step.covers.back().op <= group.last)
        for (size_t w = 0; w < step.writes.size(); ++w)
          if (exists(step.writes[w]) && !step.write_names[w].starts_with("grad_"))
            is_free[index_of(step.writes[w])] = true;
  std::vector<Names> reemit_reads;
  for (const OpNode& op : description.ops) reemit_reads.push_back(op.def->reemit_reads);
  choose_reemitted(program.forward, program.backward, is_free, reemit_reads);
  schedule(program.backward);
  drop_dead_steps(
      program.backward, [&](Value value) { return contains(program.gradients, value); },
      /*keep_mutating=*/false);
  for (const Value value : values_from_forward(program.backward, program.output_gradients)) {
    const Type& type = program.types[index_of(value)];
    if (type.origin == Origin::workspace) continue;
    if (type.format == Format::opaque || type.format == Format::shape) {
      plan->kept_opaque.push_back(value);
    } else {
      const uint8_t parts =
          is_fp8(type.format) ? 2 : 1;  // codes and their scale; nobody reads the amax again
      for (uint8_t part = 0; part < parts; ++part)
        plan->kept.push_back({value, part, contains(program.outputs, value)});
    }
  }

  // Forward pass: everything that is read later is demanded.
  scope.is_demanded = [&](Value value) {
    return contains(program.outputs, value) || contains(plan->kept_opaque, value) ||
           std::any_of(plan->kept.begin(), plan->kept.end(),
                       [&](const Kept& kept) { return kept.value == value; });
  };
  drop_dead_steps(program.forward, scope.is_demanded, /*keep_mutating=*/true);
  const auto demanded_parts = parts_of(program.forward);
  fuse_groups(program.forward, Pass::forward, groups_of(Pass::forward, description, user), scope);
  fuse(program.forward, Pass::forward, fusions_of(Pass::forward, description, user), scope);
  check_coverage(demanded_parts, program.forward, "forward");
  for (const Step& step : program.forward) plan->runs_user_code |= step.runs_user_code;

  std::vector<bool> stays(program.types.size());
  for (const Values* list : {&program.inputs, &program.params, &program.outputs, &plan->kept_opaque,
                             &program.workspaces})
    for (const Value value : *list) stays[index_of(value)] = true;
  for (const Kept& kept : plan->kept) stays[index_of(kept.value)] = true;
  find_dead(program.forward, stays);

  if (!program.backward.empty() ||
      std::any_of(program.gradients.begin(), program.gradients.end(), exists)) {
    auto backward = std::make_shared<BackwardFusions>();
    backward->patterns = fusions_of(Pass::backward, description, user);
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
    plan->kept_at[index_of(plan->kept[k].value)] = static_cast<int16_t>(k);
  check_mutations(*plan);
  if (!description.required_fusions.empty()) {
    if (plan->needs_backward)
      for (const Decision& decision : full_backward(*plan).decisions)
        plan->decisions.push_back(decision);
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
        is_defined_[index_of(gradient)] = (mask.given >> i & 1) != 0;
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
        if (exists(value) && gradients != 0) {
          from_gradient_[index_of(value)] = true;
          is_defined_[index_of(value)] = defined != 0;
        }
      if (gradients != 0 && defined == 0) continue;
      if (step.kind == kAddKind && defined == 1) {
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

const BackwardPlan& backward_plan(const Plan& plan, const BackwardMask& mask) {
  if (const BackwardPlan* known = plan.backward_plans.find(mask)) return *known;
  auto sliced = std::make_unique<BackwardPlan>();
  sliced->mask = mask;
  Slicing slicing(plan, mask);
  sliced->steps = slicing.run();
  for (size_t i = 0; i < plan.gradients.size(); ++i)
    sliced->gradients.push_back(mask.asked[i] ? slicing.resolve(plan.gradients[i]) : Value::none);
  const auto is_asked = [&](Value value) {
    return std::find(sliced->gradients.begin(), sliced->gradients.end(), value) !=
           sliced->gradients.end();
  };
  drop_dead_steps(sliced->steps, is_asked, /*keep_mutating=*/false);
  const auto parts = parts_of(sliced->steps);
  std::vector<Type> types = plan.types;
  FusionScope scope{&types, &plan.backward_fusions->operands, is_asked,
                    &plan.backward_fusions->skipped, &sliced->decisions};
  fuse_groups(sliced->steps, Pass::backward, plan.backward_fusions->groups, scope);
  fuse(sliced->steps, Pass::backward, plan.backward_fusions->patterns, scope);
  check_coverage(parts, sliced->steps, "backward");
  std::vector<bool> stays(plan.types.size());
  for (const Value value : sliced->gradients)
    if (exists(value)) stays[index_of(value)] = true;
  for (const Value value : plan.workspaces) stays[index_of(value)] = true;
  find_dead(sliced->steps, stays);
  return plan.backward_plans.insert(std::move(sliced));
}

const BackwardPlan& full_backward(const Plan& plan) {
  BackwardMask all;
  for (size_t i = 0; i < plan.outputs.size(); ++i)
    all.given |= uint64_t{exists(plan.output_gradients[i])} << i;
  for (const Value gradient : plan.gradients) all.asked.push_back(exists(gradient));
  return backward_plan(plan, all);
}

}  // namespace tandem
