// An op and a fusion in a library of their own, which a program loads after Tandem.
#include <ATen/ATen.h>
#include <tandem/extension.h>

namespace {

struct LeakyOptions {
  double slope = 0.25;
};

void forward(tandem::Call& call) {
  call.out(0, at::leaky_relu(call.in(0), call.options<LeakyOptions>().slope));
}

void backward(tandem::Call& call) {
  enum Read { grad_y, x };
  const double slope = call.options<LeakyOptions>().slope;
  call.out(0, at::where(call.in(x) > 0, call.in(grad_y), call.in(grad_y)*slope));
}

const tandem::OpDef kLeaky{
    .name = "leaky",
    .formula = "y = max(x, slope x)",
    .signature = {LeakyOptions{},
                  {{"slope", &LeakyOptions::slope, tandem::between(0, 1), "of y below 0"}}},
    .forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}, .run = forward}},
    .backward =
        {{.name = "backward", .reads = {"grad_y", "x"}, .writes = {"grad_x"}, .run = backward}},
    .context = {"x"},
};
TANDEM_REGISTER_OP(kLeaky);

/// leaky(leaky(x)) has the product of the slopes below 0.
void leaky_twice(tandem::Call& call) {
  const double slope = call.options<LeakyOptions>(0).slope * call.options<LeakyOptions>(1).slope;
  call.out(0, at::leaky_relu(call.in(0), slope));
}

tandem::Refusal refuse_integers(const tandem::Match& match) {
  if (at::isFloatingType(match.type({0, "x"}).dtype)) return std::nullopt;
  return "x is no floating-point number";
}

const tandem::Fusion kLeakyTwice{
    .name = "leaky_twice",
    .pattern = {"leaky", "leaky"},
    .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = leaky_twice},
    .refuse = refuse_integers,
    .picture = "x -> leaky -> leaky -> y",
};
TANDEM_REGISTER_FUSION(kLeakyTwice);

}  // namespace
