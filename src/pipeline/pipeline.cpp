#include "pipeline/pipeline.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "autograd/direct.h"
#include "autograd/session.h"
#include "core/build_id.h"
#include "core/json_fields.h"
#include "kernel_ops/elementwise/join.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/weights/weights.h"
#include "pipeline/explain.h"
#include "planner/planner.h"
#include "planner/registry.h"

namespace tandem {

namespace {
/// Instead of a recipe's number: there was no call, or the calls had more than one recipe.
constexpr int64_t kNeverCalled = -1, kSeveral = -2;

/// How many states a pipeline keeps under the current fusions, and how many plans a state notes.
constexpr size_t kMostStates = 16, kMostServed = 64;
}  // namespace

Pipeline::Pipeline(std::string ops, std::vector<std::string> required_fusions,
                   std::optional<double> memory_budget)
    : ops_(std::move(ops)),
      required_fusions_(std::move(required_fusions)),
      calls_{Calls{kNeverCalled}, Calls{kNeverCalled}} {
  set_memory_budget(memory_budget);
  const auto parsed = parse_description(text_of(nullptr, {}));  // throws if the ops are wrong
  writes_arguments_ = std::any_of(parsed->ops.begin(), parsed->ops.end(),
                                  [](const OpNode& op) { return op.writes_caller(); });
}

void Pipeline::set_memory_budget(std::optional<double> bytes_per_row) {
  if (bytes_per_row) check_memory_budget(*bytes_per_row);
  memory_budget_ = bytes_per_row;
}

std::string Pipeline::text_of(const ActiveRecipe* recipe, PlanningTerms terms) const {
  if (terms.fuse && terms.skipped_fusions.empty()) terms.required_fusions = required_fusions_;
  return write_description(ops_, recipe == nullptr ? "null" : recipe->json, terms);
}

std::string Pipeline::description(bool training, bool fuse,
                                  const std::vector<std::string>& skipped_fusions) const {
  return text_of(active_recipe(), {.training = training,
                                   .fuse = fuse,
                                   .skipped_fusions = skipped_fusions,
                                   .fusions_version = tandem::fusions_version(),
                                   .memory_budget = fuse ? budget_now() : std::nullopt});
}

Pipeline::State& Pipeline::state(bool training) {
  const ActiveRecipe* recipe = active_recipe();
  const uint64_t version = tandem::fusions_version();
  const std::optional<double> budget = budget_now();
  for (State* state = newest_; state != nullptr; state = state->older)
    if (state->recipe.get() == recipe && state->training == training &&
        state->fusions_version == version && state->watched == watched_ &&
        state->memory_budget == budget)
      return *state;
  auto program = program_of(text_of(recipe, {.training = training,
                                             .cache_weights = recipe != nullptr,
                                             .fusions_version = version,
                                             .watched = watched_,
                                             .memory_budget = budget}));
  const std::lock_guard<std::mutex> lock(mutex_);
  states_.push_back(std::unique_ptr<State>(new State{kept_active_recipe(),
                                                     training,
                                                     version,
                                                     watched_,
                                                     budget,
                                                     std::move(program),
                                                     {},
                                                     newest_.load()}));
  newest_ = states_.back().get();
  State& made = *states_.back();
  retire_states(version);
  return made;
}

const std::string& Pipeline::text_for_op(State& state) {
  if (const std::string* text = state.text.load(std::memory_order_acquire)) return *text;
  auto made = std::make_unique<const std::string>(
      text_of(state.recipe.get(), {.training = state.training,
                                   .fusions_version = state.fusions_version,
                                   .memory_budget = state.memory_budget}));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state.held_text == nullptr) {
    state.held_text = std::move(made);
    state.text.store(state.held_text.get(), std::memory_order_release);
  }
  return *state.held_text;
}

/// Retires states of other fusions than the current ones, which no call can find, and the oldest of
/// too many states. All reads and writes of the list are sequentially consistent: a call that
/// begins when none ran finds the list without the retired states.
void Pipeline::retire_states(uint64_t fusions_version) {
  size_t excess = states_.size() > kMostStates ? states_.size() - kMostStates : 0;
  std::vector<std::unique_ptr<State>> stay;
  for (auto& state : states_) {
    const bool is_last = state == states_.back();
    const bool is_excess = excess != 0;
    if (is_excess) --excess;
    (is_last || (!is_excess && state->fusions_version >= fusions_version) ? stay : retired_)
        .push_back(std::move(state));
  }
  states_ = std::move(stay);
  for (size_t i = states_.size(); i-- > 0;)
    states_[i]->older = i == 0 ? nullptr : states_[i - 1].get();
  has_retired_ = !retired_.empty();
}

