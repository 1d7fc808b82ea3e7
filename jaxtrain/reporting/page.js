"use strict";
// The slider over the steps of the samples.
(() => {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (calm) for (const video of document.querySelectorAll("video")) video.autoplay = false;
  const slider = document.getElementById("sample-step");
  if (!slider) return;
  const steps = slider.dataset.steps.split(" ").map(Number);
  const figures = [...document.querySelectorAll("figure")].map((figure) => ({
    at: figure.querySelector(".at"),
    shown: [...figure.querySelectorAll("[data-step]")],
  }));
  document.getElementById("sample-controls").hidden = false;
  slider.value = slider.max; // a browser may restore an earlier position
  slider.addEventListener("input", () => show(steps[slider.value]));
  show(steps.at(-1));

  function show(step) {
    const text = step.toLocaleString("en-US");
    slider.setAttribute("aria-valuetext", `step ${text}`);
    document.querySelector("#sample-controls output").textContent = text;
    for (const { at, shown } of figures) {
      // The newest one up to this step: two runs may have been validated at different steps.
      const chosen = shown.findLast((one) => Number(one.dataset.step) <= step) || shown[0];
      at.textContent = Number(chosen.dataset.step).toLocaleString("en-US");
      for (const one of shown) {
        one.hidden = one !== chosen;
        if (one.tagName !== "VIDEO") continue;
        if (one.hidden) one.pause();
        else if (!calm) one.play();
      }
    }
  }
})();

