// An op and a fusion of one's own in C++: y = max(x - shift, 0), fused with the constant_scale
// behind it.
#include <ATen/ATen.h>
#include <tandem/extension.h>
#include <tandem/tandem.h>

#include <iostream>

namespace {

struct ShiftOptions {
  double shift = 0;
};

void forward(tandem::Call& call) {
  enum Read { x };
  const double shift = call.options<ShiftOptions>().shift;
  call.out(0, at::relu(at::sub(call.in(x), shift)));
}

void backward(tandem::Call& call) {
  enum Read { grad_y, x };
  call.out(0, call.in(grad_y) * (call.in(x) > call.options<ShiftOptions>().shift));
}

const tandem::OpDef kShiftedRelu{
    .name = "shifted_relu",
    .formula = "y = max(x - shift, 0)",
    .signature = {ShiftOptions{}, {{"shift", &ShiftOptions::shift, "what x has to exceed"}}},
    .forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}, .run = forward}},
    .backward =
        {{.name = "backward", .reads = {"grad_y", "x"}, .writes = {"grad_x"}, .run = backward}},
};
TANDEM_REGISTER_OP(kShiftedRelu);

// One step for two. It writes only the end: where backward demanded what lies between, the planner
// would refuse it and say so.
void shifted_relu_scale(tandem::Call& call) {
  const double shift = call.options<ShiftOptions>(0).shift;
  call.out(0, at::relu(call.in(0) - shift) * 3.0);
}

tandem::Refusal refuse_large(const tandem::Match& match) {
  if (match.type({0, "x"}).dtype == at::kFloat) return std::nullopt;
  return "it knows float32 only";
}

}  // namespace

int main() {
  const auto fusion = tandem::register_fusion({
      .name = "shifted_relu_scale",
      .pattern = {"shifted_relu", "constant_scale"},
      .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = shifted_relu_scale},
      .refuse = refuse_large,
      .picture = "x -> shifted_relu -> constant_scale -> y",
  });
  tandem::Sequential pipeline({tandem::ops::op("shifted_relu", {}, ShiftOptions{.shift = 0.5}),
                               tandem::ops::constant_scale(3)});
  const at::Tensor x = at::tensor({0.0f, 1.0f, 2.0f}).set_requires_grad(true);
  const at::Tensor y = pipeline->forward(x);
  y.sum().backward();
  std::cout << y << "\n" << x.grad() << "\n" << pipeline->explain();
}
