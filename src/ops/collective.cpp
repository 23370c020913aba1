// Collectives over a process group, along the first dimension. In each direction one step starts
// the collective and another one waits for it, so that other steps can run between them.
#include "kernel_ops/elementwise/collective.h"

#include "core/call.h"
#include "core/op_def.h"

namespace tandem::ops {

namespace {

using kernel_ops::ProcessGroup;

/// Starts a collective on the step's first read.
template <at::Tensor (*kCollective)(const at::Tensor&, const ProcessGroup&)>
void start(Call& call) {
  call.out(0, kCollective(call.in(0), call.options<ProcessGroup>()));
}

void start_again(Call& call) {
  enum Read { x, behind };
  call.out(0, kernel_ops::start_all_gather_again(call.in(x), call.in(behind),
                                                 call.options<ProcessGroup>()));
}

/// The result is a value of its own, because its gradient differs from the operand's gradient.
void pass_on(Call& call) { call.out(0, call.in(0)); }

void wait(Call& call) { call.out(0, kernel_ops::wait(call.in(0))); }

const Signature kGroupSignature{
    ProcessGroup{},
    {{"group", &ProcessGroup::name, required(), "the process group, as torch.distributed names it"},
     {"size", &ProcessGroup::size, required(between(1, 1 << 20)), "the ranks in it"}}};

std::vector<StepDef> forward(Run run) {
  return {
      {.name = "start", .reads = {"x"}, .writes = {"started"}, .phase = Phase::start, .run = run},
      {.name = "wait", .reads = {"started"}, .writes = {"y"}, .phase = Phase::wait, .run = wait}};
}

std::vector<StepDef> backward(Run run) {
  return {{.name = "grad_start",
           .reads = {"grad_y"},
           .writes = {"gradient_started"},
           .phase = Phase::start,
           .run = run},
          {.name = "grad_wait",
           .reads = {"gradient_started"},
           .writes = {"grad_x"},
           .phase = Phase::wait,
           .run = wait}};
}

std::vector<StepDef> gather_backward() {
  std::vector<StepDef> steps{{.name = "again_start",
                              .reads = {"x"},
                              .writes = {"started"},
                              .phase = Phase::start,
                              .writes_again = true,
                              .run = start_again},
                             {.name = "again_wait",
                              .reads = {"started"},
                              .writes = {"y"},
                              .phase = Phase::wait,
                              .writes_again = true,
                              .run = wait}};
  for (StepDef& step : backward(start<kernel_ops::start_reduce_scatter>))
    steps.push_back(std::move(step));
  return steps;
}

}  // namespace

/// y = the rows of all ranks. The gradient of x is this rank's rows of the sum of all ranks'
/// gradients. Backward gathers y once more instead of keeping it.
///
/// Shapes:  x [rows, ...] -> y [size * rows, ...].
const OpDef kAllGather{
    .name = "all_gather",
    .formula = "y = concatenate(x of all ranks)",
    .signature = kGroupSignature,
    .results = {{"y"}, {"started"}},
    .temporaries = {"gradient_started"},
    .dtype = DtypeRule::promote,
    .forward = forward(start<kernel_ops::start_all_gather>),
    .backward = gather_backward(),
    .reemits = {"started", "y"},
    .has_composite = false,
};

/// y = this rank's rows of the sum of x over ranks. The gradient of x is the rows of all ranks'
/// gradients.
///
/// Shapes:  x [rows, ...] -> y [rows / size, ...].
/// Throws:  c10::ValueError unless the size of the group divides rows.
const OpDef kReduceScatter{
    .name = "reduce_scatter",
    .formula = "y = the rank's rows of sum over ranks of x",
    .signature = kGroupSignature,
    .results = {{"y"}, {"started"}},
    .temporaries = {"gradient_started"},
    .dtype = DtypeRule::promote,
    .forward = forward(start<kernel_ops::start_reduce_scatter>),
    .backward = backward(start<kernel_ops::start_all_gather>),
    .has_composite = false,
};

/// y = the sum of x over ranks, which all ranks then hold. The gradient of x is the gradient of y,
/// which all ranks hold too.
///
/// Shapes:  x any -> y like x.
const OpDef kAllReduce{
    .name = "all_reduce",
    .formula = "y = sum over ranks of x",
    .signature = kGroupSignature,
    .results = {{"y"}, {"started"}},
    .dtype = DtypeRule::promote,
    .same_gradients = {{"grad_x", "grad_y"}},
    .forward = forward(start<kernel_ops::start_all_reduce>),
    .has_composite = false,
};

/// y = x, which all ranks hold. The gradient of x is the sum of the gradients over ranks.
///
/// Shapes:  x any -> y like x.
const OpDef kReduceGradient{
    .name = "reduce_gradient",
    .formula = "y = x; grad_x = sum over ranks of grad_y",
    .signature = kGroupSignature,
    .temporaries = {"gradient_started"},
    .dtype = DtypeRule::promote,
    .forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}, .run = pass_on}},
    .backward = backward(start<kernel_ops::start_all_reduce>),
    .views_input = true,
    .has_composite = false,
};

TANDEM_REGISTER_OP(kAllGather);
TANDEM_REGISTER_OP(kReduceScatter);
TANDEM_REGISTER_OP(kAllReduce);
TANDEM_REGISTER_OP(kReduceGradient);

}  // namespace tandem::ops