void Pipeline::free_retired() const {
  std::vector<std::unique_ptr<State>> dead;  // destroyed without the lock: they may run Python
  const std::lock_guard<std::mutex> lock(mutex_);
  if (visits_ != 0) return;
  dead.swap(retired_);
  has_retired_ = false;
}

kernel_ops::CodesWere Pipeline::why_none(size_t weight, const Quantizer& quantizer) const {
  using kernel_ops::CodesWere;
  bool has_other = false;
  std::vector<GroupMask> others;  // directions of workspaces of this quantizer
  GroupMask mask{};               // directions of the new workspace
  for (const auto& state : states_)
    for (const HeldWorkspace& held : state->workspaces) {
      if (held.weight != weight) continue;
      const bool is_there = held.parts[kernel_ops::stamp_part].defined();
      has_other |= is_there && held.quantizer != &quantizer;
      if (held.quantizer != &quantizer) continue;
      if (is_there) others.push_back(held.mask);
      if (!is_there) mask = held.mask;
    }
  if (std::ranges::find(others, mask) != others.end())
    return CodesWere::first_used;  // in training or in evaluation
  return !others.empty() ? CodesWere::lacking_a_direction
         : has_other     ? CodesWere::of_another_recipe
                         : CodesWere::first_used;
}

Pipeline::CodedWeight Pipeline::coded_weight(at::TensorList pieces) {
  CodedWeight coded{.dtype = pieces[0].scalar_type()};
  for (const at::Tensor& piece : pieces) {
    coded.data.push_back(piece.const_data_ptr());
    const c10::DimVector strides = kernel_ops::strides_of(piece);
    coded.strides.insert(coded.strides.end(), strides.begin(), strides.end());
  }
  return coded;
}

std::vector<at::Tensor> Pipeline::workspaces_for(const Plan& plan, const Arguments& arguments,
                                                 State& state) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<at::Tensor> tensors;
  for (size_t w = 0; w < plan.cached_weights.size(); ++w) {
    const auto& quantizer = plan.cached_weights[w].quantizer;
    const GroupMask& mask = plan.cached_weights[w].parts;
    const auto pieces = pieces_of(plan.cached_weights[w], plan, arguments.params);
    // Plans that read codes in other directions have workspaces of their own.
    auto held = std::ranges::find_if(state.workspaces, [&](const HeldWorkspace& each) {
      return each.weight == w && each.quantizer == quantizer && each.mask == mask;
    });
    if (held == state.workspaces.end())
      held = state.workspaces.insert(held, HeldWorkspace{w, quantizer, mask, {}, {}});
    const Direction direction =
        held->parts[row_codes].defined() ? Direction::row : Direction::column;
    const at::Tensor& codes = held->parts[part_of(direction, 0)];
    // A call on another thread, or a graph, may still read the codes of another weight: they must
    // not be overwritten.
    CodedWeight coded = coded_weight(pieces);
    const bool is_free = codes.use_count() <= 1 || held->coded == coded;
    held->coded = std::move(coded);
    if (!codes.defined() || !is_free)
      held->parts = kernel_ops::make_workspace(
          pieces, *quantizer, mask,
          is_free ? why_none(w, *quantizer) : kernel_ops::CodesWere::of_another_tensor);
    else if (codes.sym_sizes() !=
                 at::SymIntArrayRef(sizes_of_codes(  // torch 2.11 compares equal types only
                     *quantizer, kernel_ops::joined_sizes(pieces), direction)) ||
             codes.device() != pieces[0].device())
      held->parts = kernel_ops::fitting_workspace(pieces, *quantizer, mask, held->parts);
    std::ranges::copy_if(held->parts, std::back_inserter(tensors), &at::Tensor::defined);
  }
  return tensors;
}

Pipeline::Served* Pipeline::served(State& state, const std::shared_ptr<const Plan>& plan) {
  for (Served* served = state.newest_served.load(std::memory_order_acquire); served != nullptr;
       served = served->older)
    if (served->plan == plan) return served;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& served : state.served)
    if (served->plan == plan) return served.get();
  if (state.served.size() == kMostServed) return nullptr;
  state.served.push_back(
      std::unique_ptr<Served>(new Served{plan, state.newest_served.load(std::memory_order_relaxed),
                                         std::vector<std::atomic<int64_t>>(plan->kept.size())}));
  state.newest_served.store(state.served.back().get(), std::memory_order_release);
  return state.served.back().get();
}