// Draws the charts with Plotly. The rest of the page works without it.
(async () => {
  const nonce = document.currentScript.nonce;
  const data = JSON.parse(document.getElementById("data").textContent);
  const place = document.getElementById("charts");
  if (!data.charts.length) {
    document.querySelector(".controls").hidden = true;
    show("No metrics have been recorded yet.", "none");
    return;
  }
  try {
    await loadPlotly();
  } catch (error) {
    show(`The curves cannot be drawn: this page requires a browser from 2023 or later (${error}).`, "hint");
    return;
  }

  // zoom: the range of x on all charts, null for everything; resets: how often it was reset.
  const state = { over: "step", log: false, smooth: 0, zoom: null, resets: 0 };
  const shown = data.runs.map(() => true);
  const plots = data.charts.map(addChart);
  let drawing = false;
  let wanted = false;
  prepareControls();
  await drawAll();
  for (const plot of plots) {
    plot.on("plotly_relayout", (change) => {
      const zoom = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (zoom[0] !== undefined) set({ zoom });
    });
    plot.on("plotly_doubleclick", () => unzoom({}));
  }
  document.body.dataset.drawn = "yes";

  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", drawAll);
  }

  function show(text, kind) {
    const line = document.createElement("p");
    line.className = kind;
    line.textContent = text;
    place.append(line);
  }

  // The page contains the script gzipped. Evaluating it as text would require a weaker policy than a
  // nonce.
  async function loadPlotly() {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.nonce = nonce;
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    if (!window.Plotly) throw new Error("the script did not run");
  }

  function addChart(chart) {
    const box = document.createElement("div");
    const title = document.createElement("h3");
    const plot = document.createElement("div");
    box.className = "chart";
    title.textContent = chart.title;
    plot.className = "plot";
    plot.dataset.metric = chart.name;
    box.append(title, plot);
    place.append(box);
    return plot;
  }

  function prepareControls() {
    const over = document.getElementById("over");
    const possible = {
      examples: data.runs.some((run) => run.seen.some(([, , batch]) => batch > 0)),
      tokens: data.runs.some((run) => run.tokens),
    };
    for (const option of [...over.options]) {
      if (possible[option.value] === false) option.remove();
    }
    // A range of steps means nothing on a time axis.
    over.addEventListener("change", () => unzoom({ over: over.value }));
    const log = document.getElementById("log");
    log.addEventListener("change", () => set({ log: log.checked }));
    const smooth = document.getElementById("smooth");
    smooth.addEventListener("input", () => {
      smooth.nextElementSibling.textContent = smooth.value;
      set({ smooth: Number(smooth.value) });
    });
    for (const box of document.querySelectorAll("input[data-run]")) {
      box.addEventListener("change", () => {
        shown[box.dataset.run] = box.checked;
        drawAll();
      });
    }
  }

  function set(changes) {
    Object.assign(state, changes);
    drawAll();
  }

  function unzoom(changes) {
    set({ ...changes, zoom: null, resets: state.resets + 1 });
  }

  // One round at a time: a slider fires faster than many charts can be drawn.
  async function drawAll() {
    wanted = true;
    if (drawing) return;
    drawing = true;
    while (wanted) {
      wanted = false;
      const options = { responsive: true, displayModeBar: false, doubleClick: false };
      for (const [index, chart] of data.charts.entries()) {
        await Plotly.react(plots[index], traces(chart), layout(chart), options);
      }
    }
    drawing = false;
  }

  function traces(chart) {
    const single = data.runs.length === 1;
    const made = [];
    // Validation points last, so that they are drawn above the lines.
    const curves = [...chart.curves].sort((a, b) => a.kind.localeCompare(b.kind));
    for (const curve of curves) {
      if (!shown[curve.run]) continue;
      const validation = curve.kind === "val";
      const color = css(`--run-${(validation && single ? 1 : curve.run) % 8}`);
      const label = single ? curve.kind : `${data.runs[curve.run].label} ${curve.kind}`;
      const trace = { x: positions(curve), y: curve.value, name: label, type: "scatter" };
      trace.hovertemplate = `%{y:${chart.percent ? ".2%" : ".5g"}}<extra>${escaped(label)}</extra>`;
      if (validation) {
        trace.mode = "lines+markers";
        trace.line = { color, width: 1.2, dash: "dot" };
        trace.marker = { color, size: 7, line: { color: css("--page"), width: 1.5 } };
        made.push(trace);
        continue;
      }
      const few = curve.value.length === 1;
      trace.mode = few ? "markers" : "lines";
      trace.line = { color, width: 1.6 };
      trace.marker = { color, size: 5 };
      if (state.smooth > 0 && !few) {
        made.push({ ...trace, opacity: 0.25, hoverinfo: "skip", hovertemplate: null });
        made.push({ ...trace, y: smoothed(curve.value), line: { color, width: 2 } });
      } else {
        made.push(trace);
      }
    }
    return made;
  }

  function layout(chart) {
    const quiet = css("--quiet");
    const axis = {
      gridcolor: css("--line"),
      linecolor: css("--line"),
      zeroline: false,
      tickfont: { color: quiet, size: 11.5 },
      exponentformat: "SI",
    };
    const log = state.log && chart.log;
    const y = { ...axis, type: log ? "log" : "linear", nticks: 6, automargin: true };
    if (chart.percent) y.tickformat = "~%";
    if (chart.zero) y.rangemode = "tozero";
    if (chart.name === "learning_rate") y.exponentformat = "e";
    if (chart.unit) y.exponentformat = "none";
    y.uirevision = state.resets; // each chart keeps its own zoom of y
    const label = { text: title(), font: { color: quiet, size: 11.5 }, standoff: 6 };
    const x = { ...axis, title: label, nticks: 7, automargin: true };
    x.range = state.zoom || extent(); // the same range on all charts, for comparison
    x.uirevision = `${x.range}`;
    return {
      xaxis: x,
      yaxis: y,
      shapes: resumes(),
      margin: { l: 44, r: 8, t: 8, b: 38 },
      paper_bgcolor: css("--page"),
      plot_bgcolor: css("--page"),
      font: { family: getComputedStyle(document.body).fontFamily, color: css("--text") },
      showlegend: false,
      hovermode: "x unified",
      hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--line"), namelength: -1 },
      dragmode: "zoom",
    };
  }

  function title() {
    if (state.over === "time") return `wall time, ${timeUnit().name}`;
    return state.over === "step" ? "steps" : state.over;
  }

  function extent() {
    const ends = [];
    for (const chart of data.charts) {
      for (const curve of chart.curves) {
        const x = positions(curve);
        ends.push(x[0], x.at(-1));
      }
    }
    const known = ends.filter((x) => x !== null);
    if (!known.length) return [0, 1];
    const [first, last] = [Math.min(...known), Math.max(...known)];
    const edge = first === last ? Math.abs(first) / 2 || 1 : (last - first) * 0.025;
    return [first - edge, last + edge];
  }

  // A line at each step from which the run was resumed; ambiguous with several runs, so not drawn.
  function resumes() {
    if (data.runs.length > 1 || state.over === "time") return [];
    const line = { color: css("--quiet"), width: 1, dash: "dot" };
    return data.runs[0].resumes.map((step) => {
      const x = position(data.runs[0], step);
      return { type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line, opacity: 0.7 };
    });
  }

  function positions(curve) {
    if (state.over === "time") return curve.time.map((seconds) => seconds / timeUnit().seconds);
    return curve.step.map((step) => position(data.runs[curve.run], step));
  }

  function position(run, step) {
    if (state.over === "step") return step;
    const since = run.seen.findLast(([from]) => from <= step) || run.seen[0];
    if (!since) return null;
    const examples = since[1] + (step - since[0]) * since[2];
    return state.over === "tokens" ? (run.tokens ? examples * run.tokens : null) : examples;
  }

  function timeUnit() {
    let longest = 0;
    for (const chart of data.charts) {
      for (const curve of chart.curves) longest = Math.max(longest, curve.time.at(-1));
    }
    if (longest < 600) return { name: "seconds", seconds: 1 };
    return longest < 7200 ? { name: "minutes", seconds: 60 } : { name: "hours", seconds: 3600 };
  }

  // An exponential moving average without bias toward zero.
  function smoothed(values) {
    let sum = 0;
    let weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * state.smooth + value;
      weight = weight * state.smooth + 1;
      return sum / weight;
    });
  }

  function css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // Plotly interprets markup in labels.
  function escaped(text) {
    return text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);
  }
})();
