#include "planner/quantize_points.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <tuple>

#include "kernel_ops/framework/kernel_op.h"
#include "kernel_ops/weights/weights.h"
#include "ops/glue.h"
#include "planner/glue.h"
#include "planner/quantize_groups.h"
#include "quantization/formats/format.h"

namespace tandem {

namespace {

class QuantizePoints {
 public:
  QuantizePoints(const Description& description, const PlanKey& key, Draft& draft)
      : scope_(description, draft),
        groups_(scope_),
        traced_(key.call().traced),
        override_(backward_override(*description.recipe)) {}

  void run() {
    for (const Step& step : scope_.draft.forward)
      if (step.kind == StepKind::join &&
          std::ranges::all_of(step.reads, [&](Value piece) { return is_plain_param(piece); }))
        joined_[step.writes[0]] = step.reads;
    if (caches_weights()) note_weights();
    rewrite(scope_.draft.forward, forward_, Role::input);
    hand_over_outputs();
    rewrite(scope_.draft.backward, backward_, Role::grad_output);
  }

 private:
  /// The codes of a tensor in both directions; one value if the format serves both.
  struct Representations {
    std::array<Value, 2> codes;
    Value of(Direction direction) const { return codes[static_cast<size_t>(direction)]; }
  };
  using Slot = QuantizeScope::Slot;
  struct Key {
    Value value;
    const Quantizer* quantizer;
    Slot slot = {};
    auto operator<=>(const Key&) const = default;
  };
  /// The codes that exist in one direction of the plan.
  using CodesByKey = std::map<Key, Representations>;

  /// Codes of weights are not cached if they depend on scales that the next step changes while
  /// backward may still read the old codes, or if each call reports what quantizing loses.
  bool caches_weights() const {
    return scope_.description.cache_weights && !scope_.is_stateful() && !scope_.is_watched();
  }

  void rewrite(Steps& steps, CodesByKey& codes, Role rounded) {
    scope_.is_backward = &steps == &scope_.draft.backward;
    Steps before = std::exchange(steps, {});
    for (Step& step : before) {
      switch (step.kind) {
        case StepKind::op:
          quantize_reads(step, steps, codes);
          steps.push_back(std::move(step));
          break;
        case StepKind::round:
          round(step, steps, codes, rounded);
          break;
        case StepKind::rename:
          take_over(step.reads[0], step.writes[0], codes);
          if (const auto known = rounded_.find(step.reads[0]); known != rounded_.end())
            rounded_[step.writes[0]] = known->second;
          steps.push_back(std::move(step));
          break;
        default:
          steps.push_back(std::move(step));
      }
    }
    std::ranges::move(groups_.take_records(), std::back_inserter(steps));
  }

  /// An output that a point of rounding has written is returned in codes. This adds a value,
  /// because other readers may need the dequantized values.
  void hand_over_outputs() {
    Draft& draft = scope_.draft;
    for (Value& output : draft.outputs) {
      const auto known = rounded_.find(output);
      if (known == rounded_.end()) continue;
      const auto [row, column] = known->second.codes;
      output = add_handed_over(draft, row, column == row ? Value::none : column, output);
    }
  }

