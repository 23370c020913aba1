#include "inspection.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <vector>

#include "program/strings.h"
#include "quantization/inspection.h"

namespace tandem::apps {

namespace {

using nlohmann::json;

constexpr double kMostDecibels = 60;

double decibels(const json& row) {
  const json& ratio = row.at("signal_to_noise");
  return ratio.is_null() ? kMostDecibels : std::clamp(ratio.get<double>(), 0.0, kMostDecibels);
}

bool is_bad(const json& row) {
  return row.at("saturation").get<double>() > 0 || row.at("not_finite").get<int64_t>() > 0;
}

}  // namespace

void Inspection::take(const std::string& run, int64_t step, bool quiet,
                      const std::function<std::string(int64_t, size_t)>& name) {
  for (const WatchedQuantization& each : take_watched()) {
    const QuantizationStatistics& found = each.statistics;
    const bool is_exact = !std::isfinite(found.signal_to_noise);
    const std::string of_group = each.group < 0 ? "" : ", group " + std::to_string(each.group);
    json row{{"run", run},
             {"step", step},
             {"tensor", name(each.pipeline, each.op) + of_group + ": " + each.role},
             {"quantizer", each.quantizer},
             {"amax", found.amax},
             {"scale", found.largest_scale},
             {"underflow", found.underflow},
             {"saturation", found.saturation},
             {"signal_to_noise", is_exact ? json() : json(found.signal_to_noise)},
             {"not_finite", found.not_finite}};
    if (!quiet && is_bad(row)) tell(row);
    rows_.push_back(std::move(row));
  }
}

void Inspection::tell(const json& row) {
  const std::string run = row.at("run"), tensor = row.at("tensor");
  if (!told_.emplace(run, tensor).second) return;
  const double saturation = row.at("saturation");
  const std::string what =
      saturation > 0 ? format("%.2f %% of its numbers beyond the format's range", 100 * saturation)
                     : format("%lld numbers that are not finite",
                              static_cast<long long>(row.at("not_finite").get<int64_t>()));
  std::fprintf(stderr,
               "\ntandem train: warning: expected %s of run %s in the range of %s, got %s in step "
               "%lld (amax %.3g, scale %.3g). Use a recipe whose scales follow the tensor, or look "
               "where it grows.\n",
               tensor.c_str(), run.c_str(), row.at("quantizer").get<std::string>().c_str(),
               what.c_str(), static_cast<long long>(row.at("step").get<int64_t>()),
               row.at("amax").get<double>(), row.at("scale").get<double>());
}

std::string inspection_svg(const json& rows) {
  constexpr double kLeft = 330, kWide = 300, kLine = 30, kTop = 34, kHigh = 22;
  std::vector<std::string> order;
  std::map<std::string, std::vector<const json*>> tensors;
  int64_t last = 1;
  for (const json& row : rows) {
    const std::string key =
        row.at("run").get<std::string>() + ", " + row.at("tensor").get<std::string>();
    if (!tensors.contains(key)) order.push_back(key);
    tensors[key].push_back(&row);
    last = std::max(last, row.at("step").get<int64_t>());
  }
  const auto x = [&](const json& row) {
    return kLeft + kWide * row.at("step").get<double>() / static_cast<double>(last);
  };
  std::string svg = format(
      "<svg viewBox=\"0 0 %g %g\" class=\"inspection\" role=\"img\" aria-label=\"Signal to noise "
      "of each tensor\">\n<text x=\"%g\" y=\"20\">signal to noise, 0 to %g dB, over %lld "
      "steps</text>\n",
      kLeft + kWide + 130, kTop + kLine * static_cast<double>(order.size()) + 10, kLeft,
      kMostDecibels, static_cast<long long>(last));
  for (size_t i = 0; i < order.size(); ++i) {
    const double base = kTop + kLine * static_cast<double>(i + 1) - 4;
    std::string points, circles;
    double worst = kMostDecibels;
    for (const json* row : tensors[order[i]]) {
      const double y = base - kHigh * decibels(*row) / kMostDecibels;
      points += format("%.1f,%.1f ", x(*row), y);
      worst = std::min(worst, decibels(*row));
      if (is_bad(*row))
        circles += format(
            "<circle class=\"bad\" cx=\"%.1f\" cy=\"%.1f\" r=\"4\"><title>step %lld: saturation "
            "%.2f %%</title></circle>",
            x(*row), y, static_cast<long long>(row->at("step").get<int64_t>()),
            100 * row->at("saturation").get<double>());
    }
    svg += format(
        "<text x=\"8\" y=\"%g\">%s</text><line class=\"grid\" x1=\"%g\" x2=\"%g\" "
        "y1=\"%g\" y2=\"%g\"/><polyline class=\"curve run0\" points=\"%s\"/>%s",
        base - 6, html_escape(order[i]).c_str(), kLeft, kLeft + kWide, base, base, points.c_str(),
        circles.c_str());
    svg += format("<text x=\"%g\" y=\"%g\">worst %.1f dB</text>\n", kLeft + kWide + 12, base - 6,
                  worst);
  }
  return svg + "</svg>\n";
}

}  // namespace tandem::apps
