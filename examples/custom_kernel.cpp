// A kernel of one's own in C++: an implementation of a kernel op, queried before those of the
// library.
#include <ATen/ATen.h>
#include <tandem/extension.h>
#include <tandem/tandem.h>

#include <iostream>

namespace {

namespace kernel_ops = tandem::kernel_ops;

bool accepts(const kernel_ops::AddBias::Args& args) {
  const auto fits = [](const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat && tensor.is_contiguous();
  };
  return fits(args.x) && args.bias && fits(*args.bias) && args.factor == 1 && !args.extra;
}

void add_bias(const kernel_ops::AddBias::Args& args, std::span<at::Tensor> results) {
  const at::Tensor &x = args.x, &bias = *args.bias;
  const float *from = x.const_data_ptr<float>(), *terms = bias.const_data_ptr<float>();
  float* to = results[0].mutable_data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] + terms[i % bias.numel()];
}

}  // namespace

int main() {
  kernel_ops::register_implementation<kernel_ops::AddBias>(
      {.name = "my_kernel", .device = at::kCPU, .accepts = accepts, .run = add_bias});
  tandem::Sequential pipeline({tandem::ops::linear(8, 8)});
  const at::Tensor x = at::rand({4, 8}), y = pipeline->forward(x);
  const auto parameters = pipeline->parameters();
  const std::string text = pipeline->explain();
  std::cout << text;
  const bool is_right = at::allclose(y, at::linear(x, parameters[0], parameters[1]));
  return is_right && text.find("my_kernel") != std::string::npos ? 0 : 1;
}
