// Uses Tandem as a C++ program outside of this repository would: the installed headers and library,
// and libtorch through them.
#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <tandem/extension.h>
#include <tandem/tandem.h>

#include <iostream>
#include <string_view>

int main() {
  TORCH_CHECK(std::string_view(tandem::version()) == TANDEM_VERSION,
              "consumer: expected the library of its headers, ", TANDEM_VERSION, ", got ",
              tandem::version());
  tandem::Sequential mlp(std::vector<tandem::Op>{tandem::ops::layer_norm(8),
                                                 tandem::ops::linear(8, 32), tandem::ops::swiglu(),
                                                 tandem::ops::linear(16, 8)});
  const at::Tensor x = at::randn({4, 8}).set_requires_grad(true);
  mlp->forward(x).sum().backward();
  TORCH_CHECK(x.grad().defined() && tandem::verify(mlp, x).passed,
              "consumer: expected gradients, got none");
  {
    const tandem::Autocast fp8;
    mlp->forward(x).sum().backward();
  }
  TORCH_CHECK(tandem::op_def("swiglu").reemits.size() == 1,
              "consumer: expected the definition of swiglu");
  const at::Tensor sum = at::ones({3, 4}).sum();
  std::cout << "tandem " << tandem::version() << ", torch " << tandem::built_against_torch()
            << ", sum " << sum.item<float>() << "\n";
}
