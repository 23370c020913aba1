// Runs the steps of a plan: below autograd for our own, as a torch.autograd.Function's body for those that run user code.
#pragma once

#include "core/call.h"
#include "core/plan.h"

namespace tandem {

/// Runs one step, after which its demanded values are there and its dead ones are not. Throws c10::Error where a value was not written.
void run_step(Frame& frame, const Step& step);

/// Runs all steps of a forward program.
void run_forward(Frame& frame, const Plan& plan);

}  // namespace tandem
