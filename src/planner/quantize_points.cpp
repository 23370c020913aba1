#include "planner/quantize_points.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <map>

#include "kernel_ops/checks.h"
#include "kernel_ops/kernel_op.h"
#include "kernel_ops/weights.h"
#include "planner/glue.h"

namespace tandem {

namespace {

class QuantizePoints {
 public:
  QuantizePoints(const Description& description, Draft& draft)
      : description_(description), draft_(draft) {}

  void run() {
    for (const Step& step : draft_.forward)
      if (step.kind == StepKind::cast) uncast_[step.writes[0]] = step.reads[0];
    if (description_.cache_weights) note_weights();
    rewrite(draft_.forward, forward_, Role::input);
    rewrite(draft_.backward, backward_, Role::grad_output);
  }

 private:
  /// A tensor in codes of both directions, which are one value where the format has one for both.
  struct Representations {
    std::array<Value, 2> codes;
    Value of(Direction direction) const { return codes[static_cast<size_t>(direction)]; }
  };
  /// What is known in codes, in one direction of the plan.
  using Codes = std::map<std::pair<Value, const Quantizer*>, Representations>;

  void rewrite(Steps& steps, Codes& codes, Role rounded) {
    is_backward_ = &steps == &draft_.backward;
    Steps before = std::exchange(steps, {});
    for (Step& step : before) {
      switch (step.kind) {
        case StepKind::op:
          for_each_factor(step, [&](size_t read, const OpStep::ContractOf& contract, size_t slot) {
            step.reads[read] =
                codes_of(step.reads[read], contract, step.covers[0].op, slot, steps, codes);
          });
          steps.push_back(std::move(step));
          break;
        case StepKind::round:
          round(step, steps, codes, rounded);
          break;
        case StepKind::rename:
          take_over(step.reads[0], step.writes[0], codes);
          steps.push_back(std::move(step));
          break;
        default:
          steps.push_back(std::move(step));
      }
    }
  }

  /// Visits the reads that a step of an op multiplies: place among the reads, contract, place in a list operand.
  template <typename Visit>
  void for_each_factor(const Step& step, Visit&& visit) const {
    const Part part = step.covers[0];
    const OperandTable& operands = draft_.operands[part.op];
    const OpKind& op = operands.kind();
    const OpStep& resolved = part.is_backward ? op.backward[part.nth] : op.forward[part.nth];
    if (resolved.contracts.empty()) return;
    for_each_read(resolved, operands, [&](size_t read, OperandRef ref, size_t element) {
      const auto contract =
          std::ranges::find(resolved.contracts, ref, &OpStep::ContractOf::operand);
      if (contract != resolved.contracts.end() && exists(step.reads[read]))
        visit(read, *contract, element);
    });
  }

  /// In which directions each weight will be read: its workspace holds these, made in one pass.
  void note_weights() {
    for (const Steps* steps : {&draft_.forward, &draft_.backward})
      for (const Step& step : *steps)
        if (step.kind == StepKind::op)
          for_each_factor(step, [&](size_t read, const OpStep::ContractOf& contract, size_t) {
            if (contract.role == Role::weight)
              weight_parts_.try_emplace(uncast(step.reads[read]), GroupMask{false, false, true})
                  .first->second[static_cast<size_t>(contract.along)] = true;
          });
  }

  /// A weight is quantized as it is: a copy in autocast's dtype would round twice.
  Value uncast(Value weight) const {
    const auto original = uncast_.find(weight);
    return original == uncast_.end() ? weight : original->second;
  }

  Value codes_of(Value plain, const OpStep::ContractOf& contract, size_t op, size_t slot,
                 Steps& steps, Codes& codes) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        kernel_ops::kArithmetic.has(draft_.dtype(plain)), description_.ops[op].label,
        ": expected float32, bfloat16 or float16 under a recipe, got ",
        dtype_name(draft_.dtype(plain)), ". Leave the autocast region or convert the module.");
    const Quantizer& quantizer = quantizer_of(*description_.recipe, {contract.role, op, slot});
    if (contract.role == Role::weight) {
      plain = uncast(plain);
      if (description_.cache_weights)
        return weight_codes(plain, quantizer, steps, codes).of(contract.along);
    }
    return quantized(plain, quantizer, steps, codes).of(contract.along);
  }