  /// Makes the operands of a product codes, or tells the step how to quantize them by itself.
  void quantize_reads(Step& step, Steps& steps, CodesByKey& codes) {
    gradient_ = Value::none;
    for_each_factor(step, [&](size_t read, const OpStep::ContractOf& contract, size_t) {
      if (contract.role == Role::grad_output) gradient_ = step.reads[read];
    });
    if (scope_.is_backward && override_ != BackwardOverride::none) {
      if (override_ == BackwardOverride::dequantized) read_decoded(step, steps, codes);
      return;
    }
    const Part part = step.covers[0];
    const OpNode& op = scope_.description.ops[part.op];
    const Values plain = step.reads;
    std::vector<size_t> coded, uncoded;
    bool is_any_by_group = false;
    for_each_factor(step, [&](size_t read, const OpStep::ContractOf& contract, size_t slot) {
      Value& value = step.reads[read];
      note_original(value, contract, op);
      const Quantizer* quantizer = requested(contract.role, part.op, slot);
      if (quantizer != nullptr && is_numbers_of(value, contract, *quantizer)) quantizer = nullptr;
      if (!is_by_group(contract, part.op)) {
        if (quantizer != nullptr)
          value = codes_of(value, contract, part.op, *quantizer, steps, codes, slot);
        if (contract.role == Role::grad_output) gradient_ = value;
      } else if (quantizer != nullptr) {
        groups_.quantize(step, read, contract, *quantizer, steps);
        is_any_by_group = true;
      }
      (quantizer != nullptr ? coded : uncoded).push_back(read);
    });
    check_rotation(step);
    if (coded.empty() || uncoded.empty()) return;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_any_by_group, op.label, ": expected quantizers for both operands of a product of ",
        "groups, or for none, got one for ", scope_.draft.name(plain[coded[0]]), " and none for ",
        scope_.draft.name(plain[uncoded[0]]), ". Have qfactory return None for both.");
    for (const size_t read : coded)
      if (const Value codes_read = step.reads[read]; is_codes(codes_read))
        step.reads[read] = decoded(codes_read, scope_.draft.dtype(plain[read]), steps);
  }

  /// Notes a value that backward shall quantize from its unquantized numbers, and the source of its
  /// cast.
  void note_original(Value value, const OpStep::ContractOf& contract, const OpNode& op) {
    if (!scope_.is_backward || contract.keeps_numbers == nullptr ||
        !contract.keeps_numbers(op.options.get()))
      return;
    scope_.draft.quantized_again.push_back(value);
    scope_.draft.quantized_again.push_back(scope_.uncast(value));
  }

  /// The recipe's quantizer for an operand; nullptr: none.
  const Quantizer* requested(Role role, size_t op, size_t slot = 0) const {
    const OpNode& node = scope_.description.ops[op];
    return quantizer_of(*scope_.description.recipe, {role, node.kind->def.name, node.label, slot});
  }

  bool is_codes(Value value) const {
    return exists(value) && scope_.draft.types[index_of(value)].format == Format::codes;
  }

  /// Checks that both operands of a product are rotated or neither is: then the rotation cancels.
  void check_rotation(const Step& step) const {
    std::optional<std::pair<size_t, bool>> first;  // a read, and whether it is rotated
    const auto& contracts = scope_.contracts_of(step);
    for_each_factor(step, [&](size_t read, const OpStep::ContractOf& contract, size_t) {
      const Type& type = scope_.draft.types[index_of(step.reads[read])];
      const auto place = static_cast<size_t>(&contract - contracts.data());
      const Quantizer* const by_group =
          place < step.quantizers.size() ? step.quantizers[place].quantizer : nullptr;
      const Quantizer* const quantizer = type.format == Format::codes ? type.quantizer : by_group;
      const Direction along = type.format == Format::codes ? type.direction : contract.along;
      const bool is_rotated =
          quantizer != nullptr && quantizer->hadamard && along == Direction::column;
      if (!first) first = {read, is_rotated};
      TORCH_CHECK_VALUE(is_rotated == first->second, step.name,
                        ": expected operands that are both rotated or both not, got ",
                        scope_.draft.name(step.reads[first->first]), " and ",
                        scope_.draft.name(step.reads[read]),
                        ", of which one is. Give with_rht to the ",
                        "quantizers of inputs and gradients, and to no weight's.");
    });
  }

  /// The dequantized values of codes, in a dtype.
  Value decoded(Value codes, at::ScalarType dtype, Steps& steps) {
    const auto [known, is_new] =
        decoded_.try_emplace({codes, dtype, scope_.is_backward}, Value::none);
    if (is_new) {
      known->second = scope_.draft.add_result(dtype, scope_.draft.name(codes) + " decoded");
      steps.push_back(dequantize_step(codes, known->second));
    }
    return known->second;
  }

