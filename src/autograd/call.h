// A call of a program: its path, key, plan and run.
#pragma once

#include "autograd/run.h"
#include "planner/program.h"
#include "tandem/export.h"

namespace tandem {

/// Whether a call may run device kernels directly on its tensors: dense tensors, and thread-local
/// state without anything that must see operations. Otherwise functorch, tensor subclasses, modes
/// or tracing must see the call, and it goes through the dispatcher op.
TANDEM_API bool is_direct(const Arguments& arguments);

/// Autocast's dtype for this type of device in this thread; Undefined outside of autocast.
at::ScalarType autocast_dtype_of(at::DeviceType device);

/// The key of a call, for `Program::plan_for`. `sizes`: which sizes the description needs; they are
/// added only if gradients are recorded.
PlanKey key_of(const Arguments& arguments, bool grad_mode, bool traced,
               SizesInKey sizes = SizesInKey::none);
/// The key of a call of this program in this thread's grad mode.
PlanKey key_for(const Program& program, const Arguments& arguments, bool traced);

/// Sets a function that is called with each state tensor that backward of a call will write, before
/// the dispatched call is recorded. Later calls write these tensors too, while autograd expects
/// every tensor that backward reads at the version that forward saw. The function lets a tracer
/// read them as they are when backward runs.
TANDEM_API void set_state_listener(void (*told)(const at::Tensor& state));

/// Calls the dispatcher op tandem::pipeline, as every call does that is not direct.
Outputs call_op(const Arguments& arguments, const std::string& description);

}  // namespace tandem
