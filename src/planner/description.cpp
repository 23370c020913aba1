#include "planner/description.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "core/build_id.h"
#include "core/json_fields.h"
#include "core/op_source.h"

namespace tandem {

namespace {

using nlohmann::json;

std::vector<Binding> bindings_of(const json* listed, const char* field, size_t count,
                                 const std::string& label) {
  std::vector<Binding> bindings(count);
  if (listed == nullptr) return bindings;
  TORCH_CHECK_VALUE(listed->is_array() && listed->size() == count, label, ": expected ", count,
                    " entries in \"", field, "\", got ",
                    listed->is_array() ? std::to_string(listed->size()) : shown_json(*listed),
                    ". Give one per slot, null where it is unbound.");
  for (size_t i = 0; i < count; ++i) {
    if ((*listed)[i].is_null()) continue;
    Fields((*listed)[i], label + ": " + field)
        .get("channel", bindings[i].channel)
        .get("to_caller", bindings[i].to_caller)
        .finish();
  }
  return bindings;
}

/// The number of tensors of an op's operands [first, last), counting the elements of lists.
size_t count_of(const OpNode& node, size_t first, size_t last) {
  size_t count = 0;
  for (size_t operand = first; operand < last; ++operand) {
    const std::string_view name = node.kind->operands[operand];
    count += is_list(name) ? node.kind->def.list_length(node.options.get(), name) : 1;
  }
  return count;
}

/// Positions in a list of the pipeline: one per operand of that sort, none twice.
std::vector<uint32_t> positions_of(Fields& op, const OpNode& node, const char* field, size_t count,
                                   const char* what) {
  std::vector<int64_t> positions;
  op.get(field, positions, limits::kParams, 0, limits::kParams - 1);
  TORCH_CHECK_VALUE(positions.size() == count, node.label, ": expected ", count, " ", what,
                    "s, got ", positions.size(), ". Give the position of each in the ", what,
                    " list.");
  TORCH_CHECK_VALUE(
      std::set<int64_t>(positions.begin(), positions.end()).size() == positions.size(), node.label,
      ": expected ", what, "s at different positions, got one twice in ",
      shown_json(json(positions)), ". Give each its own.");
  return {positions.begin(), positions.end()};
}

/// The number of tensors of each of the `count` parameters; empty if each is one tensor.
std::vector<uint32_t> joins_of(Fields& op, const OpNode& node, size_t count) {
  std::vector<int64_t> joins;
  op.get("joins", joins, limits::kParams, 1, limits::kParams);
  TORCH_CHECK_VALUE(joins.empty() || joins.size() == count, node.label, ": expected ", count,
                    " numbers in \"joins\", got ", joins.size(),
                    ". Say of each parameter how many tensors it is.");
  return {joins.begin(), joins.end()};
}

/// `kinds` holds the kind if it is not registered.
OpNode op_node(const json& entry, size_t index, std::vector<std::shared_ptr<const OpKind>>& kinds) {
  Fields op(entry, "description: op " + std::to_string(index));
  OpNode node;
  std::string name;
  op.at("op");
  op.get("op", name);
  auto kind = find_op(name);
  node.kind = kind.get();
  if (kind.use_count() != 0) kinds.push_back(std::move(kind));
  const OpDef& def = node.kind->def;
  std::string label(def.name);
  op.get("label", label);
  node.label = std::to_string(index) + "." + label;
  const json* options = op.find("options");
  const OptionValues given = options_from_json(def.name, options == nullptr ? json() : *options);
  node.options =
      def.parse != nullptr ? def.parse(def, given) : def.signature.parse(def.name, given);
  const OpKind& operands = *node.kind;
  const size_t params = count_of(node, operands.first_param, operands.first_buffer);
  node.joins = joins_of(op, node, params);
  node.params = positions_of(op, node, "params",
                             node.joins.empty()
                                 ? params
                                 : std::accumulate(node.joins.begin(), node.joins.end(), size_t{0}),
                             "parameter");
  node.buffers = positions_of(
      op, node, "buffers", count_of(node, operands.first_buffer, operands.first_result), "buffer");
  if (const json* state = op.find("state")) {
    Fields fields(*state, node.label + ": state");
    const auto number = [&](const char* name) {
      int64_t value = 0;
      fields.at(name);
      fields.get(name, value, 0, limits::kParams);
      return static_cast<uint32_t>(value);
    };
    node.state = {number("module"), number("forward"), number("backward")};
    fields.finish();
  }
  op.get("in_place", node.in_place)
      .get("instance", node.instance)
      .get("recompute", node.recompute)
      .get("keeps_dtype", node.keeps_dtype);
  node.extra_inputs = bindings_of(op.find("extra_inputs"), "extra_inputs",
                                  extra_input_count(def, node.options.get()), node.label);
  node.extra_outputs =
      bindings_of(op.find("extra_outputs"), "extra_outputs", def.extra_outputs.size(), node.label);
  op.finish();
  return node;
}

void check_channels(const std::vector<OpNode>& ops) {
  std::map<std::string, size_t> producers;
  for (size_t i = 0; i < ops.size(); ++i)
    for (const Binding& output : ops[i].extra_outputs) {
      if (output.channel.empty()) continue;
      const auto [entry, is_new] = producers.emplace(output.channel, i);
      TORCH_CHECK_VALUE(is_new, "channel \"", shown(output.channel),
                        "\": expected one producer, got multiple producers, op ", entry->second,
                        " and op ", i, ". Rename one of the channels.");
    }
  for (size_t i = 0; i < ops.size(); ++i)
    for (const Binding& input : ops[i].extra_inputs) {
      if (input.channel.empty()) continue;
      const auto producer = producers.find(input.channel);
      TORCH_CHECK_VALUE(producer != producers.end(), "channel \"", shown(input.channel),
                        "\": expected a producer before op ", i,
                        ", but it has no producer, got only its reader. Bind an extra output to it "
                        "with set_extra_output_channel.");
      TORCH_CHECK_VALUE(producer->second < i, "channel \"", shown(input.channel),
                        "\": expected a producer before op ", i,
                        ", but it has no earlier producer, got op ", producer->second,
                        ". Move the producer to the front.");
    }
}

/// By op: the positions of its buffers among those of the pipeline.
std::vector<std::vector<size_t>> positions_of_buffers(const std::vector<OpEntry>& ops) {
  std::vector<std::vector<size_t>> positions(ops.size());
  std::vector<size_t> params;  // by position of a main_grad
  for (size_t i = 0; i < ops.size(); ++i)
    for (const size_t param : ops[i].main_grads) {
      const auto known = std::ranges::find(params, param);
      positions[i].push_back(static_cast<size_t>(known - params.begin()));
      if (known == params.end()) params.push_back(param);
    }
  size_t next = params.size();
  for (const auto count : {&OpEntry::deferred, &OpEntry::given})
    for (size_t i = 0; i < ops.size(); ++i)
      for (size_t tensor = 0; tensor < ops[i].*count; ++tensor) positions[i].push_back(next++);
  return positions;
}

void write_bindings(json& entry, const char* field, const std::vector<Binding>& bindings,
                    const OpEntry& op) {
  if (std::ranges::all_of(bindings, [](const Binding& each) { return each.channel.empty(); }))
    return;
  json& written = entry[field] = json::array();
  for (const Binding& binding : bindings) {
    json& slot = written.emplace_back();
    if (binding.channel.empty()) continue;
    TORCH_CHECK_VALUE(is_utf8(binding.channel), op.op,
                      ": expected a channel named in UTF-8, got \"", shown(binding.channel),
                      "\". Rename it.");
    slot["channel"] = binding.channel;
    if (!binding.to_caller) slot["to_caller"] = false;
  }
}

/// Rejects descriptions of another version or build, to which an equal text may mean something
/// else. A description that is written by hand carries neither.
void check_origin(Fields& fields) {
  uint64_t version = kDescriptionVersion;
  std::string build = build_id();
  fields.get("version", version).get("build", build);
  TORCH_CHECK_VALUE(version == kDescriptionVersion, "description: expected version ",
                    kDescriptionVersion, ", got ", version,
                    ". Export or compile the model again with this version of Tandem.");
  TORCH_CHECK_VALUE(build == build_id(), "description: expected one of this build of Tandem, ",
                    build_id(), ", got one of another build, ", shown(build),
                    ". Export or compile the model again, or call run_decompositions() before "
                    "saving it: what remains needs no description.");
}

}  // namespace

bool Description::recomputes() const {
  return std::ranges::any_of(ops, [](const OpNode& op) { return op.recompute; });
}

size_t Description::param_count() const {
  size_t count = 0;
  for (const OpNode& op : ops)
    for (const uint32_t param : op.params) count = std::max(count, size_t{param} + 1);
  return count;
}

size_t Description::buffer_count() const {
  size_t count = 0;
  for (const OpNode& op : ops)
    for (const uint32_t buffer : op.buffers) count = std::max(count, size_t{buffer} + 1);
  return count;
}

size_t Description::extra_input_count() const {
  size_t count = 0;
  for (const OpNode& op : ops)
    for (const Binding& input : op.extra_inputs) count += input.channel.empty();
  return count;
}

std::shared_ptr<const Description> parse_description(std::string_view text) {
  const json parsed = parse_json(text, "description");
  auto description = std::make_shared<Description>();
  Fields fields(parsed, "description");
  check_origin(fields);
  const json& ops = fields.at("ops");
  TORCH_CHECK_VALUE(ops.is_array() && ops.size() <= limits::kOps,
                    "description: expected a list of at most ", limits::kOps, " ops, got ",
                    ops.is_array() ? std::to_string(ops.size()) : shown_json(ops),
                    ". Cut the pipeline into several.");
  for (const json& op : ops)
    description->ops.push_back(op_node(op, description->ops.size(), description->kinds));
  for (const OpNode& op : description->ops)
    TORCH_CHECK_VALUE(!op.state || op.state->holder < description->ops.size(), op.label,
                      ": expected the number of a module below that of the ops, ",
                      description->ops.size(), ", in \"state\", got ", op.state->holder,
                      ". Number them from 0.");
  if (const json* recipe = fields.find("recipe")) description->recipe = recipe_from_json(*recipe);
  fields.get("training", description->training)
      .get("fuse", description->fuse)
      .get("cache_weights", description->cache_weights)
      .get("skipped_fusions", description->skipped_fusions, limits::kFusionNames)
      .get("required_fusions", description->required_fusions, limits::kFusionNames)
      .get("fusions_version", description->fusions_version)
      .get("watched", description->watched, 0, std::numeric_limits<int64_t>::max());
  if (fields.find("memory_budget") != nullptr) {
    double bytes_per_row = 0;
    fields.get("memory_budget", bytes_per_row);
    check_memory_budget(bytes_per_row);
    description->memory_budget = bytes_per_row;
  }
  std::string process;  // distinguishes descriptions, for caches that must not outlive a process
  fields.get("process", process).finish();
  check_channels(description->ops);
  if (description->memory_budget || description->recomputes())
    description->sizes_in_key =
        std::ranges::any_of(description->ops,
                            [](const OpNode& op) { return op.kind->def.views_input; })
            ? SizesInKey::all
            : SizesInKey::but_rows;
  return description;
}

void check_memory_budget(double bytes_per_row) {
  TORCH_CHECK_VALUE(std::isfinite(bytes_per_row) && bytes_per_row >= 0,
                    "memory_budget: expected a finite number of bytes per row that is not "
                    "negative, got ",
                    bytes_per_row, ". Leave the budget out where there is no limit.");
}

std::string write_ops(const std::vector<OpEntry>& ops) {
  json written = json::array();
  const std::vector<std::vector<size_t>> buffers = positions_of_buffers(ops);
  for (const OpEntry& op : ops) {
    TORCH_CHECK_VALUE(op.joins.empty() || op.main_grads.empty(), written.size(), ".", op.op,
                      ": expected no main_grad of a parameter that is several tensors, got one. "
                      "Return its gradient, or give one tensor.");
    for (const auto& [name, value] : op.options) {
      const auto* text = std::get_if<std::string>(&value);
      TORCH_CHECK_VALUE(is_utf8(name) && (text == nullptr || is_utf8(*text)), op.op,
                        ": expected options in UTF-8, got ", shown(name), " \"",
                        text == nullptr ? "" : shown(*text), "\". Encode it so.");
      const auto* number = std::get_if<double>(&value);
      TORCH_CHECK_VALUE(number == nullptr || std::isfinite(*number), op.op, ": expected option ",
                        name, " to be a finite number, got ", *number, ". Give another one.");
    }
    json& entry = written.emplace_back(json{{"op", op.op}, {"params", op.params}});
    entry["options"] = json_of(op.options);
    TORCH_CHECK_VALUE(entry["options"].size() == op.options.size(), op.op,
                      ": expected each option once, got one twice. Leave one out.");
    if (!op.label.empty()) entry["label"] = op.label;
    if (!op.joins.empty()) entry["joins"] = op.joins;
    if (const auto& own = buffers[written.size() - 1]; !own.empty()) entry["buffers"] = own;
    write_bindings(entry, "extra_inputs", op.extra_inputs, op);
    write_bindings(entry, "extra_outputs", op.extra_outputs, op);
    if (op.in_place) entry["in_place"] = true;
    if (op.recompute) entry["recompute"] = true;
    if (op.keeps_dtype) entry["keeps_dtype"] = true;
    if (op.state)
      entry["state"] = {{"module", op.state->holder},
                        {"forward", op.state->forward},
                        {"backward", op.state->backward}};
    if (!op.instance.empty()) entry["instance"] = op.instance;
  }
  return written.dump();
}

std::string write_description(std::string_view ops, std::string_view recipe,
                              const PlanningTerms& terms, const std::string& process) {
  json description{{"version", kDescriptionVersion},
                   {"build", build_id()},
                   {"training", terms.training},
                   {"fusions_version", terms.fusions_version}};
  description["ops"] = parse_json(ops, "description");
  description["recipe"] = parse_json(recipe, "recipe");
  if (!terms.fuse) description["fuse"] = false;
  if (terms.cache_weights) description["cache_weights"] = true;
  if (terms.watched != 0) description["watched"] = terms.watched;
  if (!terms.skipped_fusions.empty()) description["skipped_fusions"] = terms.skipped_fusions;
  if (!terms.required_fusions.empty()) description["required_fusions"] = terms.required_fusions;
  if (terms.memory_budget) description["memory_budget"] = *terms.memory_budget;
  if (!process.empty()) description["process"] = process;
  return description.dump();
}

}  // namespace tandem
