#include "train_options.h"

#include <ATen/Parallel.h>
#include <ATen/cpu/Utils.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "errors.h"
#include "strings.h"
#include "text_data.h"

namespace tandem::cli {

namespace {

using nlohmann::json;

/// Options that a resumed training may change: they decide no number, and the text is compared by
/// its content.
const std::set<std::string> kFree{"threads", "log-every", "text"};

const std::vector<std::string> kRuns{"plain", "tandem", "fp8"};

/// Calls `visit(option name, field)` for everything that decides a number.
template <typename Options, typename Visit>
void for_each_configured(Options& options, const Visit& visit) {
  visit("layers", options.layers);
  visit("hidden", options.hidden);
  visit("heads", options.heads);
  visit("context", options.context);
  visit("dtype", options.dtype);
  visit("batch", options.batch);
  visit("steps", options.steps);
  visit("warmup", options.warmup);
  visit("learning-rate", options.learning_rate);
  visit("weight-decay", options.weight_decay);
  visit("clip", options.clip);
  visit("seed", options.seed);
  visit("runs", options.runs);
  visit("text", options.text);
  visit("threads", options.threads);
  visit("log-every", options.log_every);
}

/// Matrix products in bfloat16 are worth it where the processor has instructions for them.
bool has_bfloat16_products() {
  const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto has = [&](const char* name) {
    const auto found = capabilities.find(name);
    return found != capabilities.end() && found->second.isBool() && found->second.toBool();
  };
  return has("avx512_bf16") || has("amx_bf16");
}

}  // namespace

std::vector<std::string> TrainOptions::run_names() const { return split(runs, ','); }

json configuration_of(const TrainOptions& options) {
  json configuration = json::object();
  for_each_configured(options,
                      [&](const char* name, const auto& field) { configuration[name] = field; });
  return configuration;
}

TrainOptions with_configuration(TrainOptions options, const json& configuration,
                                const std::vector<std::string>& given) {
  for_each_configured(options, [&](const std::string& name, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    const auto saved = configuration.find(name);
    const bool usable =
        saved != configuration.end() &&
        (std::is_same_v<Field, std::string> ? saved->is_string() : saved->is_number());
    if (!usable) {
      throw UserError("expected \"" + name + "\" in the checkpoint's configuration, got " +
                      configuration.dump() +
                      ". Restore the checkpoint from a copy, or start again without --resume.");
    }
    const bool is_given = std::find(given.begin(), given.end(), name) != given.end();
    if (is_given && !kFree.contains(name) && *saved != json(field)) {
      throw UserError(
          "expected --" + name + " " +
          (saved->is_string() ? saved->get<std::string>() : saved->dump()) +
          " as in the checkpoint, got " +
          (json(field).is_string() ? json(field).get<std::string>() : json(field).dump()) +
          ". Leave --" + name + " out, or start again without --resume.");
    }
    if (!is_given) field = saved->template get<Field>();
  });
  return options;
}

TrainOptions resolved(TrainOptions options) {
  if (options.hidden % options.heads != 0 || options.hidden / options.heads % 2 != 0) {
    throw UserError("expected --hidden to be an even multiple of --heads, got --hidden " +
                    std::to_string(options.hidden) + " and --heads " +
                    std::to_string(options.heads) + ". Pass for example --hidden " +
                    std::to_string(32 * options.heads) + ".");
  }
  std::vector<std::string> seen;
  for (const std::string& run : options.run_names()) {
    if (std::find(kRuns.begin(), kRuns.end(), run) == kRuns.end()) {
      throw UserError("expected --runs to list some of " + join(kRuns) + ", got \"" + options.runs +
                      "\". Pass for example --runs plain,fp8.");
    }
    if (std::find(seen.begin(), seen.end(), run) != seen.end()) {
      throw UserError("expected --runs to list each run once, got \"" + options.runs +
                      "\". Leave one " + run + " out.");
    }
    seen.push_back(run);
  }
  if (options.text.empty()) options.text = default_text().string();
  if (options.dtype == "auto") options.dtype = has_bfloat16_products() ? "bfloat16" : "float32";
  if (options.threads == 0) options.threads = at::get_num_threads();
  return options;
}

}  // namespace tandem::cli
