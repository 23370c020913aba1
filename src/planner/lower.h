// Lowering: from a list of ops to steps over values, with every cast, sum and seed explicit.
#pragma once

#include <vector>

#include "planner/draft.h"
#include "planner/key.h"

namespace tandem {

/// Lowers the ops of `description` for the tensors in `key`, inputs before parameters. Products
/// still read unquantized values (quantize_points.h). `joint`: groups of ops in which a gradient
/// that passes an op unchanged gets a value of its own, because a joint fusion may write another
/// one.
///
/// Throws: c10::ValueError if the number of tensors does not fit, c10::TypeError if a dtype cannot
///         be converted, and c10::NotImplementedError if a required gradient does not exist.
Draft lower(const Description& description, const PlanKey& key,
            const std::vector<OpGroup>& joint = {});

/// What lower_forward passes to lower_backward.
struct ForwardFlow {
  /// An event of forward that backward has to undo; the list is in forward's order.
  struct Event {
    enum Kind { op, cast, round_gradient, join } kind;
    /// The index of the op; npos for a cast of an operand.
    size_t index = 0;
    Flow from = {}, to = {};
    /// The values that a join reads.
    std::vector<Flow> parts = {};
  };
  std::vector<Event> events;
  std::vector<Flow> inputs, params, outputs;
  size_t edges = 0;
};

/// Whether the op is passed over, so that y is x: dropout in evaluation or with p = 0.
bool is_passed_over(const Description& description, const OpNode& op);

ForwardFlow lower_forward(const Description& description, const PlanKey& key, Draft& draft);
void lower_backward(const Description& description, const ForwardFlow& flow,
                    const std::vector<OpGroup>& joint, Draft& draft);

}  // namespace tandem
