// Uses Tandem as a C++ program outside of this repository would: the installed headers and library, and libtorch through them.
#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <tandem/version.h>

#include <iostream>
#include <string_view>

int main() {
  TORCH_CHECK(std::string_view(tandem::version()) == TANDEM_VERSION,
              "consumer: expected the library of its headers, ", TANDEM_VERSION, ", got ",
              tandem::version());
  const at::Tensor sum = at::ones({3, 4}).sum();
  std::cout << "tandem " << tandem::version() << ", torch " << tandem::built_against_torch()
            << ", sum " << sum.item<float>() << "\n";
}
