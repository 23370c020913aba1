// A call of a program: the path, the key, the plan, the run.
#pragma once

#include "autograd/run.h"
#include "planner/program.h"
#include "tandem/export.h"

namespace tandem {

/// Whether a call may run device kernels on its tensors directly: plain CPU or CUDA tensors and
/// clean thread-local state. Otherwise functorch, tensor subclasses, modes or tracing must see it,
/// and it goes through the dispatcher op.
TANDEM_API bool is_direct(const Arguments& arguments);

/// The key of a call, for `Program::plan_for`. `sizes`: those that the program's description asks
/// for, where gradients are recorded.
PlanKey key_of(const Arguments& arguments, bool grad_mode, bool traced,
               SizesInKey sizes = SizesInKey::none);
/// That of a call of this program in the grad mode of this thread.
PlanKey key_for(const Program& program, const Arguments& arguments, bool traced);

/// Has `told` called with the state that backward of a call will write, before the call is
/// recorded through the dispatcher. The next call writes that state as well, while autograd would
/// hold every tensor that backward reads to the version that forward has seen: who traces may tell
/// its tracer that these are to be read as they are by then.
TANDEM_API void set_told_of_written_state(void (*told)(const at::Tensor& state));

/// Through the dispatcher op tandem::pipeline: what everything that is not direct takes.
Outputs call_op(const Arguments& arguments, const std::string& description);

}  // namespace tandem