  /// Makes a backward step read the dequantized values of what forward has quantized. Gradients are
  /// not quantized.
  void read_decoded(Step& step, Steps& steps, CodesByKey& codes) {
    const size_t op = step.covers[0].op;
    for_each_factor(step, [&](size_t read, const OpStep::ContractOf& contract, size_t slot) {
      const Quantizer* const quantizer = requested(contract.role, op, slot);
      if (contract.role == Role::grad_output || quantizer == nullptr) return;
      if (is_numbers_of(step.reads[read], contract, *quantizer)) return;
      if (is_by_group(contract, op))  // the gradient has no codes: the step dequantizes row codes
        return groups_.quantize(step, read, contract, *quantizer, steps);
      Value& value = step.reads[read];
      note_original(value, contract, scope_.description.ops[op]);
      OpStep::ContractOf forward = contract;
      forward.along = Direction::row;
      const Value made = codes_of(value, forward, op, *quantizer, steps, codes, slot);
      if (is_codes(made)) value = decoded(made, scope_.draft.dtype(value), steps);
    });
  }

  bool is_by_group(const OpStep::ContractOf& contract, size_t op) const {
    return contract.by_group != nullptr &&
           contract.by_group(scope_.description.ops[op].options.get());
  }

  /// Visits the operands that a step multiplies: index among the reads, contract, index in a list
  /// operand.
  template <typename Visit>
  void for_each_factor(const Step& step, Visit&& visit) const {
    const Part part = step.covers[0];
    const OperandTable& operands = scope_.draft.operands[part.op];
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

  /// Whether the operand is a joined weight whose parts are in the quantizer's format but whose
  /// codes cannot be joined: its numbers are dequantized values of that format already.
  bool is_numbers_of(Value value, const OpStep::ContractOf& contract,
                     const Quantizer& quantizer) const {
    if (contract.role != Role::weight) return false;
    const auto known = scope_.draft.codes_of_arguments.find(scope_.uncast(value));
    return known != scope_.draft.codes_of_arguments.end() &&
           std::ranges::none_of(known->second.codes, exists) &&
           known->second.quantizer->format == quantizer.format;
  }

  /// Notes in which directions each weight is read: its workspace holds these codes, which one pass
  /// writes.
  void note_weights() {
    for (const Steps* steps : {&scope_.draft.forward, &scope_.draft.backward}) {
      if (steps == &scope_.draft.backward && override_ != BackwardOverride::none) continue;
      for (const Step& step : *steps)
        if (step.kind == StepKind::op)
          for_each_factor(step, [&](size_t read, const OpStep::ContractOf& contract, size_t) {
            if (contract.role == Role::weight && has_workspace(scope_.uncast(step.reads[read])) &&
                !is_by_group(contract, step.covers[0].op) &&
                !scope_.draft.codes_of_arguments.contains(scope_.uncast(step.reads[read])))
              weight_parts_
                  .try_emplace(scope_.uncast(step.reads[read]), GroupMask{false, false, true})
                  .first->second[static_cast<size_t>(contract.along)] = true;
          });
    }
  }

  bool is_plain_param(Value value) const {
    const Type& type = scope_.draft.types[index_of(value)];
    return type.origin == Origin::param && type.format == Format::plain;
  }

  /// Whether a workspace can belong to the value: it is a tensor of the caller, or joined from
  /// several.
  bool has_workspace(Value value) const {
    return scope_.draft.types[index_of(value)].origin == Origin::param ||
           scope_.draft.codes_of_arguments.contains(value) || joined_.contains(value);
  }

  /// What a product reads instead of an unquantized operand; while calibrating, the operand itself.
  Value codes_of(Value plain, const OpStep::ContractOf& contract, size_t op,
                 const Quantizer& quantizer, Steps& steps, CodesByKey& codes, size_t group) {
    if (scope_.is_calibrating() && !kernel_ops::kArithmetic.has(scope_.draft.dtype(plain)))
      return plain;
    scope_.check_dtype(plain, op);
    const Value itself = plain;
    if (const Value given = given_codes(plain, contract, quantizer); exists(given))
      return scope_.is_calibrating() ? itself : given;
    if (contract.role == Role::weight) {
      plain = scope_.uncast(plain);
      if (!scope_.draft.codes_of_arguments.contains(plain) && caches_weights() &&
          has_workspace(plain))
        return weight_codes(plain, quantizer, steps, codes).of(contract.along);
    }
    const Representations numbers =
        quantized({plain, &quantizer, scope_.slot_of(op, contract.role, group)}, op, contract.role,
                  steps, codes, group);
    return scope_.is_calibrating() ? itself : numbers.of(contract.along);
  }

  /// The codes that an argument comes in, Value::none if they do not fit. The element type and
  /// layout must be the recipe's; the kind of scale is the owner's choice. Column codes must also
  /// agree in their rotation, because both operands of a product are rotated or neither is.
  Value given_codes(Value plain, const OpStep::ContractOf& contract,
                    const Quantizer& quantizer) const {
    if (contract.role == Role::grad_output) return Value::none;
    const auto known = scope_.draft.codes_of_arguments.find(scope_.uncast(plain));
    if (known == scope_.draft.codes_of_arguments.end()) return Value::none;
    const Quantizer& own = *known->second.quantizer;
    const bool fits = contract.along == Direction::row || own.hadamard == quantizer.hadamard;
    return own.format == quantizer.format && fits
               ? known->second.codes[static_cast<size_t>(contract.along)]
               : Value::none;
  }

  Representations add_codes(Value plain, const Quantizer& quantizer) {
    const auto add = [&](Direction direction, const char* which) {
      return scope_.draft.add_codes(plain, quantizer, direction, Origin::result, which);
    };
    if (serves_both_directions(quantizer)) {
      const Value both = add(Direction::row, "");
      return {{both, both}};
    }
    const Value row = add(Direction::row, " by rows");
    return {{row, add(Direction::column, " by columns")}};
  }

  /// `op`, `role` and `element` say for which operand the codes are needed first.
  Representations quantized(const Key& key, size_t op, Role role, Steps& steps, CodesByKey& codes,
                            size_t element = 0) {
    for (const CodesByKey* known : {&forward_, &codes})
      for (const Slot& slot : {key.slot, Slot()})
        if (const auto found = known->find({key.value, key.quantizer, slot}); found != known->end())
          return found->second;
    const Value plain = key.value;
    const Quantizer& quantizer = *key.quantizer;
    const Representations result =
        scope_.is_calibrating() ? Representations{{plain, plain}} : add_codes(plain, quantizer);
    const Value amax = scope_.draft.add_result(at::kFloat, scope_.draft.name(plain) + ".amax");
    const auto [row, column] = result.codes;
    const GroupValues group{scope_.is_calibrating() ? Value::none : row,
                            column == row ? Value::none : column, amax};
    const auto quantize = [&](Value given) {
      const bool is_of_group = scope_.description.ops[op].kind->def.groups != nullptr;
      steps.push_back(scope_.is_watched() ? watched_quantize_step(
                                                plain, given, group, quantizer,
                                                {scope_.description.watched, op, role,
                                                 is_of_group ? static_cast<int64_t>(element) : -1})
                                          : quantize_step(plain, given, group, quantizer));
    };
    if (key.slot.op == npos) {
      quantize(scope_.seed_of(plain, quantizer, steps));
    } else {
      const StateSlot slot = scope_.state_of(key.slot);
      const Value scale = scope_.draft.add_result(at::kFloat, scope_.draft.name(plain) + ".scale");
      steps.push_back(take_scale_step(slot, scale));
      quantize(scale);
      steps.push_back(record_amax_step(slot, amax, scope_.draft.grad_mode));
    }
    return codes[key] = result;
  }

  /// Codes of a weight in its workspace. Backward refreshes the workspace instead of keeping codes,
  /// which the next forward may overwrite.
  Representations weight_codes(Value weight, const Quantizer& quantizer, Steps& steps,
                               CodesByKey& codes) {
    // A traced step waits for its product's gradient. If that is undefined it does not run, so each
    // product has its own step.
    const bool is_behind = scope_.is_backward && traced_;
    if (const auto known = codes.find({weight, &quantizer}); known != codes.end() && !is_behind)
      return known->second;
    const GroupMask parts = written_of(quantizer, weight_parts_.at(weight));
    auto& workspace = workspaces_[{weight, &quantizer}];
    const auto joined = joined_.find(weight);
    const Values pieces = joined == joined_.end() ? Values{weight} : joined->second;
    if (workspace.empty()) workspace = add_workspace({weight, &quantizer, parts, pieces});
    Representations result = add_codes(weight, quantizer);
    const auto [row, column] = result.codes;
    const auto written = [&](size_t i, Value value) { return parts[i] ? value : Value::none; };
    const std::array<Value, 2> codes_to_write{written(0, row), written(1, column)};
    steps.push_back(is_behind
                        ? weight_codes_step(pieces, workspace, gradient_, codes_to_write, quantizer)
                        : refresh_weight_step(pieces, workspace, codes_to_write, quantizer,
                                              scope_.is_backward));
    return codes[{weight, &quantizer}] = result;
  }

  /// The tensors of a workspace in their order; Value::none for absent ones.
  Values add_workspace(const CachedWeight& cached) {
    Values workspace;
    for (size_t part = 0; part < kernel_ops::workspace_size; ++part) {
      const bool is_there = kernel_ops::has_part(*cached.quantizer, cached.parts, part);
      workspace.push_back(
          is_there
              ? scope_.draft.add(
                    {part == kernel_ops::stamp_part ? at::kLong
                                                    : dtype_of_part(*cached.quantizer, part),
                     Format::plain, Origin::workspace, Value::none,
                     scope_.draft.name(cached.weight) + "." + kernel_ops::kWorkspaceNames[part]})
              : Value::none);
      if (is_there) scope_.draft.workspaces.push_back(workspace.back());
    }
    scope_.draft.cached_weights.push_back(cached);
    return workspace;
  }

  /// Replaces a point of rounding. The dequantized values are a value of their own, and later
  /// products reuse its codes.
  void round(const Step& step, Steps& steps, CodesByKey& codes, Role role) {
    const Quantizer* const chosen = requested(role, step.asked_by);
    if (chosen == nullptr || (scope_.is_backward && override_ != BackwardOverride::none)) {
      steps.push_back(rename_step(step.reads[0], step.writes[0]));
      return;
    }
    const Quantizer& quantizer = *chosen;
    const Slot slot = scope_.slot_of(step.asked_by, role);
    const Representations numbers =
        quantized({step.reads[0], &quantizer, slot}, step.asked_by, role, steps, codes);
    if (scope_.is_calibrating()) {
      steps.push_back(rename_step(step.reads[0], step.writes[0]));
      return;
    }
    steps.push_back(dequantize_step(numbers.of(Direction::row), step.writes[0]));
    codes[{step.writes[0], &quantizer}] = numbers;  // without a slot: any product may read them
    if (!scope_.is_backward) rounded_[step.writes[0]] = numbers;
  }

  static void take_over(Value from, Value to, CodesByKey& codes) {
    std::vector<std::pair<Key, Representations>> known;
    for (auto it = codes.lower_bound({from, nullptr}); it != codes.end() && it->first.value == from;
         ++it)
      known.push_back(*it);
    for (auto& [key, representations] : known) {
      key.value = to;
      codes[key] = representations;
    }
  }

  QuantizeScope scope_;
  QuantizeGroups groups_;
  const bool traced_;
  const BackwardOverride override_;
  /// The gradient that the current step multiplies by, or none.
  Value gradient_ = Value::none;
  CodesByKey forward_, backward_;
  /// Keyed by the dequantized values that points of rounding have written in forward.
  std::map<Value, Representations> rounded_;
  std::map<Value, Values> joined_;  // keyed by the joined value
  std::map<Value, GroupMask> weight_parts_;
  std::map<std::pair<Value, const Quantizer*>, Values> workspaces_;
  std::map<std::tuple<Value, at::ScalarType, bool>, Value> decoded_ = {};
};

}  // namespace

void put_quantize_points(const Description& description, const PlanKey& key, Draft& draft) {
  if (description.recipe) QuantizePoints(description, key, draft).run();
}

}  // namespace tandem
