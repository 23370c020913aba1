#include "pipeline_syntax.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string_view>

#include "core/op_def.h"
#include "errors.h"
#include "options.h"
#include "recipes.h"
#include "text.h"

namespace tandem::cli {

namespace {

constexpr int64_t kMostExtent = int64_t{1} << 31;

template <typename T>
std::optional<T> number(const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// An argument of an op. Without a name it is a word that the usage spells out.
struct Argument {
  std::string name;
  Bounds bounds;
};

/// An op of the command line: its syntax, its checks, and the op that it creates.
struct Kind {
  std::string name, usage, meaning;
  std::vector<Argument> required, optional;
  std::function<Op(const OpText&)> make;

  const Argument& argument(size_t i) const {
    return i < required.size() ? required[i] : optional[i - required.size()];
  }
};

constexpr double kMostReal = std::numeric_limits<double>::max();
/// The most sizes of a shape that can be written.
constexpr size_t kMostSizes = 5;

std::string upper(std::string_view name) {
  std::string text(name);
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

bool is_flag(const OptionDef& option) { return std::holds_alternative<bool>(option.otherwise); }

/// The word that inverts a flag's default.
std::string flag_word(const OptionDef& option) {
  return (std::get<bool>(option.otherwise) ? "no_" : "") + std::string(option.name);
}

/// The argument for an option that is no flag: a number, named by the option in capitals.
Argument argument_of(const OptionDef& option) {
  const auto bound = [](double value) { return std::clamp(value, -kMostReal, kMostReal); };
  const auto whole = [&](double value) { return static_cast<int64_t>(value); };
  const Check& check = option.check;
  if (std::holds_alternative<double>(option.otherwise))
    return {upper(option.name), Real{bound(check.least), bound(check.greatest)}};
  if (std::holds_alternative<int64_t>(option.otherwise))
    return {upper(option.name), Whole{whole(check.least), whole(check.greatest)}};
  if (std::holds_alternative<std::string>(option.otherwise) && !check.words.empty())
    return {"", Choice{{check.words.begin(), check.words.end()}}};
  return {upper(option.name), Text{"TEXT", /*may_be_empty=*/false}};
}

/// The value of an option from its argument.
OptionValue value_of(const OptionDef& option, const std::string& text) {
  if (const auto* flag = std::get_if<bool>(&option.otherwise)) return !*flag;
  if (std::holds_alternative<double>(option.otherwise)) return number<double>(text).value();
  if (std::holds_alternative<int64_t>(option.otherwise)) return number<int64_t>(text).value();
  return text;
}

/// The syntax of an op from its definition: its sizes, then its options in their order and flags
/// last in any order, or the sizes of its shape.
Kind kind_of(const OpDef& def) {
  const Whole extent{1, kMostExtent};
  const auto given = def.signature.options();
  std::vector<OptionDef> options(given.begin(), given.end());
  const auto first_flag =
      std::stable_partition(options.begin(), options.end(), std::not_fn(is_flag));
  const std::span<const OptionDef> flags(first_flag, options.end());
  Kind kind{std::string(def.name), std::string(def.name), std::string(def.formula), {}, {}, {}};
  for (const SizeDef& size : def.sizes) kind.required.push_back({upper(size.name), extent});
  if (options.size() == 1 && std::holds_alternative<std::vector<int64_t>>(options[0].otherwise)) {
    const Argument size{"SIZE", Whole{1, kMostExtent, /*minus_one=*/true}};
    kind.usage += ":SIZE[:SIZE...]";
    kind.meaning += ", at most five sizes; one may be -1";
    kind.required = {size};
    kind.optional.assign(kMostSizes - 1, size);
    kind.make = [options](const OpText& text) {
      return ops::op(text.kind, {}, {{std::string(options[0].name), text.wholes()}});
    };
    return kind;
  }
  Choice words;
  for (const OptionDef& flag : flags) words.words.push_back(flag_word(flag));
  for (const OptionDef& option : options)
    kind.optional.push_back(is_flag(option) ? Argument{"", words} : argument_of(option));
  for (const Argument& argument : kind.required) kind.usage += ":" + argument.name;
  for (size_t i = 0; i < options.size() - flags.size(); ++i) {
    const auto* choice = std::get_if<Choice>(&kind.optional[i].bounds);
    kind.usage += "[:" + (choice ? join(choice->words, "|") : kind.optional[i].name) + "]";
  }
  if (!flags.empty())
    kind.usage += "[:" + join(words.words, "|") + (flags.size() > 1 ? "...]" : "]");
  kind.make = [&def, options](const OpText& text) {
    std::vector<std::pair<std::string, int64_t>> sizes;
    OptionValues values;
    for (const SizeDef& size : def.sizes) sizes.emplace_back(size.name, text.whole(sizes.size()));
    for (size_t i = sizes.size(); i < text.arguments.size(); ++i) {
      const std::string& word = text.arguments[i];
      const auto is_meant = [&](const OptionDef& o) { return is_flag(o) && flag_word(o) == word; };
      const OptionDef& next = options[i - sizes.size()];
      const OptionDef& option = is_flag(next) ? *std::ranges::find_if(options, is_meant) : next;
      values.emplace_back(option.name, value_of(option, word));
    }
    return ops::op(text.kind, sizes, values);
  };
  return kind;
}

/// Whether an op needs nothing that the command line cannot pass, such as other tensors or a
/// process group.
bool can_be_written(const OpDef& def) {
  const auto options = def.signature.options();
  return def.inputs.size() == 1 && def.buffers.empty() && def.extra_outputs.empty() &&
         std::ranges::none_of(options, [](const OptionDef& o) { return o.check.is_required; }) &&
         std::ranges::none_of(def.params, [](const ParamDef& p) { return p.shape.empty(); });
}

/// The ops with a syntax of their own, then all others, whose syntax follows from their
/// definitions.
std::vector<Kind> all_kinds() {
  const Whole extent{1, kMostExtent};
  const Argument channel{"CHANNEL", Text{"CHANNEL", /*may_be_empty=*/false}};
  std::vector<Kind> kinds{
      {"linear",
       "linear:IN:OUT[:nobias]",
       "y = x weight^T + bias",
       {{"IN", extent}, {"OUT", extent}},
       {{"", Choice{{"nobias"}}}},
       [](const OpText& t) {
         return ops::linear(t.whole(0), t.whole(1), {.bias = !t.has("nobias")});
       }},
      {"quantize",
       "quantize[:forward|backward|both]",
       "as the recipe says",
       {},
       {{"", Choice{{"forward", "backward", "both"}}}},
       [](const OpText& t) {
         return ops::quantize(
             {.forward = !t.has("backward"), .backward = t.has("backward") || t.has("both")});
       }},
      {"make_extra_output",
       "make_extra_output[:CHANNEL]",
       "hands a copy to a channel, or to the caller",
       {},
       {channel},
       [](const OpText& t) {
         return ops::make_extra_output({t.channel(), t.channel().empty()});
       }},
      {"add_extra_input",
       "add_extra_input[:CHANNEL]",
       "adds what a channel holds, or the caller passes",
       {},
       {channel},
       [](const OpText& t) { return ops::add_extra_input({.channel = t.channel()}); }},
  };
  for (const std::string& name : op_names()) {
    const OpDef& def = op_def(name);
    if (can_be_written(def) && std::ranges::find(kinds, name, &Kind::name) == kinds.end())
      kinds.push_back(kind_of(def));
  }
  return kinds;
}

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> kinds = all_kinds();
  return kinds;
}

std::vector<std::string> kind_names() {
  std::vector<std::string> names;
  for (const Kind& kind : kinds()) names.push_back(kind.name);
  return names;
}

const Kind& kind_of(const OpText& text) {
  const auto found = std::find_if(kinds().begin(), kinds().end(),
                                  [&](const Kind& kind) { return kind.name == text.kind; });
  if (found != kinds().end()) return *found;
  const std::string near = closest(text.kind, kind_names());
  throw UserError("expected an op (" + join(kind_names()) + "), got \"" + text.kind + "\". " +
                  (near.empty() ? "See tandem explain --help." : "Did you mean " + near + "?"));
}

OpText parse_op(const std::string& word) {
  OpText text;
  text.arguments = split(word, ':');
  text.kind = text.arguments.front();
  text.arguments.erase(text.arguments.begin());
  const Kind& kind = kind_of(text);
  const std::string &usage = kind.usage, in = " in \"" + word + "\"";
  const size_t count = text.arguments.size(), least = kind.required.size(),
               most = least + kind.optional.size();
  if (count < least) {
    throw UserError("expected " + usage + ", got \"" + word + "\" without " +
                    kind.argument(count).name + ". Write each argument after a colon.");
  }
  if (count > most) {
    throw UserError("expected " + usage +
                    (most == 0 ? " without arguments"
                               : " with at most " + std::to_string(most) + " arguments") +
                    ", got " + std::to_string(count) + in + ". Leave the rest out.");
  }
  for (size_t i = 0; i < count; ++i) {
    const Argument& argument = kind.argument(i);
    if (allows(argument.bounds, text.arguments[i])) continue;
    const std::string place = "argument " + std::to_string(i + 1) + " of " + usage;
    throw UserError("expected " +
                    (argument.name.empty() ? place : argument.name + ", " + place + ",") +
                    " to be " + expected(argument.bounds) + ", got \"" + text.arguments[i] + "\"" +
                    in + ". Correct that argument.");
  }
  return text;
}

/// The op's definition; a linear layer stands for two basic ops.
const OpDef& def_of(const OpText& op) {
  return op_def(op.kind == "linear" ? "basic_linear" : op.kind);
}
bool is_glu(const OpText& op) { return def_of(op).family == "glu"; }

/// The width that the ops demand of their input: the width of the first op that has one, doubled
/// for each GLU before it.
int64_t input_width(const std::vector<OpText>& ops) {
  int64_t doubled = 1;
  for (const OpText& op : ops) {
    if (!def_of(op).sizes.empty()) return op.whole(0) * doubled;
    if (op.kind == "reshape") break;
    if (is_glu(op) && doubled < kMostExtent) doubled *= 2;  // a larger one fits in no memory
  }
  throw UserError(
      "expected --width, because no op before a reshape names one, got none. Pass for example "
      "--width 1024.");
}

double elements_of(const std::vector<int64_t>& sizes) {
  double elements = 1;
  for (const int64_t size : sizes) elements *= std::abs(static_cast<double>(size));
  return elements;
}

/// Refuses what exceeds this machine's memory, before sizes are computed as integers.
void check_fits(const std::string& what, double elements, at::ScalarType dtype) {
  const double bytes = elements * static_cast<double>(c10::elementSize(dtype));
  const double memory =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  if (bytes <= memory) return;
  throw UserError("expected tensors that fit in this machine's memory of " + bytes_text(memory) +
                  ", got " + bytes_text(bytes) + " for " + what + ". Pass smaller sizes.");
}

/// The op in the form in which it was written.
std::string described(const OpText& op) {
  return op.arguments.empty() ? op.kind : op.kind + ":" + join(op.arguments, ":");
}

/// The shape after `op`. The pipeline refuses shapes that do not fit.
std::vector<int64_t> shape_after(const OpText& op, std::vector<int64_t> shape) {
  if (op.kind == "linear") {
    shape.back() = op.whole(1);
  } else if (is_glu(op)) {
    shape.back() /= 2;
  } else if (op.kind == "reshape") {
    int64_t elements = 1, known = 1;
    for (const int64_t size : shape) elements *= size;
    shape = op.wholes();
    for (const int64_t size : shape) known *= size == -1 ? 1 : size;
    for (int64_t& size : shape) size = size == -1 ? elements / known : size;
  }
  return shape;
}

}  // namespace

int64_t OpText::whole(size_t index) const { return number<int64_t>(arguments.at(index)).value(); }

std::vector<int64_t> OpText::wholes() const {
  std::vector<int64_t> all;
  for (size_t i = 0; i < arguments.size(); ++i) all.push_back(whole(i));
  return all;
}

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
  add_words(app, "PIPELINE", arguments.words,
            "ops in order, each with its arguments after colons; see below");
  std::vector<std::string> recipes{"none"};
  std::string meanings = "low-precision format";
  for (const NamedRecipe& each : named_recipes()) {
    recipes.emplace_back(each.name);
    meanings += std::string("; ") + each.name + ": " + each.meaning;
  }
  add_option(app, "--recipe", arguments.recipe, Choice{recipes}, meanings);
  add_option(app, "--dtype", arguments.dtype, Choice{{"float32", "bfloat16"}},
             "of input and parameters");
  add_option(app, "--rows", arguments.rows, Whole{1, 1 << 24}, "rows of the input");
  add_option(app, "--width", arguments.width, Whole{0, 1 << 24},
             "columns of the input; 0: as the ops demand");
  add_option(app, "--seed", arguments.seed, Whole{0, 1'000'000'000}, "of the random data");
}

std::string op_list_help() {
  std::string help = "Ops:\n";
  for (const Kind& kind : kinds()) {
    help += format("  %-46s %s\n", kind.usage.c_str(), kind.meaning.c_str());
  }
  return help;
}

ParsedPipeline parse_pipeline(const PipelineArguments& arguments) {
  ParsedPipeline parsed;
  for (const std::string& word : arguments.words) parsed.ops.push_back(parse_op(word));
  const int64_t width = arguments.width > 0 ? arguments.width : input_width(parsed.ops);
  std::vector<int64_t> shape{arguments.rows, width};
  const at::ScalarType dtype = arguments.scalar_type();
  check_fits("the input", elements_of(shape), dtype);
  parsed.input_sizes = shape;
  for (const OpText& op : parsed.ops) {
    if (op.kind == "linear") {
      const std::vector<int64_t> weight{op.whole(0), op.whole(1)};
      check_fits("the weight of " + described(op), elements_of(weight), dtype);
      double rows = 1;
      for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= static_cast<double>(shape[i]);
      parsed.product_flops += 2 * rows * elements_of(weight);
    }
    if (op.kind == "add_extra_input" && op.channel().empty())
      parsed.extra_input_sizes.push_back(shape);
    if (op.kind == "reshape")
      check_fits("the result of " + described(op), elements_of(op.wholes()), dtype);
    shape = shape_after(op, std::move(shape));
    check_fits("the result of " + described(op), elements_of(shape), dtype);
  }
  return parsed;
}

Workload make_workload(const PipelineArguments& arguments) {
  ParsedPipeline parsed = parse_pipeline(arguments);
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(static_cast<uint64_t>(arguments.seed));
  std::vector<Op> ops;
  for (const OpText& op : parsed.ops) ops.push_back(kind_of(op).make(op));
  const at::TensorOptions options(arguments.scalar_type());
  Sequential pipeline(ops, options);
  const auto random = [&](const std::vector<int64_t>& sizes) {
    return at::randn(sizes, options).set_requires_grad(true);
  };
  at::Tensor x = random(parsed.input_sizes);
  std::vector<at::Tensor> extra_inputs;
  for (const auto& sizes : parsed.extra_input_sizes) extra_inputs.push_back(random(sizes));
  return {std::move(parsed), std::move(ops),          std::move(pipeline),
          std::move(x),      std::move(extra_inputs), recipe_named(arguments.recipe)};
}

std::vector<at::Tensor> Workload::forward() {
  std::optional<Autocast> region;
  if (recipe) region.emplace(true, *recipe);
  return pipeline->forward(x, extra_inputs);
}

void backward(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& output : outputs) gradients.push_back(at::ones_like(output));
  torch::autograd::backward(outputs, gradients);
}

}  // namespace tandem::cli
