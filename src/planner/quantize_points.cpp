#include "planner/quantize_points.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "kernel_ops/checks.h"
#include "kernel_ops/format.h"
#include "kernel_ops/kernel_op.h"
#include "kernel_ops/weights.h"
#include "planner/glue.h"

namespace tandem {

namespace {

class QuantizePoints {
 public:
  QuantizePoints(const Description& description, const PlanKey& key, Draft& draft)
      : description_(description), traced_(key.call().traced), draft_(draft) {}

  void run() {
    is_stateful_ = history_length(*description_.recipe) != 0;
    is_calibrating_ = is_calibrating(*description_.recipe);
    override_ = backward_override(*description_.recipe);
    if (is_stateful_) add_state();
    for (const Step& step : draft_.forward) {
      if (step.kind == StepKind::cast) uncast_[step.writes[0]] = step.reads[0];
      if (step.kind == StepKind::join &&
          std::ranges::all_of(step.reads, [&](Value piece) { return is_plain_param(piece); }))
        joined_[step.writes[0]] = step.reads;
    }
    if (caches_weights()) note_weights();
    rewrite(draft_.forward, forward_, Role::input);
    rewrite(draft_.backward, backward_, Role::grad_output);
  }

 private:
  /// A tensor in codes of both directions, which are one value where the format has one for both.
  struct Representations {
    std::array<Value, 2> codes;
    Value of(Direction direction) const { return codes[static_cast<size_t>(direction)]; }
  };
  /// Where a recipe with a state keeps that of a tensor: two that quantize one tensor have a
  /// history each.
  struct Slot {
    /// npos: the recipe has no state.
    size_t op = npos;
    /// Among those of its direction; of an op with groups, those of the group.
    size_t role = 0, group = 0;
    bool is_backward = false;
    auto operator<=>(const Slot&) const = default;
  };
  struct Key {
    Value value;
    const Quantizer* quantizer;
    Slot slot = {};
    auto operator<=>(const Key&) const = default;
  };
  /// What is known in codes, in one direction of the plan.
  using Codes = std::map<Key, Representations>;

  /// Codes of weights depend on scales that the next step changes, while backward may still want
  /// these: they are kept, not cached.
  bool caches_weights() const {
    return description_.cache_weights && !is_stateful_ && !is_watched();
  }
  /// Each quantization tells of itself, those of weights in each call.
  bool is_watched() const { return description_.watched != 0 && !is_calibrating_; }

  /// The tensors of all holders, those that no step uses included: who calls knows nothing of
  /// plans.
  void add_state() {
    const auto add = [&](at::ScalarType dtype, std::string name) {
      draft_.state.push_back(
          draft_.add({dtype, Format::plain, Origin::state, Value::none, std::move(name)}));
    };
    add(at::kLong, "region");
    for (const OpNode& op : description_.ops)
      if (op.state && op.state->holder >= draft_.state_holders.size())
        draft_.state_holders.resize(op.state->holder + 1);
    for (size_t holder = 0; holder < draft_.state_holders.size(); ++holder)
      for (const char* direction : {"forward", "backward"})
        for (const ScalingStateTensor& each : kScalingState)
          add(each.dtype, "state " + std::to_string(holder) + "." + direction + "." + each.name);
  }

  Slot slot_of(size_t op, Role role, size_t group = 0) const {
    if (!is_stateful_) return {};
    const bool is_backward = role == Role::grad_output;
    size_t before = 0;
    for (const RoleOf& each : description_.ops[op].kind->def.roles) {
      if (each.role == role) break;
      before += (each.role == Role::grad_output) == is_backward;
    }
    return {op, before, group, is_backward};
  }