  Representations add_codes(Value plain, const Quantizer& quantizer) {
    const auto add = [&](Direction direction, const char* which) {
      Type type{draft_.dtype(plain), Format::codes, Origin::result, Value::none,
                draft_.name(plain) + " in " + std::string(format_name(quantizer)) + which};
      type.quantizer = &quantizer;
      type.direction = direction;
      return draft_.add(std::move(type));
    };
    if (serves_both_directions(quantizer)) {
      const Value both = add(Direction::row, "");
      return {{both, both}};
    }
    const Value row = add(Direction::row, " by rows");
    return {{row, add(Direction::column, " by columns")}};
  }

  Representations quantized(Value plain, const Quantizer& quantizer, Steps& steps, Codes& codes) {
    for (const Codes* known : {&forward_, &codes})
      if (const auto found = known->find({plain, &quantizer}); found != known->end())
        return found->second;
    const Representations result = add_codes(plain, quantizer);
    const Value amax = draft_.add(
        {at::kFloat, Format::plain, Origin::result, Value::none, draft_.name(plain) + ".amax"});
    const auto [row, column] = result.codes;
    steps.push_back(
        quantize_step(plain, {row, column == row ? Value::none : column, amax}, quantizer));
    return codes[{plain, &quantizer}] = result;
  }

  /// Codes of a weight in its workspace. Backward asks for them again rather than keep what the next forward may overwrite.
  Representations weight_codes(Value weight, const Quantizer& quantizer, Steps& steps,
                               Codes& codes) {
    if (const auto known = codes.find({weight, &quantizer}); known != codes.end())
      return known->second;
    const GroupMask parts = written_of(quantizer, weight_parts_.at(weight));
    auto& workspace = workspaces_[{weight, &quantizer}];
    if (workspace.empty()) workspace = add_workspace({weight, &quantizer, parts});
    Representations result = add_codes(weight, quantizer);
    const auto [row, column] = result.codes;
    const auto written = [&](size_t i, Value value) { return parts[i] ? value : Value::none; };
    steps.push_back(refresh_weight_step(weight, workspace, {written(0, row), written(1, column)},
                                        quantizer, is_backward_));
    return codes[{weight, &quantizer}] = result;
  }

  /// The tensors of a workspace in their order; Value::none where it has none.
  Values add_workspace(const CachedWeight& cached) {
    Values workspace;
    const at::ScalarType scale = cached.quantizer->format->layout.dtype;
    const at::ScalarType dtypes[kernel_ops::workspace_size] = {at::kByte, scale,      at::kByte,
                                                               scale,     at::kFloat, at::kLong};
    for (size_t part = 0; part < kernel_ops::workspace_size; ++part) {
      const bool is_there = kernel_ops::has_part(*cached.quantizer, cached.parts, part);
      workspace.push_back(
          is_there
              ? draft_.add({dtypes[part], Format::plain, Origin::workspace, Value::none,
                            draft_.name(cached.weight) + "." + kernel_ops::kWorkspaceNames[part]})
              : Value::none);
      if (is_there) draft_.workspaces.push_back(workspace.back());
    }
    draft_.cached_weights.push_back(cached);
    return workspace;
  }

  /// The decoded numbers are a value of their own, and their codes are there for products that follow.
  void round(const Step& step, Steps& steps, Codes& codes, Role role) {
    const Quantizer& quantizer = quantizer_of(*description_.recipe, {role});
    const Representations numbers = quantized(step.reads[0], quantizer, steps, codes);
    steps.push_back(dequantize_step(numbers.of(Direction::row), step.writes[0]));
    codes[{step.writes[0], &quantizer}] = numbers;
  }

  static void take_over(Value from, Value to, Codes& codes) {
    const auto first = codes.lower_bound({from, nullptr});
    std::vector<std::pair<const Quantizer*, Representations>> known;
    for (auto it = first; it != codes.end() && it->first.first == from; ++it)
      known.emplace_back(it->first.second, it->second);
    for (const auto& [quantizer, representations] : known) codes[{to, quantizer}] = representations;
  }

  const Description& description_;
  Draft& draft_;
  Codes forward_, backward_;
  std::map<Value, Value> uncast_;
  std::map<Value, GroupMask> weight_parts_;
  std::map<std::pair<Value, const Quantizer*>, Values> workspaces_;
  bool is_backward_ = false;
};

}  // namespace

void put_quantize_points(const Description& description, Draft& draft) {
  if (description.recipe) QuantizePoints(description, draft).run();
}

}  // namespace tandem
