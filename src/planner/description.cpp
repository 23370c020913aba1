#include "planner/description.h"

#include <c10/util/Exception.h>

#include <map>
#include <nlohmann/json.hpp>

namespace tandem {

namespace {

using nlohmann::json;

std::vector<Binding> bindings_of(const json& op, const char* field, size_t count,
                                 const std::string& label) {
  std::vector<Binding> bindings(count);
  if (!op.contains(field)) return bindings;
  const json& listed = op.at(field);
  TORCH_CHECK_VALUE(listed.size() == count, label, ": expected ", count, " entries in \"", field,
                    "\", got ", listed.size(), ". Give one per slot, null where it is unbound.");
  for (size_t i = 0; i < count; ++i) {
    if (listed[i].is_null()) continue;
    bindings[i].channel = listed[i].value("channel", "");
    bindings[i].to_caller = listed[i].value("to_caller", true);
  }
  return bindings;
}

void check_channels(const std::vector<OpNode>& ops) {
  std::map<std::string, size_t> producers;
  for (size_t i = 0; i < ops.size(); ++i)
    for (const Binding& output : ops[i].extra_outputs) {
      if (output.channel.empty()) continue;
      const auto [entry, is_new] = producers.emplace(output.channel, i);
      TORCH_CHECK_VALUE(is_new, "channel \"", output.channel,
                        "\": expected one producer, got multiple producers, op ", entry->second,
                        " and op ", i, ". Rename one of the channels.");
    }
  for (size_t i = 0; i < ops.size(); ++i)
    for (const Binding& input : ops[i].extra_inputs) {
      if (input.channel.empty()) continue;
      const auto producer = producers.find(input.channel);
      TORCH_CHECK_VALUE(producer != producers.end(), "channel \"", input.channel,
                        "\": expected a producer before op ", i,
                        ", but it has no producer, got only its reader. Bind an extra output to it "
                        "with set_extra_output_channel.");
      TORCH_CHECK_VALUE(producer->second < i, "channel \"", input.channel,
                        "\": expected a producer before op ", i,
                        ", but it has no earlier producer, got op ", producer->second,
                        ". Move the producer to the front.");
    }
}

}  // namespace

size_t Description::param_count() const {
  size_t count = 0;
  for (const OpNode& op : ops)
    for (const uint16_t param : op.params) count = std::max<size_t>(count, param + 1);
  return count;
}

size_t Description::extra_input_count() const {
  size_t count = 0;
  for (const OpNode& op : ops)
    for (const Binding& input : op.extra_inputs) count += input.channel.empty();
  return count;
}

std::shared_ptr<const Description> parse_description(std::string_view text) {
  json parsed;
  try {
    parsed = json::parse(text);
  } catch (const json::parse_error& error) {
    TORCH_CHECK_VALUE(false, "description: expected JSON, got ", error.what(),
                      ". Descriptions are made by the fronts.");
  }
  auto description = std::make_shared<Description>();
  try {
    size_t index = 0;
    for (const json& op : parsed.at("ops")) {
      OpNode node;
      node.def = &op_def(op.at("op").get<std::string>());
      node.label = std::to_string(index) + "." + op.value("label", std::string(node.def->name));
      node.options = node.def->parse(op.value("options", json::object()));
      node.params = op.value("params", std::vector<uint16_t>());
      node.in_place = op.value("in_place", false);
      node.instance = op.value("instance", "");
      TORCH_CHECK_VALUE(node.params.size() == node.def->params.size(), node.label, ": expected ",
                        node.def->params.size(), " parameters, got ", node.params.size(),
                        ". Give the position of each in the parameter list.");
      node.extra_inputs = bindings_of(op, "extra_inputs", node.def->inputs.size() - 1, node.label);
      node.extra_outputs =
          bindings_of(op, "extra_outputs", node.def->extra_outputs.size(), node.label);
      description->ops.push_back(std::move(node));
      ++index;
    }
    description->recipe = recipe_from_json(parsed.value("recipe", json()));
    description->training = parsed.value("training", true);
    description->fuse = parsed.value("fuse", true);
    description->cache_weights = parsed.value("cache_weights", false);
    description->skipped_fusions = parsed.value("skipped_fusions", std::vector<std::string>());
    description->required_fusions = parsed.value("required_fusions", std::vector<std::string>());
    description->fusions_version = parsed.value("fusions_version", uint64_t{0});
  } catch (const json::exception& error) {
    TORCH_CHECK_VALUE(false, "description: expected the fields of a pipeline, got ", error.what(),
                      ". Descriptions are made by the fronts.");
  }
  check_channels(description->ops);
  return description;
}

}  // namespace tandem
