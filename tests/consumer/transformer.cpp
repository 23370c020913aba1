// A TransformerLayer that goes on from what Python has saved: reads parameters, x and grad_y, runs
// two steps under a recipe, writes its archive, and what it has computed.
#include <ATen/ATen.h>
#include <tandem/tandem.h>
#include <torch/serialize.h>

#include <fstream>
#include <iterator>
#include <map>

namespace {

using Tensors = std::map<std::string, at::Tensor>;

Tensors read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file),
                                std::istreambuf_iterator<char>()};
  Tensors tensors;
  for (const auto& each : torch::pickle_load(bytes).toGenericDict())
    tensors[each.key().toStringRef()] = each.value().toTensor();
  return tensors;
}

void write(const char* path, const Tensors& tensors) {
  c10::Dict<std::string, at::Tensor> dict;
  for (const auto& [name, tensor] : tensors) dict.insert(name, tensor);
  const std::vector<char> bytes = torch::pickle_save(dict);
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

int main(int, char** argv) {
  const std::string recipe = argv[1];
  const Tensors given = read(argv[2]);
  tandem::TransformerLayer layer(64, 96, 4,
                                 tandem::TransformerLayerOptions{
                                     .attention = {.attention_dropout = 0,
                                                   .num_gqa_groups = 2,
                                                   .bias = false,
                                                   .normalization = tandem::Normalization::rms_norm,
                                                   .qk_norm_type = tandem::QkNormType::rms_norm},
                                     .hidden_dropout = 0,
                                     .output_layernorm = recipe == "post_norm",
                                     .activation = "swiglu"});
  {
    const at::NoGradGuard no_grad;
    for (auto& param : layer->named_parameters()) param.value().copy_(given.at(param.key()));
  }
  const at::Tensor x = given.at("x").set_requires_grad(true);
  const tandem::AttentionArguments arguments{
      .rotary_pos_emb = tandem::RotaryPositionEmbedding(16)->forward(x.size(0))};
  at::Tensor y;
  for (int step = 0; step < 2; ++step) {
    {
      const tandem::Recipe used =
          recipe == "delayed" ? tandem::Recipe(tandem::DelayedScaling{.amax_history_len = 4})
                              : tandem::MXFP8BlockScaling{};
      const tandem::Autocast region(recipe == "delayed" || recipe == "mxfp8", used);
      y = layer->forward(x, arguments);
    }
    y.backward(given.at("grad_y"));
  }
  torch::save(layer, argv[3]);
  Tensors computed{{"y", y.detach()}, {"x", x.grad()}};
  for (const auto& param : layer->named_parameters()) computed[param.key()] = param.value().grad();
  for (const auto& buffer : layer->named_buffers()) computed[buffer.key()] = buffer.value();
  write(argv[4], computed);
}
