#include "pipeline/verify.h"

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <sstream>

#include "executor/executor.h"
#include "pipeline/compare.h"
#include "pipeline/replay.h"
#include "planner/planner.h"
#include "planner/program.h"

namespace tandem {

namespace {

/// The roundings before a value may grow: terms cancel, or a norm divides by a small number. Fused
/// steps alone were compared before.
constexpr double kGrowth = 8, kLargestBound = 0.5;

using Tensors = std::vector<at::Tensor>;

/// The generators that a run may draw from: torch's default one, for user code, and the one of the
/// inputs' device. Restores them at the end.
class Generators {
 public:
  explicit Generators(c10::Device device) {
    add(at::kCPU);
    add(device);
  }
  Generators(const Generators&) = delete;
  Generators& operator=(const Generators&) = delete;
  ~Generators() { restore(); }

  void restore() {
    for (auto& [generator, state] : states_) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
  }
  /// The generator of the inputs' device.
  at::Generator& own() { return states_.back().first; }

 private:
  void add(c10::Device device) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    states_.emplace_back(generator, generator.get_state());
  }
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// New leaves with the values and flags of the originals, so that no tensor of the caller changes.
Tensors leaves_of(at::TensorList tensors) {
  Tensors leaves;
  for (const at::Tensor& tensor : tensors)
    leaves.push_back(tensor.detach().clone().set_requires_grad(tensor.requires_grad()));
  return leaves;
}

/// A copy in memory of a random layout: dimensions in any order, with gaps of NaN between, before
/// and after them, and a meaningless stride in a dimension of one element. Integers and codes are
/// not copied.
at::Tensor laid(const at::Tensor& tensor, std::mt19937_64& random) {
  const bool is_plain =
      tensor.layout() == at::kStrided && !tensor.key_set().has(c10::DispatchKey::Python);
  if (!is_plain || !tensor.is_floating_point() || tensor.numel() == 0) return tensor;
  std::vector<int64_t> dims(static_cast<size_t>(tensor.dim())), strides(dims.size());
  std::iota(dims.rbegin(), dims.rend(), 0);
  // Half of the layouts have contiguous rows, as views of a wider tensor do.
  if (!dims.empty())
    std::shuffle(dims.begin() + static_cast<int64_t>(random() % 2), dims.end(), random);
  const auto offset = static_cast<int64_t>(random() % 4);
  auto extent = static_cast<int64_t>(1 + random() % 2);
  for (const int64_t dim : dims) {
    strides[static_cast<size_t>(dim)] = extent;
    extent = extent * tensor.size(dim) + static_cast<int64_t>(random() % 3);
  }
  const at::Tensor memory =
      at::full({offset + extent + 3}, std::numeric_limits<double>::quiet_NaN(), tensor.options());
  memory.as_strided(tensor.sizes(), strides, offset).copy_(tensor);
  for (size_t dim = 0; dim < strides.size(); ++dim)
    if (tensor.size(static_cast<int64_t>(dim)) == 1)
      strides[dim] = static_cast<int64_t>(random() % 1000);
  return memory.as_strided(tensor.sizes(), strides, offset);
}
Tensors laid(const Tensors& leaves, std::mt19937_64& random) {
  Tensors others;
  for (const at::Tensor& leaf : leaves)
    others.push_back(laid(leaf.detach(), random).set_requires_grad(leaf.requires_grad()));
  return others;
}

/// A random choice among `count` things, at least one if there are any.
std::vector<bool> some_of(size_t count, std::mt19937_64& random) {
  std::vector<bool> chosen(count);
  for (size_t i = 0; i < count; ++i) chosen[i] = (random() & 1) != 0;
  if (count != 0) chosen[random() % count] = true;
  return chosen;
}

/// Copies of the recipe's state. The region's number is that of a recompute, so nothing updates
/// them.
Tensors state_for(const StateOf& state_of) {
  const ActiveRecipe* recipe = active_recipe();
  if (recipe == nullptr || recipe->history_length == 0) return {};
  Tensors state{at::scalar_tensor(-1, at::kLong).reshape({1})};
  for (const at::Tensor& tensor : state_of(recipe->history_length)) state.push_back(tensor.clone());
  return state;
}

struct Failure {
  /// The fusion that is wrong, if known.
  std::string fusion;
  /// Empty if nothing differs.
  std::string text;
};

class Verification {
 public:
  Verification(const Pipeline& pipeline, at::TensorList inputs, at::TensorList params,
               bool training, const StateOf& state_of, VerifyReport& report)
      : pipeline_(pipeline),
        training_(training),
        report_(report),
        inputs_(leaves_of(inputs)),
        params_(leaves_of(params)),
        state_(state_for(state_of)),
        fused_(plan_of(pipeline.description(training))),
        unfused_(plan_of(pipeline.description(training, /*fuse=*/false))),
        generators_(inputs_[0].device()) {}

