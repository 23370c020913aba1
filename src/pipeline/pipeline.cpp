#include "pipeline/pipeline.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "core/build_id.h"
#include "kernel_ops/weights.h"
#include "pipeline/explain.h"
#include "planner/planner.h"
#include "planner/registry.h"

namespace tandem {

Pipeline::Pipeline(std::string ops, std::vector<std::string> required_fusions)
    : ops_(std::move(ops)), required_fusions_(std::move(required_fusions)) {
  parse_description(
      text_of(nullptr, true, 0, true, false, {}));  // errors come where the pipeline is made
}

std::string Pipeline::text_of(const ActiveRecipe* recipe, bool training, uint64_t fusions_version,
                              bool fuse, bool cache_weights,
                              const std::vector<std::string>& skipped_fusions) const {
  nlohmann::json description{
      {"build", build_id()}, {"training", training}, {"fusions_version", fusions_version}};
  description["ops"] = nlohmann::json::parse(ops_);
  description["recipe"] =
      recipe == nullptr ? nlohmann::json() : nlohmann::json::parse(recipe->json);
  if (!fuse) description["fuse"] = false;
  if (cache_weights) description["cache_weights"] = true;
  if (!skipped_fusions.empty()) description["skipped_fusions"] = skipped_fusions;
  if (!required_fusions_.empty()) description["required_fusions"] = required_fusions_;
  return description.dump();
}

std::string Pipeline::description(bool training, bool fuse,
                                  const std::vector<std::string>& skipped_fusions) const {
  return text_of(active_recipe(), training, tandem::fusions_version(), fuse,
                 /*cache_weights=*/false, skipped_fusions);
}

Pipeline::State& Pipeline::state(bool training) {
  const ActiveRecipe* recipe = active_recipe();
  const uint64_t version = tandem::fusions_version();
  for (State* state = newest_.load(std::memory_order_acquire); state != nullptr;
       state = const_cast<State*>(state->older))
    if (state->recipe == recipe && state->training == training && state->fusions_version == version)
      return *state;
  auto program =
      program_of(text_of(recipe, training, version, true, /*cache_weights=*/recipe != nullptr, {}));
  const std::lock_guard<std::mutex> lock(mutex_);
  states_.push_back(std::unique_ptr<State>(new State{
      recipe, training, version, std::move(program), {}, newest_.load(std::memory_order_relaxed)}));
  newest_.store(states_.back().get(), std::memory_order_release);
  return *states_.back();
}

std::vector<at::Tensor> Pipeline::workspaces_for(const Plan& plan, const Arguments& arguments,
                                                 State& state) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t w = 0; w < plan.workspace_weights.size(); ++w) {
    const size_t param = static_cast<size_t>(
        std::find(plan.params.begin(), plan.params.end(), plan.workspace_weights[w]) -
        plan.params.begin());
    const at::Tensor& weight = arguments.params[param];
    if (state.workspaces.size() <= 4 * w) state.workspaces.resize(4 * w + 4);
    at::Tensor* parts = &state.workspaces[4 * w];
    if (parts[0].defined() && parts[0].sizes() == weight.sizes() &&
        parts[0].device() == weight.device())
      continue;
    c10::InferenceMode no_inference(false);  // a workspace must serve in every mode
    const auto options = at::TensorOptions().device(weight.device());
    parts[0] = at::empty(weight.sizes(), options.dtype(at::kByte));
    for (const size_t part : {1, 2}) parts[part] = at::empty({}, options.dtype(at::kFloat));
    parts[3] = at::zeros({kernel_ops::kStampSize}, options.dtype(at::kLong));
  }
  return state.workspaces;
}

Pipeline::Served& Pipeline::served(State& state, const std::shared_ptr<const Plan>& plan) {
  for (Served* served = state.newest_served.load(std::memory_order_acquire); served != nullptr;
       served = served->older)
    if (served->plan == plan) return *served;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& served : state.served)
    if (served->plan == plan) return *served;
  state.served.push_back(
      std::make_unique<Served>(Served{plan, state.newest_served.load(std::memory_order_relaxed)}));
  state.newest_served.store(state.served.back().get(), std::memory_order_release);
  return *state.served.back();
}

void Pipeline::note_kept(Served& served, const Outputs& outputs) {
  const int64_t total = tandem::saved_bytes(outputs);
  if (saved_bytes_.exchange(total, std::memory_order_relaxed) == total) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  served.kept_bytes = kept_bytes(outputs);
}

Outputs Pipeline::operator()(at::TensorList inputs, at::TensorList params, bool training) {
  Arguments arguments{inputs, params, {}};
  if (!is_direct(arguments)) return call_op(arguments, description(training));
  State& current = state(training);
  const auto& plan =
      current.program->plan_for(key_of(arguments, c10::GradMode::is_enabled(), /*traced=*/false));
  std::vector<at::Tensor> workspaces;
  if (!plan->workspaces.empty()) {
    workspaces = workspaces_for(*plan, arguments, current);
    arguments.workspaces = workspaces;
  }
  Outputs outputs = run_pipeline(plan, arguments, Path::direct);
  if (Served& entry = served(current, plan); plan->needs_backward) note_kept(entry, outputs);
  return outputs;
}

std::string Pipeline::explain(ExplainFormat format) const {
  std::vector<ExplainedPlan> plans;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& state : states_)
      for (const auto& served : state->served)
        plans.push_back({served->plan, state->program.get(), state->training,
                         state->recipe ? state->recipe->json : "none", served->kept_bytes});
  }
  return tandem::explain(plans, saved_bytes(), format);
}

std::vector<std::string> Pipeline::fusions_made() const {
  std::set<std::string> names;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& state : states_)
    for (const auto& served : state->served) {
      const std::shared_ptr<const Plan>& plan = served->plan;
      const auto collect = [&](const std::vector<Decision>& decisions) {
        for (const Decision& decision : decisions)
          if (decision.reason.empty()) names.insert(decision.fusion);
      };
      collect(plan->decisions);
      if (plan->needs_backward) collect(full_backward(*plan).decisions);
    }
  return {names.begin(), names.end()};
}

}  // namespace tandem
