// Plans: straight-line programs over values, for forward and, per set of gradients that exist and are asked for, for backward.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/cache.h"
#include "core/step.h"
#include "kernel_ops/delayed.h"
#include "kernel_ops/format.h"

namespace tandem {

/// What happened to a candidate for a fusion: made, or refused with a reason.
struct Decision {
  std::string fusion, place;  ///< "linear_bias", "1.basic_linear, 1.bias"
  std::string reason;         ///< empty where it was made
  std::string picture;        ///< of the fusion, which may be gone when somebody looks
};

/// Which gradients are given to backward (by output) and which are asked for (inputs, then parameters).
struct BackwardMask {
  c10::SmallVector<bool, 32> given;
  std::vector<bool> asked;
  bool operator==(const BackwardMask&) const = default;
};

/// The backward program of one mask.
struct BackwardPlan {
  Steps steps;
  Values
      gradients;  ///< of inputs, then parameters; Value::none where the gradient is undefined or not asked for
  std::vector<Decision> decisions;
};

/// The backward programs of a plan, one per mask that has occurred.
using BackwardPlans = Cache<BackwardMask, BackwardPlan>;

/// How a value gets from forward to backward.
struct Kept {
  Value value;
  uint8_t part = 0;  ///< of a value in codes
  bool is_output = false;
};

/// An argument that forward overwrites, as the caller asked.
struct Overwritten {
  size_t input;        ///< place in the inputs
  Value result;        ///< what it holds afterwards
  bool requires_grad;  ///< of that
  size_t step;         ///< of forward: the one that writes it
  Values read_later;   ///< other values that later steps or backward read, and outputs
};

/// A weight whose codes are cached: its tensors stand among the plan's workspaces, those that `parts` says, then the stamp.
struct CachedWeight {
  Value weight = Value::none;
  const Quantizer* quantizer = nullptr;
  GroupMask parts = {};
};

/// A module that keeps state of the recipe: how many slots of each direction are used, and by which update.
struct StateHolder {
  struct Direction {
    int64_t slots = 0;
    bool is_used = false;  ///< by any step
    const ScaleUpdate* update = nullptr;
  };
  Direction forward, backward;
};

struct Plan {
  const uint64_t number = next_number();  ///< no other plan ever has it

  std::vector<Type> types;
  /// By value: its first tensor slot, or its place among opaque values or shapes.
  std::vector<uint32_t> slot_of;
  size_t tensor_slots = 0, opaques = 0, shapes = 0;

  Values inputs;  ///< the main input, then extra inputs
  Values params;
  Values
      param_codes;  ///< of parameters that come in codes: of rows, of columns, Value::none where absent
  Values state;    ///< of the recipe: the region's number, then that of each module and direction
  Values buffers;  ///< of the caller, which steps mutate
  Values workspaces;  ///< those of each of `cached_weights`
  std::vector<CachedWeight> cached_weights;
  std::vector<StateHolder> state_holders;  ///< modules in whose `state` slots are used
  Values outputs;                          ///< the main output, then public extra outputs
  std::vector<bool> output_requires_grad;  ///< floating, and behind something that requires grad

  Steps forward;
  Steps
      backward;  ///< every part that any mask may need, unfused but for joint fusions, in a valid order
  std::vector<Kept> kept;        ///< distinct tensors, in order of first use in backward
  std::vector<int32_t> kept_at;  ///< by value: its first place in `kept`, or -1
  Values kept_opaque;            ///< opaque values and shapes that backward reads
  Values output_gradients;       ///< the value of each output's gradient
  Values gradients;              ///< of inputs, then parameters; Value::none where none is required
  std::vector<bool> absorbed;    ///< by gradient: whether it goes into a buffer, and nowhere else
  std::vector<Decision> decisions;

  bool is_quantized = false;
  bool mutates_buffers_in_forward = false, mutates_buffers_in_backward = false;
  bool uses_state_in_backward = false;
  bool runs_user_code = false;
  bool needs_backward = false;
  std::vector<Overwritten> overwritten;
  std::string no_composite;  ///< the label of an op without a composite form, or empty

  std::shared_ptr<const struct BackwardFusions>
      backward_fusions;  ///< what the backward pass applies to each mask's program
  BackwardPlans backward_plans;
  /// Of ops that are written in Python: steps refer to their texts.
  std::vector<std::shared_ptr<const OpKind>> kinds;

  static uint64_t next_number() {
    static std::atomic<uint64_t> next{0};
    return ++next;
  }
};

}  // namespace tandem
