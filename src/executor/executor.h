// Runs the steps of a plan: the library's own below autograd, and steps that run user code as the
// body of a torch.autograd.Function runs.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "core/call.h"
#include "core/plan.h"

namespace tandem {

/// During its lifetime torch.autocast casts nothing: steps have their dtypes from the plan. Forward
/// and backward run under it.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

/// The number of in-place writes of a tensor; 0 for an inference tensor, which does not count them.
int64_t version_of(const at::Tensor& tensor);

/// Runs one step. Afterwards its demanded values exist and its dead values do not. Throws
/// c10::Error if the step did not write a value.
void run_step(Frame& frame, const Step& step);

/// Runs all steps of a forward program, without autocast.
void run_forward(Frame& frame, const Plan& plan);

}  // namespace tandem
