// Modules of torch::nn for tests.
#pragma once

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/module.h>
#include <torch/serialize.h>

#include <sstream>
#include <string>
#include <vector>

#include "support/tensors.h"

namespace tandem::testing {

inline std::vector<std::string> names_of(const torch::nn::Module& module) {
  return module.named_parameters().keys();
}

/// Through a file of libtorch.
template <typename Holder>
void save_and_load(Holder saved, Holder loaded) {
  std::stringstream file;
  torch::serialize::OutputArchive out;
  saved->save(out);
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  loaded->load(in);
}

/// Numbers that tell norms, biases and weights apart, the same for every module of one shape.
template <typename Holder>
Holder randomized(Holder module, double deviation = 1) {
  const c10::AutoGradMode no_grad(false);
  uint64_t seed = 10;
  for (at::Tensor& param : module->parameters())
    param.copy_(random(param.sizes(), at::kDouble, ++seed).mul(deviation));
  return module;
}

}  // namespace tandem::testing
