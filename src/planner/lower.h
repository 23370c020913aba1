// Lowering: from a list of ops to steps over values, with nothing implicit left.
#pragma once

#include <vector>

#include "planner/draft.h"
#include "planner/key.h"

namespace tandem {

/// Lowers the ops of `description` for tensors as `key` has them: inputs first, then parameters.
/// The recipe's products read plain numbers still (quantize_points.h). `joint`: ops whose gradients
/// have values of their own where they pass an op as they are, as a fusion of both directions may
/// write others.
///
/// Throws: c10::ValueError where the number of tensors does not fit, c10::TypeError where a dtype
///         does not convert, and
/// c10::NotImplementedError where a gradient is asked for that nobody has.
Draft lower(const Description& description, const PlanKey& key,
            const std::vector<OpGroup>& joint = {});

/// What forward leaves to the lowering of backward.
struct ForwardFlow {
  /// What backward must be derived from, in the order in which forward happened.
  struct Event {
    enum Kind { op, cast, round_gradient, join } kind;
    /// Of the op, or npos for a cast of an operand.
    size_t index = 0;
    Flow from = {}, to = {};
    /// What was joined.
    std::vector<Flow> parts = {};
  };
  std::vector<Event> events;
  std::vector<Flow> inputs, params, outputs;
  size_t edges = 0;
};

/// An op that is passed over in evaluation: y is x.
bool is_passed_over(const Description& description, const OpNode& op);

ForwardFlow lower_forward(const Description& description, const PlanKey& key, Draft& draft);
void lower_backward(const Description& description, const ForwardFlow& flow,
                    const std::vector<OpGroup>& joint, Draft& draft);

}  // namespace tandem