/// torch's checkpoints recompute wherever backward runs, which may be outside the region of the
/// forward. A reentrant checkpoint has run its forward without grad, and it is unknown which of
/// these calls it repeats. So all calls without grad since the last recompute count; calls without
/// a recipe do not exclude a recompute under the recipe of the others. Other checkpoints check
/// their saved tensors themselves and recompute under saved-tensor hooks.
void Pipeline::note_recipe(bool training) {
  const ActiveRecipe* active = active_recipe();
  const int64_t recipe = active == nullptr ? 0 : active->number;
  if (last_recipe_.load(std::memory_order_relaxed) != recipe)
    last_recipe_.store(recipe, std::memory_order_relaxed);
  Calls& calls = calls_[training ? 1 : 0];
  int64_t under = calls.under.load(std::memory_order_relaxed);
  const int64_t last = calls.with_grad.load(std::memory_order_relaxed);
  if (is_in_backward()) {
    if (!c10::GradMode::is_enabled()) return;
    calls.are_recomputed.store(true, std::memory_order_relaxed);
    if (const RegionPtr region = thread_region(); region && region->is_recompute)
      return;  // tandem.checkpoint restores its forward's recipe
    const bool has_forward = under != 0 || calls.plain.load(std::memory_order_relaxed);
    const bool is_reentrant = !at::SavedTensorDefaultHooks::is_enabled() ||
                              !at::SavedTensorDefaultHooks::get_hooks(true).has_value();
    const int64_t expected = has_forward && (is_reentrant || last == kNeverCalled) ? under : last;
    const auto text = [](int64_t number) {
      return number == 0 ? "none" : number == kSeveral ? "one of several" : recipe_text(number);
    };
    TORCH_CHECK_VALUE(recipe == expected || expected == kNeverCalled,
                      "pipeline: expected a recompute under the recipe of its forward, ",
                      text(expected), ", got ", text(recipe),
                      ". Call backward() inside the tandem.autocast region of the forward, or pass "
                      "use_reentrant=False and context_fn=lambda: (contextlib.nullcontext(), "
                      "tandem.autocast(recipe=...)) to checkpoint().");
    return;
  }
  if (c10::GradMode::is_enabled()) {
    if (last != recipe) calls.with_grad.store(recipe, std::memory_order_relaxed);
    return;
  }
  if (calls.are_recomputed.load(std::memory_order_relaxed)) {
    calls.are_recomputed.store(false, std::memory_order_relaxed);
    calls.plain.store(false, std::memory_order_relaxed);
    calls.under.store(under = 0, std::memory_order_relaxed);
  }
  if (recipe == 0 && !calls.plain.load(std::memory_order_relaxed))
    calls.plain.store(true, std::memory_order_relaxed);
  if (recipe != 0 && recipe != under)
    calls.under.store(under == 0 ? recipe : kSeveral, std::memory_order_relaxed);
}

void Pipeline::check_no_writes(at::TensorList inputs) const {
  if (!writes_arguments_ || is_recorded()) return;
  for (const at::Tensor& tensor : inputs)
    if (!tensor.defined() || tensor.is_meta()) return;
  TORCH_CHECK_VALUE(
      false, "pipeline: expected a plain call, which writes the sum of in_place=True into the ",
      "caller's tensor, got one through torch.ops.tandem.pipeline, which writes no ",
      "argument: under a mode or a torch.func transform, or with a tensor subclass, a ",
      "tangent or a parametrized weight. Use in_place=False.");
}

std::vector<at::Tensor> state_in_region(std::vector<at::Tensor> state) {
  const RegionPtr region = thread_region();
  TORCH_CHECK_VALUE(region != nullptr && region->outermost != nullptr,
                    "pipeline: expected an autocast region, got none. Enter one.");
  const bool recomputes = is_recompute() || region->is_recompute;
  bool has_scales = state.empty();
  state.insert(state.begin(), region->outermost->token(recomputes));
  for (size_t holder = 0; recomputes && scaling_state_place(holder, false) < state.size();
       ++holder) {
    const size_t first = scaling_state_place(holder, /*is_backward=*/false);
    ScalingState forward = scaling_state([&](size_t place) { return state[place]; }, first);
    forward.scale = region->outermost->scale_in_forward(forward);
    if (!forward.scale.defined()) continue;  // forward has used no scale of this module
    has_scales = true;
    for (size_t i = 0; i < kScalingState.size(); ++i)
      state[first + i] = forward.*kScalingState[i].tensor;
  }
  TORCH_CHECK_VALUE(!recomputes || has_scales,
                    "pipeline: expected a recompute in the autocast region of its forward, whose "
                    "scales it needs, got another region. Enter the region around "
                    "tandem.checkpoint, not in it, or call backward() inside that region.");
  return state;
}

