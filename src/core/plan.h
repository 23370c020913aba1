// Plans: straight-line programs over values, for forward and, per set of gradients that exist and
// are asked for, for backward.
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

/// What happened to a candidate for a fusion: made, or refused with a reason.
struct Decision {
  /// "linear_bias", "1.basic_linear, 1.bias".
  std::string fusion, place;
  /// Empty where it was made.
  std::string reason;
  /// Of the fusion, which may be gone when somebody looks.
  std::string picture;
  /// Whether a user has registered the fusion.
  bool is_users = false;
};

/// Which gradients are given to backward (by output) and which are asked for (inputs, then
/// parameters).
struct BackwardMask {
  c10::SmallVector<bool, 32> given;
  std::vector<bool> asked;
  bool operator==(const BackwardMask&) const = default;
};

/// The backward program of one mask.
struct BackwardPlan {
  Steps steps;
  /// Of inputs, then parameters; Value::none where the gradient is undefined or not asked for.
  Values gradients;
  std::vector<Decision> decisions;
};

/// The backward programs of a plan, one per mask that has occurred.
using BackwardPlans = Cache<BackwardMask, BackwardPlan>;

/// An argument that forward overwrites, as the caller asked.
struct Overwritten {
  /// Place in the inputs.
  size_t input;
  /// What it holds afterwards.
  Value result;
  /// Of that.
  bool requires_grad;
  /// Of forward: the one that writes it.
  size_t step;
  /// Other values that later steps or backward read, and outputs.
  Values read_later;
};

/// A weight whose codes are cached: its tensors stand among the plan's workspaces, those that
/// `parts` says, then the stamp.
struct CachedWeight {
  Value weight = Value::none;
  const Quantizer* quantizer = nullptr;
  GroupMask parts = {};
  /// The parameters that it is joined of; itself where it is one.
  Values pieces = {};
};

/// A module that keeps state of the recipe: how many slots of each direction are used, and by which
/// update.
struct StateHolder {
  struct Direction {
    int64_t slots = 0;
    /// By any step.
    bool is_used = false;
    const ScaleUpdate* update = nullptr;
  };
  Direction forward, backward;
};

/// What a memory budget has made of a value that backward reads.
struct KeptChoice {
  enum Kind : uint8_t {
    kept,
    /// By a backward step that reads what it needs for it anyway.
    written_again,
    /// By a step of forward that backward runs again.
    run_again,
  };
  Value value = Value::none;
  Kind kind = kept;
  /// The name of the step that makes it in backward; empty where it is kept.
  std::string by = {};
  /// Per row of the main input, all of them: what it takes where it is kept, and saves where it is
  /// not.
  double bytes = 0;
  /// What backward moves and computes more. Of a step that makes several values again, the first
  /// has what the step costs by itself.
  double added_bytes = 0, added_flops = 0;
};

/// How a plan keeps within a memory budget, or what it keeps where ops are to be computed again.
struct KeptWithin {
  /// Per row of the main input: the budget, nullopt without one, and what is kept.
  std::optional<double> budget = std::nullopt;
  double kept = 0;
  std::vector<KeptChoice> choices;
};

struct Plan {
  /// No other plan ever has it.
  const uint64_t number = next_number();

  std::vector<Type> types;
  /// By value: its first tensor slot, or its place among opaque values or shapes.
  std::vector<uint32_t> slot_of;
  size_t tensor_slots = 0, opaques = 0, shapes = 0;

  /// The main input, then extra inputs.
  Values inputs;
  Values params;
  /// Of inputs and parameters that come in codes: of rows, of columns, Value::none where absent.
  Values argument_codes;
  /// Of the recipe: the region's number, then that of each module and direction.
  Values state;
  /// Of the caller, which steps mutate.
  Values buffers;
  /// Those of each of `cached_weights`.
  Values workspaces;
  std::vector<CachedWeight> cached_weights;
  /// Modules in whose `state` slots are used.
  std::vector<StateHolder> state_holders;
  /// The main output, then public extra outputs.
  Values outputs;
  /// Floating, and behind something that requires grad.
  std::vector<bool> output_requires_grad;

  Steps forward;
  /// Every part that any mask may need, unfused but for joint fusions, in a valid order.
  Steps backward;
  /// What forward leaves for backward, of every format, in order of first use there.
  Values kept;
  /// By value: its place in `kept`, or -1.
  std::vector<int32_t> kept_at;
  /// The value of each output's gradient.
  Values output_gradients;
  /// Of inputs, then parameters; Value::none where none is required.
  Values gradients;
  /// By gradient: whether it goes into a buffer, and nowhere else.
  std::vector<bool> absorbed;
  std::vector<Decision> decisions;
  /// Where there is a memory budget, or an op to compute again, and anything to keep.
  std::optional<KeptWithin> within;

  bool is_quantized = false;
  bool mutates_buffers_in_forward = false, mutates_buffers_in_backward = false;
  bool uses_state_in_backward = false;
  bool runs_user_code = false;
  bool needs_backward = false;
  std::vector<Overwritten> overwritten;
  /// The label of an op without a composite form, or empty.
  std::string no_composite;

  /// What the backward pass applies to each mask's program.
  std::shared_ptr<const struct BackwardFusions> backward_fusions;
  BackwardPlans backward_plans;
  /// Of ops that are written in Python: steps refer to their texts.
  std::vector<std::shared_ptr<const OpKind>> kinds;

  static uint64_t next_number() {
    static std::atomic<uint64_t> next{0};
    return ++next;
  }
};

}  // namespace tandem
