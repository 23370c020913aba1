#include "pipeline/picture.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <vector>

namespace tandem {

namespace {

using nlohmann::json;

std::string number_text(const char* format, double value) {
  char text[48];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

std::string bytes_text(int64_t bytes) {
  const auto size = static_cast<double>(bytes);
  if (size >= 1 << 20) return number_text("%.1f MiB", size / (1 << 20));
  if (size >= 1 << 10) return number_text("%.1f KiB", size / (1 << 10));
  return std::to_string(bytes) + " B";
}

/// The text cut to `most` bytes, between characters of UTF-8.
std::string clipped(std::string text, size_t most) {
  if (text.size() <= most) return text;
  size_t end = most - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

using Id = int64_t;

struct DrawnNode {
  enum Kind { step, fused, argument, result } kind;
  std::string name, title, detail, time;
  /// Share of all measured time.
  double share = 0;
  /// Arguments that the step reads.
  std::vector<std::string> arguments = {};
};

struct Edge {
  enum Kind { flow, kept, argument } kind;
  std::string from, to;
  Id value;
};

/// A plan as nodes and edges. Steps are named f0, f1, ... and b0, b1, ...
class Graph {
 public:
  Graph(const json& plan, const StepTimes& times) : plan_(plan) {
    for (const json& kept : plan.value("kept", json::array()))
      if (kept.at("costs_memory").get<bool>())
        kept_bytes_[kept.at("id").get<Id>()] = kept.at("bytes").get<int64_t>();
    double total = 0;
    for (const char* direction : {"forward", "backward"})
      for (const json& step : steps(direction)) total += time_of(step, times);
    add_arguments("inputs", "in");
    add_arguments("params", "p");
    add_steps("forward", "f", times, total);
    add_results("outputs", "y");
    if (plan.contains("backward")) {
      in_backward_ = true;
      add_arguments("output_gradients", "gy");
      add_steps("backward", "b", times, total);
      add_results("gradients", "g");
    }
  }

  const std::vector<DrawnNode>& nodes() const { return nodes_; }
  const std::vector<Edge>& edges() const { return edges_; }

  std::string name(Id value) const { return field(value, "name"); }
  std::string type(Id value) const { return field(value, "type"); }
  /// The bytes of a kept value, if a call has noted them; else empty.
  std::string bytes(Id value) const {
    const auto known = kept_bytes_.find(value);
    return known == kept_bytes_.end() || known->second == 0 ? "" : bytes_text(known->second);
  }

 private:
  json steps(const char* direction) const { return plan_.value(direction, json::array()); }

  std::string field(Id value, const char* which) const {
    return plan_.at("values").at(std::to_string(value)).at(which).get<std::string>();
  }

  static double time_of(const json& step, const StepTimes& times) {
    const auto known = times.find(step.at("kind").get<std::string>());
    return known == times.end() ? 0 : known->second;
  }

  void add_arguments(const char* list, const char* prefix) {
    size_t next = 0;
    for (const json& id : plan_.at(list)) {
      const std::string node = prefix + std::to_string(next++);
      if (id.is_null()) continue;
      const Id value = id.get<Id>();
      nodes_.push_back({DrawnNode::argument, node, name(value), type(value), ""});
      writer_[value] = node;
      arguments_.insert(value);
    }
  }

  void add_steps(const char* direction, const char* prefix, const StepTimes& times, double total) {
    size_t next = 0;
    for (const json& step : steps(direction)) {
      const std::string node = prefix + std::to_string(next++);
      const bool is_fused = step.at("fused").get<bool>();
      const double time = time_of(step, times);
      DrawnNode made{is_fused ? DrawnNode::fused : DrawnNode::step,
                     node,
                     step.at("kind").get<std::string>(),
                     is_fused ? "replaces " + joined(step.at("covers"), " + ") : "",
                     time > 0 ? number_text(time < 10 ? "%.2f us" : "%.1f us", time) : "",
                     total > 0 ? time / total : 0};
      if (const std::string by = joined(step.at("implementations")); !by.empty())
        made.title += " by " + by;
      std::set<Id> seen;
      for (const char* field : {"read_ids", "mutated_ids"})
        for (const json& id : step.at(field)) {
          const Id value = id.get<Id>();
          const auto writer = writer_.find(value);
          if (writer == writer_.end() || !seen.insert(value).second) continue;
          const bool is_argument = arguments_.contains(value);
          if (is_argument) made.arguments.push_back(name(value) + " " + type(value));
          const bool crosses = in_backward_ && !written_in_backward_.contains(value);
          const bool is_gradient = writer->second.starts_with("gy");
          edges_.push_back(
              {crosses && !is_gradient ? (is_argument ? Edge::argument : Edge::kept) : Edge::flow,
               writer->second, node, value});
        }
      for (const json& id : step.at("write_ids")) {
        writer_[id.get<Id>()] = node;
        arguments_.erase(id.get<Id>());
        if (in_backward_) written_in_backward_.insert(id.get<Id>());
      }
      nodes_.push_back(std::move(made));
    }
  }

  void add_results(const char* list, const char* prefix) {
    size_t next = 0;
    for (const json& id : plan_.at(list)) {
      const std::string node = prefix + std::to_string(next++);
      if (id.is_null() || !writer_.contains(id.get<Id>())) continue;
      const Id value = id.get<Id>();
      nodes_.push_back({DrawnNode::result, node, name(value), type(value), ""});
      edges_.push_back({Edge::flow, writer_.at(value), node, value});
    }
  }

  const json& plan_;
  std::vector<DrawnNode> nodes_;
  std::vector<Edge> edges_;
  std::map<Id, std::string> writer_;
  std::map<Id, int64_t> kept_bytes_;
  std::set<Id> arguments_, written_in_backward_;
  bool in_backward_ = false;
};

bool is_step(const std::string& name) {
  return name.size() > 1 && (name[0] == 'f' || name[0] == 'b') && name[1] >= '0' && name[1] <= '9';
}
/// Backward is drawn upwards.
bool goes_up(const std::string& name) { return name[0] == 'b' || name[0] == 'g'; }

/// Boxes in two columns, with kept values between them.
class Drawing {
 public:
  Drawing(const Graph& graph) : graph_(graph) {
    int columns[2] = {0, 0};
    for (const DrawnNode& node : graph.nodes())
      if (is_step(node.name)) ++columns[node.name[0] == 'b'];
    const int rows = std::max({columns[0], columns[1], 1});
    int next[2] = {rows - columns[0], rows - 1};
    for (const DrawnNode& node : graph.nodes()) {
      if (!is_step(node.name)) continue;
      const bool backward = node.name[0] == 'b';
      boxes_[node.name] = {backward ? kRight : kLeft, kTop + next[backward] * kPitch};
      next[backward] += backward ? -1 : 1;
    }
    height_ = kTop + rows * kPitch + 20;
  }

  std::string run() {
    for (const DrawnNode& node : graph_.nodes())
      if (is_step(node.name)) box(node);
    flows();
    kept();
    text(kLeft, 30, "h", "forward, downwards", 40);
    text(kRight, 30, "h", "backward, upwards", 40);
    text(kLeft + kWidth + 50, 30, "h", "kept", 40);
    constexpr int kAll = kRight + kWidth + 60;
    std::ostringstream svg;
    svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kAll << ' ' << height_
        << "\" width=\"" << kAll << "\" height=\"" << height_
        << "\" font-family=\"sans-serif\" font-size=\"12\"><style>.box{fill:#eef3fb;stroke:#4a6fa5}"
           ".fused{fill:#e3f4e4;stroke:#3d8b40}.kept{fill:#fdf3e1;stroke:#c98a1b}"
           ".t{fill:#1b1b1b}.s{fill:#555;font-size:10px}.h{fill:#777;font-size:14px}"
           ".time{fill:#a3362b;text-anchor:end}"
           ".a{stroke:#888;fill:none;marker-end:url(#m)}.k{stroke:#c98a1b;fill:none;"
           "stroke-dasharray:4 3;marker-end:url(#m)}</style><defs><marker id=\"m\" viewBox=\"0 0 "
           "8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\"><path "
           "d=\"M0 0L8 4L0 8z\" fill=\"#888\"/></marker></defs>"
        << drawn_.str() << "</svg>";
    return svg.str();
  }

 private:
  static constexpr int kWidth = 330, kBox = 50, kPitch = 88, kLeft = 60, kMiddle = 250, kTop = 60,
                       kRight = kLeft + kWidth + kMiddle, kItem = 30;
  struct Place {
    int x, y;
  };

  void text(int x, int y, const char* style, const std::string& text, size_t most) {
    drawn_ << "<text class=\"" << style << "\" x=\"" << x << "\" y=\"" << y << "\">"
           << escaped(clipped(text, most)) << "</text>";
  }

  void box(const DrawnNode& node) {
    const auto [x, y] = boxes_.at(node.name);
    drawn_ << "<rect class=\"" << (node.kind == DrawnNode::fused ? "fused" : "box") << "\" x=\""
           << x << "\" y=\"" << y << "\" width=\"" << kWidth << "\" height=\"" << kBox
           << "\" rx=\"6\"/>";
    text(x + 10, y + 17, "t", node.title, node.time.empty() ? 48 : 38);
    if (!node.time.empty()) text(x + kWidth - 10, y + 17, "t time", node.time, 16);
    std::string with;
    for (const std::string& argument : node.arguments)
      with += (with.empty() ? "with " : ", ") + argument;
    text(x + 10, y + 31, "s", node.detail.empty() ? with : node.detail, 58);
    if (!node.detail.empty()) text(x + 10, y + 44, "s", with, 58);
  }

  /// Draws flows between steps of one direction: straight to the next step, around steps between.
  void flows() {
    std::map<std::pair<std::string, std::string>, std::string> labels;
    for (const Edge& edge : graph_.edges())
      if (edge.kind == Edge::flow && boxes_.contains(edge.from) && boxes_.contains(edge.to)) {
        std::string& label = labels[{edge.from, edge.to}];
        label +=
            (label.empty() ? "" : ", ") + graph_.name(edge.value) + " " + graph_.type(edge.value);
      }
    int lane = 0;
    for (const auto& [ends, label] : labels) {
      const Place from = boxes_.at(ends.first), to = boxes_.at(ends.second);
      const bool up = goes_up(ends.first);
      const int y1 = up ? from.y : from.y + kBox, y2 = up ? to.y + kBox : to.y;
      if (std::abs(to.y - from.y) == kPitch) {
        const int x = from.x + kWidth / 2;
        drawn_ << "<path class=\"a\" d=\"M" << x << ' ' << y1 << "V" << y2 << "\"/>";
        text(x + 8, (y1 + y2) / 2 + 4, "s", label, 34);
      } else {
        const int side = up ? from.x + kWidth : from.x,
                  away = (up ? 1 : -1) * (14 + 8 * (lane++ % 4));
        drawn_ << "<path class=\"a\" d=\"M" << side << ' ' << from.y + kBox / 2 << "C"
               << side + 2 * away << ' ' << from.y + kBox / 2 << ' ' << side + 2 * away << ' '
               << to.y + kBox / 2 << ' ' << side << ' ' << to.y + kBox / 2 << "\"><title>"
               << escaped(label) << "</title></path>";
      }
    }
  }

  void kept() {
    struct Item {
      Id value;
      std::string from;
      std::vector<std::string> to;
      int y;
    };
    std::vector<Item> items;
    for (const Edge& edge : graph_.edges()) {
      if (edge.kind != Edge::kept) continue;
      auto known = std::ranges::find(items, edge.value, &Item::value);
      if (known == items.end()) known = items.insert(known, {edge.value, edge.from, {}, 0});
      known->to.push_back(edge.to);
    }
    for (Item& item : items) item.y = boxes_.at(item.from).y + 10;
    std::ranges::stable_sort(items, {}, &Item::y);
    int least = kTop;
    for (Item& item : items) {
      item.y = std::max(item.y, least);
      least = item.y + kItem + 8;
      constexpr int kX = kLeft + kWidth + 50, kWide = kMiddle - 100;
      const std::string bytes = graph_.bytes(item.value);
      drawn_ << "<rect class=\"kept\" x=\"" << kX << "\" y=\"" << item.y << "\" width=\"" << kWide
             << "\" height=\"" << kItem << "\" rx=\"4\"/>";
      text(kX + 6, item.y + 13, "s", graph_.name(item.value), 26);
      text(kX + 6, item.y + 25, "s", graph_.type(item.value) + (bytes.empty() ? "" : ", " + bytes),
           28);
      curve({kLeft + kWidth, boxes_.at(item.from).y + kBox / 2}, {kX, item.y + kItem / 2});
      for (const std::string& to : item.to)
        curve({kX + kWide, item.y + kItem / 2}, {kRight, boxes_.at(to).y + kBox / 2});
    }
    height_ = std::max(height_, least + 10);
  }

  void curve(Place from, Place to) {
    const int middle = (from.x + to.x) / 2;
    drawn_ << "<path class=\"k\" d=\"M" << from.x << ' ' << from.y << "C" << middle << ' ' << from.y
           << ' ' << middle << ' ' << to.y << ' ' << to.x << ' ' << to.y << "\"/>";
  }

  const Graph& graph_;
  std::map<std::string, Place> boxes_;
  std::ostringstream drawn_;
  int height_ = 0;
};

/// The color of a step: the stronger, the larger its share of the time.
std::string fill_of(const DrawnNode& node) {
  if (node.share > 0) {
    const int strength = static_cast<int>(std::min(node.share, 0.5) * 2 * 150);
    char color[8];
    std::snprintf(color, sizeof(color), "#ff%02x%02x", 240 - strength, 230 - strength);
    return color;
  }
  return node.kind == DrawnNode::fused ? "#e3f4e4" : "#eef3fb";
}

}  // namespace

std::string joined(const json& texts, const char* separator) {
  return c10::Join(separator, texts.get<std::vector<std::string>>());
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '&':
        result += "&amp;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:  // characters that XML does not allow
        result += static_cast<unsigned char>(c) < ' ' && c != '\n' ? ' ' : c;
    }
  }
  return result;
}

std::string plan_svg(const json& plan, const StepTimes& times) {
  const Graph graph(plan, times);
  return Drawing(graph).run();
}

std::string plan_dot(const json& plan, const StepTimes& times) {
  const Graph graph(plan, times);
  std::ostringstream dot;
  dot << "digraph plan {\n"
         "  graph [fontname=\"Helvetica\", nodesep=0.35, ranksep=0.45, pad=0.3]\n"
         "  node [fontname=\"Helvetica\", fontsize=11, shape=plain]\n"
         "  edge [fontname=\"Helvetica\", fontsize=9, color=\"#66708a\", fontcolor=\"#44506a\"]\n";
  const auto cluster = [&](const char* name, const char* label, auto&& is_member) {
    dot << "  subgraph cluster_" << name << " {\n    label=\"" << label
        << "\"; color=\"#c8cfdd\"; fontcolor=\"#777777\"; style=rounded\n";
    for (const DrawnNode& node : graph.nodes()) {
      if (!is_member(node.name)) continue;
      const bool is_box = node.kind == DrawnNode::step || node.kind == DrawnNode::fused;
      dot << "    " << node.name << " [label=<<table border=\"0\" cellborder=\"" << (is_box ? 1 : 0)
          << "\" cellspacing=\"0\" cellpadding=\"5\"><tr><td"
          << (is_box ? " style=\"rounded\" bgcolor=\"" + fill_of(node) + "\"" : "") << ">"
          << (is_box ? "<b>" : "") << escaped(node.title) << (is_box ? "</b>" : "");
      const char* const small = "<br/><font point-size=\"9\" color=\"#555555\">";
      if (!node.detail.empty()) dot << small << escaped(node.detail) << "</font>";
      if (!node.time.empty())
        dot << "<br/><font point-size=\"10\" color=\"#a3362b\">" << node.time << "</font>";
      dot << "</td></tr></table>>]\n";
    }
    dot << "  }\n";
  };
  cluster("forward", "forward", [](const std::string& name) { return !goes_up(name); });
  if (plan.contains("backward")) cluster("backward", "backward (upwards)", goes_up);
  for (const Edge& edge : graph.edges()) {
    std::string quoted;
    for (const char c : graph.name(edge.value)) {
      if (c == '"' || c == '\\') quoted += '\\';
      quoted += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
    quoted += "\\n" + graph.type(edge.value);
    if (const std::string bytes = graph.bytes(edge.value);
        edge.kind == Edge::kept && !bytes.empty())
      quoted += ", " + bytes;
    const bool is_end = !is_step(edge.from) || !is_step(edge.to);  // the node names the value
    if (edge.kind != Edge::flow) {
      dot << "  " << edge.from << " -> " << edge.to << " [constraint=false, style=dashed, color=\""
          << (edge.kind == Edge::kept ? "#c98a1b\", penwidth=1.4, label=\"" + quoted : "#c4c9d4")
          << "\"]\n";
    } else {
      const bool up = goes_up(edge.to);
      dot << "  " << (up ? edge.to : edge.from) << " -> " << (up ? edge.from : edge.to) << " ["
          << (up ? "dir=back, " : "") << "label=\"" << (is_end ? "" : quoted) << "\"]\n";
    }
  }
  dot << "}\n";
  return dot.str();
}

}  // namespace tandem
