// The basic ops of a linear layer: a product with a weight, and a bias.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "core/call.h"
#include "core/op_def.h"
#include "kernel_ops/elementwise/elementwise.h"
#include "ops/deferred.h"
#include "ops/product.h"
#include "tandem/op_options.h"

namespace tandem::ops {

namespace {

void linear_forward(Call& call) {
  enum Read { x, weight };
  call.out(0, linear_product(call, x, weight, call.out_type(0).dtype));
}

void grad_x(Call& call) {
  enum Read { grad_y, weight };
  call.out(0, linear_grad_x(call, grad_y, weight, call.out_type(0).dtype));
}

void grad_weight(Call& call) {
  enum Read { grad_y, x };
  call.out(0, linear_grad_weight(call, grad_y, x, call.out_type(0).dtype));
}

/// The product itself adds the gradient, so that main_grad is read and written once.
void linear_accumulate(Call& call) {
  enum Read { grad_y, x };
  const auto& options = call.options<BasicLinearOptions>();
  const at::Tensor& main_grad = call.mutated(0);
  const c10::SymInt sizes[] = {call.in(grad_y).sym_size(-1), call.in(x).sym_size(-1)};
  TORCH_CHECK_VALUE(main_grad.sym_sizes() == c10::SymIntArrayRef(sizes),
                    "linear: expected main_grad of the weight's shape ", c10::SymIntArrayRef(sizes),
                    ", got ", main_grad.sym_sizes(), ". Allocate it like the weight.");
  TORCH_CHECK_VALUE(!main_grad.requires_grad() && main_grad.is_floating_point(),
                    "linear: expected main_grad to hold floating-point numbers without a "
                    "gradient of its own, got ",
                    main_grad.toString(), " with requires_grad=", main_grad.requires_grad(),
                    ". Allocate it with torch.zeros.");
  check_own_memory(call, "linear", "main_grad", main_grad);
  product_into(call, {grad_y, true}, {x}, main_grad, !options.overwrite_main_grad);
  if (call.path() == Path::direct)
    main_grad.unsafeGetTensorImpl()->bump_version();  // nothing else does so below autograd
  if (call.step().writes.empty() || !call.wants(0)) return;
  const auto dummy = call.in(x).options().dtype(call.out_type(0).dtype);
  call.out(0, options.dummy == BasicLinearOptions::Dummy::zeros ? at::zeros_symint(sizes, dummy)
                                                                : at::empty_symint(sizes, dummy));
}

/// Stores the operands of the weight's gradient in tensors of the caller.
void linear_defer(Call& call) {
  enum Read { grad_y, x };
  leave_product(call, grad_y, x);
}

const BasicLinearOptions& linear_options(const void* options) {
  return *static_cast<const BasicLinearOptions*>(options);
}
bool saves_original(const void* options) { return linear_options(options).save_original_input; }
bool delays(const void* options) { return linear_options(options).delay_wgrad; }
bool returns_gradient(const void* options) {
  return !linear_options(options).accumulate_into_main_grad && !delays(options);
}
template <bool kDummy>
bool accumulates(const void* options) {
  const BasicLinearOptions& linear = linear_options(options);
  return linear.accumulate_into_main_grad && !linear.delay_wgrad &&
         (linear.dummy != BasicLinearOptions::Dummy::none) == kDummy;
}
/// The op has a main_grad where the options add the gradient to it.
size_t buffers(const void* options, std::string_view operand) {
  if (operand == "deferred[]") return delays(options) ? kDeferredProduct : 0;
  return linear_options(options).accumulate_into_main_grad ? 1 : 0;
}

void bias_forward(Call& call) {
  enum Read { x, bias };
  call.write<kernel_ops::AddBias>({.x = call.in(x), .bias = call.maybe(bias)});
}

void bias_backward(Call& call) {
  enum Read { grad_y };
  call.write<kernel_ops::SumRows>({.x = call.in(grad_y), .dtype = call.out_type(0).dtype});
}

}  // namespace

/// y = x W^T over the last dimension. A recipe quantizes x, W and grad_y. Backward has two
/// products, grad_x and grad_weight.
///
/// Shapes:  x [..., in_features], weight [out_features, in_features] -> y [..., out_features].
/// Dtypes:  y has the dtype of autocast, else of weight.
/// Throws:  c10::ValueError where the features do not fit.
const OpDef kBasicLinear{
    .name = "basic_linear",
    .formula = "y = x weight^T",
    .signature = {BasicLinearOptions{},
                  {{"accumulate_into_main_grad", &BasicLinearOptions::accumulate_into_main_grad,
                    "the gradient of weight is added to main_grad, not returned"},
                   {"overwrite_main_grad", &BasicLinearOptions::overwrite_main_grad,
                    "it takes the place of what main_grad holds"},
                   {"dummy_gradient", &BasicLinearOptions::dummy,
                    one_of({"none", "empty", "zeros"}), "what is returned beside main_grad"},
                   {"delay_wgrad", &BasicLinearOptions::delay_wgrad,
                    "the gradient of weight is left to the caller, who is given its operands"},
                   {"save_original_input", &BasicLinearOptions::save_original_input,
                    "x is kept as it is and quantized again in backward, instead of its codes"}}},
    .sizes = {{"in_features", "size of the last dimension of x"},
              {"out_features", "size of the last dimension of y"}},
    .params = {{"weight", {"out_features", "in_features"}, ParamDef::Init::kaiming_uniform}},
    .buffers = {"main_grad[]", "deferred[]"},
    .dtype = DtypeRule::weight,
    .roles = {{"x", Role::input}, {"weight", Role::weight}, {"grad_y", Role::grad_output}},
    .forward = {{.name = "forward",
                 .reads = {"x", "weight"},
                 .writes = {"y"},
                 .contracts = {{"x", Direction::row}, {"weight", Direction::row}},
                 .run = linear_forward}},
    .backward = {{.name = "grad_x",
                  .reads = {"grad_y", "weight"},
                  .writes = {"grad_x"},
                  .contracts = {{"grad_y", Direction::row}, {"weight", Direction::column}},
                  .run = grad_x},
                 {.name = "grad_weight",
                  .reads = {"grad_y", "x"},
                  .writes = {"grad_weight"},
                  .contracts = {{"grad_y", Direction::column},
                                {"x", Direction::column, nullptr, saves_original}},
                  .run = grad_weight,
                  .applies = returns_gradient},
                 {.name = "accumulate",
                  .reads = {"grad_y", "x"},
                  .writes = {},
                  .mutates = {"main_grad[]"},
                  .absorbs = {"grad_weight"},
                  .contracts = {{"grad_y", Direction::column},
                                {"x", Direction::column, nullptr, saves_original}},
                  .run = linear_accumulate,
                  .applies = accumulates</*kDummy=*/false>},
                 {.name = "accumulate",
                  .reads = {"grad_y", "x"},
                  .writes = {"grad_weight"},
                  .mutates = {"main_grad[]"},
                  .absorbs = {"grad_weight"},
                  .contracts = {{"grad_y", Direction::column},
                                {"x", Direction::column, nullptr, saves_original}},
                  .run = linear_accumulate,
                  .applies = accumulates</*kDummy=*/true>},
                 {.name = "defer",
                  .reads = {"grad_y", "x"},
                  .writes = {},
                  .mutates = {"deferred[]"},
                  .absorbs = {"grad_weight"},
                  .contracts = {{"grad_y", Direction::column},
                                {"x", Direction::column, nullptr, saves_original}},
                  .run = linear_defer,
                  .applies = delays}},
    .context = {"x", "weight"},
    .list_length = buffers,
};

/// y = x + bias. grad_bias is summed in float32 and rounded once.
///
/// Shapes:  x [..., features], bias [features] -> y like x.
/// Dtypes:  y has the dtype to which torch promotes x and bias; under autocast, bias is cast to the
///          dtype of x.
const OpDef kBias{
    .name = "bias",
    .formula = "y = x + bias",
    .sizes = {{"features", "size of the last dimension of x"}},
    .params = {{"bias", {"features"}}},
    .dtype = DtypeRule::promote,
    .same_gradients = {{"grad_x", "grad_y"}},
    .forward = {{.name = "forward", .reads = {"x", "bias"}, .writes = {"y"}, .run = bias_forward}},
    .backward =
        {{.name = "grad_bias", .reads = {"grad_y"}, .writes = {"grad_bias"}, .run = bias_backward}},
};

TANDEM_REGISTER_OP(kBasicLinear);
TANDEM_REGISTER_OP(kBias);

}  // namespace tandem::ops
