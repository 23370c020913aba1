#include "ops/linear.h"

#include "core/call.h"
#include "kernel_ops/elementwise.h"
#include "ops/options.h"
#include "ops/product.h"

namespace tandem::ops {

namespace {

void linear_forward(Call& call) {
  enum Read { x, weight };
  call.out(0, linear_product(call, x, weight, call.out_type(0).dtype));
}

void linear_grad_x(Call& call) {
  enum Read { grad_y, weight };
  c10::SymDimVector sizes(call.in(grad_y).sym_sizes().begin(), call.in(grad_y).sym_sizes().end());
  sizes.back() = call.in(weight).sym_size(1);
  call.out(0, product(call, {grad_y}, {weight}, sizes, call.out_type(0).dtype));
}

void linear_grad_weight(Call& call) {
  enum Read { grad_y, x };
  const c10::SymInt sizes[] = {call.in(grad_y).sym_size(-1), call.in(x).sym_size(-1)};
  call.out(0, product(call, {grad_y, true}, {x}, sizes, call.out_type(0).dtype));
}

void bias_forward(Call& call) {
  enum Read { x, bias };
  call.write<kernel_ops::AddBias>(call.in(x), call.maybe(bias), std::optional<at::Tensor>());
}

void bias_backward(Call& call) {
  enum Read { grad_y };
  call.write<kernel_ops::SumRows>(call.in(grad_y), call.out_type(0).dtype);
}

}  // namespace

const OpDef kBasicLinear{
    .name = "basic_linear",
    .formula = "y = x weight^T",
    .params = {"weight"},
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
                  .run = linear_grad_x},
                 {.name = "grad_weight",
                  .reads = {"grad_y", "x"},
                  .writes = {"grad_weight"},
                  .contracts = {{"grad_y", Direction::column}, {"x", Direction::column}},
                  .run = linear_grad_weight}},
    .context = {"x", "weight"},
    .parse = parse_no_options,
};

const OpDef kBias{
    .name = "bias",
    .formula = "y = x + bias",
    .params = {"bias"},
    .dtype = DtypeRule::promote,
    .same_gradients = {{"grad_x", "grad_y"}},
    .forward = {{.name = "forward", .reads = {"x", "bias"}, .writes = {"y"}, .run = bias_forward}},
    .backward =
        {{.name = "grad_bias", .reads = {"grad_y"}, .writes = {"grad_bias"}, .run = bias_backward}},
    .parse = parse_no_options,
};

TANDEM_REGISTER_OP(kBasicLinear);
TANDEM_REGISTER_OP(kBias);

}  // namespace tandem::ops
