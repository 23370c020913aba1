#include "kernel_ops/elementwise/collective.h"

#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"

namespace tandem::kernel_ops {

namespace {

/// Calls a collective boxed: the type of `group_name` in its schema is str or any object, depending
/// on torch's version, and a boxed call takes a text for both.
template <typename... Args>
at::Tensor call(const char* name, const Args&... args) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK_NOT_IMPLEMENTED(op, "collective: expected a torch that has ", name,
                              ", got one that is built without torch.distributed. Use another.");
  std::vector<c10::IValue> stack{args...};
  op->callBoxed(&stack);
  return stack.back().toTensor();
}

void check_rows(const char* op, const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() != 0, op, ": expected x with at least 1 dimension, along which ranks ",
                    "share rows, got a scalar. Pass x.reshape({1}) if one row is meant.");
}

}  // namespace

at::Tensor start_all_gather(const at::Tensor& x, const ProcessGroup& group) {
  check_rows("all_gather", x);
  return call("_c10d_functional::all_gather_into_tensor", x.contiguous(), group.size, group.name);
}

at::Tensor start_reduce_scatter(const at::Tensor& x, const ProcessGroup& group) {
  check_rows("reduce_scatter", x);
  TORCH_CHECK_VALUE(x.sym_size(0) % group.size == 0,
                    "reduce_scatter: expected a first dimension that the ", group.size,
                    " ranks of the group share evenly, got x of shape ", x.sym_sizes(),
                    ". Pad the sequence.");
  return call("_c10d_functional::reduce_scatter_tensor", x.contiguous(), std::string("sum"),
              group.size, group.name);
}

at::Tensor start_all_reduce(const at::Tensor& x, const ProcessGroup& group) {
  return call("_c10d_functional::all_reduce", x.contiguous(), std::string("sum"), group.name);
}

at::Tensor start_all_reduce_max(const at::Tensor& x, const ProcessGroup& group) {
  return call("_c10d_functional::all_reduce", x.contiguous(), std::string("max"), group.name);
}

at::Tensor wait(const at::Tensor& started) {
  return call("_c10d_functional::wait_tensor", started);
}

Specs<1> AllGatherAgain::shapes(const Args& args) {
  check_rows("all_gather", args.x);
  ResultSpec all = like(args.x);
  all.sizes[0] = all.sizes[0] * args.size;
  return {all};
}

Results<1> AllGatherAgain::reference(const Args& args) {
  return {start_all_gather(args.x, {std::string(args.group), args.size})};
}

at::Tensor start_all_gather_again(const at::Tensor& x, const at::Tensor& behind,
                                  const ProcessGroup& group) {
  return dispatch<AllGatherAgain>({x, behind, group.size, group.name})[0];
}

TORCH_LIBRARY_FRAGMENT(tandem, library) { register_kernel_op<AllGatherAgain>(library, {}); }

}  // namespace tandem::kernel_ops
