// Trains a small MLP through one fused pipeline.
#include <tandem/tandem.h>
#include <torch/optim/adamw.h>

#include <iostream>

int main() {
  namespace ops = tandem::ops;
  tandem::Sequential mlp(
      {ops::rms_norm(64), ops::linear(64, 256), ops::swiglu(), ops::linear(128, 64)});
  torch::optim::AdamW optimizer(mlp->parameters(), 1e-3);
  const at::Tensor x = torch::randn({32, 64}), target = torch::randn({32, 64});
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = (mlp->forward(x) - target).square().mean();
    loss.backward();
    optimizer.step();
    if (step % 10 == 9) std::cout << "step " << step + 1 << ": loss " << loss.item<float>() << "\n";
  }
  std::cout << mlp->explain();
}
