// Plans: programs without branches over values, one for forward, and one for each set of gradients
// that backward gets and returns.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/cache.h"
#include "core/step.h"
#include "kernel_ops/quantize/delayed.h"
#include "quantization/formats/format.h"

namespace tandem {

/// A candidate for a fusion, which was made or refused.
struct Decision {
  /// Texts such as "linear_bias" and "1.basic_linear, 1.bias".
  std::string fusion, place;
  /// The refusal; empty where the fusion was made.
  std::string reason;
  /// The picture of the fusion, copied because the fusion may be unregistered before `explain`
  /// runs.
  std::string picture;
  /// Whether a user registered the fusion.
  bool is_users = false;
};

/// The gradients that backward gets, by output, and the gradients that it returns, of inputs and
/// then of parameters.
struct BackwardMask {
  c10::SmallVector<bool, 32> given;
  std::vector<bool> requested;
  bool operator==(const BackwardMask&) const = default;
};

/// The backward program of one mask.
struct BackwardPlan {
  Steps steps;
  /// Gradients of inputs, then of parameters; Value::none where one is undefined or not requested.
  Values gradients;
  std::vector<Decision> decisions;
};

/// The backward programs of a plan, one for each mask that has occurred.
using BackwardPlans = Cache<BackwardMask, BackwardPlan>;

/// An argument that forward overwrites at the caller's request.
struct Overwritten {
  /// The index of the argument among the inputs.
  size_t input;
  /// The value that the argument holds after forward.
  Value result;
  /// Whether `result` requires grad.
  bool requires_grad;
  /// The index of the forward step that writes the argument.
  size_t step;
  /// Other values that later steps or backward read, and outputs.
  Values read_later;
};

/// A weight whose codes are cached. The plan's workspaces hold the tensors that `parts` selects,
/// then the stamp.
struct CachedWeight {
  Value weight = Value::none;
  const Quantizer* quantizer = nullptr;
  GroupMask parts = {};
  /// The parameters that are joined to the weight, or the weight itself.
  Values pieces = {};
};

/// A module that keeps state of the recipe: the number of used slots of each direction, and the
/// function that updates their scales.
struct StateHolder {
  struct Direction {
    int64_t slots = 0;
    /// Whether a step uses a slot.
    bool is_used = false;
    const ScaleUpdate* update = nullptr;
  };
  Direction forward, backward;
};

/// The decision of a memory budget on a value that backward reads.
struct KeptChoice {
  enum Kind : uint8_t {
    kept,
    /// A backward step re-emits the value.
    written_again,
    /// Backward recomputes the value with a step of forward.
    run_again,
  };
  Value value = Value::none;
  Kind kind = kept;
  /// The name of the backward step that writes the value; empty where it is kept.
  std::string by = {};
  /// Bytes of the value per row of the main operand, which keeping the value costs.
  double bytes = 0;
  /// Bytes that backward moves, and operations that it computes, in addition per row. Where one
  /// step writes several values, the first value has the cost of the step.
  double added_bytes = 0, added_flops = 0;
};

/// How a plan keeps within a memory budget, or what it keeps where the user has ops recomputed.
struct KeptWithin {
  /// Bytes per row of the main operand: the budget, nullopt without one, and the kept values.
  std::optional<double> budget = std::nullopt;
  double kept = 0;
  std::vector<KeptChoice> choices;
};

/// The parts of a plan that the passes of the planner change in turn.
struct PlanParts {
  std::vector<Type> types;
  /// The main operand, then the extra inputs.
  Values inputs;
  Values params;
  /// Row codes and column codes of each input and parameter that is passed in codes; Value::none
  /// where absent.
  Values argument_codes;
  /// The recipe's state: the number of the region, then the state of each module and direction.
  Values state;
  /// Tensors of the caller that steps mutate.
  Values buffers;
  /// The workspaces of all `cached_weights`, in order.
  Values workspaces;
  std::vector<CachedWeight> cached_weights;
  /// The modules that hold slots of `state`.
  std::vector<StateHolder> state_holders;
  /// The main output, then the extra outputs that the caller gets.
  Values outputs;
  Steps forward;
  /// Every step that any mask may need, in a valid order. Only joint fusions are made.
  Steps backward;
  /// The gradient of each output; Value::none where the output needs none.
  Values output_gradients;
  /// The gradients of inputs, then of parameters; Value::none where a gradient is not required.
  Values gradients;
  bool runs_user_code = false;
  /// The label of an op without a composite form, or empty.
  std::string no_composite;
};

struct Plan : PlanParts {
  /// A number that no other plan of the process has.
  const uint64_t number = next_number();

  /// For each value the index of its first tensor, or its index among opaque values or shapes.
  std::vector<uint32_t> slot_of;
  size_t tensor_slots = 0, opaques = 0, shapes = 0;

  /// Whether each output is floating and depends on a tensor that requires grad.
  std::vector<bool> output_requires_grad;

  /// The values of any format that forward keeps for backward, in the order of their first use
  /// there.
  Values kept;
  /// For each value its index in `kept`, or -1.
  std::vector<int32_t> kept_at;
  /// For each gradient whether backward only adds it to a buffer.
  std::vector<bool> absorbed;
  std::vector<Decision> decisions;
  /// Set where the plan has a memory budget or an op to recompute, and values to keep.
  std::optional<KeptWithin> within;

  bool is_quantized = false;
  bool mutates_buffers_in_forward = false, mutates_buffers_in_backward = false;
  bool uses_state_in_backward = false;
  bool needs_backward = false;
  std::vector<Overwritten> overwritten;

  /// The fusions that the backward pass applies to the program of each mask.
  std::shared_ptr<const struct BackwardFusions> backward_fusions;
  BackwardPlans backward_plans;
  /// Ops that are defined in Python, held because steps refer to their names.
  std::vector<std::shared_ptr<const OpKind>> kinds;

  static uint64_t next_number() {
    static std::atomic<uint64_t> next{0};
    return ++next;
  }
};

}  // namespace tandem
