// Runs the steps of a plan: below autograd for our own, as a torch.autograd.Function's body for
// those that run user code.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "core/call.h"
#include "core/plan.h"

namespace tandem {

/// Steps have their dtypes from the plan: while one of these lives, torch.autocast casts nothing.
/// Forward and backward run under it.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

/// Counts the in-place writes of a tensor, as far as it counts them: 0 for an inference tensor.
int64_t version_of(const at::Tensor& tensor);

/// Runs one step, after which its demanded values are there and its dead ones are not. Throws
/// c10::Error where a value was not written.
void run_step(Frame& frame, const Step& step);

/// Runs all steps of a forward program, without autocast.
void run_forward(Frame& frame, const Plan& plan);

}  // namespace tandem
