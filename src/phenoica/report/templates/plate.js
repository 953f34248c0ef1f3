"use strict";
(() => {
  const data = JSON.parse(document.getElementById("plate-data").textContent);
  const symbols = {
    negative: ["square-open", "#ffffff", "#000000", "negative control"],
    positive: ["diamond-open", "#ffffff", "#000000", "positive control"],
    cutting: ["circle-open", "#ffffff", "#000000", "cutting control"],
  };
  const columns = Array.from({length: data.columns}, (_, i) => i + 1);
  const grid = (values, empty) => {
    const cells = data.row_names.map(() => columns.map(() => empty));
    data.wells.forEach((well, i) => { cells[well.row - 1][well.column - 1] = values[i]; });
    return cells;
  };
  const marks = (wells, symbol, color, width, size, name, show) => ({
    type: "scatter", mode: "markers", name, showlegend: show, hoverinfo: "skip",
    x: wells.map(w => w.column), y: wells.map(w => data.row_names[w.row - 1]),
    marker: {symbol, size, color, line: {color, width}},
  });
  const overlays = () => {
    const traces = [];
    for (const [control, [symbol, inner, outer, name]] of Object.entries(symbols)) {
      const wells = data.wells.filter(w => w.control === control);
      if (!wells.length) continue;
      // a dark mark with a light one on top is seen on every colour of the scale
      traces.push({...marks(wells, symbol, outer, 3.5, 11, name, true), legendgroup: control});
      traces.push({...marks(wells, symbol, inner, 1.2, 11, name, false), legendgroup: control});
    }
    const bad = data.wells.filter(w => w.acquisition);
    if (bad.length) {
      traces.push({...marks(bad, "x-thin", "#000000", 4, 10, "acquisition flag", false), legendgroup: "flag"});
      traces.push({...marks(bad, "x-thin", "#ff3b30", 2, 10, "acquisition flag", true), legendgroup: "flag"});
    }
    return traces;
  };
  const draw = (map, element, k) => {
    const measure = map.measures[k];
    const text = data.wells.map((w, i) => `${w.hover}<br><b>${measure.label}: ${measure.text[i]}</b>`);
    const heat = {
      type: "heatmap", x: columns, y: data.row_names, z: grid(measure.values, null), text: grid(text, ""),
      hovertemplate: "%{text}<extra></extra>", hoverongaps: false, colorscale: map.colorscale, xgap: 1, ygap: 1,
      zmin: measure.low, zmax: measure.high, showscale: map.id !== "map-layout", colorbar: {title: {text: measure.unit, side: "right"}, thickness: 16},
    };
    const tick = {fixedrange: true, showgrid: false, zeroline: false, ticks: "", constrain: "domain"};
    const layout = {
      height: data.height, margin: {l: 40, r: 10, t: 30, b: 50}, plot_bgcolor: "#d4d4d4", paper_bgcolor: "#ffffff",
      font: {size: 13}, legend: {orientation: "h", y: -0.03, yanchor: "top", x: 0, font: {size: 13}},
      xaxis: {...tick, side: "top", range: [0.5, data.columns + 0.5], tickvals: columns.filter(c => c === 1 || c % data.column_step === 0)},
      yaxis: {...tick, range: [data.row_names.length - 0.5, -0.5], tickvals: data.row_names.filter((_, r) => r % data.row_step === 0)},
      hoverlabel: {align: "left", font: {size: 14}},
    };
    return Plotly.react(element, [heat, ...overlays()], layout, {displaylogo: false, responsive: true, displayModeBar: false});
  };
  for (const map of data.maps) {
    const element = document.getElementById(map.id);
    const select = document.getElementById(`${map.id}-select`);
    draw(map, element, 0);
    if (select) select.addEventListener("change", () => draw(map, element, Number(select.value)));
  }
})();
