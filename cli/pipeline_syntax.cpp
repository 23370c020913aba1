#include "pipeline_syntax.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <optional>
#include <string_view>

#include "errors.h"
#include "options.h"
#include "strings.h"

namespace tandem::cli {

namespace {

enum class Argument { whole, real, word };

/// One op of the command line: how it is written, how it is checked, what it makes and does to the
/// shape.
struct Kind {
  std::string_view name, usage, meaning;
  std::vector<Argument> required, optional;
  std::vector<std::string_view> words;  ///< allowed instead of an optional word; empty: any
  std::function<Op(const OpText&)> make;
};

const std::vector<Kind>& kinds() {
  using enum Argument;
  static const std::vector<Kind> kinds{
      {"linear",
       "linear:IN:OUT[:nobias]",
       "matrix product and bias",
       {whole, whole},
       {word},
       {"nobias"},
       [](const OpText& t) { return ops::linear(t.whole(0), t.whole(1), !t.has("nobias")); }},
      {"rms_norm",
       "rms_norm:HIDDEN[:EPS]",
       "",
       {whole},
       {real},
       {},
       [](const OpText& t) { return ops::rms_norm(t.whole(0), t.real(1, 1e-5)); }},
      {"layer_norm",
       "layer_norm:HIDDEN[:EPS]",
       "",
       {whole},
       {real},
       {},
       [](const OpText& t) { return ops::layer_norm(t.whole(0), t.real(1, 1e-5)); }},
      {"swiglu",
       "swiglu",
       "silu(first half) * second half",
       {},
       {},
       {},
       [](const OpText&) { return ops::swiglu(); }},
      {"geglu",
       "geglu",
       "gelu(first half) * second half",
       {},
       {},
       {},
       [](const OpText&) { return ops::geglu(); }},
      {"gelu", "gelu", "", {}, {}, {}, [](const OpText&) { return ops::gelu(); }},
      {"silu", "silu", "", {}, {}, {}, [](const OpText&) { return ops::silu(); }},
      {"relu", "relu", "", {}, {}, {}, [](const OpText&) { return ops::relu(); }},
      {"identity", "identity", "", {}, {}, {}, [](const OpText&) { return ops::identity(); }},
      {"dropout",
       "dropout:P",
       "",
       {real},
       {},
       {},
       [](const OpText& t) { return ops::dropout(t.real(0, 0)); }},
      {"constant_scale",
       "constant_scale:FACTOR",
       "",
       {real},
       {},
       {},
       [](const OpText& t) { return ops::constant_scale(t.real(0, 1)); }},
      {"reshape",
       "reshape:SIZE[:SIZE...]",
       "one size may be -1",
       {whole},
       {whole, whole, whole, whole},
       {},
       [](const OpText& t) {
         std::vector<int64_t> sizes;
         for (size_t i = 0; i < t.arguments.size(); ++i) sizes.push_back(t.whole(i));
         return ops::reshape(std::move(sizes));
       }},
      {"quantize",
       "quantize[:forward|backward|both]",
       "as the recipe says",
       {},
       {word},
       {"forward", "backward", "both"},
       [](const OpText& t) {
         return ops::quantize(!t.has("backward"), t.has("backward") || t.has("both"));
       }},
      {"make_extra_output",
       "make_extra_output[:CHANNEL]",
       "hands a copy to a channel, or to the caller",
       {},
       {word},
       {},
       [](const OpText& t) { return ops::make_extra_output(t.channel(), t.channel().empty()); }},
      {"add_extra_input",
       "add_extra_input[:CHANNEL]",
       "adds what a channel holds, or the caller passes",
       {},
       {word},
       {},
       [](const OpText& t) { return ops::add_extra_input(t.channel()); }},
  };
  return kinds;
}

std::vector<std::string> kind_names() {
  std::vector<std::string> names;
  for (const Kind& kind : kinds()) names.emplace_back(kind.name);
  return names;
}

template <typename T>
std::optional<T> number(const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

const Kind& kind_of(const OpText& text) {
  const auto found = std::find_if(kinds().begin(), kinds().end(),
                                  [&](const Kind& kind) { return kind.name == text.kind; });
  if (found != kinds().end()) return *found;
  const std::string near = closest(text.kind, kind_names());
  throw UserError("expected an op (" + join(kind_names()) + "), got \"" + text.kind + "\". " +
                  (near.empty() ? "See tandem explain --help." : "Did you mean " + near + "?"));
}

bool is_valid(const Kind& kind, Argument argument, const std::string& text) {
  switch (argument) {
    case Argument::whole: {
      const auto value = number<int64_t>(text);
      return value && (*value > 0 || (kind.name == "reshape" && *value == -1)) &&
             *value <= int64_t{1} << 31;
    }
    case Argument::real:
      return number<double>(text).has_value();
    case Argument::word:
      return !text.empty() && (kind.words.empty() || std::find(kind.words.begin(), kind.words.end(),
                                                               text) != kind.words.end());
  }
  return false;
}

OpText parse_op(const std::string& word) {
  OpText text;
  text.arguments = split(word, ':');
  text.kind = text.arguments.front();
  text.arguments.erase(text.arguments.begin());
  const Kind& kind = kind_of(text);
  const size_t count = text.arguments.size();
  bool valid =
      count >= kind.required.size() && count <= kind.required.size() + kind.optional.size();
  for (size_t i = 0; valid && i < count; ++i) {
    const bool required = i < kind.required.size();
    valid = is_valid(kind, required ? kind.required[i] : kind.optional[i - kind.required.size()],
                     text.arguments[i]);
  }
  if (!valid) {
    throw UserError("expected " + std::string(kind.usage) + ", got \"" + word +
                    "\". Write its arguments after colons.");
  }
  return text;
}

bool is_glu(const OpText& op) { return op.kind == "swiglu" || op.kind == "geglu"; }

/// The width that the ops demand of their input: of the first that names one, doubled for each GLU
/// before it.
int64_t input_width(const std::vector<OpText>& ops) {
  int64_t doubled = 1;
  for (const OpText& op : ops) {
    if (op.kind == "linear" || op.kind == "rms_norm" || op.kind == "layer_norm")
      return op.whole(0) * doubled;
    if (op.kind == "reshape") break;
    if (is_glu(op)) doubled *= 2;
  }
  throw UserError(
      "expected --width, because no op before a reshape names one, got none. Pass for example "
      "--width 1024.");
}

/// The shape after `op`; shapes that do not fit are for the pipeline to refuse.
std::vector<int64_t> shape_after(const OpText& op, std::vector<int64_t> shape) {
  if (op.kind == "linear") {
    shape.back() = op.whole(1);
  } else if (is_glu(op)) {
    shape.back() /= 2;
  } else if (op.kind == "reshape") {
    int64_t elements = 1, known = 1;
    for (const int64_t size : shape) elements *= size;
    shape.clear();
    for (size_t i = 0; i < op.arguments.size(); ++i) shape.push_back(op.whole(i));
    for (const int64_t size : shape) known *= size == -1 ? 1 : size;
    for (int64_t& size : shape) size = size == -1 ? elements / known : size;
  }
  return shape;
}

}  // namespace

int64_t OpText::whole(size_t index) const { return number<int64_t>(arguments.at(index)).value(); }

double OpText::real(size_t index, double otherwise) const {
  return index < arguments.size() ? number<double>(arguments[index]).value() : otherwise;
}

bool OpText::has(const std::string& word) const {
  return std::find(arguments.begin(), arguments.end(), word) != arguments.end();
}

std::string OpText::channel() const {
  return arguments.empty() ? std::string() : arguments.front();
}

at::ScalarType PipelineArguments::scalar_type() const {
  return dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

void add_pipeline_options(CLI::App& app, PipelineArguments& arguments) {
  app.add_option("PIPELINE", arguments.words,
                 "ops in order, each with its arguments after colons; see below")
      ->required();
  add_choice(app, "--recipe", arguments.recipe, {"none", "fp8"},
             "low-precision format; fp8: current scaling");
  add_choice(app, "--dtype", arguments.dtype, {"float32", "bfloat16"}, "of input and parameters");
  add_whole(app, "--rows", arguments.rows, 1, 1 << 24, "rows of the input");
  add_whole(app, "--width", arguments.width, 0, 1 << 24,
            "columns of the input; 0: as the ops demand");
  add_whole(app, "--seed", arguments.seed, 0, 1'000'000'000, "of the random data");
}

std::string op_list_help() {
  std::string help = "Ops:\n";
  for (const Kind& kind : kinds()) {
    help +=
        format("  %-34s%s\n", std::string(kind.usage).c_str(), std::string(kind.meaning).c_str());
  }
  return help;
}

ParsedPipeline parse_pipeline(const PipelineArguments& arguments) {
  ParsedPipeline parsed;
  for (const std::string& word : arguments.words) parsed.ops.push_back(parse_op(word));
  const int64_t width = arguments.width > 0 ? arguments.width : input_width(parsed.ops);
  std::vector<int64_t> shape{arguments.rows, width};
  parsed.input_sizes = shape;
  for (const OpText& op : parsed.ops) {
    if (op.kind == "add_extra_input" && op.channel().empty())
      parsed.extra_input_sizes.push_back(shape);
    if (op.kind == "linear") {
      double rows = 1;
      for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= static_cast<double>(shape[i]);
      parsed.product_flops +=
          2 * rows * static_cast<double>(op.whole(0)) * static_cast<double>(op.whole(1));
    }
    shape = shape_after(op, std::move(shape));
  }
  return parsed;
}

Workload make_workload(const PipelineArguments& arguments) {
  ParsedPipeline parsed = parse_pipeline(arguments);
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(static_cast<uint64_t>(arguments.seed));
  std::vector<Op> list;
  for (const OpText& op : parsed.ops) list.push_back(kind_of(op).make(op));
  const at::TensorOptions options(arguments.scalar_type());
  Sequential pipeline(std::move(list), options);
  const auto random = [&](const std::vector<int64_t>& sizes) {
    return at::randn(sizes, options).set_requires_grad(true);
  };
  at::Tensor x = random(parsed.input_sizes);
  std::vector<at::Tensor> extra_inputs;
  for (const auto& sizes : parsed.extra_input_sizes) extra_inputs.push_back(random(sizes));
  return {std::move(parsed), std::move(pipeline), std::move(x), std::move(extra_inputs),
          arguments.recipe == "fp8"};
}

std::vector<at::Tensor> Workload::forward() {
  std::optional<Autocast> region;
  if (fp8) region.emplace(true, Float8CurrentScaling{});
  return pipeline->forward(x, extra_inputs);
}

void backward(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& output : outputs) gradients.push_back(at::ones_like(output));
  torch::autograd::backward(outputs, gradients);
}

}  // namespace tandem::cli
