// A module with TransformerEngine's parameter names under delayed scaling, a head that shares the
// weight of the embedding, a gradient that is accumulated in float32, experts whose gradients come
// later, a layer with keys and values of earlier positions, and a tensor in codes.
#include <tandem/tandem.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/sgd.h>

#include <iostream>

int main() {
  namespace ops = tandem::ops;
  constexpr int64_t kHidden = 32, kVocabulary = 100;
  torch::nn::Embedding embedding(kVocabulary, kHidden);
  tandem::LayerNormMLP mlp(
      kHidden, 64,
      {.normalization = tandem::Normalization::rms_norm, .bias = false, .activation = "swiglu"});
  const at::Tensor main_grad = at::zeros({kHidden, kHidden});
  tandem::Sequential head(
      {ops::linear(kHidden, kHidden, {.bias = false}).with_main_grad("weight", main_grad),
       ops::gelu(), ops::dropout({.p = 0.1}),
       ops::linear(kHidden, kVocabulary, {.bias = false})
           .with_parameter("weight", embedding->weight)});

  std::vector<at::Tensor> parameters;  // the head does not list the weight that it shares
  const std::vector<std::shared_ptr<torch::nn::Module>> modules{mlp.ptr(), head.ptr(),
                                                                embedding.ptr()};
  for (const auto& module : modules)
    for (const at::Tensor& parameter : module->parameters()) parameters.push_back(parameter);
  torch::optim::SGD optimizer(parameters, 0.1);
  const at::Tensor tokens = torch::randint(kVocabulary, {64});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    at::Tensor loss;
    {
      const tandem::Autocast fp8(true, tandem::DelayedScaling{.amax_history_len = 16});
      const at::Tensor x = embedding->forward(tokens);
      loss = torch::cross_entropy_loss(head->forward(x + mlp->forward(x)), tokens);
    }
    loss.backward();
    optimizer.step();
    std::cout << "step " << step << ": loss " << loss.item<float>() << "\n";
  }

  // Experts, whose gradients of weights are computed when there is time for it.
  tandem::GroupedLinear experts(4, kHidden, 64, {.bias = false, .delay_wgrad_compute = true});
  experts->forward(at::randn({10, kHidden}), {3, 0, 5, 1}, {.is_first_microbatch = true})
      .sum()
      .backward();
  experts->backward_dw();
  std::cout << "gradient of expert 0 " << experts->parameters()[0].grad().sizes() << "\n";

  // A layer that generates, one position after the other.
  tandem::TransformerLayer layer(
      kHidden, 64, 4,
      {.attention = {.attention_dropout = 0, .layer_number = 1}, .hidden_dropout = 0});
  layer->eval();
  const at::Tensor angles = tandem::RotaryPositionEmbedding(kHidden / 4)->forward(8);
  tandem::InferenceParams cache(/*max_batch_size=*/2, /*max_sequence_length=*/8);
  for (const at::Tensor& piece : at::randn({8, 2, kHidden}).split(1)) {
    const at::Tensor y =
        layer->forward(piece, {.rotary_pos_emb = angles, .inference_params = &cache});
    cache.sequence_len_offset += piece.size(0);
  }
  std::cout << "keys of layer 1 " << cache.key_value_memory_dict.at(1).first.sizes() << "\n";

  // A tensor in codes, and the gradient of its numbers.
  const at::Tensor numbers = at::randn({64, kHidden}).requires_grad_();
  const tandem::QuantizedTensor codes =
      tandem::quantize(numbers, tandem::MXFP8Quantizer{.fp8_dtype = at::kFloat8_e4m3fn});
  codes.dequantize().sum().backward();
  std::cout << codes << " of " << codes.rowwise_data().numel() << " bytes, scales "
            << codes.rowwise_scale_inv().sizes() << ", gradient " << numbers.grad().sizes() << "\n";

  for (const auto& parameter : mlp->named_parameters())
    std::cout << parameter.key() << " " << parameter.value().sizes() << "\n";
  for (const auto& buffer : mlp->named_buffers())
    std::cout << buffer.key() << " " << buffer.value().sizes() << "\n";
}
