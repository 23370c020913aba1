#include "front/describe.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "core/json_fields.h"

namespace tandem {

namespace {

using nlohmann::json;

void check_text(const std::string& name, const BasicOp& op) {
  try {
    json(name).dump();
  } catch (const json::type_error&) {
    TORCH_CHECK_VALUE(false, op.name, ": expected a channel named in UTF-8, got \"", shown(name),
                      "\". Rename it.");
  }
}

json bindings(const std::vector<Channel>& channels, const BasicOp& op, bool are_outputs) {
  json listed = json::array();
  for (const Channel& channel : channels) {
    if (channel.name.empty()) {
      listed.push_back(nullptr);
      continue;
    }
    check_text(channel.name, op);
    json& binding = listed.emplace_back(json{{"channel", channel.name}});
    if (are_outputs) binding["to_caller"] = channel.output_to_caller;
  }
  return listed;
}

}  // namespace

DescribedOps describe(const std::vector<Op>& ops) {
  DescribedOps described;
  json entries = json::array();
  size_t state_holders = 0;
  for (size_t i = 0; i < ops.size(); ++i) {
    SlotCount& slots = described.slots.emplace_back();
    std::vector<std::optional<size_t>> places(ops[i].parameters.size());
    for (const BasicOp& basic : ops[i].basic_ops) {
      json& entry = entries.emplace_back(json{{"op", basic.name}});
      json& options = entry["options"] = json::object();
      for (const auto& [name, value] : basic.options) options[name] = json_of(value);
      json &params = entry["params"] = json::array(), buffers = json::array();
      for (const size_t parameter : basic.parameters) {
        TORCH_CHECK_VALUE(parameter < places.size(), basic.name, ": expected the place of one of ",
                          places.size(), " parameters of ", ops[i].name, ", got ", parameter,
                          ". Number them from 0.");
        const ParameterSpec& spec = ops[i].parameters[parameter];
        if (!places[parameter]) {
          places[parameter] = described.parameters.size();
          described.parameters.push_back({i, parameter});
        }
        params.push_back(*places[parameter]);
        if (!spec.main_grad.defined()) continue;
        buffers.push_back(described.main_grads.size());
        described.main_grads.push_back(spec.main_grad);
      }
      if (!buffers.empty()) entry["buffers"] = std::move(buffers);
      if (!basic.extra_inputs.empty())
        entry["extra_inputs"] = bindings(basic.extra_inputs, basic, /*are_outputs=*/false);
      if (!basic.extra_outputs.empty())
        entry["extra_outputs"] = bindings(basic.extra_outputs, basic, /*are_outputs=*/true);
      if (basic.in_place) entry["in_place"] = true;
      if (const SlotCount own = quantize_slots(op_def(basic.name));
          own.forward + own.backward != 0) {
        entry["state"] = {
            {"module", state_holders}, {"forward", slots.forward}, {"backward", slots.backward}};
        slots = {slots.forward + own.forward, slots.backward + own.backward};
      }
    }
    state_holders += slots.forward + slots.backward != 0;
  }
  described.text = entries.dump();
  return described;
}

}  // namespace tandem