  void run(int masks) {
    std::mt19937_64 random(0);
    if (!unfused_.plan->needs_backward) masks = 0;
    Replay forward = replay(unfused_.plan->forward, Replay(*unfused_.plan, arguments()));
    for (const Step& step : unfused_.plan->forward)
      if (step.broadcasts_input && is_wider(forward, step)) wider_.push_back(step.covers[0]);
    for (int m = 0; m <= masks && report_.passed; ++m) {
      choose(m == 0 ? nullptr : &random, forward);
      Replay reference = with_backward(forward);
      note_users(decisions_of(*fused_.plan, mask_));
      Failure failure = compare(fused_, forward, reference);
      if (failure.text.empty() && m > 0) failure = compare_laid(random);
      if (failure.text.empty()) continue;
      if (failure.fusion.empty()) failure.text += culprit(forward, reference);
      report_.passed = false;
      report_.text = "verify: " + failure.text;
    }
    if (report_.passed)
      report_.text = "verify: " + std::to_string(report_.comparisons) + " tensors of " +
                     std::to_string(masks + 1) + " backward masks agree, fused against unfused." +
                     not_compared();
  }

  /// The ops whose results are larger than their inputs.
  const std::vector<Part>& wider() const { return wider_; }
  /// Whether each op in `wider` may have a result that is larger than its inputs.
  bool allows(const std::vector<Part>& wider) const {
    return std::ranges::none_of(unfused_.plan->forward, [&](const Step& step) {
      return !step.broadcasts_input && !step.covers.empty() &&
             std::ranges::find(wider, step.covers[0]) != wider.end();
    });
  }

 private:
  static bool is_wider(Replay& forward, const Step& step) {
    Frame& frame = forward.frame();
    return frame.tensor(step.reads[step.main_read]).sizes() !=
           frame.tensor(step.writes[step.main_write]).sizes();
  }

  struct Planned {
    std::shared_ptr<Program> program;
    std::shared_ptr<const Plan> plan;
  };

  Arguments arguments() const { return arguments(inputs_); }
  Arguments arguments(const Tensors& inputs) const {
    return {.inputs = inputs,
            .params = params_,
            .workspaces = {},
            .state = state_,
            .quantized = quantized_among(inputs, params_)};
  }

  Planned plan_of(const std::string& description) {
    auto program = program_of(description);
    auto plan = program->plan_for(key_for(*program, arguments(), /*traced=*/true));
    return {std::move(program), std::move(plan)};
  }

  /// Runs steps with the dtypes of the plan, as a call does.
  Replay replay(const Steps& steps, Replay from) {
    const NoAutocast no_autocast;
    generators_.restore();
    from.run(steps, generators_.own());
    return from;
  }