  /// `groups`: of how many the slots are, from that of `slot` on; 0: of none.
  StateSlot state_of(const Slot& slot, size_t groups = 0) {
    const OpNode& op = description_.ops[slot.op];
    TORCH_CHECK_VALUE(op.state, op.label, ": expected \"state\", which says where its amaxes go, ",
                      "under a recipe that keeps them, got none. Number the modules that hold it.");
    StateHolder& holder = draft_.state_holders[op.state->holder];
    StateHolder::Direction& direction = slot.is_backward ? holder.backward : holder.forward;
    const auto stride = std::ranges::count_if(op.kind->def.roles, [&](const RoleOf& each) {
      return (each.role == Role::grad_output) == slot.is_backward;
    });
    const kernel_ops::SlotRange slots{
        static_cast<int64_t>(slot.role +
                             (slot.is_backward ? op.state->backward : op.state->forward)) +
            static_cast<int64_t>(slot.group) * stride,
        std::max<int64_t>(stride, 1), static_cast<int64_t>(groups)};
    const int64_t last = slots.first + slots.stride * std::max<int64_t>(slots.count - 1, 0);
    direction.slots = std::max(direction.slots, last + 1);
    direction.is_used = true;
    direction.update = &update_of(*description_.recipe, slot.is_backward);
    StateSlot found{{}, draft_.state[0], slots, direction.update};
    const size_t first = scaling_state_place(op.state->holder, slot.is_backward);
    std::copy_n(draft_.state.begin() + static_cast<std::ptrdiff_t>(first), found.state.size(),
                found.state.begin());
    return found;
  }

