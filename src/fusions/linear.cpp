#include "fusions/linear.h"

#include <ATen/ops/addmm.h>

#include "core/call.h"
#include "kernel_ops/activation.h"
#include "kernel_ops/elementwise.h"
#include "kernel_ops/shapes.h"
#include "ops/activation.h"
#include "ops/product.h"

namespace tandem::fusions {

namespace {

/// All fusions here read x, weight and bias first.
enum Read { x, weight, bias, extra };

/// The product that is continued, in the dtype that the unfused product has: a fresh tensor, whose
/// memory results may take.
at::Tensor product_of(Call& call) {
  const at::ScalarType dtype =
      call.format(x) == Format::codes ? call.type(x).dtype : call.in(x).scalar_type();
  return ops::linear_product(call, x, weight, dtype);
}

void linear_bias(Call& call) {
  const bool addmm = call.path() != Path::direct && call.format(x) == Format::plain &&
                     call.in(bias).scalar_type() == call.in(x).scalar_type();
  if (addmm) {  // what compilers know best
    ops::check_one_device(call, {x, weight, bias});
    const at::Tensor& input = call.in(x);
    const at::Tensor flat =
        input.dim() == 2 ? input
                         : input.reshape_symint({kernel_ops::rows_of(input), input.sym_size(-1)});
    const at::Tensor y = at::addmm(call.in(bias), flat, call.in(weight).t());
    call.took(kernel_ops::kDispatcher);
    call.out(0, input.dim() == 2 ? y : y.reshape_symint(ops::output_sizes(input, call.in(weight))));
    return;
  }
  const at::Tensor product = product_of(call);
  call.out(0, call.run_into<kernel_ops::AddBias>({product}, product, call.maybe(bias),
                                                 std::optional<at::Tensor>())[0]);
}

void linear_bias_add(Call& call) {
  const at::Tensor product = product_of(call);
  call.out(0, call.run_into<kernel_ops::AddBias>({product}, product, call.maybe(bias),
                                                 call.maybe(extra))[0]);
}

template <typename K>
void linear_bias_activation(Call& call) {
  enum Write { z, y };
  const at::Tensor product = product_of(call);
  kernel_ops::ResultsOf<K> spare;
  spare[call.wants(z) ? z : y] = product;
  auto results =
      call.run_into<K>(spare, product, call.maybe(bias),
                       call.options<ops::ActivationOptions>(2).function, call.output_mask<2>());
  for (const size_t write : {z, y})
    if (call.wants(write)) call.out(write, std::move(results[write]));
}

Refusal refuse_mixed_dtypes(const Match& match) {
  const MemberOperand y{0, "y"}, b{1, "bias"};
  if (match.type(y).dtype == match.type(b).dtype) return std::nullopt;
  return "the bias is " + std::string(c10::toString(match.type(b).dtype)) + " and the product " +
         c10::toString(match.type(y).dtype);
}

Refusal refuse_linear_bias_add(const Match& match) {
  if (match[{2, "x"}] != match[{1, "y"}] || match[{2, "extra"}] == match[{1, "y"}])
    return "the product is the extra input of the sum";
  return refuse_mixed_dtypes(match);
}

}  // namespace

const Fusion kLinearBias{
    .name = "linear_bias",
    .pattern = {"basic_linear", "bias"},
    .run = {.reads = {{0, "x"}, {0, "weight"}, {1, "bias"}},
            .writes = {{1, "y"}},
            .run = linear_bias},
    .refuse = refuse_mixed_dtypes,
    .picture = "x, weight -> product -> + bias -> y",
};

const Fusion kLinearBiasAdd{
    .name = "linear_bias_add",
    .pattern = {"basic_linear", "bias", PatternStep("add_extra_input").through("y", kAnyRead)},
    .run = {.reads = {{0, "x"}, {0, "weight"}, {1, "bias"}, {2, "extra"}},
            .writes = {{2, "y"}},
            .run = linear_bias_add},
    .refuse = refuse_linear_bias_add,
    .picture = "x, weight -> product -> + bias -> + extra -> y",
};

const Fusion kLinearBiasActivation{
    .name = "linear_bias_activation",
    .pattern = {"basic_linear", "bias", PatternStep::any_of("activation")},
    .run = {.reads = {{0, "x"}, {0, "weight"}, {1, "bias"}},
            .writes = {{1, "y"}, {2, "y"}},
            .run = linear_bias_activation<kernel_ops::ActivationForward>},
    .refuse = refuse_mixed_dtypes,
    .picture = "x, weight -> product -> + bias -> z (if demanded) -> act -> y",
};

const Fusion kLinearBiasGlu{
    .name = "linear_bias_glu",
    .pattern = {"basic_linear", "bias", PatternStep::any_of("glu")},
    .run = {.reads = {{0, "x"}, {0, "weight"}, {1, "bias"}},
            .writes = {{1, "y"}, {2, "y"}},
            .run = linear_bias_activation<kernel_ops::GluForward>},
    .refuse = refuse_mixed_dtypes,
    .picture = "x, weight -> product -> + bias -> z = [a, b] (if demanded) -> act(a) b -> y",
};

}  // namespace tandem::fusions
