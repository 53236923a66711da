// Keys, the colour of tokens, curves. Every page works without it, but for the curves.
"use strict";

const byId = (id) => document.getElementById(id);
const rows = () => [...document.querySelectorAll("tr.row")];
const follow = (selector) => document.querySelector(selector)?.click();

function step(by) {
  const all = rows(), at = all.indexOf(document.activeElement?.closest("tr.row"));
  const row = all[Math.min(Math.max(at + by, 0), all.length - 1)];
  row?.focus();
  row?.scrollIntoView({ block: "nearest" });
}

function showColour(name) {
  byId("tokens").className = `colour-${name}`;
  for (const button of document.querySelectorAll("[data-colour]")) button.setAttribute("aria-pressed", button.dataset.colour === name);
  for (const legend of document.querySelectorAll("#colours .legend")) legend.style.display = legend.classList.contains(name) ? "inline" : "none";
}

function chooseColour(name) {
  showColour(name);
  const url = new URL(location.href);
  url.searchParams.set("colour", name); // the address stays a link to what is seen
  history.replaceState(null, "", url);
  for (const link of document.querySelectorAll(".steps a")) link.search = url.search;
}

const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  u: () => follow("a[rel=up]"),
  ArrowLeft: () => follow("a[rel=prev]"),
  ArrowRight: () => follow("a[rel=next]"),
  "/": () => byId("search").focus(),
  "?": () => byId("help").showModal(),
  c: () => {
    const names = [...document.querySelectorAll("[data-colour]")].map((button) => button.dataset.colour);
    const now = names.findIndex((name) => byId("tokens").classList.contains(`colour-${name}`));
    if (names.length) chooseColour(names[(now + 1) % names.length]);
  },
  Enter: () => document.activeElement?.matches("tr.row") && document.activeElement.querySelector("a.open").click(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (KEYS[event.key] && !(event.key === "Enter" && !event.target.matches("tr.row"))) {
    event.preventDefault();
    KEYS[event.key]();
  }
});

const range = (ends) => (ends ? { range: ends } : {});

function wholeSteps(series) { // few iterations: a tick each, and none between them
  const all = series.flatMap((one) => one.x);
  return Math.max(...all) - Math.min(...all) < 10 ? { dtick: 1 } : {};
}

function draw(plot, place) {
  const traces = plot.series.map((series) => ({
    x: series.x, y: series.y, name: series.name, customdata: series.x.map((x) => (series.link ? series.link + x : "")),
    mode: series.x.length > 60 ? "lines" : "lines+markers", marker: { size: series.x.length === 1 ? 8 : 4 }, line: { width: 1.5 },
  }));
  const layout = {
    title: { text: plot.title, font: { size: 13 }, y: 0.98, yanchor: "top" }, margin: { l: 45, r: 10, t: traces.length > 1 ? 50 : 30, b: 35 }, showlegend: traces.length > 1,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    xaxis: { title: { text: plot.x_title, font: { size: 11 } }, tickformat: "d", zeroline: false, ...range(plot.x_range), ...wholeSteps(plot.series) },
    yaxis: range(plot.y_range), font: { size: 11 }, hovermode: "closest",
  };
  Plotly.newPlot(place, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  place.on("plotly_click", ({ points }) => { if (points[0].customdata) location = points[0].customdata; });
}

for (const plots of document.querySelectorAll("[data-plots]")) {
  for (const plot of JSON.parse(plots.dataset.plots)) draw(plot, plots.appendChild(document.createElement("div")));
  plots.dataset.drawn = "yes";
}
byId("keys").addEventListener("click", KEYS["?"]);
for (const button of document.querySelectorAll("[data-colour]")) button.addEventListener("click", () => chooseColour(button.dataset.colour));
if (byId("tokens")) showColour(byId("tokens").className.replace("colour-", ""));