  void rewrite(Steps& steps, Codes& codes, Role rounded) {
    is_backward_ = &steps == &draft_.backward;
    Steps before = std::exchange(steps, {});
    for (Step& step : before) {
      switch (step.kind) {
        case StepKind::op:
          quantize_reads(step, steps, codes);
          steps.push_back(std::move(step));
          std::ranges::move(std::exchange(records_, {}), std::back_inserter(steps));
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

  /// What the step multiplies becomes codes, or the step is told how to make them by itself.
  void quantize_reads(Step& step, Steps& steps, Codes& codes) {
    gradient_ = Value::none;
    for_each_factor(step, [&](size_t read, const OpStep::ContractOf& contract, size_t) {
      if (contract.role == Role::grad_output) gradient_ = step.reads[read];
    });
    if (is_backward_ && override_ != BackwardOverride::none) {
      if (override_ == BackwardOverride::dequantized) read_decoded(step, steps, codes);
      return;
    }
    const Part part = step.covers[0];
    const OpNode& op = description_.ops[part.op];
    const auto& contracts =
        (part.is_backward ? op.kind->backward : op.kind->forward)[part.nth].contracts;
    const Values plain = step.reads;
    std::vector<size_t> coded, uncoded;
    bool is_any_by_group = false;
    for_each_factor(step, [&](size_t read, const OpStep::ContractOf& contract, size_t slot) {
      Value& value = step.reads[read];
      const Quantizer* quantizer = asked(contract.role, part.op, slot);
      if (quantizer != nullptr && is_numbers_of(value, contract, *quantizer)) quantizer = nullptr;
      if (!is_by_group(contract, part.op)) {
        if (quantizer != nullptr)
          value = codes_of(value, contract, part.op, *quantizer, steps, codes, slot);
        if (contract.role == Role::grad_output) gradient_ = value;
      } else if (quantizer != nullptr) {
        step.quantizers.resize(contracts.size());
        quantize_by_group(step, read, contract, static_cast<size_t>(&contract - contracts.data()),
                          *quantizer, steps);
        is_any_by_group = true;
      }
      (quantizer != nullptr ? coded : uncoded).push_back(read);
    });
    check_rotation(step);
    if (coded.empty() || uncoded.empty()) return;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_any_by_group, op.label, ": expected quantizers for both operands of a product of ",
        "groups, or for none, got one for ", draft_.name(plain[coded[0]]), " and none for ",
        draft_.name(plain[uncoded[0]]), ". Have qfactory return None for both.");
    for (const size_t read : coded)
      if (const Value codes_read = step.reads[read]; is_codes(codes_read))
        step.reads[read] = decoded(codes_read, draft_.dtype(plain[read]), steps);
  }

  /// The step quantizes what it reads by itself, in groups: it is told how, and given what that
  /// takes.
  void quantize_by_group(Step& step, size_t read, const OpStep::ContractOf& contract, size_t place,
                         const Quantizer& quantizer, Steps& steps) {
    const size_t op = step.covers[0].op;
    const Value itself = step.reads[read], plain = uncast(itself);
    if (is_calibrating_ && !kernel_ops::kArithmetic.has(draft_.dtype(itself))) return;
    check_dtype(itself, op);
    const bool is_weight = contract.role == Role::weight;
    if (is_weight && !is_calibrating_) step.reads[read] = plain;
    ByGroup& own = step.quantizers[place];
    own = {&quantizer, /*is_multiplied=*/!is_calibrating_};
    if (const Value given = given_by_group(op, contract.role, plain, quantizer, steps);
        exists(given)) {
      own.given = step.reads.size();
      step.read_names.push_back("given");
      step.reads.push_back(given);
    }
    const bool is_of_direction = is_backward_ == (contract.role == Role::grad_output);
    if (!is_stateful_ || !is_of_direction) return;
    const std::string name = draft_.name(plain) + ".amaxes";
    const Origin origin = is_backward_ ? Origin::intermediate : Origin::result;
    const Value amaxes = draft_.add({at::kFloat, Format::plain, origin, Value::none, name});
    if (is_weight) {
      steps.push_back(matrix_amaxes_step(plain, amaxes));
    } else {
      own.amaxes = step.writes.size();
      step.write_names.push_back("amaxes");
      step.writes.push_back(amaxes);
    }
    records_.push_back(record_amax_step(state_of(slot_of(op, contract.role), groups_of(op)), amaxes,
                                        draft_.grad_mode));
  }

  size_t groups_of(size_t op) const {
    const OpNode& node = description_.ops[op];
    return node.kind->def.groups(node.options.get());
  }

  /// What the quantizer of an operand in groups takes: the same in all steps of the op.
  Value given_by_group(size_t op, Role role, Value plain, const Quantizer& quantizer,
                       Steps& steps) {
    const auto [known, is_new] = given_by_group_.try_emplace({op, role}, Value::none);
    if (!is_new) return known->second;
    if (given_to(quantizer) == Given::scale) {
      known->second = draft_.add(
          {at::kFloat, Format::plain, Origin::result, Value::none, draft_.name(plain) + ".scales"});
      steps.push_back(take_scale_step(state_of(slot_of(op, role), groups_of(op)), known->second));
    } else {
      known->second = seed_of(plain, quantizer, steps);
    }
    return known->second;
  }

  /// The quantizer that the recipe has for an operand; null: none.
  const Quantizer* asked(Role role, size_t op, size_t slot = 0) const {
    const OpNode& node = description_.ops[op];
    return quantizer_of(*description_.recipe, {role, node.kind->def.name, node.label, slot});
  }

  bool is_codes(Value value) const {
    return exists(value) && draft_.types[index_of(value)].format == Format::codes;
  }

  /// Both operands of a product are rotated, or neither is: then the rotation cancels.
  void check_rotation(const Step& step) const {
    struct Operand {
      size_t read;
      bool is_rotated;
    };
    std::vector<Operand> factors;
    const Part part = step.covers[0];
    const OpKind& op = *description_.ops[part.op].kind;
    const auto& contracts = (part.is_backward ? op.backward : op.forward)[part.nth].contracts;
    for_each_factor(step, [&](size_t read, const OpStep::ContractOf& contract, size_t) {
      const Type& type = draft_.types[index_of(step.reads[read])];
      const auto place = static_cast<size_t>(&contract - contracts.data());
      const Quantizer* const by_group =
          place < step.quantizers.size() ? step.quantizers[place].quantizer : nullptr;
      const Quantizer* const quantizer = type.format == Format::codes ? type.quantizer : by_group;
      const Direction along = type.format == Format::codes ? type.direction : contract.along;
      factors.push_back(
          {read, quantizer != nullptr && quantizer->hadamard && along == Direction::column});
    });
    for (const Operand& factor : factors)
      TORCH_CHECK_VALUE(factor.is_rotated == factors[0].is_rotated, step.name,
                        ": expected operands that are both rotated or both not, got ",
                        draft_.name(step.reads[factors[0].read]), " and ",
                        draft_.name(step.reads[factor.read]),
                        ", of which one is. Give with_rht to the ",
                        "quantizers of inputs and gradients, and to no weight's.");
  }

  /// The numbers of codes, in a dtype, as a value of their own.
  Value decoded(Value codes, at::ScalarType dtype, Steps& steps) {
    const auto [known, is_new] = decoded_.try_emplace({codes, dtype, is_backward_}, Value::none);
    if (is_new) {
      known->second = draft_.add(
          {dtype, Format::plain, Origin::result, Value::none, draft_.name(codes) + " decoded"});
      steps.push_back(dequantize_step(codes, known->second));
    }
    return known->second;
  }

  /// Of what forward has quantized backward reads the numbers of its codes; gradients are as they
  /// are.
  void read_decoded(Step& step, Steps& steps, Codes& codes) {
    const size_t op = step.covers[0].op;
    for_each_factor(step, [&](size_t read, const OpStep::ContractOf& contract, size_t slot) {
      const Quantizer* const quantizer = asked(contract.role, op, slot);
      if (contract.role == Role::grad_output || quantizer == nullptr) return;
      if (is_numbers_of(step.reads[read], contract, *quantizer)) return;
      TORCH_CHECK_NOT_IMPLEMENTED(
          !is_by_group(contract, op), description_.ops[op].label,
          ": expected backward_override=None or \"high_precision\", as groups of rows are ",
          "quantized where they are multiplied and leave no codes, got \"dequantized\". Use one ",
          "of them, or call the op outside of the tandem.autocast region.");
      Value& value = step.reads[read];
      OpStep::ContractOf forward = contract;
      forward.along = Direction::row;
      const Value made = codes_of(value, forward, op, *quantizer, steps, codes, slot);
      if (is_codes(made)) value = decoded(made, draft_.dtype(value), steps);
    });
  }

  bool is_by_group(const OpStep::ContractOf& contract, size_t op) const {
    return contract.by_group != nullptr && contract.by_group(description_.ops[op].options.get());
  }

  void check_dtype(Value plain, size_t op) const {
    TORCH_CHECK_NOT_IMPLEMENTED(
        kernel_ops::kArithmetic.has(draft_.dtype(plain)), description_.ops[op].label,
        ": expected float32, bfloat16 or float16 under a recipe, got ",
        dtype_name(draft_.dtype(plain)), ". Leave the autocast region or convert the module.");
  }

  /// Visits the reads that a step of an op multiplies: place among the reads, contract, place in a
  /// list operand.
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

  /// Whether the operand is a weight of parts in the quantizer's format that have but numbers as a
  /// whole: these are what codes stand for already.
  bool is_numbers_of(Value value, const OpStep::ContractOf& contract,
                     const Quantizer& quantizer) const {
    if (contract.role != Role::weight) return false;
    const auto known = draft_.codes_of_params.find(uncast(value));
    return known != draft_.codes_of_params.end() &&
           std::ranges::none_of(known->second.codes, exists) &&
           known->second.quantizer->format == quantizer.format;
  }

  /// In which directions each weight will be read: its workspace holds these, made in one pass.
  void note_weights() {
    for (const Steps* steps : {&draft_.forward, &draft_.backward}) {
      if (steps == &draft_.backward && override_ != BackwardOverride::none) continue;
      for (const Step& step : *steps)
        if (step.kind == StepKind::op)
          for_each_factor(step, [&](size_t read, const OpStep::ContractOf& contract, size_t) {
            if (contract.role == Role::weight && has_workspace(uncast(step.reads[read])) &&
                !is_by_group(contract, step.covers[0].op) &&
                !draft_.codes_of_params.contains(uncast(step.reads[read])))
              weight_parts_.try_emplace(uncast(step.reads[read]), GroupMask{false, false, true})
                  .first->second[static_cast<size_t>(contract.along)] = true;
          });
    }
  }

  bool is_plain_param(Value value) const {
    const Type& type = draft_.types[index_of(value)];
    return type.origin == Origin::param && type.format == Format::plain;
  }

  /// Workspaces belong to tensors of the caller, or to what several of these are joined to.
  bool has_workspace(Value value) const {
    return draft_.types[index_of(value)].origin == Origin::param ||
           draft_.codes_of_params.contains(value) || joined_.contains(value);
  }

  /// A weight is quantized as it is: a copy in autocast's dtype would round twice.
  Value uncast(Value weight) const {
    const auto original = uncast_.find(weight);
    return original == uncast_.end() ? weight : original->second;
  }

  /// What a product reads instead of plain numbers: these themselves where calibrating.
  Value codes_of(Value plain, const OpStep::ContractOf& contract, size_t op,
                 const Quantizer& quantizer, Steps& steps, Codes& codes, size_t group) {
    if (is_calibrating_ && !kernel_ops::kArithmetic.has(draft_.dtype(plain))) return plain;
    check_dtype(plain, op);
    const Value itself = plain;
    if (contract.role == Role::weight) {
      plain = uncast(plain);
      if (const auto known = draft_.codes_of_params.find(plain);
          known != draft_.codes_of_params.end()) {
        const Value given = known->second.codes[static_cast<size_t>(contract.along)];
        // It is in the recipe's format: what its owner has made of it counts, whatever kind of
        // scale the recipe would choose. Columns that are rotated have products with such alone.
        const Quantizer& own = *known->second.quantizer;
        const bool is_rotated = contract.along == Direction::column && own.hadamard;
        if (exists(given) && own.format == quantizer.format && !is_rotated)
          return is_calibrating_ ? itself : given;
      } else if (caches_weights() && has_workspace(plain))
        return weight_codes(plain, quantizer, steps, codes).of(contract.along);
    }
    const Representations numbers = quantized(
        {plain, &quantizer, slot_of(op, contract.role, group)}, op, contract.role, steps, codes);
    return is_calibrating_ ? itself : numbers.of(contract.along);
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

  /// What a quantizer that rounds by chance is given. Seeds of gradients are drawn in forward too,
  /// in the order of the ops: a graph that is retained has the same gradients twice.
  Value seed_of(Value plain, const Quantizer& quantizer, Steps& steps) {
    if (given_to(quantizer) != Given::seed) return Value::none;
    const Value seed = draft_.add(
        {at::kLong, Format::plain, Origin::result, Value::none, draft_.name(plain) + ".seed"});
    const Step draw = seed_step(draft_.inputs[0], seed);
    if (is_backward_) {
      draft_.forward.insert(draft_.forward.begin(), draw);
    } else {
      steps.push_back(draw);
    }
    return seed;
  }

  /// `op` and `role`: of whom the codes are first asked for.
  Representations quantized(const Key& key, size_t op, Role role, Steps& steps, Codes& codes) {
    for (const Codes* known : {&forward_, &codes})
      for (const Slot& slot : {key.slot, Slot()})
        if (const auto found = known->find({key.value, key.quantizer, slot}); found != known->end())
          return found->second;
    const Value plain = key.value;
    const Quantizer& quantizer = *key.quantizer;
    const Representations result =
        is_calibrating_ ? Representations{{plain, plain}} : add_codes(plain, quantizer);
    const Value amax = draft_.add(
        {at::kFloat, Format::plain, Origin::result, Value::none, draft_.name(plain) + ".amax"});
    const auto [row, column] = result.codes;
    const GroupValues group{is_calibrating_ ? Value::none : row,
                            column == row ? Value::none : column, amax};
    const auto quantize = [&](Value given) {
      steps.push_back(is_watched() ? watched_quantize_step(plain, given, group, quantizer,
                                                           {description_.watched, op, role})
                                   : quantize_step(plain, given, group, quantizer));
    };
    if (key.slot.op == npos) {
      quantize(seed_of(plain, quantizer, steps));
    } else {
      const StateSlot slot = state_of(key.slot);
      const Value scale = draft_.add(
          {at::kFloat, Format::plain, Origin::result, Value::none, draft_.name(plain) + ".scale"});
      steps.push_back(take_scale_step(slot, scale));
      quantize(scale);
      steps.push_back(record_amax_step(slot, amax, draft_.grad_mode));
    }
    return codes[key] = result;
  }

  /// Codes of a weight in its workspace. Backward asks for them again rather than keep what the
  /// next forward may overwrite.
  Representations weight_codes(Value weight, const Quantizer& quantizer, Steps& steps,
                               Codes& codes) {
    // Behind a gradient there is none where that is not given, which another product may be.
    const bool is_behind = is_backward_ && traced_;
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
    steps.push_back(
        is_behind
            ? weight_codes_step(pieces, workspace, gradient_, codes_to_write, quantizer)
            : refresh_weight_step(pieces, workspace, codes_to_write, quantizer, is_backward_));
    return codes[{weight, &quantizer}] = result;
  }

  /// The tensors of a workspace in their order; Value::none where it has none.
  Values add_workspace(const CachedWeight& cached) {
    Values workspace;
    const at::ScalarType scale = cached.quantizer->format->layout.dtype;
    const at::ScalarType dtypes[kernel_ops::workspace_size] = {
        at::kByte, scale, at::kFloat, at::kByte, scale, at::kFloat, at::kFloat, at::kLong};
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

  /// The decoded numbers are a value of their own, and their codes are there for products that
  /// follow.
  void round(const Step& step, Steps& steps, Codes& codes, Role role) {
    const Quantizer* const chosen = asked(role, step.asked_by);
    if (chosen == nullptr || (is_backward_ && override_ != BackwardOverride::none)) {
      steps.push_back(rename_step(step.reads[0], step.writes[0]));
      return;
    }
    const Quantizer& quantizer = *chosen;
    const Slot slot = slot_of(step.asked_by, role);
    const Representations numbers =
        quantized({step.reads[0], &quantizer, slot}, step.asked_by, role, steps, codes);
    if (is_calibrating_) {
      steps.push_back(rename_step(step.reads[0], step.writes[0]));
      return;
    }
    steps.push_back(dequantize_step(numbers.of(Direction::row), step.writes[0]));
    codes[{step.writes[0], &quantizer}] = numbers;  // of no slot: whoever multiplies by them
  }

  static void take_over(Value from, Value to, Codes& codes) {
    std::vector<std::pair<Key, Representations>> known;
    for (auto it = codes.lower_bound({from, nullptr}); it != codes.end() && it->first.value == from;
         ++it)
      known.push_back(*it);
    for (auto& [key, representations] : known) {
      key.value = to;
      codes[key] = representations;
    }
  }

  const Description& description_;
  const bool traced_;
  Draft& draft_;
  /// Of the step that is rewritten, if it multiplies by one.
  Value gradient_ = Value::none;
  Codes forward_, backward_;
  std::map<Value, Value> uncast_;
  std::map<Value, Values> joined_;  // to what of
  std::map<Value, GroupMask> weight_parts_;
  std::map<std::pair<Value, const Quantizer*>, Values> workspaces_;
  std::map<std::tuple<Value, at::ScalarType, bool>, Value> decoded_ = {};
  std::map<std::pair<size_t, Role>, Value> given_by_group_ = {};
  /// What keeps the amaxes that the step under way writes.
  Steps records_ = {};
  BackwardOverride override_ = BackwardOverride::none;
  bool is_backward_ = false, is_stateful_ = false, is_calibrating_ = false;
};

}  // namespace

void put_quantize_points(const Description& description, const PlanKey& key, Draft& draft) {
  if (description.recipe) QuantizePoints(description, key, draft).run();
}

}  // namespace tandem