  /// Chooses which gradients are given and requested, and computes the given ones.
  void choose(std::mt19937_64* random, Replay& forward) {
    const Plan& plan = *unfused_.plan;
    std::vector<size_t> outputs, leaves;
    for (size_t i = 0; i < plan.outputs.size(); ++i)
      if (exists(plan.output_gradients[i])) outputs.push_back(i);
    for (size_t i = 0; i < plan.gradients.size(); ++i)
      if (exists(plan.gradients[i])) leaves.push_back(i);
    const auto pick = [&](size_t count) {
      return random == nullptr ? std::vector<bool>(count, true) : some_of(count, *random);
    };
    const std::vector<bool> given = pick(outputs.size()), requested = pick(leaves.size());
    grads_.assign(plan.outputs.size(), at::Tensor());
    mask_ = BackwardMask{{}, std::vector<bool>(plan.gradients.size())};
    mask_.given.assign(plan.outputs.size(), false);
    for (size_t i = 0; i < outputs.size(); ++i)
      if (given[i]) {
        const at::Tensor& output = forward.frame().tensor(plan.outputs[outputs[i]]);
        grads_[outputs[i]] = at::randn_like(output.detach());
        mask_.given[outputs[i]] = true;
      }
    for (size_t i = 0; i < leaves.size(); ++i) mask_.requested[leaves[i]] = requested[i];
  }

  void set_gradients(Replay& reference) const {
    const Plan& plan = *unfused_.plan;
    for (size_t i = 0; i < grads_.size(); ++i)
      if (exists(plan.output_gradients[i]))
        reference.frame().tensor(plan.output_gradients[i]) = grads_[i];
  }

  /// Runs backward after forward.
  Replay with_backward(Replay forward) {
    if (!unfused_.plan->needs_backward) return forward;
    set_gradients(forward);
    return replay(backward_plan(*unfused_.plan, mask_)->steps, forward);
  }

  /// Compares the fused steps with inputs and given gradients in memory of other layouts. The
  /// pipeline as a whole is not compared: a fused step may write another layout than the replaced
  /// ops, and torch's operations then give other bits.
  Failure compare_laid(std::mt19937_64& random) {
    const Tensors dense = grads_;
    for (at::Tensor& grad : grads_)
      if (grad.defined()) grad = laid(grad, random);
    const Tensors inputs = laid(inputs_, random);
    Replay forward = replay(unfused_.plan->forward, Replay(*unfused_.plan, arguments(inputs)));
    Replay reference = with_backward(forward);
    grads_ = dense;
    StepCheck steps(*fused_.plan, report_.comparisons);
    return compare_steps(fused_, steps, forward, reference);
  }

  Failure compare_steps(const Planned& fused, StepCheck& steps, Replay& forward,
                        Replay& reference) {
    const NoAutocast no_autocast;
    generators_.restore();
    const Plan &plan = *fused.plan, &unfused = *unfused_.plan;
    WrongStep wrong = steps.check(plan.forward, unfused.forward, forward, generators_.own());
    if (wrong.fusion.empty() && plan.needs_backward) {
      Steps all = backward_plan(unfused, mask_)->steps;  // a budget may recompute forward steps
      all.insert(all.end(), unfused.forward.begin(), unfused.forward.end());
      wrong = steps.check(backward_plan(plan, mask_)->steps, all, reference, generators_.own());
    }
    if (wrong.fusion.empty()) return {};
    return {wrong.fusion, "fusion \"" + wrong.fusion +
                              "\" differs from the ops that it replaces (" +
                              places(*fused.program, wrong.step) + ") in " + wrong.text +
                              mask_text() + ". Correct or remove it."};
  }

