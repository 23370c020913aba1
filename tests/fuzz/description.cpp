// Descriptions with fitting and unfitting arguments, forward and backward: every input ends in a
// result or in an error of torch's.
//
// An input is a description, a zero byte, and bytes that say which tensors are passed (`Bytes`).
// The mutator changes descriptions as JSON, so that most of them are still read.
#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <typeinfo>

#include "autograd/call.h"
#include "kernel_ops/weights/weights.h"
#include "planner/program.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

using nlohmann::json;
using Tensors = std::vector<at::Tensor>;

/// Of every operand that fits.
constexpr int64_t kFeatures = 8;

/// The choices of an input's tail; zeros where it ends.
class Bytes {
 public:
  explicit Bytes(std::string_view bytes) : bytes_(bytes) {}
  uint8_t next() {
    if (bytes_.empty()) return 0;
    const auto byte = static_cast<uint8_t>(bytes_[0]);
    bytes_.remove_prefix(1);
    return byte;
  }

 private:
  std::string_view bytes_;
};

/// Contiguous in the opposite order of dimensions.
at::Tensor transposed(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.rbegin(), order.rend(), 0);
  return at::ones(std::vector<int64_t>(sizes.rbegin(), sizes.rend()), dtype).permute(order);
}

/// A tensor of these sizes: mostly float32 and contiguous, else of any dtype, expanded, transposed,
/// without elements or without memory.
at::Tensor tensor_of(std::vector<int64_t> sizes, Bytes& choices) {
  const uint8_t form = choices.next();
  static constexpr at::ScalarType kDtypes[] = {
      at::kFloat, at::kFloat, at::kFloat, at::kBFloat16, at::kHalf,        at::kDouble,
      at::kLong,  at::kByte,  at::kBool,  at::kInt,      at::kComplexFloat};
  at::ScalarType dtype = at::kFloat;
  if ((form & 1) != 0) dtype = kDtypes[choices.next() % std::size(kDtypes)];
  if ((form & 2) != 0) {
    const uint8_t change = choices.next();
    static constexpr int64_t kSizes[] = {0, 1, 2, 3, kFeatures, 2 * kFeatures, 17};
    const int64_t size = kSizes[change % std::size(kSizes)];
    if (change % 5 == 0 || sizes.empty()) {
      sizes.push_back(size);
    } else if (change % 5 == 1) {
      sizes.pop_back();
    } else {
      sizes[change % sizes.size()] = size;
    }
  }
  at::Tensor tensor = at::ones(sizes, dtype);
  if ((form & 4) != 0) tensor = transposed(sizes, dtype);
  if ((form & 8) != 0) tensor = at::ones({}, dtype).expand(sizes);
  if ((form & 16) != 0 && tensor.dim() >= 1 && tensor.size(0) > 1)
    tensor = tensor.narrow(0, 1, tensor.size(0) - 1);
  if ((form & 96) == 96) tensor = tensor.to(at::kMeta);
  if ((form & 128) == 0 && (at::isFloatingType(dtype) || at::isComplexType(dtype)))
    tensor = tensor.detach().requires_grad_();
  return tensor;
}

/// Tensors for a description whose ops all keep kFeatures, and then what `choices` makes of them.
struct Operands {
  Tensors inputs, params, workspaces;