Outputs Pipeline::operator()(at::TensorList inputs, at::TensorList params, bool training,
                             Buffers buffers, const StateOf& state_of, const void* given) {
  note_recipe(training);
  Arguments arguments{.inputs = inputs,
                      .params = params,
                      .workspaces = {},
                      .buffers = std::move(buffers),
                      .quantized = quantized_among(inputs, params),
                      .given = given};
  std::vector<at::Tensor> recipe_state;
  if (const ActiveRecipe* recipe = active_recipe(); recipe && recipe->history_length != 0) {
    TORCH_CHECK_VALUE(state_of, "pipeline: expected a front that keeps state for a recipe with a ",
                      "history of amaxes, got none. Use a Sequential, or another recipe.");
    arguments.region = thread_region()->outermost;
    recipe_state = state_in_region(state_of(recipe->history_length));
    arguments.state = recipe_state;
  }
  const Visit visit(*this);
  State& current = state(training);
  if (!is_direct(arguments)) {
    check_no_writes(inputs);
    return call_op(arguments, text_for_op(current));
  }
  const auto plan =
      current.program->plan_for(key_for(*current.program, arguments, /*traced=*/false));
  std::vector<at::Tensor> workspaces;
  if (!plan->workspaces.empty()) {
    workspaces = workspaces_for(*plan, arguments, current);
    arguments.workspaces = workspaces;
  } else if (kernel_ops::said_now() == kernel_ops::Said::first_microbatch) {
    kernel_ops::note_first_microbatch(arguments.params);  // for codes that other plans hold
  }
  Outputs outputs = run_pipeline(plan, arguments, Path::direct);
  Served* entry = served(current, plan);
  if (plan->needs_backward)
    saved_bytes_.store(
        note_kept_bytes(outputs, entry != nullptr ? std::span(entry->kept_bytes)
                                                  : std::span<std::atomic<int64_t>>()),
        std::memory_order_relaxed);
  return outputs;
}

Outputs Pipeline::composite(at::TensorList inputs, at::TensorList params, bool training) const {
  const Arguments arguments{inputs, params, {}};
  const auto program = program_of(
      text_of(nullptr,
              {.training = training, .fuse = false, .fusions_version = tandem::fusions_version()}));
  return run_pipeline(
      program->plan_for(key_of(arguments, c10::GradMode::is_enabled(), /*traced=*/true)), arguments,
      Path::composite);
}

std::string Pipeline::explain(ExplainFormat format, const StepTimes& times) const {
  std::vector<ExplainedPlan> plans;
  const Visit visit(*this);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& state : states_)
      for (const auto& served : state->served) {
        plans.push_back({served->plan,
                         state->program.get(),
                         state->training,
                         state->recipe ? state->recipe->json : "none",
                         {served->kept_bytes.begin(), served->kept_bytes.end()}});
        const auto& cached = served->plan->cached_weights;
        for (size_t w = 0; w < cached.size(); ++w)
          for (const HeldWorkspace& held : state->workspaces)
            if (held.weight == w && held.quantizer == cached[w].quantizer &&
                held.mask == cached[w].parts)
              plans.back().stamps.push_back(held.parts[kernel_ops::stamp_part]);
      }
  }
  return tandem::explain(plans, saved_bytes(), format, times);
}

bool Pipeline::has_run() const {
  const Visit visit(*this);
  for (const State* state = newest_; state != nullptr; state = state->older)
    if (state->newest_served.load(std::memory_order_acquire) != nullptr) return true;
  return false;
}

std::vector<std::string> Pipeline::fusions_made() const {
  std::vector<std::shared_ptr<const Plan>> plans;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& state : states_)
      for (const auto& served : state->served) plans.push_back(served->plan);
  }
  return fusions_in(plans);
}

}  // namespace tandem