  /// Compares a call and its backward as users run them: first its fused steps, then the whole.
  Failure compare(const Planned& fused, Replay& forward, Replay& reference) {
    const Plan& plan = *fused.plan;
    generators_.restore();
    const Outputs outputs = run_pipeline(fused.plan, arguments(), Path::direct);
    const std::vector<Tensors> kept = kept_tensors(outputs);
    const Tensors gradients = gradients_for(outputs);

    StepCheck steps(plan, report_.comparisons);
    if (Failure failure = compare_steps(fused, steps, forward, reference); !failure.text.empty())
      return failure;

    const auto whole = [&](const std::string& what, const at::Tensor& got, Value value, size_t part,
                           Replay& expected, bool is_gradient = false,
                           double term = 0) -> std::string {
      ++report_.comparisons;
      const StepCheck::Bound bound = exists(value) ? steps.bound(value) : StepCheck::Bound();
      at::Tensor want = exists(value) ? expected.frame().whole(value, part) : at::Tensor();
      // Autograd sums the gradient of an argument that was expanded.
      if (is_gradient && want.defined() && got.defined() &&
          at::is_expandable_to(got.sizes(), want.sizes()))
        want = at::sum_to(want, got.sizes());
      const double allowed = std::min(kGrowth * bound.relative, kLargestBound);
      const std::string found =
          bound.in_norm
              ? difference_in_norm(got, want, allowed)
              : difference(got, want, allowed, allowed == 0 ? 0 : std::max(largest_of(want), term));
      return found.empty()
                 ? ""
                 : "fused and unfused differ in " + what + ": " + found + mask_text() + ".";
    };
    std::string found;
    for (size_t i = 0; i < outputs.size() && found.empty(); ++i)
      found =
          whole("output " + std::to_string(i), outputs[i].detach(), plan.outputs[i], 0, forward);
    for (size_t k = 0; k < kept.size(); ++k) {
      const Value value = plan.kept[k];
      const Type& type = plan.types[index_of(value)];
      if (!forward.has(value))
        continue;  // private to a joint fusion, whose other half was compared
      if (steps.bound(value).in_norm && type.format == Format::codes) continue;
      for (size_t part = 0; part < tensors_per_value(type) && found.empty(); ++part)
        found = whole("kept " + type.name, kept[k][part], value, part, forward);
    }
    Values requested;
    if (plan.needs_backward) requested = backward_plan(*unfused_.plan, mask_)->gradients;
    for (size_t i = 0; i < gradients.size() && found.empty(); ++i)
      if (mask_.requested[i])
        found = whole("the gradient of " + plan.types[index_of(argument(plan, i))].name,
                      gradients[i], requested[i], 0, reference,
                      /*is_gradient=*/true, largest_term(requested[i], reference));
    return {"", found};
  }

  /// Returns a bound of the terms that a gradient is a sum of, such as grad_y x of a weight's:
  /// where they cancel, roundings exceed the sum. 0 where the unfused step that writes it reads
  /// more than two tensors.
  double largest_term(Value gradient, Replay& reference) {
    const auto backward = backward_plan(*unfused_.plan, mask_);
    for (const Step& step : backward->steps) {
      if (!exists(gradient) || std::ranges::find(step.writes, gradient) == step.writes.end())
        continue;
      double product = 1;
      size_t count = 0;
      for (const Value read : step.reads) {
        if (!exists(read)) continue;
        if (!reference.has(read) || ++count > 2) return 0;
        if (reference.plan().types[index_of(read)].format != Format::plain) return 0;
        const at::Tensor& tensor = reference.frame().whole(read);
        if (!tensor.defined() || !tensor.is_floating_point()) return 0;
        product *= largest_of(tensor);
      }
      return product;
    }
    return 0;
  }

  static Value argument(const Plan& plan, size_t i) {
    return i < plan.inputs.size() ? plan.inputs[i] : plan.params[i - plan.inputs.size()];
  }

  /// By input, then parameter; undefined if not requested.
  Tensors gradients_for(const Outputs& outputs) const {
    Tensors from, grads, requested, gradients(mask_.requested.size());
    for (size_t i = 0; i < outputs.size(); ++i)
      if (grads_[i].defined()) {
        from.push_back(outputs[i]);
        grads.push_back(grads_[i]);
      }
    std::vector<size_t> places;
    for (size_t i = 0; i < gradients.size(); ++i)
      if (mask_.requested[i]) {
        requested.push_back(i < inputs_.size() ? inputs_[i] : params_[i - inputs_.size()]);
        places.push_back(i);
      }
    if (from.empty() || requested.empty()) return gradients;
    const Tensors found = gradients_of(from, requested, grads);
    for (size_t i = 0; i < places.size(); ++i) gradients[places[i]] = found[i];
    return gradients;
  }