  Operands(const tandem::Description& description, Bytes& choices) {
    int64_t features = kFeatures;
    std::vector<std::vector<int64_t>> shapes(std::min<size_t>(description.param_count(), 64));
    Tensors weights;
    for (const tandem::OpNode& op : description.ops) {
      const bool is_product = op.kind->def.name == "basic_linear";
      for (const uint32_t param : op.params)
        if (param < shapes.size())
          shapes[param] = is_product ? std::vector<int64_t>{2 * kFeatures, features}
                                     : std::vector<int64_t>{features};
      if (is_product) features = 2 * kFeatures;
      if (op.kind->def.family == "glu") features /= 2;
    }
    const uint8_t counts = choices.next();
    inputs.push_back(tensor_of({3, kFeatures}, choices));
    for (size_t i = 0; i < std::min<size_t>(description.extra_input_count(), 16); ++i)
      inputs.push_back(tensor_of({3, kFeatures}, choices));
    for (const auto& shape : shapes) params.push_back(tensor_of(shape, choices));
    if ((counts & 3) == 1) inputs.push_back(tensor_of({3, kFeatures}, choices));
    if ((counts & 12) == 4 && !params.empty()) params.pop_back();
    if ((counts & 12) == 8) params.push_back(inputs.back());
    if ((counts & 48) == 16 && inputs.size() > 1) inputs.pop_back();
    if (!description.cache_weights) return;
    for (const tandem::OpNode& op : description.ops) {
      if (op.kind->def.name != "basic_linear" || op.params[0] >= params.size()) continue;
      workspaces.push_back(workspace(params[op.params[0]].sizes().vec(), at::kByte, choices));
      workspaces.push_back(workspace({}, at::kFloat, choices));
      workspaces.push_back(workspace({}, at::kFloat, choices));
      workspaces.push_back(workspace({tandem::kernel_ops::kStampSize}, at::kLong, choices));
    }
    if ((counts & 192) == 64 && !workspaces.empty()) workspaces.pop_back();
    if ((counts & 192) == 128 && !workspaces.empty()) workspaces.push_back(workspaces[0]);
  }

 private:
  static at::Tensor workspace(const std::vector<int64_t>& sizes, at::ScalarType dtype,
                              Bytes& choices) {
    const uint8_t form = choices.next();
    if (form == 1) return at::zeros({}, dtype).expand(sizes);
    if (form == 2) return at::zeros({3}, dtype);
    if (form == 3) return at::zeros(sizes, at::kFloat);
    return at::zeros(sizes, dtype);
  }
};

/// A failed assertion is a defect; every other error is an answer. Errors of subclasses are no
/// assertions, but may quote these words from the input.
void check_error(const c10::Error& error) {
  if (typeid(error) != typeid(c10::Error) ||
      error.msg().find("INTERNAL ASSERT FAILED") == std::string::npos)
    return;
  std::fprintf(stderr, "%s\n", error.what());
  std::abort();
}

void run(const std::string& text, Bytes choices) {
  tandem::Program program(text);
  const uint8_t mode = choices.next();
  const Operands operands(program.description(), choices);
  const tandem::Arguments arguments{operands.inputs, operands.params, operands.workspaces};
  const bool direct = (mode & 1) == 0 && tandem::is_direct(arguments);
  const auto& plan =
      program.plan_for(tandem::key_for(program, arguments, /*traced=*/(mode & 2) != 0 || !direct));
  // Through the dispatcher only now and then: it parses the description once more.
  const bool by_op = std::hash<std::string>()(text) % 16 == 0;
  const tandem::Outputs outputs =
      by_op ? tandem::call_op(arguments, text)
            : tandem::run_pipeline(plan, arguments,
                                   direct ? tandem::Path::direct : tandem::Path::dispatch);
  Tensors from, grads, requested;
  for (const at::Tensor& output : outputs)
    if (output.requires_grad() && (choices.next() & 3) != 3) {
      from.push_back(output);
      grads.push_back(at::ones_like(output));
    }
  for (const at::TensorList list : {arguments.inputs, arguments.params})
    for (const at::Tensor& tensor : list)
      if (tensor.requires_grad() && (choices.next() & 3) != 3) requested.push_back(tensor);
  if (!from.empty() && !requested.empty()) tandem::gradients_of(from, requested, grads);
}

// ---- mutation ----

/// All nodes of a document.
void collect(json& node, std::vector<json*>& nodes) {
  nodes.push_back(&node);
  if (node.is_structured())
    for (json& child : node) collect(child, nodes);
}

