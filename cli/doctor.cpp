#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/cpu/Utils.h>
#include <tandem/tandem.h>
#include <torch/version.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "commands.h"
#include "errors.h"
#include "files.h"
#include "output.h"
#include "text.h"

namespace tandem::cli {

namespace {

using nlohmann::json;

/// A fact about the machine: whether it is as it should be, and what to do if not.
struct Finding {
  std::string name, value;
  bool good = true;
  std::string remedy = {};
};

void to_json(json& to, const Finding& from) {
  to = {{"name", from.name}, {"value", from.value}, {"good", from.good}, {"remedy", from.remedy}};
}

/// The version of the running libtorch, from its build description. The headers have only the
/// version that Tandem was built with.
std::string running_torch() {
  const std::string config = at::show_config(), key = "TORCH_VERSION=";
  const size_t found = config.find(key);
  if (found == std::string::npos) return "unknown";
  const size_t begin = found + key.size();
  return config.substr(begin, config.find_first_of(", \n", begin) - begin);
}

Finding torch_finding() {
  const std::string built = TORCH_VERSION, running = running_torch();
  const auto release = [](const std::string& version) {
    return version.substr(0, version.find('+'));
  };
  const bool same = running == "unknown" || release(built) == release(running);
  return {"libtorch", "built against " + built + ", running " + running, same,
          same ? "" : "Build Tandem against the libtorch that it runs with."};
}

std::string cpu_name() {
  const auto capabilities = at::cpu::get_cpu_capabilities();
  std::vector<std::string> names;
  for (const auto& [name, value] : capabilities) {
    if (value.isBool() && value.toBool() &&
        (name.starts_with("avx") || name.starts_with("amx") || name.starts_with("sve"))) {
      names.push_back(name);
    }
  }
  std::sort(names.begin(), names.end());
  return join(names);
}

std::vector<Finding> examine() {
  const auto cores = std::thread::hardware_concurrency();
  const std::vector<std::string> targets = cpu_targets();
  const bool openmp = at::hasOpenMP(), cuda = at::hasCUDA();
  std::error_code error;
  const bool trains = std::filesystem::exists(program_folder() / "tandem-train", error);
  return {
      {"tandem", version()},
      torch_finding(),
      {"CPU kernels", targets.empty() ? "none" : join(targets), !targets.empty(),
       targets.empty() ? "Build Tandem for this processor: no vector code of it runs here." : ""},
      {"CPU instructions", cpu_name()},
      {"threads", format("%d of %u cores", at::get_num_threads(), cores)},
      {"OpenMP in libtorch", openmp ? "yes" : "no", openmp,
       openmp ? "" : "Install a libtorch with OpenMP to use more than one core."},
      {"matrix products",
       join({at::hasMKL() ? "MKL" : "no MKL", at::hasMKLDNN() ? "oneDNN" : "no oneDNN"}),
       at::hasMKL() || at::hasMKLDNN(),
       at::hasMKL() || at::hasMKLDNN() ? ""
                                       : "Install the official torch wheel: products run slowly."},
      {"GPU",
       cuda ? format("%d CUDA device(s)", static_cast<int>(at::getNumGPUs()))
            : "none that libtorch can use",
       true,
       cuda ? ""
            : "Nothing is wrong: FP8 is emulated on the CPU. For a GPU, install a CUDA build of "
              "torch."},
      {"tandem train", trains ? "installed" : "not installed", true,
       trains ? "" : "Nothing is wrong: the trainer is a part of the Python package."},
  };
}

int doctor(bool as_json) {
  const std::vector<Finding> findings = examine();
  const bool healthy =
      std::all_of(findings.begin(), findings.end(), [](const Finding& f) { return f.good; });
  if (as_json) {
    const json document{{"command", "doctor"},
                        {"healthy", healthy},
                        {"tandem", version()},
                        {"torch_built", TORCH_VERSION},
                        {"torch_running", running_torch()},
                        {"cpu_targets", cpu_targets()},
                        {"threads", at::get_num_threads()},
                        {"cuda", at::hasCUDA()},
                        {"findings", findings}};
    print(document.dump(1) + "\n");
    return kExitOk;
  }
  std::string text;
  for (const Finding& finding : findings) {
    text += format("%s %-22s %s\n", finding.good ? "ok     " : "MISSING", finding.name.c_str(),
                   finding.value.c_str());
    if (!finding.remedy.empty()) text += format("%31s%s\n", "", finding.remedy.c_str());
  }
  print(text +
        (healthy ? "All that Tandem needs is here.\n" : "Something is missing; see above.\n"));
  return kExitOk;
}

}  // namespace

void add_doctor(CLI::App& tandem, Action& action) {
  const auto as_json = std::make_shared<bool>(false);
  CLI::App& app = add_command(
      tandem, "doctor",
      "Say what Tandem finds on this machine, what is missing, and what to do about it.", "",
      action, [as_json] { return doctor(*as_json); });
  add_flag(app, "--json", *as_json, "print one JSON document");
}

}  // namespace tandem::cli