  void note_users(const std::vector<Decision>& decisions) {
    for (const Decision& decision : decisions) {
      if (!decision.is_users) continue;
      std::string& reason =
          of_users_.emplace(std::pair(decision.fusion, decision.place), decision.reason)
              .first->second;
      if (decision.reason.empty()) reason.clear();
    }
  }

  /// The users' fusions that no mask's plan has made at a place; empty if there are none.
  std::string not_compared() const {
    std::string text;
    for (const auto& [at, reason] : of_users_)
      if (!reason.empty())
        text += " Not compared: fusion \"" + at.first + "\" (" + at.second +
                "), which was refused: " + reason + ".";
    return text;
  }

  /// Names of the fusions that the fused plan has made, in order.
  std::vector<std::string> fusions() const {
    std::vector<std::string> names;
    for (const Decision& decision : decisions_of(*fused_.plan, mask_))
      if (decision.reason.empty() &&
          std::find(names.begin(), names.end(), decision.fusion) == names.end())
        names.push_back(decision.fusion);
    return names;
  }

  std::string culprit(Replay& forward, Replay& reference) {
    for (const std::string& name : fusions()) {
      const Planned without = plan_of(pipeline_.description(training_, /*fuse=*/true, {name}));
      if (compare(without, forward, reference).text.empty())
        return " Without fusion \"" + name + "\" they agree.";
    }
    return " Leaving out one fusion does not mend it.";
  }

  static std::string places(const Program& program, const Step& step) {
    std::string text;
    for (const Part& part : step.covers)
      text += (text.empty() ? "" : ", ") + program.description().ops[part.op].label +
              (part.is_backward ? " backward" : "");
    return text;
  }

  /// " (gradients given: 0, 1; asked for: x)"; empty without backward.
  std::string mask_text() const {
    const Plan& plan = *unfused_.plan;
    if (!plan.needs_backward) return "";
    std::string given, requested;
    for (size_t i = 0; i < grads_.size(); ++i)
      if (grads_[i].defined()) given += (given.empty() ? "" : ", ") + std::to_string(i);
    for (size_t i = 0; i < mask_.requested.size(); ++i)
      if (mask_.requested[i])
        requested += (requested.empty() ? "" : ", ") + plan.types[index_of(argument(plan, i))].name;
    return " (gradients given of outputs " + given + "; asked for of " + requested + ")";
  }

  const Pipeline& pipeline_;
  const bool training_;
  VerifyReport& report_;
  const Tensors inputs_, params_, state_;
  const Planned fused_, unfused_;
  Generators generators_;
  /// By output; undefined if none is given.
  Tensors grads_;
  BackwardMask mask_;
  std::vector<Part> wider_;
  /// Why each fusion of a user was refused at a place; empty if a mask's plan has made it.
  std::map<std::pair<std::string, std::string>, std::string> of_users_;
};

}  // namespace

VerifyReport verify(const Pipeline& pipeline, at::TensorList inputs, at::TensorList params,
                    bool training, int masks, const StateOf& state_of) {
  VerifyReport report;
  Verification as_given(pipeline, inputs, params, training, state_of, report);
  as_given.run(masks);
  if (!report.passed || inputs.empty() || inputs[0].requires_grad() ||
      !c10::GradMode::is_enabled() || !c10::isFloatingType(inputs[0].scalar_type()))
    return report;
  Tensors with_gradient = inputs.vec();  // calls after other modules request it
  with_gradient[0] = inputs[0].detach().set_requires_grad(true);
  std::optional<Verification> behind_others;
  try {
    behind_others.emplace(pipeline, with_gradient, params, training, state_of, report);
  } catch (const c10::ValueError& refusal) {  // such as a budget that is too small
    report.text += std::string(" Without a gradient of x: a call that asks for it is refused: ") +
                   refusal.what_without_backtrace();
    return report;
  }
  if (behind_others->allows(as_given.wider())) {
    behind_others->run(masks);
  } else {
    report.text += " Without a gradient of x: a call that asks for it refuses these sizes.";
  }
  return report;
}

}  // namespace tandem