json interesting(std::minstd_rand& random) {
  static const auto& values = *new json(json::parse(R"([
    null, true, false, 0, 1, -1, 2, 65535, 65536, 4294967296, 9223372036854775807,
    18446744073709551615, 1e308, -0.0, 0.5, "", "r", "x", [], {}, [null], [-1], [0, 8], [24],
    [3, 8], {"channel": "r"}, {"channel": "r", "to_caller": false},
    {"name": "Float8CurrentScaling"},
    {"op": "gelu"}, {"op": "identity"}, {"op": "reshape", "options": {"shape": [-1, 8]}},
    {"op": "make_extra_output", "extra_outputs": [{"channel": "r"}]},
    {"op": "add_extra_input", "extra_inputs": [{"channel": "r"}]}, {"op": "add_extra_input"},
    {"op": "add_extra_input", "in_place": true}, {"op": "dropout", "options": {"p": 0.5}},
    {"op": "quantize", "options": {"forward": true, "backward": true}}, {"op": "swiglu"},
    {"op": "basic_linear", "params": [0]}, {"op": "basic_linear", "params": [1]},
    {"op": "bias", "params": [1]}, {"op": "rms_norm", "params": [2]},
    {"op": "layer_norm", "params": [3, 4]}, {"op": "constant_scale", "options": {"factor": 2}}
  ])"));
  return values[random() % values.size()];
}

void mutate(json& document, std::minstd_rand& random) {
  std::vector<json*> nodes;
  collect(document, nodes);
  json& node = *nodes[random() % nodes.size()];
  switch (random() % 6) {
    case 0:
      node = interesting(random);
      break;
    case 1:
      node = json(*nodes[random() % nodes.size()]);
      break;
    case 2:
      if (node.is_array())
        node.insert(node.begin() + static_cast<std::ptrdiff_t>(random() % (node.size() + 1)),
                    interesting(random));
      break;
    case 3:
      if (node.is_structured() && !node.empty()) {
        auto member = node.begin();
        std::advance(member, static_cast<std::ptrdiff_t>(random() % node.size()));
        node.erase(member);
      }
      break;
    case 4:
      if (node.is_array() && node.size() > 1)
        std::swap(node[random() % node.size()], node[random() % node.size()]);
      break;
    default:
      static constexpr const char* kFields[] = {"op",
                                                "options",
                                                "params",
                                                "label",
                                                "in_place",
                                                "instance",
                                                "extra_inputs",
                                                "extra_outputs",
                                                "recipe",
                                                "training",
                                                "fuse",
                                                "cache_weights",
                                                "channel",
                                                "to_caller",
                                                "shape",
                                                "eps",
                                                "p",
                                                "skipped_fusions",
                                                "required_fusions"};
      if (node.is_object()) node[kFields[random() % std::size(kFields)]] = interesting(random);
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  at::set_num_threads(1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(input.find('\0'), input.size());
  try {
    run(std::string(input.substr(0, end)), Bytes(input.substr(std::min(end + 1, input.size()))));
  } catch (const c10::Error& error) {
    check_error(error);
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  std::minstd_rand random(seed);
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(input.find('\0'), input.size());
  json document = json::parse(input.substr(0, end), nullptr, /*allow_exceptions=*/false);
  if (document.is_discarded() || random() % 4 == 0) return LLVMFuzzerMutate(data, size, max_size);
  std::string tail(input.substr(end));
  if (tail.empty()) tail.assign(1, '\0');
  if (random() % 3 == 0) {
    std::vector<uint8_t> bytes(tail.begin() + 1, tail.end());
    bytes.resize(64);
    bytes.resize(LLVMFuzzerMutate(bytes.data(), tail.size() - 1, bytes.size()));
    tail.assign(1, '\0');
    tail.append(bytes.begin(), bytes.end());
  } else {
    mutate(document, random);
  }
  const std::string text =
      document.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace) + tail;
  if (text.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::copy(text.begin(), text.end(), data);
  return text.size();
}
