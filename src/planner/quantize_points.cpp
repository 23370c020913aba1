#include "planner/quantize_points.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "kernel_ops/checks.h"
#include "kernel_ops/kernel_op.h"
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
    rewrite(draft_.forward, forward_, Role::input);
    rewrite(draft_.backward, backward_, Role::grad_output);
  }

 private:
  /// What is known in codes, in one direction of the plan.
  using Codes = std::map<std::pair<Value, Format>, Value>;

  void rewrite(Steps& steps, Codes& codes, Role rounded) {
    is_backward_ = &steps == &draft_.backward;
    Steps before = std::exchange(steps, {});
    for (Step& step : before) {
      switch (step.kind) {
        case StepKind::op:
          quantize_operands(step, steps, codes);
          steps.push_back(std::move(step));
          break;
        case StepKind::round:
          round(step, steps, codes, rounded);
          break;
        case StepKind::rename:
          for (const Format format : {Format::fp8_e4m3, Format::fp8_e5m2})
            if (const auto known = codes.find({step.reads[0], format}); known != codes.end())
              codes[{step.writes[0], format}] = known->second;
          steps.push_back(std::move(step));
          break;
        default:
          steps.push_back(std::move(step));
      }
    }
  }

  void quantize_operands(Step& step, Steps& steps, Codes& codes) {
    const Part part = step.covers[0];
    const OperandTable& operands = draft_.operands[part.op];
    const OpKind& op = operands.kind();
    if (op.roles.empty()) return;
    const OpStep& resolved = part.is_backward ? op.backward[part.nth] : op.forward[part.nth];
    for_each_read(resolved, operands, [&](size_t read, OperandRef ref, size_t) {
      const auto role = std::ranges::find(op.roles, ref, &OpKind::RoleOfOperand::operand);
      if (role == op.roles.end() || !exists(step.reads[read])) return;
      step.reads[read] = codes_of(step.reads[read], role->role, part.op, steps, codes);
    });
  }

  Value codes_of(Value plain, Role role, size_t op, Steps& steps, Codes& codes) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        kernel_ops::kArithmetic.has(draft_.dtype(plain)), description_.ops[op].label,
        ": expected float32, bfloat16 or float16 under a recipe, got ",
        dtype_name(draft_.dtype(plain)), ". Leave the autocast region or convert the module.");
    if (role ==
        Role::
            weight) {  // from the parameter as it is: a copy in autocast's dtype would round twice
      if (const auto original = uncast_.find(plain); original != uncast_.end())
        plain = original->second;
      if (description_.cache_weights) return weight_codes(plain, steps, codes);
    }
    return quantized(plain, role, steps, codes);
  }

  Value add_codes(Value plain, const QuantizePoint& point) {
    return draft_.add({draft_.dtype(plain), point.format, Origin::result, Value::none,
                       draft_.name(plain) + " in " + name_of(point.format)});
  }

  Value quantized(Value plain, Role role, Steps& steps, Codes& codes) {
    const QuantizePoint point = quantize_point(*description_.recipe, role);
    for (const Codes* known : {&forward_, &codes})
      if (const auto found = known->find({plain, point.format}); found != known->end())
        return found->second;
    const Value result = add_codes(plain, point);
    steps.push_back(quantize_step(plain, result, point));
    return codes[{plain, point.format}] = result;
  }

  /// Codes of a weight in its workspace. Backward asks for them again rather than keep what the next forward may overwrite.
  Value weight_codes(Value weight, Steps& steps, Codes& codes) {
    const QuantizePoint point = quantize_point(*description_.recipe, Role::weight);
    if (const auto known = codes.find({weight, point.format}); known != codes.end())
      return known->second;
    auto& workspace = workspaces_[weight];
    if (workspace.empty()) {
      draft_.workspace_weights.push_back(weight);
      for (const char* part : {"codes", "dequant_scale", "amax", "stamp"}) {
        const at::ScalarType dtype = workspace.empty()       ? at::kByte
                                     : workspace.size() == 3 ? at::kLong
                                                             : at::kFloat;
        workspace.push_back(draft_.add({dtype, Format::plain, Origin::workspace, Value::none,
                                        draft_.name(weight) + "." + part}));
        draft_.workspaces.push_back(workspace.back());
      }
    }
    const Value result = add_codes(weight, point);
    steps.push_back(refresh_weight_step(weight, workspace, result, point, is_backward_));
    return codes[{weight, point.format}] = result;
  }

  /// The decoded numbers are a value of their own, and their codes are there for products that follow.
  void round(const Step& step, Steps& steps, Codes& codes, Role role) {
    const Value numbers = quantized(step.reads[0], role, steps, codes);
    steps.push_back(dequantize_step(numbers, step.writes[0]));
    codes[{step.writes[0], draft_.types[index_of(numbers)].format}] = numbers;
  }

  const Description& description_;
  Draft& draft_;
  Codes forward_, backward_;
  std::map<Value, Value> uncast_;
  std::map<Value, Values> workspaces_;
  bool is_backward_ = false;
};

}  // namespace

void put_quantize_points(const Description& description, Draft& draft) {
  if (description.recipe) QuantizePoints(description, draft).run();
}

}  // namespace tandem
